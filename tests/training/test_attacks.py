"""Ways to train that once spent more than the ledger said, or whose noise was not as accounted."""

import contextlib
import itertools
import os
import warnings

import dp_accounting
import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

import dp_keras_opt as dp
from dp_keras_opt.noise.gaussian import NORMAL
from dp_keras_opt.noise.source import NoiseSource

N, B, DELTA = 24, 8, 1e-3
X = np.random.default_rng(1).normal(size=(N, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def _model(noise="gaussian", **kwargs):
    inputs = keras.Input((3,))
    model = dp.DPModel(inputs, keras.layers.Dense(1)(inputs))
    optimizer = dp.optimizers.DPSGD(
        0.1, clip_norm=1.0, noise_multiplier=1.0, batch_size=B, noise=noise
    )
    model.compile(optimizer, "mse", **kwargs)
    return model


@pytest.mark.parametrize("wrap", [lambda step: step, lambda step: tf.function(step)])
def test_a_step_past_the_ledger_is_refused(wrap):
    model = _model()
    model.fit(X, Y, verbose=0)  # what it traced must not open the way
    spent, before = model.ledger.epsilon(DELTA), model.get_weights()
    with pytest.raises(RuntimeError, match="train_on_batch"):
        wrap(model.train_step)((tf.constant(X[:B]), tf.constant(Y[:B])))
    assert model.ledger.epsilon(DELTA) == spent
    assert np.array_equal(model.get_weights()[0], before[0])


@pytest.mark.parametrize(
    ("sampling", "refuses"),
    [
        (dp.accounting.Sampling.without_replacement(N, B), True),
        (dp.accounting.Sampling.shuffled(N, B), True),
        (dp.accounting.Sampling.poisson(N, B), False),  # may draw everybody
        (dp.accounting.Sampling.truncated_poisson(N, B, 12), True),
    ],
    ids=["without replacement", "shuffled", "Poisson", "Poisson, cut"],
)
def test_larger_batches_than_are_accounted_are_refused(sampling, refuses):
    model = _model()
    padded = dp.data.RowInfo(np.float32([1] * B + [0] * (N - B)))
    batches = dp.data.assume_sampling((b for b in [(X[:B], Y[:B]), (X, Y), (X, Y)]), sampling)
    model.sampling, given = batches.sampling, iter(batches)
    model.train_on_batch(*next(given))
    if not refuses:
        model.train_on_batch(*next(given))
        return
    with pytest.raises(ValueError, match="A batch has 24 rows, but"):
        model.train_on_batch(*next(given))
    model.train_on_batch(*next(given), padded)
    assert model.ledger.steps == 2


def test_the_tail_of_normal_noise_goes_beyond_that_of_tensorflow():
    """Which ends at 5.68: a probability of 1e-7, hundreds of times in the training of a model."""

    def pair(radius, angle):
        source = NoiseSource()
        source.words = lambda *shape: tf.constant([[radius], [angle]], tf.int64)
        return source.draw(NORMAL, (2,)).numpy()

    for angle, expected in ((0, (-1, 0)), (1, (1, 0)), (2, (0, -1)), (3, (0, 1))):
        largest = pair(-1, angle)
        np.testing.assert_allclose(largest, 9.493 * np.array(expected), rtol=1e-3, atol=1e-3)
    assert np.abs(pair(0, 0)).max() < 1e-3  # the smallest


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (0,)])
def test_normal_noise_of_any_shape(shape):
    assert tuple(NoiseSource().draw(NORMAL, shape).shape) == shape


def test_the_two_of_a_pair_are_independent():
    """5 standard errors: a false alarm in 1 of 800,000 draws of these four figures."""
    draws = NoiseSource().draw(NORMAL, (1_000_000,)).numpy().astype(np.float64)
    a, b = draws[:500_000], draws[500_000:]
    for x, y in ((a, b), (a**2, b**2), (np.abs(a), b), (a, b**2)):
        assert abs(np.corrcoef(x, y)[0, 1]) < 5 / np.sqrt(500_000)


def test_normal_noise_is_normal():
    draws = NoiseSource().draw(NORMAL, (1_000_000,)).numpy().astype(np.float64)
    for moment, expected in ((1, 0), (2, 1), (4, 3), (6, 15)):
        assert abs(np.mean(draws**moment) - expected) < 0.01 * 3**moment
    assert stats.kstest(draws[:100_000], "norm").pvalue > 1e-4


@pytest.mark.parametrize("kind", ["shuffled", "fixed_order"])
def test_passes_shorter_than_the_stated_epochs_are_refused(kind):
    data = tf.data.Dataset.from_tensor_slices((X[:23], Y[:23])).batch(B, drop_remainder=True)
    state = getattr(dp.accounting.Sampling, kind)
    with pytest.raises(ValueError, match="drop_remainder"):
        _model().fit(dp.data.assume_sampling(data, state(23, B)), epochs=9, verbose=0)
    model = _model()
    truth = state(23, B, drop_remainder=True)
    model.fit(dp.data.assume_sampling(data.repeat(2), truth), epochs=2, verbose=0)
    assert model.ledger.steps == 8


