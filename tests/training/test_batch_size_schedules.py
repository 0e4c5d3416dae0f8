"""Training with expected batch sizes that change: each batch is drawn for the step that it feeds.

The model of most tests has one weight, whose gradient is -1 for every example, so that without
noise a step adds the number of its examples over B.
"""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_keras_opt as dp
from dp_keras_opt import data
from dp_keras_opt.accounting import BatchSizes, Sampling
from tests.helpers import linear_regression as regression

N = 40
ONES = np.ones((N, 1), np.float32)
#: Everyone is in every third batch; in the others 1 on average, and 9 once in a million times.
PEAKS = {step: N if step % 3 == 0 else 1 for step in range(60)}


def optimizer(batch_size, **kwargs):
    given = {"learning_rate": 1.0, "clip_norm": 1.0, "noise_multiplier": 0.0}
    return dp.optimizers.DPSGD(batch_size=batch_size, **given | kwargs)


class Subclassed(dp.DPModel):
    """Has no weights before it has seen a batch."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def call(self, inputs):
        return self.layer(inputs)


def compiled(batch_size, is_built=True, **kwargs):
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    inputs = keras.Input((1,))
    model = dp.DPModel(inputs, layer(inputs)) if is_built else Subclassed(layer)
    model.compile(optimizer(batch_size), loss=lambda _, y: -y[..., 0], **kwargs)
    return model


class Weight(keras.callbacks.Callback):
    """The weight before the first and after every execution, and the steps done by then."""

    def on_train_begin(self, logs=None):
        self.values, self.steps = [0.0], [int(self.model.optimizer.iterations)]
        if self.model.built:
            self.values = [self.model.get_weights()[0].item()]

    def on_train_batch_end(self, batch, logs=None):
        self.values.append(self.model.get_weights()[0].item())
        self.steps.append(int(self.model.optimizer.iterations))


class StopAfter(keras.callbacks.Callback):
    def __init__(self, batches):
        super().__init__()
        self.left = batches

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        self.model.stop_training |= self.left == 0
        if self.left == 0:
            raise KeyboardInterrupt


def assert_in_step(weight, at_least):
    """Full batches where B is n and only there: a batch of another step's would add 40 or 1/40."""
    assert weight.steps[-1] >= at_least
    for (before, after), (first, last) in zip(
        itertools.pairwise(weight.values), itertools.pairwise(weight.steps), strict=True
    ):
        full = sum(step % 3 == 0 for step in range(first, last))
        few = round(after - before - full, 3)
        assert few == int(few) and 0 <= few < 9 * max(last - first - full, 1), (first, few)
        assert full < last - first or not few


@pytest.mark.representatives(8)
@pytest.mark.parametrize("is_built", [True, False])
@pytest.mark.parametrize(
    "compilation", [{}, {"steps_per_execution": 2}, {"jit_compile": True}, {"run_eagerly": True}]
)
@pytest.mark.parametrize("arguments", [{}, {"steps_per_epoch": 3}])
def test_each_batch_is_drawn_for_its_step(is_built, compilation, arguments):
    model, weight = compiled(PEAKS, is_built, **compilation), Weight()
    batches = data.poisson_batches((ONES, ONES), PEAKS, 5, seed=1)
    model.fit(batches, epochs=4, callbacks=[weight], verbose=0, **arguments)
    assert_in_step(weight, 10 if arguments else 20)  # the data end after 5


def test_a_broken_epoch_is_gone_on_with():
    """The next fit draws from the step on that comes next, also with batches made earlier."""
    model = compiled(PEAKS)
    batches = data.poisson_batches((ONES, ONES), PEAKS, 5, seed=2)
    for interruption in (7, 1, 3):
        weight = Weight()
        with pytest.raises(KeyboardInterrupt):
            model.fit(batches, epochs=3, callbacks=[weight, StopAfter(interruption)], verbose=0)
        assert_in_step(weight, 1)
    assert model.ledger.steps == 11
    next(iter(batches))  # looked at in between
    weight = Weight()
    model.fit(batches, epochs=2, callbacks=[weight], verbose=0)
    assert_in_step(weight, 21)
    sizes = BatchSizes(PEAKS).sizes(0, 21)
    assert [segment.sampling.batch_sizes for segment in model.ledger.segments] == [
        BatchSizes(PEAKS)
    ] * len(model.ledger.segments)
    assert sum(segment._sizes.sum() for segment in model.ledger.segments) == sizes.sum()


