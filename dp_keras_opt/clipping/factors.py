"""Per-example gradients of one variable, in factored form.

Book-keeping never writes down more of the (rows, *shape) tensor of per-example gradients than it
must. It keeps what the backward pass already has and answers two questions from it: the norm of
each example's gradient, and a weighted sum over the examples. In shapes below, B is the number of
rows.

A norm must not come out too small, or the bound would break. Where terms cancel, rounding could
make it so; `with_rounding` then adds what rounding may have taken (`precision` has the proof).
"""

import abc
import copy
import functools
import math

import numpy as np
import tensorflow as tf

from dp_keras_opt.clipping.precision import in_a_row, in_full, in_parts, is_coarse, rounding

#: The smallest float32 number that kernels keep.
_SMALLEST = float(np.finfo(np.float32).tiny)

#: Of the lengths of terms that cancel, what a norm is at least.
LEAST_OF_TERMS = 2.0**-8

#: Of what is summed over the batch by itself, and a part taken away from the sum, what is left at
#: least. Images of smooth greys before a standardized kernel come near, and nothing else is known.
LEAST_OF_PARTS = 2.0**-4

#: So many rows are summed at once in float32, or such a share of all.
ROWS, SHARES = 512, 16

#: Up to so many positions, a norm in a geometry is found from their pairs.
FEW_POSITIONS = 8

#: Largest temporary of a norm computation, in float32 numbers (128 MB).
BLOCK = 2**25


class Factor(abc.ABC):
    """Per-example gradients of one variable; float32 throughout.

    Whoever adds one may leave the methods that are not abstract to `materialize`.
    """

    @abc.abstractmethod
    def squared_norm(self, scale=None):
        """‖scale ⊙ gradient_b‖₂² for each example b, (B,); `scale` has the variable's shape."""

    def l1_norm(self, scale=None):
        """‖scale ⊙ gradient_b‖₁ for each example b, (B,)."""
        return raised(_l1(_scaled(self.materialize(), scale)), self.terms("l1", scale))

    def terms(self, norm, scale=None):
        """What the gradients are sums of, computed otherwise in their norm than in the sum.

        Args:
            norm: "l2" or "l1".
            scale: as for the norms.

        Returns:
            (Σ ‖scale ⊙ term‖ over the terms of each example, (B,); how many are summed up).
        """
        gradients = _scaled(self.materialize(), scale)
        return (_l1(gradients) if norm == "l1" else tf.sqrt(_l2_squared(gradients))), 1

    @abc.abstractmethod
    def weighted_sum(self, weights, dtype=tf.float32):
        """Σ_b weights_b · gradient_b, in the variable's shape, added up in `dtype`.

        Each contribution is within C, but what others add is rounded in units of the running sum,
        which it moves. In float32 b rows are added at once (`over_rows`): B rows, of one term each,
        are off by 2⁻²⁴(b + 1)BC at most, and what one moves by twice that.

        In float64 where a part of each contribution is taken away from the sum alone, and what is
        summed may be 2⁸ times as long (`LEAST_OF_TERMS`): B rows of T terms are off by
        2⁻⁵³BT·2⁸BC, next to nothing, and by 2⁻²⁴BC when the result is rounded.
        """

    def weighted_sum_of_squares(self, weights):
        """Σ_b (weights_b · gradient_b)², in the variable's shape.

        The weight goes in before the square, since the square of a large gradient overflows. Added
        up as in `weighted_sum`: each is within C², and what others add is rounded.
        """
        return _squares(weights, self.materialize())

    def inner(self, directions):
        """⟨gradient_b, u_k⟩ for each example b and direction, (B, k); directions (k, *shape)."""
        return tf.transpose(tf.map_fn(self.along, directions))

    def along(self, direction):
        """⟨gradient_b, direction⟩ for each example b, (B,); `direction` in the variable's shape."""
        return products_of_rows(as_rows(self.materialize()), as_rows(direction[None]))[:, 0]

    @abc.abstractmethod
    def mapped(self, function):
        """The same with `function` of each of its tensors that have a row for each example."""

    def keep(self, valid):
        """The same gradients with those of examples where the boolean `valid` (B,) is False zeroed.

        Multiplying a NaN by a weight of zero would leave a NaN.
        """
        return self.mapped(zeroing(valid))

    @abc.abstractmethod
    def materialize(self):
        """The per-example gradients themselves, (B, *shape)."""

    def grouped(self, size):
        """The sums of the gradients of each `size` consecutive rows, as one factor of B/size."""
        gradients = self.materialize()
        parts = tf.reshape(gradients, (-1, size, *gradients.shape[1:]))
        return DenseGradients(tf.reduce_sum(parts, axis=1))


