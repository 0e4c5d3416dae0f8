"""DP² against a float64 transcription of its algorithm, over more than two cycles."""

import math

import dp_accounting
import keras
import numpy as np
import pytest

import dp_keras_opt as dp
from dp_keras_opt.optimizers import DP2Adagrad, DP2RMSprop, DP2Yogi
from tests.helpers import linear_regression as linear
from tests.helpers.linear_regression import BATCH, CLIP, PRIVATE, SAMPLING, SIGMA, SIZE

RATE, ADAPTIVE_RATE, ADAPTIVE_CLIP, EPSILON, GAMMA = 0.3, 0.02, 2.0, 0.05, 0.7
STEPS = 12  # two cycles of (2, 3) and two steps
ACCUMULATE = {
    DP2RMSprop: lambda v, square: GAMMA * v + (1 - GAMMA) * square,
    DP2Adagrad: lambda v, square: v + square,
    DP2Yogi: lambda v, square: v + (1 - GAMMA) * np.sign(square - v) * square,
}
KINDS = list(ACCUMULATE)


def make_optimizer(cls, **changes):
    options = {"rho": GAMMA} if cls is not DP2Adagrad else {}
    arguments = {
        "learning_rate": RATE, "adaptive_learning_rate": ADAPTIVE_RATE, "epsilon": EPSILON,
        "delay": (2, 3), "adaptive_clip_norm": ADAPTIVE_CLIP,
    }  # fmt: skip
    return cls(**arguments | options | PRIVATE | changes)


def transcription(
    cls, fed, steps=STEPS, *, delay=(2, 3), rates=lambda t: (RATE, ADAPTIVE_RATE), decay=0.0,
    penalty=0.0, subtract=False, ablation=None, sigma=SIGMA, clips=lambda t: (CLIP, ADAPTIVE_CLIP),
):  # fmt: skip
    """The weights after each step: Algorithm 1 of the DP² paper, and its two ablations."""
    s1, s2 = delay
    is_kernel = np.arange(SIZE) < 12
    theta, v, collected, count, trajectory = linear.START.copy(), np.zeros(SIZE), 0.0, 0, []
    for t in range(1, steps + 1):
        (rate, adaptive_rate), (c1, c2) = rates(t), clips(t)
        own = penalty * 2 * theta * is_kernel  # the gradient of the L2 penalty
        scale = 1 / (np.sqrt(v) + EPSILON)
        z = fed.flat(t - 1)
        if ablation == "extra_query":
            plain = linear.privatized(theta, fed.flat(t - 1, 1), c1, sigma=sigma) + own
            collected, count = collected + plain, count + 1
            adaptive = (t - 1) % s1 != 0
            if not adaptive:
                v = ACCUMULATE[cls](v, (collected / count) ** 2)
                collected, count = 0.0, 0
        else:
            adaptive = (t - 1) % (s1 + s2) >= s1
            plain = linear.privatized(theta, z, c1, sigma=sigma) + own
        if not adaptive:
            step = rate * (plain + decay * theta)
        elif ablation == "noise_before_preconditioning":
            plain = linear.privatized(theta, z, c2, sigma=sigma) + own
            step = adaptive_rate * scale * (plain + decay * theta)
        else:
            preconditioned = linear.privatized(theta, z, c2, scale, sigma)
            step = adaptive_rate * (preconditioned + scale * (own + decay * theta))
        if ablation != "extra_query" and not adaptive:
            collected = collected + plain
            if (t - 1) % (s1 + s2) == s1 - 1:
                square = (collected / s1) ** 2
                if subtract:
                    square = np.maximum(square - (sigma * c1 / BATCH) ** 2 / s1, 0)
                v, collected = ACCUMULATE[cls](v, square), 0.0
        theta = theta - step
        trajectory.append(theta)
    return np.array(trajectory)


def assert_follows(model, expected, draws=1):
    weights, fed = linear.train(model, STEPS, draws)
    np.testing.assert_allclose(weights, expected(fed), rtol=3e-4, atol=3e-5)


