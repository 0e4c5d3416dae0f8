"""Correlated noise (DP-MF): the noise of a step takes back some of that of the steps before.

Each mechanism streams: the noise of step t is gain·(fresh draw + a weighted sum of a few buffers),
and one buffer is then overwritten. The buffers are past noise: beside a released gradient they give
the raw sum. They live in the `NoiseSource`, which nothing saves.
"""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import dp_accounting
import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from dp_keras_opt.checks import whole_number
from dp_keras_opt.noise import strategies
from dp_keras_opt.noise.mechanism import Mechanism

if TYPE_CHECKING:
    from dp_keras_opt.accounting.sampling import Sampling
    from dp_keras_opt.noise.entropy import NoiseSource


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
    #: How many steps the draw of one step shows in, itself included.
    bands = 1
    #: How many buffers there are for each variable.
    slots = 0

    def event(self, multiplier: float) -> dp_accounting.DpEvent:
        return dp_accounting.GaussianDpEvent(multiplier)

    @abc.abstractmethod
    def sensitivity(self, steps: int, separation: int | None = None) -> float:
        """How far one example moves C x over a run of so many steps.

        Args:
            steps: of the run.
            separation: steps between two participations of an example; None for only one.
        """

    @abc.abstractmethod
    def mixing(self, step: int | tf.Tensor) -> tuple[Any, Any, Any, bool]:
        """What the noise of step `step` of the run, a scalar tensor, is made of.

        Returns:
            (gain, weights (slots,), slot to overwrite, whether with the noise or with the draw).
        """

    def check_sampling(self, sampling: Sampling) -> None:
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
        step, past = source.memory(stream)
        gain, weights, slot, keeps_noise = self.mixing(step)
        gain, weights = tf.cast(gain, source.dtype), tf.cast(weights, source.dtype)
        step.assign_add(1)
        if not self.slots:
            return [gain * source.normal(shape) for shape in shapes]
        draw, rest = source.normal_and_rest((sum(math.prod(shape) for shape in shapes),))
        noise = _mixed(draw, rest, gain, weights, [buffer.read_value() for buffer in past])
        _overwrite(past, slot, noise if keeps_noise else draw)
        parts = tf.split(noise, [math.prod(shape) for shape in shapes])
        return [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]


@tf.function(jit_compile=True, autograph=False)
def _mixed(draw, rest, gain, weights, past):
    """gain·(draw + Σ weights·past), compiled: in one pass over the buffers."""
    for index, buffer in enumerate(past):
        draw += weights[index] * buffer
    # Where the terms cancel they have no digits left: the noise could be 0, or lie on a grid.
    last_digit = float(np.finfo(draw.dtype.as_numpy_dtype).eps)
    return gain * draw + 8 * last_digit * rest


def _overwrite(past, slot, value):
    """past[slot] ← value. A variable each: TensorFlow would copy a stacked one at every step."""

    def write(buffer):
        buffer.assign(value)
        return slot

    tf.switch_case(slot, [functools.partial(write, buffer) for buffer in past])


class _Matrix(Correlated):
    """C by its rows: entry (t, t − k) is `rows[t][k]`, or `rows[k]` at every step."""

    def _set_rows(self, rows):
        self._rows = np.asarray(rows, np.float64)
        self.slots = self._rows.shape[-1] - 1

    def mixing(self, step: int | tf.Tensor) -> tuple[Any, Any, Any, bool]:
        rows = tf.constant(self._rows, tf.float32)
        row = rows if rows.shape.rank == 1 else tf.gather(rows, step)
        if not self.slots:
            return 1 / row[0], [], None, True
        slot = tf.cast(step % self.slots, tf.int32)
        lags = (slot - tf.range(self.slots) - 1) % self.slots + 1  # how old each buffer is
        return 1 / row[0], -tf.gather(row, lags), slot, True


