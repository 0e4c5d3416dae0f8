"""Rows that are declared public: they cost nothing, and nothing private depends on them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_keras_opt as dp
from dp_keras_opt.data import RowInfo, with_public
from dp_keras_opt.optimizers import PDADPMD, AdaDPS, DPAdam, SubspaceAdagrad, moments
from tests.helpers import linear_regression as linear
from tests.helpers.linear_regression import BATCH, CLIP, PRIVATE, SAMPLING, SIGMA, SIZE, X, Y

RATE, EPSILON, GAMMA = 0.05, 0.05, 0.7
_rng = np.random.default_rng(11)
PUBLIC_X = _rng.normal(size=(5, 4)).astype("float32")
PUBLIC_Y = _rng.normal(size=(5, 3)).astype("float32")


def batch(public=(PUBLIC_X, PUBLIC_Y), mask=None):
    """The private rows of the oracle with public ones behind them, as Keras hands it on."""
    x, y = np.concatenate([X, public[0]]), np.concatenate([Y, public[1]])
    count, own = len(public[0]), np.ones(len(X)) if mask is None else np.asarray(mask)
    share = np.concatenate([np.zeros(len(X)), np.full(count, 1 / count)]).astype("float32")
    return x, y, RowInfo(np.concatenate([own, np.zeros(count)]).astype("float32"), None, share)


def train(model, steps, public=(PUBLIC_X, PUBLIC_Y), mask=None):
    draws = sum(not part.is_public for part in model.optimizer.releases)
    fed = linear.FixedNoise(model.optimizer, 40, draws)
    object.__setattr__(model.optimizer, "noise_source", fed)
    weights = []
    for _ in range(steps):
        one = tf.data.Dataset.from_tensors(batch(public, mask))
        model.fit(dp.data.assume_sampling(one, SAMPLING), verbose=0)
        weights.append(linear.flat(model.trainable_variables))
    return np.array(weights), fed


def public_gradient(theta):
    return linear.gradients(theta, PUBLIC_X, PUBLIC_Y).mean(axis=0)


def ada_dps(steps, fed):
    theta, v, trajectory = linear.START.copy(), np.zeros(SIZE), []
    for t in range(steps):
        scale = 1 / (np.sqrt(v) + EPSILON)
        step = RATE * linear.privatized(theta, fed.flat(t), scale=scale)
        v = GAMMA * v + (1 - GAMMA) * public_gradient(theta) ** 2
        theta = theta - step
        trajectory.append(theta)
    return np.array(trajectory)


def pda_dpmd(steps, fed, total):
    theta, trajectory = linear.START.copy(), []
    for t in range(1, steps + 1):
        alpha = np.cos(np.pi * min(t - 1, total) / (2 * total))
        private = linear.privatized(theta, fed.flat(t - 1))
        theta = theta - RATE * (alpha * private + (1 - alpha) * public_gradient(theta))
        trajectory.append(theta)
    return np.array(trajectory)


def side_information(steps, fed, scaled):
    """Adam with v from the public gradients (Algorithm 9)."""
    theta, trajectory, (beta1, beta2) = linear.START.copy(), [], (0.8, 0.9)
    m, v, v_hat = np.zeros(SIZE), np.zeros(SIZE), np.zeros(SIZE)
    for t in range(1, steps + 1):
        scale = 1 / (np.sqrt(v_hat) + EPSILON) if scaled else 1.0
        g = linear.privatized(theta, fed.flat(t - 1), scale=scale) / scale
        v = beta2 * v + (1 - beta2) * public_gradient(theta) ** 2
        v_hat = v / (1 - beta2**t)
        m = beta1 * m + (1 - beta1) * g
        theta = theta - RATE * m / (1 - beta1**t) / (np.sqrt(v_hat) + EPSILON)
        trajectory.append(theta)
    return np.array(trajectory)


def public_moment(theta):
    """The second-moment matrix of the public rows' gradients."""
    gradients = linear.gradients(theta, PUBLIC_X, PUBLIC_Y)
    return gradients.T @ gradients / len(gradients)