def test_evaluation_on_the_same_batches_moves_nothing():
    model, weight = compiled(PEAKS), Weight()
    batches = data.poisson_batches((ONES, ONES), PEAKS, 5, seed=3)
    model.fit(batches, epochs=3, validation_data=batches.dataset, callbacks=[weight], verbose=0)
    assert_in_step(weight, 15)


def test_a_loaded_model_goes_on_at_its_step(tmp_path):
    model = compiled(PEAKS)
    model.fit(data.poisson_batches((ONES, ONES), PEAKS, 7), epochs=1, verbose=0)
    model.compile(optimizer(PEAKS), loss="mse")  # of a name, to be saved
    model.fit(data.poisson_batches((ONES, ONES), PEAKS, 7), epochs=1, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.batch_size == BatchSizes(PEAKS)
    batches = data.poisson_batches((ONES, ONES), PEAKS, 7)
    loaded.fit(batches, epochs=1, verbose=0)
    assert batches.sampling.passes.first_step == 7 == int(loaded.optimizer.iterations) - 7


def test_draws_are_binomial_at_every_stage():
    """A mean beyond 4.5 standard deviations: once in 75,000 draws; rates of 2/3 or 1.5 are seen."""
    stages = {0: 10, 60: 24, 120: 4}
    model, weight = compiled(stages), Weight()
    batches = data.poisson_batches((ONES, ONES), stages, 45, seed=4)
    model.fit(batches, epochs=4, callbacks=[weight], verbose=0)
    sizes = BatchSizes(stages).sizes(0, 180)
    drawn = np.diff(weight.values) * sizes
    for size in stages.values():
        here = drawn[sizes == size]
        np.testing.assert_allclose(here, here.round(), atol=0.05)
        deviation = np.sqrt(size * (1 - size / N))
        assert abs(here.mean() - size) < 4.5 * deviation / np.sqrt(60) < size / 3
        assert 0.6 < here.std() / deviation < 1.4


@pytest.mark.parametrize("jit_compile", [False, True])
def test_sum_and_noise_are_divided_by_the_size_of_the_step(jit_compile):
    stages, steps = {0: 8, 2: 3, 3: 20}, 5
    rule = optimizer(
        stages, clip_norm=regression.CLIP, noise_multiplier=regression.SIGMA, learning_rate=0.7
    )
    sampling = Sampling.poisson(100, stages)
    model = regression.build(rule, sampling=sampling, run_eagerly=False, jit_compile=jit_compile)
    noise = regression.FixedNoise(rule, 40)
    object.__setattr__(rule, "noise_source", noise)
    repeated = tf.data.Dataset.from_tensors((regression.X, regression.Y)).repeat(steps)
    with pytest.warns(UserWarning, match="vary in size"):
        batches = data.assume_sampling(repeated, sampling)
    weights = []
    after = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs=None: weights.append(
            regression.flat(model.trainable_variables)
        )
    )
    model.fit(batches, callbacks=[after], verbose=0)
    theta = regression.START
    for step, size in enumerate([8, 8, 3, 20, 20]):
        assert regression.share_clipped(theta, regression.CLIP) > 0.5
        noisy = regression.clipped_sum(theta, regression.CLIP)
        noisy = noisy + regression.SIGMA * regression.CLIP * noise.flat(step)
        theta = theta - 0.7 * noisy / size
        np.testing.assert_allclose(weights[step], theta, rtol=1e-4, atol=1e-5)


