"""Pure differential privacy: the epsilons of Laplace releases, added up."""

import math

import dp_accounting


class PureAccountant(dp_accounting.PrivacyAccountant):
    """Adds up pure epsilons, for events that end in Laplace noise; holds at every delta, also 0.

    Laplace noise of λ times the L1 sensitivity has ε₀ = 1/λ (Dwork, McSherry, Nissim and Smith,
    "Calibrating noise to sensitivity in private data analysis", TCC 2006,
    doi:10.1007/11681878_14). Sampling with probability q amplifies it to ln(1 + q(e^{ε₀} − 1)):
    Poisson sampling, and subsets of fixed size with q = m/n where one example is replaced (Balle,
    Barthe and Gaboardi, "Privacy amplification by subsampling: tight analyses via couplings and
    divergences", NeurIPS 2018, arXiv:1807.01647, theorems 8 and 9).
    """

    def __init__(self, neighboring_relation):
        super().__init__(neighboring_relation)
        self._epsilon = 0.0

    def _maybe_compose(self, event, count, do_compose):
        try:
            epsilon = _epsilon(event)
        except ValueError as error:
            return self.CompositionErrorDetails(event, str(error))
        if do_compose:
            self._epsilon += count * epsilon
        return None

    def get_epsilon(self, target_delta):
        return self._epsilon

    def get_delta(self, target_epsilon):
        return 0.0 if target_epsilon >= self._epsilon else 1.0


def _epsilon(event):
    """The pure epsilon of one event.

    Raises:
        ValueError: it has none.
    """
    match event:
        case dp_accounting.NoOpDpEvent():
            return 0.0
        case dp_accounting.NonPrivateDpEvent():
            return math.inf
        case dp_accounting.LaplaceDpEvent():
            return 1.0 / event.noise_multiplier
        case dp_accounting.SelfComposedDpEvent():
            return event.count * _epsilon(event.event)
        case dp_accounting.ComposedDpEvent():
            return sum(_epsilon(part) for part in event.events)
        case dp_accounting.PoissonSampledDpEvent():
            return amplified(_epsilon(event.event), event.sampling_probability)
        case dp_accounting.SampledWithoutReplacementDpEvent():
            return amplified(_epsilon(event.event), event.sample_size / event.source_dataset_size)
    raise ValueError(f"{type(event).__name__} has no pure epsilon: it needs delta > 0.")


def amplified(epsilon, probability):
    """ln(1 + q(e^ε − 1)): epsilon on a sample that an example is in with this probability."""
    if epsilon > 30:  # e^ε outgrows the 1
        return epsilon + math.log(probability + (1 - probability) * math.exp(-epsilon))
    return math.log1p(probability * math.expm1(epsilon))
