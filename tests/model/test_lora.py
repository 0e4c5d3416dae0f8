"""LoRA from training to the loaded file: factors move, the file predicts the same, with ledger."""

import keras
import numpy as np
import pytest

import dp_keras_opt as dp

layers = keras.layers
ROWS, WORDS, LENGTH, WIDTH = 48, 20, 6, 8
X = np.random.default_rng(0).integers(0, WORDS, (ROWS, LENGTH)).astype("int32")
Y = np.random.default_rng(1).integers(0, 2, ROWS)


def classifier(mode=None):
    """All but the head is adapted, and quantized before."""
    inputs = keras.Input((LENGTH,), dtype="int32")
    hidden = layers.Flatten()(layers.Embedding(WORDS, WIDTH)(inputs))
    hidden = layers.Dense(12, activation="tanh")(hidden)
    hidden = layers.EinsumDense("ab,bc->ac", WIDTH, bias_axes="c")(hidden)
    model = dp.DPModel(inputs, layers.Dense(2, name="head")(hidden))
    for layer in model.layers:
        if hasattr(layer, "enable_lora") and layer.name != "head":
            if mode is not None:
                layer.quantize(mode)
            layer.enable_lora(2)
    return model


def train(model, x=X, y=Y, steps=5):
    optimizer = dp.optimizers.DPAdam(0.1, clip_norm=0.1, noise_multiplier=0.5, batch_size=16)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(dp.data.poisson_batches((x, y), 16, steps_per_epoch=steps), verbose=0)
    return model


@pytest.mark.parametrize("mode", [None, "int8"])
def test_a_loaded_model_is_the_one_that_was_trained(mode, tmp_path):
    model = classifier(mode)
    before = {v.path: np.array(v) for v in model.variables}
    train(model)
    trained = {v.path for v in model.trainable_variables}
    assert sum("lora" in path for path in trained) == 6
    for variable in model.variables:
        moved = np.any(np.array(variable) != before[variable.path])
        assert moved == (variable.path in trained), variable.path
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    expected, found = model.predict(X, verbose=0), again.predict(X, verbose=0)
    # Keras merges A·B into the kernel; one of 8 bits is rounded anew, to 1/254 of its largest.
    tolerance = 1e-5 if mode is None else 4 / 254
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())
    for layer in again.layers:
        assert getattr(layer, "quantization_mode", None) == (
            mode if getattr(layer, "lora_enabled", False) else None
        )
    assert again.ledger.steps == 5
    assert again.ledger.epsilon(1e-5) == model.ledger.epsilon(1e-5)


@keras.saving.register_keras_serializable(package="tests")
class Backbone(keras.Model):
    """A functional model made from its own options, as those of KerasHub are."""

    def __init__(self, width, **kwargs):
        self.table = layers.ReversibleEmbedding(WORDS, width, name="table")
        dense = layers.Dense(width, activation="tanh", name="dense")
        inputs = keras.Input((LENGTH,), dtype="int32")
        super().__init__(inputs, dense(self.table(inputs)), **kwargs)
        self.width = width

    def get_config(self):
        return {"width": self.width, "name": self.name, "trainable": self.trainable}

    @classmethod
    def from_config(cls, config):
        return cls(**config)


@keras.saving.register_keras_serializable(package="tests")
class Task(keras.Model):
    """One around a backbone whose table it uses once more."""

    def __init__(self, backbone, **kwargs):
        outputs = backbone.table(backbone.output, reverse=True)
        super().__init__(backbone.input, outputs, **kwargs)
        self.backbone = backbone

    def get_config(self):
        backbone = keras.saving.serialize_keras_object(self.backbone)
        return {"backbone": backbone, "name": self.name}

    @classmethod
    def from_config(cls, config):
        backbone = keras.saving.deserialize_keras_object(config["backbone"])
        return cls(**config | {"backbone": backbone})

    def next_words(self, x):
        return np.argmax(self.predict(x, verbose=0), axis=-1)


@pytest.mark.skipif(not hasattr(layers, "ReversibleEmbedding"), reason="of later Keras")
@pytest.mark.parametrize("saved_as", ["private", "task"])
@pytest.mark.parametrize("adapted", [False, True], ids=["all", "lora"])
def test_a_task_is_loaded_with_what_it_can_do(saved_as, adapted, tmp_path):
    """Also if it shares a layer with a model in it, which its graph alone would load as two."""
    task = Task(Backbone(WIDTH))
    if adapted:
        for layer in task.backbone.layers:
            layer.trainable = False
        task.backbone.get_layer("dense").trainable = True
        task.backbone.get_layer("dense").enable_lora(2)
    model = dp.make_private(task)
    assert model.model is task
    train(model, X, np.repeat(Y[:, None], LENGTH, axis=1))
    path = tmp_path / "task.keras"
    {"private": model, "task": task}[saved_as].save(path)
    again = keras.saving.load_model(path, compile=False)
    np.testing.assert_allclose(
        again.predict(X, verbose=0), model.predict(X, verbose=0), rtol=0, atol=1e-5
    )
    np.testing.assert_array_equal(again.model.next_words(X), task.next_words(X))
    assert again.ledger.epsilon(1e-5) == model.ledger.epsilon(1e-5)
    assert dp.make_private(again.model) is again
    assert [v.path for v in again.weights if "embeddings" in v.path] == ["table/embeddings"]
