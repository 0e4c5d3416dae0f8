"""A clip norm that follows a quantile of the gradients' norms, by counts released beside them."""

import json
import math

import dp_accounting
import keras
import numpy as np
import pytest
import tensorflow as tf
from dp_accounting.rdp import rdp_privacy_accountant

import dp_keras_opt as dp
from dp_keras_opt import noise
from dp_keras_opt.accounting import Ledger, Sampling
from dp_keras_opt.clipping import Batch, Quantile, Query, clipped_sums
from dp_keras_opt.noise.mechanism import Release
from dp_keras_opt.optimizers.catalog import CATALOG
from tests.helpers import linear_regression as linear
from tests.helpers.normals import assert_exactly, assert_noise

RATE, GAMMA, COUNT_NOISE = 0.3, 0.4, 1.7
ADAPTIVE = Quantile(GAMMA, initial=0.3, learning_rate=RATE, count_noise=COUNT_NOISE)
PRIVATE = {"batch_size": linear.BATCH, "noise_multiplier": linear.SIGMA}


def on_sum(z, count_noise, counts=1):
    """σ, solved from z⁻² = σ⁻² + L·(2σ_b)⁻²."""
    return (z**-2 - counts * (2 * count_noise) ** -2) ** -0.5


def sgd(clip_norm=ADAPTIVE, rate=0.7, **kwargs):
    return dp.optimizers.DPSGD(rate, clip_norm=clip_norm, **PRIVATE | kwargs)


def bounds_of(model):
    """C_l of the next step."""
    return model.optimizer._found_clip_norms.numpy().astype(np.float64)


# The price.


@pytest.mark.parametrize(
    "z, count_noise, counts, factor",
    [(1.0, 12.8, 1, 1.000764), (1.0, 12.8, 10, 1.007718), (0.9, 1.0, 1, 1.007807 / 0.9)],
)
def test_noise_on_the_sum_is_that_of_the_formula(z, count_noise, counts, factor):
    """1.007807 is σ at z = 0.9 and σ_b = 1: (0.9⁻² − 1/4)^(−½)."""
    release = Release(0, "mean_and_counts", z, noise.Gaussian(), count_noise=count_noise)
    found = release.noise_on_sum(counts)
    assert found / z == pytest.approx(factor, abs=1e-6)
    assert found == pytest.approx(on_sum(z, count_noise, counts), rel=1e-12)


def test_epsilon_is_that_of_gradients_and_counts_composed():
    """By dp_accounting, of the two as what they are: Gaussians of sensitivity C and of ½."""
    sampling, delta = Sampling.full(100), 1e-5
    optimizer = sgd(Quantile(count_noise=1.1), batch_size=100)
    spent = Ledger.of(optimizer, sampling, 7).epsilon(delta, "rdp")
    parts = [on_sum(linear.SIGMA, 1.1), 2 * 1.1]
    accountant = rdp_privacy_accountant.RdpAccountant()
    for part in parts:
        accountant.compose(dp_accounting.GaussianDpEvent(part), 7)
    assert spent == pytest.approx(accountant.get_epsilon(delta), rel=1e-9)
    plain = Ledger.of(sgd(1.0, batch_size=100), sampling, 7)
    assert spent == plain.epsilon(delta, "rdp")


@pytest.mark.parametrize("adjacency", ["add_or_remove_one", "zero_out", "replace_one"])
def test_epsilon_is_that_of_a_constant_clip_norm(adjacency):
    kind = Sampling.poisson if adjacency == "add_or_remove_one" else Sampling.without_replacement
    sampling = kind(1000, linear.BATCH, adjacency)
    ledgers = [Ledger.of(sgd(bound), sampling, 30) for bound in (ADAPTIVE, 0.3)]
    assert ledgers[0].epsilon(1e-5) == ledgers[1].epsilon(1e-5)


def test_calibration_does_not_ask_how_many_counts_there_are():
    found = []
    for clip_norm, clipping in ((0.3, "flat"), (Quantile(), "flat"), (Quantile(), "per_layer")):
        optimizer = dp.optimizers.DPSGD(clip_norm=clip_norm, batch_size=100, clipping=clipping)
        args = Sampling.poisson(10_000, 100), 50, 3.0, 1e-5
        found.append(dp.accounting.calibrate(optimizer, *args))
        assert dp.accounting.epsilon(optimizer, args[0], 50, 1e-5) <= 3.0
    assert len(set(found)) == 1


