"""Which examples come into which batch: the random draws that ε rests on. NumPy only."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dp_keras_opt.accounting.sampling import Sampling
from dp_keras_opt.data import users
from dp_keras_opt.noise.entropy import numpy_generator, process


@dataclasses.dataclass(frozen=True, eq=False)
class PoissonSampler:
    """Iterates over the draws of Poisson batches, int64 arrays of indices of examples.

    At step t each unit of group t mod groups is drawn independently, with probability
    `sampling.sampling_probability`, or with B_t/n where the expected sizes change with the step. A
    draw is padded to whole blocks of units, at least one: i stands for example i, and ~i, which is
    negative, for padding with the values of example i.

    Attributes:
        sampling: the `Sampling` that is drawn.
        groups: the indices of the units of each group; a single group unless they take turns.
        steps: number of draws of an iteration.
        block: units that a draw is padded to a multiple of.
        examples_of_unit: None where a unit is one example; else the indices of each unit's.
        root: None, or the generator that all draws come from: then they are known to whoever knows
            its seed.
    """

    sampling: Sampling
    groups: Sequence[np.ndarray]
    steps: int
    block: int
    examples_of_unit: Sequence[np.ndarray] | None = None
    root: Any = None

    def __iter__(self) -> Iterator[np.ndarray]:
        # A seeded iteration has a stream of its own: how far an earlier one was prefetched before
        # it was abandoned is a matter of timing, and must not change the draws of this one.
        seeded = None if self.root is None else self.root.spawn(1)[0]
        passes = self.sampling.passes
        first = passes.begin() if passes else 0  # sizes may change with the step
        for step in range(self.steps):
            rng = seeded or numpy_generator()  # nothing that a fork of the process could repeat
            units = self._draw(rng, self.groups[step % len(self.groups)], first + step)
            yield rows_of(rng, units, self.examples_of_unit, self.sampling)

    def _draw(self, rng, members, step):
        """The units of one draw, padded with -1.

        n independent coins with probability q show heads Binomial(n, q) times and, given that
        number, on every subset of that size with equal probability. So drawing the number and then
        a uniform subset is the same distribution, without n random numbers a step. What is kept of
        a draw that is cut is a uniform subset of a uniform subset, and so a uniform one.
        """
        size = self._size(rng, members, step)
        size = min(size, self.sampling.max_batch_size or size)
        drawn = members[rng.choice(len(members), size, replace=False, shuffle=False)]
        return in_blocks(drawn, self.block)

    def _size(self, rng, members, step):
        """How many are drawn."""
        sizes, probability = self.sampling.batch_sizes, self.sampling.sampling_probability
        if sizes is not None:
            probability = sizes.sizes(step, 1)[0] / self.sampling.num_examples
        return rng.binomial(len(members), probability)


class WithoutReplacementSampler(PoissonSampler):
    """The same with batches of exactly B units, each a fresh, uniformly random subset of them."""

    def _size(self, rng, members, step):
        return self.sampling.batch_size


@dataclasses.dataclass(frozen=True, eq=False)
class BallsInBinsSampler:
    """Iterates over the batches of an epoch, of which each unit is in one: as `PoissonSampler`.

    Each iteration puts each unit into one of the batches, uniformly and independently.

    Attributes:
        sampling: the `Sampling` that is drawn, with its `Passes`.
        units: the indices of the units.
        block, examples_of_unit, root: as for `PoissonSampler`.
    """

    sampling: Sampling
    units: np.ndarray
    block: int
    examples_of_unit: Sequence[np.ndarray] | None = None
    root: Any = None

    def __iter__(self) -> Iterator[np.ndarray]:
        rng = numpy_generator() if self.root is None else self.root.spawn(1)[0]
        assert self.sampling.passes is not None  # for the type checker
        self.sampling.passes.begin()
        here, steps = process(), self.sampling.steps_per_epoch
        bins = rng.integers(steps, size=len(self.units))
        ends = np.cumsum(np.bincount(bins, minlength=steps))
        for drawn in np.split(self.units[np.argsort(bins, kind="stable")], ends[:-1]):
            if process() != here:
                raise RuntimeError(
                    "This process is a fork of the one that drew who is in which batch of this "
                    "epoch: both would use one draw. Iterate over the batches anew."
                )
            yield rows_of(rng, in_blocks(drawn, self.block), self.examples_of_unit, self.sampling)


def in_blocks(drawn, block):
    """The units that were drawn, padded with -1 to whole blocks, at least one."""
    units = np.full(block * max(1, -(-len(drawn) // block)), -1, np.int64)
    units[: len(drawn)] = drawn
    return units


def rows_of(rng, units, examples_of_unit, sampling):
    """The examples of the units of a batch; of a unit that is one example, itself."""
    if examples_of_unit is None:
        return units
    return users.examples_of(rng, examples_of_unit, units, sampling.examples_per_unit)


def random_groups(n, groups, seed):
    """The members of each group, arrays of indices: each of n units is in one of them at random."""
    group = numpy_generator(seed).integers(groups, size=n)
    return [np.flatnonzero(group == turn) for turn in range(groups)]


def random_order(n, steps, batch_size, seed):
    """The examples of each step of an epoch, [steps, batch_size]; -1 for padding."""
    order = np.full(steps * batch_size, -1, np.int64)
    order[:n] = numpy_generator(seed).permutation(n)[: len(order)]
    return order.reshape(steps, batch_size)
