"""Steps 1-3: geometry, bound, sum. The only code that sees raw gradients."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import keras
import tensorflow as tf

from dp_keras_opt.clipping import book_keeping, per_example, users
from dp_keras_opt.clipping.factors import rounding

if TYPE_CHECKING:
    from dp_keras_opt.clipping.query import Query


class Batch(NamedTuple):
    """The rows of one physical batch.

    Attributes:
        x, y: inputs and targets, any structure of tensors with one row per example.
        sample_weight: None, or weights that multiply each example's loss before clipping.
        mask: None, or a boolean (B,): False for padding, which contributes exactly zero, and for
            public rows. If it is (B/K, K) instead, each K consecutive rows are those of one user,
            who is clipped as one (`clipping/users.py`).
        public: None, or float32 (B,): for rows declared public, one over their number in the
            logical batch; 0 for all others.
    """

    x: Any
    y: Any
    sample_weight: Any = None
    mask: Any = None
    public: Any = None

    @property
    def rows(self) -> int | None:
        """Number of rows where it is static, else None."""
        return tf.nest.flatten(self.x)[0].shape[0]

    @property
    def rows_per_user(self) -> int | None:
        """K where each K consecutive rows are clipped as one, None where each row is."""
        by_row = self.mask is None or self.mask.shape.rank == 1
        return None if by_row else int(self.mask.shape[1])  # never by row because K is unknown


class ClippedSums(NamedTuple):
    """What one physical batch gives.

    Attributes:
        sums: for each query, one float32 tensor per trainable variable: Σ_i clip(s ⊙ g_i; C).
            Adding or removing one row (one user's rows, where the mask says whose they are)
            changes it by at most C in the query's norm.
        losses: the loss of each example, (B,). Raw: for metrics only.
        y_pred: the model's outputs. Raw: for metrics only.
        non_finite: how many examples (users) contributed zero because their gradient was NaN or
            infinite. A count over private data: to be shown to its owner only.
    """

    sums: list
    losses: Any
    y_pred: Any
    non_finite: Any


def clipped_sums(
    model: keras.Model,
    batch: Batch | tuple[Any, ...],
    queries: Sequence[Query],
    plan: book_keeping.Plan | None = None,
    loss_scale: float = 1.0,
) -> ClippedSums:
    """One forward pass, one backward pass, one clipped sum per query (spec: core.md, steps 1-3).

    Args:
        model: a built and compiled `DPModel`.
        batch: a `Batch`, or a tuple (x, y) or (x, y, sample_weight).
        queries: tuple of `Query`.
        plan: which engine serves which layer, by default the one found by walking the model.
        loss_scale: factor on the loss that keeps float16 gradients from vanishing; undone before
            the norm is taken.

    Returns:
        `ClippedSums`.

    Guarantee: for each query the sum of two batches that differ in one row's presence differ by at
    most its `clip_norm` in the geometry of the query, up to float32 rounding, whatever the row
    holds (NaN and infinities included). With a mask (users, K) this holds for all rows of one user
    together. Public rows belong to no user, and are answered for row by row.
    """
    batch = Batch(*tf.nest.map_structure(_tensor, tuple(batch)))
    plan = plan or book_keeping.plan(model)
    losses, y_pred, factors = per_example_gradients(model, batch, plan, loss_scale)
    rows = private = losses, _valid(losses, batch), factors
    if batch.rows_per_user is not None:
        private = users.of_users(losses, batch.mask, factors)
    sums, non_finite = [], 0
    for query in queries:
        groups = clip_groups(model, query)
        unit_losses, valid, factors = rows if query.rows == "public" else private
        norms = norms_by_group(query, factors, groups, tf.shape(unit_losses)[0])
        finite = tf.reduce_all(tf.math.is_finite([unit_losses, *norms]), axis=0)
        if query.rows == "public":
            weights = [tf.where(finite, batch.public, 0.0)] * len(factors)
        else:
            weights = [None] * len(factors)
            for norm, (indices, bound) in zip(norms, groups, strict=True):
                weight = tf.where(finite & valid, clip_factor(norm, bound, query), 0.0)
                for index in indices:
                    weights[index] = weight
            non_finite = tf.reduce_sum(tf.cast(valid & ~finite, tf.int64))
        total = _answer(query, model.trainable_variables, factors, weights, finite)
        if query.scale is not None:
            power = 2 if query.square else 1
            total = [t * s**power for t, s in zip(total, query.scale, strict=True)]
        sums.append(total)
    return ClippedSums(sums, losses, y_pred, non_finite)


def _answer(query, variables, factors, weights, finite):
    """What the query sums over the examples, those that are not finite left out."""

    def answer(keep):
        kept = [None if f is None else keep(f) for f in factors]
        if query.directions is not None:
            return _second_moment_products(query.directions, kept, weights[0])
        return [
            tf.zeros(variable.shape)
            if f is None
            else f.weighted_sum_of_squares(w)
            if query.square
            else f.weighted_sum(w)
            for f, w, variable in zip(kept, weights, variables, strict=True)
        ]

    # Zeroing rows costs a pass over all that was recorded, and is rarely needed.
    return tf.cond(
        tf.reduce_all(finite), lambda: answer(lambda f: f), lambda: answer(lambda f: f.keep(finite))
    )


def _second_moment_products(directions, factors, weights):
    """Σ_i weights_i · p_i⟨p_i, v⟩ for each direction v, p_i the gradient of all variables."""

    def product(direction):
        pairs = list(zip(factors, direction, strict=True))
        inner = sum((f.inner(v) for f, v in pairs if f is not None), tf.zeros_like(weights))
        inner = tf.where(weights > 0, weights * inner, 0.0)  # that of another row may be NaN
        return [tf.zeros_like(v) if f is None else f.weighted_sum(inner) for f, v in pairs]

    return tf.map_fn(product, list(directions))


def clip_groups(model: keras.Model, query: Query) -> list[tuple[Sequence[int], Any]]:
    """Which variables are clipped together, and to what bound.

    Returns:
        A list of (indices into `model.trainable_variables`, bound C_l).

    Raises:
        ValueError: proportions are given, and not for exactly the layers that are trained.
    """
    variables = model.trainable_variables
    if query.style == "flat" or query.rows == "public":
        return [(range(len(variables)), query.clip_norm)]
    by_layer = variables_by_layer(model)
    shares = dict.fromkeys(by_layer, 1.0) if query.style == "per_layer" else query.style
    if set(shares) != set(by_layer):
        raise ValueError(
            f"clipping={query.style!r} must name exactly the layers that are trained: "
            f"{sorted(by_layer)}."
        )
    whole = sum(shares.values()) if query.norm == "l1" else math.hypot(*shares.values())
    index = {id(variable): place for place, variable in enumerate(variables)}
    return [
        ([index[id(v)] for v in owned], query.clip_norm * (shares[name] / whole))
        for name, owned in by_layer.items()
    ]


def variables_by_layer(model):
    """The trainable variables of each layer that owns some, by the layer's name.

    A variable of several layers belongs to the first. Layers of equal names are told apart by the
    path of their variables, and by a number where that is the same, too.
    """
    owners, seen = {}, set()
    for layer in model._flatten_layers():
        below = {id(v) for child in per_example.children(layer) for v in child.trainable_variables}
        owned = [v for v in layer.trainable_variables if id(v) not in below | seen]
        seen.update(id(v) for v in owned)
        if owned:
            path = owned[0].path.rpartition("/")[0]
            names = itertools.chain([layer.name, path], (f"{path}_{k}" for k in itertools.count(2)))
            owners[next(name for name in names if name not in owners)] = owned
    return owners


def norms_by_group(query, factors, groups, rows):
    """The norm (B,) of each example's gradient of the variables of each group, in its geometry."""
    scales = query.scale if query.scale is not None else [None] * len(factors)

    def norm(indices):
        used = [(factors[i], scales[i]) for i in indices if factors[i] is not None]
        if query.norm == "l1":
            return sum((factor.l1_norm(scale) for factor, scale in used), tf.zeros([rows]))
        squares = (factor.squared_norm(scale) for factor, scale in used)
        return tf.sqrt(sum(squares, tf.zeros([rows])))

    return [norm(indices) for indices, _ in groups]


def clip_factor(norm, bound, query):
    """The number ≤ C/‖v‖ that an example with this norm is multiplied with."""
    norm = norm * (1 + rounding())  # what the products of the sum may be rounded up by
    if query.normalize:
        return bound / (norm + query.gamma)
    return tf.minimum(1.0, bound / norm)


def per_example_gradients(model, batch, plan, loss_scale=1.0):
    """The per-example gradients of every trainable variable, as factors.

    Returns:
        (losses (B,), outputs of the model, one Factor or None per trainable variable); None where
        the loss does not depend on the variable.
    """
    with tf.GradientTape() as tape, book_keeping.recording(plan, batch.rows) as calls:
        y_pred = model(batch.x, training=True)
        losses = model.per_example_losses(batch.y, y_pred, batch.sample_weight)
        objective = tf.reduce_sum(_counted(losses, batch)) * loss_scale
    deltas = tape.gradient(objective, [call.source for call in calls])
    return losses, y_pred, _factors(model, batch, calls, deltas, loss_scale)


def _valid(losses, batch):
    """Which rows are private and no padding, (B,)."""
    return tf.fill(tf.shape(losses), True) if batch.mask is None else tf.reshape(batch.mask, [-1])


def _counted(losses, batch):
    """What the rows that some query may ask for add to the objective, 0 for padding."""
    if batch.mask is None:
        return losses
    rows = _valid(losses, batch)
    if batch.public is not None:
        rows |= batch.public > 0
    if batch.rows_per_user is not None:
        losses *= tf.cast(users.shares(batch.mask), losses.dtype)
    return tf.where(rows, losses, 0.0)


def _tensor(value):
    return None if value is None else tf.convert_to_tensor(value)


def _factors(model, batch, calls, deltas, loss_scale):
    uses = {id(variable): [] for variable in model.trainable_variables}
    for call, delta in zip(calls, deltas, strict=True):
        if delta is None:
            continue
        delta = tf.convert_to_tensor(delta)  # slices of one, where rows were gathered
        if delta.shape[0] is None and batch.rows is not None:  # lost on the way, as by strings
            delta = tf.ensure_shape(delta, (batch.rows, *delta.shape[1:]))
        if delta.shape[0] != batch.rows:
            reason = f"it gives {call.output.shape}, without one row for each of {batch.rows}"
            raise book_keeping.CallFailed(call.layer, reason)
        for variable, factor in call.factors(tf.cast(delta, tf.float32) / loss_scale):
            if id(variable) in uses:  # frozen variables have no gradient
                uses[id(variable)].append(factor)
    return [
        functools.reduce(lambda a, b: a.join(b), uses[id(v)]) if uses[id(v)] else None
        for v in model.trainable_variables
    ]
