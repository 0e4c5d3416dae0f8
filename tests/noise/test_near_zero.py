"""No draw is 0 or on a grid: there, what is released would be the clipped sum itself."""

import copy
import itertools
import math
import os
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy import special, stats

import dp_keras_opt as dp
from dp_keras_opt import noise
from dp_keras_opt.data.samplers import PoissonSampler
from dp_keras_opt.noise.gaussian import NORMAL
from dp_keras_opt.noise.laplace import LAPLACE
from dp_keras_opt.noise.secure import SecureNoiseSource
from dp_keras_opt.noise.source import NoiseSource

EXTREMES = np.array(
    [0, 1, 2, 3, 4, -1, -2, -3, -4, 2**32, 2**61, 2**62 - 1, 2**63 - 1, -(2**63)], np.int64
)


class HostSource(NoiseSource):
    """Of draws that are made by NumPy, as in training on the CPU."""

    on_host = True


SOURCES = [NoiseSource, HostSource, SecureNoiseSource]


def forced(source, words):
    """The source with these words, an array of the shape that it asks for, in place of its own."""
    source.words = lambda *shape: tf.constant(np.broadcast_to(words, shape))
    return source


def secure_draws(distribution, first, second, one_angle, other_angle, below):
    """Secure draws of these words, arrays (n,); of `below` the low 32 bits are used."""
    below = np.pad(below.astype(np.int32), (0, len(below) % 2)).view(np.int64)
    rows = iter([np.stack([first, second]), np.stack([one_angle, other_angle]), below])

    def words(*shape):
        row = next(rows)
        assert row.shape == shape
        return row

    (draws,) = itertools.islice(distribution.secure(words, len(first)), 1)
    return draws


@pytest.fixture(params=["eager", "graph", "xla"])
def run(request):
    if request.param == "eager":
        return lambda draw: draw()
    jit = request.param == "xla"
    return lambda draw: tf.function(draw, jit_compile=jit, autograph=False)()


# The extreme bit patterns.


def test_normals_of_extreme_bits_are_neither_0_nor_beyond_the_tail(run):
    radii, angles = (part.ravel() for part in np.meshgrid(EXTREMES, EXTREMES))
    source = forced(NoiseSource(), np.stack([radii, angles]))
    first, second = run(lambda: source.draw(NORMAL, (2 * len(radii),))).numpy().reshape(2, -1)
    for draws in (first, second):
        assert np.isfinite(draws).all() and (draws != 0).all()
    reach = np.hypot(first.astype(np.float64), second)
    np.testing.assert_allclose(reach.max(), math.sqrt(2 * 65 * math.log(2)), rtol=1e-6)
    np.testing.assert_allclose(reach.min(), math.sqrt(2.0**-64), rtol=1e-6)


def test_laplace_draws_of_extreme_bits_are_neither_0_nor_beyond_the_tail(run):
    source = forced(NoiseSource(), EXTREMES)
    draws = run(lambda: source.draw(LAPLACE, (len(EXTREMES),))).numpy()
    assert np.isfinite(draws).all() and (draws != 0).all()
    np.testing.assert_allclose(np.abs(draws).max(), 64 * math.log(2), rtol=1e-6)
    np.testing.assert_allclose(np.abs(draws).min(), 2.0**-64, rtol=1e-6)


@pytest.mark.parametrize("distribution", [NORMAL, LAPLACE], ids=["normal", "laplace"])
def test_secure_draws_of_extreme_bits_are_never_0(distribution):
    words = np.array(np.meshgrid(EXTREMES, EXTREMES, EXTREMES, EXTREMES)).reshape(4, -1)
    for below in (0x12345678, -0x76543210):  # what makes up for digits that cancel
        draws = secure_draws(distribution, *words, np.full(words.shape[1], below))
        assert np.isfinite(draws).all() and (draws != 0).all()


