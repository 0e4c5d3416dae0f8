"""Steps 1-3: geometry, bound, sum. The only code that sees raw gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from dp_keras_opt import deprecation
from dp_keras_opt.clipping import precision, table_rows, tensorflow_settings
from dp_keras_opt.clipping.batch import Batch, map_leaves, valid_rows
from dp_keras_opt.clipping.book_keeping import gradients_for
from dp_keras_opt.clipping.engines import Engines, engines_for
from dp_keras_opt.clipping.factors import zeroing
from dp_keras_opt.clipping.geometry import seen_by
from dp_keras_opt.clipping.grouped_rows import PerUnit
from dp_keras_opt.clipping.groups import clip_groups
from dp_keras_opt.clipping.query import Query


class ClippedSums(NamedTuple):
    """What one physical batch gives.

    Attributes:
        sums: for each query, one float32 tensor per trainable variable: Σ_i clip(s ⊙ g_i; C).
            Adding or removing one row (one user's rows, where the mask says whose they are)
            changes it by at most C in the query's norm. Of a query that `counts`, behind them the
            counts of its L groups, (L,), which that changes by at most ½ each. Of one with
            `tables`, these as `tf.IndexedSlices`, and behind all the counts of their rows, which
            that changes by at most C₁ in L2.
        losses: the loss of each example, (B,). Raw: for metrics only.
        y_pred: the model's outputs. Raw: for metrics only.
        non_finite: how many examples (users) contributed zero because their gradient was NaN or
            infinite. A count over private data: to be shown to its owner only.
    """

    sums: list
    losses: Any
    y_pred: Any
    non_finite: Any


@deprecation.renamed_arguments(plan="engines")
def clipped_sums(
    model: keras.Model,
    batch: Batch | tuple[Any, ...],
    queries: Sequence[Query],
    engines: Engines | None = None,
    loss_scale: float = 1.0,
    *,
    per_example_loss: Callable[..., tf.Tensor] | None = None,
) -> ClippedSums:
    """One forward pass, one backward pass (or one of each a point), one clipped sum per query.

    For a query of geometry s and bound C it is Σ_i clip(s ⊙ g_i; C) over the rows (or users) i with
    their gradients g_i, where clip(v; C) = v·min(1, C/‖v‖): computed as s ⊙ Σ_i w_i g_i with
    w_i = min(1, C/‖s ⊙ g_i‖), so that no gradient of a single row need be written down. With a
    centre a, g_i − a stands for g_i; with a matrix M as geometry, M stands for s.

    Args:
        model: a built model.
        batch: a `Batch`, or a tuple (x, y) or (x, y, sample_weight).
        queries: tuple of `Query`.
        engines: which engine serves which layer, by default those found by walking the model.
        loss_scale: factor on the loss that keeps float16 gradients from vanishing; undone before
            the norm is taken.
        per_example_loss: function of (y, y_pred, sample_weight) that gives the losses (B,), each of
            its own row alone; by default the objective that a `DPModel` was compiled with.

    Returns:
        `ClippedSums`.

    Guarantee: of a model in which no example changes what others give, and of engines that are
    right for it (`fit` checks both before the first step, and nothing is checked here): for each
    query the sum of two batches that differ in one row's presence differ by at
    most its `clip_norm` in the geometry of the query, up to float32 rounding, whatever the row
    holds (NaN and infinities included), also where GPUs multiply in TF32 (`precision`). With a mask
    (users, K) this holds for all rows of one user together. Public rows belong to no user, and are
    answered for row by row.

    Raises:
        ValueError: TensorFlow is set to multiply float32 numbers in fewer bits than TF32 has; or
            a query has several points, and rows of a user are clipped as one.

    Reference: Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar and Zhang, "Deep learning with
    differential privacy", CCS 2016, doi:10.1145/2976749.2978318, arXiv:1607.00133, Algorithm 1.
    """
    tensorflow_settings.check()
    batch = Batch(*map_leaves(tf.convert_to_tensor, tuple(batch)))
    if batch.rows_per_user is not None and any(query.points for query in queries):
        raise ValueError("Gradients at several points are not defined for rows of a user together.")
    losses, y_pred, found = gradients_for(
        queries, model, batch, per_example_loss, engines or engines_for(model), loss_scale
    )
    valid = valid_rows(batch, losses, weighted=any(q.centre is not None for q in queries))
    rows = units = [PerUnit(losses, valid, gradients) for gradients in found]
    if batch.rows_per_user is not None:  # all at the weights as they are, and grouped once
        units = [each.grouped(batch.mask) for each in rows[:1]] * len(rows)
    sums, non_finite = [], 0
    for query, per_row, per_unit in zip(queries, rows, units, strict=True):
        groups, variables = clip_groups(model, query), model.trainable_variables
        used = per_row if query.population == "public" else per_unit
        count = tf.shape(used.losses)[0]
        used = used._replace(gradients=seen_by(query, used.gradients, variables, count))
        if query.population == "public":
            total = _public_mean(query, groups, used, batch.public, variables)
        else:
            total, non_finite = _clipped_sum(query, groups, used, variables)
        sums.append(total)
    return ClippedSums(sums, losses, y_pred, non_finite)


def _clipped_sum(query, groups, units, variables):
    """(Σ_i clip(s ⊙ g_i; C) over the valid units i, how many of them are not finite)."""
    units = units._replace(gradients=table_rows.lookups(query, units.gradients, variables))
    norms, finite = _norms(query, groups, units)
    weights = [None] * len(variables)
    for norm, (indices, bound) in zip(norms, groups, strict=True):
        weight = tf.where(units.valid & finite, clip_factor(norm, bound, query), 0.0)
        for index in indices:
            weights[index] = weight
    total = _weighted_sum(query, units.gradients, weights, finite, variables)
    if query.counts:
        total.append(_counts(norms, groups, units.valid & finite))
    if query.tables and query.tables.contribution_norm is not None:
        total.append(_row_counts(query, units, finite, variables))
    return total, tf.reduce_sum(tf.cast(units.valid & ~finite, tf.int64))


def _counts(norms, groups, counted):
    """Σ_i (b_i − ½) for each group, b_i whether unit i is not longer than its bound.

    Over the units that are `counted` and have a gradient: one that adds nothing to the sum (of
    weight 0, say) adds nothing here, so that neighbours by `zero_out` differ by ½, not by 1.
    """

    def one(norm, bound):
        halves = tf.where(norm <= bound, 0.5, -0.5)
        return tf.reduce_sum(tf.where(counted & (norm > 0), halves, 0.0))

    return tf.stack([one(norm, bound) for norm, (_, bound) in zip(norms, groups, strict=True)])


def _row_counts(query, units, finite, variables):
    """What the valid and finite units count in each row of each table, (ΣV,)."""

    def factor(norm):
        norm = norm * (1 + precision.rounding())
        share = tf.minimum(1.0, query.tables.contribution_norm / norm)
        return tf.where(units.valid & finite, share, 0.0)

    return table_rows.counts(query, units.gradients, variables, factor)


def _public_mean(query, groups, rows, shares, variables):
    """The mean of s ⊙ g_i over the public rows i, whose `shares` are one over their number."""
    _, finite = _norms(query, groups, rows)
    weights = [tf.where(finite, shares, 0.0)] * len(variables)
    return _weighted_sum(query, rows.gradients, weights, finite, variables)


def _norms(query, groups, units):
    """(the norms by group, which units have finite ones and a finite loss), each (units,)."""
    norms = norms_by_group(query, units.gradients, groups, tf.shape(units.losses)[0])
    return norms, tf.reduce_all([tf.math.is_finite(v) for v in (units.losses, *norms)], axis=0)


def _weighted_sum(query, gradients, weights, finite, variables):
    """s ⊙ Σ_i w_i g_i, or what else the query sums, over the units that are finite."""
    gradients = _of_finite(gradients, finite)
    if query.directions is not None:
        total = _second_moment_products(query.directions, gradients, weights[0])
    else:
        by_row = query.tables.trained if query.tables else ()

        def one(index, g, w, variable):
            if index in by_row:
                return table_rows.none_of(variable) if g is None else g.weighted_rows(w)
            if g is None:
                return tf.zeros(variable.shape)
            return g.weighted_sum_of_squares(w) if query.square else g.weighted_sum(w)

        each = enumerate(zip(gradients, weights, variables, strict=True))
        total = [one(index, *of_one) for index, of_one in each]
    if query.scale is None:
        return total
    power = 2 if query.square else 1
    return [t * s**power for t, s in zip(total, query.scale, strict=True)]


def _of_finite(gradients, finite):
    """The same with the rows of other units zeroed, where there are any.

    Zeroing rows costs a pass over all that was recorded, and is rarely needed.
    """
    recorded = []
    for g in gradients:
        if g is not None:
            g.mapped(lambda tensor: recorded.append(tensor) or tensor)
    if not recorded:
        return gradients
    zeroed = zeroing(finite)
    kept = iter(
        tf.cond(tf.reduce_all(finite), lambda: recorded, lambda: list(map(zeroed, recorded)))
    )
    return [g and g.mapped(lambda tensor: next(kept)) for g in gradients]


def _second_moment_products(directions, gradients, weights):
    """Σ_i w_i · p_i⟨p_i, v⟩ for each direction v, p_i the gradient of all variables."""

    def product(direction):
        pairs = list(zip(gradients, direction, strict=True))
        inner = sum((g.along(v) for g, v in pairs if g is not None), tf.zeros_like(weights))
        inner = tf.where(weights > 0, weights * inner, 0.0)  # that of another row may be NaN
        return [tf.zeros_like(v) if g is None else g.weighted_sum(inner) for g, v in pairs]

    return tf.map_fn(product, list(directions))


def norms_by_group(query, gradients, groups, num_units):
    """The norm (units,) of each unit's gradient of the variables of each group, in its geometry."""
    scales = query.scale if query.scale is not None else [None] * len(gradients)

    def norm(indices):
        used = [(gradients[i], scales[i]) for i in indices if gradients[i] is not None]
        if query.norm == "l1":
            return sum((g.l1_norm(scale) for g, scale in used), tf.zeros([num_units]))
        squares = (g.squared_norm(scale) for g, scale in used)
        return tf.sqrt(sum(squares, tf.zeros([num_units])))

    return [norm(indices) for indices, _ in groups]


def clip_factor(norm, bound, query):
    """The number ≤ C/‖v‖ that an example with this norm is multiplied with."""
    norm = norm * (1 + precision.rounding())  # what the products of the sum may be rounded up by
    if query.normalize:
        return bound / (norm + query.gamma)
    return tf.minimum(1.0, bound / norm)
