"""Batches of users: how they are drawn, trained on, accounted for, and what is refused.

Statistical tests state their false-alarm rate, and run on a fixed seed.
"""

import dataclasses
import json
import warnings

import dp_accounting
import keras
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

import dp_keras_opt as dp
from dp_keras_opt.accounting import Sampling
from dp_keras_opt.data import RowInfo
from dp_keras_opt.data.users import examples_by_user
from tests.helpers.datasets import numpy_elements
from tests.helpers.normals import assert_exactly
from tests.helpers.per_example import assert_close, clip_and_sum

K, CLIP, SIGMA = 3, 0.05, 1.5
COUNTS = (1, 2, 3, 5, 9, 4, 1, 1)  # examples of each user; K of some
USERS = np.random.default_rng(0).permutation(np.repeat(np.arange(len(COUNTS)), COUNTS))
N = len(USERS)
rng = np.random.default_rng(1)
X = rng.normal(size=(N, 4)).astype("float32")
Y = rng.normal(size=(N, 2)).astype("float32")


def seeded(*args, seed=1, **kwargs):
    with pytest.warns(UserWarning, match="poisson_users got seed"):
        return dp.data.poisson_users(*args, seed=seed, **kwargs)


def drawn(batches):
    """For each batch a list with the indices of each user's rows, in the order of the rows."""
    for x, _, rows in numpy_elements(batches.dataset):
        mask = rows.mask == 1
        yield [ids[shown] for ids, shown in zip(x.reshape(mask.shape), mask, strict=True)]


# How users and their examples are drawn.


@pytest.fixture(scope="module")
def table():
    """[steps, N]: is example i in the batch of step t?"""
    steps = 4000
    found = np.zeros([steps, N], int)
    batches = seeded((np.arange(N), np.arange(N)), USERS, 2, steps, examples_per_user=K, seed=7)
    for step, users in enumerate(drawn(batches)):
        for rows in users:
            assert len(set(USERS[rows])) <= 1  # a user's place holds nobody else's
            np.add.at(found[step], rows, 1)
    return found


def test_each_user_is_drawn_with_the_stated_probability(table):
    """Chi-square over the users, and their correlations; false alarms: 1e-3 each."""
    there = np.stack([table[:, user == USERS].any(axis=1) for user in range(len(COUNTS))], axis=1)
    q, steps = 2 / len(COUNTS), len(table)
    z = (there.sum(axis=0) - steps * q) / np.sqrt(steps * q * (1 - q))
    assert 1e-3 / 2 < scipy.stats.chi2(len(COUNTS)).sf(np.sum(z**2)) < 1 - 1e-3 / 2
    pairs = np.corrcoef(there.T)[np.triu_indices(len(COUNTS), k=1)]
    assert abs(pairs * np.sqrt(steps)).max() < scipy.stats.norm.isf(1e-3 / 2 / len(pairs))


def test_at_most_k_examples_take_part_and_all_of_them_where_there_are_fewer(table):
    for user, count in enumerate(COUNTS):
        numbers = table[:, user == USERS].sum(axis=1)
        assert set(numbers) == {0, min(count, K)}
    assert table.max() == 1  # no example twice


@pytest.mark.parametrize("user", [3, 4, 5])
def test_the_subset_is_uniform_and_drawn_anew(table, user):
    """Each of the subsets of K is equally likely, whatever came before; false alarms: 1e-3 each."""
    mine = table[:, user == USERS]
    subsets = [tuple(row) for row in mine if row.any()]
    kinds, observed = np.unique(subsets, axis=0, return_counts=True)
    assert len(kinds) == scipy.special.comb(COUNTS[user], K)
    assert scipy.stats.chisquare(observed).pvalue > 1e-3
    chosen = np.array(subsets)
    z = np.corrcoef(chosen[:-1].ravel(), chosen[1:].ravel())[0, 1] * np.sqrt(chosen[1:].size)
    assert abs(z) < scipy.stats.norm.isf(1e-3 / 2)


