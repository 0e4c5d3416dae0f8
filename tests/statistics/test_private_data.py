"""Each statistic: its value without noise, its sensitivity, its noise, its price."""

import contextlib

import dp_accounting
import keras
import numpy as np
import pytest
from scipy import stats

import dp_keras_opt as dp
from dp_keras_opt.noise import numbers

N = 400
RNG = np.random.default_rng(0)
X = RNG.normal(3, 2, N)
USERS = RNG.permutation(np.arange(N) % 37)
WORDS = np.array(list("abcdefgh"))[np.minimum(RNG.geometric(0.3, (N, 3)), 8) - 1]

#: Each method with its arguments, as (name, values, arguments by name).
STATISTICS = {
    "count": ("count", X > 3, {}),
    "histogram": ("histogram", X, {"edges": [-1.0, 2.0, 3.0, 9.0]}),
    "category_counts": ("category_counts", WORDS[:, 0], {"categories": ["b", "c", "a", "z"]}),
    "total": ("total", X, {"bounds": (-1.0, 4.0)}),
    "mean": ("mean", X, {"bounds": (-1.0, 7.0)}),
    "mean_of_vectors": ("mean", np.stack([X, X**2], 1), {"bounds": ([-1.0, 0.0], [7.0, 60.0])}),
    "mean_and_variance": ("mean_and_variance", X, {"bounds": (-5.0, 10.0)}),
    "quantiles": (
        "quantiles", X, {"probabilities": [0.1, 0.5], "bounds": (-8.0, 12.0), "bins": 16}
    ),
    "bounds": ("bounds", X, {"least": 0.25, "most": 64.0}),
    "vocabulary": ("vocabulary", WORDS, {"most_per_unit": 2}),
}  # fmt: skip


def released(name, epsilon=1.0, delta=0.01, values=None, ledger=None, **private):
    method, own, arguments = STATISTICS[name]
    data = dp.statistics.PrivateData(ledger or dp.accounting.Ledger(), **private)
    values = own if values is None else values
    return getattr(data, method)(values, epsilon=epsilon, delta=delta, **arguments)


# Values.


def test_values_without_noise(barrier):
    assert released("count").value == pytest.approx(np.sum(X > 3))
    expected, _ = np.histogram(X, [-1, 2, 3, 9])
    np.testing.assert_allclose(released("histogram").value, expected)
    expected = [np.sum(WORDS[:, 0] == each) for each in "bcaz"]
    np.testing.assert_allclose(released("category_counts").value, expected)
    assert released("total").value == pytest.approx(np.clip(X, -1, 4).sum(), rel=1e-5)
    assert released("mean").value == pytest.approx(np.clip(X, -1, 7).mean(), rel=1e-5)
    found = released("mean_of_vectors").value
    expected = [np.clip(X, -1, 7).mean(), np.clip(X**2, 0, 60).mean()]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    found, inside = released("mean_and_variance"), np.clip(X, -5, 10)
    np.testing.assert_allclose([found.mean, found.variance], [inside.mean(), inside.var()], 1e-4)
    # Within a bin the quantile is interpolated.
    np.testing.assert_allclose(
        released("quantiles").value, np.quantile(X, [0.1, 0.5]), atol=20 / 16
    )


def test_quantiles_of_many_bins_are_those_of_numpy(barrier):
    data = dp.statistics.PrivateData(dp.accounting.Ledger())
    wanted = np.linspace(0.05, 0.95, 7)
    found = data.quantiles(X, wanted, (-8, 12), 1.0, 0.01, bins=4000)
    np.testing.assert_allclose(found.value, np.quantile(X, wanted), atol=0.05)


