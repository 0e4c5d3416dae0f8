"""Batches, and parts of models, whose number of rows is not known when a step is traced."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import dp_keras_opt as dp
from dp_keras_opt.clipping import Batch, Query, clipped_sums
from dp_keras_opt.clipping.self_check import checked_engines
from dp_keras_opt.training import step
from tests.helpers.per_example import assert_close, clip_and_sum, one_at_a_time

B = 8


def compiled(model, loss="mse", **kwargs):
    private = dp.make_private(model)
    optimizer = dp.optimizers.DPSGD(0.1, clip_norm=1.0, noise_multiplier=1.0, batch_size=B)
    private.compile(optimizer, loss, **kwargs)
    return private


@pytest.mark.representatives(1)
@pytest.mark.parametrize(
    ("physical_batch_size", "jit_compile"), [(None, False), (None, True), (3, False), (100, False)]
)
def test_a_batch_is_never_padded_beyond_itself(physical_batch_size, jit_compile):
    """A cell of 4 units padded 8 rows to 524,288, as many as its memory would hold."""
    inputs = keras.Input((5, 2))
    model = keras.Model(inputs, layers.Dense(1)(layers.RNN([layers.LSTMCell(4)])(inputs)))
    traced = []

    def loss(y, y_pred):
        traced.append(y_pred.shape[0])
        return tf.reduce_mean(tf.square(y - y_pred), axis=-1)

    private = compiled(
        model, loss, physical_batch_size=physical_batch_size, jit_compile=jit_compile
    )
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(B, 5, 2)).astype("float32"), np.ones((B, 1), "float32")
    spec = tf.TensorSpec([None, 5, 2]), tf.TensorSpec([None, 1])
    data = tf.data.Dataset.from_generator(lambda: iter([(x, y)]), output_signature=spec)
    private.fit(dp.data.assume_sampling(data, dp.accounting.Sampling.full(B)), verbose=0)
    assert all(rows is None or rows <= B for rows in traced[-3:])
    # And what is summed is the same, whatever the chunks.
    gradients = one_at_a_time(model, lambda t, p: tf.reduce_mean(tf.square(t - p)), x, y)
    query = Query(clip_norm=0.05)
    plan = checked_engines(private, Batch(tf.constant(x), tf.constant(y)))

    state = step.StepState(physical_batch_size, non_finite=tf.Variable(0, dtype=tf.int64))

    @tf.function(input_signature=spec, autograph=False)
    def sums(x, y):
        return step.sums_in_chunks(private, state, [Batch(x, y)], (query,), plan)[0]

    assert_close(sums(x, y), clip_and_sum(gradients, 0.05))


class Block(layers.Layer):
    """Layers of one name and one path, as in many a subclassed model."""

    def __init__(self):
        super().__init__(name="block")
        self.dense = layers.Dense(3, name="dense")

    def call(self, inputs):
        return self.dense(inputs)


class Tower(keras.Model):
    def __init__(self):
        super().__init__(name="tower")
        self.blocks = [Block() for _ in range(4)]

    def call(self, inputs):
        for block in self.blocks:
            inputs = block(inputs)
        return inputs


def test_per_layer_clipping_of_layers_with_equal_names():
    model = Tower()
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(B, 3)).astype("float32") for _ in range(2))
    model(x)
    private = compiled(model)
    query = Query(clip_norm=0.05, style="per_layer")
    sums = clipped_sums(private, (x, y), (query,)).sums[0]
    gradients = one_at_a_time(model, lambda t, p: tf.reduce_mean(tf.square(t - p)), x, y)
    expected = []
    for place in range(0, 8, 2):  # kernel and bias of each of four layers
        part = [example[place : place + 2] for example in gradients]
        expected += clip_and_sum(part, 0.05 / 2)
    assert_close(sums, expected)


@pytest.mark.parametrize("mask", [False, True])
def test_text_vectorization_in_a_model(mask):
    """It loses the number of rows on the way."""
    words = layers.TextVectorization(output_sequence_length=6)
    words.adapt(["a b c d e f g"])
    inputs = keras.Input((), dtype="string")
    hidden = layers.Embedding(12, 4, mask_zero=mask)(words(inputs))
    model = keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(hidden)))
    x = tf.constant(["a b", "c d e", "what", "f"] * 2)
    y = np.ones((B, 1), "float32")
    private = compiled(model)
    batch = Batch(x, tf.constant(y))
    sums = clipped_sums(private, batch, (Query(clip_norm=0.05),), checked_engines(private, batch))
    gradients = one_at_a_time(model, lambda t, p: tf.reduce_mean(tf.square(t - p)), x, y)
    assert_close(sums.sums[0], clip_and_sum(gradients, 0.05))
    train = dp.data.poisson_batches((x.numpy(), y), B, steps_per_epoch=2)
    private.fit(train, verbose=0)
    assert private.ledger.steps == 2


def _steps_of_a_sequence():
    """A layer for each step, whose number is open."""
    inputs = keras.Input((None, 3))
    each = layers.TimeDistributed(layers.Dense(4, activation="tanh"), name="each")
    return keras.Model(inputs, layers.Dense(1)(layers.LSTM(3)(each(layers.Masking()(inputs)))))


@pytest.mark.parametrize("steps", [5, None])
def test_a_layer_for_each_step_is_run_as_one_where_their_number_is_open(steps):
    """Keras calls it in a loop then, in which nothing can be recorded."""
    model = _steps_of_a_sequence()
    private = compiled(model)
    form = Batch(tf.TensorSpec([B, steps, 3]), tf.TensorSpec([B, 1]))
    engines = checked_engines(private, form)
    assert [layer.name for layer in engines.general] == ["each"] * (steps is None)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(B, 5, 3)).astype("float32"), np.ones((B, 1), "float32")
    sums = clipped_sums(private, Batch(x, tf.constant(y)), (Query(clip_norm=0.05),), engines).sums
    gradients = one_at_a_time(model, lambda t, p: tf.reduce_mean(tf.square(t - p)), x, y)
    assert_close(sums[0], clip_and_sum(gradients, 0.05))


@keras.saving.register_keras_serializable("tests")
class _Branch(layers.Layer):
    """Calls a layer where no gradient of its output comes out: eagerly it does not show."""

    def __init__(self, how):
        super().__init__()
        self.how, self.inner = how, layers.Dense(3, name="inner")

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        if self.how == "branch":
            return tf.cond(
                tf.reduce_sum(self.inner.kernel) > -1e9, lambda: self.inner(x), lambda: x
            )
        return tf.while_loop(lambda i, _: i < 2, lambda i, h: (i + 1, self.inner(h)), (0, x))[1]


@pytest.mark.parametrize("how", ["branch", "loop"])
def test_a_layer_called_where_it_cannot_be_recorded_is_named(how):
    """It would have no gradient, and be moved by the noise alone."""
    inputs = keras.Input((3,))
    private = compiled(keras.Model(inputs, layers.Dense(1)(_Branch(how)(inputs))))
    x, y = np.ones((B, 3), "float32"), np.ones((B, 1), "float32")
    private.sampling = dp.accounting.Sampling.poisson(num_examples=100, batch_size=B)
    with pytest.raises(ValueError, match="'inner': it is called within a loop.*Call it outside"):
        private.train_on_batch(x, y)
