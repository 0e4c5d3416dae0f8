"""Correlated noise and its planner against JAX Privacy's matrix factorization.

Its errors are of prefix sums, squared and times the squared sensitivity. Its planner accounts by
RDP, takes numbers of bands that divide the steps, and minimises the mean error over the steps.
"""

import jax
import numpy as np
import pytest
from jax_privacy.matrix_factorization import buffered_toeplitz, sensitivity, toeplitz

from dp_keras_opt import noise
from dp_keras_opt.accounting import Sampling, plan_noise
from dp_keras_opt.noise import BandedMatrix, BufferedToeplitz, LambdaCGD, Workload
from dp_keras_opt.optimizers import DPSGD

STEPS = 60
STRATEGIES = {
    "bands": BandedMatrix(STEPS, 12),
    "bands, momentum": BandedMatrix(STEPS, 12, momentum=0.9),
    "bands, horizon": BandedMatrix(STEPS, 12, horizon=10),
    "square root": noise.SquareRootFactorization(STEPS, STEPS),
    "buffers": BufferedToeplitz(STEPS, 2),
    "buffers, epochs": BufferedToeplitz(STEPS, 3, separation=20),
    "last step": LambdaCGD(STEPS, separation=20),
    "inverse square root": noise.BandedInverseSquareRoot(STEPS, 4),
}


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("separation", [1, 12, 20, 25, None])
def test_sensitivity_of_steps_so_far_apart_or_further(name, separation):
    mechanism = STRATEGIES[name]
    most = 1 if separation is None else None
    theirs = toeplitz.minsep_sensitivity_squared(
        mechanism.coefficients, separation or 1, most, n=STEPS, skip_checks=True
    )
    falling = np.all(np.diff(mechanism.coefficients) <= 1e-12)
    if separation is not None and not falling:  # theirs is for falling coefficients only
        dense = np.linalg.inv(mechanism.inverse(STEPS))
        theirs = sensitivity.fixed_epoch_sensitivity(dense, -(-STEPS // separation)) ** 2
    ours = mechanism.sensitivity(STEPS, separation)
    assert ours == pytest.approx(float(theirs) ** 0.5, rel=1e-9)


@pytest.mark.parametrize("name", STRATEGIES)
def test_error_of_the_sums(name):
    mechanism = STRATEGIES[name]
    errors = toeplitz.per_query_error(strategy_coef=mechanism.coefficients, n=STEPS)
    assert Workload().spread(mechanism, STEPS) == pytest.approx(float(errors.mean()) ** 0.5)
    beta = mechanism.workload.momentum if hasattr(mechanism, "workload") else 0.9
    summed = np.cumsum(beta ** np.arange(STEPS))  # what the weights have of a gradient
    errors = toeplitz.per_query_error(
        strategy_coef=mechanism.coefficients, n=STEPS, workload_coef=summed
    )
    spread = Workload(beta).spread(mechanism, STEPS)
    assert spread == pytest.approx(float(errors.mean()) ** 0.5)


@pytest.mark.parametrize("bands", [1, 2, 8, 30])
def test_banded_coefficients_are_as_good(bands):
    theirs = toeplitz.optimize_banded_toeplitz(n=240, bands=bands)
    error = float(toeplitz.loss(theirs, n=240)) ** 0.5
    ours = noise.prefix_sum_rmse(BandedMatrix(240, bands), 240)
    assert ours == pytest.approx(error, rel=2e-3) and ours <= error * (1 + 1e-6)


@pytest.mark.parametrize("buffers", [1, 2, 3])
@pytest.mark.parametrize("separation", [None, 60])
def test_buffered_coefficients_are_as_good(buffers, separation):
    steps = 240
    theirs = buffered_toeplitz.optimize(
        n=steps,
        min_sep=separation or 1,
        max_participations=None if separation else 1,
        error="mean",
        min_buffers=buffers,
        max_buffers=buffers,
    )
    column = np.float64(theirs.toeplitz_coefs(steps))
    moved = float(
        toeplitz.minsep_sensitivity_squared(
            column, separation or 1, None if separation else 1, n=steps
        )
    )
    errors = toeplitz.per_query_error(strategy_coef=column, n=steps)
    error = (float(errors.mean()) * moved) ** 0.5
    ours = noise.prefix_sum_rmse(
        BufferedToeplitz(steps, buffers, separation=separation), steps, separation
    )
    assert ours <= 1.01 * error and ours == pytest.approx(error, rel=0.03)


def test_the_matrix_of_scales_and_decays():
    mechanism = STRATEGIES["buffers, epochs"]
    theirs = buffered_toeplitz.BufferedToeplitz.build(mechanism.decays, mechanism.scales)
    column = np.float64(theirs.toeplitz_coefs(STEPS))
    np.testing.assert_allclose(mechanism.coefficients, column / np.linalg.norm(column), rtol=1e-9)


@pytest.mark.parametrize("epsilon", [1.0, 8.0])
def test_the_plan_is_as_good(epsilon):
    """They try all divisors of the steps, we those near powers of two: within 2%."""
    n, size, steps, delta = 6_000, 100, 96, 1e-5
    coefficients, std = toeplitz.optimize_coefs_for_amplifications(
        steps, dataset_size=n, expected_batch_size=size, epsilon=epsilon, delta=delta
    )
    errors = toeplitz.per_query_error(strategy_coef=coefficients, n=steps)
    theirs = float(std) * float(errors.mean()) ** 0.5
    optimizer = DPSGD(0.1, clip_norm=1.0)
    plan = plan_noise(optimizer, Sampling.poisson(n, size), steps, epsilon, delta, "rdp")
    assert plan.best.error <= 1.02 * theirs
    (same,) = plan_noise(
        optimizer, Sampling.poisson(n, size), steps, epsilon, delta, "rdp",
        samplings=[Sampling.cyclic_poisson(n, size, len(coefficients))],
    ).choices  # fmt: skip
    assert same.error == pytest.approx(theirs, rel=0.01)
