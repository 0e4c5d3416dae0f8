"""Per-example gradients of one variable, in factored form.

Book-keeping never writes down the (rows, *shape) tensor of per-example gradients. It keeps what the
backward pass already has and answers two questions from it: the squared norm of each example's
gradient, and a weighted sum over the examples. In shapes below, B is the number of rows.
"""

import abc
import math

import numpy as np
import tensorflow as tf

#: Bound on the relative rounding error of a term in a float32 sum of products.
ROUNDING = 2.0**-21

#: Largest temporary of a norm computation, in float32 numbers (128 MB).
BLOCK = 2**25


class Factor(abc.ABC):
    """Per-example gradients of one variable; float32 throughout."""

    @abc.abstractmethod
    def squared_norm(self, scale=None):
        """‖scale ⊙ gradient_b‖² for each example b, (B,); `scale` has the variable's shape."""

    @abc.abstractmethod
    def weighted_sum(self, weights):
        """Σ_b weights_b · gradient_b, in the variable's shape."""

    def weighted_sum_of_squares(self, weights):
        """Σ_b (weights_b · gradient_b)², in the variable's shape.

        The weight goes in before the square, since the square of a large gradient overflows.
        """
        gradients = self.materialize()
        weights = tf.reshape(weights, (-1,) + (1,) * (gradients.shape.rank - 1))
        return tf.reduce_sum(tf.square(weights * gradients), axis=0)

    def inner(self, direction):
        """⟨gradient_b, direction⟩ for each example b, (B,); `direction` in the variable's shape."""
        gradients = self.materialize()
        return tf.tensordot(gradients, direction, gradients.shape.rank - 1)

    @abc.abstractmethod
    def keep(self, rows):
        """The same gradients with those of examples where the boolean `rows` (B,) is False zeroed.

        Multiplying a NaN by a weight of zero would leave a NaN.
        """

    @abc.abstractmethod
    def materialize(self):
        """The per-example gradients themselves, (B, *shape)."""

    @abc.abstractmethod
    def join(self, other):
        """The sum of the gradients of two uses of the same variable, as one factor."""


class Materialized(Factor):
    """The gradients themselves: for biases, and for layers without a rule.

    Args:
        gradients: (B, *shape).
    """

    def __init__(self, gradients):
        self.gradients = tf.cast(gradients, tf.float32)

    def squared_norm(self, scale=None):
        scaled = self.gradients if scale is None else self.gradients * scale
        return tf.reduce_sum(tf.square(scaled), axis=range(1, scaled.shape.rank))

    def weighted_sum(self, weights):
        return tf.tensordot(weights, self.gradients, 1)

    def keep(self, rows):
        return Materialized(_keep(self.gradients, rows))

    def materialize(self):
        return self.gradients

    def join(self, other):
        return Materialized(self.gradients + other.materialize())


