"""A batch shared out among replicas."""

import keras
import tensorflow as tf

from dp_keras_opt.data.batches import row_info, rows_per_user


def shard(batches, num_replicas):
    """The data set of a `Batches`, each batch cut into one part for each replica, in turn.

    All parts are of equal size: padding makes up for the rows that are missing. A user's rows stay
    in one part.
    """

    def part_of(batch, index):
        x, y, rows = keras.utils.unpack_x_y_sample_weight(batch)
        rows = row_info(rows, tf.shape(tf.nest.flatten(x)[0])[0])
        per_user = rows_per_user(rows) or 1

        def part(tensor, per_user=per_user):
            if tensor is None:
                return None
            missing = -tf.shape(tensor)[0] % (num_replicas * per_user)
            padded = tf.pad(tensor, [(0, missing)] + [(0, 0)] * (tensor.shape.rank - 1))
            places = tf.reshape(tf.range(tf.shape(padded)[0]), (-1, num_replicas, per_user))
            return tf.gather(padded, tf.reshape(places[:, index], [-1]))

        parts = keras.tree.map_structure(part, (x, y, rows._replace(mask=None)))
        return (*parts[:2], parts[2]._replace(mask=part(rows.mask, 1)))

    def all_parts(*batch):
        indices = tf.data.Dataset.range(num_replicas, output_type=tf.int32)
        return indices.map(lambda index: part_of(batch, index))

    return batches.dataset.flat_map(all_parts) if num_replicas > 1 else batches.dataset
