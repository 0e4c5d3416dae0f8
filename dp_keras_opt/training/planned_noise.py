"""What `fit` finds out before its first step: batch size, length of the noise, noise multiplier.

All of it follows from public numbers (how batches are sampled, how many there will be, the budget)
and from the ledger, never from the data. It is settled before anything is traced.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Sequence
from typing import Any

from dp_keras_opt.accounting import Ledger, Sampling
from dp_keras_opt.accounting.budget import Budget
from dp_keras_opt.accounting.calibration import calibrate
from dp_keras_opt.accounting.plan import Plan


def settle(
    optimizer: Any,
    sampling: Sampling,
    steps: float,
    budget: Budget | None,
    ledger: Ledger,
    lengths: Sequence[float] = (),
) -> str | None:
    """Sets what the optimizer was left to find out.

    - `batch_size`, where it is None: that of the sampling.
    - the steps of a noise mechanism or schedule that has none: `steps`.
    - `noise_multiplier`, where it is None: the least with which `steps` steps, and what the ledger
      says was spent before, keep the budget. If the ledger holds a run with the same plan that was
      interrupted, it is that of the plan, so that the rest of its steps keep the budget.

    Args:
        optimizer: the optimizer; it is left as it was where this fails.
        sampling: of the batches.
        steps: how many steps will run, infinite if not known.
        budget: the `Budget`, or None.
        ledger: what was spent before.
        lengths: other numbers of steps that the plan of an interrupted run may have: those of all
            epochs, where this `fit` goes on with `initial_epoch`.

    Returns:
        What was found, in words; None where the noise multiplier was given.

    Raises:
        ValueError: there is no budget, or no known number of steps, to find the noise for; the
            budget cannot be met, or is spent.
    """
    before = optimizer.batch_size, optimizer.noise, optimizer.noise_schedule
    try:
        for name in ("noise", "noise_schedule"):
            part = getattr(optimizer, name)
            if part.is_open:
                _check_known(steps, f"{name}={type(part).__name__}(steps=None)")
        optimizer.settle(sampling, steps)
        return _settle_multiplier(optimizer, sampling, steps, budget, ledger, lengths)
    except Exception:
        if not optimizer.built:
            optimizer.batch_size, optimizer.noise, optimizer.noise_schedule = before
        raise


def _settle_multiplier(optimizer, sampling, steps, budget, ledger, lengths):
    if optimizer.noise_multiplier is not None:
        return None
    if budget is None or math.isinf(budget.epsilon):
        raise ValueError(
            "noise_multiplier is not set. Pass it; or pass "
            "dp_keras_opt.callbacks.PrivacyBudget(epsilon, delta) to fit, which then finds the "
            "least noise for its steps; or find it with "
            "dp_keras_opt.accounting.calibrate(optimizer, batches, epochs=..., epsilon=..., "
            "delta=...)."
        )
    _check_known(steps, "noise_multiplier=None")
    for length in (steps, *lengths):
        plan = _interrupted(optimizer, ledger, Plan(sampling, length, *_terms(budget)))
        if plan is not None:
            optimizer.noise_multiplier = plan.noise_multiplier
            optimizer.plan = plan
            return (
                f"noise_multiplier = {plan.noise_multiplier:.5g}, as planned before the "
                f"interruption: the least for {plan.steps} steps within {budget}."
            )
    spent = ledger if ledger.steps else None
    multiplier = calibrate(optimizer, sampling, steps, *_terms(budget), spent=spent)
    return (
        f"noise_multiplier = {multiplier:.5g}: the least for {steps} steps within {budget}"
        f"{' beside what was spent before' if spent else ''}."
    )


def _terms(budget):
    return budget.epsilon, budget.delta, budget.accountant


def _check_known(steps, what):
    if math.isinf(steps):
        raise ValueError(
            f"{what} is to be found for the steps that will run, and how many batches an epoch "
            "has is not known here. Pass steps_per_epoch to fit."
        )
    if steps < 1:
        raise ValueError(f"{what} is to be found for the steps that will run, and none will.")


def _interrupted(optimizer, ledger, wanted):
    """The plan in the ledger that is as wanted, and of which steps are left; None without any."""
    runs = [
        segment
        for segment in ledger.segments
        if segment.plan is not None
        and _meets(segment.plan, wanted)
        and segment.releases == optimizer.releases_for(segment.plan.noise_multiplier)
        and segment.schedule == optimizer.noise_schedule
    ]
    is_left = runs and sum(segment.steps for segment in runs) < wanted.steps
    return runs[-1].plan if is_left else None


def _meets(plan, wanted):
    """Whether a plan is the one that is wanted, perhaps found when "rdp" was what is "auto" now."""
    plan = dataclasses.replace(plan, noise_multiplier=None)
    if (plan.accountant, wanted.accountant) == ("rdp", "auto"):
        plan = dataclasses.replace(plan, accountant="auto")
    return plan == wanted


def what_is_left(optimizer: Any, budget: Budget, ledger: Ledger) -> str:
    """Of a plan that an earlier `fit` has begun, in words."""
    spent = ledger.epsilon(budget.delta, budget.accountant)
    left = max(budget.limit(ledger) - ledger.current.steps, 0) if ledger.current else 0
    return (
        f"noise_multiplier = {optimizer.noise_multiplier:.5g}, as before. Of the budget, {budget}, "
        f"{spent:.4g} is spent, which leaves {left} steps."
    )


def warn_of_search(callbacks: Sequence[Any]) -> None:
    """Warns where each of several trainings would find noise for the whole budget."""
    if any(type(callback).__module__.split(".")[0] == "keras_tuner" for callback in callbacks):
        warnings.warn(
            "KerasTuner trains one model after the other, and each finds noise for the whole "
            "budget: who sees the results of n trials has n times ε. "
            "dp_keras_opt.tuning.tune searches within one budget.",
            stacklevel=4,
        )
