"""What a run was meant to be, and the budget that its noise was found for."""

from __future__ import annotations

import dataclasses
from typing import Any

from dp_keras_opt.accounting.privacy_filters import PrivacyFilter
from dp_keras_opt.accounting.sampling import Sampling
from dp_keras_opt.types import Accountant


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run was meant to be: `calibrate` finds its noise, and a ledger keeps it.

    A plan is a statement of intent and bounds nothing: what is spent follows from the steps that
    the ledger has. It says which noise a run that was interrupted goes on with.

    Attributes:
        sampling: the `Sampling` of the batches.
        steps: number of training steps.
        epsilon: the budget at `delta`, for all that was planned together.
        delta: probability that the guarantee fails.
        accountant: "auto", "rdp", "pld", "pure" or a privacy filter.
        num_trainings: how many such trainings the budget is for.
        noise_multiplier: σ that was found for it; None where it is not found yet.
    """

    sampling: Sampling
    steps: int
    epsilon: float
    delta: float
    accountant: Accountant = "rdp"
    num_trainings: int = 1
    noise_multiplier: float | None = None

    def get_config(self) -> dict[str, Any]:
        """The attributes, as JSON-able values."""
        config = vars(self) | {"sampling": self.sampling.get_config()}
        if isinstance(self.accountant, PrivacyFilter):
            config["accountant"] = self.accountant.get_config()
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Plan:
        """The plan with these attributes."""
        read: dict[str, Any] = {"sampling": Sampling.from_config(config["sampling"])}
        if isinstance(config.get("accountant"), dict):
            read["accountant"] = PrivacyFilter.from_config(config["accountant"])
        return cls(**config | read)
