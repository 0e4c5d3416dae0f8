"""The choice of rows and their noise: measured, and priced by dp_accounting called directly."""

import math

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf
from dp_accounting import rdp
from scipy import stats

import dp_keras_opt as dp
from dp_keras_opt.clipping import Query, Tables
from dp_keras_opt.noise import Gaussian, Laplace, Release, SquareRootFactorization, release
from dp_keras_opt.noise.row_selection import RowSelection
from dp_keras_opt.noise.source import NoiseSource

Z, RATIO, TAU, C, C1, B = 0.9, 3.0, 1.5, 0.5, 2.0, 4
SIGMA_1, SIGMA_2 = Z * math.sqrt(1 + RATIO**2), Z * math.sqrt(1 + RATIO**-2)


def rows_of(rows, values, size):
    return tf.IndexedSlices(
        tf.constant(values, tf.float32), tf.constant(rows, tf.int32), tf.constant(size, tf.int32)
    )


def released(
    sums, *, z=Z, ratio=RATIO, tau=TAU, c1=C1, trained=None, alpha=1.0, mechanism=None, seed=0
):
    """What is released of a vector, a table, and counts of its rows (None: of all of `trained`)."""
    query = Query(clip_norm=C, tables=Tables({1: trained}, None if tau is None else c1))
    part = Release(0, "mean_of_rows", z, mechanism or Gaussian(),
                   rows=RowSelection(tau, ratio, trained is not None))  # fmt: skip
    with pytest.warns(UserWarning, match="seed"):
        source = NoiseSource(seed)
    (answer,) = release([part], [query], [sums], batch_size=B, alpha=alpha, source=source)
    return answer


def empty(size, width):
    return rows_of(np.zeros(0), np.zeros((0, width)), (size, width))


def test_noise_on_what_is_released():
    """Of a vector and of the chosen rows: σ₂C/B, and no other (p < 10⁻⁹ of a false alarm)."""
    vector, size = tf.zeros(20_000), 4_000
    answer = released([vector, empty(size, 50), tf.fill([size], 1e3)], alpha=0.7)
    draws = [answer.value[0].numpy(), answer.value[1].values.numpy().ravel()]
    assert answer.value[1].values.shape == (size, 50)  # all of them have a count above τ
    for draw in draws:
        scale = SIGMA_2 * 0.7 * C / B
        for factor, fits in ((1.0, True), (2 / 3, False), (1.5, False)):
            ratio = draw.std() / (factor * scale)
            assert (abs(ratio - 1) < 6 / math.sqrt(2 * draw.size)) == fits
        assert abs(draw.mean()) < 6 * scale / math.sqrt(draw.size)
        # Normal, and not 4 times 5,000 of the same numbers.
        assert stats.kstest(draw / scale, "norm").pvalue > 1e-6
        assert len(np.unique(draw)) > 0.99 * draw.size
    np.testing.assert_allclose(float(answer.noise_std), SIGMA_2 * 0.7 * C / B, rtol=1e-6)


@pytest.mark.parametrize(("count", "factor"), [(0.0, 1.0), (3.0, 1.0), (9.0, 0.7), (-4.0, 1.0)])
def test_a_row_is_chosen_as_often_as_its_count_says(count, factor):
    """P = Φ(count/(σ₁C₁) − τ): with ⅔ and 1.5 of the noise another (p < 10⁻⁹)."""
    size = 200_000
    answer = released([tf.zeros(1), empty(size, 1), tf.fill([size], count)], alpha=factor)
    chosen = answer.value[1].indices.numpy()
    assert (np.diff(chosen) > 0).all()
    for wrong in (1.0, 2 / 3, 1.5):
        p = stats.norm.cdf(count / (wrong * SIGMA_1 * C1 * factor) - TAU)
        distance = abs(len(chosen) - size * p) / math.sqrt(size * p * (1 - p))
        assert (distance < 6) == (wrong == 1.0 or count == 0.0)


def test_rows_that_nobody_touches_are_chosen_by_chance_at_a_million():
    """τ = 4: Binomial(10⁶, Φ(−4)), of mean 31.67, at random places (p < 10⁻⁶)."""
    size, found = 10**6, []
    for seed in range(6):
        answer = released([tf.zeros(1), empty(size, 2), tf.zeros(size)], tau=4.0, seed=seed)
        found.append(answer.value[1].indices.numpy())
    assert abs(sum(map(len, found)) - 6 * 31.67) < 5 * math.sqrt(6 * 31.67)
    assert stats.kstest(np.concatenate(found) / size, "uniform").pvalue > 1e-6
    assert len(set(map(tuple, found))) == 6