@pytest.mark.parametrize("distribution", [NORMAL, LAPLACE], ids=["normal", "laplace"])
def test_secure_draws_that_cancel_are_filled_evenly(distribution):
    """Two equal radii at opposite angles: what is left is below the last digit, and uniform."""
    rng = np.random.default_rng(3)
    radius, angle, below = rng.integers(-(2**63), 2**63, (3, 1000))
    draws = secure_draws(distribution, radius, radius, angle, ~angle, below)
    assert len(np.unique(draws)) == 1000 and (draws != 0).all()
    assert stats.kstest(draws * 2.0**53, stats.uniform(-1, 2).cdf).pvalue > 1e-4


# By enumeration: how many words give a draw within x of 0.


def words_within(x, draw, bits):
    """Share of the words of so many bits for which |draw(word)| < x, |draw| growing with |word|.

    Args:
        draw: function of int64 words (n,) to draws (n,), one column for each of n cases.
    """
    low, high = np.zeros(len(x), object), np.full(len(x), 2 ** (bits - 1) - 1, object)
    while (low < high).any():  # the least nonnegative word that is not within x
        middle = (low + high) // 2
        within = np.abs(draw(middle.astype(np.int64))) < x
        low, high = np.where(within & (low < high), middle + 1, low), np.where(within, high, middle)
    return low.astype(np.float64) / 2.0 ** (bits - 1)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_normals_near_zero_are_as_many_as_there_should_be(jit_compile):
    """P(|z| < x) = x√(2/π) from 1e-12 to 1e-3: the cosine half of a draw is far from 0."""
    # Quantiles of the radius, most of them of small ones, to which the density near 0 owes most.
    edges = np.concatenate([[0], np.geomspace(1e-9, 1, 400)])  # of P(radius < r)
    middles, shares = (edges[1:] + edges[:-1]) / 2, np.diff(edges)
    # In the lower half word·2⁻⁶⁴ is how far the uniform number is from 1, in the other from 0.
    radius = np.where(middles < 0.5, middles * 2.0**64, -(1 - middles) * 2.0**64).astype(np.int64)

    class Source(NoiseSource):
        def words(self, *shape):
            return tf.stack([tf.constant(radius), tf.cast(angles, tf.int64)])

    source, angles = Source(), tf.Variable(np.zeros(len(radius), np.int64))
    normals = tf.function(
        lambda: source.draw(NORMAL, (2 * len(radius),)), jit_compile=jit_compile, autograph=False
    )

    def smaller_half(words):
        angles.assign(np.left_shift(words, 2))  # bits 0 and 1 only exchange and turn the two
        first, second = normals().numpy().reshape(2, -1)
        return np.minimum(np.abs(first), np.abs(second))

    for x in np.geomspace(1e-12, 1e-3, 4):
        count = words_within(np.full(len(radius), x), smaller_half, 62)
        within = (count * shares).sum() / 2  # the sine is the one or the other of the pair
        within += 0.5 * (x**2 / 4)  # at most: the cosine too, where the whole radius is small
        np.testing.assert_allclose(within / (x * math.sqrt(2 / math.pi)), 1, atol=0.01)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_laplace_draws_near_zero_are_as_many_as_there_should_be(jit_compile):
    source, words = NoiseSource(), tf.Variable(np.zeros(4, np.int64))
    source.words = lambda *shape: words.read_value()
    laplace = tf.function(
        lambda: source.draw(LAPLACE, (4,)), jit_compile=jit_compile, autograph=False
    )

    def magnitude(word):
        words.assign(np.left_shift(word, 1))
        return laplace().numpy()

    x = np.geomspace(1e-12, 1e-3, 4)
    # Nonnegative words are half of all; the others are draws beyond ln 2.
    within = words_within(x, magnitude, 63) / 2
    np.testing.assert_allclose(within / -np.expm1(-x), 1, atol=0.01)


