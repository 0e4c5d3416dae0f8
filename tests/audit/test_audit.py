"""Audits: the lower bounds against other derivations, and the whole on honest and faulty training.

Everything random has a fixed seed; the confidence that a test's audits ask for is in its text.
"""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy import optimize, stats
from sklearn import metrics

import dp_keras_opt as dp
from dp_keras_opt import audit
from dp_keras_opt.audit import canaries
from dp_keras_opt.clipping import Batch, Point
from dp_keras_opt.noise.release import Released
from tests.helpers.per_example import one_at_a_time
from tests.nightly import audits

pytestmark = pytest.mark.filterwarnings("ignore:A noise seed", "ignore:poisson_batches got seed")


# The bound of one run.


def transcription(m, r, v, epsilon, delta):
    """The p-value of theorem 5.2, by sums over binomial coefficients."""
    q = math.exp(epsilon) / (1 + math.exp(epsilon))
    mass = [math.comb(r, k) * q**k * (1 - q) ** (r - k) for k in range(r + 1)]
    tail = sum(mass[v:])
    alpha = max((2 / i * sum(mass[max(v - i, 0) : v]) for i in range(1, m + 1)), default=0)
    return min(1.0, tail + delta * m * alpha)


def worst_failures(m, r, v, epsilon, delta):
    """sup P[W + F ≥ v] over all F ≥ 0 independent of W with E[F] ≤ 2mδ: a linear program."""
    w = stats.binom(r, 1 / (1 + math.exp(-epsilon)))
    numbers = np.arange(m + 1)
    solution = optimize.linprog(
        -w.sf(v - 1 - numbers),
        A_ub=[numbers],
        b_ub=[2 * m * delta],
        A_eq=[np.ones(m + 1)],
        b_eq=[1.0],
    )
    return -solution.fun


@pytest.mark.parametrize(
    "m, r, v", [(60, 60, 60), (60, 60, 41), (60, 20, 18), (60, 20, 5), (60, 1, 1), (60, 8, 0)]
)
@pytest.mark.parametrize("epsilon", [0.0, 0.7, 3.0])
@pytest.mark.parametrize("delta", [0.0, 1e-6, 1e-3])
def test_the_p_value_is_that_of_the_theorem(m, r, v, epsilon, delta):
    p = audit.one_run_p_value(m, r, v, epsilon, delta)
    assert p == pytest.approx(transcription(m, r, v, epsilon, delta), rel=1e-9)
    # No F of the theorem makes so many right guesses more probable, and one attains the p-value.
    assert p == pytest.approx(worst_failures(m, r, v, epsilon, delta), rel=1e-6, abs=1e-12)


def test_all_guesses_right():
    # Without δ: P[Binomial(r, q) = r] = q^r, so the largest ε that is refuted has q^r = 0.05.
    q = 0.05 ** (1 / 30)
    assert audit.one_run_bound(100, 30, 30, 0.0) == pytest.approx(math.log(q / (1 - q)), abs=1e-5)
    assert audit.one_run_bound(100, 30, 15, 0.0) == 0.0
    assert audit.one_run_bound(100, 1, 1, 0.0) == 0.0


def test_the_p_value_falls_with_right_guesses_and_rises_with_what_is_allowed():
    def p(v, epsilon=1.0, delta=1e-4):
        return audit.one_run_p_value(200, 50, v, epsilon, delta)

    assert all(np.diff([p(v) for v in range(51)]) <= 1e-12)
    assert all(np.diff([p(45, epsilon) for epsilon in np.linspace(0, 4, 20)]) >= 0)
    assert all(np.diff([p(45, 1.0, delta) for delta in np.linspace(0, 1e-2, 20)]) >= 0)


def test_impossible_counts_are_refused():
    for m, r, v in ((10, 11, 5), (10, 5, 6), (10, 5, -1)):
        with pytest.raises(ValueError, match="correct <= guesses"):
            audit.one_run_p_value(m, r, v, 1.0, 0.0)


# The bound of many runs.


