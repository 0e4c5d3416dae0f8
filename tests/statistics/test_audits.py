"""Each statistic attacked by many runs: none proves more than its price, sabotage does.

A run releases the statistic of one of two neighbouring data sets; the attack projects what is
released onto their difference, and takes the second data set for the true one from 0.9 of it on.
"""

import numpy as np
import pytest

import dp_keras_opt as dp
from dp_keras_opt.audit import bounds
from dp_keras_opt.noise import numbers
from tests.statistics.test_private_data import NOISES, STATISTICS, N

#: Half of the noise proves ε = 1.39 ± 0.07 by so many.
RUNS = 2000
EPSILON, DELTA = 1.0, 0.05
#: Of a bound; with other seeds, one of the 19 statistics here is wrong by chance in 1 of 500 runs.
CONFIDENCE = 0.9999

#: What the first row has in the second data set, so that it moves the release as far as it can.
EXTREME = {
    "count": True, "histogram": 1.0, "category_counts": "a", "total": 1e6, "mean": 1e6,
    "mean_of_vectors": 1e6, "mean_and_variance": 1e6, "quantiles": -1e6, "bounds": 1e6,
    "vocabulary": ["a", "b", "a"],
}  # fmt: skip
#: And in the first one: nothing that counts.
NOTHING = {
    "count": False, "histogram": -50.0, "category_counts": "?", "total": 0.0, "mean": 3.0,
    "mean_of_vectors": [3.0, 30.0], "mean_and_variance": np.nan, "quantiles": np.nan,
    "bounds": np.nan, "vocabulary": [""] * 3,
}  # fmt: skip


def attack(name, noise, monkeypatch, factor=1.0):
    """A lower bound on ε, with `factor` times the noise that is paid for."""
    method, values, arguments = STATISTICS[name]
    arguments = dict(arguments)
    if name == "vocabulary":
        arguments["without"] = [""]
    data = [np.array(values), np.array(values)]
    data[0][0], data[1][0] = NOTHING[name], EXTREME[name]
    honest, seen, exact = numbers.released, [], []

    def record(total, mechanism, multiplier, sensitivity):
        exact.append(np.atleast_1d(total))
        seen.append(np.atleast_1d(honest(total, mechanism, factor * multiplier, sensitivity)))
        return seen[-1].reshape(np.shape(total))

    monkeypatch.setattr(numbers, "released", record)
    delta = DELTA if noise == "gaussian" else 0.0
    private = dp.statistics.PrivateData(dp.accounting.Ledger(), noise=noise)

    def run(rows):
        object.__setattr__(private, "ledger", dp.accounting.Ledger())
        try:
            getattr(private, method)(rows, epsilon=EPSILON, delta=delta, **arguments)
        except ValueError as error:  # nothing stands out, of what was released
            assert "stands out" in str(error) or "threshold" in str(error)

    for rows in data:
        run(rows)
    first, second = exact
    assert len(first) == len(second)
    direction = (second - first) / np.sum((second - first) ** 2)
    seen.clear()
    for rows in data:
        for _ in range(RUNS):
            run(rows)
    scores = np.array([direction @ (each - first) for each in seen])
    taken = scores >= 0.9
    found = bounds.many_run_bound(
        int(taken[:RUNS].sum()), RUNS, int((~taken[RUNS:]).sum()), RUNS, delta, CONFIDENCE
    )
    return float(found)


@pytest.mark.parametrize("name, noise", NOISES)
def test_no_statistic_proves_more_than_its_price(name, noise, monkeypatch):
    assert attack(name, noise, monkeypatch) <= EPSILON


@pytest.mark.parametrize(
    "name", ["count", "histogram", "category_counts", "total", "mean", "quantiles", "bounds"]
)
def test_half_the_noise_is_caught(name, monkeypatch):
    assert attack(name, "gaussian", monkeypatch, factor=0.5) > EPSILON


def test_the_data_sets_are_neighbours():
    for name, (_, values, _) in STATISTICS.items():
        assert len(values) == N and name in EXTREME and name in NOTHING