# The rule, against a transcription in float64.

LAYERS = {"first": [0, 12], "second": [12, 15]}


def transcribed(steps, fed, clip_norm, rate=0.7, groups=((0, 15),), start=None, sigma=linear.SIGMA):
    """(weights, bounds) after each step, of gradient descent on the oracle's regression."""
    theta, count = linear.START, len(groups)
    bounds = np.array(start or [clip_norm.initial / math.sqrt(count)] * count)
    weights, found = [], []
    multiplier = on_sum(sigma, clip_norm.count_noise, count) if sigma else 0.0
    for step in range(steps):
        gradients = linear.gradients(theta)
        total, halves = np.zeros(15), np.zeros(count)
        for place, (first, last) in enumerate(groups):
            part = gradients[:, first:last]
            norms = np.linalg.norm(part, axis=1)
            total[first:last] = (np.minimum(1, bounds[place] / norms)[:, None] * part).sum(axis=0)
            halves[place] = np.sum((norms <= bounds[place]) - 0.5)
        z, on_counts = fed.flat(step), fed.tables[2][step].astype(np.float64)
        total += multiplier * np.linalg.norm(bounds) * z
        halves += (clip_norm.count_noise * on_counts) if sigma else 0.0
        theta = theta - rate * total / linear.BATCH
        share = 0.5 + halves / linear.BATCH
        bounds = bounds * np.exp(-clip_norm.learning_rate * (share - clip_norm.quantile))
        weights.append(theta)
        found.append(bounds)
    return np.array(weights), np.array(found)


MODES = {
    "eager": {"run_eagerly": True},
    "graph": {"run_eagerly": False},
    "xla": {"run_eagerly": False, "jit_compile": True},
    "chunks": {"run_eagerly": False, "physical_batch_size": 4},
}


