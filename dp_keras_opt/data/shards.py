"""A batch shared out among replicas."""

import keras
import tensorflow as tf

from dp_keras_opt.data.batches import RowInfo, row_info, rows_per_user
from dp_keras_opt.data.buckets import Blocks


def shard(batches, num_replicas):
    """The data set of a `Batches`, each batch cut into one part for each replica, in turn.

    All parts are of equal size: padding, with the values of the last row, makes up for the rows
    that are missing. A user's rows stay in one part.
    """

    def part_of(batch, index):
        x, y, rows = keras.utils.unpack_x_y_sample_weight(batch)
        total = tf.shape(tf.nest.flatten(x)[0])[0]
        rows = row_info(rows, total)
        per_user = rows_per_user(rows) or 1

        units = -(-total // per_user)
        own = tf.range(index, units + -units % num_replicas, num_replicas)
        places = tf.reshape(own[:, None] * per_user + tf.range(per_user), [-1])

        def repeated(tensor):
            return None if tensor is None else tf.gather(tensor, tf.minimum(places, total - 1))

        def of_nobody(tensor, places):
            if tensor is None:
                return None
            ends = [(0, num_replicas * per_user)] + [(0, 0)] * (tensor.shape.rank - 1)
            return tf.gather(tf.pad(tensor, ends), places)

        x, y, weight = keras.tree.map_structure(repeated, (x, y, rows.sample_weight))
        mask = of_nobody(rows.mask, places if rows.mask.shape.rank == 1 else own)
        return x, y, RowInfo(mask, weight, of_nobody(rows.public, places))

    def all_parts(*batch):
        if isinstance(batch[0], Blocks):
            (batch,) = batch

        def part(index):
            if not isinstance(batch, Blocks):
                return part_of(batch, index)
            return Blocks(tuple(part_of(block, index) for block in batch.blocks))

        return tf.data.Dataset.range(num_replicas, output_type=tf.int32).map(part)

    return batches.dataset.flat_map(all_parts) if num_replicas > 1 else batches.dataset
