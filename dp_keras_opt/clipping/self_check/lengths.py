"""Whether the length of a batch, which its longest row decides, changes what the others give."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np

from dp_keras_opt.clipping.batch import Batch
from dp_keras_opt.clipping.self_check.passes import agree
from dp_keras_opt.clipping.self_check.synthetic import Synthetic

_FIX = (
    "Pad all rows to one fixed length: Buckets([length]) of a sampler of dp_keras_opt.data; or "
    "padded_shapes= of padded_batch, stated with tf.ensure_shape"
)


def require_length(synthetic: Synthetic) -> None:
    """Refuses data of open sizes for which a model has no length at all.

    Raises:
        ValueError: saying why it does not run.
    """
    if synthetic.open_leaves and synthetic.length is None:
        raise ValueError(
            f"The data leaves sizes of {', '.join(synthetic.open_leaves)} open, and the model runs "
            f"with none that was tried ({synthetic.reason}), so that it cannot be checked that "
            f"rows do not change with the length of their batch. {_FIX}."
        )


def check_lengths(
    model: keras.Model,
    slope: Callable[[Batch], list[np.ndarray]],
    why_not: Callable[[Batch], str | None],
    synthetic: Synthetic,
    batch: Batch,
) -> None:
    """Compares the losses of rows, and their gradients, with those of the same rows padded.

    Where batches are padded to their longest row, a long example pads all others. What these give
    must not change by it: masks must keep the padding out.

    Args:
        model: the model.
        slope: function of a batch that gives its losses and gradients, without randomness.
        why_not: why the model gives no finite losses for a batch, None where it does.
        synthetic: what pads a batch where the data leaves sizes open, with 0, "" or False.
        batch: a synthetic batch.

    Raises:
        ValueError: they change, or the model runs with one length only.
    """
    if not synthetic.open_leaves:
        return
    names = ", ".join(synthetic.open_leaves)
    before, compared = slope(batch), False
    for longer in synthetic.longer(batch):
        if why_not(longer) is not None:
            continue
        compared = True
        for old, new in zip(before, slope(longer), strict=True):
            if not agree(old, new, model):
                raise ValueError(
                    f"The data leaves sizes of {names} open, and an example's loss or gradient "
                    "changes when its batch gets longer. Where a batch is padded to its longest "
                    "example, that one then changes what all others give, and moves the sum by "
                    "more than its own clipped gradient: the ε would be too small; in buckets, "
                    "the boundaries would decide what is learned. Mask the padding through to the "
                    "loss (mask_zero=True in Embedding, or a Masking layer of value 0; pooling and "
                    "recurrent layers then leave it out; `a + b` of tensors loses the mask, "
                    "layers.Add keeps it). Weights of 0 for padded positions are not enough, since "
                    "an example's loss is the mean over all positions that are not masked. Or: "
                    f"{_FIX}."
                )
    if not compared:
        raise ValueError(
            f"The data leaves sizes of {names} open, but the model runs with one length only, of "
            f"those that were tried ({synthetic.length}), so that it cannot be checked that rows "
            f"do not change with the length of their batch. {_FIX}."
        )