class StopsAtOnce(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = True


def test_single_steps_after_a_broken_off_epoch_are_a_run_of_their_own():
    model = _model()
    data = dp.data.fixed_order_epochs((X, Y), B)
    model.fit(data, verbose=0, callbacks=[StopsAtOnce()])
    model.sampling = data.sampling
    for _ in range(2):  # in one run, an example would come twice in a pass
        for batch in data:
            model.train_on_batch(*batch)
    assert [segment.steps for segment in model.ledger.segments] == [1, 6]


TURNS = dp.accounting.Sampling.cyclic_poisson(N, B, 3)
ORDER = dp.accounting.Sampling.fixed_order(N, B)
BANDS = dp.noise.BandedMatrix(6, 3)


@pytest.mark.parametrize(
    ("sampling", "noise", "what"),
    [
        (TURNS, "gaussian", "'cyclic_poisson' sampling"),
        (TURNS, BANDS, "Correlated noise"),
        (ORDER, BANDS, "Correlated noise"),
    ],
)
def test_a_loop_of_ones_own_may_leave_batches_out(sampling, noise, what):
    """Eight models in turns had ε = 1.684 each, where it was 2.672."""
    model = _model(noise)
    model.sampling = sampling
    with pytest.raises(ValueError, match=f"{what}.*needs fit, which takes every batch in its turn"):
        model.train_on_batch(X[:B], Y[:B])
    assert model.ledger.steps == 0


ONCE_A_PASS = ["fixed_order", "shuffled", "balls_in_bins"]


@pytest.mark.parametrize("kind", ONCE_A_PASS)
def test_a_loop_of_ones_own_may_leave_out_what_comes_once_a_pass(kind):
    """It pays for a whole pass."""
    model = _model()
    batches = _once_a_pass(kind, _rows())
    model.sampling = batches.sampling
    model.train_on_batch(*next(iter(batches)))
    whole = dp.accounting.Ledger.of(model.optimizer, model.sampling, N // B)
    assert model.ledger.epsilon(DELTA) == pytest.approx(whole.epsilon(DELTA))


@pytest.mark.parametrize("kind", ONCE_A_PASS)
def test_passes_of_ones_own_data_are_counted_where_they_begin(kind):
    """Some batches kept for validation, and others dealt to models: 20 passes were 10, and 6."""
    kept, *dealt = models = [_model() for _ in range(1 + N // B)]
    batches = _once_a_pass(kind, _rows())
    for model in models:
        model.sampling = batches.sampling
    for _ in range(20):
        for number, batch in enumerate(batches):
            if number != 1:
                kept.train_on_batch(*batch)
    for _ in range(20):
        for model, batch in zip(dealt, batches, strict=True):
            model.train_on_batch(*batch)
    oracle = dp.accounting.Ledger.of(kept.optimizer, batches.sampling, 20 * N // B)
    for model in models:
        assert model.ledger.epsilon(DELTA) == pytest.approx(oracle.epsilon(DELTA))
    if kind == "fixed_order":  # a row that is replaced moves 20 sums by 2 C
        multiplier = kept.optimizer.noise_multiplier / 2 / 20**0.5
        alone = dp_accounting.get_epsilon_gaussian(multiplier, DELTA)
        assert kept.ledger.epsilon(DELTA) == pytest.approx(alone, rel=1e-3)


def test_passes_of_data_without_an_end_are_counted():
    def rows():
        while True:
            yield from _rows()

    model, batches = _model(), _once_a_pass("shuffled", rows())
    model.sampling = batches.sampling
    for number, batch in enumerate(batches):
        if number == 10 * (N // B):
            break
        if number % (N // B) == 0:
            model.train_on_batch(*batch)
    whole = dp.accounting.Ledger.of(model.optimizer, batches.sampling, 10 * (N // B))
    assert model.ledger.epsilon(DELTA) == pytest.approx(whole.epsilon(DELTA))


@pytest.mark.parametrize("kind", ONCE_A_PASS)
def test_a_loop_in_which_nothing_counts_the_passes_is_refused(kind):
    model = _model()
    model.sampling = getattr(dp.accounting.Sampling, kind)(N, B)
    with pytest.raises(ValueError, match=f"'{kind}'.*whole passes.*assume_sampling"):
        model.train_on_batch(X[:B], Y[:B])
    assert model.ledger.steps == 0
    own = _once_a_pass(kind, tf.data.Dataset.from_tensor_slices((X, Y)).batch(B))
    model.sampling = own.sampling
    with pytest.raises(ValueError, match=f"'{kind}'.*whole passes.*assume_sampling"):
        model.train_on_batch(*next(iter(own.dataset)))
    model.fit(own, verbose=0)  # which begins its passes itself
    assert model.ledger.steps == N // B


@pytest.mark.parametrize("own", [False, True])
def test_each_step_needs_a_batch_that_was_drawn_for_it(own):
    """Batches that are kept, or drawn past what counts them: of 20 passes 1 to 10 were counted."""
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(B)
    batches = _once_a_pass("fixed_order", data) if own else dp.data.fixed_order_epochs((X, Y), B)
    refused = pytest.raises(ValueError, match="No batch was drawn since the last step")

    def model():
        made = _model()
        made.sampling = batches.sampling
        return made

    held, one = list(batches), model()
    one.train_on_batch(*held[0])
    with refused:
        one.train_on_batch(*held[1])
    one = model()
    one.train_on_batch(*next(iter(batches)))  # as to build it
    with refused:
        for batch in batches.dataset:
            one.train_on_batch(*batch)
    one = model()
    with refused:
        for batch, other in zip(batches, batches, strict=True):
            one.train_on_batch(*batch)
            one.train_on_batch(*other)
    assert one.ledger.steps == 1


def test_steps_on_other_batches_than_those_of_the_stated_sampling_are_refused():
    """Of each epoch anew, where the model knows those of the first."""
    model, first = _model(), _once_a_pass("shuffled", (batch for batch in _rows()))
    model.sampling = first.sampling
    for batch in first:
        model.train_on_batch(*batch)
    again = _once_a_pass("shuffled", (batch for batch in _rows()))
    with pytest.raises(ValueError, match="No batch was drawn since the last step"):
        model.train_on_batch(*next(iter(again)))
    model.sampling = again.sampling
    for batch in again:
        model.train_on_batch(*batch)
    assert model.ledger.steps == 2 * (N // B) - 1


def test_the_sampling_of_other_batches_has_other_passes():
    """Else those of one would be counted for the other."""
    theirs = dp.data.fixed_order_epochs((X, Y), B)
    next(iter(theirs))
    model, own = _model(), dp.data.assume_sampling(_Listed(_rows()), theirs.sampling)
    model.sampling = own.sampling
    with pytest.raises(ValueError, match="whole passes"):
        model.train_on_batch(X[:B], Y[:B])


def _rows():
    return [(X[start : start + B], Y[start : start + B]) for start in range(0, N, B)]


def _once_a_pass(kind, data):
    """Batches of one's own of which each example is in one a pass."""
    if isinstance(data, list):
        data = _Listed(data)
    return dp.data.assume_sampling(data, getattr(dp.accounting.Sampling, kind)(N, B))


class _Listed(keras.utils.PyDataset):
    def __init__(self, batches):
        super().__init__()
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


def test_a_budget_where_data_end_early_with_correlated_noise():
    model = _model(noise=dp.noise.SquareRootFactorization(9, 9), steps_per_execution=2)
    data = dp.data.fixed_order_epochs((X, Y), B)
    ended = data.dataset.take(1).filter(lambda x, y, rows: True)  # of unknown length
    early = dp.data.assume_sampling(ended, data.sampling)
    budget = dp.callbacks.PrivacyBudget(epsilon=1e6, delta=DELTA)
    model.fit(early, epochs=2, verbose=0, callbacks=[budget])
    assert [segment.steps for segment in model.ledger.segments if segment.steps] == [1, 1]


@pytest.mark.parametrize("largest", [1, 2, 3])
def test_joint_moments_of_batches_beyond_their_bound_are_refused(largest):
    # Of N = 1, two means of norm C/B and C/B apart have squares √1.5·(C/B)² apart, not (C/B)².
    moments = dp.optimizers.moments.Joint(1.0, max_batch_size=largest, adjacency="replace_one")
    optimizer = dp.optimizers.DPAdam(
        clip_norm=1.0, noise_multiplier=1.0, batch_size=B, second_moment=moments
    )
    with pytest.raises(ValueError, match="at least 4"):
        optimizer.check_sampling(dp.accounting.Sampling.shuffled(N, B))


@pytest.mark.parametrize("seed", range(5))
def test_a_matrix_comes_back_from_its_configuration_to_the_last_bit(seed):
    rng = np.random.default_rng(seed)
    mechanism = dp.noise.from_matrix(np.tril(rng.uniform(0.1, 1, (20, 20))))
    assert type(mechanism).from_config(mechanism.get_config()) == mechanism


class CountsCalls(keras.layers.Layer):
    """A counter that is saved, as an annealed weight of a loss has."""

    def build(self, shape):
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, inputs):
        self.calls.assign_add(1.0)
        return inputs


@pytest.mark.parametrize("options", [{}, {"jit_compile": True}, {"run_eagerly": True}])
def test_seeds_and_counters_do_not_tell_how_large_batches_were(options):
    """They are saved with the model, and would advance once for each block of a draw."""
    states = []
    for batch_size in (8, 64):
        inputs = keras.Input((3,))
        hidden = CountsCalls()(keras.layers.Dropout(0.5, seed=1)(inputs))
        model = dp.DPModel(inputs, keras.layers.Dense(1)(hidden))
        optimizer = dp.optimizers.DPSGD(  # with a seed, so that those of layers stay as they are
            0.1, clip_norm=1.0, noise_multiplier=1.0, batch_size=batch_size, seed=0
        )
        model.compile(optimizer, "mse", **options)
        data = np.zeros((80, 3)), np.zeros((80, 1))
        batches = dp.data.poisson_batches(data, batch_size, 5, physical_batch_size=8)
        model.fit(batches, epochs=2, verbose=0)
        assert float(model.layers[2].calls) == 10
        states.append(np.array(model.layers[1].seed_generator.state))
    np.testing.assert_array_equal(*states)


def test_blocks_of_a_batch_have_masks_of_their_own():
    """Though seeds advance once a step: within a step they go on from block to block."""
    inputs = keras.Input((1000,))
    model = dp.DPModel(inputs, keras.layers.Dropout(0.5, seed=1)(keras.layers.Dense(1000)(inputs)))
    model.layers[1].set_weights([np.zeros((1000, 1000)), np.ones(1000)])
    optimizer = dp.optimizers.DPSGD(1.0, clip_norm=1e9, noise_multiplier=0.0, batch_size=2)
    model.compile(optimizer, lambda y, y_pred: tf.reduce_sum(y_pred, axis=-1))
    data = tf.data.Dataset.from_tensors((np.zeros((2, 1000), "float32"), np.zeros((2, 1))))
    model.compile(optimizer, model.loss, physical_batch_size=1)
    model.fit(dp.data.assume_sampling(data, dp.accounting.Sampling.full(2)), verbose=0)
    moved = 1 - model.layers[1].get_weights()[1]  # 2·(kept by the first + by the second)/2
    assert set(np.round(moved).astype(int)) == {0, 1, 2} and 0.4 < np.mean(moved == 1) < 0.6


@pytest.mark.parametrize("jit_compile", [False, True])
def test_the_masks_of_a_block_do_not_come_again_in_the_next_step(jit_compile):
    """They did: of the second block, as those of the first."""
    inputs = keras.Input((1000,))
    model = dp.DPModel(inputs, keras.layers.Dropout(0.5, seed=1)(keras.layers.Dense(1000)(inputs)))
    model.layers[1].set_weights([np.zeros((1000, 1000)), np.zeros(1000)])
    optimizer = dp.optimizers.DPSGD(1.0, clip_norm=1e9, noise_multiplier=0.0, batch_size=3)

    def loss(y, y_pred):
        return y[:, 0] * tf.reduce_sum(y_pred, axis=-1)

    model.compile(optimizer, loss, physical_batch_size=1, jit_compile=jit_compile)
    y = np.array([[1.0], [10.0], [100.0]], "float32")
    data = tf.data.Dataset.from_tensors((np.zeros((3, 1000), "float32"), y))
    biases = [np.zeros(1000)]
    keep = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_: biases.append(model.layers[1].get_weights()[1])
    )
    batches = dp.data.assume_sampling(data, dp.accounting.Sampling.full(3))
    model.fit(batches, epochs=3, verbose=0, callbacks=[keep])
    kept = np.round(-np.diff(biases, axis=0) * 3 / 2).astype(int)  # the sum of them, times y
    masks = [step // scale % 10 for step in kept for scale in (1, 10, 100)]
    alike = [np.mean(one == other) for one, other in itertools.combinations(masks, 2)]
    assert set(np.concatenate(masks)) == {0, 1}
    assert min(alike) > 0.4 and max(alike) < 0.6  # 36 of them, each 6 standard deviations wide


# Weights that are loaded while `fit` runs; optimizers and batches that two models share.


def _loads(model, path, at_step=1, at_epoch=0):
    """Goes back to the weights after a step, at the end of an epoch."""

    class Loads(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if int(model.optimizer.iterations.numpy()) == at_step and not path.exists():
                model.save_weights(path)

        def on_epoch_end(self, epoch, logs=None):
            if epoch == at_epoch:
                model.load_weights(path)

    return Loads()


def test_batch_sizes_do_not_part_from_the_steps_of_their_accounting(tmp_path):
    """Batches of 200 were accounted as batches of 4: ε = 2.96 was stated, 9.0 was true."""
    sizes = {0: 4, 10: 20}
    optimizer = dp.optimizers.DPSGD(0.01, clip_norm=1.0, noise_multiplier=1.0, batch_size=sizes)
    model = _model()
    model.compile(optimizer, "mse")
    batches = dp.data.poisson_batches((X, Y), sizes, steps_per_epoch=20)
    loads = _loads(model, tmp_path / "w.weights.h5")
    with pytest.raises(ValueError, match="step counter was set to 1 while fit runs"):
        model.fit(batches, epochs=2, steps_per_epoch=10, verbose=0, callbacks=[loads])
    assert model.ledger.steps == 10


@pytest.mark.parametrize(("length", "refused"), [(1, True), (N // B, False)])
def test_windows_of_a_schedule_do_not_move_within_a_pass(tmp_path, length, refused):
    """A row of step 9 and of the next pass's first was accounted once: 0.93 for up to 1.36."""
    model = _model()
    optimizer = dp.optimizers.DPSGD(
        0.01, clip_norm=1.0, noise_multiplier=1.0, batch_size=B,
        noise_schedule=[5.0] * 2 + [1.0] * 20,
    )  # fmt: skip
    model.compile(optimizer, "mse")
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(B, drop_remainder=True)
    data = dp.data.assume_sampling(data, dp.accounting.Sampling.shuffled(N, B))
    loads = _loads(model, tmp_path / "w.weights.h5", at_step=length)

    def fit():
        model.fit(data, epochs=4, steps_per_epoch=length, verbose=0, callbacks=[loads])

    if refused:
        with pytest.raises(ValueError, match="within a pass of 3 steps"):
            fit()
        assert model.ledger.steps == 1
    else:
        fit()
        assert model.ledger.steps == 12


FALLING = {
    "clip_norm": 1.0, "noise_multiplier": 1.0, "batch_size": B,
    "noise_schedule": [5.0] * 2 + [1.0] * 30,
}  # fmt: skip


def test_balls_fall_into_bins_of_whole_passes(tmp_path):
    """Weights loaded within a pass moved the windows: at σ = 0.5, 11.8 was said for 12.9."""
    model = _model()
    model.compile(dp.optimizers.DPSGD(0.01, **FALLING), "mse")

    class Loads(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 0:
                model.save_weights(tmp_path / "w.weights.h5")
            if batch == 1:
                model.load_weights(tmp_path / "w.weights.h5")

    with pytest.raises(ValueError, match="within a pass of 3 steps"):
        model.fit(X, Y, batch_size=B, epochs=2, verbose=0, callbacks=[Loads()])
    assert model.ledger.steps == 2
    model.fit(X, Y, batch_size=B, epochs=1, verbose=0)  # a new pass


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_an_own_loop_does_not_move_the_windows_of_a_schedule(tmp_path, steps):
    """Weights loaded within an epoch, which went on: 1.39 was said for 2.05."""
    model, path = _model(), tmp_path / "w.weights.h5"
    model.compile(dp.optimizers.DPSGD(0.01, **FALLING), "mse")
    batches = _once_a_pass("shuffled", _rows() * 2)
    model.sampling, given = batches.sampling, iter(batches)
    for _ in range(steps):
        model.train_on_batch(*next(given))
    model.save_weights(path)
    model.load_weights(path)
    for _ in range(-steps % model.sampling.period):
        with pytest.raises(ValueError, match="within a pass of 3 steps"):
            model.train_on_batch(*next(given))
        model.compile(dp.optimizers.DPSGD(0.01, **FALLING), "mse")  # the epoch is as far as it was
    model.train_on_batch(*next(given))
    assert model.ledger.steps == steps + 1


def test_a_sampler_says_where_a_pass_of_an_own_loop_begins(tmp_path):
    model, path = _model(), tmp_path / "w.weights.h5"
    model.compile(dp.optimizers.DPSGD(0.01, **FALLING), "mse")
    batches = dp.data.balls_in_bins((X, Y), B)
    model.sampling = batches.sampling
    for epoch in range(3):
        for x, y, sample_weight in batches:
            model.train_on_batch(x, y, sample_weight)
            if epoch == 0:
                break
        model.save_weights(path)
        model.load_weights(path)
    assert [segment.steps for segment in model.ledger.segments] == [1, 3, 3]


def test_two_models_do_not_go_on_in_one_memory_of_noise():
    """Of one stream each counted every other step: 4.4 for 6.0."""
    inputs = keras.Input((3,))
    outputs = keras.layers.Dense(1)(inputs)
    models = [dp.DPModel(inputs, outputs) for _ in range(2)]
    noise = dp.noise.BandedMatrix(steps=12, bands=3)
    optimizer = dp.optimizers.DPSGD(
        0.01, clip_norm=1.0, noise_multiplier=4.0, batch_size=B, noise=noise
    )
    batches = dp.data.fixed_order_epochs((X, Y), B)
    for model in models:
        model.compile(optimizer, "mse")
    alone = dp.accounting.Ledger.of(optimizer, batches.sampling, 3).epsilon(DELTA)
    other = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: models[1].fit(batches, verbose=0)
    )
    models[0].fit(batches, verbose=0, callbacks=[other])
    segments = models[0].ledger.segments
    assert sorted(segment.steps for segment in segments) == [1] * 3 + [3] * 3  # runs of their own
    assert models[0].ledger.epsilon(DELTA) > alone


def test_a_history_of_another_fit_does_not_say_that_this_one_is_over():
    model = _model()
    batches = dp.data.poisson_batches((X, Y), B, 2)
    model.fit(batches, initial_epoch=9, epochs=10, verbose=0)

    class Stops(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = True

    own = keras.callbacks.CallbackList([Stops()], add_history=False, model=model)
    model.fit(batches, epochs=10, verbose=0, callbacks=own)
    assert model.ledger.steps == 4
    planned = dp.accounting.Ledger.of(model.optimizer, batches.sampling, 22)
    assert model.ledger.epsilon_as_planned(DELTA) == pytest.approx(planned.epsilon(DELTA))


def test_checkpoints_without_the_ledger_are_refused():
    class OrbaxCheckpoint(keras.callbacks.Callback):
        """By its name: the one of Keras needs a package."""

    model = _model()
    with pytest.raises(ValueError, match="without the ledger"):
        model.fit(dp.data.poisson_batches((X, Y), B), verbose=0, callbacks=[OrbaxCheckpoint()])
    assert model.ledger.steps == 0


# Ledgers and budgets.

BUDGETS = [dp.callbacks.PrivacyBudget(1.0, 1e-3), dp.callbacks.PrivacyBudget(4.0, 1e-3)]


@pytest.mark.parametrize("budgets", [BUDGETS, BUDGETS[::-1], keras.callbacks.CallbackList(BUDGETS)])
def test_two_budgets_of_which_one_would_be_kept_are_refused(budgets):
    """Only the last was: 3.997 was spent under a budget of 1."""
    model = _model()
    with pytest.raises(ValueError, match="Several budgets"):
        model.fit(X, Y, verbose=0, callbacks=budgets)
    assert model.ledger.steps == 0


def test_a_callback_list_of_ones_own_with_a_budget():
    model = _model()
    budget = dp.callbacks.PrivacyBudget(40.0, DELTA)
    callbacks = keras.callbacks.CallbackList([budget], add_history=True, model=model)
    model.fit(X, Y, epochs=50, verbose=0, callbacks=callbacks)
    assert 0 < model.ledger.epsilon(DELTA) <= 40.0


def _moved(path):
    path.rename(path.with_suffix(".old"))


def _replaced(path):
    copy = path.with_suffix(".new")
    copy.write_bytes(path.read_bytes())
    os.link(path, path.with_suffix(".backup"))  # as editors do, so that the old file stays
    copy.replace(path)


@pytest.mark.parametrize("what", [_moved, _replaced])
def test_a_ledger_file_that_is_another_one_stops_the_training(tmp_path, what):
    """The file at the path would say less than was spent: 0 or 0.936 of 2.707."""
    path = tmp_path / "spent.jsonl"
    model = _model()
    model.ledger = dp.accounting.Ledger(path)
    model.fit(X, Y, verbose=0)
    what(path)
    with pytest.raises(RuntimeError, match="moved or replaced"):
        model.fit(X, Y, epochs=3, verbose=0)


def test_a_ledger_that_gave_up_its_file_records_no_further_run(tmp_path):
    path = tmp_path / "spent.jsonl"
    model = _model()
    model.ledger = dp.accounting.Ledger(path)
    model.fit(X, Y, verbose=0)
    model.ledger.unlock()
    with pytest.raises(RuntimeError, match="given up its file"):
        model.fit(X, Y, verbose=0)
    model.ledger = dp.accounting.Ledger(path)
    model.fit(X, Y, verbose=0)
    assert dp.accounting.Ledger.read(path).steps == model.ledger.steps == 6


def test_steps_are_never_entered_into_the_run_of_another_model(tmp_path):
    """Of two threads, one entered a step of its own as one under the other's larger noise."""
    first, second = _model(), _model()
    second.ledger = first.ledger
    sampling = dp.accounting.Sampling.full(N)
    for each in (first, second):
        each.compile(
            dp.optimizers.DPSGD(0.1, clip_norm=1.0, noise_multiplier=1.0, batch_size=N), "mse"
        )
        each.sampling = sampling

    class Interferes(dp.callbacks.PrivacyBudget):
        """What another thread does between the check and the reservation."""

        filter = None

        def affords(self, ledger, steps):
            first._guard.budget = None
            second.train_on_batch(X, Y)
            return True

    first._guard.budget = Interferes(1e6, DELTA)
    before = first.get_weights()
    with pytest.raises(RuntimeError, match="Another model began a run"):
        first.train_on_batch(X, Y)
    assert all(map(np.array_equal, before, first.get_weights()))
    assert first.ledger.steps == 1


class ShufflesItself(keras.utils.PyDataset):
    """Another order after each epoch of Keras, as its documentation shows."""

    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(1)
        self.on_epoch_end()

    def __len__(self):
        return N // B

    def __getitem__(self, index):
        rows = self.order[index * B : (index + 1) * B]
        return X[rows], Y[rows]

    def on_epoch_end(self):
        self.order = self.rng.permutation(N)


@pytest.mark.parametrize(("steps", "cap"), [(1, None), (2, None), (None, 2), (3, 2)])
def test_a_pydataset_is_not_put_into_another_order_within_a_pass(steps, cap, monkeypatch):
    monkeypatch.setattr(keras.config, "max_steps_per_epoch", lambda: cap)
    data = dp.data.assume_sampling(ShufflesItself(), dp.accounting.Sampling.shuffled(N, B))
    model = _model()
    with pytest.raises(ValueError, match="would end within one"):
        model.fit(data, steps_per_epoch=steps, epochs=2, verbose=0)
    assert model.ledger.steps == 0


def test_a_pydataset_in_whole_passes():
    data = dp.data.assume_sampling(ShufflesItself(), dp.accounting.Sampling.shuffled(N, B))
    model = _model()
    for steps in (None, N // B):
        model.fit(data, steps_per_epoch=steps, epochs=2, verbose=0)
    assert model.ledger.steps == 4 * N // B


class ShufflesAtFirst(ShufflesItself):
    """In the method that Keras calls when an epoch begins, after its workers have started."""

    def __init__(self, **kwargs):
        keras.utils.PyDataset.__init__(self, **kwargs)
        self.rng = np.random.default_rng(1)
        self.on_epoch_begin()

    def on_epoch_begin(self):
        self.order = self.rng.permutation(N)

    def on_epoch_end(self):
        pass


@pytest.mark.parametrize("ahead", [{"workers": 2}, {"workers": 1, "use_multiprocessing": True}])
@pytest.mark.parametrize("kind", ["shuffled", "poisson"])
def test_workers_do_not_read_what_moves(ahead, kind):
    """With workers=4 and a second for the order, examples came twice in each of four epochs."""
    sampling = getattr(dp.accounting.Sampling, kind)(N, B)
    model = _model()
    with pytest.raises(ValueError, match="Keras starts the workers before"):
        model.fit(dp.data.assume_sampling(ShufflesAtFirst(**ahead), sampling), verbose=0)
    assert model.ledger.steps == 0


def test_an_order_of_ones_own_beside_workers():
    shuffled = dp.accounting.Sampling.shuffled(N, B)
    model = _model()
    model.fit(dp.data.assume_sampling(ShufflesAtFirst(), shuffled), epochs=2, verbose=0)
    ahead = ShufflesItself()
    ahead.workers = 2
    model.fit(dp.data.assume_sampling(ahead, shuffled), epochs=2, verbose=0)
    assert model.ledger.steps == 4 * N // B


@pytest.mark.parametrize("noise", ["gaussian", "laplace"])
def test_what_a_fit_knew_of_its_data_says_nothing_of_other_batches(noise):
    """Of the same batch ten times ε was 2.5 where 7 was true: it went on as shuffled epochs."""
    model = _model(noise)
    model.fit(X, Y, batch_size=B, shuffle=False, verbose=0)
    steps, before = model.ledger.steps, model.get_weights()
    with pytest.raises(ValueError, match="How this batch is sampled is not known"):
        model.train_on_batch(X[:B], Y[:B])
    assert model.ledger.steps == steps
    np.testing.assert_equal(model.get_weights(), before)
    model.sampling = dp.accounting.Sampling.full(B, adjacency="replace_one")
    model.train_on_batch(X[:B], Y[:B])
    *_, last = model.ledger.segments
    assert (last.steps, last.sampling.kind) == (1, "full")
    assert "stated sampling" in last.conditions
    model.fit(X, Y, batch_size=B, shuffle=False, verbose=0)  # and again after the next
    with pytest.raises(ValueError, match="How this batch is sampled is not known"):
        model.train_on_batch(X[:B], Y[:B])


WITHIN = {
    "steps": lambda model: model.train_on_batch(X[:B], Y[:B]),
    "another sampling": lambda model: setattr(
        model, "sampling", dp.accounting.Sampling.poisson(10_000, B)
    ),
    "another fit": lambda model: model.fit(X, Y, batch_size=B, verbose=0),
}


@pytest.mark.parametrize("what", WITHIN)
def test_callbacks_do_not_train_on_other_data(what):
    model = _model()
    more = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: WITHIN[what](model))
    with pytest.raises(ValueError, match="while fit runs"):
        model.fit(dp.data.poisson_batches((X, Y), B), verbose=0, callbacks=[more])
    (segment,) = model.ledger.segments
    assert (segment.steps, segment.sampling.num_examples) == (N // B, N)
    model.fit(dp.data.poisson_batches((X, Y), B), verbose=0)  # it is over for the model


def test_a_ledger_that_was_exchanged_is_heard_of_still(tmp_path):
    """`PrivateData` counted on in the model's ledger of before, of which nobody knew."""
    model = _model()
    private = dp.statistics.PrivateData(model.ledger)
    path = tmp_path / "spent.jsonl"
    model.ledger = dp.accounting.Ledger(path)
    private.mean(Y[:, 0], (-3, 3), 1.0, DELTA)
    model.fit(dp.data.poisson_batches((X, Y), B), verbose=0)
    assert [segment.steps for segment in model.ledger.segments] == [1, N // B]
    assert [segment.steps for segment in dp.accounting.Ledger.read(path).segments] == [1, N // B]


def _with_dropout(**kwargs):
    keras.utils.set_random_seed(1)  # as in a published notebook
    inputs = keras.Input((3,))
    hidden = keras.layers.Dropout(0.5, seed=7)(keras.layers.Dense(64)(inputs))
    model = dp.DPModel(inputs, keras.layers.Dense(1)(hidden))
    optimizer = dp.optimizers.DPSGD(
        0.1, clip_norm=1.0, noise_multiplier=1e-6, batch_size=N, **kwargs
    )
    model.compile(optimizer, "mse")
    return model


def _seeds_of(model):
    """The state of its dropout: [seed, count of draws]."""
    (dropout,) = (layer for layer in model.layers if isinstance(layer, keras.layers.Dropout))
    return keras.ops.convert_to_numpy(dropout.seed_generator.state).tolist()


def _after_a_step(**kwargs):
    model = _with_dropout(**kwargs)
    batches = dp.data.poisson_batches((X, Y), N, 1)  # all of them
    model.fit(batches, verbose=0)
    return np.concatenate([np.ravel(w) for w in model.get_weights()])


def test_nobody_knows_which_place_in_a_batch_has_which_dropout():
    """With masks that are known by place, one example that is gone moves the sum by 15 C."""
    one, other = _after_a_step(), _after_a_step()
    assert np.abs(one - other).max() > 1e-3
    one, other = _after_a_step(seed=5), _after_a_step(seed=5)  # whose noise is known, too
    np.testing.assert_allclose(one, other, atol=1e-5)


def test_each_training_draws_the_seeds_of_layers_anew_and_leaves_those_that_were_given():
    """An exported model has the seeds that are there, with the count of steps: not the secret."""
    model, found = _with_dropout(), []

    class Looks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            found.append(_seeds_of(model)[0])

    given = _seeds_of(model)
    for _ in range(2):
        model.fit(dp.data.poisson_batches((X, Y), N, 1), verbose=0, callbacks=[Looks()])
        assert _seeds_of(model) == given
    assert len({7, *found}) == 3
    model.sampling = dp.accounting.Sampling.full(N)
    before = model.get_weights()
    model.train_on_batch(X, Y)
    assert _seeds_of(model) == given
    assert not np.array_equal(before[0], model.get_weights()[0])


@pytest.mark.parametrize("way", ["export", "the original's", "serving"])
def test_what_is_exported_while_it_trains_does_not_hold_the_secret_seeds(tmp_path, way):
    model = _with_dropout()
    optimizer = model.optimizer
    original = keras.Model(model.inputs, model.outputs)
    if way == "the original's":
        model = dp.make_private(original)
        model.compile(optimizer, "mse")
    report = dp.callbacks.PrivacyReport(delta=1e-5)
    states = []

    class Exports(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            states.append(_seeds_of(model))
            if way == "serving":
                dp.serving.export(model, tmp_path, report)
            else:
                (original if way == "the original's" else model).export(tmp_path, verbose=False)
            states.append(_seeds_of(model))

    given = _seeds_of(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The model was trained privately")
        model.fit(dp.data.poisson_batches((X, Y), N, 1), verbose=0, callbacks=[report, Exports()])
    assert states[0] == states[1] != given
    file = str(tmp_path / "variables" / "variables")
    seeds = [name for name, shape in tf.train.list_variables(file) if shape == [2]]
    assert [tf.train.load_variable(file, name).tolist() for name in seeds] == [given]


class DropsInParts(keras.layers.Layer):
    """Makes its dropout when it is built, as the attention of Keras does."""

    def build(self, shape):
        self.dropout = keras.layers.Dropout(0.5, seed=7)

    def call(self, x, training=None):
        return self.dropout(x, training=training)


class BuiltLate(dp.DPModel):
    def __init__(self):
        super().__init__()
        self.parts = [keras.layers.Dense(64), DropsInParts(), keras.layers.Dense(1)]

    def call(self, x, training=None):
        first, second, third = self.parts
        return third(second(first(x), training=training))


def test_seeds_that_come_with_the_first_step_are_secret_too():
    model, found = BuiltLate(), []
    optimizer = dp.optimizers.DPSGD(0.1, clip_norm=1.0, noise_multiplier=1.0, batch_size=N)
    model.compile(optimizer, "mse")
    look = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: found.append(
            np.array(model.parts[1].dropout.seed_generator.state)[0]
        )
    )
    model.fit(dp.data.poisson_batches((X, Y), N, 1), verbose=0, callbacks=[look])
    assert found != [7]


class Signs(dp.optimizers.PrivateOptimizer, keras.optimizers.Optimizer):
    """A rule of one's own that moves the weights, and does not say that it took a step."""

    def update(self, released):
        gradients = released[0].unscaled().value
        for variable, gradient in zip(self._trainable_variables, gradients, strict=True):
            variable.assign_sub(0.1 * keras.ops.sign(gradient))


@pytest.mark.parametrize(("steps", "eager"), [(1, False), (1, True), (2, False)])
def test_what_an_optimizer_does_not_count_is_in_the_ledger(steps, eager):
    """It had ε = 0 after any number of steps."""
    model = _model()
    model.compile(
        Signs(0.1, clip_norm=1.0, noise_multiplier=1.0, batch_size=B),
        "mse", steps_per_execution=steps, run_eagerly=eager,
    )  # fmt: skip
    before = model.get_weights()
    batches = dp.data.poisson_batches((X, Y), B, 6)
    with pytest.raises(RuntimeError, match=f"{steps} training step.* went from 0 to 0"):
        model.fit(batches, verbose=0)
    assert not np.array_equal(model.get_weights()[0], before[0])
    assert model.ledger.steps == steps


def test_steps_that_no_optimizer_counts_where_the_data_end():
    """An execution of two steps, with data for one."""
    model = _model()
    optimizer = Signs(0.1, clip_norm=1.0, noise_multiplier=1.0, batch_size=B)
    model.compile(optimizer, "mse", steps_per_execution=2)
    data = tf.data.Dataset.from_tensor_slices((X[:B], Y[:B])).batch(B)
    sampling = dp.accounting.Sampling.poisson(N, B)
    with pytest.raises(RuntimeError, match="went from 0 to 0"):
        model.fit(dp.data.assume_sampling(data, sampling), verbose=0)
    assert model.ledger.steps == 1


@pytest.mark.parametrize("name", dp.optimizers.settings.REFUSED)
@pytest.mark.parametrize("is_built", [False, True])
def test_what_the_constructor_refuses_is_no_attribute_either(name, is_built):
    """With an accumulation of four steps the ledger had one of four."""
    model = _model()
    wrapped = dp.optimizers.DPOptimizer("sgd", clip_norm=1.0, batch_size=B, noise_multiplier=1.0)
    for optimizer in (model.optimizer, wrapped):
        if is_built:
            optimizer.build(model.trainable_variables)
        with pytest.raises(ValueError, match=f"does not take {name}"):
            setattr(optimizer, name, 4)
        assert getattr(optimizer, name) is None


@pytest.mark.parametrize(("name", "value"), [("seed", None), ("seed", 3), ("secure_noise", True)])
def test_where_the_noise_comes_from_does_not_change(name, value):
    """With a seed that was taken back two trainings had the same noise, unsaid."""
    optimizer = dp.optimizers.DPSGD(0.1, clip_norm=1.0, seed=4)
    with pytest.raises(ValueError, match=f"{name} is fixed .* a new optimizer with {name}={value}"):
        setattr(optimizer, name, value)
    assert (optimizer.seed, optimizer.secure_noise) == (4, False)


@pytest.mark.parametrize(
    ("has_built_part", "has_failed"), [(False, False), (True, False), (True, True)]
)
@pytest.mark.parametrize("steps", [1, 3])
def test_a_model_that_the_first_step_builds_marks_its_weights(steps, has_built_part, has_failed):
    """Keras merges class weights into the batch, whose form is not known before."""

    class Around(dp.DPModel):
        def __init__(self, layer):
            super().__init__()
            self.layer, self.head = layer, keras.layers.Dense(1)

        def call(self, x):
            return self.head(self.layer(x))

    layer = keras.layers.Dense(4)
    model = Around(layer)
    if has_built_part:  # an encoder, beneath a new head
        layer.build((None, 3))
    model.compile(
        dp.optimizers.DPSGD(0.1, clip_norm=1.0, noise_multiplier=1.0, batch_size=N),
        "mse",
        run_eagerly=has_failed,
    )
    model.sampling = dp.accounting.Sampling.full(N)
    if has_failed:  # before it has built anything; it counts
        with pytest.raises(ValueError, match="incompatible|shape"):
            model.train_on_batch(X[:, :2], np.zeros((N, 1), "int32"), class_weight={0: 1.0, 1: 1.0})
    for _ in range(steps):
        model.train_on_batch(X, np.zeros((N, 1), "int32"), class_weight={0: 1.0, 1: 1.0})
    inputs, hidden = keras.Input((3,)), keras.Input((4,))
    others = (
        dp.DPModel(inputs, keras.layers.Dense(2)(layer(inputs))),
        dp.DPModel(hidden, model.head(hidden)),
    )
    assert [other.ledger.steps for other in (model, *others)] == [steps + has_failed] * 3


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("error", [StopIteration, KeyError])
def test_what_an_observer_saw_before_it_failed_is_counted(eager, error):
    """StopIteration was taken for the end of the data, and five steps that were seen for none."""
    model, seen = _model(), []

    def look(value):
        seen.append(value)
        raise error("of an observer")

    def observe(queries, released):
        tf.numpy_function(look, [released[0].value[0]], [])

    model.run_eagerly = eager
    model.observe_releases(observe)
    for _ in range(3):
        with contextlib.suppress(Exception):
            model.fit(dp.data.poisson_batches((X, Y), 8), verbose=0)
    assert model.ledger.steps == len(seen) == 3