RULES = {
    "filtered": (dp.optimizers.DPSGD, {"gradient_filter": "f2"}),
    "bias": (dp.optimizers.DPAdam, {"second_moment": "bias_corrected"}),
    "scaled": (dp.optimizers.DPAdam, {"second_moment": "scale_then_privatize"}),
    "delayed": (
        dp.optimizers.DP2RMSprop,
        {"adaptive_clip_norm": 0.7, "delay": (2, 1), "subtract_noise": True},
    ),
    "adagrad norm": (dp.optimizers.ADPAdagradNorm, {"steps": 5}),
    "nesterov": (dp.optimizers.DPNesterov, {"momentum": 0.5}),
    "yogi": (dp.optimizers.DPYogi, {}),
    "wrapped": (dp.optimizers.DPOptimizer, {"optimizer": "nadam"}),
}


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_divides_by_the_size_of_the_step(rule):
    """Sizes that stay are one size for three steps; then there is another training."""
    cls, arguments = RULES[rule]
    repeated = tf.data.Dataset.from_tensors((regression.X, regression.Y)).repeat(5)

    def trained(sizes):
        optimizer = cls(**arguments | regression.PRIVATE | {"batch_size": sizes})
        sampling = Sampling.poisson(100, sizes)
        model = regression.build(optimizer, sampling=sampling, run_eagerly=False)
        object.__setattr__(optimizer, "noise_source", regression.FixedNoise(optimizer, 40))
        with pytest.warns(UserWarning, match="vary in size"):
            batches = data.assume_sampling(repeated, sampling)
        weights = []
        after = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs=None: weights.append(
                regression.flat(model.trainable_variables)
            )
        )
        model.fit(batches, callbacks=[after], verbose=0)
        return np.array(weights)

    wanted, staged = trained(8), trained({0: 8, 3: 2})
    np.testing.assert_allclose(staged[:3], wanted[:3], rtol=1e-5, atol=1e-6)
    moves = np.diff(staged[2:], axis=0), np.diff(wanted[2:], axis=0)
    assert not np.allclose(*moves, rtol=1e-2)


def test_the_floor_of_a_bias_corrected_moment_follows():
    """√v̂ is at least floor·σC/B_t, which decides here."""
    moment = dp.optimizers.moments.BiasCorrected(floor=1e4)
    rule = dp.optimizers.DPAdam(
        1.0, clip_norm=2.0, batch_size={0: 4, 1: 40}, noise_multiplier=0.5, second_moment=moment
    )
    rule.build([keras.Variable([0.0])])
    for step, size in enumerate([4, 40, 40]):
        rule.iterations.assign(step)
        root = rule.second_moment.root(rule, tf.constant([1e-3]))
        np.testing.assert_allclose(root, [1e4 * 0.5 * 2.0 / size], rtol=1e-6)


# What would draw with one probability and account for another.


def test_a_loop_of_ones_own_is_refused():
    model = compiled(PEAKS)
    batches = data.poisson_batches((ONES, ONES), PEAKS, 5)
    for sampling in (batches.sampling, Sampling.poisson(N, PEAKS)):
        model.sampling = sampling
        with pytest.raises(ValueError, match="needs fit, which takes every batch in its turn"):
            model.train_on_batch(ONES, ONES)
    assert model.ledger.steps == 0


def test_batches_of_such_passes_are_not_repeated_in_other_ways():
    batches = data.poisson_batches((ONES, ONES), PEAKS, 5)
    with pytest.raises(ValueError, match="Pass those batches to fit"):
        data.assume_sampling(batches.dataset.repeat(), batches.sampling)


def test_arrays_are_refused():
    with pytest.raises(ValueError, match="is for Poisson sampling: pass dp_keras_opt.data.poisson"):
        compiled(PEAKS).fit(ONES, ONES, verbose=0)


def test_batches_of_other_sizes_are_refused():
    model = compiled(PEAKS)
    for size in (N, 1, {0: N, 1: 1}):
        with pytest.raises(ValueError, match="Give both the same expected batch size"):
            model.fit(data.poisson_batches((ONES, ONES), size), verbose=0)


def test_a_cap_is_refused():
    with pytest.raises(ValueError, match="cuts draws of one expected size"):
        data.poisson_batches((ONES, ONES), PEAKS, max_batch_size=N)


def test_the_size_is_taken_from_the_batches():
    model = compiled(None)
    model.fit(data.poisson_batches((ONES, ONES), PEAKS, 5), verbose=0)
    assert model.optimizer.batch_size == BatchSizes(PEAKS)


