"""Exported models run where neither this library nor Keras can be imported."""

import json
import os
import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_keras_opt as dp
from dp_keras_opt.serving import comparison, signature

layers = keras.layers
N, B, DELTA = 24, 8, 1e-3
X = np.random.default_rng(1).normal(size=(N, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)

#: A process that answers a line of JSON, (path, rows), with one, as a server does: imports of
#: this library and of Keras fail in it, wherever they are installed.
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
for line in sys.stdin:
    path, rows = json.loads(line)
    loaded = tf.saved_model.load(path)
    serve = loaded.signatures["serving_default"]
    specs = serve.structured_input_signature[1]
    feed = {name: tf.constant(rows[name], spec.dtype) for name, spec in specs.items()}
    outputs = []
    for number in (1, 5):
        found = serve(**{name: tensor[:number] for name, tensor in feed.items()})
        outputs.append({k: v.numpy().astype("float64").tolist() for k, v in found.items()})
    shapes = {name: spec.shape.as_list() for name, spec in specs.items()}
    answer = {"shapes": shapes, "outputs": outputs, "signatures": sorted(loaded.signatures)}
    print(json.dumps(answer), flush=True)
"""


@keras.saving.register_keras_serializable("test")
class Subclass(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.drop = layers.Dropout(0.9)
        self.dense = layers.Dense(1)

    def call(self, inputs, training=None):
        return self.dense(self.drop(inputs, training=training))


class Ids(keras.Model):
    """No layer of it says what it takes: integers, in a dict."""

    def __init__(self):
        super().__init__()
        self.embedding, self.dense = layers.Embedding(5, 3), layers.Dense(1)

    def call(self, inputs):
        return {"score": self.dense(self.embedding(inputs["id"]) + inputs["features"])}


class Words(keras.Model):
    def __init__(self):
        super().__init__()
        self.lookup = layers.StringLookup(vocabulary=["red", "green", "blue"])
        self.embedding = layers.Embedding(4, 1)

    def call(self, inputs):
        return self.embedding(self.lookup(inputs))


@keras.saving.register_keras_serializable("test")
class Draw(layers.Layer):
    """Random in inference, too, as the latent variables of an autoencoder are."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(1)

    def call(self, inputs):
        return inputs + keras.random.normal(tf.shape(inputs), seed=self.seed_generator)


def _of(values):
    kind = object if isinstance(values[0], str) else None
    return np.resize(np.array(values, kind), (N, *np.shape(values)[1:]))


def _integers(high, shape):
    return np.random.default_rng(2).integers(0, high, shape)


# Each makes a model, rows for it, and targets.


def functional():
    inputs = keras.Input((3,), name="features")
    hidden = layers.Dropout(0.9)(layers.Dense(4, activation="tanh")(inputs))
    return dp.DPModel(inputs, layers.Dense(1)(hidden)), X, Y


def wrapped_subclass():
    return dp.make_private(Subclass()), X, Y


def sequential():
    return (
        dp.make_private(keras.Sequential([keras.Input((3,)), layers.Dense(1, name="score")])),
        X,
        Y,
    )


def unbuilt_sequential():
    return dp.make_private(keras.Sequential([layers.Dense(1, name="score")])), X, Y


def list_inputs():
    one, two = keras.Input((3,), name="one"), keras.Input((3,), name="two")
    return dp.DPModel([one, two], layers.Dense(1)(one - 2 * two)), [X, X[::-1]], Y


def dict_inputs():
    ids = keras.Input((2,), dtype="int32", name="ids")
    features = keras.Input((3,), name="features")
    pooled = layers.GlobalAveragePooling1D()(layers.Embedding(5, 2)(ids))
    outputs = layers.Dense(1)(layers.Concatenate()([pooled, features]))
    model = dp.DPModel({"ids": ids, "features": features}, outputs)
    return model, {"ids": _integers(5, (N, 2)).astype("int32"), "features": X}, Y


def subclass_of_ids():
    return dp.make_private(Ids()), {"id": _integers(5, N), "features": X}, {"score": Y}


def subclass_of_strings():
    return dp.make_private(Words()), _of(["red", "blue", "what"]), Y


def strings():
    word = keras.Input((), dtype="string", name="word")
    ids = layers.StringLookup(vocabulary=["red", "green", "blue"])(word)
    score = layers.Dense(1)(layers.Embedding(4, 2)(ids))
    rows = {"word": _of(["red", "blue", "what"])}
    return dp.DPModel({"word": word}, {"score": score}), rows, {"score": Y}


def texts():
    text = keras.Input((), dtype="string", name="text")
    tokens = layers.TextVectorization(output_sequence_length=4, vocabulary=["good", "bad"])(text)
    hidden = layers.GlobalAveragePooling1D()(layers.Embedding(4, 3)(tokens))
    score = layers.Dense(1, name="score")(hidden)
    return dp.DPModel(text, score), _of(["good", "bad bad", "what"]), Y


def integers_of_a_table():
    """Other integers than those of the vocabulary are an error."""
    code = keras.Input((1,), dtype="int64", name="code")
    index = layers.IntegerLookup(vocabulary=[7, 300, 41], num_oov_indices=0)(code)
    score = layers.Dense(1)(layers.Flatten()(layers.Embedding(3, 2)(index)))
    return dp.DPModel(code, score), _of([[7], [41], [300]]), Y


def floats_as_ids():
    """An `Input` whose dtype was left out, as many have it before an embedding."""
    ids = keras.Input((2,), name="ids")
    hidden = layers.Flatten()(layers.Embedding(5, 3)(ids))
    return dp.DPModel(ids, layers.Dense(1, name="score")(hidden)), _integers(5, (N, 2)), Y


def open_lengths():
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    hidden = layers.LSTM(3)(layers.Embedding(11, 4, mask_zero=True)(tokens))
    score = layers.Dense(1, name="score")(hidden)
    return dp.DPModel(tokens, score), 1 + _integers(10, (N, 5)).astype("int32"), Y


def several_outputs():
    inputs = keras.Input((3,), name="features")
    hidden = layers.Dense(4)(inputs)
    outputs = [layers.Dense(1, name="mean")(hidden), layers.Dense(1)(hidden)]
    return dp.DPModel(inputs, outputs), X, [Y, Y]


def pictures():
    """Augmented in training alone."""
    model = keras.Sequential(
        [
            keras.Input((8, 8, 3), name="picture"),
            layers.RandomFlip(),
            layers.RandomRotation(0.2),
            layers.Rescaling(1 / 255),
            layers.Conv2D(4, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(1, name="score"),
        ]
    )
    x = np.random.default_rng(3).uniform(0, 255, (N, 8, 8, 3)).astype("float32")
    return dp.make_private(model), x, Y


def half(dtype):
    inputs = keras.Input((3,), name="features")
    hidden = layers.Dense(8, "tanh", dtype=f"mixed_{dtype}")(inputs)
    return dp.DPModel(inputs, layers.Dense(1, dtype=f"mixed_{dtype}", name="score")(hidden)), X, Y


def float16():
    return half("float16")


def bfloat16():
    return half("bfloat16")


def _train(model, x, y=Y, loss="mse"):
    optimizer = dp.optimizers.DPSGD(0.1, clip_norm=1.0, noise_multiplier=1.0, batch_size=B)
    model.compile(optimizer, loss)
    report = dp.callbacks.PrivacyReport(DELTA)
    model.fit(dp.data.poisson_batches((x, y), B), verbose=0, callbacks=[report])
    return report


def _untrained(model):
    """A report of a model that is compiled alone, which takes no time."""
    model.compile(dp.optimizers.DPSGD(clip_norm=1.0, noise_multiplier=1.0, batch_size=B), "mse")
    report = dp.callbacks.PrivacyReport(DELTA)
    report.set_model(model)
    return report


@pytest.fixture(scope="module")
def serve(tmp_path_factory):
    """What the process that `SERVER` describes answers, a function of (path, rows)."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    with subprocess.Popen(
        [sys.executable, "-c", SERVER],
        cwd=tmp_path_factory.mktemp("server"),
        env=environment | {"TF_CPP_MIN_LOG_LEVEL": "3"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:

        def ask(path, rows):
            rows = {name: np.asarray(value).tolist() for name, value in rows.items()}
            server.stdin.write(json.dumps([str(path), rows]) + "\n")
            server.stdin.flush()
            line = server.stdout.readline()
            assert line, f"the server ended with {server.wait(10)}; its errors are in stderr"
            return json.loads(line)

        yield ask
        server.stdin.close()


#: The names of inputs and of outputs.
MODELS = {
    functional: (["features"], ["output_0"]),
    wrapped_subclass: (["args_0"], ["output_0"]),
    sequential: (["args_0"], ["score"]),
    unbuilt_sequential: (["args_0"], ["score"]),
    list_inputs: (["one", "two"], ["output_0"]),
    dict_inputs: (["features", "ids"], ["output_0"]),
    subclass_of_ids: (["features", "id"], ["score"]),
    subclass_of_strings: (["args_0"], ["output_0"]),
    strings: (["word"], ["score"]),
    texts: (["text"], ["score"]),
    integers_of_a_table: (["code"], ["output_0"]),
    floats_as_ids: (["ids"], ["score"]),
    open_lengths: (["tokens"], ["score"]),
    several_outputs: (["features"], ["mean", "output_1"]),
    pictures: (["picture"], ["score"]),
    float16: (["features"], ["score"]),
    bfloat16: (["features"], ["score"]),
}


@pytest.mark.representatives(6)
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_the_export_runs_without_this_library(make, serve, tmp_path):
    model, x, y = make()
    report = _train(model, x, y)
    path = tmp_path / "served" / "1"
    dp.serving.export(model, path, report)
    assert [each.name for each in path.parent.iterdir()] == ["1"]
    inputs, outputs = MODELS[make]
    rows = dict(zip(inputs, tf.nest.flatten(x), strict=True))
    served = serve(path, rows)
    assert served["signatures"] == ["serve", "serving_default"]
    assert all(shape[0] is None for shape in served["shapes"].values())  # any number of rows
    assert sorted(served["shapes"]) == inputs
    expected = dict(zip(outputs, tf.nest.flatten(model.predict(x, verbose=0)), strict=True))
    tolerance = 1e-2 if model.layers[-1].compute_dtype in ("float16", "bfloat16") else 1e-5
    for number, found in zip((1, 5), served["outputs"], strict=True):
        assert sorted(found) == sorted(outputs)
        for name, values in found.items():
            np.testing.assert_allclose(
                values, expected[name][:number].astype("float64"), rtol=tolerance, atol=tolerance
            )


def test_each_endpoint_has_its_names(tmp_path):
    """`serving_default` those of the model; `serve` Keras's, for clients of before."""
    model, x, y = sequential()
    dp.serving.export(model, tmp_path / "1", _untrained(model))
    served = tf.saved_model.load(str(tmp_path / "1"))
    assert list(served.signatures["serving_default"].structured_outputs) == ["score"]
    assert list(served.signatures["serve"].structured_outputs) == ["output_0"]
    by_hand = served.serve(x)  # a tensor for a tensor, as of the plain Sequential
    np.testing.assert_allclose(by_hand, model.predict(x, verbose=0), rtol=1e-5)
    assert isinstance(model.predict(x, verbose=0), np.ndarray)


def test_outputs_in_outputs_have_names(tmp_path):
    inputs = keras.Input((3,), name="features")
    score = layers.Dense(1)(inputs)
    model = dp.DPModel(inputs, {"of": {"users": score, "items": 2 * score}})
    report = _train(
        model, X, {"of": {"users": Y, "items": Y}}, {"of": {"users": "mse", "items": "mse"}}
    )
    dp.serving.export(model, tmp_path / "1", report)
    served = tf.saved_model.load(str(tmp_path / "1"))
    outputs = served.signatures["serving_default"](features=tf.constant(X))
    np.testing.assert_allclose(outputs["of/items"], 2 * outputs["of/users"], rtol=1e-6)


def test_equal_names_of_outputs_are_numbered():
    dense = layers.Dense(1, name="score")
    one, two = keras.Input((3,)), keras.Input((3,))
    model = dp.DPModel([one, two], [dense(one), dense(two)])
    assert list(signature.named(model, model.outputs)) == ["output_0", "output_1"]


def test_sizes_in_which_batches_differed_are_open(tmp_path):
    class Total(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(1)

        def call(self, inputs):
            return self.dense(tf.reduce_sum(inputs, 1))

    model = dp.make_private(Total())
    report = _train(model, np.ones((N, 4, 3), "float32"))
    model.fit(dp.data.poisson_batches((np.ones((N, 7, 3), "float32"), Y), B), verbose=0)
    dp.serving.export(model, tmp_path / "1", report)
    served = tf.saved_model.load(str(tmp_path / "1")).signatures["serving_default"]
    assert served.structured_input_signature[1]["args_0"].shape.as_list() == [None, None, 3]


# What is served is inference, and what `predict` gives.


def test_pictures_are_not_augmented_when_served(tmp_path):
    model, x, y = pictures()
    dp.serving.export(model, tmp_path / "1", _untrained(model))
    serve = tf.saved_model.load(str(tmp_path / "1")).signatures["serving_default"]
    first, second = (serve(picture=tf.constant(x))["score"] for _ in range(2))
    np.testing.assert_array_equal(first, second)
    graph = serve.graph.as_graph_def()
    nodes = [*graph.node, *(node for each in graph.library.function for node in each.node_def)]
    assert not [node.name for node in nodes if "Random" in node.op]


def test_litert_converts_an_augmented_model(tmp_path):
    """Without TensorFlow's own operations, which is what refused the random ones."""
    model, x, y = pictures()
    dp.serving.export(model, tmp_path / "1", _untrained(model))
    content = tf.lite.TFLiteConverter.from_saved_model(str(tmp_path / "1")).convert()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TensorFlow sends its users to another package
        run = tf.lite.Interpreter(model_content=content).get_signature_runner("serving_default")
    expected = model.predict(x[:1], verbose=0)
    np.testing.assert_allclose(run(picture=x[:1])["score"], expected, rtol=1e-4, atol=1e-5)


def _written(model, inputs, folder, function):
    """A SavedModel that computes something else than the export would."""
    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint("serving_default", lambda x: signature.named(model, function(x)), [inputs])
    archive.write_out(str(folder), verbose=False)
    return folder


@pytest.mark.representatives(2)
@pytest.mark.parametrize("make", [pictures, functional, texts, bfloat16], ids=lambda m: m.__name__)
def test_the_comparison_sees_what_differs(make, tmp_path):
    """Training mode, a weight off by 1%, and another row."""
    model, x, y = make()
    _untrained(model)
    inputs = signature.inputs(model)
    same = _written(model, inputs, tmp_path / "same", lambda x: model(x, training=False))
    comparison.check(model, same, inputs)
    name = MODELS[make][1][0]
    wrong = {
        "scaled": lambda x: 1.2 * model(x, training=False),
        "shuffled": lambda x: tf.roll(model(x, training=False), 1, 0),
    }
    if make in (pictures, functional):  # others have no layer that is random in training
        wrong["trained"] = lambda x: model(x, training=True)
    for each, function in wrong.items():
        folder = _written(model, inputs, tmp_path / each, function)
        with pytest.raises(ValueError, match=f"output '{name}' of the SavedModel differs from"):
            comparison.check(model, folder, inputs)


def test_the_comparison_sees_integers_and_strings_that_differ(tmp_path):
    """Labels, in words and as numbers: one off is wrong."""
    inputs = keras.Input((3,), name="features")
    logits = layers.Dense(3)(inputs)
    label = keras.ops.argmax(logits, -1)
    words = layers.StringLookup(vocabulary=["red", "green", "blue"], num_oov_indices=0, invert=True)
    model = dp.DPModel(inputs, {"logits": logits, "label": label, "word": words(label)})
    specs = signature.inputs(model)

    def changed(name, change):
        def function(x):
            outputs = model(x, training=False)
            return outputs | {name: change(outputs[name])}

        return _written(model, specs, tmp_path / name, function)

    comparison.check(model, changed("logits", tf.identity), specs)
    for name, change in (("label", lambda t: (t + 1) % 3), ("word", tf.strings.upper)):
        with pytest.raises(ValueError, match=f"output '{name}' .* in 100% of the rows|'{name}'"):
            comparison.check(model, changed(name, change), specs)


def test_random_numbers_of_a_seed_generator_are_compared_in_full(tmp_path):
    """What is drawn in inference, too, is drawn from the same state by both; which then stays."""
    inputs = keras.Input((3,), name="features")
    model = dp.DPModel(inputs, layers.Dense(1, name="score")(Draw()(layers.Dense(2)(inputs))))
    report = _untrained(model)
    before = [np.asarray(variable.value) for variable in model.variables]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        dp.serving.export(model, tmp_path / "1", report)
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable.value, value)
    specs = signature.inputs(model)
    folder = _written(model, specs, tmp_path / "2", lambda x: 1.1 * model(x, training=False))
    with pytest.raises(ValueError, match="output 'score' of the SavedModel differs"):
        comparison.check(model, folder, specs)


def test_random_numbers_that_predict_does_not_repeat_are_said_to_be_compared_in_part(tmp_path):
    class Noisy(layers.Layer):
        def call(self, inputs, training=None):
            if training:
                return inputs
            noise = tf.raw_ops.RandomStandardNormal(shape=tf.shape(inputs), dtype=inputs.dtype)
            return inputs + noise

    inputs = keras.Input((3,), name="features")
    mean = layers.Dense(1, name="mean")(inputs)
    model = dp.DPModel(inputs, [mean, Noisy(name="drawn")(mean)])
    report = _untrained(model)
    with pytest.warns(UserWarning, match=r"outputs \['drawn'\] are random in inference"):
        dp.serving.export(model, tmp_path / "1", report)
    specs = signature.inputs(model)

    def wrong(x):
        mean, drawn = model(x, training=False)
        return [2 * mean, drawn]

    folder = _written(model, specs, tmp_path / "2", wrong)
    with pytest.raises(ValueError, match="output 'mean' of the SavedModel differs"):
        comparison.check(model, folder, specs)


def test_rounding_that_a_model_amplifies_is_no_difference(tmp_path):
    """The difference of two nearly equal numbers has few digits, in whichever graph."""
    inputs = keras.Input((64,), name="features")
    hidden = layers.Dense(64)(inputs)
    model = dp.DPModel(inputs, {"sum": keras.ops.sum(hidden - keras.ops.flip(hidden, 1), 1)})
    model.compile(
        dp.optimizers.DPSGD(0.1, clip_norm=1.0, noise_multiplier=1.0, batch_size=B),
        "mse",
        jit_compile=True,
    )
    specs = signature.inputs(model)
    folder = _written(model, specs, tmp_path / "1", lambda x: model(x, training=False))
    comparison.check(model, folder, specs)


def test_a_step_of_ones_own_is_not_what_is_served(tmp_path):
    class Doubled(dp.DPModel):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(1)

        def call(self, inputs):
            return self.dense(inputs)

        def predict_step(self, data):
            return 2 * super().predict_step(data)

    model = Doubled()
    report = _train(model, X)
    with pytest.raises(ValueError, match="a `predict_step` of the model's own"):
        dp.serving.export(model, tmp_path / "1", report)


def test_a_difference_leaves_nothing_behind(tmp_path):
    """Python's state is fixed when a graph is traced: no two graphs of this layer agree."""

    class Counting(layers.Layer):
        calls = 0

        def call(self, inputs, training=None):
            if training or not isinstance(inputs, tf.Tensor) or not tf.inside_function():
                return inputs
            Counting.calls += 1
            return inputs + Counting.calls

    inputs = keras.Input((3,), name="features")
    model = dp.DPModel(inputs, Counting(name="score")(layers.Dense(1)(inputs)))
    report = _untrained(model)
    with pytest.raises(
        ValueError, match="output 'score' of the SavedModel differs from predict by"
    ):
        dp.serving.export(model, tmp_path / "served" / "1", report)
    assert not list((tmp_path / "served").iterdir())


def test_an_export_is_replaced_as_a_whole(tmp_path, monkeypatch):
    model, x, y = functional()
    report = _untrained(model)
    path = tmp_path / "1"
    dp.serving.export(model, path, report, card=dp.serving.ModelCard("first"))
    kept = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    with monkeypatch.context() as patch:
        patch.setattr(comparison, "check", lambda *_: (_ for _ in ()).throw(ValueError("wrong")))
        with pytest.raises(ValueError, match="wrong"):
            dp.serving.export(model, path, report)
    assert kept == {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    dp.serving.export(model, path, report, card=dp.serving.ModelCard("second"))
    assert "second" in (path / dp.serving.MODEL_CARD).read_text(encoding="utf-8")
    assert [each.name for each in tmp_path.iterdir()] == ["1"]


@pytest.mark.parametrize("foreign", ["2/saved_model.pb", "notes.txt", "assets.extra/warmup"])
def test_other_files_are_not_replaced(foreign, tmp_path):
    model, x, y = functional()
    report = _untrained(model)
    dp.serving.export(model, tmp_path / "scores", report)
    file = tmp_path / "scores" / foreign
    file.parent.mkdir(exist_ok=True)
    file.write_text("mine")
    with pytest.raises(FileExistsError, match="Give the name of a new folder"):
        dp.serving.export(model, tmp_path / "scores", report)
    assert file.read_text() == "mine"


def test_code_of_python_is_refused(tmp_path):
    class Doubled(layers.Layer):
        def call(self, inputs, training=None):
            if training:
                return 2 * inputs
            return tf.ensure_shape(
                tf.numpy_function(np.multiply, [inputs, 2.0], tf.float32), [None, 1]
            )

    inputs = keras.Input((3,))
    model = dp.DPModel(inputs, Doubled()(layers.Dense(1)(inputs)))
    report = _untrained(model)
    with pytest.raises(ValueError, match="Python code in its graph .* no server has"):
        dp.serving.export(model, tmp_path / "1", report)
    assert not list(tmp_path.iterdir())


# Public inputs, where synthetic ones do not do.


def test_a_loaded_subclass_needs_public_inputs(tmp_path):
    model, x, y = wrapped_subclass()
    _train(model, x, y)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    report = dp.callbacks.PrivacyReport(DELTA)
    report.set_model(loaded)
    with pytest.raises(ValueError, match="was not trained in this process .* Pass public_inputs"):
        dp.serving.export(loaded, tmp_path / "1", report)
    dp.serving.export(loaded, tmp_path / "1", report, public_inputs=x[:2].astype("float64"))
    served = tf.saved_model.load(str(tmp_path / "1"))
    np.testing.assert_allclose(served.serve(x), model.predict(x, verbose=0), rtol=1e-5)


def test_public_inputs_stand_in_where_synthetic_ones_are_refused(tmp_path):
    class Strict(layers.Layer):
        served = False

        def call(self, inputs, training=None):
            least = 1e6 if self.served else -1e9
            with tf.control_dependencies([tf.debugging.assert_greater(inputs, least)]):
                return tf.identity(inputs)

    inputs = keras.Input((3,), name="features")
    model = dp.DPModel(inputs, layers.Dense(1)(Strict()(inputs)))
    report = _untrained(model)
    Strict.served = True
    with pytest.raises(
        ValueError, match="(?s)no synthetic inputs were found .* Pass public_inputs"
    ):
        dp.serving.export(model, tmp_path / "1", report)
    dp.serving.export(model, tmp_path / "1", report, public_inputs=np.full((2, 3), 1e7))


@pytest.mark.parametrize("rows", [np.ones((2, 4)), np.ones((0, 3)), [X, X], np.array([["a"] * 3])])
def test_public_inputs_must_fit(rows, tmp_path):
    model, x, y = functional()
    report = _untrained(model)
    with pytest.raises(ValueError, match="public_inputs must be rows of what the model takes"):
        dp.serving.export(model, tmp_path / "1", report, public_inputs=rows)


def test_the_statement_lies_beside_the_model(tmp_path):
    model, x, _ = functional()
    report = _train(model, x)
    path = tmp_path / "1"
    dp.serving.export(model, path, report)
    text = (path / "assets.extra" / "privacy_statement.txt").read_text(encoding="utf-8")
    assert text.strip() == report.statement().strip()
    assert f"{report.epsilon:.3g}" in text
    assert (path / "saved_model.pb").exists()


def test_neither_optimizer_nor_data_are_exported(tmp_path):
    model, x, _ = functional()
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
    model, x, _ = functional()
    report = _train(model, x)
    before = model.predict(x, verbose=0)
    dp.serving.export(model, str(tmp_path / "1"), report)
    np.testing.assert_array_equal(model.predict(x, verbose=0), before)
    model.fit(dp.data.poisson_batches((x, Y), B), verbose=0)
    assert model.ledger.steps == 6


def test_errors(tmp_path):
    model, x, _ = functional()
    report = dp.callbacks.PrivacyReport(DELTA)
    with pytest.raises(ValueError, match="pass the report to fit first"):
        dp.serving.export(model, tmp_path / "1", report)
    with pytest.raises(ValueError, match="report must be the PrivacyReport"):
        dp.serving.export(model, tmp_path / "1", None)
    report = _train(model, x)
    with pytest.raises(ValueError, match="Pass what dp_keras_opt.make_private"):
        dp.serving.export(keras.Model(model.inputs, model.outputs), tmp_path / "1", report)
    with pytest.raises(ValueError, match="no local folder"):
        dp.serving.export(model, "gs://bucket/1", report)
    with pytest.raises(ValueError, match="card must be a dp_keras_opt.serving.ModelCard"):
        dp.serving.export(model, tmp_path / "1", report, card={"name": "scores"})
    with pytest.raises(ValueError, match="built"):
        dp.serving.export(dp.make_private(Subclass()), tmp_path / "1", report)
    assert not list(tmp_path.iterdir())


def test_the_export_of_keras_warns(tmp_path):
    base = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    private = dp.make_private(base)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        base.export(tmp_path / "before", verbose=False)  # nothing private in it yet
    _train(private, X)
    for place, model in enumerate((base, private)):
        with pytest.warns(UserWarning, match="no privacy statement.* dp_keras_opt.serving.export"):
            model.export(tmp_path / str(place), verbose=False)
        assert (tmp_path / str(place) / "saved_model.pb").exists()


@pytest.mark.parametrize("way", ["serving", "export", "the original's"])
def test_metrics_of_layers_are_written_as_if_they_had_seen_nothing(tmp_path, way):
    """They hold a sum over raw data: 49,995 beside -3 for one row."""

    class Seen(layers.Layer):
        def __init__(self):
            super().__init__()
            self.seen = keras.metrics.Mean()

        def call(self, inputs):
            self.seen.update_state(inputs)
            return inputs

    inputs = keras.Input((3,))
    layer = Seen()
    original = keras.Model(inputs, layers.Dense(1)(layer(inputs)))
    model = dp.make_private(original)
    optimizer = dp.optimizers.DPSGD(0.1, clip_norm=1.0, noise_multiplier=1.0, batch_size=B)
    model.compile(optimizer, "mse")
    report = dp.callbacks.PrivacyReport(delta=DELTA)
    model.fit(dp.data.poisson_batches((X, Y), B), verbose=0, callbacks=[report])
    before = [np.array(variable) for variable in layer.seen.variables]
    assert np.any(before)
    if way == "serving":
        dp.serving.export(model, tmp_path / "1", report)
    else:
        with pytest.warns(UserWarning, match="has no privacy statement"):
            (model if way == "export" else original).export(tmp_path / "1", verbose=False)
    file = str(tmp_path / "1" / "variables" / "variables")
    scalars = [name for name, shape in tf.train.list_variables(file) if not shape]
    scalars = [tf.train.load_variable(file, name) for name in scalars if "optimizer" not in name]
    assert not any(isinstance(value, np.floating) and value for value in scalars)
    np.testing.assert_equal([np.array(variable) for variable in layer.seen.variables], before)