def test_bounds_hold_all_but_extreme_values(monkeypatch):
    monkeypatch.setattr(numbers, "released", lambda total, *terms: np.asarray(total))
    data = dp.statistics.PrivateData(dp.accounting.Ledger())
    values = np.append(np.linspace(3, 100, 1000), 1e9)
    assert data.bounds(values, 1.0, 0.01) == (2.0, 128.0)
    assert data.bounds(-values, 1.0, 0.01) == (-128.0, -2.0)
    assert data.bounds(np.concatenate([values, -values]), 1.0, 0.01) == (-128.0, 128.0)


def test_users_share_their_contribution(barrier):
    by_user = [X[user == USERS] for user in range(37)]
    means = [np.clip(each, -1, 7).mean() for each in by_user]
    assert released("mean", users=USERS).value == pytest.approx(np.mean(means), rel=1e-5)
    shares = [np.mean(each > 3) for each in by_user]
    assert released("count", users=USERS).value == pytest.approx(np.sum(shares), rel=1e-5)
    sums = [np.clip(each.sum(), -1, 4) for each in by_user]
    assert released("total", users=USERS).value == pytest.approx(np.sum(sums), rel=1e-5)
    expected = sum(np.histogram(each, [-1, 2, 3, 9])[0] / len(each) for each in by_user)
    np.testing.assert_allclose(released("histogram", users=USERS).value, expected, rtol=1e-5)


# Sensitivity, with what reaches the barrier. (The number of units is public.)


NOISES = [
    (name, noise)
    for name in STATISTICS
    for noise in ("gaussian", "laplace")
    if (name, noise) != ("vocabulary", "laplace")  # which is refused
]


@pytest.mark.parametrize("users", [None, USERS], ids=["rows", "users"])
@pytest.mark.parametrize("name, noise", NOISES)
def test_a_unit_moves_what_is_released_by_its_sensitivity_at_most(name, noise, users, barrier):
    def total(values, users):
        with contextlib.suppress(ValueError):  # nothing stands out: it has reached the barrier
            delta = 0.0 if noise == "laplace" else 0.01
            released(name, delta=delta, values=values, noise=noise, users=users)
        return barrier[-1][0]

    values = STATISTICS[name][1]
    own = np.arange(N) == 0 if users is None else users == 5
    extreme = np.array(values)
    if values.dtype.kind == "f":
        extreme[own] = 1e6
    rest = total(values[~own], None if users is None else users[~own])
    *_, mechanism, _, sensitivity = barrier[-1]
    if name == "vocabulary":  # of one more unit up to two words count once more: √2² = 2
        assert total(values, users).sum() - rest.sum() <= sensitivity**2 + 1e-9
        return
    order = 1 if mechanism.norm == "l1" else 2
    moved = [np.linalg.norm(total(each, users) - rest, order) for each in (values, extreme)]
    assert 0.3 * sensitivity <= max(moved) <= sensitivity * (1 + 1e-9)


def test_nan_counts_nothing_and_infinities_as_the_bounds(barrier):
    values, clean = X.copy(), X.copy()
    values[:4], clean[:4] = [np.nan, np.inf, -np.inf, np.inf], [np.nan, 1e9, -1e9, 1e9]
    for name in ("mean", "mean_and_variance", "histogram", "quantiles", "bounds"):
        released(name, values=values)
        released(name, values=clean)
        assert np.isfinite(barrier[-1][0]).all()
        np.testing.assert_array_equal(barrier[-2][0], barrier[-1][0])
    everything_but_one = np.clip(clean[1:], -1, 7)
    found = released("mean", values=clean).value
    assert found == pytest.approx((everything_but_one.sum() + 3) / N, rel=1e-5)  # 3: the middle
    assert released("total", values=values).value == pytest.approx(np.clip(X[4:], -1, 4).sum())


# Noise: measured, at the scale that is stated. 4,000 draws: 6 standard errors of a deviation are
# 7%, exceeded by chance in 1 of 5·10⁸.


