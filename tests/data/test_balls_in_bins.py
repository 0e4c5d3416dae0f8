"""Epochs in which each unit is in one batch, drawn at random.

Statistical tests run on a fixed seed, so they do not flake. Their thresholds are such that a
correct sampler fails each of them for at most one seed in 1,000.
"""

import itertools
import os
import pickle
import warnings

import keras
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

from dp_keras_opt.accounting.sampling import Passes, Sampling
from dp_keras_opt.data import balls_in_bins, sampled, units
from dp_keras_opt.data.samplers import BallsInBinsSampler

N, BATCH, BINS, EPOCHS = 23, 4, 6, 4000


def ids_and_targets(n):
    """Data whose values name the example: x = its index, y = 10 times that."""
    return np.arange(n), 10 * np.arange(n)


def draws(batches):
    """The examples in each batch of one iteration, in the order of the rows."""
    return [x.numpy()[rows.mask.numpy() == 1].tolist() for x, _, rows in batches]


def _sampler(n=N, batch_size=BATCH, block=8, seed=None, units=None):
    sampling = Sampling.balls_in_bins(n, batch_size)
    object.__setattr__(sampling, "passes", Passes())
    root = None if seed is None else np.random.default_rng(seed)
    return BallsInBinsSampler(sampling, np.arange(n) if units is None else units, block, root=root)


def _members(sampler):
    """Of one epoch, [t]: the units of each batch."""
    return [units[units >= 0] for units in sampler]


@pytest.fixture(scope="module")
def bins():
    """[EPOCHS, N]: in which batch of each epoch is unit i?"""
    sampler, table = _sampler(seed=5), np.full([EPOCHS, N], -1)
    for row in table:
        for step, members in enumerate(_members(sampler)):
            assert np.all(row[members] == -1)  # in no batch before
            row[members] = step
    assert np.all(table >= 0)  # and in one
    return table


# The distribution of draws.


def test_each_unit_is_in_each_batch_equally_often(bins):
    """Chi-square of N·(t − 1) degrees, over all units; false alarms: 1e-3."""
    counts = np.stack([np.bincount(column, minlength=BINS) for column in bins.T])
    expected = EPOCHS / BINS
    statistic = np.sum((counts - expected) ** 2 / expected)
    assert 1e-3 / 2 < scipy.stats.chi2(N * (BINS - 1)).sf(statistic) < 1 - 1e-3 / 2


def test_batch_sizes_are_multinomial(bins):
    """Pearson's statistic of an epoch's sizes has mean t − 1 and variance 2(t − 1)(1 − 1/n).

    Batches of equal sizes, as shuffling makes them, have a statistic near 0, and so has a sampler
    that is too even; false alarms: 1e-3.
    """
    sizes = np.stack([np.bincount(row, minlength=BINS) for row in bins])
    statistics = np.sum((sizes - N / BINS) ** 2, axis=1) / (N / BINS)
    variance = 2 * (BINS - 1) * (1 - 1 / N)
    z = (statistics.mean() - (BINS - 1)) / np.sqrt(variance / EPOCHS)
    assert abs(z) < scipy.stats.norm.isf(1e-3 / 2)
    assert (sizes == 0).any()  # P = (5/6)^23 for each of 24,000


def test_one_batch_has_a_binomial_size(bins):
    """Chi-square against the exact distribution; false alarms: 1e-3."""
    sizes = (bins == 2).sum(axis=1)
    binomial = scipy.stats.binom(N, 1 / BINS)
    inner = np.arange(1, 8)
    expected = [binomial.pmf(0), *binomial.pmf(inner), binomial.sf(7)]
    observed = [(sizes == 0).sum(), *((sizes == k).sum() for k in inner), (sizes > 7).sum()]
    assert scipy.stats.chisquare(observed, EPOCHS * np.array(expected)).pvalue > 1e-3


def test_units_are_assigned_independently(bins):
    """Any two are in one batch with probability 1/t; false alarms: 1e-3 over all pairs."""
    pairs = list(itertools.combinations(range(N), 2))
    together = np.array([(bins[:, i] == bins[:, j]).mean() for i, j in pairs])
    z = (together - 1 / BINS) / np.sqrt(1 / BINS * (1 - 1 / BINS) / EPOCHS)
    assert np.abs(z).max() < scipy.stats.norm.isf(1e-3 / 2 / len(pairs))


