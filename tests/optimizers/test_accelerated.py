"""Heavy ball, Nesterov and its stages, against NumPy transcriptions of the specification."""

import math

import keras
import numpy as np
import pytest

import dp_keras_opt as dp
from dp_keras_opt.optimizers import DPSGD, DPHeavyBall, DPMultistageNesterov, DPNesterov
from tests.helpers import linear_regression as lr

MU, L = 0.5, 8.0


def beta_of(alpha, mu=MU):
    root = math.sqrt(mu * alpha)
    return (1 - root) / (1 + root)


def transcription(rates, betas, nesterov, noise, restarts=()):
    """x after each step; the formulas in x_t and x_{t−1}."""
    x = previous = lr.START
    result = []
    for t, (alpha, beta) in enumerate(zip(rates, betas, strict=True)):
        if t in restarts:
            previous = x
        if nesterov:
            z = (1 + beta) * x - beta * previous
            following = z - alpha * lr.privatized(z, noise.flat(t))
        else:
            following = x - alpha * lr.privatized(x, noise.flat(t)) + beta * (x - previous)
        previous, x = x, following
        result.append(x)
    return np.array(result)


@pytest.mark.representatives(4)
@pytest.mark.parametrize("cls", [DPHeavyBall, DPNesterov])
@pytest.mark.parametrize("options", [{}, {"run_eagerly": False}, {"jit_compile": True}])
def test_momentum_methods_equal_their_transcription(cls, options):
    optimizer = cls(0.2, momentum=0.8, **lr.PRIVATE)
    model = lr.build(optimizer, **({"run_eagerly": not options} | options))
    trained, noise = lr.train(model, 8)
    expected = transcription([0.2] * 8, [0.8] * 8, cls is DPNesterov, noise)
    np.testing.assert_allclose(trained, expected, atol=2e-5)


@pytest.mark.parametrize("cls", [DPHeavyBall, DPNesterov])
def test_beta_follows_from_strong_convexity_and_step_size(cls):
    rate = keras.optimizers.schedules.ExponentialDecay(0.2, 1, 0.9)
    optimizer = cls(rate, strong_convexity=MU, **lr.PRIVATE)
    trained, noise = lr.train(lr.build(optimizer), 6)
    rates = 0.2 * 0.9 ** np.arange(6)
    expected = transcription(rates, [beta_of(a) for a in rates], cls is DPNesterov, noise)
    np.testing.assert_allclose(trained, expected, atol=2e-5)


def test_heavy_ball_is_a_smoothed_gradient():
    """Steps α/(1−β) along the exponential mean: DPSGD with a filter of momentum, less its bias."""
    heavy, noise = lr.train(lr.build(DPHeavyBall(0.1, momentum=0.9, **lr.PRIVATE)), 10)
    sgd, _ = lr.train(lr.build(DPSGD(0.1, momentum=0.9, **lr.PRIVATE)), 10)
    np.testing.assert_allclose(heavy, sgd, atol=1e-5)


def test_stages_of_nesterov():
    kappa = L / MU
    first = math.ceil(2 * math.sqrt(kappa) * math.log(math.sqrt(kappa)))
    second = 4 * math.ceil(math.sqrt(kappa) * math.log(8))
    steps = first + second + 5
    optimizer = DPMultistageNesterov(strong_convexity=MU, smoothness=L, c=0.5, **lr.PRIVATE)
    model = lr.build(optimizer, run_eagerly=False)
    noise = lr.FixedNoise(optimizer, steps)
    object.__setattr__(optimizer, "noise_source", noise)
    trained = []
    for _ in range(steps):
        model.train_on_batch(lr.X, lr.Y)
        trained.append(lr.flat(model.trainable_variables))
    rates = [0.5 / L] * first + [0.5 / (2**4 * L)] * second + [0.5 / (2**6 * L)] * 5
    expected = transcription(
        rates, [beta_of(a) for a in rates], True, noise, restarts=(first, first + second)
    )
    np.testing.assert_allclose(trained, expected, atol=5e-5)


