import dp_accounting
import numpy as np
import pytest

from dp_keras_opt import accounting
from dp_keras_opt.accounting import Sampling
from dp_keras_opt.noise import schedules

DELTA = 1e-6


@pytest.mark.parametrize(
    ("sampling", "accountant", "budget"),
    [
        (Sampling.poisson(80_000, 64), "rdp", 3.0),
        (Sampling.poisson(80_000, 64), "rdp", 0.1),
        (Sampling.poisson(80_000, 64, "replace_one"), "rdp", 20.0),
        (Sampling.shuffled(80_000, 64), "rdp", 1.0),
        (Sampling.full(64), "pld", 2.0),
    ],
)
def test_hits_the_budget_from_below(make_optimizer, sampling, accountant, budget):
    optimizer = make_optimizer()
    delta = DELTA if sampling.num_examples > 64 else 1e-3
    found = accounting.calibrate(optimizer, sampling, 300, budget, delta, accountant)
    assert optimizer.noise_multiplier == found
    assert optimizer.calibrated_for == sampling
    assert accounting.epsilon(optimizer, sampling, 300, delta, accountant) <= budget
    optimizer.noise_multiplier = found * (1 - 1e-4)
    assert accounting.epsilon(optimizer, sampling, 300, delta, accountant) > budget


def test_without_replacement(make_optimizer):
    optimizer, sampling = make_optimizer(), Sampling.without_replacement(80_000, 64)
    accounting.calibrate(optimizer, sampling, 10, 2.0, DELTA)
    assert 1.999 < accounting.epsilon(optimizer, sampling, 10, DELTA) <= 2.0


def test_matches_the_exact_gaussian(make_optimizer):
    # One exact Gaussian: sigma = 1 has epsilon = 5.3493 at delta = 1e-7 (spec/core.md).
    optimizer = make_optimizer(batch_size=1000)
    found = accounting.calibrate(optimizer, Sampling.full(1000), 1, 5.3493, 1e-7, "pld")
    assert found == pytest.approx(1.0, rel=1e-3)


def test_several_releases_and_a_schedule(make_optimizer):
    optimizer = make_optimizer(
        ratios=(1.0, 2.0), noise_schedule=schedules.Fixed(np.geomspace(0.5, 2, 18))
    )
    sampling = Sampling.poisson(80_000, 64)
    accounting.calibrate(optimizer, sampling, 18, 1.0, DELTA)
    assert 0.999 < accounting.epsilon(optimizer, sampling, 18, DELTA) <= 1.0
    joint = optimizer.noise_multiplier * (1 + 1 / 4) ** -0.5
    accountant = dp_accounting.rdp.RdpAccountant()
    for alpha in optimizer.noise_schedule.alphas(0, 18):
        event = dp_accounting.GaussianDpEvent(joint * alpha)
        accountant.compose(dp_accounting.PoissonSampledDpEvent(0.0008, event))
    assert accountant.get_epsilon(DELTA) == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"epsilon": 0}, "epsilon must be a positive finite number.*received 0"),
        ({"epsilon": float("inf")}, "epsilon must be"),
        ({"epsilon": float("nan")}, "epsilon must be"),
        ({"epsilon": True}, "epsilon must be"),
        ({"epsilon": "3"}, "epsilon must be"),
        ({"epsilon": 1e12}, "hardly any noise"),
        ({"steps": 0}, "steps must be an integer >= 1"),
        ({"steps": 10.0}, "steps must be"),
        ({"delta": 0}, "delta must be"),
        ({"accountant": "gdp"}, "accountant must be one of"),
        ({"sampling": Sampling.poisson(1000, 32)}, "batch_size=64.*batch_size=32"),
    ],
)
def test_refuses(make_optimizer, changes, match):
    optimizer = make_optimizer()
    arguments = {
        "sampling": Sampling.poisson(1000, 64), "steps": 10, "epsilon": 1.0, "delta": DELTA,
    }  # fmt: skip
    with pytest.raises(ValueError, match=match):
        accounting.calibrate(optimizer, **{**arguments, **changes})
    assert optimizer.noise_multiplier is None


def test_unreachable_budget(make_optimizer):
    with pytest.raises(ValueError, match="epsilon=1e-08 cannot be met"):
        accounting.calibrate(make_optimizer(), Sampling.full(64), 10**12, 1e-8, 1e-12)


def test_refuses_what_is_released_without_noise(make_optimizer):
    with pytest.raises(ValueError, match="without noise"):
        accounting.calibrate(
            make_optimizer(ratios=(1.0, 0.0)), Sampling.poisson(1000, 64), 10, 1.0, DELTA
        )
