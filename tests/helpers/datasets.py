"""Reading data sets."""

import tensorflow as tf


def numpy_elements(dataset):
    """`dataset.as_numpy_iterator()`, which in TensorFlow 2.18 fails where an element holds None."""
    for element in dataset:
        yield tf.nest.map_structure(lambda t: None if t is None else t.numpy(), element)
