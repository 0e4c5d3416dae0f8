"""Geometries that are matrices, and centres: an example contributes clip(M(g − a)).

M and a are known before the data. What an example contributes is no longer than C whatever they
are, so that neither has a part in the sensitivity; how M is taken back is post-processing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from dp_keras_opt.clipping.factors import (
    DenseGradients,
    Factor,
    Lookup,
    Mapped,
    OuterProducts,
    as_rows,
    products_of_rows,
    with_rounding,
)
from dp_keras_opt.clipping.precision import in_a_row, in_full


class Kronecker(NamedTuple):
    """M that has a part L ⊗ R for each variable: of a gradient G it makes L·G·R.

    G is taken as a matrix: all axes but the last together, times the last. Nothing of size
    B × parameters is made for what is a product of matrices in the model: inputs go through L and
    deltas through R.

    Attributes:
        left, right: for each variable a square matrix, or None for the identity.
        inverse: the `Kronecker` that takes it back.
    """

    left: Sequence[Any]
    right: Sequence[Any]
    inverse: Kronecker | None = None

    def seen(self, gradients: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> list[Any]:
        """The factors of M·g for those of g."""
        parts = zip(gradients, self.left, self.right, shapes, strict=True)
        return [g and _through(g, *part) for g, *part in parts]

    def image(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """M of one tensor per variable."""
        parts = zip(tensors, self.left, self.right, strict=True)
        return [_product(t, left, right, t.shape) for t, left, right in parts]

    def deviations(self, shapes: Sequence[tuple[int, ...]]) -> list[tf.Tensor]:
        """Std of each coordinate of M·z for standard normals z."""
        left, right = ([m if m is None else m**2 for m in side] for side in (self.left, self.right))
        squares = Kronecker(left, right)
        return [tf.sqrt(power) for power in squares.image([tf.ones(shape) for shape in shapes])]


class LowRank(NamedTuple):
    """M = β·1 + U·diag(s − β)·Uᵀ: s_k along k directions of all variables together, β elsewhere.

    It shrinks or keeps, and stretches nothing: numbers above 1 count as 1.

    Attributes:
        directions: U, for each variable a tensor (k, *shape); orthonormal over all of them, for
            `inverse` to be that.
        along: s, (k,).
        rest: β, a scalar.
    """

    directions: Sequence[Any]
    along: Any
    rest: Any

    def seen(self, gradients: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> list[Any]:
        """The factors of M·g for those of g."""
        along, rest = tf.minimum(self.along, 1.0), tf.minimum(self.rest, 1.0)
        inner = [g and g.inner(u) for g, u in zip(gradients, self.directions, strict=True)]
        moved = (along - rest) * sum(each for each in inner if each is not None)
        parts = zip(gradients, self.directions, inner, strict=True)
        return [Mixed(g, u, each, moved, rest) for g, u, each in parts]

    def image(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """M of one tensor per variable."""
        pairs = list(zip(tensors, self.directions, strict=True))
        inner = sum(tf.tensordot(u, t, t.shape.rank) for t, u in pairs)
        moved = (self.along - self.rest) * inner
        return [self.rest * t + tf.tensordot(moved, u, 1) for t, u in pairs]

    @property
    def inverse(self) -> LowRank:
        """That which takes it back."""
        return LowRank(self.directions, 1 / self.along, 1 / self.rest)

    def deviations(self, shapes: Sequence[tuple[int, ...]]) -> list[tf.Tensor]:
        """Std of each coordinate of M·z for standard normals z."""
        weights = self.along**2 - self.rest**2
        return [
            tf.sqrt(tf.maximum(self.rest**2 + tf.tensordot(weights, u**2, 1), 0.0))
            for u in self.directions
        ]


class Mixed(Factor):
    """β·g_b + Σ_k c_bk·u_k of another factor's gradients g_b.

    Args:
        inner: the factor; None where all g_b are 0.
        directions: u, (k, *shape).
        products: ⟨g_b, u_k⟩, (B, k); None where all are 0.
        moved: c, (B, k). Whatever they are, norm and sum are of the same.
        rest: β ≥ 0.
    """

    def __init__(self, inner, directions, products, moved, rest):
        self.inner_factor, self.directions = inner, directions
        self.products, self.moved, self.rest = products, moved, rest
        self.shape = tuple(directions.shape[1:])

    def squared_norm(self, scale=None):
        flat = as_rows(self.directions)
        grams = products_of_rows(flat, flat)
        total = tf.reduce_sum(in_full(tf.matmul, self.moved, grams) * self.moved, axis=1)
        if self.inner_factor is not None:
            total += self.rest**2 * self.inner_factor.squared_norm()
            total += 2 * self.rest * tf.reduce_sum(self.products * self.moved, axis=1)
        return _raised(self, total, scale)

    def terms(self, norm, scale=None):
        flat = as_rows(self.directions)
        lengths = tf.norm(flat, ord=1 if norm == "l1" else 2, axis=1)
        total, count = tf.linalg.matvec(tf.abs(self.moved), lengths), self.directions.shape[0]
        if self.inner_factor is None:
            return total, count
        own, terms = self.inner_factor.terms(norm)
        return total + self.rest * own, count + terms

    def weighted_sum(self, weights, dtype=tf.float32):
        moved, directions, rest, weights_of_moved = (
            tf.cast(each, tf.float64) for each in (self.moved, self.directions, self.rest, weights)
        )
        moved = tf.linalg.matvec(moved, weights_of_moved, transpose_a=True)
        total = tf.tensordot(moved, directions, 1)
        if self.inner_factor is not None:
            total += rest * self.inner_factor.weighted_sum(weights, tf.float64)
        return tf.cast(total, dtype)

    def along(self, direction):
        along = products_of_rows(as_rows(direction[None]), as_rows(self.directions))
        total = products_of_rows(self.moved, along)[:, 0]
        if self.inner_factor is None:
            return total
        return total + self.rest * self.inner_factor.along(direction)

    def mapped(self, function):
        inner = self.inner_factor and self.inner_factor.mapped(function)
        products = None if self.products is None else function(self.products)
        return Mixed(inner, self.directions, products, function(self.moved), self.rest)

    def materialize(self):
        total = tf.tensordot(self.moved, self.directions, 1)
        if self.inner_factor is None:
            return total
        return total + self.rest * self.inner_factor.materialize()


class Centred(Factor):
    """g_b − a of another factor's gradients g_b.

    Args:
        inner: the factor.
        centre: a, in the variable's shape.
    """

    def __init__(self, inner, centre):
        self.inner_factor, self.centre = inner, tf.cast(centre, tf.float32)
        self.shape = tuple(self.centre.shape)

    def squared_norm(self, scale=None):
        centre = self.centre if scale is None else scale * self.centre
        direction = centre if scale is None else scale * centre
        total = self.inner_factor.squared_norm(scale) - 2 * self.inner_factor.along(direction)
        total += tf.reduce_sum(tf.square(centre))
        return _raised(self, total, scale)

    def terms(self, norm, scale=None):
        total, count = self.inner_factor.terms(norm, scale)
        centre = self.centre if scale is None else scale * self.centre
        return total + tf.norm(centre, ord=1 if norm == "l1" else 2), count + 1

    def weighted_sum(self, weights, dtype=tf.float32):
        count = tf.reduce_sum(tf.cast(weights, tf.float64))
        total = self.inner_factor.weighted_sum(weights, tf.float64)
        return tf.cast(total - count * tf.cast(self.centre, tf.float64), dtype)

    def along(self, direction):
        return self.inner_factor.along(direction) - tf.reduce_sum(self.centre * direction)

    def mapped(self, function):
        return Centred(self.inner_factor.mapped(function), self.centre)

    def materialize(self):
        return self.inner_factor.materialize() - self.centre


def _raised(factor, squared_norm, scale):
    """A squared norm that was found from inner products with the gradients, made safe."""
    terms, sizes = factor.terms("l2", scale), factor.shape or (1,)
    products = in_a_row(math.prod(sizes)) + sizes[-1] + 2 * terms[1]
    return with_rounding(tf.maximum(squared_norm, 0.0), terms, products)


def seen_by(query, gradients, variables, rows):
    """The factors of what is bounded, M(g − a), for those of the gradients g of some units.

    Args:
        query: a `Query`.
        gradients: a `Factor` for each variable, or None.
        variables: the trainable ones.
        rows: how many units there are.

    Raises:
        ValueError: the query has two geometries, or a geometry or a centre for public rows.
    """
    geometry, centre = query.geometry, query.centre
    if geometry is None and centre is None:
        return gradients
    if query.population == "public" or (geometry is not None and query.scale is not None):
        raise ValueError("A query has one geometry, and neither matrix nor centre for public rows.")
    if geometry is not None:
        gradients = geometry.seen(gradients, [tuple(v.shape) for v in variables])
    if centre is None:
        return gradients
    centre = centre if geometry is None else geometry.image(centre)
    return [
        Centred(DenseGradients(tf.zeros((rows, *v.shape))) if g is None else g, a)
        for g, v, a in zip(gradients, variables, centre, strict=True)
    ]


def _through(factor, left, right, shape):
    """The factor of L·G·R."""
    if left is None and right is None:
        return factor
    if isinstance(factor, OuterProducts) and factor.is_matrix:
        inputs, deltas = factor.inputs, factor.deltas
        inputs = inputs if left is None else tf.tensordot(inputs, left, [[3], [1]])
        deltas = deltas if right is None else tf.tensordot(deltas, right, 1)
        return OuterProducts(inputs, deltas, factor.shape, factor.layout, factor.order)
    if isinstance(factor, Lookup) and left is None:
        deltas = tf.tensordot(factor.deltas, right, 1)
        return Lookup(factor.ids, deltas, factor.shape, factor.distinct)
    sizes = [tf.norm(each) for each in (left, right) if each is not None]  # ‖L‖ ≤ ‖L‖_F
    stretch = tf.fill((1,) * len(shape), math.prod(sizes))
    return Mapped(factor, lambda tensor: _product(tensor, left, right, shape), stretch)


def _product(tensor, left, right, shape):
    """L·G·R of tensors (..., *shape)."""
    *rows, columns = tuple(shape) or (1,)
    matrix = tf.reshape(tensor, (-1, math.prod(rows), columns))
    left, right = (each if each is None else tf.cast(each, tensor.dtype) for each in (left, right))
    matrix = matrix if left is None else in_full(tf.matmul, left, matrix)
    matrix = matrix if right is None else in_full(tf.matmul, matrix, right)
    return tf.reshape(matrix, tf.shape(tensor))