@pytest.mark.parametrize("sigma", [linear.SIGMA, 0.0])
@pytest.mark.parametrize("mode", MODES)
def test_sgd_is_the_formula(mode, sigma):
    model = linear.build(sgd(noise_multiplier=sigma), **MODES[mode])
    found, fed = linear.train(model, 6, counts=1)
    weights, bounds = transcribed(6, fed, ADAPTIVE, sigma=sigma)
    np.testing.assert_allclose(found, weights, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(bounds_of(model), bounds[-1], rtol=1e-5)
    assert linear.share_clipped(linear.START, 0.3) > 0.5
    assert np.ptp(bounds) > 0.05


def two_layers(optimizer, **compiled):
    """The oracle's regression with kernel and bias in layers of their own."""
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(3, use_bias=False, name="kernel")(inputs)
    model = dp.DPModel(inputs, Shift(name="bias")(hidden))
    model.compile(optimizer, "mse", **compiled)
    model.set_weights(linear.split(linear.START))
    model.sampling = linear.SAMPLING
    return model


@keras.saving.register_keras_serializable(package="tests")
class Shift(keras.layers.Layer):
    def build(self, shape):
        self.shift = self.add_weight(shape=(shape[-1],), name="shift")

    def call(self, inputs):
        return inputs + self.shift


@pytest.mark.parametrize("clipping", ["per_layer", {"kernel": 3.0, "bias": 1.0}])
def test_each_layer_has_a_bound_of_its_own(clipping):
    """Proportions stand in alphabetical order, bias before kernel, whatever that of the dict."""
    model = two_layers(sgd(clipping=clipping), run_eagerly=True)
    found, fed = linear.train(model, 6, counts=2)
    if clipping == "per_layer":
        groups, start = [(0, 12), (12, 15)], None
    else:
        groups, start = [(12, 15), (0, 12)], [0.3 / 10**0.5, 0.9 / 10**0.5]
    weights, bounds = transcribed(6, fed, ADAPTIVE, groups=groups, start=start)
    np.testing.assert_allclose(found, weights, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(bounds_of(model), bounds[-1], rtol=1e-5)
    np.testing.assert_allclose(
        float(model.optimizer.current_clip_norm), np.linalg.norm(bounds[-1]), rtol=1e-5
    )


def test_layers_of_one_path_are_refused():
    """The optimizer takes them for one layer, the model has two."""

    class Twins(dp.DPModel):
        def __init__(self):
            super().__init__()
            self.one = keras.layers.Dense(3, name="twin")
            self.other = keras.layers.Dense(3, name="twin")

        def call(self, inputs):
            return self.other(self.one(inputs))

    model = Twins()
    model.compile(sgd(clipping="per_layer"), "mse")
    model.sampling = linear.SAMPLING
    model(linear.X)
    with pytest.raises(ValueError, match="1 bounds for 2 layers, some of equal paths. Name them"):
        model.train_on_batch(linear.X, linear.Y)
    assert model.ledger.steps == 0


def test_it_finds_the_median_of_known_norms():
    """Example i pushes the bias by i + 1 at every step: the median of 1, …, 101 is 51.

    Noise of std σ_b = 5 on a share of 101 moves C by 0.2·5/101 = 1% a step, around the median by
    some 3%.
    """
    norms = np.arange(1, 102, dtype="float32")

    def loss(y_true, y_pred):
        return y_true[:, 0] * y_pred[:, 0]

    for initial in (1.0, 4000.0):
        rule = dp.optimizers.DPSGD(
            1e-9, clip_norm=Quantile(initial=initial, count_noise=5.0), batch_size=101,
            noise_multiplier=1.0,
        )  # fmt: skip
        inputs = keras.Input((1,))
        model = dp.DPModel(inputs, keras.layers.Dense(1, use_bias=False)(inputs))
        model.compile(rule, dp.Objective(lambda x, y, outputs, _: loss(y, outputs)))
        rows = tf.data.Dataset.from_tensors((np.ones((101, 1), "float32"), norms[:, None]))
        model.fit(dp.data.assume_sampling(rows.repeat(150), Sampling.full(101)), verbose=0)
        assert bounds_of(model)[0] == pytest.approx(51.0, rel=0.15)


@pytest.mark.parametrize("physical", [None, 2])
def test_of_nobody_the_share_is_a_half(physical):
    model = linear.build(sgd(noise_multiplier=0.0), physical_batch_size=physical)
    model.train_on_batch(linear.X[:0], linear.Y[:0])
    assert bounds_of(model)[0] == pytest.approx(0.3 * math.exp(-RATE * (0.5 - GAMMA)), rel=1e-6)


@pytest.mark.parametrize("options", [{"steps_per_execution": 3}, {"jit_compile": True}])
def test_it_goes_on_from_step_to_step(options):
    """Of several in one execution, and of an example with views, which are clipped as one."""
    found = []
    for compiled in ({"run_eagerly": True}, {"run_eagerly": False} | options):
        model = linear.build(sgd(noise_multiplier=0.0, rate=0.1), **compiled)
        model.optimizer.batch_size = 6
        batches = dp.data.poisson_batches((linear.X, linear.Y), 6, 6, views=2, map=twice)
        model.fit(batches, verbose=0)
        found.append(bounds_of(model)[0])
    assert found[0] == pytest.approx(found[1], rel=1e-5) and abs(found[0] / 0.3 - 1) > 0.05


def twice(x, y):
    return x, y


# Who is counted.


def counts(batch, clip_norm=(0.5,), **kwargs):
    """The counts over a batch of a linear model of weights 0, whose gradient is −2·x·y."""
    inputs = keras.Input((1,))
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = dp.DPModel(inputs, layer(inputs))
    model.compile(sgd(), "mse")
    query = Query(clip_norm=tf.constant(clip_norm), counts=True, **kwargs)
    *sums, found = clipped_sums(model, batch, (query,)).sums[0]
    assert len(sums) == 1
    return found.numpy()


def column(*values):
    return tf.constant(values, tf.float32)[:, None]


def test_units_below_count_a_half_and_those_above_a_half_less():
    assert counts((column(1, 1, 1), column(0.1, 0.2, 3.0))) == 0.5 + 0.5 - 0.5


@pytest.mark.parametrize(
    "left_out",
    [
        {"x": math.nan},
        {"x": math.inf},
        {"weight": 0.0},
        {"weight": 0.0, "y": 0.01},
        {"mask": False},
        {"mask": False, "y": 0.01},
        {"mask": False, "public": 1.0},
        {"y": 0.0},
    ],
    ids=str,
)
def test_who_adds_nothing_to_the_sum_is_in_no_count(left_out):
    """Neither as one above the bound nor as one below it."""
    one = {"x": 1.0, "y": 3.0, "weight": 1.0, "mask": True, "public": 0.0} | left_out
    batch = Batch(
        column(1.0, one["x"]), column(0.1, one["y"]), tf.constant([1.0, one["weight"]]),
        tf.constant([True, one["mask"]]), tf.constant([0.0, one["public"]]),
    )  # fmt: skip
    assert counts(batch) == 0.5


def test_users_are_counted_once():
    """By the gradient of their mean, and not at all where no row of theirs has a weight."""
    x, y = column(*[1.0] * 8), column(0.1, 0.1, 9.0, 9.0, 9.0, 9.0, 9.0, -9.0)
    weight = tf.constant([1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0])
    mask = tf.constant([[True, True], [True, False], [True, True], [True, True]])
    assert counts(Batch(x, y, weight, mask)) == 0.5 - 0.5  # the last one's gradients cancel


def test_a_layer_without_gradient_is_in_no_count():
    inputs = keras.Input((2,))
    hidden = keras.layers.Dense(1, use_bias=False, activation="relu", name="first")(inputs)
    model = dp.DPModel(inputs, keras.layers.Dense(1, name="second")(hidden))
    model.compile(sgd(), "mse")
    model.set_weights([np.ones((2, 1)), np.ones((1, 1)), np.zeros(1)])
    query = Query(clip_norm=tf.constant([1e3, 1e3]), style="per_layer", counts=True)
    x = tf.constant([[1.0, 1.0], [-1.0, -1.0]])
    found = clipped_sums(model, (x, column(0.0, 1.0)), (query,)).sums[0][-1]
    np.testing.assert_array_equal(found, [0.5, 1.0])


@pytest.mark.parametrize("style", ["flat", "per_layer"])
def test_neighbouring_batches_are_one_unit_of_noise_apart(style):
    """(sum/(σ·C), counts/σ_b) moves by at most 1/z when an example is taken out; one that is
    clipped moves it by exactly that. Replaced, by at most twice that.
    """
    model = two_layers(sgd(), run_eagerly=True)
    bounds = np.array([0.4, 0.3] if style == "per_layer" else [0.5])
    query = Query(clip_norm=tf.constant(bounds, tf.float32), style=style, counts=True)
    scale = on_sum(linear.SIGMA, COUNT_NOISE, len(bounds)) * np.linalg.norm(bounds)
    rng = np.random.default_rng(3)

    def vector(rows, x, y):
        *sums, found = clipped_sums(model, (x[rows], y[rows]), (query,)).sums[0]
        return np.append(linear.flat(sums) / scale, found.numpy() / COUNT_NOISE)

    taken_out, replaced = [], []
    for size in (1e-2, 1.0, 30.0):
        x = (size * rng.normal(size=(8, 4))).astype("float32")
        y = (size * rng.normal(size=(8, 3))).astype("float32")
        whole = vector(np.arange(7), x, y)
        for row in range(7):
            rest = np.delete(np.arange(7), row)
            taken_out.append(np.linalg.norm(whole - vector(rest, x, y)))
            replaced.append(np.linalg.norm(whole - vector(np.append(rest, 7), x, y)))
    assert max(taken_out) <= (1 + 1e-5) / linear.SIGMA
    assert max(taken_out) == pytest.approx(1 / linear.SIGMA, rel=1e-4)
    assert max(replaced) <= (2 + 1e-5) / linear.SIGMA


# The noise.

SIGMA, INITIAL, BATCH, SIGMA_B = 1.5, 0.4, 8, 0.9


def trained_on_nothing(steps, width=12, optimizer=None, batches=None, **kwargs):
    """(noise in the mean over C_t, noise in the counts) of each step: examples have no weight."""
    inputs = keras.Input((1,))
    model = dp.DPModel(inputs, keras.layers.Dense(width, use_bias=False)(inputs))
    rule = optimizer or dp.optimizers.DPSGD(
        1.0, clip_norm=Quantile(initial=INITIAL, count_noise=SIGMA_B), batch_size=BATCH,
        noise_multiplier=SIGMA, **kwargs,
    )  # fmt: skip
    model.compile(rule, "mse")
    nobody = np.ones((40, 1), "float32"), np.zeros((40, width), "float32"), np.zeros(40, "float32")
    seen = []

    def note(*_, **__):
        seen.append((model.get_weights()[0].ravel().astype(np.float64), bounds_of(model)))

    model.optimizer.build(model.trainable_variables)
    note()
    look = keras.callbacks.LambdaCallback(on_train_batch_end=note)
    batches = batches or (lambda data: dp.data.poisson_batches(data, BATCH, steps))
    model.fit(batches(nobody), callbacks=[look], verbose=0)
    weights, bounds = (np.array(part) for part in zip(*seen, strict=True))
    means = -np.diff(weights, axis=0) / bounds[:-1]
    shares = 0.5 - np.diff(np.log(bounds[:, 0])) / 0.2
    return means, (shares - 0.5) * BATCH


@pytest.mark.parametrize("secure", [False, True])
def test_gradients_and_counts_have_the_noise_that_the_formula_says(secure):
    """1,000 steps, of which each has one draw for the count and twelve for the gradients."""
    if secure:
        pytest.importorskip("cryptography")
    means, found = trained_on_nothing(1000, secure_noise=secure)
    assert_exactly(means, on_sum(SIGMA, SIGMA_B) / BATCH)
    assert_exactly(found, SIGMA_B)
    scaled = [means / means.std(), found[:, None] / found.std()]
    assert_noise(np.concatenate(scaled, axis=1), 1.0)  # one has nothing of the other


def test_levels_are_of_both():
    levels = np.tile([1.0, 2.0], 450)
    means, found = trained_on_nothing(900, noise_schedule=levels)
    assert_exactly(means / levels[:, None], on_sum(SIGMA, SIGMA_B) / BATCH)
    assert_exactly(found / levels, SIGMA_B)


@pytest.mark.parametrize(
    "make",
    [
        lambda: noise.BandedMatrix(1000, 3),
        lambda: noise.BufferedToeplitz(1000),
        lambda: noise.LambdaCGD(1000),
        lambda: noise.BandedInverseSquareRoot(1000, 4),
        lambda: noise.TreeAggregation(1000),
    ],
    ids=["banded", "blt", "lambda", "inverse", "tree"],
)
def test_counts_are_further_coordinates_of_correlated_noise(make):
    """What C takes back is white, C the matrix of the mechanism; of the counts as of the rest."""

    def batches(data):
        rows = tuple(part[:BATCH] for part in data)
        repeated = tf.data.Dataset.from_tensors(rows).repeat(1000)
        return dp.data.assume_sampling(repeated, Sampling.fixed_order(8000, BATCH, "zero_out"))

    mechanism = make()
    means, found = trained_on_nothing(1000, width=3, noise=mechanism, batches=batches)
    matrix = np.linalg.inv(mechanism.inverse(1000))
    assert_exactly(matrix @ found, SIGMA_B)
    assert_exactly(matrix @ means, on_sum(SIGMA, SIGMA_B) / BATCH)


def test_batch_sizes_divide_the_counts_of_their_steps():
    """σ_b is a twentieth of the smallest, and the share is over B_t."""
    sizes = {0: 40, 450: 160}
    rule = dp.optimizers.DPSGD(
        1.0, clip_norm=Quantile(initial=INITIAL), batch_size=sizes, noise_multiplier=SIGMA
    )
    _, found = trained_on_nothing(
        900, optimizer=rule, batches=lambda data: dp.data.poisson_batches(
            tuple(np.repeat(part, 50, axis=0) for part in data), sizes, 900
        ),
    )  # fmt: skip
    divisors = np.repeat([40, 160], 450)
    assert rule.releases[0].count_noise == 2.0
    assert_exactly(found / BATCH * divisors, 2.0)


def test_without_noise_there_is_none_on_the_counts():
    model = linear.build(sgd(noise_multiplier=0.0))
    for _ in range(2):
        model.train_on_batch(linear.X, linear.Y)
    assert model.ledger.epsilon(1e-5) == math.inf
    again = linear.build(sgd(noise_multiplier=0.0))
    for _ in range(2):
        again.train_on_batch(linear.X, linear.Y)
    np.testing.assert_array_equal(bounds_of(model), bounds_of(again))


def test_counts_are_released_as_such_only():
    """Under the noise of a mean, σ·C, a small C would give them away."""
    source, gaussian = noise.Release, noise.Gaussian()
    total = [tf.zeros(3), tf.zeros(1)]
    for counted, statistic in ((True, "mean"), (False, "mean_and_counts")):
        query = Query(clip_norm=tf.ones(1) if counted else 1.0, counts=counted)
        part = source(0, statistic, 1.0, gaussian, count_noise=3.0)
        with pytest.raises(ValueError, match="Counts beside a sum cannot be released as a"):
            noise.release(
                (part,), (query,), [total], batch_size=8, alpha=1.0, source=sgd().noise_source
            )


def test_counts_need_gaussian_noise_and_squares_their_sensitivity():
    query = Query(clip_norm=tf.constant([3.0, 4.0]), counts=True)
    assert float(query.sensitivity) == 5.0
    assert float(query._replace(square=True).sensitivity) == 25.0
    part = Release(0, "mean_and_counts", 1.0, noise.Laplace(), count_noise=3.0)
    for norm in ("l1", "l2"):
        with pytest.raises(ValueError, match="Laplace noise needs sums clipped in the l1 norm"):
            noise.release(
                (part,), (query._replace(norm=norm),), [[tf.zeros(3), tf.zeros(2)]],
                batch_size=8, alpha=1.0, source=sgd().noise_source,
            )  # fmt: skip


# What is refused.


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"quantile": 0.0}, "quantile must be in"),
        ({"quantile": 1.0}, "quantile must be in"),
        ({"quantile": math.nan}, "quantile must be in"),
        ({"initial": 0.0}, "initial must be positive"),
        ({"initial": 1e-20}, "too small"),
        ({"initial": math.inf}, "initial must be finite"),
        ({"learning_rate": 0.0}, "learning_rate must be positive"),
        ({"learning_rate": None}, "learning_rate must be positive"),
        ({"count_noise": 0.0}, "count_noise must be positive"),
        ({"count_noise": math.inf}, "count_noise must be positive"),
    ],
)
def test_values_out_of_range_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        Quantile(**arguments)


