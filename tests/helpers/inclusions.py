"""Whether units come into batches as is claimed: chi-square tests of tables of draws.

Each test is two-sided, as draws can be too even, too, and refuses a correct sampler with
probability `FALSE_ALARM`, as far as counts are normal: tables are to have 10,000 draws, in which
what is counted is expected at least 100 times.
"""

import threading
import types

import numpy as np
import scipy.stats

from dp_keras_opt import workers
from dp_keras_opt.data import batches, sampled, samplers, units

FALSE_ALARM = 1e-6


# Getting at the draws.


def stream_of(monkeypatch, make, *args, **kwargs):
    """What a sampler draws, without the data: function that gives an iterator of index arrays."""
    found = []

    def keep(examples, draws, *rest):
        found.append(draws)
        return gathered(examples, draws, *rest)

    gathered = sampled._gathered
    with monkeypatch.context() as patch:
        patch.setattr(sampled, "_gathered", keep)
        made = make(*args, **kwargs)
    return found[0], made.sampling


def fix_entropy(monkeypatch, seed):
    """All that samplers draw without a seed comes from one generator; and the seed of an order.

    That seed is the same however often it is asked for: two workers ask in any order, at once.
    """
    fixed, seeded = np.random.default_rng(seed), samplers.numpy_generator
    bits = types.SimpleNamespace(token_bytes=lambda count: np.random.default_rng(seed).bytes(count))
    monkeypatch.setattr(sampled, "secrets", bits)
    for module in (samplers, sampled):
        monkeypatch.setattr(
            module, "numpy_generator", lambda own=None: fixed if own is None else seeded(own)
        )


def table_of(draws, n):
    """[draws, n]: how often unit i is in draw t."""
    draws = list(draws)
    table = np.zeros((len(draws), n), np.int64)
    for row, drawn in zip(table, draws, strict=True):
        np.add.at(row, drawn[drawn >= 0], 1)
    assert table.max() <= 1, "a unit is in a draw twice"
    return table


def by_two_workers(monkeypatch, function):
    """What `function(worker)` gives at each of two workers, threads that tell each other things."""
    here, told = threading.local(), [None, None]
    barrier = threading.Barrier(2, timeout=60)

    def place(strategy=None):
        return (getattr(here, "index", 0), 2 if hasattr(here, "index") else 1)

    def gathered(content, strategy=None):
        if not hasattr(here, "index"):
            return [content]
        told[here.index] = content
        barrier.wait()
        found = list(told)
        barrier.wait()
        return found

    results = [None, None]

    def work(index):
        here.index = index
        try:
            results[index] = function(index)
        except BaseException as error:
            results[index] = error
            barrier.abort()

    with monkeypatch.context() as patch:
        for module in (workers, units, sampled, batches):
            patch.setattr(module, "place", place)
        for module in (workers, units, sampled):
            patch.setattr(module, "gathered", gathered)
        threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    errors = [each for each in results if isinstance(each, BaseException)]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return results


# What is expected of them.


def assert_draws(table, sizes):
    """That each draw is a set of a random size, all of one size equally likely; and independent.

    Four tests: the sizes, how often each unit comes, each two together, and in two draws that
    follow each other any two.

    Args:
        table: 0 or 1, [draws, n].
        sizes: the distribution of a draw's size: a frozen one of SciPy, of 0 to n, or a number.
    """
    draws, n = table.shape
    support = np.arange(n + 1)
    pmf = (support == sizes) * 1.0 if isinstance(sizes, int) else sizes.pmf(support)
    wrong = [_check_sizes(table.sum(axis=1), pmf)]
    # Of k units, the probability that all are drawn.
    all_of = [1.0]
    for k in range(4):
        shares = np.prod([(support - j) / (n - j) for j in range(k + 1)], axis=0)
        all_of.append(float(pmf @ np.maximum(shares, 0)))
    covariance = np.full((n, n), all_of[2] - all_of[1] ** 2)
    np.fill_diagonal(covariance, all_of[1] - all_of[1] ** 2)
    deviation = table.sum(axis=0) - draws * all_of[1]
    wrong.append(_check("inclusion of units", deviation, draws * covariance))

    i, j = np.triu_indices(n, 1)
    together = (table.T @ table)[i, j] - draws * all_of[2]
    equal = (i[:, None] == i) * 1 + (j[:, None] == j) + (i[:, None] == j) + (j[:, None] == i)
    of_both = np.array([all_of[4], all_of[3], all_of[2]])[equal]  # how many they have in common
    wrong.append(_check("two units together", together, draws * (of_both - all_of[2] ** 2)))

    centred = table - all_of[1]
    following = centred[:-1].T @ centred[1:]
    values, vectors = np.linalg.eigh(covariance)
    kept = values > 1e-9
    white = vectors[:, kept] / np.sqrt(values[kept])
    statistic = np.sum((white.T @ following @ white) ** 2) / (draws - 1)
    wrong.append(_doubt("two draws in a row", statistic, kept.sum() ** 2))
    assert not any(wrong), "; ".join(filter(None, wrong))