@pytest.mark.parametrize("noise", ["gaussian", "laplace"])
@pytest.mark.parametrize("name", ["count", "histogram", "total", "mean", "mean_of_vectors"])
def test_the_noise_is_as_stated_and_as_priced(name, noise):
    delta = 0.0 if noise == "laplace" else 1e-3
    values, ledger = [], dp.accounting.Ledger()
    for _ in range(4000):
        ledger = dp.accounting.Ledger()
        value, std = released(name, 1.0, delta, ledger=ledger, noise=noise)
        values.append(np.atleast_1d(value)[0])
    std = np.atleast_1d(std)[0]
    tolerance = 0.07 if noise == "gaussian" else 0.12  # the fourth moment of Laplace draws is 6
    assert np.std(values) == pytest.approx(std, rel=tolerance)
    (segment,) = ledger.segments
    sigma = segment.releases[0].multiplier
    unit = {"count": 1, "histogram": 1, "total": 4, "mean": 4 / N, "mean_of_vectors": 4 / N}[name]
    vector = {"mean_of_vectors": 2 if noise == "laplace" else 2**0.5}.get(name, 1)
    draw = 2**0.5 if noise == "laplace" else 1
    expected = sigma * unit * vector * draw
    assert np.std(values) == pytest.approx(expected, rel=tolerance)
    for factor in (2 / 3, 1.5):
        assert np.std(values) != pytest.approx(factor * expected, rel=tolerance)


# Price.


def gaussian_epsilon(sigma, delta):
    """By the formula of Balle and Wang, "Improving the Gaussian mechanism", ICML 2018."""

    def of(epsilon):
        a, b = 1 / (2 * sigma) - epsilon * sigma, -1 / (2 * sigma) - epsilon * sigma
        return stats.norm.cdf(a) - np.exp(epsilon) * stats.norm.cdf(b)

    low, high = 0.0, 100.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if of(middle) > delta else (low, middle)
    return high


@pytest.mark.parametrize("adjacency", ["add_or_remove_one", "zero_out", "replace_one"])
@pytest.mark.parametrize("epsilon, delta", [(0.1, 1e-6), (1.0, 1e-6), (4.0, 0.01)])
def test_a_release_has_the_least_noise_for_its_price(epsilon, delta, adjacency):
    ledger = dp.accounting.Ledger()
    released("histogram", epsilon, delta, ledger=ledger, adjacency=adjacency)
    (segment,) = ledger.segments
    effective = segment.releases[0].multiplier / (2 if adjacency == "replace_one" else 1)
    assert gaussian_epsilon(effective, delta) <= epsilon
    assert gaussian_epsilon(effective * 0.995, delta) > epsilon
    assert ledger.epsilon(delta) <= epsilon


def test_laplace_costs_no_delta():
    ledger = dp.accounting.Ledger()
    released("mean", 0.5, 0.0, ledger=ledger, noise="laplace")
    assert ledger.epsilon(0.0) == pytest.approx(0.5, rel=1e-4)
    assert ledger.segments[0].releases[0].multiplier == pytest.approx(2.0, rel=1e-4)


def test_several_releases_and_a_training_are_composed_as_dp_accounting_does():
    ledger = dp.accounting.Ledger()
    for name in ("histogram", "mean", "quantiles"):
        released(name, 0.5, 1e-6, ledger=ledger)
    sigmas = [segment.releases[0].multiplier for segment in ledger.segments]
    sampling = dp.accounting.Sampling.poisson(N, 20)
    optimizer = dp.optimizers.DPSGD(0.1, clip_norm=1.0, noise_multiplier=2.0, batch_size=20)
    ledger.begin(optimizer.releases, sampling)
    ledger.reserve(50)
    oracle = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-4)
    for sigma in sigmas:
        oracle.compose(dp_accounting.GaussianDpEvent(sigma))
    step = dp_accounting.PoissonSampledDpEvent(20 / N, dp_accounting.GaussianDpEvent(2.0))
    oracle.compose(step, 50)
    assert ledger.epsilon(1e-5) == pytest.approx(oracle.get_epsilon(1e-5), rel=2e-3)
    assert ledger.epsilon(1e-5) < 1.5 + 1.0