@pytest.mark.parametrize("share", [1e-3, 1e-9, 1e-12, 1e-15])
def test_the_tails_are_as_thick_as_they_should_be(share):
    """By the word at which a radius, or a Laplace draw, passes what it should with that share."""
    word = -round(share * 2.0**64)
    source = forced(NoiseSource(), np.array([[word], [12345]]))
    radius = np.hypot(*source.draw(NORMAL, (2,)).numpy())
    np.testing.assert_allclose(radius, math.sqrt(-2 * math.log(share)), rtol=1e-5)
    source = forced(NoiseSource(), np.array([word & ~1, word | 1]))
    expected = -math.log(share) * np.array([-1, 1])
    np.testing.assert_allclose(source.draw(LAPLACE, (2,)), expected, rtol=1e-5)


# All mechanisms: near 0 no value comes twice, and none is a multiple of the last digit of 1.

MECHANISMS = {
    "gaussian": lambda: noise.Gaussian(),
    "laplace": lambda: noise.Laplace(),
    "banded": lambda: noise.BandedMatrix(40, 4),
    "square root": lambda: noise.SquareRootFactorization(40, 40),
    "tree": lambda: noise.TreeAggregation(40),
    "blt": lambda: noise.BufferedToeplitz(40),
    "inverse": lambda: noise.BandedInverseSquareRoot(40, 4),
    "lambda": lambda: noise.LambdaCGD(40, buffered=True),
    "a matrix": lambda: noise.from_matrix(np.eye(40) + 0.7 * np.eye(40, k=-1)),
}


@pytest.mark.parametrize("make", SOURCES)
@pytest.mark.parametrize("kind", MECHANISMS)
def test_noise_near_zero_is_on_no_grid(kind, make):
    """A million draws of a step late in the run, some 800 of which are within 2⁻¹⁰ of 0.

    A number below 2⁻¹⁰ with 24 digits is a multiple of 2⁻²⁶ with a probability of at most 2⁻⁷, so
    that a share above 10% is a false alarm in fewer than one of 10¹⁰ runs; sums of float32 numbers
    of the size of 1 all are. Of 64-bit sums the multiples of 2⁻⁵⁵ are asked for.
    """
    mechanism, source, size = MECHANISMS[kind](), make(), 200_000
    digits = 26 if source.dtype == tf.float32 else 55
    if mechanism.is_correlated:
        source.memory.allocate(0, mechanism.buffers(size, source))
    small = []
    for _ in range(12):
        (draws,) = mechanism.unit_noise([(size,)], source)
        draws = draws.numpy().astype(np.float64)
        small.append(draws[np.abs(draws) < 2.0**-10])
    near = np.concatenate(small[4:]) * 2.0**digits
    assert len(near) > 300 and (near != 0).all()
    assert np.mean(near == np.round(near)) < 0.1


def test_released_means_never_are_the_clean_ones():
    """As many matches as float32 rounding gives with continuous noise, and not one more.

    Means of 1e-6 under noise of 0.1 match with a probability of about 1e-12 a coordinate; draws
    that are 0 with a probability of 6e-8 gave 1.2 of these 2·10⁷ on average.
    """
    clean = np.full(2_000_000, 1e-6, np.float32)
    query = dp.clipping.Query(clip_norm=1.0)
    part = noise.Release(0, "mean", 0.1, noise.Gaussian())
    source, matches = NoiseSource(), 0
    answer = tf.function(
        lambda: noise.release(
            (part,), (query,), [[tf.constant(clean)]], batch_size=1, alpha=1.0, source=source
        )[0].value[0],
        autograph=False,
    )
    for _ in range(10):
        matches += int(tf.math.count_nonzero(answer() == clean))
    assert matches == 0


# Copies and forks.

COPIES = [copy.copy, copy.deepcopy, lambda source: pickle.loads(pickle.dumps(source))]


