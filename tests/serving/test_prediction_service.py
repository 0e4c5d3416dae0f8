"""Exports are served over gRPC, by the protocol of TensorFlow Serving, as the tutorial says."""

import concurrent.futures
import contextlib
import pathlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_keras_opt as dp

grpc = pytest.importorskip("grpc")
pytest.importorskip("tensorflow_serving")

from google.protobuf import any_pb2  # noqa: E402
from tensorflow.core.protobuf import saved_model_pb2  # noqa: E402
from tensorflow_serving.apis import (  # noqa: E402
    get_model_metadata_pb2,
    predict_pb2,
    prediction_service_pb2_grpc,
)

TUTORIAL = pathlib.Path(__file__).parents[2] / "docs" / "tutorials" / "serving.md"
N, B = 24, 8
Y = np.linspace(-1, 1, N, dtype="float32")[:, None]


class Servicer(prediction_service_pb2_grpc.PredictionServiceServicer):
    """The part of TensorFlow Serving that answers: the newest version of each model in a folder."""

    def __init__(self, folder):
        self.folder, self.loaded = pathlib.Path(folder), {}

    def _version(self, spec, context):
        versions = [p for p in (self.folder / spec.name).glob("*") if p.name.isdecimal()]
        if not versions:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no model {spec.name}")
        newest = max(versions, key=lambda path: int(path.name))
        if newest not in self.loaded:
            self.loaded[newest] = tf.saved_model.load(str(newest))
        return newest, self.loaded[newest]

    def Predict(self, request, context):
        version, model = self._version(request.model_spec, context)
        name = request.model_spec.signature_name or "serving_default"
        signature = model.signatures[name]
        specs = signature.structured_input_signature[1]
        if set(specs) != set(request.inputs):
            context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"input size does not match signature: {set(request.inputs)} for {set(specs)}",
            )
        feed = {key: tf.make_ndarray(proto) for key, proto in request.inputs.items()}
        reply = predict_pb2.PredictResponse()
        reply.model_spec.name, reply.model_spec.signature_name = request.model_spec.name, name
        reply.model_spec.version.value = int(version.name)
        for key, value in signature(**{k: tf.constant(v) for k, v in feed.items()}).items():
            if not request.output_filter or key in request.output_filter:
                reply.outputs[key].CopyFrom(tf.make_tensor_proto(value.numpy()))
        return reply

    def GetModelMetadata(self, request, context):
        version, _ = self._version(request.model_spec, context)
        content = saved_model_pb2.SavedModel.FromString((version / "saved_model.pb").read_bytes())
        signatures = get_model_metadata_pb2.SignatureDefMap()
        for key, definition in content.meta_graphs[0].signature_def.items():
            signatures.signature_def[key].CopyFrom(definition)
        packed = any_pb2.Any()
        packed.Pack(signatures)
        reply = get_model_metadata_pb2.GetModelMetadataResponse(metadata={"signature_def": packed})
        reply.model_spec.CopyFrom(request.model_spec)
        return reply


@contextlib.contextmanager
def serving(folder):
    """The address of a server for the models in a folder."""
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(2))
    prediction_service_pb2_grpc.add_PredictionServiceServicer_to_server(Servicer(folder), server)
    port = server.add_insecure_port("localhost:0")
    server.start()
    try:
        yield f"localhost:{port}"
    finally:
        server.stop(None).wait(10)


def _predict(address, name, rows, signature=""):
    request = predict_pb2.PredictRequest()
    request.model_spec.name, request.model_spec.signature_name = name, signature
    for key, value in rows.items():
        request.inputs[key].CopyFrom(tf.make_tensor_proto(value))
    with grpc.insecure_channel(address) as channel:
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        reply = stub.Predict(request, timeout=60)
    return {key: tf.make_ndarray(proto) for key, proto in reply.outputs.items()}


