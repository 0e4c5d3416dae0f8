"""Every sampler draws as the accountant assumes: chi-square tests over 10,000 draws.

The draws are those of the public functions. Each test of tests/helpers/inclusions.py refuses a
correct sampler with probability 1e-6; seeds are fixed, so that none does by chance. What is wrong
on purpose is refused by the same functions, at the end.
"""

import itertools

import numpy as np
import pytest
import scipy.stats

import dp_keras_opt as dp
from dp_keras_opt.data import samplers
from dp_keras_opt.data.units import Units
from tests.helpers.inclusions import (
    assert_assigned,
    assert_draws,
    assert_equally_often,
    assert_permutations,
    by_two_workers,
    fix_entropy,
    stream_of,
    table_of,
)

N, B, T = 20, 4, 10_000
SECRET = 2**64 + 2  # seed of an order, as long as those that are drawn
IDS = np.arange(N), np.arange(N)
BINOMIAL = scipy.stats.binom(N, B / N)
K = 2
USERS = np.random.default_rng(0).permutation(np.repeat(np.arange(N), [1, 2, 3, 4] * 5))
OF_USERS = np.arange(len(USERS)), np.arange(len(USERS))


@pytest.fixture(autouse=True)
def fixed(monkeypatch):
    fix_entropy(monkeypatch, 5)


def cut_at(most):
    """The distribution of min(Binomial, most)."""
    sizes = np.arange(most + 1)
    return scipy.stats.rv_discrete(
        values=(sizes, [*BINOMIAL.pmf(sizes[:-1]), BINOMIAL.sf(most - 1)])
    )


def users_of(draws):
    """The users of each draw, and the examples of theirs that take part; none is another's."""
    for rows in draws:
        units, examples = [], []
        for own in rows.reshape(-1, K):
            mine = own[own >= 0]
            if len(mine):
                (user,) = set(USERS[mine])
                assert len(mine) == min(K, np.sum(user == USERS)) == len(set(mine))
                units.append(user)
                examples.append(tuple(sorted(mine)))
        yield np.array(units, np.int64), examples


def assert_subsets(drawn):
    """Of a user of four examples any two take part equally often."""
    subsets = [rows for _, found in drawn for rows in found if np.sum(USERS[rows[0]] == USERS) == 4]
    for user in {USERS[rows[0]] for rows in subsets}:
        assert_equally_often([rows for rows in subsets if USERS[rows[0]] == user], 6)


# One process.


def test_poisson(monkeypatch):
    draws, _ = stream_of(monkeypatch, dp.data.poisson_batches, IDS, B, T)
    assert_draws(table_of(draws(), N), BINOMIAL)


def test_poisson_that_is_cut(monkeypatch):
    draws, sampling = stream_of(monkeypatch, dp.data.poisson_batches, IDS, B, T, max_batch_size=5)
    assert sampling.max_batch_size == 5
    assert_draws(table_of(draws(), N), cut_at(5))


def test_poisson_of_sizes_that_change(monkeypatch):
    """Also of a pass that begins within the training: its first steps have the sizes of theirs."""
    sizes = {0: B, T: 2 * B}
    draws, sampling = stream_of(monkeypatch, dp.data.poisson_batches, IDS, sizes, 2 * T)
    table = table_of(draws(), N)
    assert_draws(table[:T], BINOMIAL)
    assert_draws(table[T:], scipy.stats.binom(N, 2 * B / N))
    sampling.passes.next_step = T
    later = table_of(itertools.islice(draws(), T), N)
    assert_draws(later, scipy.stats.binom(N, 2 * B / N))


def test_without_replacement(monkeypatch):
    draws, _ = stream_of(monkeypatch, dp.data.without_replacement_batches, IDS, B, T)
    assert_draws(table_of(draws(), N), B)


