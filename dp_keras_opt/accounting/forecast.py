"""What training would cost, before it starts."""

from __future__ import annotations

from dp_keras_opt.accounting.caps import warn_of_cap
from dp_keras_opt.accounting.ledger import Ledger
from dp_keras_opt.accounting.protocols import Optimizer
from dp_keras_opt.accounting.sampling import Sampling
from dp_keras_opt.types import Accountant


def epsilon(
    optimizer: Optimizer,
    sampling: Sampling,
    steps: int,
    delta: float,
    accountant: Accountant = "auto",
    exact: bool = False,
) -> float:
    """Epsilon of `steps` training steps.

    Args:
        optimizer: an optimizer of `dp_keras_opt.optimizers`, with its noise multiplier set.
        sampling: the `Sampling` of the batches.
        steps: number of training steps, from 0.
        delta: probability that the guarantee fails, in (0, 1); should be well below 1/n. 0 for
            optimizers with Laplace noise.
        accountant: "auto" (default), the smallest of the bounds that apply to all steps together;
            "pld"; "rdp", which adds up pure epsilons for Laplace noise; "pure"; or a privacy
            filter, such as `RenyiFilter`.
        exact: whether noise levels of a schedule are never rounded down (see `Ledger.epsilon`).

    Returns:
        A float; `math.inf` where something is released without noise.

    Raises:
        ValueError: an argument is out of range, the optimizer's batch size is not that of the
            sampling, or the accountant cannot price this sampling.
    """
    ledger = Ledger.of(optimizer, sampling, steps)
    found = ledger.epsilon(delta, accountant, exact)
    for segment in ledger.segments:
        warn_of_cap(segment, delta)
    return found


def statement(
    optimizer: Optimizer,
    sampling: Sampling,
    steps: int,
    delta: float,
    accountant: Accountant = "auto",
    group_size: int = 1,
) -> str:
    """The guarantee of `steps` training steps in words.

    Args:
        optimizer, sampling, steps, delta, accountant: as in `epsilon`.
        group_size: k, to add the guarantee for any k privacy units together.

    Returns:
        Text. After training, `Ledger.statement` says the same of what really ran.

    Raises:
        ValueError: as `epsilon`.
    """
    return Ledger.of(optimizer, sampling, steps).statement(delta, accountant, group_size)