def test_the_ledger_knows_before_noise_is_drawn(monkeypatch, tmp_path):
    path = tmp_path / "spent.jsonl"

    def broken(*_):
        found = dp.accounting.Ledger.read(path).segments
        assert [segment.steps for segment in found] == [1]
        raise KeyboardInterrupt

    monkeypatch.setattr(numbers, "released", broken)
    ledger = dp.accounting.Ledger(path)
    with pytest.raises(KeyboardInterrupt):
        released("mean", ledger=ledger)
    assert ledger.steps == 1
    ledger.unlock()
    (segment,) = dp.accounting.Ledger(path).segments
    assert (segment.purpose, segment.data_set) == ("a mean", "training")


def test_a_ledger_with_statistics_is_written_and_read():
    ledger = dp.accounting.Ledger()
    released("vocabulary", 4.0, ledger=ledger)
    released("mean", ledger=ledger, data_set="survey")
    read = dp.accounting.Ledger.from_json(ledger.to_json())
    assert read.segments == ledger.segments
    assert read.statement(0.02) == ledger.statement(0.02)


def test_a_training_that_goes_on_is_not_interrupted():
    ledger = dp.accounting.Ledger()
    optimizer = dp.optimizers.DPSGD(0.1, clip_norm=1.0, noise_multiplier=2.0, batch_size=20)
    ledger.begin(optimizer.releases, dp.accounting.Sampling.poisson(N, 20))
    ledger.reserve(10)
    current = ledger.current
    released("mean", ledger=ledger)
    assert ledger.current is current
    ledger.settle(10, 7)
    assert [segment.steps for segment in ledger.segments] == [1, 7]


def test_a_release_is_entered_once():
    ledger = dp.accounting.Ledger()
    released("mean", ledger=ledger)
    with pytest.raises(ValueError, match="Enter a release once"):
        ledger.enter(ledger.segments[0])


# Statements.


def test_the_statement_calls_them_what_they_are():
    ledger = dp.accounting.Ledger()
    data = dp.statistics.PrivateData(ledger, unit="patient")
    data.mean(X, (-1, 7), 0.5, 1e-6, purpose="the mean of the blood pressure")
    text = " ".join(ledger.statement(1e-5).split())
    assert "Statistic: the mean of the blood pressure, released once; Gaussian noise" in text
    assert "times the L2 sensitivity 1; of n = 400 patients." in text
    assert "(vocabularies, Normalization.adapt), but for the statistics above" in text
    assert "Training" not in text and "step" not in text.split("Not covered")[0]


def test_data_sets_that_have_no_unit_in_common_do_not_add_up():
    ledger = dp.accounting.Ledger()
    released("mean", 1.0, 1e-6, ledger=ledger)
    released("mean", 2.0, 1e-6, ledger=ledger, data_set="survey")
    assert ledger.epsilon(1e-6) == pytest.approx(1.0, rel=1e-3)
    assert ledger.epsilon(1e-6, data_set="survey") == pytest.approx(2.0, rel=1e-3)
    assert ledger.risk().advantage < ledger.risk(data_set="survey").advantage
    text = " ".join(ledger.statement(1e-6).split())
    assert "for one example of the survey data with epsilon = 2.000" in text
    assert "No example is in two of these data sets, as was stated" in text
    assert "tell whether one example was in the survey data gains at most" in text


# Data as users have them.