@pytest.mark.parametrize("make", SOURCES)
@pytest.mark.parametrize("copied", COPIES, ids=["copy", "deepcopy", "pickle"])
def test_copies_of_a_source_repeat_nothing(make, copied):
    source = make()
    twin = copied(source)
    assert type(twin) is make
    for distribution in (NORMAL, LAPLACE):
        first, second = (each.draw(distribution, (1000,)).numpy() for each in (source, twin))
        assert not np.any(first == second)


def in_children(work, count=2):
    """What `work()`, an array, is in forked children; and in this process, after them."""
    results = []
    for _ in range(count):
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            try:
                with os.fdopen(writing, "wb") as end:
                    pickle.dump(work(), end)
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as end:
            results.append(pickle.load(end))
        os.waitpid(child, 0)
    return [*results, work()]


def all_differ(arrays):
    return all(not np.any(a == b) for i, a in enumerate(arrays) for b in arrays[:i])


@pytest.mark.parametrize("make", SOURCES)
@pytest.mark.parametrize("distribution", [NORMAL, LAPLACE], ids=["normal", "laplace"])
def test_forks_draw_noise_of_their_own(make, distribution):
    source = make()
    source.draw(NORMAL, (3,))
    assert all_differ(in_children(lambda: source.draw(distribution, (100,)).numpy()))


def test_a_process_id_that_comes_again_does_not_hide_a_fork(monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 7)  # as in a container, or after many processes
    source = NoiseSource()
    assert all_differ(in_children(lambda: source.draw(NORMAL, (100,)).numpy()))


N, B = 32, 32
X = np.random.default_rng(1).normal(size=(N, 5)).astype("float32")


def eager_model(**kwargs):
    inputs = keras.Input((5,))
    model = dp.DPModel(inputs, keras.layers.Dense(3, use_bias=False)(inputs))
    optimizer = dp.optimizers.DPSGD(
        0.1, clip_norm=1.0, noise_multiplier=100.0, batch_size=B, **kwargs
    )
    model.compile(optimizer, "mse", run_eagerly=True)
    model.sampling = dp.accounting.Sampling.full(N)
    return model


@pytest.mark.parametrize("correlated", [False, True])
@pytest.mark.parametrize("secure", [False, True])
def test_children_that_train_on_release_nothing_by_their_difference(correlated, secure):
    """Two children of one model, whose data differ in a row: without noise of their own, their
    weights differ by exactly what that row adds."""
    mechanism = noise.SquareRootFactorization(9, 9) if correlated else "gaussian"
    model = eager_model(noise=mechanism, secure_noise=secure)
    y = np.zeros((N, 3), "float32")
    model.train_on_batch(X, y)
    run = model.ledger.current.run
    shapes = [tuple(v.shape) for v in model.trainable_variables]

    def step():
        before = model.get_weights()[0]
        model.train_on_batch(X, y)
        moved = model.get_weights()[0] - before
        return moved, model.ledger.current.run, model.ledger.current.steps

    *children, own = in_children(step)
    assert shapes and all_differ([moved for moved, _, _ in (*children, own)])
    # What a child takes up is a run of its own, in the noise as in the ledger.
    assert [steps for _, _, steps in children] == [1, 1] and own[2] == 2
    assert len({name for _, name, _ in children} | {run}) == 3 and own[1] == run


def test_a_fork_draws_batches_of_its_own():
    sampling = dp.accounting.Sampling.poisson(4000, 2000)
    draws = iter(PoissonSampler(sampling, [np.arange(4000)], 50, 4000))
    next(draws)
    drawn = [frozenset(indices) for indices in in_children(lambda: next(draws))]
    assert len(set(drawn)) == 3


def test_expected_extremes_of_the_normal_tail():
    """What the documentation says lies beyond the largest draw."""
    largest = math.sqrt(2 * 65 * math.log(2))
    assert 9.4 < largest < 9.5
    assert special.erfc(9.4 / math.sqrt(2)) < 6e-21
