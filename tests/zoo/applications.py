"""Networks of keras.applications, without their weights, on the smallest pictures they take."""

import keras

from tests.zoo.example import classifier, numbers


def application(name, size=32):
    """A network of this name, with a head for three classes."""
    shape = (size, size, 3)
    inputs = keras.Input(shape)
    options = {"include_top": False, "weights": None, "pooling": "avg"}
    base = getattr(keras.applications, name)(input_shape=shape, **options)
    return classifier(inputs, base(inputs), numbers(*shape))
