"""Correlated noise: strategies, streaming, sensitivity by brute force, accounting."""

import itertools
import math

import dp_accounting
import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import dp_keras_opt as dp
from dp_keras_opt import noise
from dp_keras_opt.accounting import Sampling
from dp_keras_opt.noise import (
    BandedInverseSquareRoot,
    BandedMatrix,
    BufferedToeplitz,
    LambdaCGD,
    SquareRootFactorization,
    TreeAggregation,
    strategies,
)
from dp_keras_opt.noise.gaussian import NORMAL_AND_REST
from dp_keras_opt.noise.source import NoiseSource
from dp_keras_opt.optimizers import DPSGD, DPAdam
from tests.helpers.factorizations import inverse, toeplitz

ROWS = 24


def lower(steps, seed=0, bands=None):
    matrix = np.tril(np.random.default_rng(seed).uniform(0.1, 1, (steps, steps)))
    if bands:
        matrix -= np.tril(matrix, -bands)
    return matrix


MECHANISMS = {
    "banded": lambda: BandedMatrix(12, 4),
    "one band": lambda: BandedMatrix(12, 1),
    "square root": lambda: SquareRootFactorization(12, 12),
    "truncated": lambda: SquareRootFactorization(12, 5),
    "matrix": lambda: noise.from_matrix(lower(12)),
    "banded matrix": lambda: noise.from_matrix(lower(12, bands=3)),
    "diagonal": lambda: noise.from_matrix(np.diag(np.arange(1.0, 13.0))),
    "tree": lambda: TreeAggregation(12),
    "blt": lambda: BufferedToeplitz(12, 2),
    "blt of three": lambda: BufferedToeplitz(12, 3, separation=4, momentum=0.5),
    "inverse": lambda: BandedInverseSquareRoot(12, 4),
    "inverse of one band": lambda: BandedInverseSquareRoot(12, 1),
    "lambda": lambda: LambdaCGD(12),
    "lambda of a buffer": lambda: LambdaCGD(12, 0.6, buffered=True),
}


class Recorded(NoiseSource):
    """Remembers the draws that it gives out."""

    def __init__(self):
        super().__init__()
        self.draws = []

    def draw(self, distribution, shape):
        return self.recorded(distribution, super().draw(distribution, shape))

    def draw_again(self, distribution, shape, key):
        drawn = super().draw_again(distribution, shape, key)
        return self.recorded(distribution, drawn) if distribution is NORMAL_AND_REST else drawn

    def recorded(self, distribution, drawn):
        self.draws.append(drawn[0] if distribution is NORMAL_AND_REST else drawn)
        return drawn


# Strategies.


def test_the_square_root_squared_is_the_prefix_sums():
    c = toeplitz(strategies.square_root_coefficients(20), 20)
    np.testing.assert_allclose(c @ c, np.tril(np.ones((20, 20))), atol=1e-12)


@pytest.mark.parametrize(("steps", "bands"), [(50, 5), (30, 30), (200, 16)])
def test_the_banded_coefficients_are_a_minimum(steps, bands):
    def error(tail):
        c = toeplitz(np.append(1.0, tail), steps)
        rows = np.tril(np.ones((steps, steps))) @ np.linalg.inv(c)
        return np.mean(np.sum(rows**2, axis=1)) * np.sum(np.append(1.0, tail) ** 2)

    c = np.array(strategies.banded_coefficients(steps, bands, noise.Workload()))
    assert np.linalg.norm(c) == pytest.approx(1) and c[0] > 0
    tail = c[1:] / c[0]
    best = error(tail)
    rng = np.random.default_rng(0)
    for _ in range(20):
        assert error(tail + 1e-3 * rng.normal(size=bands - 1)) > best * (1 - 1e-6)
    square_root = strategies.square_root_coefficients(bands)[1:]
    assert best < error(square_root) and best < error(np.zeros(bands - 1))


def test_prefix_sum_errors_order_the_mechanisms():
    errors = [
        noise.prefix_sum_rmse(m, 256)
        for m in (
            BandedMatrix(256, 256),
            SquareRootFactorization(256, 256),
            TreeAggregation(256),
            None,
        )
    ]
    assert errors == sorted(errors)


@pytest.mark.parametrize("name", MECHANISMS)
def test_prefix_sum_rmse_equals_its_definition(name):
    mechanism = MECHANISMS[name]()
    rows = np.tril(np.ones((12, 12))) @ inverse(mechanism)
    expected = math.sqrt(np.mean(np.sum(rows**2, axis=1))) * mechanism.sensitivity(12)
    assert noise.prefix_sum_rmse(mechanism, 12) == pytest.approx(expected)


# Sensitivity, by brute force.