def test_users_are_drawn_with_the_sizes_of_the_step():
    owners = np.repeat(np.arange(N // 2), 2)
    stages = {step: N // 2 if step % 3 == 0 else 1 for step in range(60)}
    model, weight = compiled(stages), Weight()
    batches = data.poisson_users((ONES, ONES), owners, stages, 5, examples_per_user=2, seed=5)
    model.fit(batches, epochs=3, callbacks=[weight], verbose=0)
    assert_in_step(weight, 15)


class SetCounter(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.optimizer.iterations.assign(50)


class Endless(dp.noise.schedules.NoiseSchedule):
    """A schedule of a user's own, without an end."""

    def alphas(self, start, steps):
        return 1.0 + np.arange(start, start + steps)

    def alpha(self, step):
        return 1.0 + keras.ops.cast(step, "float32")

    def get_config(self):
        return {}


def test_a_counter_that_is_set_by_hand_is_refused():
    model = compiled(PEAKS)
    with pytest.raises(ValueError, match="batch size is accounted up to step 1"):
        batches = data.poisson_batches((ONES, ONES), PEAKS, 5)
        model.fit(batches, callbacks=[SetCounter()], verbose=0)


def test_so_it_is_for_schedules_without_an_end():
    model = compiled(4)
    model.compile(optimizer(4, noise_schedule=Endless()), loss="mse")
    with pytest.raises(ValueError, match="noise schedule is accounted up to step 1"):
        batches = data.poisson_batches((ONES, ONES), 4, 5)
        model.fit(batches, callbacks=[SetCounter()], verbose=0)


def test_a_budget_plans_the_noise_of_all_stages():
    stages = {0: 4, 6: 12}
    model = compiled(stages)
    model.compile(optimizer(stages, noise_multiplier=None), loss="mse")
    batches = data.poisson_batches((ONES, ONES), stages, 5)
    model.fit(
        batches,
        epochs=2,
        verbose=0,
        callbacks=[dp.callbacks.PrivacyBudget(epsilon=2.0, delta=1e-3)],
    )
    assert model.ledger.steps == 10
    multiplier = model.optimizer.noise_multiplier
    settled = optimizer(stages, noise_multiplier=multiplier)
    sampling = Sampling.poisson(N, stages)
    assert 1.99 < dp.accounting.epsilon(settled, sampling, 10, 1e-3) <= 2.0
    assert model.ledger.epsilon(1e-3) <= 2.0
    largest = optimizer(12, noise_multiplier=multiplier)
    assert dp.accounting.epsilon(largest, Sampling.poisson(N, 12), 10, 1e-3) > 2.0


# Interruptions.


class Raise(keras.callbacks.Callback):
    def __init__(self, at):
        super().__init__()
        self.at = at

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == self.at:
            raise RuntimeError("the machine is gone")


@pytest.mark.parametrize("frequency", ["epoch", 2])
def test_a_restored_run_goes_on_with_the_sizes_of_its_step(tmp_path, frequency):
    """Keras's callback sets the counter once `fit` has begun."""

    def backup():
        return keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=frequency)

    def arguments():
        model = compiled(PEAKS)
        model.ledger = dp.accounting.Ledger(tmp_path / "ledger.json")
        return model, data.poisson_batches((ONES, ONES), PEAKS, 5, seed=6)

    model, batches = arguments()
    with pytest.raises(RuntimeError, match="gone"):
        model.fit(batches, epochs=4, callbacks=[backup(), Raise(8)], verbose=0)
    model.ledger.unlock()
    model, batches = arguments()
    weight = Weight()
    model.fit(batches, epochs=4, callbacks=[backup(), weight], verbose=0)
    assert weight.steps[0] == (5 if frequency == "epoch" else 8)
    assert_in_step(weight, 20)


class BeginEarly(keras.callbacks.Callback):
    """Has a pass begin at step 0, and then sets the counter, as if that were restored too late."""

    def __init__(self, batches):
        super().__init__()
        self.batches = batches

    def on_train_batch_begin(self, batch, logs=None):
        next(iter(self.batches))
        self.model.optimizer.iterations.assign(2)


def test_batches_that_were_begun_for_another_step_are_refused():
    model = compiled(PEAKS)
    batches = data.poisson_batches((ONES, ONES), PEAKS, 5)
    callbacks = [BeginEarly(batches)]
    with pytest.raises(ValueError, match="sizes from step 0 on, but the optimizer has taken 2"):
        model.fit(batches, callbacks=callbacks, verbose=0)
    assert model.ledger.steps == 0
