"""Clip norms that are a public function of the step: bound and noise of a step move together."""

import itertools
import json
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_keras_opt as dp
from dp_keras_opt import data, noise
from dp_keras_opt.accounting import Ledger, Sampling
from dp_keras_opt.optimizers.clip_norms import ClipNormSchedule
from tests.helpers import linear_regression as linear

schedules = keras.optimizers.schedules
FALLING = schedules.ExponentialDecay(0.5, 2, 0.4)  # 0.5·0.4^(t/2)
BOUNDS = [0.5 * 0.4 ** (step / 2) for step in range(40)]


@keras.saving.register_keras_serializable(package="tests")
class Sawtooth(schedules.LearningRateSchedule):
    """A schedule of a user's own."""

    def __init__(self, height=1.0):
        self.height = height

    def __call__(self, step):
        return self.height * (1.0 + keras.ops.cast(step % 3, "float32"))

    def get_config(self):
        return {"height": self.height}


def sgd(clip_norm, **kwargs):
    given = {"batch_size": linear.BATCH, "noise_multiplier": linear.SIGMA}
    return dp.optimizers.DPSGD(0.7, clip_norm=clip_norm, **given | kwargs)


@pytest.mark.parametrize(
    "schedule",
    [
        FALLING,
        schedules.CosineDecay(0.1, 20, 0.05, warmup_target=2.0, warmup_steps=5),
        schedules.CosineDecayRestarts(1.0, 4),
        schedules.PiecewiseConstantDecay([3, 9], [1.0, 0.5, 0.25]),
        schedules.PolynomialDecay(1.0, 8, 0.1, cycle=True),
        schedules.InverseTimeDecay(1.0, 3, 0.5, staircase=True),
        Sawtooth(2.0),
    ],
    ids=lambda schedule: type(schedule).__name__,
)
def test_values_are_those_of_the_schedule(schedule):
    found = ClipNormSchedule(schedule)
    wanted = np.array([float(schedule(step)) for step in range(5, 30)])
    np.testing.assert_allclose(found.values(5, 25), wanted, rtol=1e-6)
    compiled = tf.function(found.at, jit_compile=True)
    steps = tf.range(5, 12, dtype=tf.int64)
    np.testing.assert_allclose([compiled(step) for step in steps], wanted[:7], rtol=1e-6)
    again = dp.optimizers.clip_norms.resolve(
        "clip_norm", json.loads(json.dumps(found.get_config()))
    )
    assert again == found and hash(again) == hash(found)
    assert again != ClipNormSchedule(Sawtooth(3.0))


@pytest.mark.parametrize("compilation", [{}, {"run_eagerly": False}, {"jit_compile": True}])
def test_sums_are_clipped_to_the_bound_of_the_step_and_noise_is_its_multiple(compilation):
    model = linear.build(sgd(FALLING), **{"run_eagerly": not compilation} | compilation)
    found, fed = linear.train(model, 6)
    theta = linear.START
    for step, bound in enumerate(BOUNDS[:6]):
        assert linear.share_clipped(theta, bound) > 0.5
        theta = theta - 0.7 * linear.privatized(theta, fed.flat(step), bound)
        np.testing.assert_allclose(found[step], theta, rtol=1e-4, atol=1e-5)