def brute_force(matrix, separation, exact):
    """The largest ‖C x‖ over all patterns: `separation` apart, or at least so far."""
    steps, largest = len(matrix), 0.0
    for pattern in itertools.product((0, 1), repeat=steps):
        gaps = np.diff(np.flatnonzero(pattern))
        allowed = np.all(gaps == separation) if exact else np.all(gaps >= separation)
        if allowed:
            largest = max(largest, np.linalg.norm(matrix @ np.array(pattern)))
    return largest


@pytest.mark.parametrize("separation", [1, 3, 4, 7, 20])
@pytest.mark.parametrize("steps", [1, 5, 10])
def test_sensitivity_against_all_patterns(steps, separation):
    for bands in {1, min(3, steps), steps}:
        mechanism = SquareRootFactorization(steps, bands)
        c = toeplitz(mechanism.coefficients, steps)
        expected = brute_force(c, separation, exact=False)
        assert mechanism.sensitivity(steps, separation) == pytest.approx(expected)
    mechanism = noise.from_matrix(lower(steps))
    expected = brute_force(mechanism.matrix, separation, exact=True)
    assert mechanism.sensitivity(steps, separation) == pytest.approx(expected)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 1000))
def test_matrices_of_any_sign_are_bounded(steps, separation, seed):
    """For vector contributions of norm 1, random ones: ‖Σ u_j C_j‖ never exceeds the bound."""
    rng = np.random.default_rng(seed)
    matrix = np.tril(rng.normal(size=(steps, steps)))
    np.fill_diagonal(matrix, rng.uniform(0.5, 1, steps))
    mechanism = noise.from_matrix(matrix)
    bound = mechanism.sensitivity(steps, separation)
    for first in range(steps):
        chosen = np.arange(first, steps, separation)
        for _ in range(10):
            u = rng.normal(size=(len(chosen), 3))
            u /= np.linalg.norm(u, axis=1, keepdims=True)
            assert np.linalg.norm(mechanism.matrix[:, chosen] @ u) <= bound + 1e-9