def test_epochs_are_independent(bins):
    """Where a unit was says nothing of where it will be; false alarms: 1e-3."""
    table = np.zeros([BINS, BINS])
    np.add.at(table, (bins[:-1:2].ravel(), bins[1::2].ravel()), 1)
    expected = table.sum() / BINS**2
    statistic = np.sum((table - expected) ** 2 / expected)
    assert 1e-3 / 2 < scipy.stats.chi2(BINS**2 - 1).sf(statistic) < 1 - 1e-3 / 2


# Randomness.


def test_every_iteration_draws_anew_and_stores_nothing():
    sampler = _sampler(n=400, batch_size=20)
    held = pickle.dumps(vars(sampler)["units"])
    epochs = [[frozenset(members) for members in _members(sampler)] for _ in range(3)]
    assert len({members for epoch in epochs for members in epoch}) == 3 * 20
    assert vars(sampler).keys() == {
        "sampling", "units", "block", "examples_of_unit", "root",
    }  # fmt: skip
    assert pickle.dumps(vars(sampler)["units"]) == held and sampler.root is None


def test_it_ignores_global_seeds():
    found = []
    for _ in range(2):
        keras.utils.set_random_seed(0)
        found.append(draws(balls_in_bins(ids_and_targets(400), 50)))
    assert found[0] != found[1]


def test_a_seed_voids_the_amplification_and_says_so():
    def seeded(seed):
        with pytest.warns(UserWarning, match="balls_in_bins got seed=.*amplifies nothing") as found:
            batches = balls_in_bins(ids_and_targets(400), 50, seed=seed)
        assert found[0].filename == __file__
        return batches

    first, second, other = seeded(1), seeded(1), seeded(2)
    epoch = draws(first)
    assert draws(second) == epoch != draws(other) and draws(first) == draws(second) != epoch


def _in_child(work):
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            with os.fdopen(writing, "wb") as end:
                try:
                    pickle.dump(work(), end)
                except RuntimeError as error:
                    pickle.dump(str(error), end)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as end:
        result = pickle.load(end)
    os.waitpid(child, 0)
    return result


def test_a_fork_goes_on_with_no_draw_of_its_parent_and_draws_its_own():
    sampler = _sampler(n=400, batch_size=20)
    begun = iter(sampler)
    next(begun)
    assert "Iterate over the batches anew" in _in_child(lambda: next(begun).tolist())

    def epoch():
        return [frozenset(members.tolist()) for members in _members(sampler)]

    found = [_in_child(epoch), _in_child(epoch), epoch()]
    assert len({members for each in found for members in each}) == 3 * 20
    assert len(list(begun)) == 19  # the parent goes on


def test_workers_assign_their_own_units_each_by_itself(monkeypatch):
    """Equal draws at two workers would tie a unit's batch to another's."""
    everyone, assigned = [], []
    for index in range(2):
        for module in (sampled, units):
            monkeypatch.setattr(module, "place", lambda index=index: (index, 2))
        batches = balls_in_bins(ids_and_targets(400), 20)
        assert batches.workers == 2 and batches.steps_per_epoch == 20
        assert batches.physical_batch_size == 24  # of a share of 10: 10 + 2·√10
        members = draws(batches)
        everyone += sum(members, [])
        place = np.full(400, -1)
        for step, batch in enumerate(members):
            place[batch] = step
        assigned.append(place[index::2])
    assert sorted(everyone) == list(range(400))
    assert all(np.all(each >= 0) for each in assigned)
    assert np.mean(assigned[0] == assigned[1]) < 0.25  # 1/20 where they are independent


# The batches.


@pytest.mark.parametrize("physical", [None, 3, 200])
def test_an_epoch_has_every_example_once_in_t_batches(physical):
    batches = balls_in_bins(ids_and_targets(50), 12, physical_batch_size=physical)
    assert len(batches) == batches.steps_per_epoch == 5 == int(batches.dataset.cardinality())
    size = batches.physical_batch_size
    assert size == (physical or 24)
    epoch = []
    for x, y, rows in batches:
        assert x.shape[0] % size == 0 and x.shape[0] >= size
        np.testing.assert_array_equal(y, 10 * x)
        epoch += x.numpy()[rows.mask.numpy() == 1].tolist()
    assert sorted(epoch) == list(range(50))
    assert batches.sampling == Sampling.balls_in_bins(50, 12) and batches.sampling.is_padded