def _signatures(address, name):
    request = get_model_metadata_pb2.GetModelMetadataRequest()
    request.model_spec.name = name
    request.metadata_field.append("signature_def")
    with grpc.insecure_channel(address) as channel:
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        reply = stub.GetModelMetadata(request, timeout=60)
    signatures = get_model_metadata_pb2.SignatureDefMap()
    assert reply.metadata["signature_def"].Unpack(signatures)
    return signatures.signature_def


def _exported(model, x, y, folder):
    optimizer = dp.optimizers.DPSGD(0.1, clip_norm=1.0, noise_multiplier=1.0, batch_size=B)
    model.compile(optimizer, "mse")
    report = dp.callbacks.PrivacyReport(1e-3)
    model.fit(dp.data.poisson_batches((x, y), B), verbose=0, callbacks=[report])
    dp.serving.export(model, folder, report)
    return model


def test_the_client_of_the_tutorial_is_answered():
    """The blocks of the page, in their order, up to the client, which is sent to our port."""
    page = TUTORIAL.read_text(encoding="utf-8")
    blocks = re.findall(r"```(\{testcode\}|python)\n(.*?)```", page, re.S)
    client = next(place for place, (kind, _) in enumerate(blocks) if kind == "python")
    names = {}
    for _, code in blocks[:client]:
        exec(code, names)
    with serving(names["folder"].parents[1]) as address:
        code = blocks[client][1]
        assert "localhost:8500" in code
        exec(code.replace("localhost:8500", address), names)
    expected = names["model"].predict(names["x"][:3], verbose=0)
    np.testing.assert_allclose(names["scores"], expected, rtol=1e-5)


def test_strings_and_several_outputs_over_grpc(tmp_path):
    """Names, dtypes and values as the metadata say; one row, and five."""
    word = keras.Input((), dtype="string", name="word")
    size = keras.Input((2,), name="size")
    ids = keras.layers.StringLookup(vocabulary=["red", "green"])(word)
    hidden = keras.layers.Concatenate()([keras.layers.Embedding(3, 2)(ids), size])
    outputs = {"mean": keras.layers.Dense(1)(hidden), "spread": keras.layers.Dense(1)(hidden)}
    x = {
        "word": np.array(["red", "green", "what"] * 8, object),
        "size": np.random.default_rng(0).normal(size=(N, 2)).astype("float32"),
    }
    model = dp.DPModel({"word": word, "size": size}, outputs)
    _exported(model, x, dict.fromkeys(outputs, Y), tmp_path / "words" / "3")
    with serving(tmp_path) as address:
        for rows in (1, 5):
            some = {key: value[:rows] for key, value in x.items()}
            found, expected = _predict(address, "words", some), model.predict(some, verbose=0)
            assert set(found) == {"mean", "spread"}
            for key, value in found.items():
                np.testing.assert_allclose(value, expected[key], rtol=1e-5, atol=1e-6)
        signatures = _signatures(address, "words")
        with pytest.raises(grpc.RpcError, match="does not match signature"):
            _predict(address, "words", {"word": x["word"]})
    default = signatures["serving_default"]
    assert default.method_name == "tensorflow/serving/predict"
    assert default.inputs["word"].dtype == tf.string.as_datatype_enum
    assert [dim.size for dim in default.inputs["size"].tensor_shape.dim] == [-1, 2]
    assert set(default.outputs) == {"mean", "spread"}


def test_clients_of_both_signatures_are_answered(tmp_path):
    """One named output: under its name by default, as Keras calls it in `serve`."""
    base = keras.Sequential([keras.Input((2,), name="x"), keras.layers.Dense(1, name="score")])
    x = np.random.default_rng(0).normal(size=(N, 2)).astype("float32")
    model = _exported(dp.make_private(base), x, Y, tmp_path / "scores" / "1")
    expected = model.predict(x, verbose=0)
    with serving(tmp_path) as address:
        (by_name,) = _predict(address, "scores", {"x": x}).items()
        (as_keras,) = _predict(address, "scores", {"x": x}, "serve").items()
    assert (by_name[0], as_keras[0]) == ("score", "output_0")
    np.testing.assert_allclose(by_name[1], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(by_name[1], as_keras[1])