def test_no_errors_in_many_runs():
    # Of n runs without an error Clopper and Pearson say 1 − s^{1/n}, s = 0.025 for each kind.
    rate = 1 - 0.025 ** (1 / 40)
    expected = math.log((1 - 0.1 - rate) / rate)
    assert audit.many_run_bound(0, 40, 0, 40, delta=0.1) == pytest.approx(expected, rel=1e-9)
    assert audit.many_run_bound(40, 40, 40, 40, delta=0.1) == 0.0
    assert audit.many_run_bound(20, 40, 20, 40, delta=0.1) == 0.0
    # Either kind of error may be the rare one.
    one, other = (audit.many_run_bound(*e, delta=0.0) for e in ((0, 40, 30, 40), (30, 40, 0, 40)))
    assert one == pytest.approx(other) and one > 0


# Coverage, where the truth is known.


def responses(rng, epsilon, delta, coins):
    """Randomized response: (ε, δ)-private about each coin, and no better. Returns scores."""
    honest = rng.random(coins.shape) < 1 / (1 + math.exp(-epsilon))
    told = np.where(honest, coins, ~coins)
    leaked = rng.random(coins.shape) < delta
    return np.where(leaked, np.where(coins, 2, -2), np.where(told, 1, -1)).astype(float)


@pytest.mark.parametrize("epsilon, delta", [(2.0, 0.0), (1.0, 1e-3)])
def test_one_run_is_right_as_often_as_it_says(epsilon, delta):
    rng, m, repetitions = np.random.default_rng(0), 500, 200

    class Training:
        canaries, scores = [np.zeros(m)], [None]

        def __call__(self, included):
            return [responses(rng, epsilon, delta, included)]

    found = [
        canaries._one_run(Training(), (1.0, 0.25), delta, 0.95, rng)["lower_bound"]
        for _ in range(repetitions)
    ]
    # Too high in at most 5% of the runs, 10 of 200: 23 and more come once in 5000 tests.
    assert np.sum(np.array(found) > epsilon) < 23
    if not delta:
        assert np.median(found) > epsilon - 0.45  # and it is not far below


@pytest.mark.parametrize("epsilon, delta", [(0.5, 0.0), (1.0, 0.05)])
def test_many_runs_are_right_as_often_as_they_say(epsilon, delta):
    rng, repetitions = np.random.default_rng(0), 200

    class Training:
        scores = [None, None]

        def __call__(self, included):  # the second score is blind
            return np.stack([responses(rng, epsilon, delta, included), rng.random(1)])

    found = [
        canaries._many_runs(Training(), 400, delta, 0.95)["lower_bound"] for _ in range(repetitions)
    ]
    assert np.sum(np.array(found) > epsilon) < 23
    assert np.median(found) > epsilon - 0.75


# What is looked at.


def small_model(optimizer, features=3, seed=None, **compiled):
    inputs = keras.Input((features,))
    hidden = keras.layers.Dense(4, activation="tanh")(inputs)
    model = dp.DPModel(inputs, keras.layers.Dense(1)(hidden))
    model.compile(optimizer=optimizer, loss="mse", **compiled)
    return model


def sgd_model():
    return small_model(
        dp.optimizers.DPSGD(0.1, clip_norm=1.0, noise_multiplier=1.0, batch_size=10, seed=0)
    )


def recorded(steps):
    """What is given to the function of batches, once it was called, and that function."""
    seen = []

    def batches(data):
        seen.append(data)
        return dp.data.poisson_batches(data, 10, steps, seed=0)

    return seen, batches


def examples(rows, seed=0, features=3):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, features)), 3 * rng.normal(size=(rows, 1))


