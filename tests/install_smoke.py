"""What must work once the package is installed, run by tox outside of the checkout.

`python -I tests/install_smoke.py` in an environment that has the package and nothing for tests.
"""

import importlib.metadata
import pathlib
import subprocess
import sys
import sysconfig
import tempfile

import keras
import numpy as np
import tensorflow as tf

import dp_keras_opt as dp

NAME = "dp-keras-opt"
PACKAGES = ("dp_keras_opt", "dp_keras_opt_cli")


def main():
    check_distribution()
    check_console_script()
    with tempfile.TemporaryDirectory() as folder:
        check_training(pathlib.Path(folder))
    versions = {name: importlib.metadata.version(name) for name in (NAME, "tensorflow", "keras")}
    print(f"Python {sys.version.split()[0]}, {versions}: installed and works")


def check_distribution():
    """The wheel holds the library, marked as typed, its command line, and nothing else."""
    distribution = importlib.metadata.distribution(NAME)
    site_packages = pathlib.Path(sysconfig.get_path("purelib"))
    assert pathlib.Path(dp.__file__).is_relative_to(site_packages), dp.__file__
    assert dp.__version__ == distribution.version, (dp.__version__, distribution.version)
    files = {pathlib.PurePosixPath(str(file)) for file in distribution.files}
    assert pathlib.PurePosixPath("dp_keras_opt/py.typed") in files, "py.typed is not installed"
    others = {
        str(file)
        for file in files
        if file.parts[0] not in PACKAGES
        and not file.parts[0].endswith(".dist-info")
        and file.name not in scripts()
    }
    assert not others, f"the wheel holds more than the packages: {sorted(others)}"


def scripts():
    entry_points = importlib.metadata.distribution(NAME).entry_points
    return {point.name for point in entry_points if point.group == "console_scripts"}


def check_console_script():
    folder = pathlib.Path(sysconfig.get_path("scripts"))
    for name in scripts():
        shown = subprocess.run(
            [folder / name, "--help"], capture_output=True, text=True, check=True
        )
        assert "usage" in shown.stdout.lower(), shown.stdout


def check_training(folder):
    """Three private steps; the model is saved, loaded with its ledger, and exported."""
    model, report = trained()
    spent = model.ledger.epsilon(1e-5)
    assert 0 < spent < np.inf, spent
    rows = np.ones((2, 3), "float32")
    expected = model.predict(rows, verbose=0)

    model.save(folder / "model.keras")
    loaded = keras.saving.load_model(folder / "model.keras")
    assert loaded.ledger.epsilon(1e-5) == spent
    np.testing.assert_allclose(loaded.predict(rows, verbose=0), expected, rtol=1e-5)

    dp.serving.export(model, folder / "1", report)
    served = tf.saved_model.load(folder / "1").signatures["serving_default"]
    (answer,) = served(tf.constant(rows)).values()
    np.testing.assert_allclose(answer, expected, rtol=1e-5)


def trained():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(200, 3)).astype("float32"), rng.normal(size=(200, 1)).astype("float32")
    inputs = keras.Input((3,))
    model = dp.DPModel(inputs, keras.layers.Dense(1)(inputs))
    optimizer = dp.optimizers.DPAdam(
        learning_rate=0.1, clip_norm=0.5, batch_size=20, noise_multiplier=1.0
    )
    model.compile(optimizer=optimizer, loss="mse")
    before = [np.array(weight) for weight in model.get_weights()]
    report = dp.callbacks.PrivacyReport(delta=1e-5)
    train = dp.data.poisson_batches((x, y), batch_size=20, steps_per_epoch=3)
    model.fit(train, epochs=1, callbacks=[report], verbose=0)
    assert int(optimizer.iterations) == 3
    pairs = zip(before, model.get_weights(), strict=True)
    assert all(np.any(old != new) for old, new in pairs), "training moved no weight"
    return model, report


if __name__ == "__main__":
    main()
