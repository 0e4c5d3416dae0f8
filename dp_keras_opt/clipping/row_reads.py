"""Embeddings that read the rows that they look up, and not their whole tables."""

import contextlib

import keras
import tensorflow as tf

from dp_keras_opt._keras import layers_of, patched, variable_itself
from dp_keras_opt.clipping.layer_rules import ids_of


@contextlib.contextmanager
def read_by_row(model, queries):
    """The scope in which embeddings of which a query asks single rows read single rows.

    TensorFlow copies a variable that is assigned by row whenever the whole of it is read, as
    Keras's embedding does. What is looked up is the same.
    """
    tables = {index for query in queries if query.tables for index in query.tables.trained}
    found = {id(model.trainable_variables[index]) for index in tables}
    with contextlib.ExitStack() as patches:
        for layer in layers_of(model) if found else ():
            is_plain = type(layer).call is keras.layers.Embedding.call
            if is_plain and id(layer.embeddings) in found:
                patches.enter_context(patched(layer, "call", _call_by_row(layer)))
        yield


def _call_by_row(layer):
    def call(inputs):
        ids = tf.reshape(ids_of(inputs, layer.input_dim), tf.shape(inputs))
        outputs = tf.gather(variable_itself(layer.embeddings), ids)
        return tf.cast(outputs, layer.compute_dtype)

    return call
