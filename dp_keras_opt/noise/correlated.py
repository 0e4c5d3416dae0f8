"""Correlated noise (DP-MF): the noise of a step takes back some of that of the steps before.

Each mechanism streams: the noise of step t is gain·(fresh draw + a weighted sum of a few buffers),
which then take in the draw or the noise. The buffers are past noise: beside a released gradient
they give the raw sum. They live in the `NoiseSource`, which nothing saves.
"""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Sequence
from typing import Any

import dp_accounting
import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from dp_keras_opt.checks import whole_number
from dp_keras_opt.noise import strategies
from dp_keras_opt.noise.distribution import drawn
from dp_keras_opt.noise.gaussian import NORMAL, NORMAL_AND_REST
from dp_keras_opt.noise.mechanism import Mechanism
from dp_keras_opt.noise.source import NoiseSource
from dp_keras_opt.noise.workload import Workload
from dp_keras_opt.types import Batching


class Correlated(Mechanism):
    """Gaussian noise that is correlated from step to step, accounted as one mechanism.

    The noise multiplier σ is relative to *one* participation: the noise is σ·C_clip·(C⁻¹z)_t, with
    C of unit column norm (for the tree: of entries 0 and 1). An example that takes part at several
    steps moves C x further, by `sensitivity`, and all steps of a run together are one release with
    the multiplier σ/sensitivity. Every run of training (a `fit`, a loaded model) begins the
    mechanism anew.
    """

    norm = "l2"
    is_correlated = True
    #: Number of steps that a run may take, None without end.
    length: int | None = None
    #: The diagonals of C that are not 0: in so many rows of C x one participation shows.
    bands = 1
    #: How many buffers there are for each variable.
    slots = 0

    def event(self, multiplier: float) -> dp_accounting.DpEvent:
        return dp_accounting.GaussianDpEvent(multiplier)

    @property
    def is_open(self) -> bool:
        return getattr(self, "steps", 0) is None

    def for_run(
        self, steps: int, sampling: Batching, workload: Workload | None = None
    ) -> Mechanism:
        return self.from_config(self.get_config() | {"steps": steps}) if self.is_open else self

    @abc.abstractmethod
    def sensitivity(
        self, steps: int, separation: int | None = None, levels: npt.ArrayLike | None = None
    ) -> float:
        """How far one example moves C x over a run of `steps` steps.

        Args:
            steps: of the run.
            separation: steps between two participations of an example; None for only one.
            levels: None, or factors α on the noise of the steps, (steps,), which make
                C·diag(α)⁻¹ of C.
        """

    @abc.abstractmethod
    def inverse(self, steps: int, columns: slice = slice(None)) -> np.ndarray:
        """Columns of C⁻¹, (steps, …): what the noise of each step has of each draw."""

    @abc.abstractmethod
    def mixing(self, step: tf.Tensor) -> tuple[Any, Any]:
        """(gain, weights of the buffers (slots,)) of the noise of step `step` of the run."""

    def remember(
        self, past: Sequence[tf.Variable], step: tf.Tensor, draw: tf.Tensor, noise: tf.Tensor
    ) -> None:
        """Has the buffers take in what later steps need of this one's draw and noise."""
        return

    def buffers(self, size: int, source: NoiseSource) -> list[tf.TensorSpec]:
        """The buffers of one release of `size` coordinates, all of them zeros at first."""
        return [tf.TensorSpec((size,), source.dtype)] * self.slots

    def recall(
        self, source: NoiseSource, past: Sequence[tf.Variable], size: int
    ) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
        """(fresh draw, what is below its last digit, past noise), (size,) each."""
        return *source.draw(NORMAL_AND_REST, (size,)), [buffer.read_value() for buffer in past]

    def check_sampling(self, sampling: Batching) -> None:
        """Refuses batches for which the sensitivity of a run is not known.

        Raises:
            ValueError: it is not known how far apart the steps of an example are, or they are too
                close for the bands.
        """
        if sampling.separation is None:
            raise ValueError(
                f"{type(self).__name__} noise needs batches in a fixed order or in turns, so that "
                f"it is known how far apart the steps of an example are; {sampling.kind} sampling "
                "says nothing of that. Use dp_keras_opt.data.fixed_order_epochs, or cyclic_poisson."
            )
        if sampling.is_poisson and sampling.groups < self.bands:
            raise ValueError(
                f"{type(self).__name__} noise with {self.bands} bands is accounted with cyclic "
                f"Poisson sampling only from {self.bands} groups on; received groups="
                f"{sampling.groups}. Use more groups or fewer bands."
            )

    def unit_noise(
        self, shapes: Sequence[Any], source: NoiseSource, stream: Any = 0
    ) -> list[tf.Tensor]:
        counter, past = source.memory.steps(stream), source.memory.buffers(stream)
        step = counter.read_value()
        gain, weights = (tf.cast(part, source.dtype) for part in self.mixing(step))
        counter.assign_add(1)
        if not past:
            return [gain * z for z in drawn(source, NORMAL, shapes)]
        sizes = [math.prod(shape) for shape in shapes]
        draw, rest, remembered = self.recall(source, past, sum(sizes))
        noise = _mixed(draw, rest, gain, weights, remembered)
        self.remember(past, step, draw, noise)
        parts = tf.split(noise, sizes)
        return [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]