def test_sums_go_to_their_rows_and_others_are_dropped():
    """In float64 from the definition: rows 2 and 7 are chosen, 5 and 0 are not."""
    sums = rows_of([5, 2, 0], [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], (8, 2))
    counts = tf.constant([-1e3, -1e3, 1e3, -1e3, -1e3, -1e3, -1e3, 1e3])
    many = [released([tf.zeros(1), sums, counts], seed=seed).value[1] for seed in range(40)]
    for each in many:
        assert each.indices.numpy().tolist() == [2, 7] and each.dense_shape.numpy()[0] == 8
    mean = np.mean([each.values.numpy() for each in many], axis=0)
    error = 5 * SIGMA_2 * C / B / math.sqrt(40)
    np.testing.assert_allclose(mean, [[3 / B, 4 / B], [0, 0]], atol=error)


def test_without_noise_the_rows_that_are_touched():
    sums = rows_of([5, 2], [[1.0, 2.0], [3.0, 4.0]], (8, 2))
    counts = tf.constant([0, 0, 0.3, 0, 0, 1.0, 0, 0])
    answer = released([tf.ones(3), sums, counts], z=0.0)
    np.testing.assert_array_equal(answer.value[1].indices, [2, 5])
    np.testing.assert_allclose(answer.value[1].values, np.array([[3, 4], [1, 2]]) / B)
    np.testing.assert_allclose(answer.value[0], np.ones(3) / B)
    assert float(answer.noise_std) == 0.0


def test_rows_that_are_given():
    trained = tf.constant(np.arange(6) % 2 == 0)
    sums = rows_of([0, 1], [[1.0], [2.0]], (6, 1))
    answer = released([tf.zeros(30_000), sums], tau=None, trained=trained)
    np.testing.assert_array_equal(answer.value[1].indices, [0, 2, 4])
    np.testing.assert_allclose(np.std(answer.value[0]), Z * C / B, rtol=0.03)  # nothing is counted
    both = released([tf.zeros(1), sums, tf.fill([6], 1e3)], trained=trained)
    np.testing.assert_array_equal(both.value[1].indices, [0, 2, 4])


def test_the_split_is_that_of_the_reference():
    """z⁻² = σ₁⁻² + σ₂⁻², with σ₁/σ₂ as given.

    TensorFlow Privacy's `split_noise_multiplier` has the same numbers: at noise multiplier 0.9 and
    a "fraction" of 0.75, a ratio of 3, it gives 2.846050 and 0.948683.
    """
    on_counts, on_sum = RowSelection(TAU, RATIO, False).multipliers(Z)
    np.testing.assert_allclose((on_counts**-2 + on_sum**-2) ** -0.5, Z, rtol=1e-12)
    np.testing.assert_allclose((on_counts, on_sum), (2.846050, 0.948683), rtol=1e-6)


@pytest.mark.parametrize("adjacency", ["add_or_remove_one", "replace_one"])
def test_a_step_costs_what_both_releases_of_one_batch_cost(adjacency):
    """Two Gaussians composed, by dp_accounting: of counts, and of gradients."""
    optimizer = dp.optimizers.DPSGD(
        clip_norm=C, batch_size=B, noise_multiplier=Z,
        sparse_embeddings=dp.optimizers.SparseEmbeddings(TAU, noise_ratio=RATIO),
    )  # fmt: skip
    sampling = dp.accounting.Sampling.full(B, adjacency)
    found = dp.accounting.epsilon(optimizer, sampling, 7, delta=1e-5, accountant="rdp")
    moved = 2 if adjacency == "replace_one" else 1
    each = [dp_accounting.GaussianDpEvent(s / moved) for s in (SIGMA_1, SIGMA_2)]
    accountant = rdp.RdpAccountant()
    accountant.compose(dp_accounting.ComposedDpEvent(each), 7)
    np.testing.assert_allclose(found, accountant.get_epsilon(1e-5), rtol=1e-6)


# Of 100,000 worlds with a canary, each with a row of its own, and as many without, somebody who
# sees which rows were chosen and what they hold guesses by the likelihood ratio.

WORLDS, BOLD, EVEN, LOW = 100_000, 0.5, 1.0, 1.0  # z, σ₁/σ₂ and τ


def guesses(present, seed):
    """The log-likelihood ratios of what is released, for each world."""
    rows = np.arange(WORLDS) if present else np.zeros(0)
    sums = rows_of(rows, np.tile([[C, 0.0]], (len(rows), 1)), (WORLDS, 2))
    counts = tf.fill([WORLDS], 1.0 * present)
    answer = released([tf.zeros(1), sums, counts], z=BOLD, ratio=EVEN, tau=LOW, c1=1.0, seed=seed)
    on_counts, on_sum = RowSelection(LOW, EVEN, False).multipliers(BOLD)
    moved = 1 / on_counts
    ratio = np.full(WORLDS, stats.norm.logcdf(LOW - moved) - stats.norm.logcdf(LOW))
    chosen = answer.value[1].indices.numpy()
    value = answer.value[1].values.numpy()[:, 0] * B / C
    ratio[chosen] = stats.norm.logcdf(moved - LOW) - stats.norm.logcdf(-LOW)
    ratio[chosen] += (value - 0.5) / on_sum**2
    return ratio