def epochs_of(draws, number):
    """[epochs, units]: in which batch each unit is; it is in one."""
    table = np.full((number, N), -1)
    for row in table:
        for step, drawn in enumerate(draws()):
            members = drawn[drawn >= 0]
            assert (row[members] == -1).all()
            row[members] = step
    assert (table >= 0).all()
    return table


def test_balls_in_bins(monkeypatch):
    draws, sampling = stream_of(monkeypatch, dp.data.balls_in_bins, IDS, B)
    epochs = epochs_of(draws, T)
    assert_assigned(epochs, sampling.steps_per_epoch)
    for step in range(sampling.steps_per_epoch):
        assert_draws((epochs == step) * 1, scipy.stats.binom(N, 1 / sampling.steps_per_epoch))


def test_cyclic_poisson(monkeypatch):
    """With q of the expected size of a group, whatever its members are."""
    groups, size = 2, 5
    draws, sampling = stream_of(monkeypatch, dp.data.cyclic_poisson, IDS, size, groups, groups * T)
    assert sampling.sampling_probability == 0.5
    table, everyone = table_of(draws(), N), []
    for turn in range(groups):
        own = table[turn::groups]
        members = np.flatnonzero(own.any(axis=0))
        assert_draws(own[:, members], scipy.stats.binom(len(members), 0.5))
        everyone += members.tolist()
    assert sorted(everyone) == list(range(N))


def of_units(data, users=None, **how):
    return Units.of("a sampler", data, users, **how)


def test_groups_of_cyclic_poisson():
    """Over 10,000 seeds, with the ids of users as with examples."""
    units, groups = of_units(IDS), 3
    table = np.full((T, N), -1)
    for seed, row in enumerate(table):
        for turn, members in enumerate(units.in_groups(groups, seed)):
            row[members] = turn
    assert_assigned(table, groups)


def test_fixed_order(monkeypatch):
    """Once an epoch, at the same step; over 10,000 seeds in every order, also with a remainder."""
    draws, _ = stream_of(monkeypatch, dp.data.fixed_order_epochs, IDS, 6)
    first, *others = epochs_of(draws, 5)
    assert all((first == other).all() for other in others)
    units = of_units(IDS)
    orders = np.array([units.in_order(4, 6, seed) for seed in range(T)])
    flat = orders.reshape(T, -1)
    assert (flat[:, N:] == -1).all()
    assert_permutations(flat[:, :N])
    for step, size in enumerate((6, 6, 6, 2)):
        assert_draws(table_of(orders[:, step], N), size)
    dropped = np.array([units.in_order(3, 6, seed) for seed in range(T)])
    assert_draws(table_of(dropped[:, 2], N), 6)


def test_users(monkeypatch):
    draws, _ = stream_of(
        monkeypatch, dp.data.poisson_users, OF_USERS, USERS, B, T, examples_per_user=K
    )
    drawn = list(users_of(draws()))
    assert_draws(table_of((units for units, _ in drawn), N), BINOMIAL)
    assert_subsets(drawn)


def test_users_in_turns(monkeypatch):
    how = {"users": USERS, "examples_per_user": K}
    draws, sampling = stream_of(monkeypatch, dp.data.cyclic_poisson, OF_USERS, 5, 2, 2 * T, **how)
    drawn = list(users_of(draws()))
    table, q = table_of((units for units, _ in drawn), N), sampling.sampling_probability
    for turn in range(2):
        members = np.flatnonzero(table[turn::2].any(axis=0))
        assert_draws(table[turn::2][:, members], scipy.stats.binom(len(members), q))
    assert_subsets(drawn)


def test_from_disk_through_tensorflow(tmp_path, monkeypatch):
    """What comes out of the pipeline, of arrays of files."""
    for name, values in zip("xy", IDS, strict=True):
        np.save(tmp_path / f"{name}.npy", values)
    batches = dp.data.poisson_batches((tmp_path / "x.npy", tmp_path / "y.npy"), B, T)
    members = []
    for x, y, rows in batches.dataset.as_numpy_iterator():
        np.testing.assert_array_equal(x, y)
        members.append(x[rows.mask == 1])
    assert_draws(table_of(members, N), BINOMIAL)


