"""The norms of examples' gradients: to choose a clip norm, on data that is public."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree

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
        batch: a tuple (x, y) or (x, y, sample_weight) of arrays with one row per example.
        norm: "l2" or "l1".
        scale: None, or the diagonal geometry, one array per trainable variable.
        batch_size: how many rows to process at once.

    Returns:
        float32 array of one norm per row; NaN or infinite where the gradient is.
    """
    x, y, weight = (*batch, None)[:3]
    rows = len(tree.flatten(x)[0])
    query = UNCLIPPED._replace(norm=norm, scale=scale)
    plan, norms = None, []
    for start in range(0, rows, batch_size):
        part = Batch(*(_rows(t, start, start + batch_size) for t in (x, y, weight)))
        plan = plan or checked_plan(model, part)
        _, _, factors = per_example_gradients(model, part, plan)
        (whole,) = norms_by_group(query, factors, [(range(len(factors)), None)], part.rows)
        norms.append(whole.numpy())
    return np.concatenate(norms) if norms else np.zeros(0, np.float32)


def _rows(structure, start, stop):
    if structure is None:
        return None
    return tree.map_structure(lambda t: tf.convert_to_tensor(t[start:stop]), structure)
