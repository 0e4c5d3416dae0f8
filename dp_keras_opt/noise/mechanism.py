"""What a noise mechanism is, and what one release of it consists of."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import dp_accounting
import numpy as np
import tensorflow as tf

from dp_keras_opt.noise.row_selection import RowSelection
from dp_keras_opt.noise.serializable import Serializable
from dp_keras_opt.noise.source import NoiseSource
from dp_keras_opt.types import Adjacency, Batching, Norm

if TYPE_CHECKING:
    from dp_keras_opt.noise.workload import Workload


class Mechanism(Serializable):
    """A distribution of noise together with the event that accounts for it.

    One object draws the noise and names its price, so the two cannot disagree. Whoever adds a
    noise writes one subclass and registers it with `keras.saving.register_keras_serializable`.

    A *unit* draw is the noise of a query whose sensitivity is 1 at noise multiplier 1; the
    privacy barrier scales it by noise multiplier × clip norm.
    """

    #: The norm in which queries must be clipped for `event` to hold: "l2" or "l1".
    norm: Norm

    #: Whether one release is (ε, 0)-differentially private, so that δ = 0 can be accounted.
    is_pure = False

    #: p, where a release whose noise has scale s spends a share of the budget proportional to s⁻ᵖ:
    #: 2 for zero-concentrated privacy, 1 for pure ε. None where releases are not independent.
    budget_exponent: int | None = None

    @abc.abstractmethod
    def event(self, multiplier: float) -> dp_accounting.DpEvent:
        """The `dp_accounting.DpEvent` of one release whose noise is `multiplier` × sensitivity."""

    #: Whether the noise of a step depends on that of earlier ones (`correlated.Correlated`).
    is_correlated = False

    def check_sampling(self, sampling: Batching) -> None:
        """Refuses a `Sampling` for which the noise cannot be accounted; here none."""
        return

    @abc.abstractmethod
    def unit_noise(
        self, shapes: Sequence[Any], source: NoiseSource, stream: Any = 0
    ) -> list[tf.Tensor]:
        """Unit draws, one tensor for each of `shapes`, in the dtype of the `NoiseSource`.

        Args:
            shapes: of the variables.
            source: where randomness, and the memory of past noise, come from.
            stream: which of the releases of a step they are for; each has a memory of its own.
        """

    @abc.abstractmethod
    def std(self, step: int | tf.Tensor) -> float | tf.Tensor:
        """Standard deviation of one coordinate of the unit noise of step `step` of the run (from
        0), a number or a scalar tensor."""

    @property
    def is_open(self) -> bool:
        """Whether it is yet to be told how many steps it covers; `fit` and `calibrate` do so."""
        return False

    def for_run(
        self, steps: int, sampling: Batching, workload: Workload | None = None
    ) -> Mechanism:
        """What it is for a run of this many steps of such batches, where it `is_open`.

        Args:
            steps: of the run.
            sampling: of the batches.
            workload: how the rule adds the gradients up; None for their sums.
        """
        return self


@dataclasses.dataclass(frozen=True)
class JointMoments:
    """How the mean gradient g and its square are released together, as (g, √λ·g²).

    Attributes:
        weight: λ.
        max_batch_size: N, a bound on the number of examples in a batch.
        adjacency: the neighbouring relation that the sensitivity is for.

    Reference: Kalinin, Upadhyay and Lampert, "Continual release moment estimation with differential
    privacy", 2025, arXiv:2502.06597, for single rows; the sensitivity of batch means is derived in
    `sensitivity`.
    """

    weight: float
    max_batch_size: int
    adjacency: Adjacency

    #: From this N on, `sensitivity` holds for batches of any size, by the projection.
    SAFE_FOR_ALL_SIZES = 4

    def radius(self, clip_norm: float, batch_size: int) -> float:
        """The norm to which g is projected: what N examples reach at most."""
        return self.max_batch_size * clip_norm / batch_size

    def sensitivity(self, clip_norm: float, batch_size: int) -> float:
        """S, the joint L2 sensitivity of (g, √λ·g²).

        For batches of up to N examples: ‖g² − g'²‖ ≤ ‖g − g'‖·‖g + g'‖. For larger ones the
        projection onto the ball of radius R = N·C/B leaves ‖g − g'‖ = r as small or makes it
        smaller, and with s = ‖g + g'‖ and k the cosine between g − g' and g + g', Buzano's
        inequality gives ‖g² − g'²‖² ≤ r²s²(1 + k)/2, where s² + r² + 2rsk ≤ 4R². If r ≤ R/2 that is
        largest at k = 1, where it is r²(2R − r)²: no more than for N examples. r is at most C/B, or
        2C/B under replace_one, so N = 4 is enough.

        Reference: Kalinin, Upadhyay and Lampert, "Continual release moment estimation with
        differential privacy", 2025, arXiv:2502.06597 (the joint release); the bound is proved here.
        """
        c, n, weight = clip_norm / batch_size, self.max_batch_size, self.weight
        if self.adjacency != "replace_one":
            return c * math.sqrt(1 + weight * ((2 * n - 1) * c) ** 2)
        # One example moves by r ≤ 2C: ‖g − g'‖ = r/B and ‖g + g'‖ ≤ (2(N−1)C + √(4C²−r²))/B.
        r = np.linspace(0.0, 2 * c, 100_001)
        total = 2 * (n - 1) * c + np.sqrt(np.maximum(4 * c**2 - r**2, 0))
        largest = np.max(r**2 * (1 + weight * total**2))
        return math.sqrt(largest) * (1 + 1e-6)  # the grid misses the maximum by less


@dataclasses.dataclass(frozen=True)
class Release:
    """One noisy answer that every step publishes; both the noise and its event follow from it.

    Attributes:
        query: index into `optimizer.queries()` of the query that is answered.
        statistic: "mean", the sum of the clipped gradients over the expected batch size;
            "mean_and_square", the mean and its square together; "mean_and_counts", the mean and how
            many units have a norm below their bounds; "mean_of_rows", the mean, of tables only
            for some of their rows; "public_mean", the mean over public
            rows, and "public_values", given by the user and no answer to a query: these two are
            neither noised nor accounted, and every statement says that they were used. Beside the
            training: "scores" of a model, or the name of a statistic (`dp_keras_opt.statistics`).
        multiplier: noise multiplier σ, the noise's scale over the query's clip norm; of mean and
            counts, and of mean and choice of rows, that of both together. 0 releases the statistic
            without noise: the ledger then says ε = ∞.
        mechanism: the `Mechanism` that the noise is drawn from.
        joint: how mean and square are weighted, for "mean_and_square".
        count_noise: σ_b, std of the noise on each count, for "mean_and_counts".
        rows: for "mean_of_rows", how rows are chosen.
    """

    query: int
    statistic: str
    multiplier: float
    mechanism: Mechanism
    joint: JointMoments | None = None
    count_noise: float | None = None
    rows: RowSelection | None = None

    def noise_on_sum(self, counts: int) -> float:
        """σ, over C, of the noise on the sum beside which so many counts cost nothing further.

        One unit moves the sum by at most C and each of the L counts by at most ½. Divided by the
        std of their noise, σ·C and σ_b, that is at most √(σ⁻² + L·(2σ_b)⁻²), one Gaussian vector
        with the multiplier z = (σ⁻² + L·(2σ_b)⁻²)^(−½). (Under `replace_one` all is doubled.)
        Under correlated noise x_t is that vector, of L coordinates more: times z, a participation
        is at most 1 long, as the clipped gradient over C is without counts, and all that follows
        for C x stays. σ·C and σ_b multiply what C⁻¹ has mixed. Bounds that follow from earlier
        releases make x_t adaptive, which a Gaussian mechanism on C x allows: Denisov, McMahan,
        Rush, Smith and Thakurta, NeurIPS 2022, arXiv:2202.08312.

        Raises:
            ValueError: the counts alone would have a multiplier of z, or less.
        """
        if self.multiplier == 0:
            return 0.0
        # Without noise on the counts, an error: a division by zero.
        spent = counts * (self.multiplier / (2 * (self.count_noise or 0.0))) ** 2
        if not spent < 1:
            least = self.multiplier * math.sqrt(counts) / 2
            raise ValueError(
                f"count_noise={self.count_noise:.4g} leaves nothing for the gradients: up to "
                f"{least:.4g} the counts alone cost as much as noise_multiplier="
                f"{self.multiplier:.4g} allows. Pass Quantile(..., count_noise={4 * least:.2g}), "
                "with which the gradients have 3% more noise, or take larger batches."
            )
        return self.multiplier / math.sqrt(1 - spent)

    @property
    def is_public(self) -> bool:
        """Whether this comes from what was declared public, and so costs nothing."""
        return self.statistic.startswith("public_")
