"""Which rows of a table a step releases: those that enough examples touch, by noisy counts."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class RowSelection:
    """How the noise of a step is divided between gradients and the choice of rows.

    An example's gradient g has a norm of at most C. Beside it the example counts in each of the k
    rows that it touches, in all tables together, by min(1, C₁/√k): a vector v of a norm of at most
    C₁. Released are the noisy counts Σv + σ₁C₁·N(0, I) of *all* rows, and Σg + σ₂C·N(0, I). Over
    the stds of their noise, an example moves both together by √(σ₁⁻² + σ₂⁻²) = 1/z at most: one
    Gaussian vector with noise multiplier z. (Under `replace_one` all is doubled.) That rows whose
    count is below the threshold are left out, and that their noise is not drawn, is
    post-processing: they are chosen by the counts alone, and noise is independent from row to row.

    Attributes:
        threshold: τ, the least noisy count that is chosen, over the std σ₁C₁ of its noise. Of the
            rows that nobody touches a share of Φ(−τ) is chosen, too. None: nothing is counted, and
            rows are those that are given.
        noise_ratio: σ₁/σ₂.
        given: whether rows were given, as public or released, among which the choice is.

    Reference: Ghazi, Huang, Kamath, Kumar, Manurangsi, Sinha and Zhang, "Sparsity-preserving
    differentially private training of large embedding models", NeurIPS 2023, arXiv:2311.08357,
    Algorithm 1.
    """

    threshold: float | None
    noise_ratio: float
    given: bool

    def multipliers(self, multiplier: float) -> tuple[float, float]:
        """(σ₁, σ₂) of which z is `multiplier`; (0, z) where nothing is counted."""
        if self.threshold is None:
            return 0.0, multiplier
        ratio = self.noise_ratio
        return multiplier * math.sqrt(1 + ratio**2), multiplier * math.sqrt(1 + ratio**-2)
