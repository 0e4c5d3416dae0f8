"""The privacy loss of an example that is replaced, in batches drawn by Poisson sampling."""

import dp_accounting
import numpy as np
from dp_accounting.pld import pld_pmf, privacy_loss_mechanism
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from dp_keras_opt.accounting.random_allocation import UnamplifiedRdpAccountant
from dp_keras_opt.accounting.sampled_gaussian import SampledGaussianLoss

_LOSSES = {
    dp_accounting.GaussianDpEvent: SampledGaussianLoss,
    dp_accounting.LaplaceDpEvent: privacy_loss_mechanism.LaplacePrivacyLoss,
}


class ReplaceOneAccountant(dp_accounting.pld.PLDAccountant):
    """PLD for `replace_one`: events carry σ/2, as everywhere here (`events.py`).

    Without sampling, replacing an example is a removal at twice the sensitivity. With Poisson
    sampling it is not: with the example, as without it, a batch is a mixture, and the pair that
    dp_accounting prices, a mixture beside a single distribution, bounds no composition of them.
    What holds by advanced joint convexity (Balle, Barthe and Gaboardi, "Privacy amplification by
    subsampling: tight analyses via couplings and divergences", NeurIPS 2018, arXiv:1807.01647,
    theorem 2): for ε ≥ 0 the divergence is at most

        δ(ε) = H_{e^ε}((1−q)·N(0) + q·N(2) ‖ N(0)),

    and the same with the two data sets exchanged, so that δ(ε) = 1 − e^ε + e^ε·δ(−ε) for ε < 0.
    """

    def _maybe_compose(self, event, count, do_compose):
        sampled = isinstance(event, dp_accounting.PoissonSampledDpEvent)
        if not (do_compose and sampled and type(event.event) in _LOSSES):
            return super()._maybe_compose(event, count, do_compose)
        probability, scale = event.sampling_probability, event.event.noise_multiplier
        if not (probability > 0 and scale > 0):  # nothing is released, or all
            return super()._maybe_compose(event, count, do_compose)
        loss = _LOSSES[type(event.event)](scale, sampling_prob=probability)
        once = _symmetric(loss, self._value_discretization_interval)
        self._pld = self._pld.compose(once.self_compose(count))
        return None


class ProvedRdpAccountant(UnamplifiedRdpAccountant):
    """RDP for `replace_one`, without what is not proved: amplification by Poisson sampling."""

    def _maybe_compose(self, event, count, do_compose):
        if isinstance(event, dp_accounting.PoissonSampledDpEvent):
            event = event.event
        return super()._maybe_compose(event, count, do_compose)


def _symmetric(loss, interval):
    """The loss distribution, on a grid, whose profile for ε ≥ 0 is that of `loss`."""
    last = int(np.ceil(loss.connect_dots_bounds().epsilon_upper / interval))
    deltas = loss.get_delta_for_epsilon(interval * np.arange(last + 1))
    deltas = np.maximum.accumulate(deltas[::-1])[::-1]  # against rounding: it falls with ε
    negative = -interval * np.arange(last, 0, -1)
    mirrored = 1 - np.exp(negative) * (1 - deltas[:0:-1])
    return PrivacyLossDistribution(
        pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(
            interval, -last, last, np.concatenate([mirrored, deltas])
        )
    )
