"""The page on the models, and the results beside it, of which it is written."""

import csv
import re

from tests.zoo.catalog import FIXED, REFUSED, ROWS, RULE, TRAINS
from tests.zoo.example import BATCH_SIZE
from tests.zoo.trial import SMALL, Result

NOT_RUN, FAILED = "not run yet", "failed"

_BEGINNING = """\
# Models that were tried

Models of many kinds, small and with random weights, on random data: which of them train privately,
what [engine](../explanation/layers.md) serves them, and what a private step costs. One command
builds and trains each in a process of its own, and writes this page:

```sh
python -m tests.zoo --output docs/reference/models.md
```

With names of models it runs those again, with `--only-missing` those that have no result, and with
`--rewrite` none. The figures are in `docs/reference/models/results.csv` as they came. Each model is
a function in `tests/zoo/`, and what is expected of it a line of `tests/zoo/catalog.py`: the command
fails where anything else comes of it.

- **result**: "after fix" was refused for its batch normalization, and trained once
  [`clipping.fix`](../how_to/batch_norm.md) had exchanged it. Keras's times are those of the model
  as it was.
- **engines**: how many layers are served by their rule, and which are run one example at a time.
- **step**: milliseconds of a step of Keras, of a private one, and their ratio, on {rows} rows;
  medians of up to 20 steps. Of small models they show what a step costs at least; of large ones,
  the noise, one number for each weight, counts for more than in batches of the usual size.
- **first step**: seconds from `compile` to the end of the first step, in which the graph is traced;
  a private model is also checked, once. It comes before that of Keras, in the same process.
- **error**: of a clipped sum, against the gradients of one example at a time, relative to the
  largest entry. Models of less than {small:,} weights that draw no random numbers have one.

Two CPU cores, shared with other work: the figures are no more than indicative, and
[benchmarks](benchmarks.md) has better ones. Versions: {versions}.
"""


def read(path):
    """The stored results by name; those of models that the zoo has no longer are left out."""
    if not path.exists():
        return {}
    with open(path, newline="", encoding="utf-8") as file:
        rows = [_typed(row) for row in csv.DictReader(file)]
    return {row.name: row for row in rows if row.name in ROWS}


def _typed(row):
    kinds = {name: kind for name, kind in Result.__annotations__.items() if kind is not str}
    for name, kind in kinds.items():
        row[name] = (int if kind == (int | None) else float)(row[name]) if row[name] else None
    return Result(**row)


def write(page, results):
    """Writes the page, and the results into the folder of its name."""
    folder = page.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    results = [results.get(name, Result(name, NOT_RUN)) for name in ROWS]
    with open(folder / "results.csv", "w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(Result._fields)
        lines.writerows(results)
    page.write_text(text(results), encoding="utf-8")


def text(results):
    """The page on these results."""
    versions = sorted({part for r in results for part in r.versions.split(", ") if part})
    beginning = _BEGINNING.format(
        rows=BATCH_SIZE, small=SMALL, versions=", ".join(versions) or "none yet"
    )
    parts = [
        beginning,
        *_tables(results),
        _refusals(results),
        _failures(results),
        _missing(results),
    ]
    return "\n".join(part for part in parts if part)


def _tables(results):
    """One table a family of those that train."""
    columns = (
        "model", "weights", "result", "engines", "step: Keras → private, ms (×)",
        "first step: Keras → private, s", "error",
    )  # fmt: skip
    by_family = {}
    for result in results:
        if result.outcome in (TRAINS, FIXED):
            by_family.setdefault(ROWS[result.name].family, []).append(_cells(result))
    for family, cells in by_family.items():
        yield _section(family, "", columns, cells)


def _cells(r):
    ratio = r.private_milliseconds / r.keras_milliseconds
    return (
        f"`{r.name}`",
        f"{r.weights:,}",
        {TRAINS: "trains", FIXED: "after fix"}[r.outcome],
        "; ".join(sorted(r.engines.split("; "), key=lambda part: not part.endswith(f" {RULE}"))),
        f"{r.keras_milliseconds:.1f} → {r.private_milliseconds:.1f} ({ratio:.2f})",
        f"{r.keras_first_seconds:.1f} → {r.private_first_seconds:.1f}",
        "" if r.error is None else f"{r.error:.0e}",
    )


def _refusals(results):
    cells = [
        (f"`{r.name}`", ROWS[r.name].family, _plain(r.message))
        for r in results
        if r.outcome == REFUSED
    ]
    intro = "In each of these the gradient of one example depends on others, or cannot be told.\n\n"
    return _section("Refused", intro, ("model", "of", "why, and what to do instead"), cells)


def _failures(results):
    cells = [(f"`{r.name}`", _plain(r.message)) for r in results if r.outcome == FAILED]
    return _section("Failed", "", ("model", "how"), cells)


def _missing(results):
    names = ", ".join(f"`{r.name}`" for r in results if r.outcome == NOT_RUN)
    return f"## Not run yet\n\n{names}\n" if names else ""


def _section(title, intro, columns, cells):
    if not cells:
        return ""
    lines = [columns, ["---"] * len(columns), *cells]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"## {title}\n\n{intro}{table}\n"


def _plain(message):
    """A message as it is, whatever Markdown takes its characters for."""
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", message)
