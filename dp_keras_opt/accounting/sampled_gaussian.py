"""The privacy loss of Gaussian noise on a batch drawn by Poisson sampling, for many ε at once.

The profile is that of dp_accounting's `GaussianPrivacyLoss`, which finds it for one ε after the
other: a hundred times as long, for grids of some thousand losses.

Reference: Zhu, Dong and Wang, "Optimal accounting of differential privacy via characteristic
function", AISTATS 2022, arXiv:2106.08567, for the pair of distributions.
"""

import math

import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss
from scipy import special

#: From here on e^ε − 1 + q is e^ε, to the last digit.
_LARGE = 50.0


class SampledGaussianLoss(GaussianPrivacyLoss):
    """Loss of (1−q)·N(0, σ²) + q·N(1, σ²) beside N(0, σ²), by REMOVE, or the reverse, by ADD."""

    def get_delta_for_epsilon(self, epsilon):
        """The hockey-stick divergence: where the loss exceeds ε, upper mass less e^ε times lower.

        Args:
            epsilon: array [k].

        Returns:
            Array [k].
        """
        q, sigma = self.sampling_prob, self._standard_deviation
        sign = 1.0 if self.adjacency_type == AdjacencyType.REMOVE else -1.0
        # 1 − q + q·exp((2x − 1)/(2σ²)) = e^{±ε}, at x.
        exponent = sign * epsilon
        with np.errstate(divide="ignore", over="ignore"):
            ratio = np.log(np.maximum((np.expm1(exponent) + q) / q, 0.0))
            log_rest = np.log1p(-q)  # -inf where all are in the batch
        ratio = np.where(exponent > _LARGE, exponent - math.log(q), ratio)
        x = sigma**2 * ratio + 0.5
        alone, shifted = (special.log_ndtr(-sign * at / sigma) for at in (x, x - 1))
        mixed = np.logaddexp(log_rest + alone, math.log(q) + shifted)
        upper, lower = (mixed, alone) if sign > 0 else (alone, mixed)
        return np.clip(np.exp(upper) - np.exp(epsilon + lower), 0.0, 1.0)


def sampled_gaussian(sigma, probability, interval):
    """The `PrivacyLossDistribution` of a step on a grid of losses, from above.

    Args:
        sigma: noise multiplier.
        probability: q of Poisson sampling, in (0, 1).
        interval: of the grid.
    """

    def pmf(adjacency):
        loss = SampledGaussianLoss(sigma, sampling_prob=probability, adjacency_type=adjacency)
        bounds = loss.connect_dots_bounds()
        low = math.floor(bounds.epsilon_lower / interval)
        high = math.ceil(bounds.epsilon_upper / interval)
        deltas = loss.get_delta_for_epsilon(interval * np.arange(low, high + 1))
        return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, low, high, deltas)

    return PrivacyLossDistribution(pmf(AdjacencyType.REMOVE), pmf(AdjacencyType.ADD))
