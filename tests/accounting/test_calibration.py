import dp_accounting
import numpy as np
import pytest

from dp_keras_opt import accounting, optimizers
from dp_keras_opt.accounting import Ledger, Sampling
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
    assert optimizer.plan.sampling == sampling
    assert accounting.epsilon(optimizer, sampling, 300, delta, accountant) <= budget
    optimizer.noise_multiplier = found * (1 - 1e-4)
    assert accounting.epsilon(optimizer, sampling, 300, delta, accountant) > budget


def test_many_batch_sizes_are_calibrated_as_exactly(make_optimizer):
    sizes = accounting.BatchSizes.from_function(lambda step: 50 + 15 * step, 24)
    optimizer, sampling = make_optimizer(batch_size=sizes), Sampling.poisson(20_000, sizes)
    found = accounting.calibrate(optimizer, sampling, 24, 1.0, DELTA)
    assert accounting.epsilon(optimizer, sampling, 24, DELTA) <= 1.0
    optimizer.noise_multiplier = found * (1 - 1e-3)
    assert accounting.epsilon(optimizer, sampling, 24, DELTA) > 1.0


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
    accounting.calibrate(optimizer, sampling, 18, 1.0, DELTA, "rdp")
    assert 0.999 < accounting.epsilon(optimizer, sampling, 18, DELTA, "rdp") <= 1.0
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


def poisson_epsilon(*parts):
    """Epsilon of (noise multiplier, steps, sampling probability), by dp_accounting alone."""
    accountant = dp_accounting.rdp.RdpAccountant()
    for multiplier, steps, probability in parts:
        event = dp_accounting.GaussianDpEvent(multiplier)
        accountant.compose(dp_accounting.PoissonSampledDpEvent(probability, event), steps)
    return accountant.get_epsilon(DELTA)


def test_beside_what_was_spent_it_is_the_least(make_optimizer):
    sampling, before = Sampling.poisson(6400, 64), make_optimizer(noise_multiplier=2.0)
    spent, optimizer = Ledger.of(before, sampling, 100), make_optimizer()
    found = accounting.calibrate(optimizer, sampling, 50, 1.0, DELTA, "rdp", spent=spent)
    past = (2.0, 100, 0.01)
    assert poisson_epsilon(past, (found, 50, 0.01)) <= 1.0
    assert poisson_epsilon(past, (found * (1 - 1e-4), 50, 0.01)) > 1.0
    alone = accounting.calibrate(make_optimizer(), sampling, 50, 1.0, DELTA, "rdp", spent=Ledger())
    assert alone < found


@pytest.mark.parametrize(
    ("share", "steps", "message"),
    [
        (0.5, 10**6, "is spent already"),
        (1 + 5e-4, 10**6, "is spent already"),  # what the rounding of a calibration leaves
        (1 + 5e-3, 10**13, "cannot be met"),
    ],
)
def test_what_was_spent_can_leave_nothing(make_optimizer, share, steps, message):
    sampling, before = Sampling.poisson(6400, 64), make_optimizer(noise_multiplier=2.0)
    spent = Ledger.of(before, sampling, 100)
    budget = spent.epsilon(DELTA) * share
    with pytest.raises(ValueError, match=message):
        accounting.calibrate(make_optimizer(), sampling, steps, budget, DELTA, spent=spent)


def test_beside_other_noise_it_composes_as_the_ledger_does():
    sampling = Sampling.full(100)
    before = optimizers.DPSGD(clip_norm=1.0, batch_size=100, noise="laplace", noise_multiplier=20.0)
    spent = Ledger.of(before, sampling, 10)  # pure: 10/20
    optimizer = optimizers.DPSGD(clip_norm=1.0, batch_size=100)
    accounting.calibrate(optimizer, sampling, 10, 2.0, 1e-3, "rdp", spent=spent)
    alone = Ledger.of(optimizer, sampling, 10).epsilon(1e-3, "rdp")
    assert 1.499 < alone <= 1.5


N = 60


@pytest.mark.parametrize("length", [{"steps": 30}, {"epochs": 3}])
@pytest.mark.parametrize("budget", [3.0, 5.0, 1e3])
def test_the_affordable_batch_size_is_the_largest(length, budget):
    def spent(size):
        steps = length.get("steps") or 3 * -(-N // size)
        return poisson_epsilon((2.0, steps, size / N))

    optimizer = optimizers.DPSGD(clip_norm=1.0, batch_size=7, noise_multiplier=2.0)
    found = accounting.affordable_batch_size(
        optimizer, Sampling.poisson(N, 1), budget, DELTA, "rdp", **length
    )
    assert spent(found) <= budget and optimizer.batch_size == 7
    larger = {found + 1, (found + N) // 2, N} - {found, N + 1}
    if "epochs" in length:  # as many steps as it has
        larger = {size for size in range(found + 1, N) if -(-N // size) == -(-N // found)}
    assert all(spent(size) > budget for size in larger)
    assert found == N or budget < 1e3


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"steps": 30, "epochs": 3}, "steps or epochs"),
        ({}, "steps or epochs"),
        ({"epochs": 0}, "epochs must be an integer >= 1"),
        ({"steps": 30, "sampling": Sampling.full(N)}, "have no size to choose"),
        ({"steps": 30, "epsilon": 0}, "epsilon must be a positive finite number"),
        ({"steps": 30, "epsilon": 1e-3}, "batches of one exceed it"),
    ],
)
def test_refuses_a_batch_size(changes, match):
    optimizer = optimizers.DPSGD(clip_norm=1.0, batch_size=1, noise_multiplier=2.0)
    given = {"sampling": Sampling.poisson(N, 1), "epsilon": 1.0, "delta": DELTA} | changes
    with pytest.raises(ValueError, match=match):
        accounting.affordable_batch_size(optimizer, **given)
