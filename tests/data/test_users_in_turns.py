"""Users who come in turns or in one order, for correlated noise: draws, steps, noise, ε.

Statistical tests state their false-alarm rate, and run on a fixed seed.
"""

import functools

import dp_accounting
import keras
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

import dp_keras_opt as dp
from dp_keras_opt.accounting import Sampling
from dp_keras_opt.noise import BandedMatrix, SquareRootFactorization
from tests.helpers.normals import assert_exactly
from tests.helpers.per_example import assert_close, clip_and_sum

K, CLIP, GROUPS = 3, 0.05, 2
USERS = np.random.default_rng(0).permutation(np.repeat(np.arange(12), [1, 2, 3, 4, 5, 6] * 2))
NUMBER, N = 12, len(USERS)
rng = np.random.default_rng(1)
X = rng.normal(size=(N, 4)).astype("float32")
Y = rng.normal(size=(N, 2)).astype("float32")
IDS = (np.arange(N), np.arange(N))

in_turns = functools.partial(dp.data.cyclic_poisson, groups=GROUPS)
MAKE = {"in turns": in_turns, "one order": dp.data.fixed_order_epochs}


def users_of(batches):
    """For each batch the users in it, of whom no one has another's row or more than K."""
    for x, _, rows in batches:
        found = []
        assert rows.mask.shape[1] == K
        for own, there in zip(x.numpy().reshape(-1, K), rows.mask.numpy(), strict=True):
            mine = own[there == 1]
            if len(mine):
                (user,) = set(USERS[mine])
                assert len(mine) == min(K, np.sum(user == USERS)) == len(set(mine))
                found.append((user, tuple(sorted(mine))))
        yield found


def test_a_user_comes_only_in_the_turns_of_one_group():
    """Each draw is that of `sampling_probability`: chi-square, false alarms 1e-3."""
    batches = in_turns(IDS, 3, steps_per_epoch=2000, users=USERS, examples_per_user=K)
    drawn = list(users_of(batches))
    turns = [{user for batch in drawn[turn::GROUPS] for user, _ in batch} for turn in (0, 1)]
    assert not turns[0] & turns[1] and turns[0] | turns[1] == set(range(NUMBER))
    q = batches.sampling.sampling_probability
    assert q == 3 * GROUPS / NUMBER
    counts = np.bincount([user for batch in drawn for user, _ in batch], minlength=NUMBER)
    z = (counts - 1000 * q) / np.sqrt(1000 * q * (1 - q))
    assert 1e-3 / 2 < scipy.stats.chi2(NUMBER).sf(np.sum(z**2)) < 1 - 1e-3 / 2
    subsets = [rows for batch in drawn for user, rows in batch if np.sum(user == USERS) == 6]
    _, often = np.unique(subsets, axis=0, return_counts=True)
    assert len(often) == 2 * 20  # of two users with 6 rows each, every subset of 3


def test_a_user_comes_once_an_epoch_and_always_at_the_same_step():
    batches = dp.data.fixed_order_epochs(IDS, 5, users=USERS, examples_per_user=K)
    epochs = [list(users_of(batches)) for _ in range(20)]
    orders = {str([[user for user, _ in batch] for batch in epoch]) for epoch in epochs}
    assert len(orders) == 1 and len(epochs[0]) == 3
    assert sorted(user for batch in epochs[0] for user, _ in batch) == list(range(NUMBER))
    rows = {rows for epoch in epochs for batch in epoch for user, rows in batch if user == 5}
    assert len(rows) > 5  # of the 20 subsets of six rows, drawn anew
    dropped = dp.data.fixed_order_epochs(
        IDS, 5, users=USERS, examples_per_user=K, drop_remainder=True
    )
    assert [len(batch) for batch in users_of(dropped)] == [5, 5]


