"""The norms of examples' gradients: to choose a clip norm, on data that is public."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from dp_keras_opt.clipping import users
from dp_keras_opt.clipping.clipped_sum import Batch, norms_by_group, per_example_gradients
from dp_keras_opt.clipping.query import UNCLIPPED
from dp_keras_opt.clipping.self_check import checked_plan
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
        batch: a tuple (x, y) or (x, y, sample_weight) of arrays with one row per example; or, for
            the norms of users' gradients, a `clipping.Batch` whose mask is (users, K).
        norm: "l2" or "l1".
        scale: None, or the diagonal geometry, one array per trainable variable.
        batch_size: how many rows to process at once; of users, as many as have so many rows.

    Returns:
        float32 array of one norm per row (per user; 0 for one who is all padding); NaN or infinite
        where the gradient is.
    """
    batch = Batch(*batch)
    if batch.mask is not None:
        batch = batch._replace(mask=tf.cast(batch.mask, tf.bool))
    together = batch.rows_per_user or 1
    rows, step = len(tree.flatten(batch.x)[0]), max(1, batch_size // together) * together
    query = UNCLIPPED._replace(norm=norm, scale=scale)
    plan, norms = None, []
    for start in range(0, rows, step):
        part = _part(batch, start, start + step, together)
        plan = plan or checked_plan(model, part)
        losses, _, factors = per_example_gradients(model, part, plan)
        if part.rows_per_user is not None:
            losses, _, factors = users.of_users(losses, part.mask, factors)
        (whole,) = norms_by_group(query, factors, [(range(len(factors)), None)], len(losses))
        norms.append(whole.numpy())
    return np.concatenate(norms) if norms else np.zeros(0, np.float32)


def _part(batch, start, stop, together):
    """Rows of the batch, and of its mask, which may have one row for so many together."""

    def rows(structure, together=1):
        if structure is None:
            return None
        chosen = slice(start // together, stop // together)
        return tree.map_structure(lambda t: tf.convert_to_tensor(t[chosen]), structure)

    return Batch(*map(rows, batch[:3]), rows(batch.mask, together))
