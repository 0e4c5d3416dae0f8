"""Each source of the second moment × each rule, against a float64 transcription of its formula."""

import json
import math

import dp_accounting
import keras
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

import dp_keras_opt as dp
from dp_keras_opt import noise
from dp_keras_opt.noise.mechanism import JointMoments, Release
from dp_keras_opt.noise.source import NoiseSource
from dp_keras_opt.optimizers import DPAdagrad, DPAdam, DPRMSprop, DPYogi, moments
from tests.helpers import linear_regression as linear
from tests.helpers.linear_regression import BATCH, CLIP, PRIVATE, SAMPLING, SIGMA, SIZE

RATE, EPSILON, LARGEST = 0.05, 0.02, 12  # LARGEST: bound on the batch size, for joint moments
GIVEN = np.random.default_rng(3).uniform(0.01, 1.0, SIZE)
FALSE_ALARM = 1e-9


@keras.saving.register_keras_serializable(package="tests")
def growing_side_information(step):
    """Side information that depends on the step."""
    return [tf.constant(v, tf.float32) * tf.cast(step + 1, tf.float32) for v in linear.split(GIVEN)]


class Rule:
    """NumPy side: how v accumulates and is corrected, and the step (arXiv:2507.01129)."""

    def __init__(self, momentum=0.0, amsgrad=False):
        self.m, self.momentum, self.amsgrad = np.zeros(SIZE), momentum, amsgrad

    def correct(self, v, t):
        return v

    def step(self, g, root, t):
        return RATE * g / root


class Adam(Rule):
    make, beta1, beta2 = DPAdam, 0.8, 0.9

    def options(self):
        return {"beta_1": self.beta1, "beta_2": self.beta2, "amsgrad": self.amsgrad}

    def accumulate(self, v, square):
        return self.beta2 * v + (1 - self.beta2) * square

    def correct(self, v, t):
        return v / (1 - self.beta2**t)

    def step(self, g, root, t):
        self.m = self.beta1 * self.m + (1 - self.beta1) * g
        return RATE * self.m / (1 - self.beta1**t) / root

    def phi(self, powers):
        t = len(powers)
        weights = self.beta2 ** np.arange(t - 1, -1, -1)
        return (1 - self.beta2) / (1 - self.beta2**t) * np.dot(weights, powers)


class RMSprop(Rule):
    make, gamma = DPRMSprop, 0.8

    def options(self):
        return {"rho": self.gamma, "momentum": self.momentum}

    def accumulate(self, v, square):
        return self.gamma * v + (1 - self.gamma) * square

    def step(self, g, root, t):
        self.m = self.momentum * self.m + RATE * g / root
        return self.m

    def phi(self, powers):
        return (1 - self.gamma) * np.dot(self.gamma ** np.arange(len(powers))[::-1], powers)


class Adagrad(Rule):
    make = DPAdagrad

    def options(self):
        return {}

    def accumulate(self, v, square):
        return v + square

    def phi(self, powers):
        return np.sum(powers)


class Yogi(Adam):
    make = DPYogi

    def accumulate(self, v, square):
        return v + (1 - self.beta2) * np.sign(square - v) * square


RULES = {
    "adam": Adam,
    "amsgrad": lambda: Adam(amsgrad=True),
    "rmsprop": RMSprop,
    "rmsprop with momentum": lambda: RMSprop(momentum=0.7),
    "adagrad": Adagrad,
    "yogi": Yogi,
}

SOURCES = {
    "post_processing": lambda: "post_processing",
    "bias_corrected": lambda: "bias_corrected",
    "independent": lambda: moments.Independent(max_batch_size=LARGEST),
    "joint": lambda: moments.Joint(4.0, max_batch_size=LARGEST),
    "scale_then_privatize": lambda: "scale_then_privatize",
    "own epsilon": lambda: moments.ScaleThenPrivatize(epsilon=0.1),
    "values": lambda: moments.SideInformation(linear.split(GIVEN)),
    "scaled values": lambda: moments.SideInformation(linear.split(GIVEN), scaled=True),
    "callable": lambda: moments.SideInformation(growing_side_information, scaled=True),
    "noiseless": lambda: moments.Noiseless(),
    "scaled noiseless": lambda: moments.Noiseless(scaled=True),
}
SCALED = {"scale_then_privatize": EPSILON, "own epsilon": 0.1, "scaled noiseless": EPSILON,
          "scaled values": EPSILON, "callable": EPSILON}  # fmt: skip