class Outer(Factor):
    """Sums of outer products, Σ_t inputs_t ⊗ deltas_t: dense layers and convolutions.

    Args:
        inputs: (B, T, I), what the kernel was multiplied with; T positions or uses.
        deltas: (B, T, O), the gradient of the loss in the products.
        layout: the I·O entries as axes, in the order of `inputs` and `deltas`.
        order: permutation of `layout` that gives the variable's axes; None if they are the same.
    """

    def __init__(self, inputs, deltas, layout, order=None):
        self.inputs = tf.cast(inputs, tf.float32)
        self.deltas = tf.cast(deltas, tf.float32)
        self.layout = layout
        self.order = order or tuple(range(len(layout)))

    def squared_norm(self, scale=None):
        scale = None if scale is None else self._as_matrix(scale)
        if self.inputs.shape[1] == 1:
            # Through the largest entries: tiny deltas beside huge inputs must not flush to zero.
            (a, largest_a), (b, largest_b) = _unit_range(self.inputs), _unit_range(self.deltas)
            norms = tf.sqrt(_squares_of_terms(a, b, scale)) * largest_a * largest_b
            return tf.square(norms[:, 0])
        terms = tf.sqrt(_squares_of_terms(self.inputs, self.deltas, scale))
        # Otherwise block by block of the rows of the kernel. (The Gram form,
        # Σ_ts (a_t·a_s)(b_t·b_s), loses half of the digits where the terms cancel, and a norm
        # that comes out too small would break the bound.)
        total = 0.0
        for start in self._starts:
            gradients = self._gradients(start)
            if scale is not None:
                gradients *= tf.transpose(scale[start : start + self._width])
            gradients = tf.reshape(gradients, (-1, gradients.shape[1] * gradients.shape[2]))
            total += tf.reduce_sum(tf.square(gradients), axis=1)
        return _with_rounding(total, terms)

    def _as_matrix(self, tensor):
        """A tensor in the variable's shape as (I, O), and back by `_as_variable`."""
        tensor = tf.transpose(tensor, np.argsort(self.order))
        return tf.reshape(tensor, (self.inputs.shape[-1], self.deltas.shape[-1]))

    def _as_variable(self, matrix):
        return tf.transpose(tf.reshape(matrix, self.layout), self.order)

    @property
    def _width(self):
        """How many rows of the kernel make a block."""
        return max(1, BLOCK // (self.deltas.shape[-1] * (self.inputs.shape[0] or 256)))

    @property
    def _starts(self):
        return range(0, self.inputs.shape[-1], self._width)

    def _gradients(self, start):
        """One block of the per-example gradients, (B, O, up to `_width` of I)."""
        inputs = self.inputs[..., start : start + self._width]
        return tf.matmul(self.deltas, inputs, transpose_a=True)

    def weighted_sum(self, weights):
        inputs = tf.reshape(self.inputs, (-1, self.inputs.shape[-1]))
        deltas = tf.reshape(self.deltas * weights[:, None, None], (-1, self.deltas.shape[-1]))
        return self._as_variable(tf.matmul(inputs, deltas, transpose_a=True))

    def weighted_sum_of_squares(self, weights):
        if self.inputs.shape[1] == 1:
            inputs, largest = _unit_range(self.inputs)
            deltas = (weights[:, None] * largest)[..., None] * self.deltas
            squares = tf.square(inputs[:, 0]), tf.square(deltas[:, 0])
            return self._as_variable(tf.matmul(*squares, transpose_a=True))
        weights = weights[:, None, None]
        blocks = [
            tf.reduce_sum(tf.square(weights * self._gradients(start)), axis=0)
            for start in self._starts
        ]
        return self._as_variable(tf.transpose(tf.concat(blocks, axis=1)))

    def inner(self, direction):
        products = tf.tensordot(self.inputs, self._as_matrix(direction), 1)
        return tf.reduce_sum(products * self.deltas, axis=(1, 2))

    def keep(self, rows):
        inputs, deltas = _keep(self.inputs, rows), _keep(self.deltas, rows)
        return Outer(inputs, deltas, self.layout, self.order)

    def materialize(self):
        gradients = tf.matmul(self.inputs, self.deltas, transpose_a=True)
        gradients = tf.reshape(gradients, (-1, *self.layout))
        return tf.transpose(gradients, (0, *(axis + 1 for axis in self.order)))

    def join(self, other):
        if not isinstance(other, Outer) or (self.layout, self.order) != (other.layout, other.order):
            return Materialized(self.materialize()).join(other)
        inputs = tf.concat([self.inputs, other.inputs], axis=1)
        deltas = tf.concat([self.deltas, other.deltas], axis=1)
        return Outer(inputs, deltas, self.layout, self.order)


class Rows(Factor):
    """Gradients that touch few rows of a table: embeddings.

    Args:
        ids: (B, T) integers, the rows that were looked up.
        deltas: (B, T, D), the gradient of the loss in what was looked up.
        shape: (V, D), shape of the table.
    """

    def __init__(self, ids, deltas, shape):
        self.ids = ids
        self.deltas = tf.cast(deltas, tf.float32)
        self.shape = shape

    def squared_norm(self, scale=None):
        deltas = self.deltas
        scales = 1.0 if scale is None else tf.gather(scale, self.ids)
        if self.ids.shape[1] == 1:
            return tf.reduce_sum(tf.square(deltas * scales), axis=(1, 2))
        sums, repeats = self._sums()
        squares = tf.reduce_sum(tf.square(sums * scales), axis=2) / repeats
        terms = tf.norm(deltas * scales, axis=2)
        return _with_rounding(tf.reduce_sum(squares, axis=1), terms)

    def _sums(self):
        """Each position's row of the gradient (B, T, D), and at how many positions it stands."""
        same = tf.cast(self.ids[:, :, None] == self.ids[:, None, :], tf.float32)
        return tf.matmul(same, self.deltas), tf.reduce_sum(same, axis=2)

    def weighted_sum(self, weights):
        return self._scatter(self.deltas * weights[:, None, None])

    def weighted_sum_of_squares(self, weights):
        sums, repeats = self._sums()
        squares = tf.square(weights[:, None, None] * sums)
        return self._scatter(squares / repeats[..., None])

    def inner(self, direction):
        return tf.reduce_sum(tf.gather(direction, self.ids) * self.deltas, axis=(1, 2))

    def _scatter(self, rows):
        rows = tf.reshape(rows, (-1, self.shape[1]))
        return tf.math.unsorted_segment_sum(rows, tf.reshape(self.ids, (-1,)), self.shape[0])

    def keep(self, rows):
        return Rows(self.ids, _keep(self.deltas, rows), self.shape)

    def materialize(self):
        return tf.matmul(tf.one_hot(self.ids, self.shape[0]), self.deltas, transpose_a=True)

    def join(self, other):
        if not isinstance(other, Rows):
            return Materialized(self.materialize()).join(other)
        ids = tf.concat([self.ids, tf.cast(other.ids, self.ids.dtype)], axis=1)
        return Rows(ids, tf.concat([self.deltas, other.deltas], axis=1), self.shape)


def flatten_positions(tensor):
    """(B, ..., C) as (B, T, C), with T = 1 for (B, C)."""
    positions = math.prod(tensor.shape[1:-1]) if None not in tensor.shape[1:-1] else -1
    rows = tensor.shape[0] if tensor.shape[0] is not None else tf.shape(tensor)[0]
    return tf.reshape(tensor, (rows, positions, tensor.shape[-1]))


def _squares_of_terms(a, b, scale):
    """‖S ∘ (a_t ⊗ b_t)‖² for each position, (B, T): ‖a‖²‖b‖², or Σ_jk S_jk² a_j² b_k²."""
    if scale is None:
        return tf.reduce_sum(tf.square(a), axis=2) * tf.reduce_sum(tf.square(b), axis=2)
    spread = tf.matmul(tf.reshape(tf.square(a), (-1, a.shape[2])), tf.square(scale))
    return tf.reduce_sum(tf.reshape(spread, tf.shape(b)) * tf.square(b), axis=2)


def _unit_range(tensor):
    """(B, T, C) over its largest entry at each position, and that entry (B, T)."""
    largest = tf.reduce_max(tf.abs(tensor), axis=2)
    return tf.math.divide_no_nan(tensor, largest[..., None]), largest


def _with_rounding(squared_norm, terms):
    """The squared norm of a sum, with what rounding may have taken from it.

    Where the terms (B, T) cancel, the sum that is released can be off by their own rounding: the
    norm is raised by that, which can only clip more.
    """
    error = ROUNDING * tf.reduce_sum(terms, axis=1)
    return tf.square(tf.sqrt(squared_norm) + error)


def _keep(tensor, rows):
    return tf.where(tf.reshape(rows, (-1,) + (1,) * (tensor.shape.rank - 1)), tensor, 0.0)