def test_between_steps_the_variables_hold_x():
    """So that evaluation, checkpoints and export need no hooks; the gradient is taken at z."""
    optimizer = DPNesterov(0.3, momentum=0.9, **lr.PRIVATE)
    model = lr.build(optimizer)
    trained, noise = lr.train(model, 3)
    expected = transcription([0.3] * 3, [0.9] * 3, True, noise)
    np.testing.assert_allclose(lr.flat(model.trainable_variables), expected[-1], atol=1e-5)
    before = model.evaluate(lr.X, lr.Y, verbose=0)
    kernel, bias = lr.split(expected[-1])
    assert before == pytest.approx(np.mean((lr.X @ kernel + bias - lr.Y) ** 2), rel=1e-4)
    z = expected[-1] + 0.9 * (expected[-1] - expected[-2])
    optimizer.prepare(model.trainable_variables)
    np.testing.assert_allclose(lr.flat(model.trainable_variables), z, atol=1e-5)
    optimizer.prepare(model.trainable_variables)  # a second time changes nothing
    np.testing.assert_allclose(lr.flat(model.trainable_variables), z, atol=1e-5)


def test_all_pieces_of_a_logical_batch_are_taken_at_z():
    finals = []
    for size in (None, 2):
        model = lr.build(
            DPNesterov(0.3, momentum=0.9, **lr.PRIVATE), run_eagerly=False,
            physical_batch_size=size,
        )  # fmt: skip
        trained, _ = lr.train(model, 4)
        finals.append(trained[-1])
    np.testing.assert_allclose(*finals, atol=1e-5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: DPHeavyBall(0.2, momentum=0.7, **lr.PRIVATE),
        lambda: DPNesterov(0.2, strong_convexity=MU, **lr.PRIVATE),
        lambda: DPMultistageNesterov(strong_convexity=MU, smoothness=L, c=0.5, p=2, **lr.PRIVATE),
    ],
)
def test_save_and_load_continues_exactly(make, tmp_path):
    straight, _ = lr.train(lr.build(make()), 7)
    model = lr.build(make())
    lr.train(model, 4)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    loaded.sampling, loaded.run_eagerly = lr.SAMPLING, True
    continued, _ = lr.train(loaded, 3)
    np.testing.assert_allclose(continued[-1], straight[-1], atol=1e-6)
    assert loaded.optimizer.get_config() == model.optimizer.get_config()


@pytest.mark.parametrize("cls", [DPHeavyBall, DPNesterov])
def test_laplace_noise_and_noise_schedules(cls):
    schedule = dp.noise.schedules.nesterov_optimal(MU, L, 1 / L, 5, "laplace")
    optimizer = cls(
        1 / L, strong_convexity=MU, noise="laplace", noise_schedule=schedule, **lr.PRIVATE
    )
    model = lr.build(optimizer)
    for _ in range(5):
        model.train_on_batch(lr.X, lr.Y)
    q = lr.BATCH / 100
    noises = lr.SIGMA * schedule.alphas(0, 5)
    expected = np.sum(np.log1p(q * np.expm1(1 / noises)))
    assert model.ledger.epsilon(0) == pytest.approx(expected)
    with pytest.raises(ValueError, match="end of the noise schedule"):
        model.train_on_batch(lr.X, lr.Y)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DPHeavyBall(momentum=1.0, **lr.PRIVATE), "momentum"),
        (lambda: DPNesterov(strong_convexity=0.0, **lr.PRIVATE), "strong_convexity"),
        (
            lambda: DPMultistageNesterov(strong_convexity=2.0, smoothness=1.0, **lr.PRIVATE),
            "smoothness",
        ),
        (
            lambda: DPMultistageNesterov(strong_convexity=1.0, smoothness=2.0, c=2.0, **lr.PRIVATE),
            "c must|c ",
        ),
    ],
)
def test_refuses_what_the_theory_does_not_cover(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_warns_of_a_filter_on_top():
    with pytest.warns(UserWarning, match="both smooth"):
        lr.train(lr.build(DPNesterov(gradient_filter="f1", **lr.PRIVATE)), 1)