IMPOSSIBLE = {("bias_corrected", "yogi"), ("bias_corrected", "amsgrad"), ("values", "amsgrad"),
              ("scaled values", "amsgrad"), ("callable", "amsgrad")}  # fmt: skip


def rules_for(source):
    return [rule for rule in RULES if (source, rule) not in IMPOSSIBLE]


pytestmark = pytest.mark.filterwarnings("ignore:.*noiseless.*:UserWarning")


def make_optimizer(source, rule, **changes):
    rule = RULES[rule]()
    options = {"epsilon": EPSILON, "second_moment": SOURCES[source]()} | rule.options()
    return rule.make(RATE, **options | PRIVATE | changes)


def joint_scales(weight):
    """σS on g and σS/√λ on g², with S of the specification for add/remove and zero-out."""
    c = CLIP / BATCH
    s = c * math.sqrt(1 + weight * (2 * LARGEST - 1) ** 2 * c**2)
    return SIGMA * s, SIGMA * s / math.sqrt(weight)


def transcription(source, rule, steps, fed, alphas=None):
    """The weights after each step, from the formulas."""
    rule, theta, v, largest = RULES[rule](), linear.START.copy(), np.zeros(SIZE), np.zeros(SIZE)
    trajectory, powers = [], []
    for t in range(1, steps + 1):
        z, sigma = fed.flat(t - 1), SIGMA * (1.0 if alphas is None else alphas[t - 1])
        given = {"values": GIVEN, "scaled values": GIVEN, "callable": t * GIVEN}.get(source)
        scale = 1.0
        if source in SCALED:
            before = rule.correct(largest if rule.amsgrad else v, t - 1) if t > 1 else 0.0
            scale = 1 / (np.sqrt(before if given is None else given) + SCALED[source])
        g = linear.privatized(theta, z, scale=scale, sigma=sigma) / scale
        square = g**2
        if source in ("independent", "joint"):
            weight = 4.0 if source == "joint" else (BATCH / ((2 * LARGEST - 1) * CLIP)) ** 2
            on_mean, on_square = joint_scales(weight)
            mean = linear.clipped_sum(theta, CLIP) / BATCH
            g, square = mean + on_mean * z, mean**2 + on_square * fed.flat(t - 1, 1)
        if source.endswith("noiseless"):
            square = (linear.clipped_sum(theta, CLIP) / BATCH) ** 2
        v = rule.accumulate(v, square)
        largest = np.maximum(largest, v)
        v_hat = rule.correct(largest if rule.amsgrad else v, t)
        if source == "bias_corrected":
            powers.append((sigma * CLIP / BATCH) ** 2)
            root = np.sqrt(np.maximum(v_hat - rule.phi(powers), EPSILON**2))
        else:
            root = np.sqrt(np.maximum(v_hat if given is None else given, 0)) + EPSILON
        theta = theta - rule.step(g, root, t)
        trajectory.append(theta)
    return np.array(trajectory)


def draws_of(source):
    return 2 if source in ("independent", "joint") else 1


@pytest.mark.parametrize("source", SOURCES)
def test_each_step_is_that_of_the_formula(source):
    assert linear.share_clipped(linear.START, CLIP) > 0.5, "the bound must bind"
    for rule in rules_for(source):
        model = linear.build(make_optimizer(source, rule))
        weights, fed = linear.train(model, 6, draws_of(source))
        expected = transcription(source, rule, 6, fed)
        np.testing.assert_allclose(weights, expected, rtol=2e-4, atol=2e-5, err_msg=rule)


