"""Runs as rows of a CSV file: each is written as it ends, and what is there is not run again."""

import csv
import time


def rows(path):
    """The rows of the file, as dicts of strings; none if there is no file."""
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def completed(path, names, settings, run):
    """Runs what the file lacks, and says how long it will take.

    Args:
        path: of the CSV file, whose folder is made.
        names: of the columns that tell one run from another.
        settings: the values of these columns, a tuple a run.
        run: function of one setting that returns a dict of what else is written of the run.

    Returns:
        The rows of all these settings, in their order.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    known = {tuple(row[name] for name in names): row for row in rows(path)}
    settings = {tuple(map(_text, setting)): setting for setting in settings}
    missing = [key for key in settings if key not in known]
    begun = time.monotonic()
    for number, key in enumerate(missing):
        minutes = (time.monotonic() - begun) / 60
        left = f", about {minutes / number * (len(missing) - number):.0f} minutes" if number else ""
        print(f"{path.name}: {len(missing) - number} of {len(settings)} runs left{left}; "
              f"now {', '.join(key)}", flush=True)  # fmt: skip
        found = {name: _text(value) for name, value in run(*settings[key]).items()}
        known[key] = dict(zip(names, key, strict=True)) | found
        _append(path, known[key])
    return [known[key] for key in settings]


def _append(path, row):
    """Adds a row, whose values go by the names in the first line; other names are an error."""
    with open(path, "a+", newline="", encoding="utf-8") as file:
        file.seek(0)
        known = next(csv.reader(file), None)
        writer = csv.DictWriter(file, known or list(row))
        if not known:
            writer.writeheader()
        writer.writerow(row)


def _text(value):
    return f"{value:.6g}" if isinstance(value, float) else str(value)