def subspace_adagrad(steps, fed, basis):
    theta, v, trajectory = linear.START.copy(), np.zeros(SIZE), []
    basis = basis.astype(np.float64)
    for t in range(steps):
        moved = public_moment(theta) @ basis
        basis, _ = np.linalg.qr(moved / np.abs(moved).max() + 1e-6 * basis)
        gradients = linear.gradients(theta)
        norms = np.linalg.norm(gradients, axis=1, keepdims=True)
        squares = ((np.minimum(1, CLIP / norms) * gradients) ** 2).sum(axis=0)
        noisy = (squares + SIGMA * CLIP**2 * fed.flat(t, draw=1)) / BATCH
        v = v + basis @ (basis.T @ noisy)
        step = RATE * linear.privatized(theta, fed.flat(t))
        theta = theta - step / (np.sqrt(np.maximum(v, 0)) + EPSILON)
        trajectory.append(theta)
    return np.array(trajectory)


def make_ada_dps(**changes):
    return AdaDPS(RATE, rho=GAMMA, epsilon=EPSILON, **PRIVATE | changes)


def make_pda(**changes):
    return PDADPMD(RATE, steps=4, **PRIVATE | changes)


def make_side_information(scaled=True, **changes):
    source = moments.SideInformation(scaled=scaled)
    return DPAdam(RATE, 0.8, 0.9, EPSILON, second_moment=source, **PRIVATE | changes)


def make_subspace(**changes):
    return SubspaceAdagrad(RATE, **{"rank": 3, "epsilon": EPSILON} | PRIVATE | changes)


MAKERS = [make_ada_dps, make_pda, make_side_information, make_subspace]


@pytest.mark.representatives(6)
@pytest.mark.parametrize("options", [{}, {"run_eagerly": False, "jit_compile": True}, {
    "physical_batch_size": 4}], ids=["eager", "xla", "chunks"])  # fmt: skip
@pytest.mark.parametrize("make", MAKERS)
def test_each_step_is_that_of_the_formula(make, options):
    model = linear.build(make(), **options)
    model.optimizer.build(model.trainable_variables)
    start = [np.array(v) for v in model.optimizer.variables]
    weights, fed = train(model, 6)
    expected = {
        make_ada_dps: lambda: ada_dps(6, fed),
        make_pda: lambda: pda_dpmd(6, fed, 4),
        make_side_information: lambda: side_information(6, fed, True),
        make_subspace: lambda: subspace_adagrad(6, fed, start[-1]),
    }[make]()
    np.testing.assert_allclose(weights, expected, rtol=3e-4, atol=3e-5)


def test_side_information_from_public_rows_without_their_geometry():
    weights, fed = train(linear.build(make_side_information(scaled=False)), 5)
    expected = side_information(5, fed, False)
    np.testing.assert_allclose(weights, expected, rtol=3e-4, atol=3e-5)