@pytest.mark.parametrize("kind", MAKE)
def test_the_order_of_a_run_comes_again_with_its_seed(kind):
    """By the ids, wherever their rows are: a run may go on with data that were written anew."""
    make = functools.partial(MAKE[kind], batch_size=3, examples_per_user=K)
    batches = make(IDS, users=USERS)
    order = np.argsort(USERS, kind="stable")

    def turns(batches, users):
        found = [set() for _ in range(batches.sampling.period)]
        for _ in range(30):
            for step, (x, _, rows) in enumerate(batches):
                shown = x.numpy()[rows.mask.numpy().ravel() == 1]
                found[step % len(found)] |= set(users[shown])
        return found

    again = make(IDS, users=USERS[order], order_seed=batches.order_seed)
    assert turns(batches, USERS) == turns(again, USERS[order])
    assert turns(make(IDS, users=USERS), USERS) != turns(batches, USERS)  # 1 in 2^12, or fewer


def test_they_state_their_sampling():
    of = {"users": USERS, "examples_per_user": K}
    assert in_turns(IDS, 3, **of).sampling == Sampling.cyclic_poisson(
        NUMBER, 3, GROUPS, unit="user", examples_per_unit=K
    )
    batches = dp.data.fixed_order_epochs(IDS, 5, unit="person", adjacency="zero_out", **of)
    assert batches.sampling == Sampling.fixed_order(
        NUMBER, 5, "zero_out", unit="person", examples_per_unit=K
    )
    for sampling in (batches.sampling, in_turns(IDS, 3, **of).sampling):
        assert Sampling.from_config(sampling.get_config()) == sampling
        assert "the gradient of their mean loss is clipped as one" in sampling.describe()
    assert batches.physical_batch_size == 5 * K
    assert in_turns(IDS, 3, physical_batch_size=7, **of).physical_batch_size == 2 * K


@pytest.mark.parametrize("kind", MAKE)
def test_refuses(kind):
    make, name = MAKE[kind], getattr(MAKE[kind], "func", MAKE[kind]).__name__
    for wrong in ({"users": USERS}, {"examples_per_user": K}):
        with pytest.raises(ValueError, match="users and examples_per_user go together"):
            make(IDS, 3, **wrong)
    dataset = tf.data.Dataset.from_tensor_slices(IDS)
    with pytest.raises(TypeError, match=f"{name} with users needs arrays"):
        make(dataset, 3, users=USERS, examples_per_user=K)
    with pytest.raises(ValueError, match="from 1 to 12.*There are 12 users"):
        make(IDS, 13, users=USERS, examples_per_user=K)
    with pytest.raises(ValueError, match="examples_per_user"):
        make(IDS, 3, users=USERS, examples_per_user=0)
    with pytest.raises(ValueError, match="one id for each"):
        make(IDS, 3, users=USERS[1:], examples_per_user=K)


# Training.


def make_model(optimizer, **compiled):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(5, activation="tanh")(inputs)
    model = dp.DPModel(inputs, keras.layers.Dense(2)(hidden))
    model.compile(optimizer, **{"loss": "mse", "jit_compile": False} | compiled)
    return model


def sgd(batch_size, noise, multiplier):
    return dp.optimizers.DPSGD(
        1.0, clip_norm=CLIP, noise_multiplier=multiplier, batch_size=batch_size, noise=noise
    )


@pytest.mark.parametrize("rows", [None, 6, 1000])
def test_a_step_on_all_users(rows):
    """All their rows in one batch: the sum of each user's clipped mean gradient."""
    model = make_model(sgd(NUMBER, BandedMatrix(1, 1), 0.0), physical_batch_size=rows)
    found = []
    for user in range(NUMBER):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(Y[user == USERS] - model(X[user == USERS])))
        found.append([np.float64(g) for g in tape.gradient(loss, model.trainable_variables)])
    expected = clip_and_sum(found, CLIP)
    before = model.get_weights()
    model.fit(
        dp.data.fixed_order_epochs((X, Y), NUMBER, users=USERS, examples_per_user=6), verbose=0
    )
    moved = [b - a for b, a in zip(before, model.get_weights(), strict=True)]
    assert_close(moved, [total / NUMBER for total in expected])