@tf.function(jit_compile=True, autograph=False)
def _mixed(draw, rest, gain, weights, past):
    """gain·(draw + Σ weights·past), compiled: in one pass over the buffers."""
    for index, buffer in enumerate(past):
        draw += weights[index] * buffer
    # Where the terms cancel they have no digits left: the noise could be 0, or lie on a grid.
    last_digit = float(np.finfo(draw.dtype.as_numpy_dtype).eps)
    return gain * draw + 8 * last_digit * rest


def overwrite(past, slot, value):
    """past[slot] ← value. A variable each: TensorFlow would copy a stacked one at every step."""

    def write(buffer):
        buffer.assign(value)
        return slot

    tf.switch_case(tf.cast(slot, tf.int32), [functools.partial(write, buffer) for buffer in past])


class _Matrix(Correlated):
    """C by its rows: entry (t, t − k) is `rows[t][k]`, or `rows[k]` at every step."""

    def _set_rows(self, rows):
        self._rows = np.asarray(rows, np.float64)
        self.slots = self._rows.shape[-1] - 1

    def mixing(self, step: tf.Tensor) -> tuple[Any, Any]:
        rows = tf.constant(self._rows, tf.float32)
        row = rows if rows.shape.rank == 1 else tf.gather(rows, step)
        return 1 / row[0], -newest_first(row[1:], step)

    def remember(
        self, past: Sequence[tf.Variable], step: tf.Tensor, draw: tf.Tensor, noise: tf.Tensor
    ) -> None:
        overwrite(past, step % self.slots, noise)


def newest_first(of_lags, step):
    """What belongs to the buffers, in their order, of what belongs to lags 1, 2, … of a ring."""
    slots = of_lags.shape[0]
    if not slots:
        return of_lags
    return tf.gather(of_lags, (tf.cast(step, tf.int32) - tf.range(slots) - 1) % slots)


class Toeplitz(Correlated):
    """C by its first column, (T,) or shorter, the rest 0."""

    def _set_coefficients(self, coefficients, steps):
        self.coefficients = np.asarray(coefficients, np.float64)
        self._inverse = strategies.inverse_coefficients(self.coefficients, steps)
        self._stds = tf.constant(np.sqrt(np.cumsum(self._inverse**2)), tf.float32)
        self.length, self.bands = steps, len(self.coefficients)

    def sensitivity(
        self, steps: int, separation: int | None = None, levels: npt.ArrayLike | None = None
    ) -> float:
        return strategies.toeplitz_sensitivity(self.coefficients, steps, separation, levels)

    def inverse(self, steps: int, columns: slice = slice(None)) -> np.ndarray:
        lags = np.arange(steps)[:, None] - np.arange(steps)[columns]
        return np.where(lags >= 0, self._inverse[np.maximum(lags, 0)], 0.0)

    def std(self, step: int | tf.Tensor) -> float | tf.Tensor:
        return tf.gather(self._stds, step)


