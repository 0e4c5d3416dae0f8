"""Exported models run where neither this library nor Keras can be imported."""

import json
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_keras_opt as dp

layers = keras.layers
N, B, DELTA = 24, 8, 1e-3
X = np.random.default_rng(1).normal(size=(N, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)

#: What a server does. Imports of this library and of Keras fail, wherever they are installed.
SERVER = """
import json, sys

import numpy as np, tensorflow as tf

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("dp_keras_opt", "keras", "tf_keras"):
            raise ImportError(name + " is not installed here")

sys.meta_path.insert(0, Blocked())
for name in list(sys.modules):  # TensorFlow imports Keras where it is installed
    if name.split(".")[0] == "keras":
        del sys.modules[name]
for name in ("dp_keras_opt", "keras"):
    try:
        __import__(name)
    except ImportError:
        continue
    raise AssertionError("the blocker does not work")
path, rows = sys.argv[1], json.loads(sys.argv[2])
loaded = tf.saved_model.load(path)
serve = loaded.signatures["serving_default"]
inputs = {name: spec for name, spec in serve.structured_input_signature[1].items()}
feed = {name: tf.constant(rows[name], spec.dtype) for name, spec in inputs.items()}
print(json.dumps({
    "shapes": {name: spec.shape.as_list() for name, spec in inputs.items()},
    "outputs": [value.numpy().tolist() for value in serve(**feed).values()],
    "one row": [v.shape.as_list() for v in serve(**{k: t[:1] for k, t in feed.items()}).values()],
    "signatures": sorted(loaded.signatures),
}))
"""


class Subclass(keras.Model):
    def __init__(self):
        super().__init__()
        self.drop = layers.Dropout(0.9)
        self.dense = layers.Dense(1)

    def call(self, inputs, training=None):
        return self.dense(self.drop(inputs, training=training))


def functional():
    inputs = keras.Input((3,), name="features")
    hidden = layers.Dropout(0.9)(layers.Dense(4, activation="tanh")(inputs))
    return dp.DPModel(inputs, layers.Dense(1)(hidden)), X


def wrapped_subclass():
    return dp.make_private(Subclass()), X


def unbuilt_sequential():
    return dp.make_private(keras.Sequential([layers.Dense(1)])), X


def dict_inputs():
    ids = keras.Input((2,), dtype="int32", name="ids")
    features = keras.Input((3,), name="features")
    pooled = layers.GlobalAveragePooling1D()(layers.Embedding(5, 2)(ids))
    outputs = layers.Dense(1)(layers.Concatenate()([pooled, features]))
    model = dp.DPModel({"ids": ids, "features": features}, outputs)
    ids = np.random.default_rng(2).integers(0, 5, (N, 2)).astype("int32")
    return model, {"ids": ids, "features": X}


def _train(model, x):
    optimizer = dp.optimizers.DPSGD(0.1, clip_norm=1.0, noise_multiplier=1.0, batch_size=B)
    model.compile(optimizer, "mse")
    report = dp.callbacks.PrivacyReport(DELTA)
    model.fit(dp.data.poisson_batches((x, Y), B), verbose=0, callbacks=[report])
    return report


def _serve(path, rows, names):
    rows = rows if isinstance(rows, dict) else dict.fromkeys(names, rows)
    rows = {name: value.tolist() for name, value in rows.items()}
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, "-c", SERVER, str(path), json.dumps(rows)],
        cwd=path,
        env=environment | {"TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


MODELS = {
    functional: ["features"],
    wrapped_subclass: ["args_0"],
    unbuilt_sequential: ["args_0"],
    dict_inputs: ["ids", "features"],
}


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_the_export_runs_without_this_library(make, tmp_path):
    model, x = make()
    report = _train(model, x)
    path = tmp_path / "served" / "1"
    dp.serving.export(model, path, report)
    served = _serve(path, x, MODELS[make])
    assert served["signatures"] == ["serve", "serving_default"]
    assert all(shape[0] is None for shape in served["shapes"].values())  # any number of rows
    assert set(served["shapes"]) == set(MODELS[make])
    (outputs,) = served["outputs"]
    np.testing.assert_allclose(outputs, model.predict(x, verbose=0), rtol=1e-5, atol=1e-6)
    assert served["one row"] == [[1, 1]]


def test_the_statement_lies_beside_the_model(tmp_path):
    model, x = functional()
    report = _train(model, x)
    path = tmp_path / "1"
    dp.serving.export(model, path, report)
    text = (path / "assets.extra" / "privacy_statement.txt").read_text(encoding="utf-8")
    assert text.strip() == report.statement().strip()
    assert f"{report.epsilon:.3g}" in text
    assert (path / "saved_model.pb").exists()


def test_neither_optimizer_nor_data_are_exported(tmp_path):
    model, x = functional()
    optimizer = dp.optimizers.DPAdam(0.1, clip_norm=1.0, noise_multiplier=1.0, batch_size=B)
    model.compile(optimizer, "mse")
    report = dp.callbacks.PrivacyReport(DELTA)
    model.fit(dp.data.poisson_batches((x, Y), B), verbose=0, callbacks=[report])
    dp.serving.export(model, tmp_path / "1", report)
    saved = tf.train.load_checkpoint(str(tmp_path / "1" / "variables" / "variables"))
    shapes = saved.get_variable_to_shape_map()
    shapes.pop("_CHECKPOINTABLE_OBJECT_GRAPH")
    size = sum(int(np.prod(shape)) for shape in shapes.values())
    assert size <= 2 * model.count_params() + 4  # each is listed twice; 2 numbers of the seed


def test_exporting_leaves_the_model_as_it_is(tmp_path):
    model, x = functional()
    report = _train(model, x)
    before = model.predict(x, verbose=0)
    dp.serving.export(model, str(tmp_path / "1"), report)
    np.testing.assert_array_equal(model.predict(x, verbose=0), before)
    model.fit(dp.data.poisson_batches((x, Y), B), verbose=0)
    assert model.ledger.steps == 6


def test_errors(tmp_path):
    model, x = functional()
    report = dp.callbacks.PrivacyReport(DELTA)
    with pytest.raises(ValueError, match="pass the report to fit first"):
        dp.serving.export(model, tmp_path / "1", report)
    with pytest.raises(ValueError, match="report must be the PrivacyReport"):
        dp.serving.export(model, tmp_path / "1", None)
    report = _train(model, x)
    with pytest.raises(ValueError, match="built"):
        dp.serving.export(dp.make_private(Subclass()), tmp_path / "1", report)
    assert not list(tmp_path.iterdir())