def test_data_of_many_kinds_give_one_sum(barrier, tmp_path):
    import h5py
    import pandas as pd
    import tensorflow as tf

    np.save(tmp_path / "x.npy", X)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = X
    file = h5py.File(tmp_path / "x.h5")
    batches = tf.data.Dataset.from_tensor_slices(X)
    kinds = [
        X, X.tolist(), tf.constant(X), pd.Series(X), np.load(tmp_path / "x.npy", mmap_mode="r"),
        str(tmp_path / "x.npy"), file["x"], batches, batches.batch(64),
    ]  # fmt: skip
    for values in kinds:
        released("mean", values=values)
    totals = [total for total, *_ in barrier]
    for total in totals:
        np.testing.assert_array_equal(total, totals[0])


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda d: d.mean(X, None, 1, 0.01), "bounds must be .lower, upper."),
        (lambda d: d.mean(X, (0, np.inf), 1, 0.01), "one value could move the result"),
        (lambda d: d.total(X, (3, 1), 1, 0.01), "ascending"),
        (lambda d: d.mean(X, (0, 1), 0, 0.01), "epsilon must be positive"),
        (lambda d: d.mean(X, (0, 1), 1, 0.0), "delta must be a number in"),
        (lambda d: d.mean(X, (0, 1), 1, None), "delta must be a number in"),
        (lambda d: d.vocabulary(WORDS, 3, 1, 0.0), "A vocabulary needs .* a delta"),
        (lambda d: d.vocabulary(X, 3, 1, 0.01), "Words must be strings or integers"),
        (lambda d: d.count(X, 1, 0.01), "one boolean a row"),
        (lambda d: d.histogram(X, [3, 2], 1, 0.01), "ascending"),
        (lambda d: d.category_counts(WORDS[:, 0], ["a", "a"], 1, 0.01), "each once"),
        (lambda d: d.category_counts(X, ["a"], 1, 0.01), "must be one of the categories"),
        (lambda d: d.quantiles(X, [2.0], (0, 1), 1, 0.01), "in .0, 1."),
        (lambda d: d.mean(3.0, (0, 1), 1, 0.01), "There must be rows"),
        (lambda d: d.mean([], (0, 1), 1, 0.01), "There must be rows"),
        (lambda d: d.bounds(X, 0.001, 1e-9), "No range of values stands out"),
        (lambda d: d.vocabulary(WORDS, 3, 0.01, 1e-9), "No word reaches the threshold"),
    ],
)
def test_what_is_missing_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(dp.statistics.PrivateData(dp.accounting.Ledger()))


def test_data_sets_without_an_end_or_of_several_columns_are_refused():
    import tensorflow as tf

    data = dp.statistics.PrivateData(dp.accounting.Ledger())
    batches = tf.data.Dataset.from_tensor_slices(X).batch(10)
    with pytest.raises(ValueError, match="has no end"):
        data.mean(batches.repeat(), (0, 1), 1, 0.01)
    with pytest.raises(ValueError, match="must have one column"):
        data.mean(tf.data.Dataset.zip(batches, batches), (0, 1), 1, 0.01)


def test_arguments_of_private_data_are_checked():
    with pytest.raises(ValueError, match="must be counted somewhere|is released must be counted"):
        dp.statistics.PrivateData(None)
    with pytest.raises(ValueError, match="noise must be one of"):
        dp.statistics.PrivateData(dp.accounting.Ledger(), noise="uniform")
    with pytest.raises(ValueError, match="adjacency"):
        dp.statistics.PrivateData(dp.accounting.Ledger(), adjacency="other")
    with pytest.raises(TypeError, match="integers or strings"):
        dp.statistics.PrivateData(dp.accounting.Ledger(), users=[1.5, 2.0])