# Two workers.


def data_of(worker, is_shard):
    """Each worker's data: its own, of two lengths; or the same."""
    if not is_shard:
        return IDS
    own = np.arange(13) if worker == 0 else np.arange(13, N)
    return dp.data.own_shard((own, own))


@pytest.mark.parametrize("is_shard", [True, False], ids=["own shards", "the same data"])
def test_two_workers(is_shard, monkeypatch):
    """Together they draw as one: with B/n of all units, independently of each other."""
    found = two_streams(
        monkeypatch, lambda worker: dp.data.poisson_batches(data_of(worker, is_shard), B, T)
    )
    assert [sampling for _, sampling in found] == [dp.accounting.Sampling.poisson(N, B)] * 2
    tables = [table_of((shifted(d, worker, is_shard) for d in draws()), N)
              for worker, (draws, _) in enumerate(found)]  # fmt: skip
    assert not (tables[0].any(axis=0) & tables[1].any(axis=0)).any()  # each unit is at one
    assert_draws(tables[0] + tables[1], BINOMIAL)


@pytest.mark.parametrize("is_shard", [True, False], ids=["own shards", "the same data"])
def test_two_workers_with_balls_in_bins(is_shard, monkeypatch):
    found = two_streams(
        monkeypatch, lambda worker: dp.data.balls_in_bins(data_of(worker, is_shard), B)
    )
    assert {sampling.steps_per_epoch for _, sampling in found} == {5}
    both = [
        lambda draws=draws, worker=worker: (shifted(d, worker, is_shard) for d in draws())
        for worker, (draws, _) in enumerate(found)
    ]

    def together():
        return (np.concatenate(parts) for parts in zip(*(each() for each in both), strict=True))

    assert_assigned(epochs_of(together, T), 5)


@pytest.mark.parametrize("is_shard", [True, False], ids=["own shards", "the same data"])
def test_two_workers_in_turns(is_shard, monkeypatch):
    found = two_streams(
        monkeypatch, lambda worker: dp.data.cyclic_poisson(data_of(worker, is_shard), 5, 2, 2 * T)
    )
    table = sum(
        table_of((shifted(d, worker, is_shard) for d in draws()), N)
        for worker, (draws, _) in enumerate(found)
    )
    members = [np.flatnonzero(table[turn::2].any(axis=0)) for turn in range(2)]
    assert sorted(np.concatenate(members)) == list(range(N))
    for turn in range(2):
        assert_draws(table[turn::2][:, members[turn]], scipy.stats.binom(len(members[turn]), 0.5))


@pytest.mark.parametrize("is_shard", [True, False], ids=["own shards", "the same data"])
def test_two_workers_in_one_order(is_shard, monkeypatch):
    """Each unit once an epoch; groups and orders of shards are drawn each by itself."""
    found = two_streams(
        monkeypatch, lambda worker: dp.data.fixed_order_epochs(data_of(worker, is_shard), 6)
    )
    assert len({len(list(draws())) for draws, _ in found}) == 1
    epochs = [
        np.concatenate([shifted(d, worker, is_shard) for d in draws()])
        for worker, (draws, _) in enumerate(found)
    ]
    together = np.concatenate(epochs)
    assert sorted(together[together >= 0]) == list(range(N))