@pytest.mark.parametrize("separation", [1, 3, 5, 16])
@pytest.mark.parametrize("steps", [1, 6, 12])
def test_the_tree_is_bounded_by_its_nodes(steps, separation):
    levels = steps.bit_length()
    nodes = [
        [1.0 if t // 2**level == node else 0.0 for t in range(steps)]
        for level in range(levels)
        for node in range(-(-steps // 2**level))
    ]
    exact = max(
        np.linalg.norm(np.array(nodes)[:, first::separation].sum(axis=1))
        for first in range(separation)
    )
    mechanism = TreeAggregation(steps)
    assert mechanism.sensitivity(steps, separation) >= exact - 1e-9
    assert mechanism.sensitivity(steps) == pytest.approx(math.sqrt(levels))


def test_a_shorter_run_costs_no_more():
    for name, make in MECHANISMS.items():
        moved = [make().sensitivity(t, 4) for t in range(1, 13)]
        assert np.all(np.diff(moved) >= -1e-12), name


# Streaming.


@pytest.mark.parametrize("options", [{}, {"jit_compile": True}, None])
@pytest.mark.parametrize("name", MECHANISMS)
def test_the_streamed_noise_is_the_inverse_times_the_draws(name, options):
    mechanism, source = MECHANISMS[name](), Recorded()
    shapes = [(2, 3), (4,)]
    source.memory.allocate(0, mechanism.buffers(10, source))

    def step():
        source.draws.clear()
        result = mechanism.unit_noise(shapes, source)
        flat = tf.concat([tf.reshape(draw, [-1]) for draw in source.draws], axis=0)
        parts = tf.split(flat, [math.prod(shape) for shape in shapes])
        return result, [tf.reshape(p, shape) for p, shape in zip(parts, shapes, strict=True)]

    step = step if options is None else tf.function(step, autograph=False, **options)
    for _run in range(2):
        outputs, draws = zip(*(step() for _ in range(12)), strict=True)
        for part in range(2):
            y, z = (np.array([s[part].numpy() for s in steps]) for steps in (outputs, draws))
            expected = np.tensordot(inverse(mechanism), z.astype(np.float64), 1)
            np.testing.assert_allclose(y, expected, atol=1e-4 * np.abs(expected).max())
        source.memory.reset()


@pytest.mark.parametrize("name", MECHANISMS)
def test_standard_deviations_are_the_row_norms(name):
    mechanism = MECHANISMS[name]()
    expected = np.linalg.norm(inverse(mechanism), axis=1)
    actual = [float(mechanism.std(tf.constant(t, tf.int64))) for t in range(12)]
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


def released_noise(mechanism, dimension=3000, steps=12, sigma=2.0):
    """The noise in the released mean gradients of a training, in units of σC/B: (steps, d)."""
    inputs = keras.Input((dimension,))
    model = dp.DPModel(inputs, keras.layers.Dense(1, use_bias=False)(inputs))
    optimizer = DPSGD(0.1, clip_norm=0.5, batch_size=8, noise_multiplier=sigma, noise=mechanism)
    model.compile(optimizer, "mse")
    data = np.zeros((ROWS, dimension), "float32"), np.zeros((ROWS, 1), "float32")
    released = []
    model.observe_releases(lambda queries, parts: released.append(parts[0].value[0].numpy()))
    model.run_eagerly = True
    model.fit(dp.data.fixed_order_epochs(data, 8), epochs=steps // 3, verbose=0)
    return np.array(released)[..., 0] * 8 / (sigma * 0.5)


@pytest.mark.parametrize("name", ["banded", "square root", "matrix", "tree", "one band"])
def test_the_covariance_of_the_released_noise(name):
    """3000 coordinates: an entry's standard error is below 2.6% of its row's variance."""
    mechanism = BandedMatrix(12, 3) if name == "banded" else MECHANISMS[name]()
    y = released_noise(mechanism)
    expected = inverse(mechanism) @ inverse(mechanism).T
    actual = y @ y.T / y.shape[1]
    scale = np.sqrt(np.outer(np.diag(expected), np.diag(expected)))
    assert np.abs((actual - expected) / scale).max() < 0.13  # five standard errors
    for factor in (2 / 3, 1.5):
        wrong = factor**2 * expected
        assert np.abs((actual - wrong) / scale).max() > 0.13


def test_one_band_is_dp_sgd_bit_for_bit():
    finals = []
    for mechanism in ("gaussian", BandedMatrix(9, 1)):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((4,))
        model = dp.DPModel(inputs, keras.layers.Dense(3)(inputs))
        with pytest.warns(UserWarning, match="seed"):
            optimizer = DPSGD(
                0.1, clip_norm=0.5, batch_size=8, noise_multiplier=1.0, noise=mechanism, seed=3
            )
        model.compile(optimizer, "mse")
        rng = np.random.default_rng(0)
        x, y = rng.normal(size=(ROWS, 4)), rng.normal(size=(ROWS, 3))
        batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(8, drop_remainder=True)
        batches = dp.data.assume_sampling(batches, Sampling.fixed_order(ROWS, 8))
        model.fit(batches, epochs=3, verbose=0)
        finals.append(model.get_weights())
    for a, b in zip(*finals, strict=True):
        np.testing.assert_array_equal(a, b)


# Accounting.


def sgd(mechanism, multiplier=1.0, batch_size=8, **kwargs):
    return DPSGD(
        0.1, clip_norm=1.0, batch_size=batch_size, noise_multiplier=multiplier, noise=mechanism,
        **kwargs,
    )  # fmt: skip


def gaussian_epsilon(multiplier, delta):
    accountant = dp_accounting.rdp.RdpAccountant()
    return accountant.compose(dp_accounting.GaussianDpEvent(multiplier)).get_epsilon(delta)


def test_the_bandmf_setting_of_the_paper():
    """b = 128, T = 2000, at most 3 participations, δ = 1e-7: ε = 10.05 and 149.9."""
    sampling = Sampling.fixed_order(700 * 100, 100, "zero_out")
    mechanism = BandedMatrix(2000, 128)
    for sigma, expected in ((1.0, 10.05), (0.134, 149.9)):
        optimizer = sgd(mechanism, sigma, 100)
        tight = dp.accounting.epsilon(optimizer, sampling, 2000, 1e-7, accountant="pld")
        assert tight == pytest.approx(expected, abs=0.06)
        actual = dp.accounting.epsilon(optimizer, sampling, 2000, 1e-7, "rdp")
        assert actual == pytest.approx(gaussian_epsilon(sigma / math.sqrt(3), 1e-7), rel=1e-6)


def test_a_replaced_example_moves_twice_as_far():
    mechanism = BandedMatrix(30, 3)
    zero, replaced = (Sampling.fixed_order(80, 8, a) for a in ("zero_out", "replace_one"))
    a = dp.accounting.epsilon(sgd(mechanism, 2.0), zero, 30, 1e-5, "rdp")
    b = dp.accounting.epsilon(sgd(mechanism, 4.0), replaced, 30, 1e-5, "rdp")
    assert a == pytest.approx(b) == pytest.approx(gaussian_epsilon(2 / math.sqrt(3), 1e-5))


def test_calibrates_the_whole_run():
    sampling, mechanism = Sampling.fixed_order(80, 8), BandedMatrix(30, 10)
    optimizer = sgd(mechanism, None)
    dp.accounting.calibrate(optimizer, sampling, 30, epsilon=2.0, delta=1e-5)
    spent = dp.accounting.epsilon(optimizer, sampling, 30, 1e-5)
    assert 0.999 * 2.0 < spent <= 2.0


def test_independent_noise_in_a_fixed_order_costs_one_release_an_epoch():
    ours = dp.accounting.epsilon(sgd("gaussian", 2.0), Sampling.fixed_order(80, 8), 25, 1e-5)
    shuffled = dp.accounting.epsilon(sgd("gaussian", 2.0), Sampling.shuffled(80, 8), 25, 1e-5)
    assert ours == shuffled


def fit(optimizer, epochs=1, model=None):
    if model is None:
        inputs = keras.Input((4,))
        model = dp.DPModel(inputs, keras.layers.Dense(3)(inputs))
        model.compile(optimizer, "mse")
    rng = np.random.default_rng(0)
    data = rng.normal(size=(ROWS, 4)), rng.normal(size=(ROWS, 3))
    model.fit(dp.data.fixed_order_epochs(data, 8), epochs=epochs, verbose=0)
    return model


def test_each_fit_is_a_run_of_its_own():
    """The second begins with fresh noise, and the two mechanisms compose."""
    model = fit(sgd(SquareRootFactorization(12, 6)), epochs=2)
    source = model.optimizer.noise_source
    assert int(source.memory.steps((0, 0))) == 6
    first = model.ledger.epsilon(1e-5, "rdp")
    fit(None, epochs=2, model=model)
    assert int(source.memory.steps((0, 0))) == 6
    moved = 2 * SquareRootFactorization(12, 6).sensitivity(6, 3)
    assert first == pytest.approx(gaussian_epsilon(1 / moved, 1e-5))
    assert model.ledger.epsilon(1e-5, "rdp") == pytest.approx(
        gaussian_epsilon(1 / (moved * math.sqrt(2)), 1e-5)
    )


def test_a_loaded_model_begins_a_new_run_and_remembers_no_noise(tmp_path):
    model = fit(sgd(BandedMatrix(12, 3)), epochs=2)
    model.save(tmp_path / "model.keras")
    sizes = [int(np.prod(v.shape)) for v in model.optimizer.variables]
    assert sizes == [1, 1]  # step counter and learning rate: no buffer is among them
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.ledger.epsilon(1e-5) == pytest.approx(model.ledger.epsilon(1e-5))
    assert loaded.optimizer.noise == BandedMatrix(12, 3)
    fit(None, epochs=1, model=loaded)
    assert int(loaded.optimizer.noise_source.memory.steps((0, 0))) == 3
    assert loaded.ledger.epsilon(1e-5) > model.ledger.epsilon(1e-5)


@pytest.mark.parametrize(
    "second_moment",
    ["post_processing", "bias_corrected", "scale_then_privatize",
     dp.optimizers.moments.Independent(8, "replace_one")],
)  # fmt: skip
def test_works_with_every_second_moment(second_moment):
    optimizer = DPAdam(
        second_moment=second_moment, gradient_filter="f1", clip_norm=1.0, batch_size=8,
        noise_multiplier=1.0, noise=BandedMatrix(9, 3), epsilon=1e-3,
    )  # fmt: skip
    model = fit(optimizer, epochs=3)
    assert np.isfinite(model.get_weights()[0]).all()
    streams = 2 if not isinstance(second_moment, str) else 1
    assert len(optimizer.noise_source.memory.streams) == streams
    memory = optimizer.noise_source.memory
    assert all(int(memory.steps(stream)) == 9 for stream in memory.streams)


def test_bias_correction_follows_the_row_norms():
    mechanism = SquareRootFactorization(6, 6)
    optimizer = DPAdam(
        second_moment="bias_corrected", clip_norm=1.0, batch_size=8, noise_multiplier=1.0,
        noise=mechanism,
    )  # fmt: skip
    fit(optimizer, epochs=2)
    variances = (np.linalg.norm(inverse(mechanism, 6), axis=1) / 8) ** 2
    expected = 0.0
    for variance in variances:
        expected = 0.999 * expected + 0.001 * variance
    assert float(optimizer.second_moment._power) == pytest.approx(expected, rel=1e-4)


def test_delayed_preconditioners_take_it():
    optimizer = dp.optimizers.DP2RMSprop(
        delay=(2, 1), clip_norm=1.0, adaptive_clip_norm=1.0, batch_size=8, noise_multiplier=1.0,
        noise=BandedMatrix(9, 3), epsilon=1e-2, ablation="extra_query",
    )  # fmt: skip
    model = fit(optimizer, epochs=3)
    assert len(optimizer.noise_source.memory.streams) == 2
    moved = 2 * math.sqrt(3) * math.sqrt(2)
    assert model.ledger.epsilon(1e-5, "rdp") == pytest.approx(gaussian_epsilon(1 / moved, 1e-5))


# Data in a fixed order.


def test_fixed_order_epochs():
    x = np.arange(10.0)[:, None]
    batches = dp.data.fixed_order_epochs((x, x), 4)
    assert batches.sampling == Sampling.fixed_order(10, 4) and batches.steps_per_epoch == 3
    epochs = [[(b[0].numpy(), b[2].mask.numpy()) for b in batches.dataset] for _ in range(2)]
    for (first, mask), (second, _) in zip(*epochs, strict=True):
        np.testing.assert_array_equal(first, second)
        assert len(first) == 4 and set(mask) <= {0.0, 1.0}
    seen = np.concatenate([values[mask > 0].ravel() for values, mask in epochs[0]])
    assert sorted(seen) == list(range(10)) and list(seen) != list(range(10))
    dropped = dp.data.fixed_order_epochs((x, x), 4, drop_remainder=True)
    assert dropped.sampling.steps_per_epoch == len(list(dropped.dataset)) == 2


# Groups that take turns.


def sampled(multiplier, probability, rounds, delta):
    """ε of so many Poisson-sampled Gaussians, by dp_accounting itself."""
    event = dp_accounting.PoissonSampledDpEvent(
        probability, dp_accounting.GaussianDpEvent(multiplier)
    )
    event = dp_accounting.SelfComposedDpEvent(event, rounds)
    return dp_accounting.rdp.RdpAccountant().compose(event).get_epsilon(delta)


@pytest.mark.parametrize(
    "mechanism",
    ["gaussian", BandedMatrix(30, 5), BandedMatrix(30, 3), SquareRootFactorization(30, 5),
     noise.from_matrix(lower(30, bands=4))],
)  # fmt: skip
@pytest.mark.parametrize(("steps", "rounds"), [(30, 6), (26, 6), (25, 5), (5, 1)])
def test_bands_are_amplified_by_groups_that_take_turns(mechanism, steps, rounds):
    sampling = Sampling.cyclic_poisson(2000, 8, 5)
    largest = 1.0
    if isinstance(mechanism, noise.correlated.FromMatrix):
        largest = np.linalg.norm(mechanism.matrix[:steps, :steps], axis=0).max()
    actual = dp.accounting.epsilon(sgd(mechanism, 2.0), sampling, steps, 1e-5, "rdp")
    assert actual == pytest.approx(sampled(2.0 / largest, 8 * 5 / 2000, rounds, 1e-5))


def test_one_group_is_poisson_sampling():
    ours = dp.accounting.epsilon(sgd("gaussian"), Sampling.cyclic_poisson(500, 8, 1), 40, 1e-5)
    poisson = dp.accounting.epsilon(sgd("gaussian"), Sampling.poisson(500, 8), 40, 1e-5)
    assert ours == poisson


def test_turns_with_a_schedule_count_the_least_noise_of_each_round():
    optimizer = sgd("gaussian", 2.0, noise_schedule=[1.0, 3.0, 2.0, 0.5, 1.0, 2.0, 4.0])
    actual = dp.accounting.epsilon(optimizer, Sampling.cyclic_poisson(500, 8, 3), 7, 1e-5, "rdp")
    accountant = dp_accounting.rdp.RdpAccountant()
    for factor in (1.0, 0.5, 4.0):
        event = dp_accounting.GaussianDpEvent(2.0 * factor)
        accountant.compose(dp_accounting.PoissonSampledDpEvent(24 / 500, event))
    assert actual == pytest.approx(accountant.get_epsilon(1e-5))


# Levels: the mechanism of C·diag(α)⁻¹.


def patterns(steps, separation):
    """Every set of steps that are exactly, or (second) at least, so far apart."""
    exact = [tuple(range(first, steps, separation)) for first in range(min(separation, steps))]
    free = [
        chosen
        for count in range(1, -(-steps // separation) + 1)
        for chosen in itertools.combinations(range(steps), count)
        if all(b - a >= separation for a, b in itertools.pairwise(chosen))
    ]
    return exact, free


def test_the_worst_pattern_is_not_the_one_that_begins_first():
    """Square root, 8 steps, 3 apart, levels from 1 to ¼: 5.608 at the steps 2, 5, 8, not 4.737."""
    column, levels = strategies.square_root_coefficients(8), np.linspace(1, 0.25, 8)
    moved = toeplitz(column, 8) / levels
    of_each = [np.linalg.norm(moved[:, first::3].sum(axis=1)) for first in range(3)]
    assert of_each[0] == pytest.approx(4.737, abs=5e-4)
    found = strategies.toeplitz_sensitivity(column, 8, 3, levels)
    assert found == pytest.approx(max(of_each)) == pytest.approx(5.608, abs=5e-4)


LEVELLED = {
    "bands": lambda t: BandedMatrix(t, min(t, 3)),
    "square root": lambda t: SquareRootFactorization(t, t),
    "blt": lambda t: BufferedToeplitz(t, 2),
    "last step": lambda t: LambdaCGD(t, 0.7),
    "inverse": lambda t: BandedInverseSquareRoot(t, min(t, 2)),
    "tree": TreeAggregation,
    "matrix": lambda t: noise.from_matrix(np.tril(np.random.default_rng(t).normal(size=(t, t)))
                                          + 3 * np.eye(t)),
}  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(LEVELLED)), st.integers(1, 9), st.integers(1, 9),
    st.lists(st.floats(0.2, 5.0), min_size=9, max_size=9), st.integers(0, 8),
)  # fmt: skip
def test_the_sensitivity_with_levels_by_brute_force(kind, steps, separation, levels, left):
    """Over every pattern of a fixed order and all signs of an example's gradients."""
    mechanism, length = LEVELLED[kind](steps), max(1, steps - left)
    levels = np.array(levels[:length])
    moved = np.linalg.inv(inverse(mechanism, steps))[:length, :length] / levels
    exact, _ = patterns(length, separation)
    worst = max(
        np.linalg.norm(moved[:, pattern] @ signs)
        for pattern in exact
        for signs in itertools.product([1, -1], repeat=len(pattern))
    )
    found = mechanism.sensitivity(length, separation, levels)
    assert found >= worst * (1 - 1e-9)
    if kind not in ("tree", "matrix"):  # non-negative coefficients: it is reached
        assert found == pytest.approx(worst)
    once = max(np.linalg.norm(moved, axis=0))
    assert mechanism.sensitivity(length, None, levels) >= once * (1 - 1e-9)
    flat = mechanism.sensitivity(length, separation, np.ones(length))
    assert flat == pytest.approx(mechanism.sensitivity(length, separation))


@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
def test_levels_in_one_order(adjacency):
    levels = np.linspace(2.0, 0.5, 9)
    sampling = Sampling.fixed_order(24, 8, adjacency)  # three steps an epoch
    optimizer = sgd(BandedMatrix(9, 3), 4.0, noise_schedule=levels)
    moved = toeplitz(BandedMatrix(9, 3).coefficients, 9) / levels
    worst = max(np.linalg.norm(moved[:, first::3].sum(axis=1)) for first in range(3))
    worst *= 2 if adjacency == "replace_one" else 1
    actual = dp.accounting.epsilon(optimizer, sampling, 9, 1e-5, "rdp")
    assert actual == pytest.approx(gaussian_epsilon(4.0 / worst, 1e-5))


def test_levels_in_turns_count_the_least_noise_of_each_round():
    levels = [1.0, 3.0, 2.0, 0.5, 1.0, 2.0, 4.0]
    optimizer = sgd(BandedMatrix(7, 3), 2.0, noise_schedule=levels)
    sampling = Sampling.cyclic_poisson(500, 8, 3)
    accountant = dp_accounting.rdp.RdpAccountant()
    for factor in (1.0, 0.5, 4.0):
        event = dp_accounting.GaussianDpEvent(2.0 * factor)
        accountant.compose(dp_accounting.PoissonSampledDpEvent(24 / 500, event))
    actual = dp.accounting.epsilon(optimizer, sampling, 7, 1e-5, "rdp")
    assert actual == pytest.approx(accountant.get_epsilon(1e-5))


@pytest.mark.parametrize("in_turns", [True, False])
def test_epsilon_with_levels_never_falls_when_steps_are_added(in_turns):
    levels = np.random.default_rng(0).uniform(0.3, 3.0, 20)
    sampling = Sampling.cyclic_poisson(500, 8, 4) if in_turns else Sampling.fixed_order(32, 8)
    optimizer = sgd(BandedMatrix(20, 4), 2.0, noise_schedule=levels)
    spent = [dp.accounting.epsilon(optimizer, sampling, t, 1e-5, "rdp") for t in range(1, 21)]
    assert spent == sorted(spent)


def test_each_run_has_the_levels_of_its_place_in_the_schedule():
    levels = np.linspace(2.0, 0.5, 6)
    model = fit(sgd(BandedMatrix(3, 3), 4.0, noise_schedule=levels))
    fit(model.optimizer, model=model)
    column = BandedMatrix(3, 3).coefficients
    moved = [
        np.linalg.norm(toeplitz(column, 3) / part, axis=0).max()
        for part in (levels[:3], levels[3:])
    ]
    accountant = dp_accounting.rdp.RdpAccountant()
    for each in moved:  # replace_one: twice as far
        accountant.compose(dp_accounting.GaussianDpEvent(4.0 / (2 * each)))
    assert model.ledger.epsilon(1e-5, "rdp") == pytest.approx(accountant.get_epsilon(1e-5))


@pytest.mark.parametrize("in_turns", [True, False])
def test_a_budget_with_levels_is_kept(in_turns):
    levels = np.linspace(2.0, 0.5, 6)
    inputs = keras.Input((4,))
    model = dp.DPModel(inputs, keras.layers.Dense(3)(inputs))
    model.compile(sgd(BandedMatrix(6, 3), None, noise_schedule=levels), "mse")
    data = np.zeros((ROWS, 4)), np.zeros((ROWS, 3))
    batches = (
        dp.data.cyclic_poisson(data, 8, groups=3, steps_per_epoch=3)
        if in_turns
        else dp.data.fixed_order_epochs(data, 8)
    )
    budget = dp.callbacks.PrivacyBudget(3.0, 1e-5, "rdp")
    model.fit(batches, epochs=2, verbose=0, callbacks=[budget])
    assert model.ledger.steps == 6
    assert 2.99 < model.ledger.epsilon(1e-5, "rdp") <= 3.0
    again = dp.accounting.Ledger.from_json(model.ledger.to_json())
    assert again.epsilon(1e-5, "rdp") == model.ledger.epsilon(1e-5, "rdp")


def test_the_noise_of_each_step_has_its_level():
    """α_t·(C⁻¹z)_t: the std of each step's and the correlation of two, from 60,000 coordinates.

    Both are off by a hundredth with p < 1e-4; ⅔ and 1½ of a level would be found.
    """
    levels, mechanism, seen = [2.0, 0.5, 1.0], BandedMatrix(3, 2), []
    inputs = keras.Input((200,))
    model = dp.DPModel(inputs, keras.layers.Dense(300, use_bias=False)(inputs))
    optimizer = sgd(mechanism, 1.5, noise_schedule=levels, seed=3)
    model.compile(optimizer, "mse", jit_compile=False)
    data = np.zeros((24, 200)), np.zeros((24, 300))  # gradients of 0
    record = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(model.get_weights()[0].ravel())
    )
    start = model.get_weights()[0].ravel()
    model.fit(dp.data.fixed_order_epochs(data, 8), verbose=0, callbacks=[record])
    moved = -np.diff([start, *seen], axis=0) / 0.1 * 8 / 1.5  # of C = 1, batches of 8
    expected = np.diag(levels) @ mechanism.inverse(3)
    found = moved @ moved.T / moved.shape[1]
    np.testing.assert_allclose(found, expected @ expected.T, atol=0.03 * np.max(expected) ** 2)
    np.testing.assert_allclose(moved.std(axis=1), np.linalg.norm(expected, axis=1), rtol=0.015)


def test_a_replaced_example_in_turns_moves_twice_as_far():
    added, replaced = (
        Sampling.cyclic_poisson(2000, 8, 5, adjacency)
        for adjacency in ("add_or_remove_one", "replace_one")
    )
    a = dp.accounting.epsilon(sgd(BandedMatrix(30, 5), 2.0), added, 30, 1e-5, "rdp")
    b = dp.accounting.epsilon(sgd(BandedMatrix(30, 5), 4.0), replaced, 30, 1e-5, "rdp")
    assert a == pytest.approx(b)


def test_cyclic_poisson_draws_each_group_in_its_turn():
    """4000 draws of each example's turn: a frequency is off by 5 standard errors with p < 1e-6."""
    n, size, groups, rounds = 30, 4, 3, 4000
    x = np.arange(float(n))[:, None]
    batches = dp.data.cyclic_poisson((x, x), size, groups, groups * rounds)
    counts = np.zeros((groups, n))
    for step, (values, _, rows) in enumerate(batches.dataset):
        members = values.numpy()[rows.mask.numpy() > 0, 0].astype(int)
        assert len(set(members)) == len(members)
        counts[step % groups, members] += 1
    assert np.all((counts > 0).sum(axis=0) == 1)  # each example has one turn
    q = size * groups / n
    assert batches.sampling.sampling_probability == q
    assert np.abs(counts.sum(axis=0) / rounds - q).max() < 5 * math.sqrt(q * (1 - q) / rounds)
    assert np.abs(counts.max(axis=0) / rounds - 1.5 * q).min() > 0.05
    again = [b[0].numpy() for b in dp.data.cyclic_poisson((x, x), size, groups).dataset]
    assert len(again) == 9  # whole rounds: 30 / 4 → 8 → 9


def test_groups_are_assigned_independently():
    """Their sizes vary as those of a multinomial: the variance of 300 is within 5 errors."""
    x = np.arange(40.0)[:, None]
    sizes = []
    for _ in range(100):
        batches = dp.data.cyclic_poisson((x, x), 10, 4)  # probability 1: the whole group
        sizes += [int(b[2].mask.numpy().sum()) for b in batches.dataset][:3]
    expected = 40 / 4 * 3 / 4
    assert abs(np.var(sizes) / expected - 1) < 5 * math.sqrt(2 / 300)


def test_trains_on_turns():
    inputs = keras.Input((4,))
    model = dp.DPModel(inputs, keras.layers.Dense(3)(inputs))
    model.compile(sgd(BandedMatrix(24, 3), batch_size=4), "mse")
    data = np.zeros((ROWS, 4)), np.zeros((ROWS, 3))
    batches = dp.data.cyclic_poisson(data, 4, 3)
    model.fit(batches, epochs=3, verbose=0)
    assert batches.steps_per_epoch == 6 and model.ledger.steps == 18
    assert model.ledger.epsilon(1e-3, "rdp") == pytest.approx(sampled(1.0, 4 * 3 / ROWS, 6, 1e-3))
    with pytest.raises(ValueError, match="whole passes"):
        model.fit(batches, steps_per_epoch=5, verbose=0)


def test_turns_that_break_off_are_a_segment_of_their_own():
    """Whoever stops after one step and begins with the first group again is in a second round."""
    inputs = keras.Input((4,))
    model = dp.DPModel(inputs, keras.layers.Dense(3)(inputs))
    model.compile(sgd("gaussian", batch_size=4), "mse")
    data = np.zeros((ROWS, 4)), np.zeros((ROWS, 3))

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise KeyboardInterrupt

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            model.fit(dp.data.cyclic_poisson(data, 4, 3), callbacks=[Stop()], verbose=0)
    assert model.ledger.steps == 3
    assert model.ledger.epsilon(1e-3, "rdp") == pytest.approx(sampled(1.0, 4 * 3 / ROWS, 3, 1e-3))


# Errors.


@pytest.mark.filterwarnings("ignore:Sampling:FutureWarning")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: dp.data.cyclic_poisson(x, 8, 4), "probability above 1. Use at most 3 groups"),
        (lambda x: dp.data.cyclic_poisson(x, 8, 3, 7), "not a multiple of groups=3"),
        (lambda x: dp.data.cyclic_poisson(x, 8, 0), "groups must be an integer from 1"),
        (lambda x: Sampling.cyclic_poisson(ROWS, 8, 2.0), "groups must be an integer"),
        (lambda x: Sampling("poisson", ROWS, 8, "zero_out", groups=2), "Only cyclic"),
    ],
)
def test_refuses_turns_that_are_none(make, message):
    data = np.zeros((ROWS, 4)), np.zeros((ROWS, 3))
    with pytest.raises(ValueError, match=message):
        make(data)