@pytest.mark.parametrize("kind", ["flat", "normalize", "per_layer", "laplace", "scaled", "points"])
def test_estimates_are_inner_products_with_what_a_canary_contributes(kind):
    options = {
        "flat": {},
        "normalize": {"normalize": True},
        "per_layer": {"clipping": "per_layer"},
        "laplace": {"noise": "laplace"},
        "scaled": {},
        "points": {},
    }[kind]
    model = small_model(
        dp.optimizers.DPSGD(0.1, clip_norm=0.5, noise_multiplier=1.0, batch_size=8, **options)
    )
    x, y = (tf.constant(part, tf.float32) for part in examples(5))
    rng = np.random.default_rng(1)
    variables = model.trainable_variables
    scale = [rng.uniform(0.5, 2, v.shape).astype("float32") for v in variables]
    value = [rng.normal(size=v.shape).astype("float32") for v in variables]
    query = model.optimizer.query(scale if kind == "scaled" else None)
    if kind == "points":
        query = query._replace(points=(Point(2.0), Point(-0.5, scale)))
    released = Released(value, 0.25)
    estimates, stds = audit.inclusion_estimates(
        model, Batch(x, y, tf.ones(5)), (query,), (released,)
    )
    estimates, stds = estimates.numpy(), stds.numpy()

    def loss(y, y_pred):
        return tf.reduce_mean((y - y_pred) ** 2)

    gradients = one_at_a_time(model, loss, x, y)
    if kind == "points":
        for variable, offset in zip(variables, scale, strict=True):
            variable.assign_add(offset)
        there = one_at_a_time(model, loss, x, y)
        gradients = [
            [2 * g - 0.5 * h for g, h in zip(*pair, strict=True)]
            for pair in zip(gradients, there, strict=True)
        ]
    for i, gradient in enumerate(gradients):
        if kind == "scaled":
            gradient = [g * s for g, s in zip(gradient, scale, strict=True)]
        groups = [[0, 1], [2, 3]] if kind == "per_layer" else [range(4)]
        bound = 0.5 / math.sqrt(len(groups))
        clipped = [None] * 4
        for group in groups:
            norm = np.linalg.norm(
                np.concatenate([gradient[j].ravel() for j in group]), 1 if kind == "laplace" else 2
            )
            factor = bound / (norm + 0.01) if kind == "normalize" else min(1, bound / norm)
            for j in group:
                clipped[j] = factor * gradient[j]
        inner = sum(np.sum(c * v) for c, v in zip(clipped, value, strict=True))
        power = sum(np.sum(c**2) for c in clipped)
        assert estimates[0, i] == pytest.approx(8 * inner / power, rel=1e-3, abs=1e-4)
        assert stds[0, i] == pytest.approx(8 * 0.25 / math.sqrt(power), rel=1e-3)


def test_the_matched_filter_weighs_by_precision():
    estimates = np.array([[[1.0, 0.0]], [[0.5, 2.0]]])
    stds = np.array([[[1.0, 1.0]], [[0.5, 2.0]]])
    np.testing.assert_allclose(audit.matched_filter(estimates, stds), [1 + 0.5 * 4, 2 / 4])


@pytest.mark.parametrize("q", [0.01, 0.5, 1.0])
def test_the_likelihood_ratio_is_that_of_its_densities(q):
    rng = np.random.default_rng(0)
    # Two steps of two releases, which are of one batch: in it both are near 1, or else both near 0.
    estimates, stds = rng.normal(0.5, 2, (2, 2, 5)), rng.uniform(0.5, 2, (2, 2, 5))
    there, away = (stats.norm(loc, stds).pdf(estimates).prod(axis=1) for loc in (1.0, 0.0))
    expected = np.log((1 - q) * away + q * there).sum(axis=0) - np.log(away).sum(axis=0)
    score = audit.likelihood_ratio(q)(estimates, stds)
    np.testing.assert_allclose(score, expected, rtol=1e-9)
    if q == 1:
        order = np.argsort(audit.matched_filter(estimates - 0.5, stds))
        assert np.array_equal(np.argsort(score), order)


