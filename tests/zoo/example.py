"""A model with data that fit it, and the arrays that the models are fed with."""

from typing import Any, NamedTuple

import keras
import numpy as np

#: Rows of the batch that a model is tried on.
BATCH_SIZE = 8


class Example(NamedTuple):
    """A model, one batch for it, and its loss as `compile` takes it."""

    model: keras.Model
    x: Any
    y: Any
    loss: Any = "mse"


def numbers(*shape, seed=0):
    """Normal numbers, one array of this shape for each row."""
    return np.random.default_rng(seed).normal(size=(BATCH_SIZE, *shape)).astype("float32")


def integers(high, *shape, low=0, seed=0):
    """Integers below `high`."""
    return np.random.default_rng(seed).integers(low, high, (BATCH_SIZE, *shape)).astype("int32")


def words(choices, *shape, seed=0):
    """Strings, drawn from these."""
    return np.random.default_rng(seed).choice(choices, (BATCH_SIZE, *shape))


def classes():
    """The loss of a classifier that gives logits."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def classifier(inputs, hidden, x, number=3):
    """An `Example` with a dense layer on top, for this many classes."""
    model = keras.Model(inputs, keras.layers.Dense(number, name="head")(hidden))
    return Example(model, x, integers(number, seed=1), classes())
