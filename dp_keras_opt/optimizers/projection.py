"""Optimizers that work in a low-dimensional subspace of each weight matrix."""

from __future__ import annotations

import copy
import math
import numbers
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras import ops

from dp_keras_opt.checks import whole_number
from dp_keras_opt.deprecation import renamed_attribute
from dp_keras_opt.optimizers.subspace import leading_directions


class _Side(NamedTuple):
    """How a variable is seen as a matrix M that has no more rows than columns.

    Attributes:
        rows, columns: its shape as stored, all axes but the last one taken together.
        transposed: whether M is its transpose.
    """

    rows: int
    columns: int
    transposed: bool

    @property
    def short(self):
        """Rows of M."""
        return min(self.rows, self.columns)

    @property
    def long(self):
        """Columns of M."""
        return max(self.rows, self.columns)


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class GaLore:
    """Gradient low-rank projection: the optimizer sees `rank` numbers per column of a matrix.

    Each weight of two or more axes is taken as a matrix (all axes but the last together), and its
    privatized gradient G̃ as PᵀG̃, P the `rank` leading singular vectors on its shorter side. Filter,
    moments and step live there; the step is lifted back, w ← w − scale·η·P·(step). Every
    `update_gap` steps P is found anew from the privatized gradient at hand, so it costs no privacy.
    Weights whose shorter side is at most `rank`, and vectors, are served by the plain rule.

    P is orthonormal, so the noise in each coordinate keeps its standard deviation, and the second
    moment of DP-AdamBC its correction. P comes from a few rounds of subspace iteration, which work
    under XLA as well, begun at the last P: with noise of one size in all directions, they find
    nearly all that singular vectors would.

    Args:
        rank: r ≥ 1, dimension of the subspace. Defaults to 128.
        update_gap: steps between two changes of P. Defaults to 200.
        scale: factor on the steps of projected weights. Defaults to 1.0.
        reset: whether the optimizer's moments and its filter start anew with each P, those of all
            weights. By default they are kept, and mix what they saw in one subspace with the next.

    Raises:
        ValueError: an argument is out of range.

    Reference: Zhang, Bu, Hong and Razaviyayn, "DOPPLER: differentially private optimizers with
    low-pass filter for privacy noise reduction", NeurIPS 2024, arXiv:2408.13460v1, Algorithm 4;
    Zhao, Zhang, Chen, Wang, Anandkumar and Tian, "GaLore: memory-efficient LLM training by gradient
    low-rank projection", ICML 2024, arXiv:2403.03507.
    """

    def __init__(
        self, rank: int = 128, update_gap: int = 200, scale: float = 1.0, reset: bool = False
    ) -> None:
        self.rank = whole_number(rank, "rank")
        self.update_gap = whole_number(update_gap, "update_gap")
        if not isinstance(scale, numbers.Real) or not 0 < scale < math.inf:
            raise ValueError(f"scale must be positive and finite, received {scale!r}.")
        self.scale = float(scale)
        self.reset = bool(reset)

    def select(self, variables: Sequence[keras.Variable]) -> None:
        """Decides which of the variables are projected; warns of those that are too small."""
        self._sides: list[_Side | None] = []
        small: list[str] = []
        for variable in variables:
            *others, columns = variable.shape or (1,)
            side = _Side(math.prod(others), columns, math.prod(others) > columns)
            is_small = len(variable.shape) < 2 or side.short <= self.rank
            if is_small and len(variable.shape) >= 2:
                small.append(variable.path)
            self._sides.append(None if is_small else side)
        self._side_of = {id(v): side for v, side in zip(variables, self._sides, strict=True)}
        if small:
            warnings.warn(
                f"GaLore's rank={self.rank} reaches the shorter side of {', '.join(small)}: there "
                "it would save nothing, and the plain rule is used.",
                stacklevel=2,
            )

    def shape_of(self, variable: keras.Variable) -> tuple[int, int] | None:
        """The shape (r, long side) of what is remembered of a variable; None if all of it is."""
        side = self._side_of.get(id(variable))
        return None if side is None else (self.rank, side.long)

    def build(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Creates the projectors."""
        self._bases = [
            side
            and optimizer.add_variable(
                (side.short, self.rank),
                initializer=keras.initializers.Orthogonal(seed=index),
                dtype="float32",
                name=f"projector_{index}",
            )
            for index, side in enumerate(self._sides)
        ]

    @property
    def bases(self) -> list[keras.Variable]:
        """The projectors."""
        return [basis for basis in self._bases if basis is not None]

    def is_due(self, iterations: int | tf.Tensor) -> tf.Tensor:
        """Whether the projectors change at this step (from 0)."""
        return ops.equal(iterations % self.update_gap, 0)

    def project(
        self, optimizer: keras.optimizers.Optimizer, gradients: list[tf.Tensor]
    ) -> list[tf.Tensor]:
        """PᵀM for each gradient, (r, long side); with a new P where it is due."""
        due = self.is_due(optimizer.iterations)
        tf.cond(due, lambda: self._change(optimizer, gradients), lambda: None)
        return [self.reduce(index, gradient) for index, gradient in enumerate(gradients)]

    def _change(self, optimizer, gradients):
        for index, gradient in enumerate(gradients):
            if self._sides[index] is not None:
                basis = self._bases[index]
                matrix = self._as_matrix(index, gradient)
                optimizer.assign(basis, leading_directions(matrix, tf.convert_to_tensor(basis)))

    def reduce(self, index: int, gradient: tf.Tensor) -> tf.Tensor:
        """PᵀM of one variable's gradient; the gradient itself where it is not projected."""
        if self._sides[index] is None:
            return gradient
        basis = tf.convert_to_tensor(self._bases[index])
        return tf.matmul(basis, self._as_matrix(index, gradient), transpose_a=True)

    def lift(self, index: int, step: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
        """The step (r, long side) in the variable's shape; unchanged where it is not projected."""
        side = self._sides[index]
        if side is None:
            return step
        basis = tf.cast(self.scale * tf.convert_to_tensor(self._bases[index]), step.dtype)
        matrix = tf.matmul(basis, step)
        return tf.reshape(tf.transpose(matrix) if side.transposed else matrix, shape)

    def _as_matrix(self, index, gradient):
        side = self._sides[index]
        matrix = tf.reshape(tf.cast(gradient, tf.float32), (side.rows, side.columns))
        return tf.transpose(matrix) if side.transposed else matrix

    def get_config(self) -> dict[str, Any]:
        """Constructor arguments, as in Keras."""
        return {
            "rank": self.rank,
            "update_gap": self.update_gap,
            "scale": self.scale,
            "reset": self.reset,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> GaLore:
        """The projection with these constructor arguments."""
        return cls(**config)

    plan = renamed_attribute("plan", "select")


def get(identifier: Any) -> GaLore | None:
    """Resolves a projection: None, a `GaLore` or a serialised one; a copy, since it has state."""
    if isinstance(identifier, dict):
        identifier = keras.saving.deserialize_keras_object(identifier)
    if identifier is not None and not isinstance(identifier, GaLore):
        raise ValueError(f"projection must be None or a GaLore, received {identifier!r}.")
    return copy.copy(identifier)
