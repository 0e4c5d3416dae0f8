"""`StandardizedConv2D`, against a transcription in NumPy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_keras_opt as dp
from dp_keras_opt.layers import StandardizedConv2D


def layer_of(channels=3, **options):
    layer = StandardizedConv2D(4, 3, **options)
    layer.build((None, 6, 6, channels))
    return layer


def standardized(kernel, epsilon):
    kernel = np.asarray(kernel, "float64")
    filters = kernel.reshape(-1, kernel.shape[-1])
    filters = (filters - filters.mean(axis=0)) / np.sqrt(filters.var(axis=0) + epsilon)
    return filters.reshape(kernel.shape)


def images(count=5, channels=3, seed=0):
    return np.random.default_rng(seed).normal(size=(count, 6, 6, channels)).astype("float32")


@pytest.mark.parametrize("options", [{}, {"padding": "same", "strides": 2}, {"use_bias": False}])
@pytest.mark.parametrize("epsilon", [1e-6, 0.3])
def test_it_is_the_convolution_with_standardized_filters(epsilon, options):
    layer, x = layer_of(epsilon=epsilon, **options), images()
    plain = keras.layers.Conv2D(4, 3, **options)
    plain.build(x.shape)
    plain.set_weights([standardized(layer.kernel, epsilon), *layer.get_weights()[1:]])
    np.testing.assert_allclose(layer(x), plain(x), rtol=1e-4, atol=1e-5)


def test_scale_and_offset_of_a_filter_do_not_matter():
    layer, x = layer_of(), images()
    before = layer(x).numpy()
    layer.kernel.assign(layer.kernel * 3.0 + 0.5)
    np.testing.assert_allclose(layer(x), before, rtol=1e-3, atol=1e-4)


def test_the_gradient_of_the_kernel_is_that_of_the_tape():
    layer = layer_of(epsilon=0.01)
    upstream = np.random.default_rng(1).normal(size=(2, *layer.kernel.shape)).astype("float32")
    found = layer.gradient_of_kernel(upstream)
    for row in range(2):
        with tf.GradientTape() as tape:
            used, _ = layer.standardized(layer.kernel)
            value = tf.reduce_sum(used * upstream[row])
        expected = tape.gradient(value, layer.kernel.value)
        np.testing.assert_allclose(found[row], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "mixed_bfloat16"])
def test_a_model_trains_and_is_the_same_when_it_is_loaded(policy, tmp_path):
    inputs = keras.Input((6, 6, 3))
    hidden = StandardizedConv2D(8, 3, use_bias=False, dtype=policy)(inputs)
    hidden = keras.layers.GroupNormalization(4, dtype=policy)(hidden)
    hidden = keras.layers.GlobalAveragePooling2D(dtype=policy)(keras.ops.relu(hidden))
    model = dp.DPModel(inputs, keras.layers.Dense(2, dtype="float32")(hidden))
    optimizer = dp.optimizers.DPSGD(0.5, clip_norm=0.01, noise_multiplier=1.0, batch_size=8)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss)
    x = images(32)
    before = model.layers[1].kernel.numpy()
    model.fit(dp.data.poisson_batches((x, np.arange(32) % 2), 8), verbose=0)
    assert {each.engine for each in dp.clipping.explain(model)} == {"rule"}
    assert np.abs(model.layers[1].kernel.numpy() - before).max() > 1e-5
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded(x), model(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("epsilon", [0, -1.0, None, float("nan"), True])
def test_epsilon_must_be_positive(epsilon):
    with pytest.raises(ValueError, match="epsilon must be a number > 0"):
        StandardizedConv2D(4, 3, epsilon=epsilon)


def test_a_filter_of_one_weight_is_refused():
    with pytest.raises(ValueError, match="Each filter of 'one' has one weight"):
        StandardizedConv2D(4, 1, name="one").build((None, 6, 6, 1))


def test_lora_is_refused():
    with pytest.raises(ValueError, match="there is no LoRA"):
        layer_of().enable_lora(2)
