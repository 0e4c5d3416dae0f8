"""Embeddings that read the rows that they look up, and not their whole tables."""

import contextlib

import keras
import tensorflow as tf

from dp_keras_opt._keras import patched, value_in_scope, variable_itself


@contextlib.contextmanager
def read_by_row(model, queries, ruled):
    """The scope in which embeddings of which a query asks single rows read single rows.

    TensorFlow copies a variable that is assigned by row whenever the whole of it is read, as
    Keras's embedding does. What is looked up is the same.

    Args:
        model: the model.
        queries: some `Query`s.
        ruled: the layers that are served by rules; what the others read are copies.
    """
    tables = {index for query in queries if query.tables for index in query.tables.trained}
    found = {id(model.trainable_variables[index]) for index in tables}
    with contextlib.ExitStack() as patches:
        for layer in ruled if found else ():
            is_plain = type(layer).call is keras.layers.Embedding.call
            if is_plain and id(layer.embeddings) in found:
                patches.enter_context(patched(layer, "call", _call_by_row(layer, layer.call)))
        yield


def _call_by_row(layer, whole):
    def call(inputs):
        if value_in_scope(layer.embeddings) is not None:
            return whole(inputs)
        ids = inputs if inputs.dtype in ("int32", "int64") else tf.cast(inputs, tf.int32)
        ids = tf.where(ids < 0, ids + layer.input_dim, ids)  # Keras counts these from the end
        return tf.cast(tf.gather(variable_itself(layer.embeddings), ids), layer.compute_dtype)

    return call