class DenseGradients(Factor):
    """The gradients themselves: for biases, scales, and layers without a rule.

    Args:
        gradients: (B, *shape).
    """

    def __init__(self, gradients):
        self.gradients = tf.cast(gradients, tf.float32)
        self.shape = tuple(self.gradients.shape[1:])

    def squared_norm(self, scale=None):
        return _l2_squared(_scaled(self.gradients, scale))

    def weighted_sum(self, weights, dtype=tf.float32):
        return _combined(weights, self.gradients, dtype)

    def mapped(self, function):
        return DenseGradients(function(self.gradients))

    def materialize(self):
        return self.gradients


class OuterProducts(Factor):
    """Sums of outer products, Σ_t inputs_t ⊗ deltas_t: dense layers and convolutions.

    Args:
        inputs: (B, G, T, I), what the kernel was multiplied with; T positions or uses, and G groups
            that have kernels of their own.
        deltas: (B, G, T, O), the gradient of the loss in the products.
        shape: of the variable.
        layout: the G·I·O entries as axes, in the order of the arguments; None if that is `shape`.
        order: permutation of `layout` that gives the variable's entries in their order.
    """

    def __init__(self, inputs, deltas, shape, layout=None, order=None):
        self.inputs = tf.cast(inputs, tf.float32)
        self.deltas = tf.cast(deltas, tf.float32)
        self.shape = tuple(shape)
        self.layout = tuple(layout or shape)
        self.order = tuple(order or range(len(self.layout)))
        self._gradients = None

    @property
    def _sizes(self):
        (_, groups, positions, inputs), outputs = self.inputs.shape, self.deltas.shape[-1]
        return groups, positions, inputs, outputs

    @property
    def form(self):
        """How the entries stand for those of the variable: equal where two uses can be joined."""
        groups, _, inputs, outputs = self._sizes
        return self.layout, self.order, (groups, inputs, outputs)

    def squared_norm(self, scale=None):
        matrix = None if scale is None else self.as_matrix(scale)
        groups, positions, inputs, outputs = self._sizes
        if positions == 1:
            return _l2_squared(self._sizes_of_terms("l2", scale))
        if self.is_small:
            return _l2_squared(_scaled(self._materialized(), matrix))
        terms = self.terms("l2", scale)
        if positions is not None and matrix is None and self._gram_is_cheaper:
            return with_rounding(self._gram_norm(), terms, in_a_row(inputs) + in_a_row(outputs))
        if positions is not None and matrix is not None and self._pairs_are_cheaper:
            products = in_a_row(inputs) + groups * outputs
            return with_rounding(self._norm_of_pairs(matrix), terms, products)
        total = sum(_l2_squared(block) for block in self._blocks(matrix))
        return with_rounding(total, terms)

    def l1_norm(self, scale=None):
        matrix = None if scale is None else self.as_matrix(scale)
        if self._sizes[1] == 1:
            return self.terms("l1", scale)[0]
        if self.is_small:
            return _l1(_scaled(self._materialized(), matrix))
        total = sum(_l1(block) for block in self._blocks(matrix))
        return raised(total, self.terms("l1", scale))

    def terms(self, norm, scale=None):
        sizes = self._sizes_of_terms(norm, scale)
        return tf.reduce_sum(sizes, axis=(1, 2)), sizes_of(self.inputs)[2]

    def _sizes_of_terms(self, norm, scale):
        """‖S ∘ (a_t ⊗ b_t)‖ for each group and position, (B, G, T)."""
        matrix = None if scale is None else self.as_matrix(scale)
        power, root = (tf.abs, tf.identity) if norm == "l1" else (tf.square, tf.sqrt)
        # Through the largest entries: tiny deltas beside huge inputs must not flush to zero.
        (a, largest_a), (b, largest_b) = _unit_range(self.inputs, 3), _unit_range(self.deltas, 3)
        # An entry that overflows would be cut off in the sum, and the row with it is left out.
        fits = tf.math.is_finite(largest_a * largest_b)
        largest = tf.where(fits, _first(largest_a, largest_b), np.inf)
        if matrix is None:
            total = tf.reduce_sum(power(a), axis=3) * tf.reduce_sum(power(b), axis=3)
        else:
            matrix, largest_s = _unit_range(matrix, (0, 1, 2))
            total = tf.reduce_sum(_through(power(a), power(matrix)) * power(b), axis=3)
            # A geometry may weigh most what is least: of each entry, what flushed to zero is less.
            _, inputs, outputs = matrix.shape
            total += inputs * outputs * 8 * _SMALLEST
            total *= 1 + rounding(in_a_row(inputs) + outputs, full=True)
            largest *= largest_s
        return root(total) * largest[..., 0]

    @property
    def is_small(self):
        """Whether the per-example gradients take no more room than what was recorded."""
        _, positions, inputs, outputs = self._sizes
        return positions is not None and inputs * outputs <= 2 * positions * (inputs + outputs)

    @property
    def _gram_is_cheaper(self):
        _, positions, inputs, outputs = self._sizes
        return positions * (inputs + outputs) < inputs * outputs

    def _terms_in_range(self):
        """Inputs and deltas whose products are at most 1, and the largest product (B, 1, 1, 1)."""
        # Each term over its own largest entries: huge inputs whose deltas are zero must not make
        # the other terms vanish beside them.
        (a, largest_a), (b, largest_b) = _unit_range(self.inputs, 3), _unit_range(self.deltas, 3)
        sizes, largest = _unit_range(largest_a * largest_b, (1, 2, 3))
        return a * sizes, b, largest

    def _gram_norm(self):
        """Σ_ts (a_t·a_s)(b_t·b_s): the squared norm of Σ_t a_t ⊗ b_t, in T² products."""
        a, b, largest = self._terms_in_range()
        # Of very many pairs, a sum in float32 could lose more than all the products before.
        grams = [tf.cast(products_of_rows(each, each), tf.float64) for each in (a, b)]
        total = tf.cast(tf.reduce_sum(grams[0] * grams[1], axis=(1, 2, 3)), tf.float32)
        norm = tf.sqrt(tf.maximum(total, 0.0))
        return tf.square(norm * largest[:, 0, 0, 0])

    @property
    def _pairs_are_cheaper(self):
        """Whether one product of matrices for each pair beats gradients that are written down."""
        return self._sizes[1] <= FEW_POSITIONS

    def _norm_of_pairs(self, matrix):
        """Σ_ts (a_t ∘ a_s)ᵀ S² (b_t ∘ b_s): the squared norm of S ∘ Σ_t a_t ⊗ b_t."""
        a, b, largest = self._terms_in_range()
        matrix, largest_s = _unit_range(matrix, (0, 1, 2))
        groups, positions, inputs, outputs = self._sizes
        t, s = np.triu_indices(positions)
        a, b = (tf.gather(each, t, axis=2) * tf.gather(each, s, axis=2) for each in (a, b))
        pairs = tf.reduce_sum(_through(a, tf.square(matrix)) * b, axis=(1, 3))
        weights = tf.constant(np.where(t == s, 1.0, 2.0))  # in float64, as in `_gram_norm`
        total = tf.cast(tf.linalg.matvec(tf.cast(pairs, tf.float64), weights), tf.float32)
        # Of each entry of each pair, what flushed to zero on the way is less.
        total = tf.maximum(total, 0.0) + groups * inputs * outputs * positions**2 * 16 * _SMALLEST
        return tf.square(tf.sqrt(total) * (largest * largest_s)[:, 0, 0, 0])

    def _blocks(self, matrix):
        """The per-example gradients (B, G, some of I, O), times the geometry (G, I, O)."""
        groups, _, inputs, outputs = self._sizes
        width = max(1, BLOCK // (groups * outputs * (self.inputs.shape[0] or 256)))
        a, b, largest = self.inputs, self.deltas, None
        if is_coarse():  # what is small would lose its second part
            a, b, largest = self._terms_in_range()
        for start in range(0, inputs, width):
            gradients = in_full(_over_positions, a[..., start : start + width], b)
            gradients = _scaled(gradients, largest)
            yield _scaled(gradients, None if matrix is None else matrix[:, start : start + width])

    def _materialized(self):
        """The per-example gradients (B, G, I, O), computed once, and only for norms.

        These need no allowance for rounding, since the sums take the same numbers. Sums are made
        within a branch of the graph, of which nothing may be kept.
        """
        if self._gradients is None:
            self._gradients = _over_positions(self.inputs, self.deltas)
        return self._gradients

    def as_matrix(self, tensor):
        """A tensor in the variable's shape as (G, I, O); `_as_variable` goes back."""
        groups, _, inputs, outputs = self._sizes
        if not self._is_in_order:
            tensor = tf.reshape(tensor, [self.layout[axis] for axis in self.order])
            tensor = tf.transpose(tensor, np.argsort(self.order))
        return tf.reshape(tensor, (groups, inputs, outputs))

    def _as_variable(self, matrix):
        if not self._is_in_order:
            matrix = tf.transpose(tf.reshape(matrix, self.layout), self.order)
        return tf.reshape(matrix, self.shape)

    @property
    def is_matrix(self):
        """Whether they are gradients of one matrix: all axes but the last together, the last."""
        return self._sizes[0] == 1 and self._is_in_order and self._sizes[3] == self.shape[-1]

    @property
    def _is_in_order(self):
        order = [axis for axis in self.order if self.layout[axis] != 1]
        return order == sorted(order)

    def weighted_sum(self, weights, dtype=tf.float32):
        if self._gradients is not None:
            return self._as_variable(_combined(weights, self._gradients, dtype))
        # A weight could make the deltas of one term vanish, or overflow, and not of that which the
        # term has to cancel with: only terms in the same units go to zero alike.
        inputs, largest = _unit_range(self.inputs, 3)
        weighted = _finite(_first(largest, self.deltas) * weights[:, None, None, None])
        return self._as_variable(over_rows(self._of_rows, dtype, inputs, weighted))

    def _of_rows(self, inputs, deltas):
        if self._sizes[0] == 1:
            inputs, deltas = (tf.reshape(t, (-1, t.shape[-1])) for t in (inputs, deltas))
            return tf.matmul(inputs, deltas, transpose_a=True)
        return tf.einsum("bgti,bgto->gio", inputs, deltas)

    def weighted_sum_of_squares(self, weights):
        if self._gradients is not None:
            return self._as_variable(_squares(weights, self._gradients))
        if self._sizes[:2] == (1, 1):
            a, largest = _unit_range(self.inputs, 3)
            b = _finite(_first(largest, self.deltas) * weights[:, None, None, None])
            squares = tf.square(a[:, 0, 0]), tf.square(b[:, 0, 0])
            return self._as_variable(over_rows(_over_positions, tf.float32, *squares))
        blocks = [_squares(weights, block) for block in self._blocks(None)]
        return self._as_variable(tf.concat(blocks, axis=1))

    def inner(self, directions):
        if self._sizes[1] != 1 and self.is_small:
            self._materialized()  # the numbers of norm and sum; not within the loop
        return super().inner(directions)

    def along(self, direction):
        if self._gradients is not None:
            return super().along(direction)
        # As in `_sizes_of_terms`: what flushed to zero here would be missing from the norm alone.
        (a, largest_a), (b, largest_b) = _unit_range(self.inputs, 3), _unit_range(self.deltas, 3)
        matrix, largest_d = _unit_range(self.as_matrix(direction), (0, 1, 2))
        products = tf.reduce_sum(_through(a, matrix) * b, axis=3)
        products *= (largest_a * largest_b)[..., 0]
        return tf.reduce_sum(products, axis=(1, 2)) * tf.reshape(largest_d, ())

    def mapped(self, function):
        inputs, deltas = function(self.inputs), function(self.deltas)
        result = OuterProducts(inputs, deltas, self.shape, self.layout, self.order)
        if self._gradients is not None:
            result._gradients = function(self._gradients)
        return result

    def materialize(self):
        gradients = self._gradients
        if gradients is None:
            gradients = in_full(_over_positions, self.inputs, self.deltas)
        gradients = tf.reshape(gradients, (-1, *self.layout))
        gradients = tf.transpose(gradients, (0, *(axis + 1 for axis in self.order)))
        return tf.reshape(gradients, (-1, *self.shape))

    def grouped(self, size):
        inputs, deltas = _merged(self.inputs, size, 2), _merged(self.deltas, size, 2)
        return OuterProducts(inputs, deltas, self.shape, self.layout, self.order)


class Lookup(Factor):
    """Gradients that touch few rows of a table: embeddings.

    Args:
        ids: (B, T) integers, the rows that were looked up.
        deltas: (B, T, D), the gradient of the loss in what was looked up.
        shape: (V, D), shape of the table.
        distinct: whether no example looks up a row twice; `deltas` are then its gradient.
    """

    def __init__(self, ids, deltas, shape, distinct=False):
        # Of a row that there is not, XLA takes the last where it reads, and none where it adds.
        inside = (ids >= 0) & (ids < shape[0])
        self.ids = tf.where(inside, ids, 0)
        self.deltas = tf.where(inside[..., None], tf.cast(deltas, tf.float32), 0.0)
        self.shape = tuple(shape)
        self.distinct = distinct or ids.shape[1] == 1

    def squared_norm(self, scale=None):
        scales = 1.0 if scale is None else tf.gather(scale, self.ids)
        if self.distinct:
            return _l2_squared(self.deltas * scales)
        sums, repeats = self._sums()
        squares = tf.reduce_sum(tf.square(sums * scales), axis=2) / repeats
        return with_rounding(tf.reduce_sum(squares, axis=1), self.terms("l2", scale))

    def l1_norm(self, scale=None):
        scales = 1.0 if scale is None else tf.gather(scale, self.ids)
        if self.distinct:
            return _l1(self.deltas * scales)
        sums, repeats = self._sums()
        total = tf.reduce_sum(tf.abs(sums * scales) / repeats[..., None], axis=(1, 2))
        return raised(total, self.terms("l1", scale))

    def terms(self, norm, scale=None):
        deltas = self.deltas if scale is None else self.deltas * tf.gather(scale, self.ids)
        if norm == "l1":
            return _l1(deltas), sizes_of(self.ids)[1]
        return tf.reduce_sum(tf.norm(deltas, axis=2), axis=1), sizes_of(self.ids)[1]

    def _sums(self):
        """Each position's row of the gradient (B, T, D), and at how many positions it stands."""
        if self.distinct:
            return self.deltas, tf.ones(sizes_of(self.ids))
        same = tf.cast(self.ids[:, :, None] == self.ids[:, None, :], tf.float32)
        return in_full(tf.matmul, same, self.deltas), tf.reduce_sum(same, axis=2)

    def weighted_sum(self, weights, dtype=tf.float32):
        return self._scatter(self.deltas * weights[:, None, None], dtype)

    def places(self):
        """Which positions have a gradient, (B, T)."""
        return tf.reduce_any(self.deltas != 0, axis=2)

    def first_places(self):
        """For each row that an example touches, the first of its `places`; (B, T)."""
        places = self.places()
        if self.distinct:
            return places
        order = tf.range(tf.shape(self.ids)[1])
        same = self.ids[:, :, None] == self.ids[:, None, :]
        earlier = same & (order[:, None] > order[None, :]) & places[:, None, :]
        return places & ~tf.reduce_any(earlier, axis=2)

    def weighted_rows(self, weights):
        """The rows of `weighted_sum` that may differ from 0, each once, as `tf.IndexedSlices`."""
        places = self.places()
        values = tf.boolean_mask(self.deltas * weights[:, None, None], places)
        return rows_once(tf.boolean_mask(self.ids, places), values, self.shape)

    def weighted_sum_of_squares(self, weights):
        sums, repeats = self._sums()
        squares = tf.square(weights[:, None, None] * sums)
        return self._scatter(squares / repeats[..., None], tf.float32)

    def along(self, direction):
        products = tf.cast(tf.gather(direction, self.ids) * self.deltas, tf.float64)
        return tf.cast(tf.reduce_sum(products, axis=(1, 2)), tf.float32)

    def _scatter(self, values, dtype):
        # Of a large table a sum for each part of the rows would take longer than one in float64.
        double = (self.deltas.shape[0] or 0) > ROWS
        values = tf.cast(tf.reshape(values, (-1, self.shape[1])), tf.float64 if double else dtype)
        ids = tf.reshape(self.ids, (-1,))
        return tf.cast(tf.math.unsorted_segment_sum(values, ids, self.shape[0]), dtype)

    def mapped(self, function):
        return Lookup(self.ids, function(self.deltas), self.shape, self.distinct)

    def materialize(self):
        return in_full(_over_positions, tf.one_hot(self.ids, self.shape[0]), self.deltas)

    def grouped(self, size):
        return Lookup(_merged(self.ids, size, 1), _merged(self.deltas, size, 1), self.shape)


def rows_once(ids, values, shape):
    """Rows of a table of this shape, as `tf.IndexedSlices` in which equal ones are added up."""
    ids, places = tf.unique(ids)
    total = tf.math.unsorted_segment_sum(tf.cast(values, tf.float64), places, tf.size(ids))
    total = tf.cast(total, values.dtype)
    return tf.IndexedSlices(total, ids, tf.convert_to_tensor(shape, tf.int32))


class TiedTable(Factor):
    """An embedding whose table is also the output projection: a look-up plus a matrix product.

    Each is summed over the batch by itself, in float32, since heads are large. So a norm is at
    least `LEAST_OF_PARTS` of theirs: what is summed is not much longer than what is left of it.

    Args:
        lookup: `Lookup` of the look-ups.
        products: `OuterProducts` of the projection, with inputs (B, 1, T, V) and deltas
            (B, 1, T, D).
    """

    def __init__(self, lookup, products):
        self.lookup = lookup
        self.products = products
        self.shape = lookup.shape

    def squared_norm(self, scale=None):
        lookup, products = self.lookup.squared_norm(scale), self.products.squared_norm(scale)
        total = tf.maximum(lookup + products + 2 * self._cross(scale), 0.0)
        total = with_rounding(total, self.terms("l2", scale), in_a_row(self.shape[1]))
        return tf.maximum(total, tf.square(LEAST_OF_PARTS * (tf.sqrt(lookup) + tf.sqrt(products))))

    def l1_norm(self, scale=None):
        parts = self.lookup.l1_norm(scale) + self.products.l1_norm(scale)
        return tf.maximum(super().l1_norm(scale), LEAST_OF_PARTS * parts)

    def terms(self, norm, scale=None):
        (one, count), (other, more) = (
            use.terms(norm, scale) for use in (self.lookup, self.products)
        )
        return one + other, count + more

    def _cross(self, scale):
        """⟨scale ⊙ look-ups, scale ⊙ projection⟩ for each example, through the rows looked up."""
        ids, looked_up, deltas = self.lookup.ids, self.lookup.deltas, self.products.deltas[:, 0]
        # (B, T, looked up)
        at_ids = tf.gather(self.products.inputs[:, 0], ids, axis=2, batch_dims=1)
        # Three small and large numbers, or five, whose products leave the range of float32.
        looked_up, deltas, at_ids = (
            tf.cast(part, tf.float64) for part in (looked_up, deltas, at_ids)
        )
        if scale is not None:
            looked_up *= tf.square(tf.gather(tf.cast(scale, tf.float64), ids))
        products = tf.matmul(deltas, looked_up, transpose_b=True)
        return tf.cast(tf.reduce_sum(at_ids * products, axis=(1, 2)), tf.float32)

    def weighted_sum(self, weights, dtype=tf.float32):
        return self.lookup.weighted_sum(weights, dtype) + self.products.weighted_sum(weights, dtype)

    def along(self, direction):
        return self.lookup.along(direction) + self.products.along(direction)

    def mapped(self, function):
        return TiedTable(self.lookup.mapped(function), self.products.mapped(function))

    def materialize(self):
        return self.lookup.materialize() + self.products.materialize()

    def grouped(self, size):
        return TiedTable(self.lookup.grouped(size), self.products.grouped(size))


class Mapped(Factor):
    """The gradients of another factor, each through the same linear map.

    Args:
        inner: the factor.
        function: the map, of tensors (..., *shape) of float32 or float64. It mixes the entries that
            have one number of `stretch`, and makes no vector of these longer, in L2, than that.
        stretch: numbers that broadcast to the variable's shape, of as many axes.
    """

    def __init__(self, inner, function, stretch):
        self.inner_factor, self.function, self.stretch = inner, function, stretch
        self.shape = inner.shape

    def squared_norm(self, scale=None):
        gradients = self.inner_factor.materialize()
        total = _l2_squared(_scaled(self.function(gradients), scale))
        return with_rounding(total, self.terms("l2", scale))

    def terms(self, norm, scale=None):
        """Those before the map: it may take most of them away, and leave their rounding."""
        return self.inner_factor.terms(norm, self.stretches(norm, scale))

    def stretches(self, norm, scale=None):
        """How much longer map and `scale` make an entry at most, in the variable's shape."""
        shape, stretch = self.shape, self.stretch
        mixed = [axis for axis, size in enumerate(stretch.shape) if size == 1]
        if scale is not None:
            stretch *= tf.reduce_max(scale, axis=mixed, keepdims=True)
        if norm == "l1":  # ‖v‖₁ ≤ √n ‖v‖₂
            stretch *= math.sqrt(math.prod(shape[axis] for axis in mixed))
        return tf.broadcast_to(stretch, shape)

    def weighted_sum(self, weights, dtype=tf.float32):
        return tf.cast(self.function(self.inner_factor.weighted_sum(weights, tf.float64)), dtype)

    def mapped(self, function):
        return self._of(self.inner_factor.mapped(function))

    def materialize(self):
        return self.function(self.inner_factor.materialize())

    def grouped(self, size):
        return self._of(self.inner_factor.grouped(size))

    def _of(self, inner):
        """The same map of another factor."""
        other = copy.copy(self)
        other.inner_factor = inner
        return other


def joined(one, other):
    """The sum of the gradients of two uses of the same variable, as one factor."""
    match one, other:
        case Lookup(), Lookup():
            ids = tf.concat([one.ids, tf.cast(other.ids, one.ids.dtype)], axis=1)
            return Lookup(ids, tf.concat([one.deltas, other.deltas], axis=1), one.shape)
        case OuterProducts(), OuterProducts() if one.form == other.form:
            inputs = tf.concat([one.inputs, other.inputs], axis=2)
            deltas = tf.concat([one.deltas, other.deltas], axis=2)
            return OuterProducts(inputs, deltas, one.shape, one.layout, one.order)
        case OuterProducts(), Lookup() if one.form == (one.shape, (0, 1), (1, *one.shape)):
            return TiedTable(other, one)
        case Lookup(), OuterProducts():
            return joined(other, one)
        case TiedTable(), Lookup():
            return TiedTable(joined(one.lookup, other), one.products)
        case TiedTable(), OuterProducts() if one.products.form == other.form:
            return TiedTable(one.lookup, joined(one.products, other))
        case TiedTable(), TiedTable() if one.products.form == other.products.form:
            return joined(joined(one, other.lookup), other.products)
    return DenseGradients(one.materialize() + other.materialize())


def sizes_of(tensor):
    """The sizes of the axes: numbers where they are static, else scalar tensors."""
    if tensor.shape.is_fully_defined():
        return list(tensor.shape)
    dynamic = tf.shape(tensor)
    return [dynamic[axis] if size is None else size for axis, size in enumerate(tensor.shape)]


def _l2_squared(gradients):
    return tf.reduce_sum(tf.square(gradients), axis=range(1, gradients.shape.rank))


def _l1(gradients):
    return tf.reduce_sum(tf.abs(gradients), axis=range(1, gradients.shape.rank))


def _scaled(gradients, scale):
    return gradients if scale is None else gradients * scale


def _through(inputs, matrix):
    """(B, G, T, I) times (G, I, O) as one product of matrices a group, without broadcasting."""
    if matrix.shape[0] == 1:
        return in_parts(lambda a, b: tf.tensordot(a, b, 1), inputs, matrix[0], axis=(3, 0))
    product = functools.partial(tf.einsum, "bgti,gio->bgto")
    return in_parts(product, inputs, matrix, axis=(3, 1))


def as_rows(tensor):
    """Tensors (n, *shape) as the rows of a matrix."""
    return tf.reshape(tensor, (sizes_of(tensor)[0], math.prod(tensor.shape[1:])))


def products_of_rows(one, other):
    """Of matrices: each row of one by each row of the other."""
    return in_parts(functools.partial(tf.matmul, transpose_b=True), one, other, axis=(-1, -1))


def _over_positions(inputs, deltas):
    """Σ_t a_t ⊗ b_t of each example."""
    return tf.matmul(inputs, deltas, transpose_a=True)


def _finite(weighted):
    """Weighted numbers, cut off where they overflow: an infinite one times 0 would be NaN.

    A row in which the products themselves overflow is left out (`_sizes_of_terms`).
    """
    return tf.clip_by_value(weighted, tf.float32.min, tf.float32.max)


def _first(one, other):
    """Their product, before any other number comes in.

    Graphs are rewritten so that what is smallest is multiplied first, whatever flushes to zero; not
    beyond another operation.
    """
    return _finite(one * other)


def _unit_range(tensor, axis):
    """A tensor over its largest entry along `axis`, and that entry."""
    largest = tf.reduce_max(tf.abs(tensor), axis=axis, keepdims=True)
    return tf.math.divide_no_nan(tensor, largest), largest


def with_rounding(squared_norm, terms, products=None):
    """The squared norm of a sum of `terms` (as `Factor.terms` gives them), made safe.

    Where it was found from products of terms, rounding moved it by at most ρ(Σ terms)²: of as many
    `products` as are added one after another. It is raised by that, and as in `raised`.
    """
    if products is not None:
        squared_norm += rounding(products, full=True) * tf.square(terms[0])
    return tf.square(raised(tf.sqrt(squared_norm), terms))


def raised(norm, terms):
    """The norm of a sum of `terms`, found from its entries, made safe: it can only clip more.

    Rounding moves these, and the sum, which is computed and released elsewhere, each by at most
    ρ·Σ terms. And the norm is no less than 2⁻⁸·Σ terms: the contributions of others, to which terms
    that cancel are added in between, would be rounded in units of them.
    """
    total, count = terms
    both = rounding(count) + rounding(count, full=True)
    return tf.maximum(norm + both * total, LEAST_OF_TERMS * total)


def zeroing(valid):
    """A function of tensors (B, ...) that zeroes the rows where the boolean `valid` is False."""
    column = functools.cache(lambda rank: tf.reshape(valid, (-1,) + (1,) * (rank - 1)))
    return lambda tensor: tf.where(column(tensor.shape.rank), tensor, 0.0)


def _combined(weights, gradients, dtype):
    """Σ_b weights_b · gradients_b of gradients (B, ...), as products of matrices."""
    rows, *shape = sizes_of(gradients)
    if len(shape) != 1:
        gradients = tf.reshape(gradients, (rows, math.prod(shape)))
    product = functools.partial(tf.linalg.matvec, transpose_a=True)
    total = over_rows(product, dtype, gradients, weights)
    return total if len(shape) == 1 else tf.reshape(total, shape)


def _squares(weights, gradients):
    """Σ_b (weights_b · gradients_b)² of gradients (B, ...)."""

    def squares(weights, gradients):
        return tf.reduce_sum(tf.square(weights * gradients), axis=0)

    weights = tf.reshape(weights, (-1,) + (1,) * (gradients.shape.rank - 1))
    return over_rows(squares, tf.float32, weights, gradients)


def over_rows(product, dtype, *tensors):
    """`product` of tensors (B, ...), which sums over the rows; in float32, of b of them at a time.

    A row moves the rounding of those that it is added up with. Of b, if each is of one term not
    longer than C, the sum is off by 2⁻²⁴ · b · bC at most; those of others are as they were if
    their rows are, and are added to it in float64, where kernels cannot go on from one to the next.
    The terms of one row lie side by side: they are added up before the next row.

    Args:
        product: of tensors of some rows.
        dtype: float32, or float64, in which all rows are summed at once.
        *tensors: of a number of rows that is known, or they are summed at once, too.
    """
    rows = tensors[0].shape[0]
    if dtype == tf.float64 or rows is None or rows <= ROWS:
        return product(*(tf.cast(each, dtype) for each in tensors))
    size, total = max(ROWS, -(-rows // SHARES)), 0.0
    for start in range(0, rows, size):
        with tf.control_dependencies([total] if start else []):  # not all of them at once
            part = product(*(each[start : start + size] for each in tensors))
            total += tf.cast(part, tf.float64)
    return tf.cast(total, dtype)


def _merged(tensor, size, axis):
    """(B·size, ...) as (B, ...): what stood in `size` consecutive rows stands along `axis`."""
    _, *sizes = sizes_of(tensor)
    split = tf.reshape(tensor, (-1, size, *sizes))
    last = range(axis + 1, len(sizes) + 2)
    sizes[axis - 1] *= size
    return tf.reshape(tf.transpose(split, (0, *range(2, axis + 1), 1, *last)), (-1, *sizes))