MOMENTS = dp.optimizers.moments


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: sgd(normalize=True), "normalize=True does not take .*nothing to find"),
        (lambda: sgd(noise="laplace"), "noise=Laplace does not take .*not under any other"),
        (
            lambda: dp.optimizers.DPAdam(clip_norm=ADAPTIVE, second_moment=MOMENTS.Joint(1.0, 100)),
            "Joint does not take .*one clip norm",
        ),
        (
            lambda: dp.optimizers.DPAdam(
                clip_norm=ADAPTIVE, second_moment=MOMENTS.Independent(100)
            ),
            "Independent does not take",
        ),
        (
            lambda: dp.optimizers.DPAdam(clip_norm=ADAPTIVE, second_moment="noiseless"),
            "noiseless' does not take .*without noise",
        ),
        (
            lambda: dp.optimizers.DP2RMSprop(clip_norm=ADAPTIVE, adaptive_clip_norm=1.0),
            "DP2RMSprop does not take .*different geometries",
        ),
        (
            lambda: dp.optimizers.DP2Yogi(clip_norm=1.0, adaptive_clip_norm=ADAPTIVE),
            "adaptive_clip_norm does not take .*different geometries",
        ),
        (
            lambda: dp.optimizers.SubspaceAdagrad(clip_norm=ADAPTIVE),
            "SubspaceAdagrad does not take .*squares",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:second_moment='noiseless'")
def test_what_it_does_not_go_with_is_refused_at_construction(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_settings_that_come_later_are_refused_when_it_is_built():
    optimizer = sgd()
    optimizer.normalize = True
    with pytest.raises(ValueError, match="normalize=True does not take"):
        linear.build(optimizer).train_on_batch(linear.X, linear.Y)


class TwoMeans(dp.optimizers.DPSGD):
    """An optimizer of a user's own, that knows of one clip norm."""

    def queries(self):
        return (self.query(), self.query())

    def releases_for(self, noise_multiplier):
        return tuple(Release(i, "mean", noise_multiplier, self.noise) for i in range(2))


def test_another_release_than_mean_and_counts_is_refused():
    model = linear.build(TwoMeans(clip_norm=ADAPTIVE, **PRIVATE))
    with pytest.raises(ValueError, match="TwoMeans releases more than one clipped mean"):
        model.train_on_batch(linear.X, linear.Y)
    assert model.ledger.steps == 0


@pytest.mark.parametrize("clipping, most", [("flat", 2.0), ("per_layer", 2**0.5)])
def test_counts_that_would_cost_all_are_refused(clipping, most):
    """σ_b = 1, for z√L/2 < 1: z below 2 and √2."""
    for z, is_refused in ((0.99 * most, False), (most, True), (1.5 * most, True)):
        rule = sgd(Quantile(count_noise=1.0), noise_multiplier=z, clipping=clipping)
        model = two_layers(rule)
        if is_refused:
            with pytest.raises(ValueError, match=r"count_noise=1 leaves nothing .*count_noise="):
                model.train_on_batch(linear.X, linear.Y)
            assert np.array_equal(linear.flat(model.trainable_variables), linear.START)
        else:
            model.train_on_batch(linear.X, linear.Y)
        assert model.ledger.steps == (not is_refused)


def test_it_is_fixed_once_it_is_traced():
    model = linear.build(sgd())
    model.train_on_batch(linear.X, linear.Y)
    with pytest.raises(ValueError, match="clip_norm is fixed once the optimizer is built"):
        model.optimizer.clip_norm = Quantile(0.9)


# Optimizers.

REFUSED = {"DP2RMSprop", "DP2Adagrad", "DP2Yogi", "SubspaceAdagrad"}


@pytest.mark.parametrize("entry", CATALOG, ids=lambda entry: entry.name)
def test_every_optimizer_finds_a_clip_norm_or_refuses_it(entry, tmp_path):
    """What is loaded goes on with the C that was found."""
    arguments = dict(entry.arguments) | {"clip_norm": ADAPTIVE, **PRIVATE}
    if "steps" in arguments:
        arguments["steps"] = 20
    if entry.name in REFUSED:
        with pytest.raises(ValueError, match="does not take clip_norm=Quantile"):
            entry.cls(**arguments)
        return
    model = linear.build(entry.cls(**arguments), run_eagerly=False)
    batch = linear.X, linear.Y
    if model.optimizer.needs_public:
        mask = np.arange(6) < 4
        batch = (*batch, dp.data.RowInfo(mask, public=np.where(mask, 0, 0.5).astype("float32")))
    for _ in range(3):
        model.train_on_batch(*batch)
    bounds = bounds_of(model)
    assert bounds != pytest.approx(0.3, rel=1e-3)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.clip_norm == ADAPTIVE and hash(ADAPTIVE) == hash(
        Quantile(**ADAPTIVE.get_config())
    )
    np.testing.assert_array_equal(bounds_of(loaded), bounds.astype(np.float32))
    loaded.sampling = linear.SAMPLING
    loaded.train_on_batch(*batch)
    assert bounds_of(loaded) != bounds and loaded.ledger.steps == 4


def test_a_new_projector_leaves_it_alone():
    projection = dp.optimizers.GaLore(1, 2, reset=True)
    model = linear.build(sgd(momentum=0.5, projection=projection, noise_multiplier=0.0))
    seen = []
    for _ in range(5):
        model.train_on_batch(linear.X, linear.Y)
        seen.append(bounds_of(model)[0])
    steps = np.abs(np.diff(np.log([0.3, *seen])))
    assert np.all(steps <= RATE) and not np.any(np.isclose(seen[1:], 0.3))


def test_floor_of_a_corrected_moment_is_of_the_noise_that_there_is():
    rule = dp.optimizers.DPAdam(
        clip_norm=ADAPTIVE, second_moment=MOMENTS.BiasCorrected(floor=2.0), **PRIVATE
    )
    rule.build([keras.Variable(np.zeros(3, "float32"))])
    sigma = on_sum(linear.SIGMA, COUNT_NOISE)
    wanted = 2.0 * sigma * 0.3 / linear.BATCH
    assert float(rule.second_moment._least_root(rule)) == pytest.approx(wanted, rel=1e-6)


# Ledger and logs.


def test_ledger_and_statement_say_how_it_moves():
    model = linear.build(sgd())
    linear.train(model, 2, counts=1)
    words = "Quantile(0.4, initial=0.3, learning_rate=0.3, count_noise=1.7)"
    read = Ledger.from_json(model.ledger.to_json())
    assert read.segments == model.ledger.segments
    assert read.segments[0].clip_norm == words
    statement = " ".join(read.statement(1e-5).split())
    assert f"clip norm C that changes with the step, {words}" in statement
    assert "on the mean and counts with noise multiplier sigma = 0.8 for both" in statement
    assert "examples whose gradient is not clipped, with noise of std 1.7 on each" in statement


def test_ledgers_without_counts_are_as_they_were():
    """What libraries of before read has no key that they do not know."""
    text = Ledger.of(sgd(0.3), linear.SAMPLING, 3).to_json()
    (release,) = json.loads(text)["segments"][0]["releases"]
    assert set(release) == {"query", "statistic", "multiplier", "mechanism", "joint"}
    assert Ledger.from_json(text).segments[0].releases[0].count_noise is None


def test_another_quantile_is_another_segment():
    model = linear.build(sgd())
    model.train_on_batch(linear.X, linear.Y)
    model.compile(sgd(Quantile(0.9, count_noise=COUNT_NOISE)), loss="mse")
    model.sampling = linear.SAMPLING
    model.train_on_batch(linear.X, linear.Y)
    assert [segment.steps for segment in model.ledger.segments] == [1, 1]


def test_a_run_of_correlated_noise_is_handed_over_with_its_counts(tmp_path):
    batches = dp.data.fixed_order_epochs(
        (np.tile(linear.X, (4, 1)), np.tile(linear.Y, (4, 1))),
        8,
        order_seed=1,
        adjacency="zero_out",
    )
    rule = sgd(noise=noise.BandedMatrix(12, 2))
    model = linear.build(rule, run_eagerly=False, sampling=batches.sampling)
    model.fit(batches, epochs=2, verbose=0)
    (past,) = model.optimizer.noise_source.memory.state().values()
    assert past[0].shape == (linear.SIZE + 1,)
    model.save_run(tmp_path / "run.secret.npz")
    seed = model.resume_run(tmp_path / "run.secret.npz")
    assert seed == 1
    model.fit(batches, epochs=2, verbose=0)
    assert [segment.steps for segment in model.ledger.segments] == [12]


def test_an_audit_finds_canaries_in_the_mean_beside_counts():
    """Without noise, and alone in the batch: 1 for the one that is there."""
    model = linear.build(sgd(noise_multiplier=0.0), run_eagerly=True)
    seen = []

    def observe(queries, released):
        canaries = Batch(tf.constant(linear.X[:1]), tf.constant(linear.Y[:1]))
        seen.append(dp.audit.inclusion_estimates(model, canaries, queries, released))

    model.observe_releases(observe)
    model.train_on_batch(linear.X[:1], linear.Y[:1])
    np.testing.assert_allclose(seen[0][0], [[1.0]], rtol=1e-5)


def test_learning_rates_per_norm_need_a_number():
    candidate = dp.tuning.candidate("x", "DPSGD", space={}, per_norm=True, learning_rate=0.1)
    run = dp.tuning.RunInfo(10, 8, clip_norm=Quantile())
    with pytest.raises(ValueError, match="x: learning rates in units of the clip norm need"):
        candidate.make(run)


def test_report_writes_the_clip_norm():
    model = linear.build(sgd())
    rows = tf.data.Dataset.from_tensors((linear.X, linear.Y)).repeat(4)
    data = dp.data.assume_sampling(rows, linear.SAMPLING)
    report = dp.callbacks.OptimizerReport()
    logs = model.fit(data, verbose=0, callbacks=[report]).history
    assert logs["clip_norm"] == [pytest.approx(bounds_of(model)[0])]
    assert np.isfinite(logs["gradient_norm"][0]) and "clip_norm" in report.private_logs