RULES = {
    "sgd": (dp.optimizers.DPSGD, {}),
    "momentum": (dp.optimizers.DPSGD, {"momentum": 0.9}),
    "adam": (dp.optimizers.DPAdam, {}),
    "floor": (
        dp.optimizers.DPAdam,
        {"second_moment": dp.optimizers.moments.BiasCorrected(floor=1.0)},
    ),
    "scaled": (dp.optimizers.DPAdam, {"second_moment": "scale_then_privatize"}),
    "rmsprop": (dp.optimizers.DPRMSprop, {}),
    "adagrad": (dp.optimizers.DPAdagrad, {}),
    "yogi": (dp.optimizers.DPYogi, {}),
    "delayed": (dp.optimizers.DP2RMSprop, {"adaptive_clip_norm": 0.7, "delay": (2, 1)}),
    "adp": (dp.optimizers.ADPSGD, {"learning_rate": 0.1, "steps": 5}),
    "adagrad norm": (dp.optimizers.ADPAdagradNorm, {"steps": 5}),
    "heavy ball": (dp.optimizers.DPHeavyBall, {"momentum": 0.5}),
    "nesterov": (dp.optimizers.DPNesterov, {"momentum": 0.5}),
    "wrapped": (dp.optimizers.DPOptimizer, {"optimizer": "lion"}),
    "per layer": (dp.optimizers.DPSGD, {"clipping": "per_layer"}),
    "normalized": (dp.optimizers.DPSGD, {"normalize": True}),
    "filtered": (dp.optimizers.DPSGD, {"gradient_filter": "f2"}),
    "laplace": (dp.optimizers.DPSGD, {"noise": "laplace"}),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_function_is_the_number_while_it_stays(rule):
    """In every rule and style; where it falls, there is another training."""
    cls, arguments = RULES[rule]

    def trained(is_function):
        def bound(number):
            falling = schedules.PiecewiseConstantDecay([2], [number, 0.2 * number])
            return falling if is_function else number

        own = {
            name: bound(value) if name == "adaptive_clip_norm" else value
            for name, value in arguments.items()
        }
        private = linear.PRIVATE | {"clip_norm": bound(linear.CLIP)}
        model = linear.build(cls(**own | private), run_eagerly=False)
        return linear.train(model, 5)[0]

    wanted, falling = trained(False), trained(True)
    np.testing.assert_allclose(falling[:3], wanted[:3], rtol=1e-5, atol=1e-6)
    assert not np.allclose(np.diff(falling[2:], axis=0), np.diff(wanted[2:], axis=0), rtol=1e-2)


def without_gradients(optimizer, width=4000, **compiled):
    """A model of which a step shows its noise alone: its examples have no weight."""
    inputs = keras.Input((1,))
    model = dp.DPModel(inputs, keras.layers.Dense(width, use_bias=False)(inputs))
    model.compile(optimizer, loss="mse", **compiled)
    return model


class Steps(keras.callbacks.Callback):
    """What each step subtracted."""

    def on_train_begin(self, logs=None):
        self.seen = [self.model.get_weights()[0]]

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(self.model.get_weights()[0])

    @property
    def taken(self):
        return np.array([(a - b).ravel() for a, b in itertools.pairwise(self.seen)])


@pytest.mark.parametrize("mechanism", ["gaussian", "banded"])
def test_noise_is_a_multiple_of_the_bound_beside_levels_and_bands(mechanism):
    """std σ·α_t·C_t/B of 4,000 draws, within 4.5 of its standard deviations, 5%: 1 in 10,000 runs.

    Under correlated noise it is C·(noise/(α_t·C_t)) that is white.
    """
    levels, steps, batch = np.linspace(1.0, 2.0, 8), 8, 5
    bands = noise.BandedMatrix(steps, 3)
    rule = dp.optimizers.DPSGD(
        1.0, clip_norm=Sawtooth(0.2), batch_size=batch, noise_multiplier=1.5, seed=11,
        noise_schedule=levels, noise=bands if mechanism == "banded" else "gaussian",
    )  # fmt: skip
    model, seen = without_gradients(rule), Steps()
    x, y = np.ones((40, 1), "float32"), np.zeros((40, 4000), "float32")
    examples = x, y, np.zeros(40, "float32")
    if mechanism == "banded":
        batches = data.fixed_order_epochs(examples, batch, adjacency="zero_out")
    else:
        batches = data.poisson_batches(examples, batch, steps)
    model.fit(batches, callbacks=[seen], verbose=0)
    bounds = 0.2 * np.array([1, 2, 3, 1, 2, 3, 1, 2])
    units = seen.taken * batch / (1.5 * levels * bounds)[:, None]
    if mechanism == "banded":
        coefficients = np.append(bands.coefficients, np.zeros(steps))[:steps]
        mixed = sum(c * np.eye(steps, k=-lag) for lag, c in enumerate(coefficients))
        # The noise of levels is that of C·diag(α)⁻¹, scaled to its own sensitivity.
        factor = np.sqrt(np.mean((mixed @ units) ** 2, axis=1))
        units = (mixed @ units) / factor.mean()
    np.testing.assert_allclose(units.std(axis=1), 1.0, rtol=0.05)
    correlations = np.corrcoef(units) - np.eye(steps)
    assert np.abs(correlations).max() < 4.8 / np.sqrt(4000)


def test_epsilon_does_not_depend_on_it():
    sampling = Sampling.poisson(1000, linear.BATCH)
    for other in (0.3, Sawtooth()):
        ledgers = [Ledger.of(sgd(bound), sampling, 30) for bound in (FALLING, other)]
        assert ledgers[0].epsilon(1e-5) == ledgers[1].epsilon(1e-5)


def test_ledger_statement_and_card_say_how_it_moves():
    model = linear.build(sgd(FALLING))
    linear.train(model, 2)
    words = "ExponentialDecay(initial_learning_rate=0.5, decay_steps=2, decay_rate=0.4, staircase="
    read = Ledger.from_json(model.ledger.to_json())
    assert read.segments == model.ledger.segments
    assert read.segments[0].clip_norm == f"{words}False)"
    statement = " ".join(read.statement(1e-5).split())
    assert f"clip norm C that changes with the step, {words}" in statement
    assert read.merge(model.ledger) is None and read.steps == 2


def test_another_schedule_is_another_segment():
    model = linear.build(sgd(FALLING))
    linear.train(model, 1)
    model.compile(sgd(Sawtooth()), loss="mse")
    model.sampling = linear.SAMPLING
    model.train_on_batch(linear.X, linear.Y)
    assert [segment.steps for segment in model.ledger.segments] == [1, 1]


def counting(rule, **compiled):
    """A model of one weight, to which a step without noise adds (number of examples)·C/B."""
    inputs = keras.Input((1,))
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = dp.DPModel(inputs, layer(inputs))
    model.compile(rule, loss="mse", **compiled)
    return model


ONES, TARGETS = np.ones((8, 1), "float32"), np.full((8, 1), 1e4, "float32")


def full(steps):
    sampling = Sampling.full(8)
    rows = tf.data.Dataset.from_tensors((ONES, TARGETS)).repeat(steps)
    return data.assume_sampling(rows, sampling)


@pytest.mark.parametrize("compilation", [{}, {"steps_per_execution": 3}, {"jit_compile": True}])
def test_it_goes_on_with_the_training(tmp_path, compilation):
    rule = dp.optimizers.DPSGD(1.0, clip_norm=FALLING, batch_size=8, noise_multiplier=0.0)
    model = counting(rule, **compilation)
    model.fit(full(6), verbose=0)
    assert model.get_weights()[0].item() == pytest.approx(sum(BOUNDS[:6]), rel=1e-5)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.clip_norm == ClipNormSchedule(FALLING)
    for each in (model, loaded):
        each.fit(full(6), verbose=0)
        assert each.get_weights()[0].item() == pytest.approx(sum(BOUNDS[:12]), rel=1e-5)
    assert loaded.ledger.steps == 12


def test_users_and_pieces_of_a_batch_have_one_bound():
    rule = dp.optimizers.DPSGD(1.0, clip_norm=FALLING, batch_size=4, noise_multiplier=0.0)
    model = counting(rule, physical_batch_size=3)
    batches = data.poisson_users((ONES, TARGETS), np.repeat(range(4), 2), 4, 5, examples_per_user=2)
    model.fit(batches, verbose=0)  # everyone is in every batch
    assert model.get_weights()[0].item() == pytest.approx(sum(BOUNDS[:5]), rel=1e-5)


def test_a_plan_knows_what_it_does_to_the_noise():
    """√(mean_t Σ_{j≤t} (η_j·σ·C_j)²), in units of the largest C over B."""
    rates = schedules.CosineDecay(1.0, 30)
    rule = dp.optimizers.DPSGD(rates, clip_norm=FALLING)
    sampling = Sampling.poisson(1000, 50)
    plan = dp.accounting.plan_noise(rule, sampling, 30, 1.0, 1e-5, samplings=[sampling])
    each = [float(rates(t)) * plan.best.noise_multiplier * BOUNDS[t] / 0.5 for t in range(30)]
    error = np.sqrt(np.mean(np.cumsum(np.square(each))))
    assert plan.best.error == pytest.approx(error, rel=1e-5)


# What is refused.


class Variable(schedules.LearningRateSchedule):
    def __init__(self):
        self.value = tf.Variable(1.0)

    def __call__(self, step):
        return self.value + keras.ops.cast(step, "float32")

    def get_config(self):
        return {}


class KerasVariable(Variable):
    def __init__(self):
        self.value = keras.Variable(1.0)


class Python(Variable):
    def __call__(self, step):
        return tf.py_function(lambda: 1.0, [], tf.float32)


class Nested(Variable):
    def __call__(self, step):
        return tf.cond(step > 3, lambda: 1.0 * self.value, lambda: 1.0)


class Random(Variable):
    def __call__(self, step):
        return tf.random.uniform(())


class Vector(Variable):
    def __call__(self, step):
        return tf.ones((2,))


@pytest.mark.parametrize(
    "make, words",
    [
        (Variable, "reads a variable"),
        (KerasVariable, "reads a variable"),
        (Python, "runs Python"),
        (Nested, "reads a variable"),
        (Random, "another number at every call"),
        (Vector, "one number for each step"),
        (lambda: lambda step: 1.0, "function of the step alone"),
        (lambda: "falling", "must be a number"),
        (lambda: [1.0, 0.5], "must be a number"),
        (lambda: True, "must be a number"),
    ],
)
def test_what_may_depend_on_more_than_the_step_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        sgd(make())
    with pytest.raises(ValueError, match=words):
        dp.optimizers.DP2RMSprop(clip_norm=1.0, adaptive_clip_norm=make())


def test_what_changes_in_the_schedule_later_changes_nothing():
    """A callback that steers an attribute by raw metrics is not heard, eagerly run or not."""
    schedule = Sawtooth(0.1)
    model = linear.build(sgd(schedule), run_eagerly=True)
    wanted, _ = linear.train(linear.build(sgd(Sawtooth(0.1))), 3)
    schedule.height = 50.0
    found, _ = linear.train(model, 3)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


class Then(schedules.LearningRateSchedule):
    """1 for five steps, then another value."""

    def __init__(self, value):
        self.value = value

    def __call__(self, step):
        return tf.where(step < 5, 1.0, self.value)

    def get_config(self):
        return {"value": self.value}


@pytest.mark.parametrize("value", [0.0, -1.0, 1e-20, 1e20, math.nan, math.inf])
def test_a_bound_must_be_one_at_every_step(value):
    model = counting(sgd(Then(value), batch_size=8))
    with pytest.raises(ValueError, match="clip_norm=Then is .* at step 5, and must be a positive"):
        model.fit(full(9), verbose=0)
    assert model.ledger.steps == 0 and not model.get_weights()[0].any()
    model.sampling = Sampling.full(8)
    for _ in range(5):
        model.train_on_batch(ONES, TARGETS)
    with pytest.raises(ValueError, match="at step 5"):
        model.train_on_batch(ONES, TARGETS)
    assert model.ledger.steps == 5


@pytest.mark.parametrize("kind", ["joint", "independent"])
def test_joint_moments_have_one(kind):
    moment = {
        "joint": dp.optimizers.moments.Joint(1.0, 100),
        "independent": dp.optimizers.moments.Independent(100),
    }[kind]
    rule = dp.optimizers.DPAdam(
        clip_norm=FALLING, batch_size=8, noise_multiplier=1.0, second_moment=moment
    )
    with pytest.raises(ValueError, match="for one clip_norm; received clip_norm=Exponential"):
        dp.accounting.epsilon(rule, Sampling.poisson(1000, 8), 10, 1e-5)


def test_it_is_fixed_once_it_is_traced():
    model = linear.build(sgd(FALLING))
    linear.train(model, 1)
    with pytest.raises(ValueError, match="clip_norm is fixed once the optimizer is built"):
        model.optimizer.clip_norm = Sawtooth()
