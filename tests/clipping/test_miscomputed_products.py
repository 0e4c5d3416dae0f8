"""Products of matrices that TensorFlow computes wrong on the CPU, which vectorising makes.

Without the mend these tests end the process on some processors, or see numbers of other examples.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import dp_keras_opt as dp
from dp_keras_opt.clipping import Batch, Query, clipped_sums
from dp_keras_opt.clipping.per_example import is_miscomputed
from dp_keras_opt.clipping.self_check import checked_engines
from tests.helpers.per_example import one_at_a_time

ROWS, POSITIONS, WIDTH = 16, 32, 32


class _Adapted(layers.Layer):
    """A frozen matrix, and a trained one beside it: without a rule."""

    def __init__(self, product):
        super().__init__()
        self.product = product

    def build(self, shape):
        self.frozen = self.add_weight(shape=(WIDTH, WIDTH), trainable=False)
        self.trained = self.add_weight(shape=(WIDTH,))

    def call(self, inputs):
        return self.product(inputs, self.frozen) * self.trained


PRODUCTS = {
    "tf.matmul": tf.matmul,
    "tf.matmul of three": lambda x, w: tf.matmul(x, w[None]),
    "keras.ops.matmul": ops.matmul,
    "einsum": lambda x, w: ops.einsum("btd,de->bte", x, w),
    "transposed": lambda x, w: tf.matmul(x, w, transpose_b=True),
    "from the left": lambda x, w: tf.matmul(w, x),
}


@pytest.mark.parametrize("product", PRODUCTS)
def test_frozen_weights_in_the_general_engine(product):
    inputs = keras.Input((POSITIONS, WIDTH))
    hidden = _Adapted(PRODUCTS[product])(inputs)
    model = dp.DPModel(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(hidden)))
    optimizer = dp.optimizers.DPSGD(0.1, clip_norm=0.1, noise_multiplier=0.0, batch_size=ROWS)
    model.compile(optimizer, "mse", jit_compile=False)
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, POSITIONS, WIDTH)).astype("float32")
    y = random.normal(size=(ROWS, 1)).astype("float32")
    batch = Batch(tf.constant(x), tf.constant(y))
    plan = checked_engines(model, batch)
    assert [layer.name for layer in plan.general] == [model.layers[1].name]

    @tf.function
    def step():
        return clipped_sums(model, batch, (Query(clip_norm=0.1),), plan).sums

    (sums,) = step()
    gradients = one_at_a_time(model, lambda y, p: tf.reduce_mean(tf.square(y - p)), x, y)
    expected = 0
    for one in gradients:
        norm = np.sqrt(sum(np.sum(part**2) for part in one))
        expected = expected + np.concatenate([np.ravel(part) for part in one]) * min(1, 0.1 / norm)
    found = np.concatenate([np.ravel(part) for part in sums])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("left", "right", "wrong"),
    [
        ((16, 1, 4, 8), (8, 8), True),
        ((16, 1, 4, 8), (1, 8, 8), True),
        ((None, 1, 4, 8), (1, 1, 8, 8), True),
        ((16, 2, 4, 8), (8, 8), False),
        ((16, 1, 4, 8), (16, 1, 8, 8), False),
        ((None, 1, 4, 8), (None, 1, 8, 8), False),
        ((1, 1, 4, 8), (16, 1, 8, 8), False),
        ((16, 4, 8), (1, 8, 8), False),
    ],
)
def test_what_is_known_to_be_computed_wrong(monkeypatch, left, right, wrong):
    monkeypatch.delenv("TF_ENABLE_ONEDNN_OPTS", raising=False)

    @tf.function(autograph=False, input_signature=[tf.TensorSpec(left), tf.TensorSpec(right)])
    def asked(*pair):
        found.append(is_miscomputed(lambda pair: tf.matmul(*pair), list(pair)))
        return pair

    found = []
    asked.get_concrete_function()
    assert found == [wrong]


def test_without_one_dnn_nothing_is_run_twice(monkeypatch):
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
    assert not is_miscomputed(lambda t: tf.matmul(t, tf.ones((8, 8))), tf.zeros((16, 1, 4, 8)))
