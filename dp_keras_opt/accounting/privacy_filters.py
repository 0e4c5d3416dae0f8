"""Privacy filters: budgets that hold whatever results decided about the steps to come.

Whoever looks at results and then chooses the noise, the batches or the number of the next steps
makes what is spent a random number, and no accountant of fixed steps bounds that: neither PLD nor
Rényi divergences at the order that turns out best. What is proved are sums that are held against a
limit which is fixed beforehand, and which end the training before they exceed it:

- Rényi divergences at *one* order α that is fixed beforehand (Feldman and Zrnic; Lécuyer);
- μ² of steps that each are μ-Gaussian differentially private (Smith and Thakurta).

The guarantee is the limit, not what was spent. The same sums of loss distributions are no filter
(Tran, Koskela, Räisä and Honkela).

What a ledger adds up bounds such a sum after every step, not only after whole runs:

- An example that comes once in a pass over the data is in a step that is fixed before any result.
  A pass counts with the least noise of its steps so far, at least that of the example's own step.
- Correlated noise is C⁻¹z, so that the steps of a run release (Cx)_t + z_t, each with noise of its
  own. A unit moves them by (CΔ)_t with Σ_{t≤n} ‖(CΔ)_t‖² ≤ s(n)², the squared sensitivity of n
  steps, whatever was chosen on the way, since that bounds every sequence Δ. So what n steps have
  cost is at most the price of a run of n steps: nothing need be reserved for the rest of the run.
  With amplification by sampling that is not shown, and refused.

References: filters: Rogers, Roth, Ullman and Vadhan, "Privacy odometers and filters: pay-as-you-go
composition", NeurIPS 2016, arXiv:1605.08294; at one Rényi order: Feldman and Zrnic, "Individual
privacy accounting via a Rényi filter", NeurIPS 2021, arXiv:2008.11193, and Lécuyer, "Practical
privacy filters and odometers with Rényi differential privacy and applications to differentially
private deep learning", 2021, arXiv:2103.01379; of Gaussian differential privacy: Smith and
Thakurta, "Fully adaptive composition for Gaussian differential privacy", 2022, arXiv:2210.17520,
and, where what a step costs a unit depends on results, Koskela, Tobaben and Honkela, "Individual
privacy accounting with Gaussian differential privacy", ICLR 2023, arXiv:2209.15596; of loss
distributions: Tran, Koskela, Räisä and Honkela, "f-differential privacy filters: validity and
approximate solutions", 2026, arXiv:2602.06756.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import dp_accounting
import numpy as np
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from dp_accounting.pld.privacy_loss_mechanism import GaussianPrivacyLoss
from scipy import optimize

from dp_keras_opt.accounting.events import MAX_DISTINCT
from dp_keras_opt.accounting.loss_distributions import LossDistributionAccountant
from dp_keras_opt.accounting.random_allocation import UnamplifiedRdpAccountant
from dp_keras_opt.accounting.replace_one import ProvedRdpAccountant
from dp_keras_opt.accounting.sampling import Sampling
from dp_keras_opt.checks import is_number

if TYPE_CHECKING:
    from dp_keras_opt.accounting.protocols import Optimizer, SampledBatches
    from dp_keras_opt.accounting.segment import Segment

#: By how much, relative, a sum may exceed its limit when it is read on another machine.
_TOLERANCE = 1e-6
#: dp_accounting converts no smaller orders.
_LEAST_ORDER = 1.01


class PrivacyFilter(abc.ABC):
    """A sum that is held against a limit; `RenyiFilter` and `GaussianFilter` are such."""

    #: What it is called in ledgers.
    kind: ClassVar[str]

    def check(self, segments: Sequence[Segment]) -> None:
        """Refuses steps that it cannot price, or that have no common sum.

        Raises:
            ValueError: the message names what cannot be.
        """
        for segment in segments:
            self._check(segment)
        samplings = [segment.sampling for segment in segments]
        kinds = {(s.unit, s.adjacency, s.neighboring_relation): s for s in samplings}
        if len(kinds) > 1:
            one, other = list(kinds.values())[:2]
            raise ValueError(
                f"A {self} adds up steps of one privacy unit and one neighbouring relation: "
                f"{one} and {other} have no common sum. Train all steps with the same."
            )

    def _check(self, segment):
        """Refuses a segment that it cannot price."""
        sampling = segment.sampling
        mechanisms = [release.mechanism for release in segment.releases if not release.is_public]
        if segment.selection is not None:
            self._refuse("a private selection", "Price it with accountant='auto'")
        if sampling.is_heuristic:
            self._refuse(f"{sampling.kind!r} sampling, a heuristic", "Sample by Poisson")
        if any(mechanism.is_pure for mechanism in mechanisms):
            self._refuse("Laplace noise", "Use Gaussian noise, or accountant='pure'")
        if sampling.is_amplified and any(mechanism.is_correlated for mechanism in mechanisms):
            self._refuse(
                f"correlated noise with {sampling.kind!r} sampling",
                "Use batches in a fixed order (data.fixed_order_epochs)",
            )

    def _refuse(self, what, fix):
        raise ValueError(
            f"A {self} cannot price {what}: no proof holds there for choices that looked at "
            f"results. {fix}."
        )

    def epsilon(
        self,
        segments: Sequence[Segment],
        delta: float,
        max_distinct: int | None = MAX_DISTINCT,
        optimistic: bool = False,
    ) -> float:
        """ε at δ of the sum of these segments, as if they had been fixed beforehand.

        Raises:
            ValueError: it cannot price them, or they have no common sum.
        """
        self.check(segments)
        try:
            return self._epsilon(segments, delta, max_distinct, optimistic) if segments else 0.0
        except dp_accounting.UnsupportedEventError as error:
            raise ValueError(f"A {self} cannot price these steps: {error}") from error

    @abc.abstractmethod
    def _epsilon(self, segments, delta, max_distinct, optimistic):
        """The same, of segments that were checked."""

    @abc.abstractmethod
    def limit(self, epsilon: float, delta: float) -> float:
        """The largest sum whose ε at δ is at most this.

        Raises:
            ValueError: there is none.
        """

    @abc.abstractmethod
    def _noise_multiplier(self, limit):
        """That of one Gaussian release whose sum is this."""

    @abc.abstractmethod
    def _epsilon_of_gaussian(self, noise_multiplier, delta):
        """ε at δ of one Gaussian release, by this sum."""

    def get_config(self) -> dict[str, Any]:
        """The kind and the attributes, as JSON-able values."""
        return {"kind": self.kind, **vars(self)}

    @staticmethod
    def from_config(config: dict[str, Any]) -> PrivacyFilter:
        """The filter that `get_config` described.

        Raises:
            ValueError: there is no such kind.
        """
        given = dict(config)
        kind = given.pop("kind", None)
        for each in (RenyiFilter, GaussianFilter):
            if each.kind == kind:
                return each(**given)
        raise ValueError(f"There is no privacy filter of kind {kind!r}.")


@dataclasses.dataclass(frozen=True)
class RenyiFilter(PrivacyFilter):
    """Sums Rényi divergences at one order: the accountant of a budget for adaptive choices.

        renyi = RenyiFilter.planned(optimizer, batches, steps=1000, epsilon=2.0, delta=1e-6)
        model.fit(batches, callbacks=[PrivacyBudget(2.0, 1e-6, accountant=renyi)])

    Guarantee: under a budget of ε at δ by this accountant, all steps together are (ε, δ)-private
    whatever was chosen after looking at released results: noise, sampling, number of steps, when to
    stop. The order, ε and δ must be fixed before the first step, and be no choice of results.

    Not covered: private selection, Laplace noise, heuristics, truncated Poisson sampling, and
    correlated noise that is amplified by sampling, all of which are refused. Balls in bins, and
    Poisson sampling under "replace_one", are priced without amplification, since no more is proved.

    Args:
        order: α, above 1.01; `planned` finds it.

    Raises:
        ValueError: the order is no such number.

    Reference: Feldman and Zrnic, "Individual privacy accounting via a Rényi filter", NeurIPS 2021,
    arXiv:2008.11193.
    """

    order: float

    kind: ClassVar[str] = "renyi"

    def __post_init__(self):
        if not (is_number(self.order) and _LEAST_ORDER < self.order < math.inf):
            raise ValueError(
                f"order must be a number above {_LEAST_ORDER}, fixed before the first step; "
                f"received {self.order!r}. RenyiFilter.planned finds the best for a plan."
            )
        object.__setattr__(self, "order", float(self.order))  # as JSON takes it

    @classmethod
    def planned(
        cls,
        optimizer: Optimizer,
        sampling: Sampling | SampledBatches,
        steps: int,
        *,
        epsilon: float,
        delta: float,
    ) -> RenyiFilter:
        """The filter of the order at which a plan costs least.

        It follows from public numbers alone. What is done in the end may differ from the plan: the
        guarantee is the same, and the budget is used less well.

        Args:
            optimizer: an optimizer of `dp_keras_opt.optimizers`; it is left as it is.
            sampling: the `Sampling` of the batches, or the batches.
            steps: number of training steps in all.
            epsilon, delta: the budget, for which the noise is found if the optimizer has none.

        Raises:
            ValueError: as `calibrate`.
        """
        from dp_keras_opt.accounting.calibration import planned_segment  # which knows filters

        segment = planned_segment(optimizer, sampling, steps, epsilon, delta)
        with_all_orders = _accountant([segment]).compose(segment.event())
        return cls(with_all_orders.get_epsilon_and_optimal_order(delta)[1])

    def _check(self, segment):
        super()._check(segment)
        if "rdp" in segment.sampling.unpriced_by:
            self._refuse(f"{segment.sampling.kind!r} sampling", "Sample by Poisson")

    def _epsilon(self, segments, delta, max_distinct, optimistic):
        accountant = _accountant(segments, [self.order])
        for segment in segments:
            accountant.compose(segment.event(max_distinct, optimistic))
        # Of what is no number dp_accounting would say 0.
        return math.inf if np.isnan(accountant._rdp).any() else accountant.get_epsilon(delta)

    def limit(self, epsilon: float, delta: float) -> float:
        conversion = math.log1p(-1 / self.order) - math.log(delta * self.order) / (self.order - 1)
        if epsilon <= conversion:
            raise ValueError(
                f"A {self} states no epsilon below {conversion:.4g} at delta={delta:g}, however "
                f"much noise there is; received epsilon={epsilon:g}. Choose a larger order: "
                "RenyiFilter.planned finds the best for a plan."
            )
        # Up to the latter divergence the total variation alone gives ε = 0.
        return max(epsilon - conversion, -math.log1p(-(delta**2)))

    def _noise_multiplier(self, limit):
        return math.sqrt(self.order / (2 * limit))

    def _epsilon_of_gaussian(self, noise_multiplier, delta):
        accountant = dp_accounting.rdp.RdpAccountant([self.order])
        event = dp_accounting.GaussianDpEvent(noise_multiplier)
        return float(accountant.compose(event).get_epsilon(delta))

    def __str__(self):
        return f"Renyi filter of order {self.order:g}"


@dataclasses.dataclass(frozen=True)
class GaussianFilter(PrivacyFilter):
    """Sums μ² = 1/σ² of Gaussian steps without sampling: the accountant of a budget for choices.

        model.fit(batches, callbacks=[PrivacyBudget(2.0, 1e-6, accountant=GaussianFilter())])

    Guarantee: under a budget of ε at δ by this accountant, all steps together are as private as one
    Gaussian release of that ε at δ, at every other δ too, whatever was chosen after looking at
    released results: noise, sampling, number of steps, when to stop. ε and δ must be fixed before
    the first step, and be no choice of results. Nothing is lost to adaptivity: the sum is the exact
    one of steps that are fixed beforehand.

    Not covered: sampling that amplifies, private selection and Laplace noise, which are refused. It
    is for full batches and for shuffled or fixed epochs, with independent or correlated noise.

    Reference: Smith and Thakurta, "Fully adaptive composition for Gaussian differential privacy",
    2022, arXiv:2210.17520.
    """

    kind: ClassVar[str] = "gaussian"

    def _check(self, segment):
        super()._check(segment)
        if segment.sampling.is_amplified:
            self._refuse(
                f"{segment.sampling.kind!r} sampling, which amplifies",
                "Use RenyiFilter, or batches that are not sampled (full, shuffled, fixed_order)",
            )

    def _epsilon(self, segments, delta, max_distinct, optimistic):
        events = [segment.event(max_distinct, optimistic) for segment in segments]
        squared_mu = sum(map(_squared_mu, events))
        return self._epsilon_of_gaussian(squared_mu**-0.5 if squared_mu else math.inf, delta)

    def limit(self, epsilon: float, delta: float) -> float:
        return _sigma_of_gaussian(epsilon, delta) ** -2

    def _noise_multiplier(self, limit):
        return limit**-0.5

    def _epsilon_of_gaussian(self, noise_multiplier, delta):
        return _epsilon_of_gaussian(noise_multiplier, delta)

    def __str__(self):
        return "Gaussian filter"


def _accountant(segments, orders=None):
    """dp_accounting's of Rényi divergences, without what is not proved."""
    sampling = segments[0].sampling
    kind = ProvedRdpAccountant if sampling.adjacency == "replace_one" else UnamplifiedRdpAccountant
    return kind(orders, sampling.neighboring_relation)