def test_public_rows_are_not_in_the_private_sum_and_private_rows_not_in_the_public_one():
    model = linear.build(make_pda())
    queries = (dp.clipping.Query(clip_norm=CLIP), dp.clipping.Query(population="public"))

    def sums(public, mask=None):
        x, y, rows = batch(public, mask)
        keep = tf.cast(rows.mask, tf.bool)
        one = dp.clipping.Batch(tf.constant(x), tf.constant(y), None, keep, rows.public)
        private, mean = dp.clipping.clipped_sums(model, one, queries).sums
        return linear.flat(private), linear.flat(mean)

    private, mean = sums((PUBLIC_X, PUBLIC_Y))
    expected = linear.clipped_sum(linear.START, CLIP)
    np.testing.assert_allclose(private, expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(mean, public_gradient(linear.START), rtol=1e-4, atol=1e-6)
    for other in (100 * PUBLIC_X, np.full_like(PUBLIC_X, np.nan)):
        np.testing.assert_array_equal(sums((other, PUBLIC_Y))[0], private)
    nothing, same = sums((PUBLIC_X, PUBLIC_Y), mask=np.zeros(len(X)))
    np.testing.assert_array_equal(nothing, np.zeros(SIZE))
    np.testing.assert_allclose(same, mean, rtol=1e-6)


@pytest.mark.parametrize("make", MAKERS)
def test_public_data_costs_nothing_and_the_statement_says_that_it_was_used(make):
    # Two Gaussian releases from one batch compose as one with σ/√2.
    sigma = SIGMA / np.sqrt(2) if make is make_subspace else SIGMA
    plain = dp.optimizers.DPSGD(**PRIVATE | {"noise_multiplier": sigma})
    assert dp.accounting.epsilon(make(), SAMPLING, 9, 1e-5) == pytest.approx(
        dp.accounting.epsilon(plain, SAMPLING, 9, 1e-5), rel=1e-9
    )
    optimizer = make(noise_multiplier=None)
    sigma = dp.accounting.calibrate(optimizer, SAMPLING, steps=9, epsilon=1.0, delta=1e-5)
    assert sigma > 0.1
    ledger = dp.accounting.Ledger.of(optimizer, SAMPLING, 9)
    statement = " ".join(ledger.statement(1e-5).split())
    assert "rows that were declared public" in statement
    assert "NO DIFFERENTIAL PRIVACY" not in statement
    again = dp.accounting.Ledger.from_json(ledger.to_json())
    assert again.statement(1e-5) == ledger.statement(1e-5)


def test_a_private_sum_is_never_released_as_public():
    class Leaky(PDADPMD):
        def queries(self):
            return (self.query(), self.query())

    model = linear.build(Leaky(steps=4, **PRIVATE))
    with pytest.raises(ValueError, match="private rows"):
        train(model, 1)


@pytest.mark.parametrize("make", MAKERS)
def test_batches_without_public_rows_are_refused(make):
    model = linear.build(make())
    with pytest.raises(ValueError, match="with_public"):
        model.train_on_batch(X, Y)
    assert int(model.optimizer.iterations.numpy()) == 0


@pytest.mark.parametrize("make", MAKERS)
def test_serialisation(make, tmp_path):
    optimizer = make()
    assert (
        type(optimizer).from_config(optimizer.get_config()).get_config() == optimizer.get_config()
    )
    whole, _ = train(linear.build(make()), 4)
    model = linear.build(make())
    train(model, 2)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    rest, _ = train(loaded, 2)
    np.testing.assert_allclose(rest, whole[2:], rtol=1e-5)


def test_the_subspace_becomes_the_leading_eigenvectors_of_the_public_moment():
    model = linear.build(make_subspace())
    model.optimizer.learning_rate = 0.0  # the moment then stays the same
    train(model, 40)
    basis = np.asarray(model.optimizer._basis, np.float64)
    values, vectors = np.linalg.eigh(public_moment(linear.START))
    assert values[-3] > 1.5 * values[-4]  # a gap, so that 40 iterations are enough
    leading = vectors[:, -3:]
    np.testing.assert_allclose(basis @ basis.T, leading @ leading.T, atol=1e-4)


def test_more_directions_than_public_gradients_span_keep_an_orthonormal_basis():
    model = linear.build(make_subspace(rank=9))  # five public rows
    train(model, 10)
    basis = np.asarray(model.optimizer._basis, np.float64)
    np.testing.assert_allclose(basis.T @ basis, np.eye(9), atol=1e-4)


def test_rank_of_the_subspace_is_checked():
    for rank in [0, 2.5, True]:
        with pytest.raises(ValueError, match="rank"):
            make_subspace(rank=rank)
    with pytest.raises(ValueError, match="exceeds the 15"):
        train(linear.build(make_subspace(rank=16)), 1)


def test_steps_must_be_a_positive_integer():
    for steps in [0, -3, 2.5, True]:
        with pytest.raises(ValueError, match="steps"):
            PDADPMD(steps=steps, **PRIVATE)


# data.with_public


def private_batches(steps=4, **options):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(100, 4)).astype("float32")
    y = rng.normal(size=(100, 3)).astype("float32")
    return dp.data.poisson_batches((x, y), BATCH, steps_per_epoch=steps, **options)


def test_public_rows_stand_at_the_end():
    private = private_batches(physical_batch_size=4)
    joined = with_public(private, (PUBLIC_X, PUBLIC_Y))
    assert joined.sampling == private.sampling
    for x, y, rows in joined:
        count = len(x) - 5
        assert count % 4 == 0
        np.testing.assert_array_equal(x[count:], PUBLIC_X)
        np.testing.assert_array_equal(y[count:], PUBLIC_Y)
        np.testing.assert_array_equal(rows.mask[count:], np.zeros(5))
        np.testing.assert_array_equal(rows.public[:count], np.zeros(count))
        np.testing.assert_allclose(rows.public[count:], np.full(5, 0.2))
        assert rows.sample_weight is None


