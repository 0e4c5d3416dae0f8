"""Which noise, and which batches, leave the least error in the weights for a privacy budget.

Everything that goes in is public: the number of examples and of steps, ε, δ, and the rule. No data
are looked at, so the plan costs nothing.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Sequence

from dp_keras_opt.accounting.calibration import calibrate
from dp_keras_opt.accounting.protocols import Optimizer
from dp_keras_opt.accounting.sampling import Sampling, need_sampling
from dp_keras_opt.checks import is_number, whole_number
from dp_keras_opt.noise import planner
from dp_keras_opt.noise.correlated import BandedMatrix
from dp_keras_opt.noise.mechanism import Mechanism
from dp_keras_opt.noise.schedules import Constant
from dp_keras_opt.tables import aligned
from dp_keras_opt.types import Accountant

_BYTES = 4  # of a float32 weight


@dataclasses.dataclass(frozen=True)
class NoiseChoice:
    """Noise on batches of one kind, with as much of it as the budget asks for.

    Attributes:
        mechanism: the `noise.Mechanism`, to be passed as `noise=`.
        sampling: the `Sampling` of the batches.
        steps: how many, in whole rounds of the groups or passes of an order.
        noise_multiplier: σ.
        error: root mean square, over the steps, of the noise in a weight, in units of learning rate
            × clip norm / mean batch size: where batches are smaller, so is what they say.
        buffers: how many copies of the model are kept.
    """

    mechanism: Mechanism
    sampling: Sampling
    steps: int
    noise_multiplier: float
    error: float
    buffers: int


@dataclasses.dataclass(frozen=True)
class NoisePlan:
    """What `plan_noise` found.

    Attributes:
        choices: a tuple of `NoiseChoice`, that of least error first.
        num_weights: of the model, or None.
    """

    choices: tuple[NoiseChoice, ...]
    num_weights: int | None = None

    @property
    def best(self) -> NoiseChoice:
        """That of least error."""
        return self.choices[0]

    def __str__(self) -> str:
        """The choices as a table, with how much worse each is than the best."""
        titles = ("noise", "batches", "steps", "σ", "error", "against the best", "memory")
        rows = []
        for choice in self.choices:
            worse = choice.error / self.best.error - 1
            rows.append(
                (
                    _name_of(choice.mechanism),
                    _batches_of(choice.sampling),
                    f"{choice.steps}",
                    f"{choice.noise_multiplier:.4g}",
                    f"{choice.error:.4g}",
                    f"+{worse:.1%}" if worse else "best",
                    self._memory(choice),
                )
            )
        return aligned(titles, rows)

    def _memory(self, choice):
        if self.num_weights is None:
            return f"{choice.buffers} × model"
        return f"{choice.buffers * self.num_weights * _BYTES / 1e6:,.1f} MB"


def plan_noise(
    optimizer: Optimizer,
    sampling: Sampling,
    steps: int | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    accountant: Accountant = "auto",
    *,
    epochs: int | None = None,
    horizon: float | None = None,
    samplings: Sequence[Sampling] | None = None,
    num_weights: int | None = None,
    memory_limit: float | None = None,
) -> NoisePlan:
    """Compares kinds of noise and of batches at one budget, by the error of the weights.

        plan = plan_noise(optimizer, Sampling.poisson(60_000, 250), 960, epsilon=2.0, delta=1e-6)
        print(plan)

    Independent noise; banded noise on groups that take turns, amplified, where more bands leave
    less noise in the weights but fewer examples to draw from; and noise of few buffers on epochs in
    one order, where the adjacency has such epochs. The weights are taken to be the rule's sums of
    noisy gradients (`optimizer.workload`): a second moment, which is not known beforehand, is left
    out.

    Args:
        optimizer: an optimizer of `dp_keras_opt.optimizers`; nothing of it is changed.
        sampling: a `Sampling` with the number of examples, the batch size, the adjacency and the
            unit that are wanted. Its kind is free, unless `samplings` is given.
        steps: number of training steps, at least 1; where groups take turns, or an order comes
            again and again, rounded up to whole rounds; or
        epochs: number of passes over the data.
        epsilon: the budget at `delta`, positive and finite.
        delta: probability that the guarantee fails, in (0, 1).
        accountant: as in `calibrate`.
        horizon: None where all noise stays in the weights; or for how many steps the weights hold
            on to a gradient, a public guess. Training forgets: around a minimum of curvature κ,
            noise fades within 1/(learning rate × κ) steps. The shorter the horizon, the more the
            noise of each single step counts, and the fewer bands are best.
        samplings: None, or the kinds of batches to choose from.
        num_weights: None, or how many trainable weights the model has, to state memory in bytes.
        memory_limit: None, or how many bytes past noise may take; needs `num_weights`.

    Returns:
        A `NoisePlan`: for each kind of batches the best mechanism, best first.

    Raises:
        ValueError: an argument is out of range or missing; the budget cannot be met by any choice.

    Warns:
        UserWarning: `memory_limit` holds no copy of the weights.
    """
    need_sampling(sampling)
    if (steps is None) == (epochs is None):
        raise ValueError("Give steps or epochs, and not both.")
    max_buffers = _max_buffers(num_weights, memory_limit)
    choices, refused = [], []
    for each in samplings or _samplings(sampling, _steps(sampling, steps, epochs), max_buffers):
        length = _steps(each, steps, epochs)
        plain = _with_noise(optimizer, "gaussian", each.divisor)
        workload = plain.workload(length).within(horizon)
        (option, *_) = planner.options(each, length, workload, max_buffers)
        noisy = _with_noise(optimizer, option.mechanism, each.divisor)
        try:
            sigma = calibrate(noisy, each, length, epsilon, delta, accountant)
        except ValueError as refusal:
            refused.append(refusal)
            continue
        levels = noisy.noise_schedule
        if not isinstance(levels, Constant):
            workload = workload.at_levels(levels.alphas(0, length))
        error = sigma * workload.spread(option.mechanism, length) / each.fill
        choices.append(NoiseChoice(option.mechanism, each, length, sigma, error, option.buffers))
    if not choices:
        raise refused[0]
    choices.sort(key=lambda choice: (round(choice.error, 9), choice.buffers))
    return NoisePlan(tuple(choices), num_weights)


def _with_noise(optimizer, mechanism, batch_size):
    """The same optimizer, not built, with this noise and no multiplier yet."""
    changed = {"noise": mechanism, "batch_size": batch_size, "noise_multiplier": None}
    return type(optimizer).from_config(optimizer.get_config() | changed)


def _max_buffers(num_weights, memory_limit):
    if num_weights is not None:
        num_weights = whole_number(num_weights, "num_weights", 1)
    if memory_limit is None:
        return None
    if num_weights is None:
        raise ValueError(
            "memory_limit is in bytes: give num_weights, the number of trainable weights, too."
        )
    if not is_number(memory_limit) or not 0 <= memory_limit < math.inf:
        raise ValueError(f"memory_limit must be a number of bytes; received {memory_limit!r}.")
    found = int(memory_limit // (_BYTES * num_weights))
    if not found:
        warnings.warn(
            f"memory_limit={memory_limit} bytes holds no copy of the {num_weights} weights, which "
            f"takes {_BYTES * num_weights}: only noise that keeps none of the past is compared.",
            stacklevel=3,
        )
    return found


def _steps(sampling, steps, epochs):
    """In whole periods of such batches, and no fewer than asked for."""
    if epochs is not None:
        return whole_number(epochs, "epochs", 1) * sampling.steps_per_epoch
    return sampling.period * math.ceil(whole_number(steps, "steps", 1) / sampling.period)


def _groups(steps, most):
    """About 2, 4, 8, …, up to `most`: of the numbers near, those that add the fewest steps."""
    for wanted in planner.powers_of_two(most):
        near = range(math.ceil(0.75 * wanted), min(math.floor(1.25 * wanted), most) + 1)
        yield min(near, key=lambda groups: (-steps % groups, abs(groups - wanted)))


def _samplings(sampling, steps, max_buffers):
    """Kinds of batches of that many examples, adjacency and unit."""
    n, size, adjacency = sampling.num_examples, sampling.batch_size, sampling.adjacency
    named = {
        "adjacency": adjacency,
        "unit": sampling.unit,
        "examples_per_unit": sampling.examples_per_unit,
    }
    if sampling.views > 1:
        of_one = dataclasses.replace(sampling, views=1)
        return [
            dataclasses.replace(each, views=sampling.views)
            for each in _samplings(of_one, steps, max_buffers)
        ]
    if size == n or sampling.batch_sizes is not None:
        return [sampling]
    found = [Sampling.poisson(n, size, **named)]
    most = planner.MOST_BANDS if max_buffers is None else max_buffers + 1
    for groups in sorted(set(_groups(steps, min(most, n // size, steps)))):
        found.append(Sampling.cyclic_poisson(n, size, groups, **named))
    if adjacency != "add_or_remove_one":
        found.append(Sampling.fixed_order(n, size, **named))
    return found


def _name_of(mechanism):
    if isinstance(mechanism, BandedMatrix):
        return f"BandedMatrix, {mechanism.bands} bands"
    slots = getattr(mechanism, "slots", 0)
    return type(mechanism).__name__ + (f", {slots} buffers" if slots else "")


def _batches_of(sampling):
    words = sampling.kind.replace("_", " ")
    return f"{words}, {sampling.groups} groups" if sampling.groups > 1 else words