def _delta_of_gaussian(sigma, epsilon):
    return float(GaussianPrivacyLoss(sigma).get_delta_for_epsilon(epsilon))


def _epsilon_of_gaussian(sigma, delta):
    if hasattr(dp_accounting, "get_epsilon_gaussian"):  # from 0.5 on
        return float(dp_accounting.get_epsilon_gaussian(sigma, delta))
    if not sigma:
        return math.inf
    if math.isinf(sigma) or _delta_of_gaussian(sigma, 0.0) <= delta:
        return 0.0
    high = 1.0
    while _delta_of_gaussian(sigma, high) > delta:
        high *= 2
    found = optimize.brentq(lambda each: _delta_of_gaussian(sigma, each) - delta, 0.0, high)
    return found * (1 + 1e-9)


def _sigma_of_gaussian(epsilon, delta):
    if hasattr(dp_accounting, "get_sigma_gaussian"):
        return float(dp_accounting.get_sigma_gaussian(epsilon, delta))

    def excess(log_sigma):
        return _delta_of_gaussian(math.exp(log_sigma), epsilon) - delta

    low = high = 0.0
    while excess(high) > 0:
        high += 1.0
    while excess(low) < 0:
        low -= 1.0
    return math.exp(optimize.brentq(excess, low, high)) * (1 + 1e-9)