def test_presence_may_be_guessed_alone():
    class Training:
        canaries, scores = [np.zeros(100)], [None]

        def __call__(self, included):
            self.included = included
            return [included + np.linspace(0, 0.5, 100)]  # all that are in lie above the others

    def found(*guesses):
        training = Training()
        rng = np.random.default_rng(0)
        return canaries._one_run(training, guesses, 1e-6, 0.95, rng), training.included.sum()

    report, _ = found((0.1, 0.0))
    assert (report["guesses"], report["correct"]) == (10, 10)
    report, _ = found((0.0, 0.1))
    assert (report["guesses"], report["correct"]) == (10, 10)
    report, there = found((0.7, 0.05))
    assert (report["guesses"], report["correct"]) == (75, there + 5)
    assert report["lower_bound"] == audit.one_run_bound(100, 75, there + 5, 1e-6)
    for wrong in ((0.7, 0.4), (0.0, 0.0), (-0.1, 0.5)):
        with pytest.raises(ValueError, match="from 1 to all"):
            found(wrong)
    for wrong in (0.0, 1.1, -1.0):
        with pytest.raises(ValueError, match="sampling_rate"):
            audit.likelihood_ratio(wrong)


def test_poisson_batches_prove_a_third_of_what_is_claimed():
    """On the task of the page on audits: 40% of the claim, and of ten audits 34% at least."""
    count = 10_000
    ids, far = np.arange(count + 3, dtype="int32"), np.full((count + 3, 1), 10.0)

    def make_table():
        inputs = keras.Input((), dtype="int32")
        model = dp.DPModel(inputs, keras.layers.Embedding(count + 3, 1)(inputs))
        optimizer = dp.optimizers.DPSGD(
            0.1, clip_norm=1.0, noise_multiplier=1.0, batch_size=5000, seed=0
        )
        model.compile(optimizer, "mse")
        return model

    report = audit.canary_audit(
        make_table, (ids[count:], far[count:]), (ids[:count], far[:count]), delta=1e-5,
        batches=lambda data: dp.data.poisson_batches(data, 5000, 5, seed=0),
        score=audit.likelihood_ratio(0.5), guesses=[(0.02, 0.0)], seed=0,
    )  # fmt: skip
    assert report.passed and report.lower_bound > 0.3 * report.epsilon
    assert report.guesses == 200


def test_the_area_under_the_curve():
    rng = np.random.default_rng(0)
    members, others = rng.normal(1, 1, 50).round(1), rng.normal(0, 1, 70).round(1)  # with ties
    truth = np.repeat([1, 0], [50, 70])
    expected = metrics.roc_auc_score(truth, np.concatenate([members, others]))
    assert audit.membership_auc(members, others) == pytest.approx(expected)
    assert audit.membership_auc([], others) == 0.5


# The whole.


@pytest.mark.parametrize("runs", [1, 60])
def test_a_bound_on_mu_is_found_beside_that_on_epsilon(runs):
    # Full batches without clipping loss: each canary is a coordinate of its own, so that T steps
    # are one Gaussian with μ = √T/σ = 2, which the matched filter sees whole.
    def make_model():
        inputs = keras.Input((400,))
        model = dp.DPModel(inputs, keras.layers.Dense(1, use_bias=False)(inputs))
        optimizer = dp.optimizers.DPSGD(
            1e-3, clip_norm=1.0, noise_multiplier=1.0, batch_size=400, seed=0
        )
        model.compile(optimizer, "mse")
        return model

    def batches(data):
        return dp.data.assume_sampling(
            tf.data.Dataset.from_tensor_slices(data).batch(400).repeat(4),
            dp.accounting.Sampling.full(400),
        )  # fmt: skip

    rows, targets = np.eye(400), np.full((400, 1), 100.0)
    chosen = slice(0, 400 if runs == 1 else 1)
    canaries_ = (rows[chosen], targets[chosen])
    rest = (rows[:0], targets[:0]) if runs == 1 else (rows[1:], targets[1:])
    report = audit.canary_audit(
        make_model, rest, canaries_, delta=1e-5, batches=batches, runs=runs, seed=0
    )
    assert 0.5 < report.gaussian_mu < 2.0
    assert report.gaussian_epsilon == pytest.approx(
        audit.gaussian_epsilon(report.gaussian_mu, 1e-5)
    )
    assert report.lower_bound < report.gaussian_epsilon < report.epsilon
    assert f"μ ≥ {report.gaussian_mu:.3f} and ε" in str(report)


