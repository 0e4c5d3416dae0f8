"""Private selection: a random number of runs, of which only the best is published."""

import dataclasses
import math

import dp_accounting
import numpy as np
from scipy import optimize, stats

from dp_keras_opt.checks import is_number


@dataclasses.dataclass(frozen=True)
class RandomRepetitions:
    """How many times a private training is run, if only the best run is published.

    The number of runs is drawn at random, from a truncated negative binomial distribution, which is
    what makes the choice cheap: ε grows with the logarithm of the mean, and not with the number of
    runs, as it would if all of them were published. It is at least 1.

    Guarantee: the ε of the best run, choice included, if each run is private in the same way
    (whatever its hyper-parameters, drawn without looking at the data), the score by which runs are
    compared is computed from data that need no protection (or are protected otherwise), and nothing
    else of the runs is published: neither the others' results nor how many there were.

    Args:
        mean: expected number of runs, at least 1.
        shape: η ≥ 0 of the distribution; 1 is the geometric, 0 the logarithmic one. Smaller is
            cheaper in ε, and has more often a single run.

    Raises:
        ValueError: an argument is out of range.

    Reference: Papernot and Steinke, "Hyperparameter tuning with Rényi differential privacy", ICLR
    2022, arXiv:2110.03620, definition 1 and theorem 2.
    """

    mean: float
    shape: float = 1.0

    def __post_init__(self):
        for name, least in (("mean", 1), ("shape", 0)):
            value = getattr(self, name)
            if not (is_number(value) and least <= value < math.inf):
                raise ValueError(f"{name} must be a number from {least}, received {value!r}.")

    def event(self, run: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
        """The event of the choice; `run` is that of a single run."""
        if isinstance(run, dp_accounting.NonPrivateDpEvent):
            return run
        return dp_accounting.dp_event.RepeatAndSelectDpEvent(run, self.mean, self.shape)

    def describe(self) -> str:
        """One sentence on what the guarantee assumes of the choice."""
        return (
            f"Private selection: this is the best of a random number of such runs, {self.mean:g} "
            f"in the mean (truncated negative binomial of shape {self.shape:g}), which the "
            "epsilon covers if nothing else of them, their number included, is published, and if "
            "their scores came from data that need no protection."
        )

    def draw(self, generator: np.random.Generator) -> int:
        """A number of runs.

        Args:
            generator: a `numpy.random.Generator` whose state nobody knows.
        """
        if self.mean == 1:
            return 1
        if not self.shape:
            return int(stats.logser(1 - self._gamma).rvs(random_state=generator))
        whole = stats.nbinom(self.shape, self._gamma)
        none = whole.pmf(0)  # truncated: no run is no outcome
        return max(1, int(whole.ppf(none + (1 - none) * generator.random())))

    @property
    def _gamma(self):
        """γ in (0, 1), of the distribution with this mean."""

        def excess(log_gamma):
            odds = np.expm1(-log_gamma)  # (1 - γ)/γ
            if not self.shape:
                return odds / -log_gamma - self.mean
            return self.shape * odds / -np.expm1(self.shape * log_gamma) - self.mean

        return float(np.exp(optimize.brentq(excess, -50.0, -1e-15)))
