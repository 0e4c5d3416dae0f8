"""Tables of which a query asks single rows: what is summed and counted in the place of whole ones.

A step that looks up few of a million rows has neither the gradient of the table nor anything else
of its size, but for one number a row.
"""

import tensorflow as tf

from dp_keras_opt.clipping.factors import Lookup, rows_once


def lookups(query, gradients, variables):
    """The gradients, in which those of tables are of the rows that are trained.

    Raises:
        ValueError: the query asks for more than a clipped sum; or a table is used otherwise than by
            looking rows up, so that its gradient has more rows than these.
    """
    if query.tables is None:
        return gradients
    other = query.scale, query.geometry, query.centre, query.points, query.directions
    if query.square or query.counts or any(part is not None for part in other):
        raise ValueError("Tables are answered by row for plain clipped sums only.")
    found = list(gradients)
    for index, trained in query.tables.trained.items():
        gradient, path = found[index], variables[index].path
        if gradient is not None and not isinstance(gradient, Lookup):
            raise ValueError(
                f"{path} is not only looked up in: as an output projection, or in a layer without "
                "a rule of its own, each example has a gradient in all of its rows. Leave it out "
                "of SparseEmbeddings(layers=[...])."
            )
        if gradient is not None and trained is not None:
            is_trained = tf.gather(trained, tf.clip_by_value(gradient.ids, 0, trained.shape[0] - 1))
            deltas = tf.where(is_trained[..., None], gradient.deltas, 0.0)
            found[index] = Lookup(gradient.ids, deltas, gradient.shape, gradient.distinct)
    return found


def counts(query, gradients, variables, factor):
    """What the units count in each row of each table in turn, (ΣV,): Σ_i factor(√k_i).

    Args:
        query: with `tables`.
        gradients: those of `lookups`.
        variables: the trainable ones.
        factor: function of √k_i (units,), the norm of unit i's ones; gives min(1, C₁/√k_i), or 0
            for a unit that does not count.
    """
    used = [i for i in query.tables.trained if gradients[i] is not None]
    first = {i: gradients[i].first_places() for i in used}
    number = sum(tf.reduce_sum(tf.cast(first[i], tf.float32), axis=1) for i in used)
    share = factor(tf.sqrt(number)) if used else None

    def of_table(index):
        if index not in first:
            return tf.zeros(variables[index].shape[:1])
        places = first[index]
        shares = tf.boolean_mask(tf.broadcast_to(share[:, None], tf.shape(places)), places)
        ids = tf.boolean_mask(gradients[index].ids, places)
        shares = tf.cast(shares, tf.float64)  # as in `rows_once`
        total = tf.math.unsorted_segment_sum(shares, ids, variables[index].shape[0])
        return tf.cast(total, tf.float32)

    return tf.concat([of_table(index) for index in query.tables.trained], axis=0)


def none_of(variable):
    """No row of a table."""
    values, shape = tf.zeros((0, *variable.shape[1:])), tf.constant(tuple(variable.shape), tf.int32)
    return tf.IndexedSlices(values, tf.zeros((0,), tf.int32), shape)


def added(one, other):
    """The sum of two answers: of tensors, or of rows."""
    if not isinstance(one, tf.IndexedSlices):
        return one + other
    ids = tf.concat([one.indices, other.indices], axis=0)
    values = tf.concat([one.values, other.values], axis=0)
    return rows_once(ids, values, one.dense_shape)