def assert_assigned(table, places):
    """That each unit is in one of so many places, uniformly, and independently of the others.

    Two tests: how often each unit is in each place, and each two units in any two places.

    Args:
        table: from 0 to places - 1, [draws, n].
        places: how many there are.
    """
    draws, n = table.shape
    # Functions of a place with mean 0, variance 1 and no correlation between them.
    contrasts = np.linalg.qr(np.eye(places) - 1 / places)[0][:, :-1] * places**0.5
    values = contrasts[table]  # [draws, n, places - 1]
    statistic = np.sum(values.sum(axis=0) ** 2) / draws
    wrong = [_doubt("units in places", statistic, n * (places - 1))]
    flat = values.reshape(draws, -1)
    products = (flat.T @ flat).reshape(n, places - 1, n, places - 1)
    statistic = sum(np.sum(products[i, :, i + 1 :] ** 2) for i in range(n)) / draws
    degrees = n * (n - 1) // 2 * (places - 1) ** 2
    wrong.append(_doubt("two units together in places", statistic, degrees))
    assert not any(wrong), "; ".join(filter(None, wrong))


def assert_permutations(table):
    """That each row of [draws, n] is a permutation in which each unit is anywhere equally often.

    The indicators of a permutation have the covariance (I − J/n) ⊗ (I − J/n) / (n − 1).
    """
    draws, n = table.shape
    assert (np.sort(table, axis=1) == np.arange(n)).all()
    counts = np.stack([np.bincount(column, minlength=n) for column in table.T])
    statistic = (n - 1) / draws * np.sum((counts - draws / n) ** 2)
    wrong = _doubt("units in the order", statistic, (n - 1) ** 2)
    assert not wrong, wrong


def assert_equally_often(outcomes, number):
    """That each of so many outcomes comes equally often."""
    _, counts = np.unique(outcomes, return_counts=True, axis=0)
    expected = len(outcomes) / number
    absent = (number - len(counts)) * expected
    wrong = _doubt("outcomes", np.sum((counts - expected) ** 2) / expected + absent, number - 1)
    assert not wrong, wrong


# What speaks against it, in words; "" where nothing does.


def _check_sizes(found, pmf):
    expected, draws = pmf * len(found), len(found)
    observed = np.bincount(found, minlength=len(pmf))
    if observed[pmf == 0].any():
        return "sizes of draws that cannot be"
    cells, least = [[0, 0.0]], 100
    for o, e in zip(observed, expected, strict=True):
        if cells[-1][1] >= least:
            cells.append([0, 0.0])
        cells[-1][0] += o
        cells[-1][1] += e
    if len(cells) > 1 and cells[-1][1] < least:  # the tail
        o, e = cells.pop()
        cells[-1][0] += o
        cells[-1][1] += e
    if len(cells) == 1:
        assert cells[0][0] == draws
        return ""
    o, e = np.array(cells).T
    return _doubt("sizes of draws", np.sum((o - e) ** 2 / e), len(cells) - 1)


def _check(what, deviation, covariance):
    """Of a vector that should be normal about 0, with this covariance."""
    values, vectors = np.linalg.eigh(covariance)
    kept = values > 1e-9 * values[-1]
    along = vectors.T @ deviation
    scale = max(1.0, np.abs(deviation).max())
    if np.abs(along[~kept]).max(initial=0) > 1e-6 * scale:
        return f"{what}: not as it must always be"
    return _doubt(what, np.sum(along[kept] ** 2 / values[kept]), kept.sum())


def _doubt(what, statistic, degrees):
    tail = scipy.stats.chi2(degrees)
    low, high = tail.ppf(FALSE_ALARM / 2), tail.isf(FALSE_ALARM / 2)
    if low < statistic < high:
        return ""
    return (
        f"{what}: chi-square of {degrees} degrees is {statistic:.1f}, not {low:.1f} to {high:.1f}"
    )