def test_canaries_that_are_left_out_count_for_nothing():
    seen, batches = recorded(2)
    audit.canary_audit(sgd_model, examples(40), 16, delta=1e-4, batches=batches, seed=3)
    x, y, weight = seen[0]
    assert len(x) == len(y) == len(weight) == 40
    assert (weight[:24] == 1).all() and set(weight[24:]) == {0, 1}
    original_x, original_y = examples(40)
    rows = [int(np.argmin(np.abs(original_x - row).sum(axis=1))) for row in x]
    assert sorted(rows) == list(range(40))  # the canaries were taken out of the data
    np.testing.assert_allclose(y[:24], original_y[rows[:24]], rtol=1e-6)
    assert np.mean(y[24:] == original_y[rows[24:]].astype("float32")) < 0.5  # with other targets


def test_replacements_stand_where_canaries_are_left_out():
    seen, batches = recorded(1)
    mine, others = examples(8, seed=1), examples(8, seed=2)
    audit.canary_audit(
        sgd_model, examples(20), mine, delta=1e-4, batches=batches, replacements=others, seed=0
    )
    x, y, weight = seen[0]
    assert (weight == 1).all()
    of_canary = np.isclose(x[20:], mine[0]).all(axis=1)
    assert 0 < of_canary.sum() < 8
    np.testing.assert_allclose(x[20:][~of_canary], others[0][~of_canary], rtol=1e-6)
    np.testing.assert_allclose(y[20:][~of_canary], others[1][~of_canary], rtol=1e-6)


def test_each_run_starts_afresh_and_the_claim_is_that_of_one():
    models = []

    def make_model():
        models.append(
            small_model(
                dp.optimizers.DPAdam(0.1, clip_norm=1.0, noise_multiplier=2.0, batch_size=5, seed=0)
            )
        )
        return models[-1]

    steps, starts, draws = [], [], []

    def batches(data):
        return dp.data.poisson_batches(data, 5, 2, seed=0)

    def observe(model, batch, queries, released):
        seen = [model.optimizer.iterations, model.weights[0][0, 0], released[0].value[0][0, 0]]
        seen = tf.stack([tf.cast(part, tf.float32) for part in seen])
        return seen[:, None], tf.ones((3, 1))

    def score(estimates, stds):
        steps.append(estimates[:, 0, 0].tolist())
        starts.append(estimates[0, 1, 0])
        draws.append(estimates[0, 2, 0])
        return audit.matched_filter(estimates, stds)

    canary = examples(1, seed=5)
    report = audit.canary_audit(
        make_model, examples(9), canary, delta=1e-3, runs=4, batches=batches, observe=observe,
        score=score, seed=0,
    )  # fmt: skip
    assert len(models) == 1 and steps == [[0, 1]] * 8 and len(set(starts)) == 1
    assert len(set(draws)) == 8  # the noise is not that of an earlier run
    sampling = dp.accounting.Sampling.poisson(10, 5)
    claim = dp.accounting.epsilon(models[0].optimizer, sampling, steps=2, delta=1e-3)
    assert report.epsilon == claim
    assert report.guesses == 6 and "4 runs" in report.method


def test_without_privacy_the_fall_of_the_loss_gives_canaries_away():
    def make_model():
        optimizer = dp.optimizers.DPAdam(
            0.05, clip_norm=10.0, noise_multiplier=1e-3, batch_size=60, seed=0
        )
        inputs = keras.Input((60,))
        hidden = keras.layers.Dense(32, activation="relu")(inputs)
        model = dp.DPModel(inputs, keras.layers.Dense(1)(hidden))
        model.compile(optimizer, "mse")
        return model

    def batches(data):
        return dp.data.poisson_batches(data, 60, 30, seed=0, physical_batch_size=64)

    report = audit.canary_audit(
        make_model, examples(80, features=60), 60, delta=1e-4, batches=batches, score="loss", seed=0
    )
    assert report.auc > 0.75 and report.lower_bound > 0.1
    assert report.passed and report.epsilon > 1000  # which is what the ledger says of this noise
    assert "does not refute" in str(report) and "one run with 60 canaries" in str(report)