def test_an_empty_batch_is_a_block_of_padding():
    batches = balls_in_bins(ids_and_targets(2), 1, physical_batch_size=3)  # P(empty) = 1/2
    empty = [
        (x.shape[0], rows.mask.numpy().tolist())
        for _ in range(40)
        for x, _, rows in batches
        if not rows.mask.numpy().any()
    ]
    assert empty and all(each == (3, [0.0, 0.0, 0.0]) for each in empty)


def test_a_large_batch_is_never_truncated():
    sizes = {
        (x.shape[0], int(rows.mask.numpy().sum()))
        for _ in range(40)
        for x, _, rows in balls_in_bins(ids_and_targets(8), 4, physical_batch_size=2)
    }
    assert max(count for _, count in sizes) > 5
    assert all(rows == max(2, 2 * -(-count // 2)) for rows, count in sizes)


def test_weights_and_structures_go_with_their_example():
    x = {"a": np.arange(30), "b": np.arange(60.0).reshape(30, 2)}
    batches = balls_in_bins((x, np.arange(30), np.arange(30)), 10, class_weight={3: 5.0})
    for inputs, y, rows in batches:
        np.testing.assert_array_equal(inputs["a"], y)
        np.testing.assert_array_equal(inputs["b"][:, 0], 2 * y)
        weight = y.numpy() * np.where(y.numpy() == 3, 5.0, 1.0) * rows.mask.numpy()
        np.testing.assert_array_equal(rows.sample_weight, weight)


def test_a_dataset_of_examples():
    dataset = tf.data.Dataset.from_tensor_slices(ids_and_targets(30))
    assert sorted(sum(draws(balls_in_bins(dataset, 10)), [])) == list(range(30))


def test_passes_are_counted_as_they_begin():
    batches = balls_in_bins(ids_and_targets(30), 10)
    passes = batches.sampling.passes
    assert passes.begun == 0
    next(iter(batches))
    assert passes.begun == 1
    draws(batches)
    assert passes.begun == 2
    mapped = batches.map(lambda x, y: (x, y))
    draws(mapped)
    assert mapped.sampling.passes is passes and passes.begun == 3


# Users.


K = 3
USERS = np.repeat(np.arange(12), [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6])


def test_a_user_lands_in_one_batch_with_at_most_k_of_their_rows():
    data = ids_and_targets(len(USERS))
    batches = balls_in_bins(data, 3, users=USERS, examples_per_user=K)
    assert batches.sampling == Sampling.balls_in_bins(12, 3, unit="user", examples_per_unit=K)
    assert len(batches) == 4
    subsets = set()
    for _ in range(10):
        seen = []
        for x, _, rows in batches:
            mask = rows.mask.numpy()
            assert mask.shape == (x.shape[0] // K, K)
            for own, there in zip(x.numpy().reshape(-1, K), mask, strict=True):
                mine = own[there == 1]
                if len(mine):
                    (user,) = set(USERS[mine])
                    assert len(mine) == min(K, np.sum(user == USERS)) == len(set(mine))
                    seen.append(user)
                    subsets.add((user, tuple(sorted(mine))))
        assert sorted(seen) == list(range(12))
    assert len({subset for user, subset in subsets if user == 11}) > 1  # of 6 rows, drawn anew


def test_users_need_their_number_of_rows_and_arrays():
    data = ids_and_targets(len(USERS))
    for wrong in ({"users": USERS}, {"examples_per_user": 3}):
        with pytest.raises(ValueError, match="users and examples_per_user go together"):
            balls_in_bins(data, 3, **wrong)
    dataset = tf.data.Dataset.from_tensor_slices(data)
    with pytest.raises(TypeError, match="balls_in_bins with users needs arrays"):
        balls_in_bins(dataset, 3, users=USERS, examples_per_user=3)
    with pytest.raises(ValueError, match="from 1 to 12.*There are 12 users"):
        balls_in_bins(data, 13, users=USERS, examples_per_user=3)


# What is refused.


def test_errors():
    data = ids_and_targets(10)
    with pytest.raises(ValueError, match="batch_size must be an integer from 1 to 10"):
        balls_in_bins(data, 11)
    with pytest.raises(ValueError, match="not proven"):
        balls_in_bins(data, 2, adjacency="replace_one")
    with pytest.raises(ValueError, match="max_bytes=10"):
        balls_in_bins(data, 2, max_bytes=10)
    with pytest.raises(ValueError, match="physical_batch_size"):
        balls_in_bins(data, 2, physical_batch_size=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        balls_in_bins(data, 2, unit="rating")