@pytest.mark.parametrize(
    "make, match",
    [
        (lambda w: dp.data.poisson_batches(data_of(w, w == 0), B), "own_shard.*by all of them or"),
        (
            lambda w: dp.data.cyclic_poisson(
                data_of(w, True), B, 2,
                **({"users": np.arange(13), "examples_per_user": 1} if w == 0 else {}),
            ),
            "or users, must be given by all",
        ),
        (lambda w: dp.data.poisson_batches(IDS, B + w), "sample in different ways"),
        (lambda w: dp.data.poisson_batches(IDS, B, 5 + w), "5 batches an epoch; .* 6 batches"),
        (
            lambda w: dp.data.cyclic_poisson(IDS, 5, 2, order_seed=SECRET + w),
            "different order_seeds",
        ),
        (lambda w: dp.data.fixed_order_epochs(IDS, 5, order_seed=70 + w), "different order_seeds"),
        (lambda w: dp.data.poisson_batches(data_of(1, True), B), "same data as a part"),
    ],
)  # fmt: skip
def test_workers_that_were_called_in_different_ways_are_refused(make, match, monkeypatch):
    """From two orders one example could come to both; order_seeds are in no message."""
    with pytest.raises(ValueError, match=match) as caught:
        by_two_workers(monkeypatch, make)
    assert not any(str(seed + w) in str(caught.value) for seed in (70, SECRET) for w in (0, 1))