@pytest.mark.parametrize("kind", MAKE)
def test_the_noise_is_correlated_on_the_scale_of_one_users_bound(kind):
    """Weights of zero leave nothing but noise: the sum of four steps' has the std of C⁻¹z's.

    ⅔ and 1½ of it are refused.
    """
    keras.utils.set_random_seed(0)
    inputs = keras.Input((20,))
    model = dp.DPModel(inputs, keras.layers.Dense(100)(inputs))
    noise = BandedMatrix(4, 2)
    model.compile(sgd(3, noise, 1.5), "mse", jit_compile=False)
    data = np.ones((N, 20)), np.ones((N, 100)), np.zeros(N)
    batches = MAKE[kind](data, 3, users=USERS, examples_per_user=K)
    before = model.get_weights()
    model.fit(batches, verbose=0)
    assert model.ledger.steps == 4
    moved = np.concatenate(
        [(b - a).ravel() for b, a in zip(before, model.get_weights(), strict=True)]
    )
    std = np.linalg.norm(noise.inverse(4).sum(axis=0))
    assert_exactly(moved, 1.5 * CLIP / 3 * std)


def test_epsilon_in_turns_is_that_of_the_amplified_rounds():
    batches = in_turns((X, Y), 3, steps_per_epoch=4, users=USERS, examples_per_user=K)
    model = make_model(sgd(3, BandedMatrix(8, 2), 1.5))
    model.fit(batches, epochs=2, verbose=0)
    accountant = dp_accounting.rdp.RdpAccountant()
    once = dp_accounting.PoissonSampledDpEvent(0.5, dp_accounting.GaussianDpEvent(1.5))
    accountant.compose(dp_accounting.SelfComposedDpEvent(once, 4))  # rounds
    assert model.ledger.epsilon(1e-3, "rdp") == pytest.approx(accountant.get_epsilon(1e-3))
    assert "one user added or removed" in " ".join(model.ledger.statement(1e-3).split())


def test_epsilon_in_one_order_is_that_of_all_participations():
    batches = dp.data.fixed_order_epochs(
        (X, Y), 3, users=USERS, examples_per_user=K, adjacency="zero_out"
    )
    noise = SquareRootFactorization(8, 8)
    model = make_model(sgd(3, noise, 1.5))
    model.fit(batches, epochs=2, verbose=0)
    columns = np.linalg.inv(noise.inverse(8))  # C
    moved = max(np.linalg.norm(columns[:, [i, i + 4]].sum(axis=1)) for i in range(4))
    accountant = dp_accounting.rdp.RdpAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(1.5 / moved))
    assert model.ledger.epsilon(1e-3, "rdp") == pytest.approx(accountant.get_epsilon(1e-3))


@pytest.mark.parametrize("kind", MAKE)
def test_rows_are_refused_where_users_are_stated(kind):
    batches = MAKE[kind]((X, Y), 3, users=USERS, examples_per_user=K)
    by_row = batches.map(lambda x, y: (x, y))
    rows = by_row.dataset.map(
        lambda x, y, info: (x, y, info._replace(mask=tf.reshape(info.mask, [-1])))
    )
    model = make_model(sgd(3, BandedMatrix(4, 2), 1.5))
    before = model.get_weights()
    with pytest.raises(ValueError, match="user"):
        model.fit(dp.data.assume_sampling(rows, batches.sampling), verbose=0)
    for a, b in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_run_of_users_is_planned():
    """Groups of users compete with epochs of users in one order."""
    wanted = Sampling.poisson(1200, 20, "zero_out", unit="user", examples_per_unit=K)
    optimizer = dp.optimizers.DPSGD(0.1, clip_norm=1.0)
    plan = dp.accounting.plan_noise(optimizer, wanted, 60, 6.0, 1e-4, "rdp")
    assert {choice.sampling.kind for choice in plan.choices} == {
        "poisson", "cyclic_poisson", "fixed_order",
    }  # fmt: skip
    assert {(c.sampling.unit, c.sampling.examples_per_unit) for c in plan.choices} == {("user", K)}
    batches = in_turns((X, Y), 3, users=USERS, examples_per_user=K)
    model = make_model(dp.optimizers.DPSGD(0.1, clip_norm=CLIP, noise="planned"))
    budget = dp.callbacks.PrivacyBudget(8.0, 1e-3)
    model.fit(batches, epochs=2, verbose=0, callbacks=[budget])
    assert model.optimizer.noise.bands == GROUPS and model.ledger.epsilon(1e-3) <= 8.0
