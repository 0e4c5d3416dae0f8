"""What every experiment of this folder takes and writes: its options, a table, and a verdict."""

import argparse
import csv
import pathlib

import numpy as np


def parser(module_doc, name):
    """The options that all experiments share; results go to output/papers/`name` by default."""
    options = argparse.ArgumentParser(
        description=module_doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--quick", action="store_true", help="a minute's worth, to try it out")
    options.add_argument("--seed", type=int, default=0, help="of data and initial weights")
    options.add_argument("--output", type=pathlib.Path, default=pathlib.Path("output/papers", name))
    return options


def mean_and_error(values, axis=0):
    """Mean over repetitions, and the standard error of that mean."""
    values = np.asarray(values, np.float64)
    count = values.shape[axis]
    spread = values.std(axis=axis, ddof=1) if count > 1 else np.full_like(values.mean(axis), np.nan)
    return values.mean(axis=axis), spread / np.sqrt(count)


def seen(gain, error):
    """Whether a gain was: more than 2 standard errors decide."""
    if abs(gain) > 2 * error:
        return "seen" if gain > 0 else "contradicted"
    return "not told apart"


def remembered(path, key, compute):
    """The row of a run: from the table in `path`, or else computed and added to it.

    Args:
        path: a CSV file. An experiment that was interrupted goes on with what it holds.
        key: a dict, the columns that tell runs apart.
        compute: function without arguments that returns a dict, the other columns; one is "test".

    Returns:
        A dict of strings.
    """
    key = {name: str(value) for name, value in key.items()}
    with open(path, "a+", newline="", encoding="utf-8") as file:
        file.seek(0)
        rows = list(csv.DictReader(file))
        row = next((row for row in rows if key.items() <= row.items()), None)
        if row is None:
            row = key | {name: str(value) for name, value in compute().items()}
            writer = csv.DictWriter(file, row)
            if not rows:
                writer.writeheader()
            writer.writerow(row)
            print(", ".join(f"{name} {row[name]}" for name in (*key, "test")), flush=True)
    return row


def write(folder, name, rows, claim, seen):
    """Writes `rows` as `name`.csv and `name`.md, the latter with claim and verdict, and prints it.

    Args:
        folder: where to.
        name: of the files.
        rows: a list of dicts with the same keys, the columns.
        claim: what the paper says, in a sentence.
        seen: whether this run shows it, in words.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{name}.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    lines = [list(rows[0]), ["---"] * len(rows[0])]
    lines += [[_short(value) for value in row.values()] for row in rows]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    text = f"{table}\n\nClaim: {claim}\n\nSeen here: {seen}\n"
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    print(f"\n{text}\nWrote {name}.csv and {name}.md to {folder}.")


def _short(value):
    return f"{value:.4g}" if isinstance(value, float) else str(value)