class _Banded(Toeplitz, _Matrix):
    def _set_coefficients(self, coefficients, steps):
        super()._set_coefficients(coefficients, steps)
        self._set_rows(self.coefficients)


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class BandedMatrix(_Banded):
    """Banded matrix factorisation (BandMF): the best Toeplitz matrix of a number of bands.

    Its coefficients minimise the error of the weights over T steps. Costs b − 1 buffers of the size
    of the model, which are never saved.

    Args:
        steps: T, how many steps a run takes at most; None for those of the first `fit`.
        bands: b ≤ T; 1 is independent noise.
        momentum: β in [0, 1) of the rule that adds the gradients up; 0 stands for their sums.
        horizon: for how many steps the weights hold on to a gradient; None for ever.

    Raises:
        ValueError: there are more bands than steps, or fewer than 1; the momentum or the
            horizon is out of range.

    Reference: Choquette-Choo, Ganesh, McKenna, McMahan, Rush, Thakurta and Xu, "(Amplified) banded
    matrix factorization: a unified approach to private training", NeurIPS 2023, arXiv:2306.08153.
    """

    def __init__(
        self,
        steps: int | None = None,
        bands: int | None = None,
        momentum: float = 0.0,
        horizon: float | None = None,
    ) -> None:
        self.steps, self.bands = checked_steps(steps, bands)
        self.workload = Workload(momentum, horizon=horizon)
        if self.steps is not None:
            coefficients = strategies.banded_coefficients(self.steps, self.bands, self.workload)
            self._set_coefficients(coefficients, self.steps)

    def check_sampling(self, sampling: Batching) -> None:
        super().check_sampling(sampling)
        apart = sampling.separation
        if apart is not None and apart < min(self.bands, self.steps or self.bands):
            raise ValueError(
                f"BandedMatrix(bands={self.bands}) needs an example's steps to be at least as far "
                f"apart as its bands; here they are {sampling.separation} apart. Use fewer bands, "
                "or more steps an epoch."
            )

    def get_config(self) -> dict[str, Any]:
        return {"steps": self.steps, "bands": self.bands} | self.workload.constant


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class SquareRootFactorization(_Banded):
    """The Toeplitz square root of the prefix sums, cut off after `bands` coefficients.

    Args:
        steps: T, how many steps a run takes at most; None for those of the first `fit`.
        bands: b ≤ T. Costs b − 1 buffers of the size of the model; all T bands are C·C = A.

    Raises:
        ValueError: there are more bands than steps, or fewer than 1.

    Reference: Fichtenberger, Henzinger and Upadhyay, "Constant matters: fine-grained error bound on
    differentially private continual observation", ICML 2023, arXiv:2202.11205.
    """

    def __init__(self, steps: int | None = None, bands: int | None = None) -> None:
        self.steps, self.bands = checked_steps(steps, bands)
        if self.steps is not None:
            coefficients = strategies.square_root_coefficients(self.bands)
            self._set_coefficients(coefficients / np.linalg.norm(coefficients), self.steps)

    def get_config(self) -> dict[str, Any]:
        return {"steps": self.steps, "bands": self.bands}


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class FromMatrix(_Matrix):
    """Correlated noise of your own lower-triangular matrix C; see `from_matrix`."""

    def __init__(self, matrix):
        matrix = np.asarray(matrix, np.float64)
        if matrix.ndim != 2 or len(set(matrix.shape)) != 1 or not np.isfinite(matrix).all():
            raise ValueError("matrix must be a square matrix of finite numbers.")
        if np.any(np.triu(matrix, 1)):
            raise ValueError("matrix must be lower-triangular: a step cannot use later noise.")
        if not np.all(np.diag(matrix) > 0):
            raise ValueError("matrix must have a positive diagonal, or it has no inverse.")
        norm = np.linalg.norm(matrix, axis=0).max()
        # One that was scaled before stays as it is, to the last bit: ledgers are compared.
        self.matrix = matrix if abs(norm - 1) < 1e-12 else matrix / norm
        self.length = steps = len(matrix)
        self.bands = max(k for k in range(steps) if np.any(np.diag(matrix, -k))) + 1
        columns = np.arange(steps)[:, None] - np.arange(self.bands)
        rows = np.take_along_axis(self.matrix, np.maximum(columns, 0), axis=1)
        self._set_rows(np.where(columns >= 0, rows, 0.0))
        self._inverse = np.linalg.inv(self.matrix)
        self._stds = tf.constant(np.linalg.norm(self._inverse, axis=1), tf.float32)

    def inverse(self, steps, columns=slice(None)):
        return self._inverse[:steps, :steps][:, columns]

    def std(self, step):
        return tf.gather(self._stds, step)

    def sensitivity(self, steps, separation=None, levels=None):
        return strategies.matrix_sensitivity(self.matrix, steps, separation, levels)

    def get_config(self):
        return {"matrix": self.matrix.tolist()}