def worst_excess():
    """How far the share of canaries found lies above what μ = 1/z allows, in standard errors."""
    with_it, without = guesses(True, 1), guesses(False, 2)
    excess = []
    for alarms in (0.001, 0.01, 0.05, 0.2):
        level = np.quantile(without, 1 - alarms)
        alarmed, found = np.mean(without > level), np.mean(with_it > level)
        # The worst of five standard errors of the rate of alarms.
        most = alarmed + 5 * math.sqrt(max(alarmed, 1e-4) / WORLDS)
        allowed = stats.norm.cdf(stats.norm.ppf(most) + 1 / BOLD)
        excess.append((found - allowed) / math.sqrt(allowed * (1 - allowed) / WORLDS))
    return max(excess)


def test_nobody_finds_more_canaries_than_the_ledger_allows():
    assert worst_excess() < 5


@pytest.mark.parametrize("fault", ["no noise on counts", "half the noise on rows"])
def test_a_fault_would_be_found(fault, monkeypatch):
    draw = Gaussian.unit_noise

    def faulty(self, shapes, source, stream=0):
        is_of_counts = stream[1] == 1
        factor = 1.0
        if fault == "no noise on counts" and is_of_counts:
            factor = 0.0
        elif fault == "half the noise on rows" and not is_of_counts:
            factor = 0.5
        return [factor * z for z in draw(self, shapes, source, stream)]

    monkeypatch.setattr(Gaussian, "unit_noise", faulty)
    assert worst_excess() > 5


def test_what_is_no_such_release_is_refused():
    sums = [tf.zeros(1), empty(4, 1), tf.zeros(4)]
    with pytest.raises(ValueError, match="l2"):
        released(sums, mechanism=Laplace())
    with pytest.raises(ValueError, match="Correlated noise"):
        released(sums, mechanism=SquareRootFactorization(4, 2))
    query, part = (
        Query(clip_norm=C, tables=Tables({1: None}, C1)),
        Release(0, "mean", Z, Gaussian()),
    )
    source = NoiseSource()
    arguments = {"batch_size": B, "alpha": 1.0, "source": source}
    with pytest.raises(ValueError, match="Rows of tables cannot"):
        release([part], [query], [sums], **arguments)
    rows = Release(0, "mean_of_rows", Z, Gaussian(), rows=RowSelection(TAU, RATIO, False))
    with pytest.raises(ValueError, match="cannot be released"):
        release([rows], [Query(clip_norm=C)], [[tf.zeros(1)]], **arguments)
    with pytest.raises(ValueError, match="which the query must ask for"):
        release([rows], [query._replace(tables=Tables({1: None}))], [sums], **arguments)


def test_secure_noise_draws_as_many_rows():
    from dp_keras_opt.noise.secure import SecureNoiseSource

    query = Query(clip_norm=C, tables=Tables({1: None}, C1))
    part = Release(0, "mean_of_rows", Z, Gaussian(), rows=RowSelection(TAU, RATIO, False))
    sums = [tf.zeros(1), empty(3_000, 7), tf.fill([3_000], 1e3)]

    @tf.function
    def run():
        (answer,) = release([part], [query], [sums], batch_size=B, alpha=1.0,
                            source=source)  # fmt: skip
        return answer.value[1].values

    source = SecureNoiseSource()
    draw = run().numpy()
    assert draw.shape == (3_000, 7)
    np.testing.assert_allclose(draw.std(), SIGMA_2 * C / B, rtol=0.03)
    assert len(np.unique(draw)) > 0.99 * draw.size and not np.array_equal(draw, run())


def test_ledgers_remember_the_choice(tmp_path):
    optimizer = dp.optimizers.DPSGD(
        clip_norm=C, batch_size=B, noise_multiplier=Z,
        sparse_embeddings=dp.optimizers.SparseEmbeddings(TAU, noise_ratio=RATIO, rows={"a": [1]}),
    )  # fmt: skip
    sampling = dp.accounting.Sampling.poisson(100, B)
    ledger = dp.accounting.Ledger.of(optimizer, sampling, 5)
    text = ledger.statement(delta=1e-5)
    flat = " ".join(text.split())
    assert f"{SIGMA_1:.6g} on the counts and {SIGMA_2:.6g} on the gradients" in flat
    assert "said to be public" in flat
    again = type(ledger.segments[0]).from_config(ledger.segments[0].to_config())
    assert again.releases == ledger.segments[0].releases