@pytest.mark.parametrize(
    "mechanism",
    [BandedMatrix(30, 6), SquareRootFactorization(30, 6), TreeAggregation(30),
     noise.from_matrix(lower(30))],
)  # fmt: skip
def test_refuses_more_bands_than_groups(mechanism):
    with pytest.raises(ValueError, match="Use more groups"):
        dp.accounting.epsilon(sgd(mechanism), Sampling.cyclic_poisson(2000, 8, 5), 30, 1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BandedMatrix(4, 5), "exceeds steps=4"),
        (lambda: SquareRootFactorization(4, 0), "bands must be an integer >= 1"),
        (lambda: TreeAggregation(0), "steps must be an integer >= 1"),
        (lambda: noise.from_matrix(np.ones((3, 3))), "lower-triangular"),
        (lambda: noise.from_matrix(np.tril(np.ones((3, 3)), -1)), "positive diagonal"),
        (lambda: noise.from_matrix(np.ones((3, 2))), "square matrix"),
        (lambda: noise.from_matrix([[np.nan]]), "finite"),
    ],
)
def test_refuses_strategies_that_are_none(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("sampling", [Sampling.poisson(ROWS, 8), Sampling.shuffled(ROWS, 8)])
def test_refuses_sampling_in_which_steps_are_not_known(sampling):
    with pytest.raises(ValueError, match="fixed order"):
        dp.accounting.epsilon(sgd(BandedMatrix(9, 3)), sampling, 9, 1e-5)
    model = fit(sgd(BandedMatrix(9, 3)))
    with pytest.raises(ValueError, match="fixed order"):
        model.sampling = sampling


def test_refuses_participation_closer_than_the_bands():
    with pytest.raises(ValueError, match="3 apart"):
        fit(sgd(BandedMatrix(9, 4)))


def test_refuses_steps_beyond_the_strategy():
    with pytest.raises(ValueError, match="end of the noise"):
        fit(sgd(BandedMatrix(5, 3)), epochs=2)
    with pytest.raises(ValueError, match="end of the noise"):
        dp.accounting.epsilon(sgd(BandedMatrix(5, 3)), Sampling.fixed_order(ROWS, 8), 6, 1e-5)
    with pytest.raises(ValueError, match="end of the noise: BandedMatrix covers 5 steps"):
        dp.accounting.calibrate(
            sgd(BandedMatrix(5, 3)), Sampling.fixed_order(ROWS, 8), 6, epsilon=3.0, delta=1e-5
        )


@pytest.mark.parametrize("name", ["correlated", "mechanism", "banded", "_matrix", "gauss"])
def test_a_name_that_is_none_is_answered_with_those_that_are(name):
    with pytest.raises(ValueError, match=r"\['gaussian', 'laplace', 'planned'\].*BandedMatrix"):
        dp.optimizers.DPSGD(clip_norm=1.0, batch_size=8, noise=name)


def test_refuses_to_break_off_epochs():
    inputs = keras.Input((4,))
    model = dp.DPModel(inputs, keras.layers.Dense(3)(inputs))
    model.compile(sgd(BandedMatrix(9, 3)), "mse")
    data = np.zeros((ROWS, 4)), np.zeros((ROWS, 3))
    with pytest.raises(ValueError, match="whole passes"):
        model.fit(dp.data.fixed_order_epochs(data, 8), steps_per_epoch=2, verbose=0)
