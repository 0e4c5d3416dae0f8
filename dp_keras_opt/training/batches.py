"""Batches as Keras hands them to a step: unpacked, described by their form, cut into chunks."""

import keras
import tensorflow as tf
from keras import tree

from dp_keras_opt.clipping import Batch
from dp_keras_opt.clipping.batch import map_leaves
from dp_keras_opt.data import Blocks, RowInfo, buckets


def blocks_of(data):
    """The parts of a batch as Keras hands it over: one, or one for each length of its examples."""
    of_train_on_batch = type(data) is tuple and data and isinstance(data[0], Blocks)
    return buckets.blocks_of(data[0] if of_train_on_batch else data)


def of_any_length(batches):
    """What stands for parts of several lengths: a `Batch` of specs in which sizes are open."""
    if len(batches) == 1:
        return batches[0]

    def common(*leaves):
        if leaves[0] is None:
            return None
        sizes = (set(size) for size in zip(*(leaf.shape for leaf in leaves), strict=True))
        shape = [size.pop() if len(size) == 1 else None for size in sizes]
        return tf.TensorSpec(shape, leaves[0].dtype)

    parts = ((batch.x, batch.y, batch.sample_weight) for batch in batches)
    return Batch(*tree.map_structure(common, *parts))


def as_batch(data, convert=tf.convert_to_tensor):
    """The (x, y[, sample_weight or RowInfo]) that Keras hands to `train_step`, as a `Batch`."""
    x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
    mask = public = None
    if isinstance(weight, RowInfo):
        mask, weight, public = (None if _is_empty(part) else part for part in weight)
    x, y, weight, mask, public = map_leaves(convert, (x, y, weight, mask, public))
    mask = tf.cast(mask, tf.bool) if tf.is_tensor(mask) else mask
    return Batch(x, y, weight, mask, public)


def _is_empty(part):
    """Whether it is the `()` that stands for None in the `RowInfo` of a `PyDataset`."""
    return isinstance(part, tuple) and not part


def form_of(batch, any_rows):
    """The specs of x, y and weights; with `any_rows`, of batches of any number of rows."""

    def spec(tensor):
        rows = None if any_rows else tensor.shape[0]
        return tf.TensorSpec([rows, *tensor.shape[1:]], tensor.dtype)

    return tuple(tf.nest.flatten(map_leaves(spec, (batch.x, batch.y, batch.sample_weight))))


def common_form(form, other):
    """The form of which batches of two forms are, None if there is none.

    A size that differs is open. How many rows there are counts only as far as it is fixed.
    """

    def common(one, two):
        if one is None or two is None:
            return one
        inner = [a if a == b else None for a, b in zip(one.shape[1:], two.shape[1:], strict=True)]
        rows = one.shape[0] if two.shape[0] is not None else None
        return tf.TensorSpec([rows, *inner], one.dtype)

    def kind(form):
        return [spec and (spec.dtype, spec.shape.rank) for spec in form]

    return tuple(map(common, form, other)) if kind(form) == kind(other) else None


def by_row(mask, dtype=None):
    """A mask (rows,) or (users, K) as (rows,); None stays."""
    return None if mask is None else tf.cast(tf.reshape(mask, [-1]), dtype or mask.dtype)


def chunks_of(batch, size):
    """Cuts a batch into blocks of `size` rows, the last one padded with its last row.

    Args:
        batch: a `Batch`.
        size: a number, or a scalar tensor.

    Returns:
        (function of an index that gives that block as a `Batch`, number of blocks).
    """
    static = size if isinstance(size, int) else None
    total = batch.num_rows or tf.shape(tree.flatten(batch.x)[0])[0]
    count = -(-total // size)
    mask = tf.ones((total,), tf.bool) if batch.mask is None else by_row(batch.mask)

    places = tf.range(count * size)

    def repeated(tensor):  # rows that a model takes; of zeros some give NaN, as where all is masked
        return tf.gather(tensor, tf.minimum(places, total - 1))

    def of_nobody(tensor):
        return tf.pad(tensor, [(0, count * size - total)])

    padded = (
        *map_leaves(repeated, (batch.x, batch.y, batch.sample_weight)),
        *map_leaves(of_nobody, (mask, batch.public)),
    )

    def chunk(index):
        def block(tensor):  # XLA needs the size of a slice to be static
            begin = [index * size, *[0] * (tensor.shape.rank - 1)]
            part = tf.slice(tensor, begin, tf.concat([[size], tf.shape(tensor)[1:]], axis=0))
            return tf.ensure_shape(part, (static, *tensor.shape[1:]))

        part = Batch(*map_leaves(block, padded))
        if batch.rows_per_user is None:
            return part
        return part._replace(mask=tf.reshape(part.mask, (-1, batch.rows_per_user)))

    return chunk, count