def test_no_epoch_repeats_an_earlier_one():
    batches = dp.data.poisson_users((np.arange(N), np.arange(N)), USERS, 4, 3, examples_per_user=K)
    epochs = {str([rows.tolist() for users in drawn(batches) for rows in users]) for _ in range(3)}
    assert len(epochs) == 3


@pytest.mark.parametrize("physical", [None, 1, 7, 12, 100])
def test_shape_padding_and_weights(physical):
    weight = np.arange(N) + 1.0
    data = ({"a": np.arange(N), "b": X}, Y, weight)
    batches = seeded(data, USERS, 4, 20, examples_per_user=K, physical_batch_size=physical)
    block = {None: 8, 1: 1, 7: 2, 12: 4, 100: 33}[physical]  # users; `None` gives 8 of 8
    assert batches.physical_batch_size == block * K
    static = block * K if block >= len(COUNTS) else None
    assert batches.dataset.element_spec[0]["b"].shape.as_list() == [static, 4]
    assert batches.dataset.element_spec[2].mask.shape[1] == K
    for x, y, rows in numpy_elements(batches.dataset):
        users, mask = len(rows.mask), rows.mask.astype(bool)
        assert users % block == 0 and len(x["a"]) == users * K
        np.testing.assert_array_equal(x["b"], X[x["a"]])
        np.testing.assert_array_equal(y, Y[x["a"]])
        np.testing.assert_array_equal(rows.sample_weight, (x["a"] + 1) * mask.ravel())
        for ids, shown in zip(x["a"].reshape(-1, K), mask, strict=True):
            assert (np.diff(shown.astype(int)) <= 0).all()
            if shown.any():  # padding within a user's place is an example of the same user
                assert len(set(USERS[ids])) == 1


def test_ids_may_be_words():
    words = np.array([f"person {user}" for user in USERS])
    for ids in (words, words.astype(object), words.astype("S"), words.tolist(), tf.constant(words)):
        batches = seeded((np.arange(N), Y), ids, len(COUNTS), 1, examples_per_user=20)
        assert batches.sampling.num_examples == len(COUNTS)
        ((*users,),) = drawn(batches)
        assert sorted(sorted(rows) for rows in users if len(rows)) == sorted(
            np.flatnonzero(user == USERS).tolist() for user in range(len(COUNTS))
        )


@pytest.mark.parametrize(
    "users, words",
    [
        (USERS * 1.0, "integers or strings"),
        (USERS > 1, "integers or strings"),
        (np.where(USERS > 1, "a", None), "integers or strings"),
        (np.array([b"a", *["a"] * (N - 1)], object), "integers or strings"),
        (USERS[1:], f"one id for each of the {N} examples"),
        (USERS[:, None], f"one id for each of the {N} examples"),
    ],
)
def test_ids_that_could_hide_a_person_are_refused(users, words):
    with pytest.raises((TypeError, ValueError), match=words):
        dp.data.poisson_users((X, Y), users, 2, examples_per_user=K)


@pytest.mark.parametrize("dtype", [str, object])
def test_a_text_that_says_missing_draws_a_warning(dtype):
    ids = np.array(["a", "nan", "b", "nan", "", "c"], dtype)
    with pytest.warns(UserWarning, match="'' and 'nan' is taken for the id of one user"):
        assert len(examples_by_user(ids, 6)) == 5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        examples_by_user(np.array(["a", "Nan Goldin", "none"], dtype), 3)


def test_other_arguments_are_refused():
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(N)
    with pytest.raises(TypeError, match="another order than their users"):
        dp.data.poisson_users(dataset, USERS, 2, examples_per_user=K)
    with pytest.raises(ValueError, match="from 1 to 8.*There are 8 users"):
        dp.data.poisson_users((X, Y), USERS, 9, examples_per_user=K)
    with pytest.raises(ValueError, match="examples_per_user"):
        dp.data.poisson_users((X, Y), USERS, 2, examples_per_user=0)
    with pytest.raises(ValueError, match="unit='user'"):
        Sampling.poisson(8, 2, examples_per_unit=K)
    with pytest.raises(ValueError, match="examples_per_unit"):
        Sampling.poisson(8, 2, unit="user", examples_per_unit=0)


# Training.


