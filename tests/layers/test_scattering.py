"""`Scattering2D`, against what kymatio 0.3.0 gives, and by itself.

`data/kymatio.npz` has pictures x and what kymatio.numpy.Scattering2D makes of them, as it came; its
filters are in float32, which leaves an error of 4e-5.
"""

import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_keras_opt as dp
from dp_keras_opt.layers import Scattering2D
from dp_keras_opt.layers.scattering import filters

KYMATIO = np.load(pathlib.Path(__file__).parent / "data" / "kymatio.npz")
#: (scales, orientations, order) of each.
SETTINGS = {"a": (2, 8, 2), "b": (3, 4, 2), "c": (1, 6, 2), "d": (2, 8, 1), "e": (2, 3, 2)}


@pytest.mark.parametrize("name", SETTINGS)
def test_it_is_that_of_kymatio(name):
    x = KYMATIO[f"x{name}"].transpose(0, 2, 3, 1)
    found = Scattering2D(*SETTINGS[name])(x).numpy()
    expected = KYMATIO[f"s{name}"].transpose(0, 3, 4, 1, 2)
    expected = expected.reshape(*expected.shape[:3], -1)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert np.abs(expected).max() > 0.3


def test_filters_are_wavelets_and_a_mean():
    low_pass, wavelets = filters(36, 36, 2, 8)
    assert low_pass[0, 0] == pytest.approx(1, abs=1e-3)  # a mean of what is around
    for scale, each in enumerate(wavelets):
        np.testing.assert_allclose(each[:, 0, 0], 0, atol=1e-6)  # no constant passes
        distance = np.hypot(*np.meshgrid(np.fft.fftfreq(36), np.fft.fftfreq(36))) * 2 * np.pi
        peaks = distance.ravel()[each.reshape(8, -1).argmax(axis=1)]
        # On a grid of frequencies that is 0.17 wide.
        np.testing.assert_allclose(peaks, 0.75 * np.pi / 2**scale, atol=0.18)


def pictures(count=4, size=(16, 12), channels=2):
    return np.random.default_rng(0).normal(size=(count, *size, channels)).astype("float32")


def test_a_constant_has_no_detail_and_small_shifts_change_little():
    layer = Scattering2D()
    flat = layer(np.full((1, 32, 32, 1), 3.0, "float32")).numpy()
    np.testing.assert_allclose(flat[..., 0], 3, atol=5e-3)
    np.testing.assert_allclose(flat[..., 1:], 0, atol=5e-3)
    x = pictures(1, (33, 32), 1)
    one, other = layer(x[:, :-1]).numpy(), layer(x[:, 1:]).numpy()
    raw = np.linalg.norm(x[:, 1:] - x[:, :-1]) / np.linalg.norm(x)
    assert np.linalg.norm(one - other) / np.linalg.norm(one) < 0.35 * raw


@pytest.mark.parametrize("compiled", [False, True])
def test_shapes_known_and_not_in_graphs_and_xla(compiled):
    layer = Scattering2D(2, 4)
    x = pictures()
    expected = layer(x).numpy()
    assert layer.compute_output_shape((None, 16, 12, 2)) == (None, 4, 3, 2 * layer.channels)
    assert expected.shape == (4, 4, 3, 2 * layer.channels)
    function = tf.function(layer, jit_compile=compiled)
    if not compiled:
        function = tf.function(layer, [tf.TensorSpec((None, 16, 12, 2))])
    np.testing.assert_allclose(function(x), expected, atol=1e-5)


def test_rows_and_channels_are_apart():
    layer, x = Scattering2D(2, 4), pictures()
    whole = layer(x).numpy()
    np.testing.assert_allclose(layer(x[1:2]), whole[1:2], atol=1e-6)
    np.testing.assert_allclose(layer(x[..., 1:]), whole[..., layer.channels :], atol=1e-6)


def test_it_works_in_float32_under_any_policy():
    x = pictures()
    half = Scattering2D(2, 4, dtype="mixed_float16")(x)
    assert half.dtype == tf.float16
    np.testing.assert_allclose(half, Scattering2D(2, 4)(x), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("jit", [False, True])
def test_a_private_model_on_it_trains_is_saved_and_served(jit, tmp_path):
    x, y = pictures(64), np.arange(64) % 2
    inputs = keras.Input((16, 12, 2))
    features = keras.layers.Flatten()(Scattering2D(2, 4)(inputs))
    model = dp.DPModel(inputs, keras.layers.Dense(2, "softmax")(features))
    optimizer = dp.optimizers.DPSGD(0.1, clip_norm=0.5, noise_multiplier=1.0)
    model.compile(optimizer, "sparse_categorical_crossentropy", jit_compile=jit)
    report = dp.callbacks.PrivacyReport(1e-3)
    batches = dp.data.poisson_batches((x, y), 16, steps_per_epoch=2)
    model.fit(batches, verbose=0, callbacks=[report])
    assert model.ledger.steps == 2
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded.predict(x, verbose=0), model.predict(x, verbose=0), atol=1e-6)
    dp.serving.export(model, tmp_path / "served" / "1", report)
    served = tf.saved_model.load(tmp_path / "served" / "1").signatures["serving_default"]
    (outputs,) = served(tf.constant(x)).values()
    np.testing.assert_allclose(outputs, model.predict(x, verbose=0), atol=1e-5)


@pytest.mark.parametrize(
    "arguments, shape, message",
    [
        ({"scales": 0}, (None, 8, 8, 1), "scales must be an integer >= 1"),
        ({"order": 3}, (None, 8, 8, 1), "order must be an integer from 1 to 2"),
        ({"orientations": 2.5}, (None, 8, 8, 1), "orientations must be an integer"),
        ({"scales": 4}, (None, 8, 8, 1), "Choose fewer scales"),
        ({}, (None, None, 8, 1), "of a known size"),
        ({}, (None, 8), "needs pictures"),
    ],
)
def test_what_is_no_picture_is_refused(arguments, shape, message):
    with pytest.raises(ValueError, match=message):
        Scattering2D(**arguments).build(shape)