@pytest.mark.parametrize("source", ["bias_corrected", "joint", "scale_then_privatize", "callable"])
def test_a_compiled_step_is_that_of_the_formula(source):
    model = linear.build(make_optimizer(source, "adam"), run_eagerly=False, jit_compile=True)
    weights, fed = linear.train(model, 4, draws_of(source))
    np.testing.assert_allclose(weights, transcription(source, "adam", 4, fed), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("rule", ["adam", "rmsprop", "adagrad"])
def test_bias_correction_follows_the_noise_schedule(rule):
    alphas = np.array([2.0, 0.5, 1.5, 0.25, 1.0, 3.0])
    model = linear.build(make_optimizer("bias_corrected", rule, noise_schedule=alphas))
    weights, fed = linear.train(model, 6)
    expected = transcription("bias_corrected", rule, 6, fed, alphas)
    np.testing.assert_allclose(weights, expected, rtol=2e-4, atol=2e-5)


# The floor of bias correction, in units of the noise.


@pytest.mark.parametrize("rule", ["adam", "rmsprop", "adagrad"])
def test_a_floor_is_an_epsilon_in_units_of_the_noise(rule):
    in_noise = moments.BiasCorrected(floor=2.0)
    given = linear.build(make_optimizer("bias_corrected", rule, epsilon=2.0 * SIGMA * CLIP / BATCH))
    floored = linear.build(
        make_optimizer("bias_corrected", rule, epsilon=1e-9, second_moment=in_noise)
    )
    expected, _ = linear.train(given, 4)
    np.testing.assert_allclose(linear.train(floored, 4)[0], expected, rtol=1e-5)
    other = linear.build(make_optimizer("bias_corrected", rule, epsilon=1e-9))
    assert np.abs(linear.train(other, 4)[0] - expected).max() > 1e-3, "the floor must bind"


def test_a_floor_waits_for_the_noise():
    optimizer = DPAdam(second_moment=moments.BiasCorrected(floor=1.0), clip_norm=2.0)
    source, least = optimizer.second_moment, optimizer.second_moment._least_root
    with pytest.raises(ValueError, match="calibrate"):
        least(optimizer)
    optimizer.batch_size = 50
    with pytest.raises(ValueError, match="noise_multiplier and batch_size"):
        least(optimizer)
    sampling = dp.accounting.Sampling.poisson(1000, 50)
    sigma = dp.accounting.calibrate(optimizer, sampling, 20, epsilon=3.0, delta=1e-5)
    assert float(least(optimizer)) == pytest.approx(sigma * 2.0 / 50)
    optimizer.epsilon = 10.0  # the larger of the two
    assert least(optimizer) == 10.0
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(source))
    assert again.get_config() == {"floor": 1.0}
    assert moments.BiasCorrected.from_config({}).floor is None, "files of before have no floor"


def test_without_noise_a_floor_is_epsilon():
    for clip_norm in (1.0, math.inf):
        optimizer = DPAdam(
            epsilon=1e-3,
            second_moment=moments.BiasCorrected(floor=1.0),
            clip_norm=clip_norm,
            batch_size=8,
            noise_multiplier=0.0,
        )
        assert optimizer.second_moment._least_root(optimizer) == 1e-3


@pytest.mark.parametrize("floor", [0.0, -1.0, math.nan, math.inf, "1", True])
def test_a_floor_is_positive(floor):
    with pytest.raises(ValueError, match="floor"):
        moments.BiasCorrected(floor=floor)


# What a step may leave behind.


def values_of(optimizer):
    return [variable.numpy().copy() for variable in optimizer.variables]


