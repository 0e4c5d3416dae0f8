"""Tables of a page, and the runs of `tuning.compare` that they show."""

import collections
import math
import re

import numpy as np

from tests.helpers.examples import rows_of

#: (with planned noise, without) of the candidates that are on the pages with both.
BY_PLANNED_NOISE = [
    ("DPSGD, momentum, planned noise", "DPSGD, momentum"),
    ("DPSGD, momentum, planned noise, average", "DPSGD, momentum, average"),
    ("DPAdam, bias-corrected, planned noise", "DPAdam, bias-corrected"),
]

#: Tasks of whose scores the higher is the better.
HIGHER_IS_BETTER = {"clothes", "features", "tabular", "definitions", "incomes"}


def best_of(path):
    """`max` or `min`: which score of the runs in KIND-TASK.csv is the best."""
    return max if path.stem.split("-")[1] in HIGHER_IS_BETTER else min


def columns(path):
    """ε -> {(candidate, ε): (mean, standard error)} of the runs that judge."""
    found = collections.defaultdict(dict)
    for key, values in scores(path).items():
        found[key[1]][key] = mean_and_error(values)
    return found


def scores(path):
    """(candidate, ε) -> scores of the runs that judge it."""
    found = collections.defaultdict(list)
    for row in rows_of(path):
        if row["part"] == "test":
            found[row["candidate"], float(row["epsilon"])].append(float(row["score"]))
    return found


def mean_and_error(values):
    """Their mean and its standard error."""
    return np.mean(values), np.std(values, ddof=1) / math.sqrt(len(values))


def cells(page, name):
    """(candidate, ε) -> what the table after the comment with this name shows, unless nothing."""
    table = re.search(rf"^<!-- {name} -->\n\n(.*?)\n\n", page, re.M | re.S).group(1)
    header, _, *lines = table.splitlines()
    epsilons = [float(e) for e in re.findall(r"ε = ([\d.]+)", header)]
    found = {}
    for line in lines:
        candidate, *values = (cell.strip() for cell in line.strip("|").split("|"))
        found |= {(candidate, e): v for e, v in zip(epsilons, values, strict=True) if v}
    return found


def compared(path, pairs):
    """For each ε and (one, other): 1, 0 or -1, as one is better, level or worse.

    More than two standard errors of the difference tell.
    """
    sign, found = 1 if best_of(path) is max else -1, []
    for epsilon, column in columns(path).items():
        for one, other in pairs:
            (mean, error), (of_other, its_error) = column[one, epsilon], column[other, epsilon]
            gain = sign * (mean - of_other)
            found.append(int(np.sign(gain) * (abs(gain) > 2 * math.hypot(error, its_error))))
    return found


def level_with_the_best(means, best):
    """The keys of what is within two standard errors (of the difference) of the best.

    Args:
        means: dict of (mean, standard error).
        best: `min` or `max`.
    """
    first, of_first = best(means.values())
    return {
        k
        for k, (mean, error) in means.items()
        if abs(mean - first) <= 2 * math.hypot(error, of_first)
    }
