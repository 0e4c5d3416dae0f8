"""One-at-a-time gradients, the oracle of every clipping test."""

import numpy as np
import tensorflow as tf


def one_at_a_time(model, loss, x, y, sample_weight=None):
    """Gradients of each example alone, by `tape.gradient` on a batch of one, in float64 sums.

    Args:
        model: any Keras model without randomness.
        loss: function (y, y_pred) of batches of one that gives a scalar.

    Returns:
        For each example a list with one float64 array per trainable variable.
    """
    gradients = []
    rows = len(tf.nest.flatten(x)[0])
    for i in range(rows):
        x_i, y_i = tf.nest.map_structure(lambda t, i=i: tf.convert_to_tensor(t[i : i + 1]), (x, y))
        with tf.GradientTape() as tape:
            value = loss(y_i, model(x_i, training=True))
            if sample_weight is not None:
                value *= sample_weight[i]
        grads = tape.gradient(value, [v.value for v in model.trainable_variables])
        gradients.append(
            [
                np.zeros(v.shape) if g is None else np.array(tf.convert_to_tensor(g), np.float64)
                for g, v in zip(grads, model.trainable_variables, strict=True)
            ]
        )
    return gradients


def clip_and_sum(gradients, clip_norm, scale=None, normalize=False, gamma=0.01, square=False):
    """Σ_i clip(s ⊙ g_i; C), or of its squares, in float64 NumPy, from the specification."""
    total = [np.zeros_like(g) for g in gradients[0]]
    for example in gradients:
        if scale is not None:
            example = [g * s for g, s in zip(example, scale, strict=True)]
        norm = np.sqrt(sum((g**2).sum() for g in example))
        clipped = min(1.0, clip_norm / max(norm, 1e-300))
        factor = clip_norm / (norm + gamma) if normalize else clipped
        power = 2 if square else 1
        total = [t + (factor * g) ** power for t, g in zip(total, example, strict=True)]
    return total


def assert_close(actual, expected, rtol=1e-4):
    """Agreement relative to the largest entry of all; the entries of the smallest may be noise."""
    largest = max(np.abs(np.asarray(e)).max(initial=0.0) for e in expected)
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float64), e, rtol=rtol, atol=rtol * largest / 10
        )