def two_streams(monkeypatch, make):
    """(draws, sampling) of each of two workers."""
    captured, gathered = {}, dp.data.sampled._gathered

    def keep(examples, draws, *rest):
        captured[dp.data.sampled.place()[0]] = draws
        return gathered(examples, draws, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(dp.data.sampled, "_gathered", keep)
        made = by_two_workers(monkeypatch, make)
    assert [batches.workers for batches in made] == [2, 2]
    return [(captured[worker], batches.sampling) for worker, batches in enumerate(made)]


def shifted(drawn, worker, is_shard):
    """Indices of a worker's own examples as those of all."""
    return np.where(drawn >= 0, drawn + 13 * worker, drawn) if is_shard else drawn


# What is wrong is refused.


def poisson_table(rng, probability=B / N):
    return (rng.random((T, N)) < probability) * 1


def _too_often(rng):
    return poisson_table(rng, 1.1 * B / N)


def _too_seldom(rng):
    return poisson_table(rng, 0.9 * B / N)


def _one_twice_as_often(rng):
    return poisson_table(rng, np.where(np.arange(N) == 7, 2 * B / N, B / N))


def _two_together(rng):
    table = poisson_table(rng)
    table[:, 3] = table[:, 11]
    return table


def _never_two(rng):
    """Two units of which one is drawn in the place of the other, as often as they should be."""
    table = poisson_table(rng)
    coin = rng.random(T)
    table[:, 3], table[:, 11] = coin < B / N, (coin > B / N) & (coin < 2 * B / N)
    return table


def _of_one_size(rng):
    return (rng.random((T, N)).argsort(axis=1) < B) * 1


def _in_epochs(rng):
    """Shuffled epochs, as Keras has them: too even."""
    return np.concatenate([np.eye(N)[rng.permutation(N)].reshape(-1, B, N).sum(axis=1)
                           for _ in range(T * B // N)]).astype(int)  # fmt: skip


def _each_draw_twice(rng):
    return np.repeat(poisson_table(rng)[: T // 2], 2, axis=0)


@pytest.mark.parametrize(
    "wrong, because",
    [
        (_too_often, "sizes of draws"),
        (_too_seldom, "sizes of draws"),
        (_one_twice_as_often, "inclusion of units"),
        (_two_together, "two units together"),
        (_never_two, "two units together"),
        (_of_one_size, "sizes of draws"),
        (_in_epochs, "inclusion of units.*two draws in a row"),
        (_each_draw_twice, "two draws in a row"),
    ],
)
def test_wrong_tables_are_refused(wrong, because):
    with pytest.raises(AssertionError, match=because):
        assert_draws(wrong(np.random.default_rng(0)), BINOMIAL)


def test_the_table_that_is_right_is_not():
    for seed in range(5):
        assert_draws(poisson_table(np.random.default_rng(seed)), BINOMIAL)


def test_epochs_in_the_place_of_batches_of_one_size_are_refused():
    """Sizes are right; what came in one batch does not come in the next ones."""
    with pytest.raises(AssertionError, match="^inclusion of units.*two draws in a row"):
        assert_draws(_in_epochs(np.random.default_rng(0)), B)


def test_a_sampler_with_a_probability_that_is_off_is_refused(monkeypatch):
    size = samplers.PoissonSampler._size
    monkeypatch.setattr(
        samplers.PoissonSampler,
        "_size",
        lambda self, rng, members, step: rng.binomial(len(members), 1.1 * B / N),
    )
    draws, _ = stream_of(monkeypatch, dp.data.poisson_batches, IDS, B, T)
    with pytest.raises(AssertionError, match="sizes"):
        assert_draws(table_of(draws(), N), BINOMIAL)
    monkeypatch.setattr(samplers.PoissonSampler, "_size", size)
    assert_draws(table_of(draws(), N), BINOMIAL)


def test_the_realised_size_of_a_group_in_the_place_of_the_expected_one_is_refused(monkeypatch):
    """B of the members of the group that has its turn: their probability would be secret."""

    def of_members(self, rng, members, step):
        return rng.binomial(len(members), 5 / len(members))

    monkeypatch.setattr(samplers.PoissonSampler, "_size", of_members)
    draws, sampling = stream_of(
        monkeypatch, dp.data.cyclic_poisson, IDS, 5, 2, 2 * T, order_seed=SECRET
    )
    own = table_of(draws(), N)[::2]
    members = np.flatnonzero(own.any(axis=0))
    assert len(members) != N // 2
    q = sampling.sampling_probability
    with pytest.raises(AssertionError, match="sizes"):
        assert_draws(own[:, members], scipy.stats.binom(len(members), q))


def test_a_cut_that_keeps_the_first_is_refused(monkeypatch):
    def first(self, rng, members, step):
        size = rng.binomial(len(members), B / N)
        return np.sort(rng.choice(members, size, replace=False))[:5]

    monkeypatch.setattr(samplers.PoissonSampler, "_draw", first)
    draws, _ = stream_of(monkeypatch, dp.data.poisson_batches, IDS, B, T, max_batch_size=5)
    with pytest.raises(AssertionError, match="inclusion of units"):
        assert_draws(table_of(draws(), N), cut_at(5))


def test_bins_of_one_size_and_bins_that_two_units_share_are_refused():
    rng = np.random.default_rng(0)
    dealt = np.stack([rng.permutation(N) % 5 for _ in range(T)])
    with pytest.raises(AssertionError, match="two units together in places"):
        assert_assigned(dealt, 5)
    together = rng.integers(5, size=(T, N))
    assert_assigned(together, 5)
    together[:, 4] = together[:, 9]
    with pytest.raises(AssertionError, match="two units together in places"):
        assert_assigned(together, 5)
    early = rng.integers(5, size=(T, N))
    early[:, 4] = rng.choice(5, T, p=[0.22, 0.22, 0.22, 0.17, 0.17])
    with pytest.raises(AssertionError, match="units in places"):
        assert_assigned(early, 5)


def test_an_order_that_is_hardly_one_is_refused():
    """A shuffle through a buffer of half the data, as of `tf.data`."""
    rng = np.random.default_rng(0)
    table = np.empty((T, N), int)
    for row in table:
        buffer, rest = list(range(N // 2)), list(range(N // 2, N))
        for place in range(N):
            row[place] = buffer.pop(rng.integers(len(buffer)))
            buffer += rest[:1]
            del rest[:1]
    with pytest.raises(AssertionError, match="units in the order"):
        assert_permutations(table)


def test_workers_that_draw_alike_are_refused(monkeypatch):
    """Both with the same random numbers, as from one seed."""
    found = two_streams(
        monkeypatch, lambda worker: dp.data.poisson_batches(data_of(worker, False), B, T)
    )
    first = table_of(found[0][0](), N)
    with pytest.raises(AssertionError, match="sizes|together"):
        assert_draws(first + np.roll(first, 1, axis=1), BINOMIAL)