def from_matrix(matrix: npt.ArrayLike) -> FromMatrix:
    """Correlated noise C⁻¹z of a lower-triangular (T, T) matrix C, scaled to unit column norm.

    Raises:
        ValueError: the matrix is not square, not lower-triangular, or its diagonal not positive.
    """
    return FromMatrix(matrix)


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class TreeAggregation(Correlated):
    """The binary tree of DP-FTRL, as a baseline: a step's noise is the difference of two prefixes'.

    Args:
        steps: T, how many steps a run takes at most; None for those of the first `fit`. Costs
            ⌊log₂ T⌋ + 1 buffers.

    Reference: Kairouz, McMahan, Song, Thakkar, Thakurta and Xu, "Practical and private (deep)
    learning without sampling or shuffling", ICML 2021, arXiv:2103.00039.
    """

    def __init__(self, steps: int | None = None) -> None:
        self.steps, _ = checked_steps(steps, 1)
        if self.steps is not None:
            self.length, self.slots = self.steps, self.steps.bit_length()
            self.bands = self.steps  # not a banded matrix: a node stays until the end

    def sensitivity(
        self, steps: int, separation: int | None = None, levels: npt.ArrayLike | None = None
    ) -> float:
        moved = strategies.tree_sensitivity(steps, separation)
        # As if all steps had the least noise of any.
        return moved if levels is None else moved / float(np.min(levels))

    def inverse(self, steps: int, columns: slice = slice(None)) -> np.ndarray:
        # At step t, counted from 1, one node begins, and the smaller ones end that began at
        # t − 2^l, for each 2^l below the lowest power of two in t.
        now, begun = np.arange(1, steps + 1)[:, None], np.arange(1, steps + 1)[columns]
        age = now - begun
        ends = (age > 0) & (age & (age - 1) == 0) & (age < (now & -now))
        return (age == 0) - 1.0 * ends

    def mixing(self, step: tf.Tensor) -> tuple[Any, Any]:
        # With step t + 1 the nodes of the lower levels end, and one of this level begins.
        return 1.0, -tf.cast(tf.range(self.slots) < self._level(step), tf.float32)

    def remember(
        self, past: Sequence[tf.Variable], step: tf.Tensor, draw: tf.Tensor, noise: tf.Tensor
    ) -> None:
        overwrite(past, self._level(step), draw)

    def std(self, step: int | tf.Tensor) -> float | tf.Tensor:
        return tf.sqrt(1.0 + tf.cast(self._level(step), tf.float32))

    @staticmethod
    def _level(step):
        """How often 2 divides t + 1."""
        number = tf.cast(step + 1, tf.int64)
        lowest = tf.bitwise.bitwise_and(number, -number)
        return tf.cast(tf.round(tf.math.log(tf.cast(lowest, tf.float32)) / np.log(2.0)), tf.int32)

    def get_config(self) -> dict[str, Any]:
        return {"steps": self.steps}


def checked_steps(steps, bands):
    bands = whole_number(bands, "bands", 1, "Give the number of bands, e.g. bands=8.")
    if steps is None:  # settled by `fit`
        return None, bands
    steps = whole_number(steps, "steps")
    if bands > steps:
        raise ValueError(
            f"bands={bands} exceeds steps={steps}: there is no step so long ago. Use at most "
            f"bands={steps}, or take more steps."
        )
    return steps, bands
