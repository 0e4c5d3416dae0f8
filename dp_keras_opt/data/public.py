"""Rows of public data beside the private ones of each batch."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import tensorflow as tf

from dp_keras_opt.checks import whole_number
from dp_keras_opt.data import examples
from dp_keras_opt.data.batches import Batches, RowInfo, row_info, rows_per_user
from dp_keras_opt.data.buckets import Blocks
from dp_keras_opt.types import Map


def with_public(
    private: Batches,
    public: Any,
    public_batch_size: int | None = None,
    *,
    map: Map | None = None,
) -> Batches:
    """Adds rows of public data to each private batch, for optimizers that use them.

    Args:
        private: `Batches`, e.g. of `poisson_batches`.
        public: `(x, y)` of arrays shaped like the private examples, or a source, as for
            `poisson_batches`; data that needs no protection.
        public_batch_size: number of public rows in each batch, drawn without replacement. Default:
            all of them.
        map: function of one public example, as for `poisson_batches`.

    Returns:
        `Batches` whose elements end in the public rows. These are neither clipped nor noised nor
        accounted, have weight 1, and count in no metric.

    Guarantee: none about the public data; every privacy statement says that it was used. Declare
    only data public that is: a user who asks nothing of it, or data that anyone may have.

    Raises:
        ValueError: the structures or shapes do not match those of the private data.
    """
    if not isinstance(private, Batches) or not isinstance(private.dataset, tf.data.Dataset):
        raise ValueError(
            "private must be Batches of a tf.data.Dataset, such as poisson_batches gives; received "
            f"{private!r}."
        )
    if isinstance(private.dataset.element_spec, Blocks):
        raise ValueError(
            "Public rows do not go with buckets of several lengths. Pad the private examples and "
            "the public ones to one length: buckets=Buckets([512])."
        )
    theirs = examples.of(public, map=map)
    count = theirs.num_examples
    size = count if public_batch_size is None else public_batch_size
    size = whole_number(
        size, "public_batch_size", 1, f"There are {count} public examples.", maximum=count
    )
    here = tf.zeros([1], tf.int64)
    ours, form = tuple(private.dataset.element_spec[:2]), theirs.gather(here)[0][:2]
    try:
        tf.nest.map_structure(_check_same_form, ours, form)
    except (TypeError, ValueError) as error:
        spec = tf.nest.map_structure(
            lambda t: t if t is None else tf.TensorSpec((None, *t.shape[1:]), t.dtype), form
        )
        raise ValueError(
            f"Public data of the form {spec} stand beside private data of the form {ours}. Give "
            "both the same form."
        ) from error

    def join(x_private, y_private, rows=None):
        chosen = tf.range(count) if size == count else tf.random.shuffle(tf.range(count))[:size]
        number = tf.shape(keras.tree.flatten(x_private)[0])[0]
        rows = row_info(rows, number)
        per_user = rows_per_user(rows) or 1  # public rows are no user's, but fill up users' places
        filling = -size % per_user
        places = tf.cast(tf.pad(chosen, [(0, filling)]), tf.int64)
        (x, y, _), _ = theirs.gather(tf.ensure_shape(places, [size + filling]))

        def append(private_part, public_part):
            if private_part is None:  # no targets
                return None
            return tf.concat([private_part, public_part], axis=0)

        joined = keras.tree.map_structure(append, (x_private, y_private), (x, y))
        weight = keras.tree.map_structure(
            lambda w: None if w is None else append(w, tf.ones((size + filling,), w.dtype)),
            rows.sample_weight,
        )
        share = tf.pad(tf.fill((size,), 1.0 / (size * private.workers)), [(number, filling)])
        ends = [(0, (size + filling) // per_user)] + [(0, 0)] * (rows.mask.shape.rank - 1)
        return (*joined, RowInfo(tf.pad(rows.mask, ends), weight, share))

    return dataclasses.replace(private, dataset=private.dataset.map(join))


def _check_same_form(ours, theirs):
    if theirs is None and not hasattr(ours, "dtype"):  # neither has targets
        return
    if theirs is None or not hasattr(ours, "dtype"):
        raise ValueError("One has targets and the other has none.")
    if ours.dtype != theirs.dtype or not ours.shape[1:].is_compatible_with(theirs.shape[1:]):
        raise ValueError("The shapes or the types of the examples differ.")