@pytest.mark.representatives(6)
@pytest.mark.parametrize("source", SOURCES)
def test_queries_change_nothing_and_prepare_twice_is_as_once(source):
    for rule in rules_for(source):
        model = linear.build(make_optimizer(source, rule))
        linear.train(model, 2, draws_of(source))
        optimizer, before = model.optimizer, values_of(model.optimizer)
        first = optimizer.queries()
        for value, then in zip(values_of(optimizer), before, strict=True):
            np.testing.assert_array_equal(value, then)
        optimizer.prepare(model.trainable_variables)
        once = values_of(optimizer)
        optimizer.prepare(model.trainable_variables)
        for value, then in zip(values_of(optimizer), once, strict=True):
            np.testing.assert_array_equal(value, then)
        for one, other in zip(first, optimizer.queries(), strict=True):  # of the same step
            for a, b in zip(one.scale or (), other.scale or (), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.representatives(5)
@pytest.mark.parametrize("source", SOURCES)
def test_no_tensor_of_a_trace_outlives_it(source):
    model = linear.build(make_optimizer(source, "adam"), run_eagerly=False)
    linear.train(model, 1, draws_of(source))
    optimizer = model.optimizer
    for owner in (optimizer, optimizer._untracked, optimizer.second_moment):
        kept = [name for name, value in vars(owner).items() if is_tensor(value)]
        assert not kept, f"{type(owner).__name__} keeps {kept}"


def is_tensor(value):
    return any(tf.is_tensor(part) for part in keras.tree.flatten(value)
               if not isinstance(part, tf.Variable | keras.Variable))  # fmt: skip


def test_sources_written_for_methods_of_before_are_refused():
    """What they override is not called any more: their v would be another one, silently."""
    for name in ("receive", "accumulate"):
        with pytest.raises(TypeError, match=f"overrides {name}.*squares"):
            type("Old", (moments.SecondMoment,), {name: lambda self, *args: None})


def test_methods_of_before_work_and_warn():
    source, answer = moments.PostProcessing(), noise.Released([tf.ones(2)], 0.5, None, [tf.ones(2)])
    with pytest.warns(FutureWarning, match="unscaled"):
        np.testing.assert_array_equal(source.receive(None, [answer])[0], [1.0, 1.0])
    with pytest.warns(FutureWarning, match="unscaled"):
        np.testing.assert_array_equal(source.noise_std([answer])[0], [0.5, 0.5])
    rule = DPAdam(beta_2=0.5, **PRIVATE)
    with pytest.warns(FutureWarning, match="update"):
        assert float(source.accumulate(rule, 0, tf.constant(1.0), tf.constant(3.0))) == 5.0
    with pytest.warns(FutureWarning, match="geometry_moments"):
        rule.build([keras.Variable(np.zeros(2))])
        np.testing.assert_array_equal(rule.dominant(0, None), np.zeros(2))


def test_what_has_no_meaning_is_refused():
    for source, rule in IMPOSSIBLE:
        with pytest.raises(ValueError, match="linear|amsgrad"):
            make_optimizer(source, rule)


# σ = 0 and C = ∞: Keras's own optimizers.


@pytest.mark.parametrize(
    ("private", "plain", "options"),
    [
        (DPAdam, keras.optimizers.Adam, {"epsilon": 1e-12}),
        (DPAdam, keras.optimizers.Adam, {"epsilon": 1e-12, "amsgrad": True, "weight_decay": 0.1}),
        (DPRMSprop, keras.optimizers.RMSprop, {"epsilon": 1e-14, "momentum": 0.6}),
        (DPAdagrad, keras.optimizers.Adagrad,
         {"epsilon": 1e-14, "initial_accumulator_value": 0.0, "weight_decay": 0.1}),
    ],
    ids=["adam", "amsgrad", "rmsprop", "adagrad"],
)  # fmt: skip
def test_without_noise_and_bound_it_is_keras(private, plain, options):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 1, 0.7)
    free = {"clip_norm": math.inf, "noise_multiplier": 0.0, "batch_size": linear.ROWS}
    penalty = keras.regularizers.L2(0.1)
    sampling = dp.accounting.Sampling.poisson(100, linear.ROWS)
    ours = linear.build(private(schedule, **options, **free), penalty, sampling)
    inputs = keras.Input((4,))
    theirs = keras.Model(inputs, keras.layers.Dense(3, kernel_regularizer=penalty)(inputs))
    theirs.compile(plain(schedule, **options), "mse")
    theirs.set_weights(linear.split(linear.START))
    for _ in range(5):
        ours.train_on_batch(linear.X, linear.Y)
        theirs.train_on_batch(linear.X, linear.Y)
    expected = linear.flat(theirs.trainable_variables)
    np.testing.assert_allclose(
        linear.flat(ours.trainable_variables), expected, rtol=1e-3, atol=1e-5
    )


@pytest.mark.parametrize("source", ["post_processing", "bias_corrected", "independent",
                                    "scale_then_privatize", "noiseless"])  # fmt: skip
def test_without_noise_and_bound_the_sources_agree(source):
    free = {"clip_norm": math.inf, "noise_multiplier": 0.0, "epsilon": 1e-9}
    model = linear.build(make_optimizer(source, "adam", **free))
    other = linear.build(make_optimizer("post_processing", "adam", **free))
    np.testing.assert_allclose(linear.train(model, 4)[0], linear.train(other, 4)[0], rtol=1e-4)


# Joint moments: what a neighbouring batch can change.


def _squared_batches(rng, number, adjacency, n, clip, dim):
    """Sums of neighbouring batches of up to n rows: random ones, and ones that nearly align."""
    spread = rng.choice([0.0, 0.01, 0.3, 3.0], size=(number, 1, 1))
    rows = np.eye(dim)[0] + spread * rng.normal(size=(number, n, dim))
    rows /= np.linalg.norm(rows, axis=2, keepdims=True)
    full = rng.random((number, 1, 1)) < 0.5
    rows *= clip * np.where(full, 1.0, rng.random((number, n, 1)))
    other = rng.normal(size=(number, dim))
    other[::2] = -rows[::2, 0]
    other *= clip / np.linalg.norm(other, axis=1, keepdims=True)
    first = rows.sum(axis=1)
    replaced = other if adjacency == "replace_one" else 0.0
    return first, first - rows[:, 0] + replaced


