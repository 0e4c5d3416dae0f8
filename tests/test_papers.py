"""The experiments on the papers: they simulate the library's own optimizers, and they run."""

import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_keras_opt as dp
from tests.linear_regression import FixedNoise

FOLDER = pathlib.Path(__file__).parents[1] / "examples" / "papers"
sys.path.insert(0, str(FOLDER))

import adagrad_1d  # noqa: E402
import quadratic  # noqa: E402

SIGMA, STEPS = 0.3, 60


class Draws(FixedNoise):
    """Stands in for a `NoiseSource`: one table for each draw that a step takes."""

    def __init__(self, optimizer, tables):
        self.optimizer, self.tables, self.calls = optimizer, tables, 0


def fit(layer, loss, optimizer, x, y, draws):
    """The weights after one epoch of `model.fit`, in order, one example a step.

    Args:
        layer: the only layer of the model, with a kernel only.
        loss: its loss.
        optimizer: a private one.
        x, y: data, (steps, features).
        draws: unit noise on gradient and square, (2, steps, weights).
    """
    inputs = keras.Input(x.shape[1:])
    model = dp.DPModel(inputs, layer(inputs))
    model.compile(optimizer=optimizer, loss=loss)
    tables = [np.float32(z).reshape(-1, *layer.kernel.shape) for z in draws]
    used = 2 if optimizer.releases[0].statistic == "mean_and_square" else 1
    object.__setattr__(optimizer, "noise_source", Draws(optimizer, tables[:used]))
    rows = tf.data.Dataset.from_tensor_slices((np.float32(x), np.float32(y))).batch(1)
    sampling = dp.accounting.Sampling.shuffled(len(x), 1, "zero_out")
    model.fit(dp.data.assume_sampling(rows, sampling), verbose=0)
    return model.get_weights()[0].ravel()


def private(source, clip_norm, std):
    """Options of an optimizer whose noise on the plain gradient has this standard deviation."""
    if source == "independent":
        source = dp.optimizers.moments.Independent(adjacency="zero_out")
    return {"second_moment": source, "clip_norm": clip_norm, "noise_multiplier": std / clip_norm,
            "batch_size": 1}  # fmt: skip


@pytest.mark.parametrize(
    ("source", "epsilon"),
    [
        ("post_processing", 1e-7),
        ("independent", 1.0),
        ("bias_corrected", 0.3),
        ("scale_then_privatize", 1e-7),
        ("scale_then_privatize", 0.5),
    ],
)
def test_the_one_dimensional_simulation_is_dp_adagrad(source, epsilon):
    rng, clip = np.random.default_rng(1), 0.4
    x = rng.normal(size=(STEPS, 1)) * (rng.random((STEPS, 1)) < 0.7)
    y = np.float64(rng.random((STEPS, 1)) < 0.6)
    draws = rng.normal(size=(2, STEPS, 1))
    method = adagrad_1d.Method(source, epsilon, floor=source == "bias_corrected")
    scale = SIGMA * (np.sqrt(2) if source == "independent" else 1.0)
    theta = adagrad_1d.train(
        method, x, y, np.full((1, 1), 0.2), np.full((1, 1), clip), *(scale * draws),
        np.full(STEPS, scale**2),
    )  # fmt: skip

    optimizer = dp.optimizers.DPAdagrad(0.2, epsilon=epsilon, **private(source, clip, SIGMA * clip))
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", activation="sigmoid")
    weights = fit(layer, "binary_crossentropy", optimizer, x, y, draws)
    np.testing.assert_allclose(weights, theta[0], rtol=1e-3)


@pytest.mark.parametrize(
    ("source", "epsilon"),
    [
        ("post-processing", 1e-7),
        ("independent moments", 0.5),
        ("bias-corrected", 0.05),
        ("scale-then-privatize", 0.05),
        pytest.param("noiseless", 0.05, marks=pytest.mark.filterwarnings("ignore:.*noiseless")),
    ],
)
def test_the_quadratic_simulation_is_dp_adam(source, epsilon):
    rng, rate, clip, curvature = np.random.default_rng(2), 0.1, 200.0, np.array([1.0, 0.2])
    examples, *draws = rng.normal(size=(3, STEPS, 2))
    std, std_on_square = SIGMA, 0.0
    if source == "independent moments":
        std, std_on_square = np.sqrt(2) * SIGMA, np.sqrt(2) * SIGMA * clip
    theta, _ = quadratic.adam(
        source, zip(examples, *draws, strict=True), np.zeros(2), rate, std, std_on_square,
        epsilon, curvature,
    )  # fmt: skip

    name = source.removesuffix(" moments").replace("-", "_")
    optimizer = dp.optimizers.DPAdam(rate, epsilon=epsilon, **private(name, clip, SIGMA))
    layer = keras.layers.Dense(2, use_bias=False, kernel_initializer="zeros")
    weights = fit(
        layer, lambda a, theta: keras.ops.sum(curvature / 2 * (theta - a) ** 2, -1), optimizer,
        np.ones((STEPS, 1)), examples, draws,
    )  # fmt: skip
    np.testing.assert_allclose(weights, theta, rtol=1e-3)


@pytest.mark.parametrize("name", ["adagrad_1d", "quadratic"])
def test_the_experiment_runs(name, tmp_path):
    run_quickly(name, tmp_path)


def test_the_language_model_trains_on_a_text_of_ones_own(tmp_path):
    words = np.random.default_rng(3).choice(["it", "was", "a", "dark", "night,", "Paul:"], 9999)
    (tmp_path / "my.txt").write_text(" ".join(words), encoding="utf-8")
    run_quickly("language_model", tmp_path / "results", "--data", tmp_path / "my.txt")
    table = (tmp_path / "results" / "language_model.csv").read_text(encoding="utf-8").splitlines()
    assert len(table) == 1 + 2 * 5  # each of two noises with each of five methods


def test_doppler_trains_on_images_of_ones_own(tmp_path):
    rng = np.random.default_rng(4)
    y = rng.integers(0, 3, 300)
    x = np.float32(rng.random((300, 8, 8)) < 0.2 + 0.3 * y[:, None, None])
    parts = {"x_train": x[:250], "y_train": y[:250], "x_test": x[250:], "y_test": y[250:]}
    np.savez(tmp_path / "my.npz", **parts)
    run_quickly("doppler", tmp_path / "results", "--data", tmp_path / "my.npz")
    table = (tmp_path / "results" / "doppler.csv").read_text(encoding="utf-8").splitlines()
    assert len(table) == 1 + 3 * 2  # each of three optimizers without and with a filter


def run_quickly(name, output, *options):
    command = [sys.executable, FOLDER / f"{name}.py", "--quick", "--output", output, *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=600)
    assert {file.suffix for file in output.iterdir()} == {".csv", ".md", ".png"}