@pytest.mark.parametrize("subtract", [False, True], ids=["", "subtract"])
@pytest.mark.parametrize("cls", KINDS)
def test_each_step_is_that_of_the_algorithm(cls, subtract):
    model = linear.build(make_optimizer(cls, subtract_noise=subtract))
    assert_follows(model, lambda fed: transcription(cls, fed, subtract=subtract))
    assert linear.share_clipped(linear.START, CLIP) > 0.5
    scale = 1 / (np.sqrt(linear.flat(model.optimizer._second_moments)) + EPSILON)
    theta = linear.flat(model.trainable_variables)
    assert linear.share_clipped(theta, ADAPTIVE_CLIP, scale) > 0.5, "both bounds must bind"


@pytest.mark.parametrize("ablation", ["extra_query", "noise_before_preconditioning"])
@pytest.mark.parametrize("cls", KINDS)
def test_each_step_is_that_of_the_ablation(cls, ablation):
    model = linear.build(make_optimizer(cls, ablation=ablation))
    draws = 2 if ablation == "extra_query" else 1
    assert_follows(model, lambda fed: transcription(cls, fed, ablation=ablation), draws)


@pytest.mark.representatives(3)
@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
@pytest.mark.parametrize("ablation", [None, "extra_query"])
def test_a_compiled_step_is_that_of_the_algorithm(jit_compile, ablation):
    optimizer = make_optimizer(DP2RMSprop, ablation=ablation)
    model = linear.build(optimizer, run_eagerly=False, jit_compile=jit_compile)
    draws = 2 if ablation else 1
    assert_follows(model, lambda fed: transcription(DP2RMSprop, fed, ablation=ablation), draws)


@pytest.mark.parametrize("delay", [1, (1, 3), (4, 1)])
def test_phases_of_any_length(delay):
    model = linear.build(make_optimizer(DP2Adagrad, delay=delay))
    phases = (1, 1) if delay == 1 else delay
    assert_follows(model, lambda fed: transcription(DP2Adagrad, fed, delay=phases))


@pytest.mark.parametrize("ablation", [None, "noise_before_preconditioning"])
def test_schedules_decay_and_penalty_are_preconditioned_like_the_gradient(ablation):
    schedules = keras.optimizers.schedules
    optimizer = make_optimizer(
        DP2RMSprop, ablation=ablation, weight_decay=0.2,
        learning_rate=schedules.ExponentialDecay(RATE, 1, 0.9),
        adaptive_learning_rate=schedules.ExponentialDecay(ADAPTIVE_RATE, 1, 0.8),
    )  # fmt: skip
    model = linear.build(optimizer, keras.regularizers.L2(0.3))

    def rates(t):
        return RATE * 0.9 ** (t - 1), ADAPTIVE_RATE * 0.8 ** (t - 1)

    # The data-free gradient of the penalty is part of what v is made of, as in the other rules.
    assert_follows(model, lambda fed: transcription(
        DP2RMSprop, fed, rates=rates, decay=0.2, penalty=0.3, ablation=ablation))  # fmt: skip


@pytest.mark.parametrize("adaptive_clip_norm", [math.inf, ADAPTIVE_CLIP])
def test_without_noise(adaptive_clip_norm):
    free = {"clip_norm": math.inf, "noise_multiplier": 0.0}
    optimizer = make_optimizer(DP2RMSprop, adaptive_clip_norm=adaptive_clip_norm, **free)
    model = linear.build(optimizer)

    def clips(t):
        return math.inf, adaptive_clip_norm

    assert_follows(model, lambda fed: transcription(DP2RMSprop, fed, sigma=0.0, clips=clips))
    assert model.ledger.epsilon(1e-5) == math.inf


@pytest.mark.parametrize("ablation", [None, "extra_query", "noise_before_preconditioning"])
def test_both_clip_norms_may_follow_the_step(ablation):
    schedules = keras.optimizers.schedules
    optimizer = make_optimizer(
        DP2RMSprop, ablation=ablation, clip_norm=schedules.ExponentialDecay(CLIP, 1, 0.9),
        adaptive_clip_norm=schedules.ExponentialDecay(ADAPTIVE_CLIP, 1, 0.8),
    )  # fmt: skip
    again = DP2RMSprop.from_config(optimizer.get_config())
    assert again.adaptive_clip_norm == optimizer.adaptive_clip_norm

    def clips(t):
        return CLIP * 0.9 ** (t - 1), ADAPTIVE_CLIP * 0.8 ** (t - 1)

    model = linear.build(optimizer)
    draws = 2 if ablation == "extra_query" else 1
    assert_follows(
        model, lambda fed: transcription(DP2RMSprop, fed, ablation=ablation, clips=clips), draws
    )