def test_what_cannot_be_audited_is_refused():
    def make_model(**compiled):
        return small_model(
            dp.optimizers.DPSGD(0.1, clip_norm=1.0, noise_multiplier=1.0, batch_size=5), **compiled
        )

    with pytest.raises(ValueError, match="has one canary"):
        audit.canary_audit(make_model, examples(9), 3, delta=1e-3, runs=5)
    with pytest.raises(ValueError, match="at least 4 runs"):
        audit.canary_audit(make_model, examples(9), 1, delta=1e-3, runs=3)
    with pytest.raises(ValueError, match="at least two canaries"):
        audit.canary_audit(make_model, examples(9), 1, delta=1e-3)
    with pytest.raises(ValueError, match="no guarantee covers"):  # each has an order of its own
        audit.canary_audit(
            make_model, examples(9), 1, delta=1e-3, runs=4,
            batches=lambda data: dp.data.fixed_order_epochs(data, 5),
        )  # fmt: skip
    with pytest.raises(ValueError, match="from 1 to 8"):
        audit.canary_audit(make_model, examples(9), 9, delta=1e-3)
    with pytest.raises(ValueError, match="steps_per_execution"):
        audit.canary_audit(lambda: make_model(steps_per_execution=2), examples(9), 3, delta=1e-3)


# Optimizers of the library, of which the nightly run audits all.


def test_every_optimizer_is_audited():
    classes = {
        cls
        for cls in vars(dp.optimizers).values()
        if isinstance(cls, type) and issubclass(cls, dp.optimizers.PrivateOptimizer)
    } - {dp.optimizers.PrivateOptimizer}
    audited = set()
    for make_optimizer, *_ in audits.CASES.values():
        optimizer = make_optimizer(clip_norm=1.0, batch_size=2, noise_multiplier=1.0)
        audited.add(type(optimizer))
    assert audited == classes


HONEST = [
    "DPSGD",
    "DPSGD, users",
    "DPSGD, DiSK",
    "DPSGD, FFTKF",
    "DPAdam, scale_then_privatize",
    "SubspaceAdagrad",
]


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_optimizer_passes(name):
    report = audits.run(name, canaries=4000, seed=0)
    assert report.passed, report
    if name == "DPSGD":
        assert report.lower_bound > report.epsilon / 4  # nor is the audit blind
        mu, delta = audits.ONE_RUN  # what full batches with this noise are private with
        assert mu / 3 < report.gaussian_mu < mu
        assert report.lower_bound < report.gaussian_epsilon < audit.gaussian_epsilon(mu, delta)


@pytest.mark.parametrize("name", ["DPSGD", "DPSGD, users", "DPSGD, DiSK", "DPAdam"])
def test_missing_clipping_is_caught_in_one_run(name):
    with audits.no_clipping():
        report = audits.run(name, canaries=8000, seed=0)
    assert not report.passed and "REFUTES" in str(report)
    assert report.gaussian_mu > audits.ONE_RUN[0]
    assert report.auc == 1.0


def test_half_the_noise_refutes_the_claimed_mu_in_one_run():
    with audits.half_the_noise():
        report = audits.run("DPSGD", seed=0)
    assert report.passed  # the bound on ε is not that strong
    assert report.gaussian_mu > audits.ONE_RUN[0]


@pytest.mark.representatives(1)
@pytest.mark.parametrize("fault", ["half the noise", "one step without noise"])
def test_missing_noise_is_caught_in_many_runs(fault):
    with audits.SABOTAGE[fault]():
        report = audits.run("DPSGD", runs=300, seed=0, confidence=0.95)
    assert not report.passed and report.is_above_risk and "ABOVE" in str(report)


def test_counts_without_noise_are_caught_in_many_runs():
    """Those of who is clipped, by which a clip norm finds itself."""
    with audits.no_noise_on_counts():
        report = audits.run("DPSGD, quantile", runs=100, seed=0)
    assert not report.passed and report.is_above_risk


@pytest.mark.parametrize("name", ["DPSGD", "DPSGD, quantile", "DPAdam, Poisson batches"])
def test_many_runs_of_an_honest_optimizer_lie_below_its_risk(name):
    report = audits.run(name, runs=100, seed=0)
    assert report.passed and -1 <= report.excess <= 0 and not report.is_above_risk