class _Toeplitz(_Matrix):
    def sensitivity(self, steps: int, separation: int | None = None) -> float:
        return strategies.toeplitz_sensitivity(self._rows, steps, separation)

    def std(self, step: int | tf.Tensor) -> float | tf.Tensor:
        return tf.gather(self._stds, step)

    def _set_coefficients(self, coefficients, steps):
        self._set_rows(coefficients)
        inverse = strategies.inverse_coefficients(self._rows, steps)
        self._stds = tf.constant(np.sqrt(np.cumsum(inverse**2)), tf.float32)
        self.length = steps


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class BandedMatrix(_Toeplitz):
    """Banded matrix factorisation (BandMF): the best Toeplitz matrix of so many bands.

    Its coefficients minimise the error of the prefix sums over T steps. Costs b − 1 buffers of the
    size of the model, which are never saved.

    Args:
        steps: T, how many steps a run takes at most.
        bands: b ≤ T; 1 is independent noise.

    Raises:
        ValueError: there are more bands than steps, or fewer than 1.

    Reference: Choquette-Choo et al., "(Amplified) Banded Matrix Factorization", NeurIPS 2023.
    """

    def __init__(self, steps: int, bands: int) -> None:
        self.steps, self.bands = _checked(steps, bands)
        self._set_coefficients(strategies.banded_coefficients(self.steps, self.bands), self.steps)

    def check_sampling(self, sampling: Sampling) -> None:
        super().check_sampling(sampling)
        if sampling.separation < min(self.bands, self.steps):
            raise ValueError(
                f"BandedMatrix(bands={self.bands}) needs an example's steps to be at least as far "
                f"apart as its bands; here they are {sampling.separation} apart. Use fewer bands, "
                "or more steps an epoch."
            )

    def get_config(self) -> dict[str, Any]:
        return {"steps": self.steps, "bands": self.bands}


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class SquareRootFactorization(_Toeplitz):
    """The Toeplitz square root of the prefix sums, cut off after `bands` coefficients.

    Args:
        steps: T, how many steps a run takes at most.
        bands: b ≤ T. Costs b − 1 buffers of the size of the model; all T bands are C·C = A.

    Raises:
        ValueError: there are more bands than steps, or fewer than 1.

    Reference: Fichtenberger, Henzinger and Upadhyay, ICML 2023.
    """

    def __init__(self, steps: int, bands: int) -> None:
        self.steps, self.bands = _checked(steps, bands)
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
        inverse = np.linalg.inv(self.matrix)
        self._stds = tf.constant(np.linalg.norm(inverse, axis=1), tf.float32)

    def std(self, step):
        return tf.gather(self._stds, step)

    def sensitivity(self, steps, separation=None):
        return strategies.matrix_sensitivity(self.matrix, steps, separation)

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
        steps: T, how many steps a run takes at most. Costs ⌊log₂ T⌋ + 1 buffers.

    Reference: Kairouz et al., "Practical and private (deep) learning without sampling or
    shuffling", ICML 2021.
    """

    def __init__(self, steps: int) -> None:
        self.steps, _ = _checked(steps, 1)
        self.length, self.slots = self.steps, self.steps.bit_length()
        self.bands = self.steps  # not a banded matrix: a node stays until the end

    def sensitivity(self, steps: int, separation: int | None = None) -> float:
        return strategies.tree_sensitivity(steps, separation)

    def mixing(self, step: int | tf.Tensor) -> tuple[Any, Any, Any, bool]:
        # With step t + 1 the nodes of the lower levels end, and one of this level begins.
        level = self._level(step)
        ended = tf.cast(tf.range(self.slots) < level, tf.float32)
        return 1.0, -ended, level, False

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


def prefix_sum_rmse(
    mechanism: Correlated | None, steps: int, separation: int | None = None
) -> float:
    """√(mean_t ‖row t of A·C⁻¹‖²)·sensitivity: the error of the sums of gradients, at equal ε.

    Args:
        mechanism: a `Correlated`, or None for independent noise.
        steps: T.
        separation: as for `Correlated.sensitivity`.
    """
    if mechanism is None:
        count = 1 if separation is None else -(-steps // separation)
        return float(np.sqrt((steps + 1) / 2 * count))
    if isinstance(mechanism, TreeAggregation):
        powers = np.array([bin(t).count("1") for t in range(1, steps + 1)])
    elif isinstance(mechanism, _Toeplitz):
        sums = np.cumsum(strategies.inverse_coefficients(mechanism._rows, steps))
        powers = np.cumsum(sums**2)
    else:
        matrix: np.ndarray = getattr(mechanism, "matrix")  # noqa: B009
        inverse = np.linalg.inv(matrix[:steps, :steps])
        powers = np.sum(np.cumsum(inverse, axis=0) ** 2, axis=1)
    return float(np.sqrt(np.mean(powers)) * mechanism.sensitivity(steps, separation))


def _checked(steps, bands):
    steps, bands = whole_number(steps, "steps"), whole_number(bands, "bands")
    if bands > steps:
        raise ValueError(f"bands={bands} exceeds steps={steps}: there is no step so long ago.")
    return steps, bands