def test_subtraction_follows_the_noise_schedule():
    alphas = np.linspace(0.5, 2.0, STEPS)
    model = linear.build(make_optimizer(DP2Adagrad, subtract_noise=True, noise_schedule=alphas))
    _, fed = linear.train(model, 2)
    means, theta = [], linear.START.copy()
    for t in range(2):
        means.append(linear.privatized(theta, fed.flat(t), sigma=SIGMA * alphas[t]))
        theta = theta - RATE * means[-1]
    power = sum((SIGMA * CLIP / BATCH * alphas[t]) ** 2 for t in range(2)) / 4
    expected = np.maximum(np.mean(means, axis=0) ** 2 - power, 0)
    got = linear.flat(model.optimizer._second_moments)
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-6)


# What it costs.


@pytest.mark.parametrize(
    ("ablation", "sigma"),
    [(None, SIGMA), ("noise_before_preconditioning", SIGMA), ("extra_query", SIGMA / 2**0.5)],
)
def test_epsilon_is_that_of_dp_accounting(ablation, sigma):
    optimizer = make_optimizer(DP2RMSprop, ablation=ablation)
    accountant = dp_accounting.rdp.RdpAccountant()
    event = dp_accounting.GaussianDpEvent(sigma)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(BATCH / 100, event), 50)
    expected = accountant.get_epsilon(1e-5)
    assert dp.accounting.epsilon(optimizer, SAMPLING, 50, 1e-5, "rdp") == pytest.approx(expected)


# Arguments and serialisation.


def test_arguments_out_of_range():
    for changes, message in [
        ({"delay": 0}, "delay"),
        ({"delay": (0, 3)}, "delay"),
        ({"delay": (3, -1)}, "delay"),
        ({"delay": (1, 2, 3)}, "delay"),
        ({"delay": 2.5}, "delay"),
        ({"delay": True}, "delay"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"epsilon": math.nan}, "epsilon"),
        ({"adaptive_clip_norm": 0.0}, "adaptive_clip_norm"),
        ({"ablation": "other"}, "ablation"),
        ({"subtract_noise": 1}, "subtract_noise"),
    ]:
        with pytest.raises(ValueError, match=message):
            make_optimizer(DP2RMSprop, **changes)


@pytest.mark.parametrize("changes", [{"clip_norm": math.inf}, {"adaptive_clip_norm": math.inf}])
def test_an_infinite_bound_with_noise_is_refused(changes):
    model = linear.build(make_optimizer(DP2RMSprop, **changes))
    with pytest.raises(ValueError, match="infinite clip_norm"):
        model.train_on_batch(linear.X, linear.Y)


def test_what_the_noise_depends_on_is_fixed_once_built():
    model = linear.build(make_optimizer(DP2RMSprop))
    model.train_on_batch(linear.X, linear.Y)
    for name, value in (("adaptive_clip_norm", 9.0), ("delay", 7), ("ablation", "extra_query")):
        with pytest.raises(ValueError, match="fixed once"):
            setattr(model.optimizer, name, value)


@pytest.mark.parametrize("cls", KINDS)
def test_saved_training_goes_on_as_if_it_had_not_stopped(cls, tmp_path):
    schedule = keras.optimizers.schedules.ExponentialDecay(ADAPTIVE_RATE, 1, 0.8)
    changes = {"subtract_noise": True, "adaptive_learning_rate": schedule}
    optimizer = make_optimizer(cls, **changes)
    again = cls.from_config(optimizer.get_config())
    assert again.get_config() == optimizer.get_config()
    whole, _ = linear.train(linear.build(make_optimizer(cls, **changes)), 9)
    model = linear.build(optimizer)
    linear.train(model, 6)  # amid the second SGD phase: the sum of gradients must survive
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    loaded.sampling = SAMPLING
    rest, _ = linear.train(loaded, 3)
    np.testing.assert_allclose(rest, whole[6:], rtol=1e-5)