def _in_ball(rng, number, radius, distance, dim):
    """Pairs of vectors of a ball, at most `distance` apart: what the projection can leave."""
    first = rng.normal(size=(number, dim)) * rng.choice([1.0, 0.01], size=(number, dim))
    first[: number // 3, 1:] = 0.0
    first *= radius / np.linalg.norm(first, axis=1, keepdims=True)
    first *= np.where(rng.random((number, 1)) < 0.7, 1.0, rng.random((number, 1)))
    step = rng.normal(size=(number, dim))
    step[::2] -= 2 * dim * first[::2] / radius
    step *= distance / np.linalg.norm(step, axis=1, keepdims=True)
    other = first + step
    return first, other * np.minimum(1, radius / np.linalg.norm(other, axis=1))[:, None]


@pytest.mark.parametrize("weight", [0.01, 4.0, 1e4])
@pytest.mark.parametrize("adjacency", ["add_or_remove_one", "zero_out", "replace_one"])
def test_joint_sensitivity_bounds_neighbouring_batches_and_is_tight(adjacency, weight):
    rng, clip, batch = np.random.default_rng(0), 0.7, 4
    for n in (4, 9):
        joint = JointMoments(weight, n, adjacency)
        bound, radius = joint.sensitivity(clip, batch), joint.radius(clip, batch)
        distance = (2 if adjacency == "replace_one" else 1) * clip / batch
        largest = 0.0
        for dim in (1, 2, 6):
            pairs = [_in_ball(rng, 20_000, radius, distance, dim)]
            for rows in (1, 2, n):
                sums = _squared_batches(rng, 4000, adjacency, rows, clip, dim)
                pairs.append([total / batch for total in sums])
            for g, other in pairs:
                change = np.concatenate([g - other, math.sqrt(weight) * (g**2 - other**2)], axis=1)
                largest = max(largest, np.linalg.norm(change, axis=1).max())
        assert largest <= bound * (1 + 1e-9)
        assert largest >= (0.9 if adjacency == "replace_one" else 0.999) * bound


def test_batches_beyond_the_bound_are_bounded_too():
    """The real release, on batches of many times N examples."""
    rng, n = np.random.default_rng(1), 4
    joint = JointMoments(5.0, n, "add_or_remove_one")
    bound = joint.sensitivity(CLIP, BATCH)
    for rows, dim in [(5, 1), (5, 2), (40, 2), (40, 6)]:
        sums = _squared_batches(rng, 25, "add_or_remove_one", rows, CLIP, dim)
        for pair in zip(*sums, strict=True):
            g, other = (_release(total, joint, 0.0) for total in pair)
            change = [*(g.value[0] - other.value[0]), *(5**0.5 * (g.square[0] - other.square[0]))]
            assert np.linalg.norm(change) <= bound * (1 + 1e-4)


@pytest.mark.parametrize("adjacency", ["add_or_remove_one", "replace_one"])
def test_sensitivity_is_that_of_the_specification(adjacency):
    c, b, n, weight = 0.7, 4, 9, 3.0
    got = JointMoments(weight, n, adjacency).sensitivity(c, b)
    expected = (c / b) ** 2 * (1 + weight * (2 * n - 1) ** 2 * c**2 / b**2)
    if adjacency == "replace_one":
        r = np.linspace(0, 2 * c, 300_000)
        total = (2 * (n - 1) * c + np.sqrt(4 * c**2 - r**2)) ** 2
        expected = np.max(r**2 / b**2 * (1 + weight * total / b**2))
    np.testing.assert_allclose(got**2, expected, rtol=1e-5)


def _release(total, joint, multiplier, source=None):
    part = Release(0, "mean_and_square", multiplier, noise.Gaussian(), joint)
    query = dp.clipping.Query(clip_norm=CLIP)
    (answer,) = noise.release(
        (part,), (query,), [[tf.constant(total, tf.float32)]],
        batch_size=BATCH, alpha=1.0, source=source,
    )  # fmt: skip
    return answer


def test_projection_leaves_ordinary_batches_and_bounds_the_others():
    joint = JointMoments(1.0, LARGEST, "add_or_remove_one")
    small, huge = np.full(4, 0.1), np.full(4, 1e6)
    np.testing.assert_allclose(_release(small, joint, 0.0).value[0], small / BATCH, rtol=1e-6)
    released = _release(huge, joint, 0.0)
    radius = LARGEST * CLIP / BATCH
    np.testing.assert_allclose(np.linalg.norm(released.value[0]), radius, rtol=1e-5)
    np.testing.assert_allclose(released.square[0], np.square(released.value[0]), rtol=1e-6)
    np.testing.assert_array_equal(_release(np.zeros(4), joint, 0.0).value[0], np.zeros(4))


def test_joint_noise_has_the_declared_scales():
    """Each of the tests below fails for a correct library in fewer than 1 of 10⁹ runs."""
    joint, n = JointMoments(4.0, LARGEST, "add_or_remove_one"), 20_000
    released = _release(np.zeros(n), joint, SIGMA, NoiseSource())
    for draws, std in zip((released.value[0], released.square[0]), joint_scales(4.0), strict=True):
        power = np.sum(np.square(np.float64(draws)))
        low, high = (scipy.stats.chi2(n).ppf(p) for p in (FALSE_ALARM / 2, 1 - FALSE_ALARM / 2))
        assert low < power / std**2 < high
        assert not low < power / (2 / 3 * std) ** 2 < high
        assert not low < power / (1.5 * std) ** 2 < high
    correlation = np.corrcoef(released.value[0], released.square[0])[0, 1]
    assert abs(correlation) * math.sqrt(n) < scipy.stats.norm.isf(FALSE_ALARM / 2)


def test_without_a_bound_on_the_batch_size_poisson_sampling_is_refused():
    for source in ("independent", moments.Joint(1.0), moments.Joint(1.0, max_batch_size=3)):
        optimizer = DPAdam(second_moment=source, **PRIVATE)
        with pytest.raises(ValueError, match="max_batch_size"):
            linear.build(optimizer)
        with pytest.raises(ValueError, match="max_batch_size"):
            dp.accounting.epsilon(optimizer, SAMPLING, steps=1, delta=1e-5)
        with pytest.raises(ValueError, match="max_batch_size"):
            dp.accounting.calibrate(optimizer, SAMPLING, steps=1, epsilon=1.0, delta=1e-5)


def test_the_adjacency_must_be_that_of_the_data():
    sampling = dp.accounting.Sampling.poisson(100, BATCH, "replace_one")
    optimizer = DPAdam(second_moment=moments.Independent(LARGEST), **PRIVATE)
    with pytest.raises(ValueError, match="adjacency='replace_one'"):
        linear.build(optimizer, sampling=sampling)
    fitting = DPAdam(second_moment=moments.Independent(LARGEST, "replace_one"), **PRIVATE)
    linear.build(fitting, sampling=sampling).train_on_batch(linear.X, linear.Y)
    # Subsets of fixed size are held against a replaced example, also under zero_out.
    subsets = dp.accounting.Sampling.without_replacement(100, BATCH, "zero_out")
    with pytest.raises(ValueError, match="adjacency='replace_one'"):
        linear.build(DPAdam(second_moment="independent", **PRIVATE), sampling=subsets)
    right = DPAdam(second_moment=moments.Independent(adjacency="replace_one"), **PRIVATE)
    assert dp.accounting.epsilon(right, subsets, steps=2, delta=1e-5) > 0
    linear.build(right, sampling=subsets).train_on_batch(linear.X, linear.Y)


def test_arguments_out_of_range():
    for make in [
        lambda: moments.Joint(0.0),
        lambda: moments.Joint(math.nan),
        lambda: moments.Joint(None),
        lambda: moments.Joint(1.0, max_batch_size=0),
        lambda: moments.Joint(1.0, max_batch_size=2.5),
        lambda: moments.Joint(1.0, adjacency="replace"),
        lambda: moments.ScaleThenPrivatize(epsilon=0.0),
        lambda: moments.get("joint"),
        lambda: moments.get("no such source"),
        lambda: moments.get(3),
        lambda: DPAdam(second_moment="scale_then_privatize", epsilon=0.0, **PRIVATE),
        lambda: DPRMSprop(centered=True, **PRIVATE),
    ]:
        with pytest.raises(ValueError):
            make()


def test_the_source_is_fixed_once_built():
    model = linear.build(DPAdam(**PRIVATE))
    model.train_on_batch(linear.X, linear.Y)
    with pytest.raises(ValueError, match="fixed once"):
        model.optimizer.second_moment = "noiseless"


# Statistics of v̂ under a constant gradient.


def _constant_gradient(optimizer, steps, dim=2000):
    """v after training on examples whose gradient is 1 in each coordinate, wherever the weights."""
    inputs = keras.Input((dim,))
    model = dp.DPModel(inputs, keras.layers.Dense(1, use_bias=False)(inputs))
    model.compile(optimizer=optimizer, loss=lambda y, y_pred: y * y_pred)
    model.sampling = dp.accounting.Sampling.poisson(100, optimizer.batch_size)
    for _ in range(steps):
        model.train_on_batch(np.ones((4, dim), "float32"), np.ones((4, 1), "float32"))
    return np.float64(optimizer.second_moments[0].numpy()).ravel()


def _is_mean(sample, expected):
    """Whether the mean of the population may be `expected`, with a false-alarm rate of 1e-9."""
    error = sample.std(ddof=1) / math.sqrt(len(sample))
    return abs(sample.mean() - expected) < scipy.stats.norm.isf(FALSE_ALARM / 2) * error


def test_post_processing_is_biased_by_the_noise_variance():
    dim, beta, steps = 2000, 0.9, 12
    optimizer = DPAdam(0.01, beta_2=beta, clip_norm=2 * math.sqrt(dim), batch_size=4,
                       noise_multiplier=0.02)  # fmt: skip
    phi = (0.02 * 2 * math.sqrt(dim) / 4) ** 2  # 0.2
    v_hat = _constant_gradient(optimizer, steps) / (1 - beta**steps)
    assert _is_mean(v_hat, 1 + phi)
    assert not _is_mean(v_hat, 1.0)


def test_steady_state_of_scale_then_privatize():
    dim, beta, sigma = 2000, 0.9, 0.025
    clip = 2 * math.sqrt(dim)
    optimizer = DPAdam(0.01, beta_2=beta, epsilon=1e-3, clip_norm=clip, batch_size=4,
                       noise_multiplier=sigma, second_moment="scale_then_privatize")  # fmt: skip
    v = _constant_gradient(optimizer, 120)  # 0.9^120 = 3e-6: v̂ = v
    power = (sigma * clip / 4) ** 2  # 0.31
    c = 1 + power * (1 - beta) / beta
    assert _is_mean(v, (1 - beta) / (1 - c * beta))  # 1.45
    assert not _is_mean(v, 1 + power)


# Noiseless and side information.


def test_noiseless_warns_and_has_no_privacy():
    with pytest.warns(UserWarning, match="not private"):
        optimizer = DPAdam(second_moment="noiseless", **PRIVATE)
    assert dp.accounting.epsilon(optimizer, SAMPLING, steps=1, delta=1e-5) == math.inf
    model = linear.build(optimizer)
    model.train_on_batch(linear.X, linear.Y)
    assert model.ledger.epsilon(1e-5) == math.inf
    assert "NO DIFFERENTIAL PRIVACY" in model.ledger.statement(1e-5)
    with pytest.raises(ValueError, match="without noise"):
        dp.accounting.calibrate(
            DPAdam(second_moment="noiseless", clip_norm=1.0, batch_size=BATCH),
            SAMPLING, steps=1, epsilon=1.0, delta=1e-5,
        )  # fmt: skip


@pytest.mark.parametrize(
    "values",
    [
        [np.ones((4, 3))],
        [np.ones((3, 4)), np.ones(3)],
        [np.ones((4, 3)), -np.ones(3)],
        [np.ones((4, 3)), np.full(3, np.nan)],
        [np.ones((4, 3)), np.full(3, np.inf)],
        lambda step: [tf.ones((3, 4)), tf.ones(3)],
        lambda step: [tf.ones((4, 3)), -tf.ones(3)],
    ],
    ids=["number", "shape", "negative", "nan", "infinite", "callable shape", "callable negative"],
)
def test_wrong_side_information_is_refused(values):
    for eager in (True, False):
        optimizer = DPAdam(second_moment=moments.SideInformation(values), **PRIVATE)
        model = linear.build(optimizer, run_eagerly=eager)
        with pytest.raises(ValueError, match="side_information"):
            model.train_on_batch(linear.X, linear.Y)


def test_the_statement_says_that_side_information_was_given():
    optimizer = make_optimizer("values", "adam", noise_multiplier=None)
    sigma = dp.accounting.calibrate(optimizer, SAMPLING, steps=5, epsilon=1.0, delta=1e-5)
    assert sigma > 0
    model = linear.build(optimizer)
    model.train_on_batch(linear.X, linear.Y)
    statement = " ".join(model.ledger.statement(1e-5).split())
    assert "side information (a second moment or a geometry) that was given as public" in statement
    assert "epsilon =" in statement


# What it costs, against dp_accounting called directly.


def _rdp(event, steps, delta=1e-5):
    accountant = dp_accounting.rdp.RdpAccountant()
    accountant.compose(dp_accounting.PoissonSampledDpEvent(BATCH / 100, event), steps)
    return accountant.get_epsilon(delta)


@pytest.mark.parametrize(
    "source",
    ["post_processing", "bias_corrected", "independent", "joint", "scale_then_privatize", "values"],
)
def test_every_private_source_costs_one_gaussian_a_step(source):
    optimizer = make_optimizer(source, "adam")
    expected = _rdp(dp_accounting.GaussianDpEvent(SIGMA), 50)
    assert dp.accounting.epsilon(optimizer, SAMPLING, 50, 1e-5, "rdp") == pytest.approx(expected)


def test_under_replace_one_joint_noise_is_scaled_and_other_noise_is_accounted_twice():
    sampling = dp.accounting.Sampling.poisson(100, BATCH, "replace_one")
    joint = DPAdam(second_moment=moments.Joint(1.0, LARGEST, "replace_one"), **PRIVATE)
    expected = _rdp(dp_accounting.GaussianDpEvent(SIGMA), 50)
    assert dp.accounting.epsilon(joint, sampling, 50, 1e-5, "rdp") == pytest.approx(expected)
    expected = _rdp(dp_accounting.GaussianDpEvent(SIGMA / 2), 50)
    plain = DPAdam(**PRIVATE)
    assert dp.accounting.epsilon(plain, sampling, 50, 1e-5, "rdp") == pytest.approx(expected)


@pytest.mark.parametrize("source", ["independent", "joint", "values", "noiseless"])
def test_the_ledger_survives_json(source):
    ledger = dp.accounting.Ledger.of(make_optimizer(source, "adam"), SAMPLING, 7)
    again = dp.accounting.Ledger.from_json(ledger.to_json())
    assert again.segments[0].releases == ledger.segments[0].releases
    assert again.epsilon(1e-5) == ledger.epsilon(1e-5)
    again.merge(ledger)
    assert again.steps == 7


# Serialisation and state.


@pytest.mark.parametrize("source", SOURCES)
def test_configuration_round_trip(source):
    for rule in rules_for(source):
        optimizer = make_optimizer(source, rule)
        config = optimizer.get_config()
        assert type(optimizer).from_config(config).get_config() == config
        serialized = json.loads(json.dumps(keras.saving.serialize_keras_object(optimizer)))
        revived = keras.saving.deserialize_keras_object(serialized)
        assert type(revived) is type(optimizer)
        assert revived.get_config() == config
        assert revived.releases == optimizer.releases


@pytest.mark.representatives(6)
@pytest.mark.parametrize("source", SOURCES)
def test_saved_training_goes_on_as_if_it_had_not_stopped(source, tmp_path):
    rule = "rmsprop with momentum" if source == "joint" else "adam"
    whole, fed = linear.train(linear.build(make_optimizer(source, rule)), 5, draws_of(source))
    model = linear.build(make_optimizer(source, rule))
    linear.train(model, 3, draws_of(source))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    loaded.sampling = SAMPLING
    rest, _ = linear.train(loaded, 2, draws_of(source))
    np.testing.assert_allclose(rest, whole[3:], rtol=1e-5)
    assert loaded.ledger.steps == 5


@pytest.mark.parametrize("source", ["bias_corrected", "joint"])
def test_two_optimizers_never_share_what_a_source_remembers(source):
    shared = moments.get(SOURCES[source]())
    first, second = (make_optimizer(source, "adam", second_moment=shared) for _ in range(2))
    assert first.second_moment is not second.second_moment
    alone = linear.train(linear.build(make_optimizer(source, "adam")), 3, draws_of(source))[0]
    one, other = linear.build(first), linear.build(second)
    linear.train(one, 2, draws_of(source))
    np.testing.assert_array_equal(linear.train(other, 3, draws_of(source))[0], alone)


def test_numbers_may_come_from_numpy():
    """A search over hyper-parameters hands over NumPy's numbers; one had dtype float64."""
    optimizer = DPAdam(
        learning_rate=np.float64(0.01),
        epsilon=np.float64(1e-3),
        second_moment="bias_corrected",
        clip_norm=np.float64(0.3),
        noise_multiplier=np.float32(1.0),
        batch_size=np.int64(8),
    )
    model = linear.build(optimizer)
    linear.train(model, 2)
    assert np.isfinite(linear.flat(model.trainable_variables)).all()
