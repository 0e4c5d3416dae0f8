"""The models that the benchmarks train, with a batch of synthetic data each."""

import keras
import numpy as np

layers = keras.layers


def mlp():
    """Dense 784-512-512-10, batch 256."""
    inputs = keras.Input((784,))
    hidden = layers.Dense(512, activation="relu")(inputs)
    hidden = layers.Dense(512, activation="relu")(hidden)
    return inputs, layers.Dense(10)(hidden), *_images(256, (784,))


def cnn():
    """Conv 16@8×8/2 same, pool 2/1, Conv 32@4×4/2, pool 2/1, Dense 32, Dense 10; batch 256."""
    inputs = keras.Input((28, 28, 1))
    hidden = layers.Conv2D(16, 8, strides=2, padding="same", activation="relu")(inputs)
    hidden = layers.MaxPooling2D(2, 1)(hidden)
    hidden = layers.Conv2D(32, 4, strides=2, activation="relu")(hidden)
    hidden = layers.MaxPooling2D(2, 1)(hidden)
    hidden = layers.Dense(32, activation="relu")(layers.Flatten()(hidden))
    return inputs, layers.Dense(10)(hidden), *_images(256, (28, 28, 1))


def bow500():
    """Dense 10000→500, a bag of words; batch 64."""
    inputs = keras.Input((10_000,))
    x, y = _images(64, (10_000,), classes=500)
    return inputs, layers.Dense(500)(inputs), (x > 2).astype("float32"), y


def _images(batch_size, shape, classes=10):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(batch_size, *shape)).astype("float32")
    return x, generator.integers(0, classes, batch_size)


WORKLOADS = {"mlp": mlp, "cnn": cnn, "bow500": bow500}