def make(optimizer=None, seed=0, **compiled):
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(5, activation="tanh")(inputs)
    model = dp.DPModel(inputs, keras.layers.Dense(2)(hidden))
    compiled = {"loss": "mse", "jit_compile": False} | compiled
    model.compile(optimizer or sgd(), **compiled)
    return model


def sgd(batch_size=8, **changes):
    arguments = {"clip_norm": CLIP, "noise_multiplier": 0.0, "batch_size": batch_size} | changes
    return dp.optimizers.DPSGD(1.0, **arguments)


def everybody(steps=1, **kwargs):
    """Batches of all users with all their examples: nothing is left to chance."""
    return dp.data.poisson_users(
        (X, Y), USERS, len(COUNTS), steps, examples_per_user=max(COUNTS), **kwargs
    )


def gradients_of_users(model):
    found = []
    for user in range(len(COUNTS)):
        with tf.GradientTape() as tape:
            errors = tf.square(Y[user == USERS] - model(X[user == USERS]))
            loss = tf.reduce_mean(errors)
        found.append([np.float64(g) for g in tape.gradient(loss, model.trainable_variables)])
    return found


@pytest.mark.representatives(5)
@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
@pytest.mark.parametrize("rows", [None, 1, 20, 1000])
def test_a_step_on_all_users(rows, jit_compile):
    """Chunks of one user, of two and of all give the step of one user at a time."""
    model = make(physical_batch_size=rows, jit_compile=jit_compile)
    before = model.get_weights()
    expected = clip_and_sum(gradients_of_users(model), CLIP)
    model.fit(everybody(), verbose=0)
    moved = [b - a for b, a in zip(before, model.get_weights(), strict=True)]
    assert_close(moved, [total / len(COUNTS) for total in expected])


def test_public_rows_take_no_part_in_a_users_gradient():
    """Ten public rows, which are no multiple of K = 9, averaged row by row."""
    weights = []
    for together in (True, False):
        rule = dp.optimizers.PDADPMD(
            0.1, steps=4, clip_norm=CLIP, noise_multiplier=0.0, batch_size=len(COUNTS)
        )
        model = make(rule, physical_batch_size=19)
        batches = everybody(2)
        if not together:  # the same users, one row each: the public rows stand behind them
            one = dp.data.poisson_batches((X[:8], Y[:8]), 8, 2)
            batches = dp.data.poisson_users((X[:8], Y[:8]), range(8), 8, 2, examples_per_user=3)
            model.fit(dp.data.with_public(one, (X[:10], Y[:10])), verbose=0)
            weights.append(model.get_weights())
            model = make(dp.optimizers.PDADPMD.from_config(rule.get_config()))
        model.fit(dp.data.with_public(batches, (X[:10], Y[:10])), verbose=0)
        weights.append(model.get_weights())
    assert_close(weights[1], weights[2], rtol=1e-3)
    x, y, rows = next(iter(dp.data.with_public(everybody(), (X[:10], Y[:10])).dataset))
    assert len(x) == len(y) == len(rows.public) == tf.size(rows.mask) == (8 + 2) * 9
    np.testing.assert_allclose(rows.public, [0.0] * 72 + [0.1] * 10 + [0.0] * 8)
    np.testing.assert_array_equal(x[72:82], X[:10])
    assert not rows.mask[8:].numpy().any()


