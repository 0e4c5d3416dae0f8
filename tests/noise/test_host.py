"""What NumPy draws: the graph's formulas number by number, the distribution, where it serves."""

import contextlib
import itertools
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy import special, stats

import dp_keras_opt as dp
from dp_keras_opt import noise
from dp_keras_opt.noise import host
from dp_keras_opt.noise.gaussian import NORMAL, NORMAL_AND_REST
from dp_keras_opt.noise.laplace import LAPLACE
from dp_keras_opt.noise.source import NoiseSource
from tests.helpers.coarse import a_gpu
from tests.noise.test_near_zero import EXTREMES, HostSource, forced

# The formulas: of words that are known, against those of the graph, which has 64 bits for each.


def given(*arrays):
    """A function of words that gives these, flat, one array at each call, cut or repeated."""
    arrays = iter(arrays)
    return lambda *shape: np.resize(next(arrays), math.prod(shape)).reshape(shape)


def halves(first, last):
    """int64 words whose int32 halves, in memory, are these arrays one after the other."""
    return np.concatenate([first, last]).astype(np.int32).view(np.int64)


def below_of(whole, below):
    """The words for the lower bits, as drawn: for each number that is small, in order."""
    return np.concatenate(below)[np.abs(np.concatenate(whole).astype(float) + 0.5) < 2.0**23]


