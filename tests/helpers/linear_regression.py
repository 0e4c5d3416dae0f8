"""A model whose clipped sums have a closed form, and noise that the library and NumPy share."""

import math

import keras
import numpy as np
import tensorflow as tf

import dp_keras_opt as dp

ROWS, BATCH = 6, 8  # the realised batch is not of the expected size
SHAPES = ((4, 3), (3,))
SIZE = 15
SIGMA, CLIP = 0.8, 0.3
SAMPLING = dp.accounting.Sampling.poisson(100, BATCH)
PRIVATE = {"clip_norm": CLIP, "batch_size": BATCH, "noise_multiplier": SIGMA}

_rng = np.random.default_rng(7)
X = _rng.normal(size=(ROWS, 4)).astype("float32")
Y = _rng.normal(size=(ROWS, 3)).astype("float32")
START = _rng.normal(size=SIZE).astype("float32").astype(np.float64)


class FixedNoise:
    """Stands in for a `NoiseSource`: the draws of every step are fixed in advance.

    Args:
        optimizer: whose step number says which draws are due; also inside of a traced step.
        steps: how many steps.
        draws: how many draws of the size of the model each step takes.
        counts: how many counts have noise behind that of each draw.
    """

    def __init__(self, optimizer, steps, draws=1, counts=0):
        rng = np.random.default_rng(5)
        self.optimizer = optimizer
        shapes = (*SHAPES, (counts,)) if counts else SHAPES
        self.tables = [
            rng.normal(size=(steps, *shape)).astype("float32") for shape in shapes * draws
        ]
        self.calls = 0

    def draw(self, distribution, shape):
        """What is due for one variable, or for several of which the draws are cut."""
        step, due = tf.convert_to_tensor(self.optimizer.iterations), []
        while sum(part.shape[0] for part in due) < math.prod(shape):
            table = self.tables[self.calls % len(self.tables)]
            self.calls += 1
            due.append(tf.reshape(tf.gather(table, step), [-1]))
        return tf.reshape(tf.concat(due, 0), shape)

    def renew_after_fork(self):
        """Nothing to renew."""

    def settle(self, strategy, compiled):
        """Nothing to settle: these are constants everywhere."""

    def flat(self, step, draw=0):
        """The draw of step `step` (from 0) as one float64 vector."""
        tables = self.tables[draw * len(SHAPES) : (draw + 1) * len(SHAPES)]
        return np.concatenate([table[step].ravel() for table in tables]).astype(np.float64)


def build(optimizer, regularizer=None, sampling=SAMPLING, **compiled):
    inputs = keras.Input((4,))
    outputs = keras.layers.Dense(3, kernel_regularizer=regularizer)(inputs)
    model = dp.DPModel(inputs, outputs)
    model.compile(optimizer=optimizer, loss="mse", **({"run_eagerly": True} | compiled))
    model.set_weights(split(START))
    model.sampling = sampling
    return model


def split(vector):
    return [vector[:12].reshape(4, 3), vector[12:]]


def flat(variables):
    return np.concatenate([np.asarray(v).ravel() for v in variables]).astype(np.float64)


def train(model, steps, draws=1, counts=0):
    """Takes steps with `FixedNoise`; returns the weights after each, and the noise."""
    noise = FixedNoise(model.optimizer, 40, draws, counts)
    object.__setattr__(model.optimizer, "noise_source", noise)
    weights = []
    for _ in range(steps):
        model.train_on_batch(X, Y)
        weights.append(flat(model.trainable_variables))
    return np.array(weights), noise


def gradients(theta, x=X, y=Y):
    """The gradient of each example's mean squared error, (rows, 15), in float64."""
    kernel, bias = split(theta)
    x, y = x.astype(np.float64), y.astype(np.float64)
    error = 2 / 3 * (x @ kernel + bias - y)
    return np.concatenate([np.einsum("bi,bj->bij", x, error).reshape(len(x), -1), error], axis=1)


def clipped_sum(theta, clip_norm, scale=1.0):
    scaled = scale * gradients(theta)
    norms = np.linalg.norm(scaled, axis=1)
    return (np.minimum(1.0, clip_norm / norms)[:, None] * scaled).sum(axis=0)


def privatized(theta, z, clip_norm=CLIP, scale=1.0, sigma=SIGMA):
    """(Σ clip(s ⊙ g_i; C) + σ·C·z)/B."""
    noise = sigma * clip_norm * z if sigma else 0.0
    return (clipped_sum(theta, clip_norm, scale) + noise) / BATCH


def share_clipped(theta, clip_norm, scale=1.0):
    """How many of the examples the clip norm binds for."""
    return np.mean(np.linalg.norm(scale * gradients(theta), axis=1) > clip_norm)
