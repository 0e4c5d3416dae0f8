"""What training would cost, before it starts."""

from __future__ import annotations

from dp_keras_opt.accounting.calibration import number_of_steps, sampling_of
from dp_keras_opt.accounting.caps import warn_of_cap
from dp_keras_opt.accounting.ledger import Ledger
from dp_keras_opt.accounting.protocols import Optimizer, SampledBatches
from dp_keras_opt.accounting.sampling import Sampling
from dp_keras_opt.types import Accountant


def epsilon(
    optimizer: Optimizer,
    sampling: Sampling | SampledBatches,
    steps: int | None = None,
    delta: float | None = None,
    accountant: Accountant = "auto",
    exact: bool = False,
    *,
    epochs: int | None = None,
) -> float:
    """Epsilon of training for so many steps, or epochs.

    Args:
        optimizer: an optimizer of `dp_keras_opt.optimizers`, with its noise multiplier set.
        sampling: the `Sampling` of the batches, or the `data.Batches` that training will take.
        steps: number of training steps, from 0; or
        epochs: number of passes over the data, of `steps_per_epoch` steps each: those of the
            batches, or of the sampling.
        delta: probability that the guarantee fails, in (0, 1); should be well below 1/n. 0 for
            optimizers with Laplace noise.
        accountant: "auto" (default), the smallest of the bounds that apply to all steps together;
            "pld"; "rdp", which adds up pure epsilons for Laplace noise; "pure"; or a privacy
            filter, such as `RenyiFilter`.
        exact: whether noise levels of a schedule are never rounded down (see `Ledger.epsilon`).

    Returns:
        A float; `math.inf` where something is released without noise.

    Raises:
        ValueError: an argument is out of range or missing, the optimizer's batch size is not that
            of the sampling, or the accountant cannot price this sampling.
    """
    ledger = _planned(optimizer, sampling, steps, epochs)
    found = ledger.epsilon(delta, accountant, exact)
    for segment in ledger.segments:
        warn_of_cap(segment, delta)  # type: ignore[arg-type]
    return found


def statement(
    optimizer: Optimizer,
    sampling: Sampling | SampledBatches,
    steps: int | None = None,
    delta: float | None = None,
    accountant: Accountant = "auto",
    group_size: int = 1,
    *,
    epochs: int | None = None,
) -> str:
    """The guarantee of training for so many steps, or epochs, in words.

    Args:
        optimizer, sampling, steps, delta, accountant, epochs: as in `epsilon`.
        group_size: k, to add the guarantee for any k privacy units together.

    Returns:
        Text. After training, `Ledger.statement` says the same of what really ran.

    Raises:
        ValueError: as `epsilon`.
    """
    ledger = _planned(optimizer, sampling, steps, epochs)
    return ledger.statement(delta, accountant, group_size)


def _planned(optimizer, sampling, steps, epochs):
    batches, sampling = sampling, sampling_of(sampling)
    return Ledger.of(optimizer, sampling, number_of_steps(steps, epochs, batches, at_least=0))