@pytest.mark.parametrize(
    "compiled", [{}, {"jit_compile": True}, {"physical_batch_size": 2}], ids=["graph", "xla", "2"]
)
def test_the_noise_has_the_scale_of_one_users_bound(compiled):
    """Weights of zero leave nothing but noise: σC/B; ⅔ and 1½ of it are refused."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((20,))
    model = dp.DPModel(inputs, keras.layers.Dense(100)(inputs))
    model.compile(sgd(4, noise_multiplier=SIGMA), "mse", **{"jit_compile": False} | compiled)
    data = np.ones((N, 20)), np.ones((N, 100)), np.zeros(N)
    batches = dp.data.poisson_users(data, USERS, 4, 4, examples_per_user=K)
    before = model.get_weights()
    model.fit(batches, verbose=0)
    noise = [b - a for b, a in zip(before, model.get_weights(), strict=True)]
    assert_exactly(np.concatenate([n.ravel() for n in noise]), SIGMA * CLIP / 4 * 4**0.5)


def test_empty_draws_are_steps_of_noise():
    model = make(sgd(1, noise_multiplier=0.0))
    before = model.get_weights()
    nobody = everybody().dataset.map(lambda x, y, rows: (x, y, RowInfo(0 * rows.mask)))
    sampling = dataclasses.replace(everybody().sampling, batch_size=1)
    model.fit(dp.data.assume_sampling(nobody, sampling), verbose=0)
    for a, b in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)
    assert model.ledger.steps == 1


def test_metrics_are_over_examples():
    model = make(metrics=["mae"])
    expected = np.mean((Y - model.predict(X, verbose=0)) ** 2)
    loss, error = model.evaluate(everybody().dataset, verbose=0)
    np.testing.assert_allclose(loss, expected, rtol=1e-4)
    np.testing.assert_allclose(error, np.mean(np.abs(Y - model.predict(X, verbose=0))), rtol=1e-4)
    history = model.fit(everybody(), verbose=0).history
    np.testing.assert_allclose(history["loss"], expected, rtol=1e-4)
    assert model.predict(everybody().dataset, verbose=0).shape == (8 * 9, 2)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision(policy):
    keras.config.set_dtype_policy(policy)
    try:
        model = make(sgd(clip_norm=1e-3))
        model.fit(everybody(3), verbose=0)
    finally:
        keras.config.set_dtype_policy("float32")
    assert model.non_finite_examples == 0 and model.ledger.steps == 3


def test_a_subclassed_model_is_built_from_rows():
    class Later(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(2)

        def call(self, x):
            return self.dense(x)

    model = dp.make_private(Later())
    model.compile(sgd(), "mse", metrics=["mae"])
    model.fit(everybody(), verbose=0)
    assert model.get_weights()[0].shape == (4, 2)


def test_a_person_of_one_example_is_an_example():
    """K = 1 and one example each: the draws, and the step, of `poisson_batches`."""
    with pytest.warns(UserWarning, match="seed"):
        by_row = dp.data.poisson_batches((X, Y), 6, 3, seed=3)
    by_user = seeded((X, Y), np.arange(N), 6, 3, examples_per_user=1, seed=3)
    results = []
    for batches in (by_row, by_user):
        model = make(sgd(6))
        model.fit(batches, verbose=0)
        results.append(model.get_weights())
    assert_close(*results, rtol=1e-6)


# What is claimed.


def test_epsilon_statement_and_ledger():
    batches = dp.data.poisson_users((X, Y), USERS, 2, 4, examples_per_user=K)
    model = make(sgd(2, noise_multiplier=SIGMA))
    report = dp.callbacks.PrivacyReport(delta=1e-3, accountant="rdp")
    model.fit(batches, verbose=0, callbacks=[report])

    accountant = dp_accounting.rdp.RdpAccountant()
    step = dp_accounting.PoissonSampledDpEvent(2 / 8, dp_accounting.GaussianDpEvent(SIGMA))
    accountant.compose(dp_accounting.SelfComposedDpEvent(step, 4))
    np.testing.assert_allclose(report.epsilon, accountant.get_epsilon(1e-3), rtol=1e-9)

    text = " ".join(report.statement().split())
    for words in (
        "differential privacy for one user with",
        "one user added or removed; one user stands for all examples of that user",
        "n = 8 users",
        "each user is in each batch independently with probability 2/8 = 0.25",
        f"Of each user in a batch at most {K} examples take part",
        "the gradient of their mean loss is clipped as one",
        "each user has one identifier, and no two share it",
        "the number of users, and the count of users with non-finite gradients",
    ):
        assert words in text

    again = dp.accounting.Ledger.from_json(model.ledger.to_json())
    assert again.segments[0].sampling == batches.sampling
    assert again.epsilon(1e-3, "rdp") == report.epsilon
    again.merge(model.ledger)  # the same run, counted once
    assert again.steps == 4


def test_a_ledger_from_before_there_were_users():
    model = make(sgd(2, noise_multiplier=SIGMA))
    model.sampling = Sampling.poisson(8, 2)
    model.train_on_batch(X, Y)
    content = json.loads(model.ledger.to_json())
    del content["segments"][0]["sampling"]["examples_per_unit"]
    old = dp.accounting.Ledger.from_json(json.dumps(content))
    assert old.segments == model.ledger.segments
    old.merge(model.ledger)
    assert old.steps == 1


def test_users_and_examples_do_not_compose():
    model = make(sgd(2, noise_multiplier=SIGMA))
    model.fit(dp.data.poisson_users((X, Y), USERS, 2, 1, examples_per_user=K), verbose=0)
    model.fit(dp.data.poisson_batches((X, Y), 2, 1), verbose=0)
    with pytest.raises(ValueError, match="they protect different units"):
        model.ledger.epsilon(1e-3)


# What is refused: batches that are not clipped as the sampling says.


def test_batches_that_lost_their_users_are_refused():
    def unknown(mask):
        return tf.numpy_function(lambda m: m, [mask], tf.float32)

    batches = everybody()
    for change in (
        lambda x, y, rows: (x, y),
        lambda x, y, rows: (x, y, tf.reshape(rows.mask, [-1])),
        lambda x, y, rows: (x, y, rows._replace(mask=tf.reshape(rows.mask, [-1]))),
        lambda x, y, rows: (x, y, rows._replace(mask=tf.reshape(rows.mask, [-1, 3]))),
        lambda x, y, rows: (x, y, rows._replace(mask=unknown(rows.mask))),
    ):
        mapped = dataclasses.replace(batches, dataset=batches.dataset.map(change))
        model = make()
        with pytest.raises(ValueError, match="clipped as one|K known|are padding is lost"):
            model.fit(mapped, verbose=0)
        assert int(model.optimizer.iterations) == 0


def test_users_under_a_sampling_of_examples_are_refused():
    """A user's clipped gradient moves by up to 2C where one of the user's examples goes."""
    model = make()
    claimed = Sampling.poisson(8, 8)
    with pytest.raises(ValueError, match="each row is clipped alone, but in the batches 9 rows"):
        model.fit(dataclasses.replace(everybody(), sampling=claimed), verbose=0)
    model.sampling = claimed
    with pytest.raises(ValueError, match="each row is clipped alone, but in the batches 9 rows"):
        model.train_on_batch(*next(iter(everybody().dataset)))


def test_rows_are_refused_also_where_the_step_is_traced_already():
    """The graph of a step by row stands, and must not serve a sampling of users."""
    model = make(sgd(4))
    model.sampling = Sampling.poisson(N, 4)
    model.train_on_batch(X, Y)
    model.sampling = Sampling.poisson(8, 4, unit="user", examples_per_unit=K)
    with pytest.raises(ValueError, match="3 rows of a user are clipped as one, but"):
        model.train_on_batch(X, Y)
    model.sampling = Sampling.poisson(N, 4)
    model.train_on_batch(X, Y)
    assert int(model.optimizer.iterations) == 2


def test_users_of_ones_own():
    """Batches of one's own making, with the mask that says whose the rows are."""
    mask = np.float32([[1, 1, 0], [1, 1, 1]])
    dataset = tf.data.Dataset.from_tensors((X[:6], Y[:6], RowInfo(mask))).repeat(2)
    sampling = Sampling.poisson(100, 2, unit="user", examples_per_unit=3)
    model = make(sgd(2))
    with tf.GradientTape(persistent=True) as tape:
        losses = [tf.reduce_mean(tf.square(Y[part] - model(X[part]))) for part in
                  (slice(0, 2), slice(3, 6))]  # fmt: skip
    users = [[np.float64(g) for g in tape.gradient(loss, model.trainable_variables)]
             for loss in losses]  # fmt: skip
    before = model.get_weights()
    model.fit(dp.data.assume_sampling(dataset.take(1), sampling), verbose=0)
    moved = [b - a for b, a in zip(before, model.get_weights(), strict=True)]
    assert_close(moved, [total / 2 for total in clip_and_sum(users, CLIP)])