def _squared_mu(event):
    """μ² of Gaussian releases.

    Raises:
        ValueError: there is another release.
    """
    match event:
        case dp_accounting.NoOpDpEvent():
            return 0.0
        case dp_accounting.NonPrivateDpEvent():
            return math.inf
        case dp_accounting.GaussianDpEvent():
            sigma = event.noise_multiplier
            return 1 / sigma / sigma if sigma else math.inf  # no error where it is tiny
        case dp_accounting.SelfComposedDpEvent():
            return event.count * _squared_mu(event.event)
        case dp_accounting.ComposedDpEvent():
            return sum(map(_squared_mu, event.events))
    raise ValueError(f"A Gaussian filter cannot price {type(event).__name__}: it is not Gaussian.")


@dataclasses.dataclass(frozen=True)
class FilterBudget:
    """The budget of a privacy filter, which segments keep that ran under it.

    Attributes:
        filter: the `PrivacyFilter`.
        epsilon: ε at `delta`, positive and finite.
        delta: δ in (0, 1).
        before: of a segment, how many steps its ledger had when it began: those that were held
            against the limit together with its own. Not compared.

    Raises:
        ValueError: the filter has no such budget.
    """

    filter: PrivacyFilter
    epsilon: float
    delta: float
    before: int = dataclasses.field(default=0, compare=False)

    def __post_init__(self):
        if not 0 < self.epsilon < math.inf:
            raise ValueError(
                f"A {self.filter} needs an epsilon that is positive and finite: its limit is the "
                f"guarantee. Received {self.epsilon!r}."
            )
        if not 0 < self.delta < 1:
            raise ValueError(
                f"A {self.filter} needs a delta in (0, 1), e.g. 1e-6; received {self.delta!r}."
            )
        self.filter.limit(self.epsilon, self.delta)

    @property
    def noise_multiplier(self) -> float:
        """That of one Gaussian release that reaches the limit."""
        return self.filter._noise_multiplier(self.filter.limit(self.epsilon, self.delta))

    def loss_distribution(self) -> PrivacyLossDistribution | None:
        """That of the guarantee, where it is that of one Gaussian release; else None."""
        if not isinstance(self.filter, GaussianFilter):
            return None
        accountant = LossDistributionAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
        return accountant.compose(dp_accounting.GaussianDpEvent(self.noise_multiplier)).composed()

    def after(self, steps: int) -> FilterBudget:
        """The same, of a segment that begins after so many steps."""
        return dataclasses.replace(self, before=steps)

    def is_kept(self, segments: Sequence[Segment]) -> bool:
        """Whether these segments were held against the limit together, and are within it.

        Of merged ledgers that were begun, or went on, without knowing of each other each kept the
        limit alone: that their sum happens to be within it is a result, and promises nothing.
        """
        known = 0
        for before, steps in sorted((s.filter.before, s.steps) for s in segments if s.filter):
            if before != known:
                return False
            known += steps
        spent = self.filter.epsilon(segments, self.delta)
        return spent <= self.epsilon * (1 + _TOLERANCE)

    def epsilon_at(self, delta: float) -> float:
        """ε that is guaranteed at another δ: of the limit, whatever the steps were."""
        if delta == self.delta:
            return self.epsilon
        return self.filter._epsilon_of_gaussian(self.noise_multiplier, delta)

    def get_config(self) -> dict[str, Any]:
        """All of it, as JSON-able values."""
        own = {"epsilon": self.epsilon, "delta": self.delta, "before": self.before}
        return self.filter.get_config() | own

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> FilterBudget:
        """The budget that `get_config` described."""
        given = dict(config)
        own = {name: given.pop(name) for name in ("epsilon", "delta", "before")}
        return cls(PrivacyFilter.from_config(given), **own)

    def __str__(self):
        return f"{self.filter}, epsilon = {self.epsilon:g} at delta = {self.delta:g}"


