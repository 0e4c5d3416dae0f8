"""The most that may be spent, and how many steps of a ledger keep within it."""

from __future__ import annotations

import dataclasses
from typing import Any

from dp_keras_opt.accounting.accountant import check_budget
from dp_keras_opt.accounting.ledger import Ledger
from dp_keras_opt.accounting.privacy_filters import FilterBudget, PrivacyFilter
from dp_keras_opt.types import Accountant


@dataclasses.dataclass
class Budget:
    """ε at δ, the most that all steps of a ledger may spend together.

    Args:
        epsilon: ε ≥ 0, or infinite.
        delta: δ in (0, 1); 0 with Laplace noise.
        accountant: "auto", "rdp", "pld" or "pure"; or a privacy filter (`RenyiFilter`,
            `GaussianFilter`), whose budget holds whatever results decide about the steps to come.

    Raises:
        ValueError: an argument is out of range, or the filter has no such budget.
    """

    epsilon: float
    delta: float
    accountant: Accountant = "auto"
    #: The last answer of `limit`, and what it depended on: the search takes seconds.
    _found: tuple[Any, int] = dataclasses.field(
        default=(None, 0), init=False, repr=False, compare=False
    )

    def __post_init__(self):
        check_budget(self.epsilon, self.delta, self.accountant)
        self.epsilon, self.delta = float(self.epsilon), float(self.delta)  # as JSON takes them
        _ = self.filter  # which refuses a budget that it cannot keep

    @property
    def filter(self) -> FilterBudget | None:
        """What a ledger keeps of it, if the accountant is a privacy filter; else None."""
        if not isinstance(self.accountant, PrivacyFilter):
            return None
        return FilterBudget(self.accountant, self.epsilon, self.delta)

    def affords(self, ledger: Ledger, steps: int) -> bool:
        """Whether this many further steps of the ledger's current segment keep the budget.

        Raises:
            ValueError: as `limit`.
        """
        return self._current(ledger).steps + steps <= self.limit(ledger)

    def limit(self, ledger: Ledger) -> int:
        """How many steps the ledger's current segment may have in all.

        Raises:
            ValueError: no segment has begun, or the accountant cannot price the steps.
        """
        current = self._current(ledger)
        # What else was spent, by whomever: another model may have the same ledger.
        spent = tuple((other.run, other.steps) for other in ledger.segments if other is not current)
        key = current.run, spent, self.epsilon, self.delta, self.accountant
        if self._found[0] != key:
            more = ledger.affordable_steps(self.epsilon, self.delta, self.accountant)
            self._found = (key, current.steps + more)
        return self._found[1]

    @staticmethod
    def _current(ledger):
        if ledger.current is None:
            raise ValueError("The ledger has no current segment: call begin first.")
        return ledger.current

    def __str__(self):
        by = f", by a {self.accountant}" if isinstance(self.accountant, PrivacyFilter) else ""
        return f"ε = {self.epsilon:g} at δ = {self.delta:g}{by}"