def cases(rng, count):
    """Upper and lower halves of 64-bit words: any, many with leading zeros, and the extremes."""
    words = rng.integers(-(2**63), 2**63, count) >> rng.integers(0, 64, count)
    words = np.concatenate([words, EXTREMES, rng.integers(-(2**63), 2**63, count % 2)])
    return words[: len(words) // 4 * 4]


def test_normals_are_those_of_the_graph():
    rng = np.random.default_rng(5)
    radii = cases(rng, 200_000)
    turned = rng.permutation(cases(rng, 200_000) >> 2)  # 62 bits, and two for the quarter
    quarter = rng.integers(0, 4, len(turned))
    first, last = radii >> 32, (turned >> 32) << 2 | quarter
    below = below_of([radii >> 32, turned >> 32], [radii & 0xFFFFFFFF, turned & 0xFFFFFFFF])
    found = host.normals(given(halves(first, last), below), 2 * len(radii))
    source = forced(NoiseSource(), np.stack([radii, turned << 2 | quarter]))
    expected = source.draw(NORMAL, (2 * len(radii),)).numpy()
    # The upper bits alone are as near to the 64 as float32 rounding.
    np.testing.assert_allclose(found, expected, rtol=2e-6)
    assert found.dtype == np.float32 and (found != 0).all()
    # No two of those near 0 are the same: the bits below are in them.
    near = np.abs(found[np.abs(found) < 1e-9])
    assert len(near) > 10_000 and near.min() < 1e-17


def test_laplace_draws_are_those_of_the_graph():
    rng = np.random.default_rng(6)
    words = cases(rng, 200_000) >> 1  # 63 bits, and one for the sign
    sign = rng.integers(0, 2, len(words))
    below = below_of([words >> 32], [words & 0xFFFFFFFF])
    drawn = ((words >> 32) << 1 | sign).astype(np.int32).view(np.int64)
    (found,) = LAPLACE.host(given(drawn, below), len(words))
    expected = forced(NoiseSource(), words << 1 | sign).draw(LAPLACE, (len(words),)).numpy()
    np.testing.assert_allclose(found, expected, rtol=2e-6)
    assert found.dtype == np.float32 and (found != 0).all() and np.abs(found).max() > 44


def test_extreme_bits_give_neither_0_nor_an_end_before_9():
    edges = np.array([0, 1, -1, -2, 2**23 - 1, 2**23, -(2**23), 2**31 - 1, -(2**31), 5])
    first, last = (part.ravel() for part in np.meshgrid(edges, edges))
    reach = []
    for below in (0, 1, 2**31, 2**32 - 1):
        words = given(halves(first, last), np.array([below]))
        draws = host.normals(words, 2 * len(first)).astype(np.float64)
        assert np.isfinite(draws).all() and (draws != 0).all()
        reach.append(np.hypot(*draws.reshape(2, -1)))
    np.testing.assert_allclose(np.max(reach), math.sqrt(2 * 65 * math.log(2)), rtol=1e-6)  # 9.49
    np.testing.assert_allclose(np.min(reach), math.sqrt(2.0**-64), rtol=1e-6)


def test_the_rest_is_uniform_and_never_0():
    words = np.array([0, -1, 2**31 - 1, -(2**31)], np.int32).view(np.int64)
    found = host.rest(lambda *_: words, 4, np.float64)
    np.testing.assert_allclose(found, np.array([0.5, -0.5, 2**31 - 0.5, 0.5 - 2**31]) / 2**31)
    assert (host.rest(lambda *_: words, 4, np.float32) != 0).all()


# The distribution.


def draws_of(distribution, size, seed):
    key = tf.constant(np.random.default_rng(seed).integers(-(2**63), 2**63, 2))
    kind = (distribution.number, tf.float32, host.philox)
    return host.tensors(distribution.host, (size,), *kind, key=[key])


def test_the_tails_are_as_thick_as_they_should_be():
    """Of 10⁸ draws, those beyond 3, 4, 5 and 5.5; Poisson bounds, each a false alarm in 10⁻⁶."""
    counts, edges = np.zeros(4, int), np.array([3, 4, 5, 5.5])
    for seed in range(20):
        draws = np.abs(draws_of(NORMAL, 5_000_000, seed).numpy())
        counts += [int((draws > edge).sum()) for edge in edges]
    expected = 1e8 * special.erfc(edges / math.sqrt(2))  # 269980, 6334, 57, 3.8
    low, high = stats.poisson.ppf([[5e-7], [1 - 5e-7]], expected)
    assert (low <= counts).all() and (counts <= high).all(), counts


def test_the_body_is_normal():
    """χ² of 1000 equally likely cells and the first six moments: false alarms of 10⁻⁶ each."""
    draws = draws_of(NORMAL, 5_000_000, 1).numpy().astype(np.float64)
    counts = np.histogram(special.ndtr(draws), 1000, (0, 1))[0]
    assert 1e-6 < stats.chisquare(counts).pvalue < 1 - 1e-6
    for moment in range(1, 7):
        error = math.sqrt(stats.norm.moment(2 * moment) / len(draws))
        assert abs(np.mean(draws**moment) - stats.norm.moment(moment)) < 5 * error
    near = draws[np.abs(draws) < 1e-3] * 500 + 0.5  # flat, to some 10⁻⁷
    assert stats.kstest(near, "uniform").pvalue > 1e-6


def test_laplace_draws_are_laplace():
    draws = draws_of(LAPLACE, 1_000_000, 2).numpy().astype(np.float64)
    assert stats.kstest(draws, "laplace").pvalue > 1e-6


def test_draws_are_independent_of_each_other_and_of_the_rest(monkeypatch):
    """Of pairs, neighbours, blocks, keys and the rest: correlations within 5.5 standard errors."""
    monkeypatch.setattr(host, "_BLOCK", 2**14)
    draws, rest = (part.numpy().astype(float) for part in draws_of(NORMAL_AND_REST, 2**20, 3))
    other = draws_of(NORMAL, 2**20, 4).numpy().astype(float)
    blocks = draws.reshape(-1, 2, 2**13)
    pairs = [
        (blocks[:, 0].ravel(), blocks[:, 1].ravel()), (draws[1:], draws[:-1]), (draws, other),
        (draws, rest), (draws[2**14 :], draws[: -(2**14)]),
    ]  # fmt: skip
    for a, b in pairs:
        for x, y in itertools.product((a, a**2), (b, b**2)):
            assert abs(np.corrcoef(x, y)[0, 1]) < 5.5 / math.sqrt(len(x))
    assert stats.kstest(rest, stats.uniform(-1, 2).cdf).pvalue > 1e-6
    assert len(np.unique(draws)) > 0.9 * len(draws)


# Keys.


def test_a_key_alone_settles_the_draws_and_each_bit_of_it_counts():
    one, again = (draws_of(NORMAL, 400_001, 1).numpy() for _ in "ab")
    np.testing.assert_array_equal(one, again)
    key = np.array([3, -4])
    words = [host.philox(key, 0)(8)]
    for bit in range(128):
        changed = key.copy()
        changed[bit // 64] ^= np.int64(-(2**63)) if bit % 64 == 63 else np.int64(1 << bit % 64)
        words.append(host.philox(changed, 0)(8))
    words += [host.philox(key, block)(8) for block in range(1, 100)]
    assert len(set(np.ravel(words))) == 8 * len(words)


def test_words_are_those_of_numpys_philox():
    key = np.array([3, -4])
    expected = np.random.Philox(key=key.view(np.uint64)).random_raw(6).view(np.int64)
    np.testing.assert_array_equal(np.ravel(host.philox(key, 0)(2, 3)), expected)


@pytest.mark.parametrize("distribution", [NORMAL, LAPLACE], ids=["normal", "laplace"])
def test_no_call_is_merged_left_out_or_repeated(distribution):
    source = HostSource()
    drawn = tf.function(lambda: tf.stack([source.draw(distribution, (3, 1)) for _ in range(4)]))
    seen = np.concatenate([drawn().numpy().ravel() for _ in range(3)])
    assert len(set(seen)) == 36


def test_a_seed_reproduces():
    with pytest.warns(UserWarning, match="no privacy guarantee"):
        one, same, other = (HostSource(seed) for seed in (5, 5, 6))
    first = [one.draw(NORMAL, (70_000,)).numpy() for _ in "ab"]
    assert np.mean(first[0] == first[1]) < 1e-4
    for draws in first:
        np.testing.assert_array_equal(draws, same.draw(NORMAL, (70_000,)).numpy())
    assert np.mean(first[0] == other.draw(NORMAL, (70_000,)).numpy()) < 1e-4


# Where they are used.

N = 30_000


def compiled(mechanism="gaussian", **how):
    inputs = keras.Input((N,))
    model = dp.DPModel(inputs, keras.layers.Dense(1, use_bias=False)(inputs))
    optimizer = dp.optimizers.DPSGD(
        0.1, clip_norm=0.5, batch_size=8, noise_multiplier=2.0, noise=mechanism
    )
    model.compile(optimizer, "mse", **how)
    return model


def released(model):
    """What two steps on zeros release."""
    zeros = tf.data.Dataset.from_tensors((tf.zeros((8, N)), tf.zeros((8, 1)))).repeat(2)
    sampling = dp.accounting.Sampling.fixed_order(16, 8)
    weights = [model.get_weights()[0]]
    keep = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: weights.append(model.get_weights()[0])
    )
    model.fit(dp.data.assume_sampling(zeros, sampling), verbose=0, callbacks=[keep])
    return -np.diff(weights, axis=0) / 0.1


@pytest.fixture
def calls(monkeypatch):
    """The sizes that NumPy was asked for, on a machine of two cores."""
    found, made = [], host.tensors
    monkeypatch.setattr(host, "cores", lambda: 2)

    def tensors(formula, shape, *args, **kwargs):
        found.append(math.prod(shape))
        return made(formula, shape, *args, **kwargs)

    monkeypatch.setattr(host, "tensors", tensors)
    return found


@pytest.mark.parametrize("mechanism", ["gaussian", "laplace", "banded"])
@pytest.mark.parametrize("how", ["graph", "eager", "xla", "gpu", "cores"])
def test_the_noise_of_a_step_has_the_scale_that_is_accounted(mechanism, how, calls, monkeypatch):
    """By NumPy on two cores alone. 2 × 30,000 draws: 6 standard errors are 2.5%, Laplace 4%."""
    if how == "cores":
        monkeypatch.setattr(host, "cores", lambda: 3)
    kind = noise.BandedMatrix(4, 2) if mechanism == "banded" else mechanism
    model = compiled(kind, jit_compile=how == "xla", run_eagerly=how == "eager")
    with a_gpu() if how == "gpu" else contextlib.nullcontext():
        found = released(model)
    assert bool(calls) == (how in ("graph", "eager")) and set(calls) <= {N}
    expected = np.array([2.0 * 0.5 / 8 * (math.sqrt(2) if mechanism == "laplace" else 1)] * 2)
    if mechanism == "banded":
        expected *= [float(kind.std(0)), float(kind.std(1))]
    tolerance = 0.04 if mechanism == "laplace" else 0.025
    ratios = found.std(axis=(1, 2)) / expected
    assert (np.abs(ratios - 1) < tolerance).all(), ratios
    for factor in (2 / 3, 1.5):
        assert (np.abs(ratios / factor - 1) > tolerance).all()
    assert mechanism == "banded" or abs(np.corrcoef(*found[:, :, 0])[0, 1]) < 6 / math.sqrt(N)


def test_several_workers_draw_in_the_graph(monkeypatch):
    """Each must draw what the others draw, whatever versions and processors they have."""
    monkeypatch.setattr(host, "cores", lambda: 2)
    strategy, source = tf.distribute.get_strategy(), NoiseSource()
    source.settle(strategy, compiled=False)
    assert source.on_host
    monkeypatch.setattr("dp_keras_opt.workers.place", lambda strategy=None: (0, 2))
    source.settle(strategy, compiled=False)
    assert not source.on_host


def test_compiled_again_for_xla_the_graph_draws(calls):
    model = compiled()
    released(model)
    model.compile(model.optimizer, "mse", jit_compile=True)
    assert calls
    calls.clear()
    assert released(model).std() > 0.1 and not calls


def test_xla_refuses_what_numpy_draws():
    """Were it asked to: there is an error, and no constant in place of the noise."""
    source = HostSource()
    compiled = tf.function(lambda: source.draw(NORMAL, (3,)), jit_compile=True, autograph=False)
    with pytest.raises((tf.errors.InvalidArgumentError, tf.errors.UnimplementedError)):
        compiled()