def test_a_budget_by_a_filter_holds_for_statistics_and_training():
    """What is released may follow from results, until the limit."""
    budget = dp.accounting.Budget(1.0, 1e-6, dp.accounting.RenyiFilter(20))
    ledger = dp.accounting.Ledger()
    data = dp.statistics.PrivateData(ledger, budget=budget)
    first = data.mean(X, (-1, 7), 0.3, 1e-6)
    data.mean(X, (-1, 7), 0.2 if first.value > 0 else 0.4, 1e-6)
    assert ledger.epsilon(1e-6) <= 1.0 == ledger.epsilon_as_planned(1e-6)
    without = dp.statistics.PrivateData(ledger)  # takes the filter of the ledger
    with pytest.raises(ValueError, match="would exceed the budget of the privacy filter"):
        without.mean(X, (-1, 7), 1.0, 1e-6)
    assert len(ledger.segments) == 2
    optimizer = dp.optimizers.DPSGD(0.1, clip_norm=1.0, noise_multiplier=20.0, batch_size=20)
    ledger.begin(optimizer.releases, dp.accounting.Sampling.poisson(N, 20), filter=budget.filter)
    with pytest.raises(ValueError, match="by a privacy filter"):
        dp.statistics.PrivateData(ledger, budget=dp.accounting.Budget(1.0, 1e-6))


def test_a_filter_of_one_data_set_is_none_of_another():
    budget = dp.accounting.Budget(1.0, 1e-6, dp.accounting.GaussianFilter())
    ledger = dp.accounting.Ledger()
    dp.statistics.PrivateData(ledger, budget=budget).mean(X, (-1, 7), 0.3, 1e-6)
    dp.statistics.PrivateData(ledger, data_set="survey").mean(X, (-1, 7), 3.0, 1e-6)
    filters = [segment.filter for segment in ledger.segments]
    assert filters == [budget.filter, None]


def test_a_statistic_between_steps_under_a_filter_ends_their_run():
    budget = dp.accounting.Budget(2.0, 1e-6, dp.accounting.RenyiFilter(20))
    ledger = dp.accounting.Ledger()
    optimizer = dp.optimizers.DPSGD(0.1, clip_norm=1.0, noise_multiplier=20.0, batch_size=20)
    sampling = dp.accounting.Sampling.poisson(N, 20)
    ledger.begin(optimizer.releases, sampling, filter=budget.filter)
    ledger.reserve(5)
    dp.statistics.PrivateData(ledger).mean(X, (-1, 7), 0.3, 1e-6)
    assert ledger.current is None
    ledger.begin(optimizer.releases, sampling, filter=budget.filter)
    ledger.reserve(5)
    dp.statistics.PrivateData(ledger, data_set="survey").mean(X, (-1, 7), 0.3, 1e-6)
    assert ledger.current is not None
    assert ledger.epsilon_as_planned(1e-6) == 2.0


def test_rows_of_users_come_in_one_order():
    """Else a user's rows would be counted as those of others, and not share a contribution."""
    import tensorflow as tf

    rows = tf.data.Dataset.from_tensor_slices((X, X.astype("float32")))
    shuffled = rows.map(lambda x, _: x).shuffle(N)
    data = dp.statistics.PrivateData(dp.accounting.Ledger(), users=USERS)
    with pytest.raises(ValueError, match="in another order at each pass"):
        data.mean(shuffled.batch(32), (-1, 7), 1, 0.01)
    with pytest.raises(ValueError, match="in another order at each pass"):
        dp.statistics.evaluate(
            lambda x, training: x,
            rows.map(lambda x, y: (y[None], y[None])).shuffle(N).batch(32),
            dp.statistics.metrics.Mean(keras.losses.mean_squared_error, (0, 1), "mse"),
            data,
            1,
            0.01,
        )
    assert not data.ledger.segments
    data.mean(rows.map(lambda x, _: x).batch(32), (-1, 7), 1, 0.01)
    without = dp.statistics.PrivateData(dp.accounting.Ledger())
    without.mean(shuffled.batch(32), (-1, 7), 1, 0.01)  # each row is a unit: in any order


def test_a_ledger_that_has_given_up_its_file_takes_no_release(tmp_path):
    ledger = dp.accounting.Ledger(tmp_path / "spent.jsonl")
    ledger.unlock()
    with pytest.raises(RuntimeError, match="given up its file"):
        released("mean", ledger=ledger)
