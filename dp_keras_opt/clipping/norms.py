"""How long examples' gradients are, and which share is clipped: on data that is public."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from dp_keras_opt.clipping.batch import Batch, valid_rows
from dp_keras_opt.clipping.book_keeping import gradients_for
from dp_keras_opt.clipping.clipped_sum import norms_by_group
from dp_keras_opt.clipping.geometry import seen_by
from dp_keras_opt.clipping.grouped_rows import PerUnit
from dp_keras_opt.clipping.groups import clip_groups
from dp_keras_opt.clipping.query import UNCLIPPED
from dp_keras_opt.clipping.self_check import checked_engines
from dp_keras_opt.clipping.table_rows import lookups
from dp_keras_opt.types import Norm


def per_example_norms(
    model: keras.Model,
    batch: tuple[Any, ...],
    norm: Norm = "l2",
    scale: Sequence[Any] | None = None,
    batch_size: int = 256,
) -> np.ndarray:
    """‖scale ⊙ gradient‖ of each example, before any clipping.

    Raw figures about each example, without noise: compute them on public data only, or on data
    that looks like yours. (A clip norm chosen on the private data is chosen without a guarantee.)

    Args:
        model: a compiled `DPModel`.
        batch: a tuple (x, y) or (x, y, sample_weight) of arrays with one row per example; a batch
            of a sampler; or, for the norms of users' gradients, a `clipping.Batch` whose mask is
            (users, K).
        norm: "l2" or "l1".
        scale: None, or the diagonal geometry, one array per trainable variable.
        batch_size: how many rows to process at once; no user is cut in two.

    Returns:
        float32 array of one norm per row (per user; 0 for one who is all padding); NaN or infinite
        where the gradient is.

    Raises:
        TypeError: `batch` is something else.
    """
    (norms,), _ = _norms(model, batch, UNCLIPPED._replace(norm=norm, scale=scale), batch_size)
    return norms


def clip_fraction(model: keras.Model, batch: tuple[Any, ...], batch_size: int = 256) -> float:
    """The share of these examples whose gradient the model's optimizer would clip now.

    A raw figure about the examples, without noise: compute it on public data only. There it costs
    no privacy, since it is a function of public data, of released weights and of an optimizer that
    knows released values only.

    Args:
        model: a `DPModel`, compiled with the optimizer whose clip norm, geometry and style count.
        batch: as for `per_example_norms`.
        batch_size: how many rows to process at once.

    Returns:
        The share of the examples (users) whose norm exceeds the clip norm, or that of one layer
        where layers are clipped on their own (also with `normalize=True`, which scales all).
        Padding and examples whose gradient is not finite do not count, nor, around a centre, those
        of weight 0; NaN if there are no others.
    """
    optimizer = model.optimizer
    optimizer.ensure_built(model.trainable_variables)
    optimizer.begin(model)
    query = next(query for query in optimizer.queries() if query.population == "private")
    norms, valid = _norms(model, batch, query, batch_size)
    bounds = np.asarray([bound for _, bound in clip_groups(model, query)], np.float32)
    counted = valid & np.all(np.isfinite(norms), axis=0)
    clipped = np.any(norms > bounds[:, None], axis=0)
    return float(np.mean(clipped[counted])) if counted.any() else np.nan


def _norms(model, batch, query, batch_size):
    """For each group of variables that the query clips together, one norm per row (per user).

    Returns:
        (norms, valid): (groups, units), and which of the units a step counts, boolean (units,).
    """
    batch = _batch_of(batch)
    if batch.mask is not None:
        batch = batch._replace(mask=tf.cast(batch.mask, tf.bool))
    per_unit = batch.rows_per_user or 1
    num_rows, step = len(tree.flatten(batch.x)[0]), max(1, batch_size // per_unit) * per_unit
    groups, engines = clip_groups(model, query), None
    norms, valid = [np.zeros((len(groups), 0), np.float32)], [np.zeros(0, bool)]
    for start in range(0, num_rows, step):
        part = _part(batch, start, start + step, per_unit)
        engines = engines or checked_engines(model, part)
        losses, _, (gradients,) = gradients_for([query], model, part, None, engines)
        counted = valid_rows(part, losses, weighted=query.centre is not None)
        units = PerUnit(losses, counted, gradients)
        if part.rows_per_user is not None:
            units = units.grouped(part.mask)
        count, variables = len(units.losses), model.trainable_variables
        seen = lookups(query, seen_by(query, units.gradients, variables, count), variables)
        norms.append(np.stack(norms_by_group(query, seen, groups, count)))
        valid.append(units.valid.numpy())
    return np.concatenate(norms, axis=1), np.concatenate(valid)


def _batch_of(batch):
    if isinstance(batch, tuple | list) and 2 <= len(batch) <= len(Batch._fields):
        x, y, *rest = batch
        if rest and hasattr(rest[0], "mask"):  # of a sampler
            rest = [rest[0].sample_weight, rest[0].mask, rest[0].public]
        if all(leaf is None or len(getattr(leaf, "shape", ())) for leaf in tree.flatten((x, y))):
            return Batch(x, y, *rest)
    raise TypeError(
        "`batch` must be arrays (x, y) or (x, y, sample_weight) with a row for each example; "
        f"received a {type(batch).__name__}."
    )


def _part(batch, start, stop, per_unit):
    """Rows of the batch, and of its mask, which has one row for each user, of `per_unit` rows."""

    def rows(structure, per_entry=1):
        if structure is None:
            return None
        chosen = slice(start // per_entry, stop // per_entry)
        return tree.map_structure(lambda t: tf.convert_to_tensor(t[chosen]), structure)

    return Batch(*map(rows, batch[:3]), rows(batch.mask, per_unit))
