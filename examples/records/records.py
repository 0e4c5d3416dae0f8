"""What all records share: the rule by which settings are chosen, the runs, the table, the picture.

The rule, fixed before any run. Some examples of the training set, drawn by seed 0, are declared
public; what is left is the private training set. Settings (a Halton sequence over the ranges of
the script) are tried on the public examples alone, by folds: trained on all but one, judged on that
one, with the sampling probability, the number of steps, and the noise *relative to the batch* of
the private run, so that what is found is right for that run. The best mean is chosen (or, where a
script says so, of what is not told apart from it the highest rate), at each ε anew; only then is
anything trained on the private examples, and only for the record is the test set read.
A second column, marked as such, does as most of the literature: all training examples are
private, and the test set chooses.
"""

import argparse
import functools
import json
import pathlib
import sys

import keras
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

import dp_keras_opt as dp

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import results

HERE = pathlib.Path(__file__).resolve().parent
OURS, BY_TEST = "dp-keras-opt", "dp-keras-opt, settings chosen on the test set"


def published(benchmark):
    """What others report for the same data: rows of `published.csv`."""
    return [row for row in results.rows(HERE / "published.csv") if row["benchmark"] == benchmark]


def options(description, name, epsilons):
    """The command line that all scripts share."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epsilons", nargs="+", type=float, default=epsilons)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--trials", type=int, default=16, help="settings tried at each ε")
    parser.add_argument("--quick", action="store_true", help="little of everything, to try it out")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("output/records", name))
    return parser


def public_and_private(count, public):
    """Places of the public examples, and of the private ones."""
    order = np.random.default_rng(0).permutation(count)
    return order[:public], order[public:]


def at(rows, places):
    """The rows at these places, of each array."""
    return keras.tree.map_structure(lambda values: values[places], rows)


def fold_of(rows, fold, folds):
    """All but one of the folds, and that one."""
    count = len(keras.tree.flatten(rows)[0])
    is_left_out = np.arange(count) % folds == fold
    return at(rows, ~is_left_out), at(rows, is_left_out)


@functools.cache
def noise(rows, batch_size, steps, epsilon, delta, accountant="auto"):
    """The noise multiplier of a private training with independent noise and Poisson batches."""
    optimizer = dp.optimizers.DPSGD(1.0, clip_norm=1.0, batch_size=batch_size)
    sampling = dp.accounting.Sampling.poisson(rows, batch_size)
    return dp.accounting.calibrate(
        optimizer, sampling, steps, epsilon, delta, accountant=accountant
    )


def accuracy(model, rows):
    """In percent."""
    x, y = rows
    return 100 * float(np.mean(model.predict(x, batch_size=1000, verbose=0).argmax(1) == y))


def chosen(path, run, epsilons, settings, folds, better=max, highest=None):
    """The best setting at each ε.

    Args:
        path: of the CSV file of all trials.
        run: function of (epsilon, values, fold) that returns a score.
        epsilons: the budgets.
        settings: dicts of values.
        folds: how many.
        better: `max` or `min`.
        highest: None, or the name of a value: of the settings that are within one standard error of
            the best, fold by fold, that with the highest is chosen.

    Returns:
        A dict from ε to values.
    """
    every = [
        (epsilon, json.dumps(values), fold)
        for epsilon in epsilons
        for values in settings
        for fold in range(folds)
    ]
    rows = results.completed(
        path, ("epsilon", "values", "fold"), every,
        lambda epsilon, values, fold: {"score": run(epsilon, json.loads(values), fold)},
    )  # fmt: skip
    scores = {}
    for row in rows:
        scores.setdefault(float(row["epsilon"]), {}).setdefault(row["values"], []).append(
            float(row["score"])
        )

    def best(of_settings):
        first = better(of_settings, key=lambda values: np.mean(of_settings[values]))
        if highest is None:
            return json.loads(first)
        behind = {
            values: np.subtract(of_settings[first], found) for values, found in of_settings.items()
        }
        close = [
            json.loads(values) for values, by in behind.items()
            if abs(np.mean(by)) <= np.std(by, ddof=1) / folds**0.5
        ]  # fmt: skip
        return max(close, key=lambda values: values[highest])

    return {epsilon: best(of_settings) for epsilon, of_settings in scores.items()}


def summary(rows):
    """{(method, ε): (mean, its standard error, number of runs)}."""
    scores = {}
    for row in rows:
        scores.setdefault((row["method"], float(row["epsilon"])), []).append(float(row["score"]))
    return {
        key: (np.mean(found), np.std(found, ddof=1) / len(found) ** 0.5, len(found))
        for key, found in scores.items()
        if len(found) > 1
    }


def curves(rows):
    """(method, budgets, means, their standard errors) of each method."""
    found = summary(rows)
    for method in dict.fromkeys(method for method, _ in found):
        points = sorted((epsilon, *found[name, epsilon]) for name, epsilon in found
                        if name == method)  # fmt: skip
        yield method, *np.transpose(points)[:3]


def published_curves(benchmark):
    """(method, budgets, scores) of each private method that others report."""
    found = {}
    for row in published(benchmark):
        if row["epsilon"] != "inf":
            point = float(row["epsilon"]), float(row["score"])
            found.setdefault(row["method"], []).append(point)
    for method, points in found.items():
        yield method, *np.transpose(sorted(points))


def table(rows, digits=1):
    """What was run: a row a method, a column an ε, means with their standard errors."""
    ours = summary(rows)
    epsilons = sorted({epsilon for _, epsilon in ours})
    lines = [["method", *(f"ε = {epsilon:g}" for epsilon in epsilons)]]
    lines += [["---"] * len(lines[0])]
    for method in dict.fromkeys(method for method, _ in ours):
        cells = [ours.get((method, epsilon)) for epsilon in epsilons]
        lines.append(
            [method] + [f"{c[0]:.{digits}f} ± {c[1]:.{digits + 1}f}" if c else "" for c in cells]
        )
    return _markdown(lines)


def published_table(benchmark):
    """What others report: a row a method, a column an ε."""
    found = {}
    for row in published(benchmark):
        key = row["method"], row["delta"], row["source"], row["note"]
        found.setdefault(key, {})[float(row["epsilon"])] = row["score"]
    epsilons = sorted({epsilon for scores in found.values() for epsilon in scores})
    lines = [["method", *(f"ε = {epsilon:g}" for epsilon in epsilons), "δ", "source", "note"]]
    lines += [["---"] * len(lines[0])]
    lines += [
        [method, *(scores.get(epsilon, "") for epsilon in epsilons), delta, source, note]
        for (method, delta, source, note), scores in found.items()
    ]
    return _markdown(lines)


def _markdown(lines):
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def picture(rows, benchmark, what, path, title):
    """The score against ε, with error bars of two standard errors, beside what is published."""
    figure, axes = plt.subplots(figsize=(8, 6), layout="constrained")
    for method, epsilon, mean, error in curves(rows):
        axes.errorbar(epsilon, mean, 2 * error, marker="o", markersize=4, capsize=2, label=method)
    for method, epsilon, score in published_curves(benchmark):
        axes.plot(epsilon, score, marker="x", linestyle=":", label=method)
    axes.set_xscale("log")
    axes.set_xticks([0.5, 1, 2, 3, 4, 8], labels=["0.5", "1", "2", "3", "4", "8"])
    axes.set_xlim(0.45, 9)
    axes.minorticks_off()
    axes.set_xlabel("ε")
    axes.set_ylabel(what)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    figure.savefig(path, dpi=80)