def common_filter(segments: Iterable[Segment]) -> FilterBudget | None:
    """The `FilterBudget` under which all of these segments ran; None where there is not one."""
    found = {segment.filter for segment in segments}
    return found.pop() if len(found) == 1 else None


def kept_filter(segments: Sequence[Segment]) -> FilterBudget | None:
    """The same, if they kept its limit: it then is their guarantee, whatever was chosen."""
    found = common_filter(segments)
    return found if found is not None and found.is_kept(segments) else None


def is_lost(segments: Sequence[Segment]) -> bool:
    """Whether some ran under a filter, and all together did not keep it: nothing is promised.

    Each may have been chosen by looking at the results of others, so that what they spent as if
    they had been fixed bounds nothing.
    """
    return any(each.filter for each in segments) and kept_filter(segments) is None


def admit(segments: Sequence[Segment], new: Segment) -> None:
    """Refuses a segment that would leave the filter under which the ones before ran.

    Raises:
        ValueError: as `check_held`, or the filter cannot price it.
    """
    check_held(segments, new.filter)
    if new.filter is not None:
        new.filter.filter.check([*(segment for segment in segments if segment.steps), new])


def check_held(segments: Sequence[Segment], new: FilterBudget | None) -> None:
    """Refuses a filter, or none, for the steps after these segments.

    Raises:
        ValueError: earlier steps ran under another one, or it would begin after the first step.
    """
    held = {segment.filter for segment in segments if segment.steps}
    if new is None:
        # Of a merged ledger with several filters, or steps without one, nothing is left to keep.
        if len(held) == 1 and None not in held:
            raise ValueError(
                f"Earlier steps ran under a privacy filter ({held.pop()}), whose guarantee is for "
                "all steps: one without it would void what was promised. Pass the same "
                "PrivacyBudget, with its accountant, to fit, or assign it to model.budget."
            )
    elif None in held:
        raise ValueError(
            f"A privacy filter ({new}) must be fixed before the first step: earlier steps "
            "ran without one, and their results may have had a part in choosing it. Begin with a "
            "model and a ledger that have spent nothing, or use accountant='auto' with steps that "
            "are fixed beforehand."
        )
    elif held - {new}:
        raise ValueError(
            f"Earlier steps ran under another privacy filter ({held.pop()}) than that of the next "
            f"({new}). Its order, epsilon and delta are fixed before the first step, "
            "whatever the results are: pass the same PrivacyBudget. To spend less, stop earlier."
        )