def test_some_public_rows_are_drawn_anew_for_each_batch():
    joined = with_public(private_batches(steps=12), (PUBLIC_X, PUBLIC_Y), public_batch_size=2)
    seen = set()
    for x, _, rows in joined:
        drawn = [PUBLIC_X.tolist().index(row) for row in x.numpy()[-2:].tolist()]
        assert len(set(drawn)) == 2  # without replacement
        np.testing.assert_allclose(rows.public[-2:], [0.5, 0.5])
        seen.update(drawn)
    assert len(seen) > 2  # fails by chance once in 10¹¹ runs: 12 equal pairs of 10


def test_sample_weights_of_the_private_rows_are_kept():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(20, 4)).astype("float32"), rng.normal(size=(20, 3)).astype("float32")
    private = dp.data.poisson_batches((x, y, np.full(20, 3.0)), 8, steps_per_epoch=1)
    (_, _, rows), = with_public(private, (PUBLIC_X, PUBLIC_Y))  # fmt: skip
    mask = rows.mask[:-5].numpy()
    np.testing.assert_allclose(rows.sample_weight[:-5], 3 * mask)
    np.testing.assert_allclose(rows.sample_weight[-5:], np.ones(5))


def test_batches_without_row_masks_get_them():
    plain = tf.data.Dataset.from_tensors((X, Y))
    sampling = dp.accounting.Sampling.shuffled(60, len(X))
    private = dp.data.assume_sampling(plain, sampling)
    (_, _, rows), = with_public(private, (PUBLIC_X, PUBLIC_Y))  # fmt: skip
    np.testing.assert_array_equal(rows.mask, [1] * 6 + [0] * 5)


def test_public_rows_count_in_no_metric():
    model = linear.build(make_pda(noise_multiplier=0.0), metrics=["mae"])
    far = (1e3 * PUBLIC_X, 1e3 * PUBLIC_Y)
    one = tf.data.Dataset.from_tensors(batch(far))
    logs = model.fit(dp.data.assume_sampling(one, SAMPLING), verbose=0).history
    kernel, bias = linear.split(linear.START)
    error = X @ kernel + bias - Y
    assert logs["loss"][0] == pytest.approx(np.mean(error**2), rel=1e-4)
    assert logs["mae"][0] == pytest.approx(np.mean(np.abs(error)), rel=1e-4)


def test_an_empty_draw_takes_a_step_of_noise_and_public_gradient():
    model = linear.build(make_pda())
    weights, fed = train(model, 2, mask=np.zeros(len(X)))
    theta = linear.START.copy()
    for t in range(2):
        alpha = np.cos(np.pi * t / 8)
        private = SIGMA * CLIP * fed.flat(t) / BATCH
        theta = theta - RATE * (alpha * private + (1 - alpha) * public_gradient(theta))
    np.testing.assert_allclose(weights[-1], theta, rtol=1e-4, atol=1e-6)


def test_training_from_poisson_batches():
    joined = with_public(private_batches(physical_batch_size=4), (PUBLIC_X, PUBLIC_Y))
    model = linear.build(make_ada_dps(), run_eagerly=False)
    model.fit(joined, epochs=2, verbose=0)
    assert model.ledger.steps == 8
    assert np.isfinite(linear.flat(model.trainable_variables)).all()


def test_unfit_public_data_is_refused():
    for make, message in [
        (lambda: with_public((X, Y), (PUBLIC_X, PUBLIC_Y)), "Batches"),
        (lambda: with_public(private_batches(), (PUBLIC_X[:, :2], PUBLIC_Y)), "same form"),
        (lambda: with_public(private_batches(), (PUBLIC_X, PUBLIC_Y.astype(int))), "same form"),
        (lambda: with_public(private_batches(), ({"a": PUBLIC_X}, PUBLIC_Y)), "same form"),
        (lambda: with_public(private_batches(), ((PUBLIC_X, PUBLIC_X), PUBLIC_Y)), "same form"),
        (lambda: with_public(private_batches(), (PUBLIC_X, PUBLIC_Y), 6), "public_batch_size"),
        (lambda: with_public(private_batches(), (PUBLIC_X, PUBLIC_Y[:3])), "length"),
    ]:
        with pytest.raises(ValueError, match=message):
            make()
