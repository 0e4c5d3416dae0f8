"""Models of tables: columns of numbers, of words and of ids."""

import keras
import numpy as np
import tensorflow as tf

from tests.zoo.example import BATCH_SIZE, Example, classes, classifier, integers, numbers, words

layers, ops = keras.layers, keras.ops
COLOURS, CITIES = ["red", "green", "blue"], ["Rome", "Oslo", "Lima", "Cairo"]


def subclassed():
    """A model with a `call` of its own."""

    class Network(keras.Model):
        def __init__(self):
            super().__init__()
            self.first = layers.Dense(16, activation="relu")
            self.norm = layers.LayerNormalization()
            self.last = layers.Dense(1)

        def call(self, inputs):
            hidden = self.first(inputs)
            return self.last(self.norm(hidden) + hidden)

    model = Network()
    model(np.zeros((1, 6), "float32"))
    return Example(model, numbers(6), numbers(1, seed=1))


def subclassed_batch_norm():
    """A model with a `call` of its own, and batch normalization in it."""

    @keras.saving.register_keras_serializable("zoo")
    class Network(keras.Model):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.first = layers.Dense(16, activation="relu")
            self.norm = layers.BatchNormalization()
            self.last = layers.Dense(1)

        def call(self, inputs):
            return self.last(self.norm(self.first(inputs)))

    model = Network()
    model(np.zeros((1, 6), "float32"))
    return Example(model, numbers(6), numbers(1, seed=1))


def _columns():
    inputs = {
        "colour": keras.Input((1,), dtype="string", name="colour"),
        "city": keras.Input((1,), dtype="string", name="city"),
        "age": keras.Input((1,), name="age"),
    }
    x = {"colour": words(COLOURS, 1), "city": words(CITIES, 1), "age": numbers(1)}
    return inputs, x


def wide_and_deep():
    """Words are looked up in the model; crossed ones go straight to the end."""
    inputs, x = _columns()
    colour = layers.StringLookup(vocabulary=COLOURS)(inputs["colour"])
    city = layers.StringLookup(vocabulary=CITIES)(inputs["city"])
    deep = [layers.Flatten()(layers.Embedding(6, 4)(column)) for column in (colour, city)]
    deep = layers.Dense(8, activation="relu")(layers.Concatenate()([*deep, inputs["age"]]))
    crossed = layers.HashedCrossing(12, output_mode="one_hot")
    wide = crossed((inputs["colour"], inputs["city"]))
    return classifier(inputs, layers.Concatenate()([wide, deep]), x)


def deep_fm():
    """Ids of users and things, and factors of pairs of them."""
    inputs = keras.Input((5,), dtype="int32")
    vectors = layers.Embedding(40, 4)(inputs)
    pairs = ops.square(ops.sum(vectors, axis=1)) - ops.sum(ops.square(vectors), axis=1)
    linear = layers.Flatten()(layers.Embedding(40, 1)(inputs))
    deep = layers.Dense(16, activation="relu")(layers.Flatten()(vectors))
    hidden = layers.Concatenate()([pairs / 2, linear, deep])
    model = keras.Model(inputs, layers.Dense(1)(hidden))
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    return Example(model, integers(40, 5), integers(2, 1, seed=1), loss)


class Cross(layers.Layer):
    """x₀ ⊙ (W x + b) + x, with a weight of its own."""

    def build(self, shapes):
        width = shapes[0][-1]
        self.kernel = self.add_weight(shape=(width, width), name="kernel")
        self.bias = self.add_weight(shape=(width,), initializer="zeros", name="bias")

    def call(self, inputs):
        first, hidden = inputs
        return first * (ops.matmul(hidden, self.kernel) + self.bias) + hidden


def deep_and_cross():
    inputs = keras.Input((12,))
    hidden = Cross()([inputs, Cross()([inputs, inputs])])
    deep = layers.Dense(16, activation="relu")(inputs)
    return classifier(inputs, layers.Concatenate()([hidden, deep]), numbers(12))


def feature_space():
    """Keras's `FeatureSpace` in the model, on words and numbers."""
    kind = keras.utils.FeatureSpace
    _, x = _columns()
    x = {name: column[:, 0] for name, column in x.items()}
    space = kind(
        features={
            "colour": kind.string_categorical(num_oov_indices=1),
            "city": kind.string_categorical(num_oov_indices=1),
            "age": kind.float_normalized(),
        },
        output_mode="concat",
    )
    space.adapt(tf.data.Dataset.from_tensor_slices(x).batch(BATCH_SIZE))
    hidden = layers.Dense(8, activation="relu")(space.get_encoded_features())
    x = {name: column[:, None] for name, column in x.items()}
    return classifier(space.get_inputs(), hidden, x)


def several_inputs_and_outputs():
    """Inputs, outputs and losses by name."""
    inputs = {"left": keras.Input((4,), name="left"), "right": keras.Input((3,), name="right")}
    hidden = layers.Concatenate()([inputs["left"], inputs["right"]])
    hidden = layers.Dense(8, activation="relu")(hidden)
    outputs = {"price": layers.Dense(1, name="price")(hidden)}
    outputs["sold"] = layers.Dense(1, activation="sigmoid", name="sold")(hidden)
    x = {"left": numbers(4), "right": numbers(3, seed=2)}
    y = {"price": numbers(1, seed=1), "sold": integers(2, 1, seed=3).astype("float32")}
    loss = {"price": "mse", "sold": "binary_crossentropy"}
    return Example(keras.Model(inputs, outputs), x, y, loss)


def frozen_with_lora():
    """A network that was trained in public, with LoRA beside its frozen kernels."""
    model = _dense()
    hidden, head = model.layers[1:]
    hidden.enable_lora(2)
    head.enable_lora(2)
    return Example(model, numbers(6), integers(3, seed=1), classes())


def quantized_with_lora():
    """LoRA beside kernels that are rounded to int8."""
    model = _dense()
    for layer in model.layers[1:]:
        layer.quantize("int8")
        layer.enable_lora(2)
    return Example(model, numbers(6), integers(3, seed=1), classes())


def quantized():
    model = _dense()
    model.quantize("int8")
    return Example(model, numbers(6), integers(3, seed=1), classes())


def _dense(**options):
    inputs = keras.Input((6,))
    hidden = layers.Dense(16, activation="relu", **options)(inputs)
    return keras.Model(inputs, layers.Dense(3)(hidden))


def activity_regularizer():
    model = _dense(activity_regularizer="l2")
    return Example(model, numbers(6), integers(3, seed=1), classes())


def spectral_normalization():
    inputs = keras.Input((6,))
    hidden = layers.SpectralNormalization(layers.Dense(16, activation="relu"))(inputs)
    return classifier(inputs, hidden, numbers(6))


class WeightNormalized(layers.Wrapper):
    """Calls a dense layer whose kernel has columns of norm 1, and a scale for each."""

    def build(self, shape):
        self.layer.build(shape)
        self.scale = self.add_weight(shape=(self.layer.units,), initializer="ones", name="scale")

    def call(self, inputs):
        kernel = self.layer.kernel
        norms = ops.sqrt(ops.sum(ops.square(kernel), axis=0))
        return ops.matmul(inputs, kernel / norms) * self.scale + self.layer.bias


def weight_normalization():
    """A wrapper that Keras does not have, around a layer that it has."""
    inputs = keras.Input((6,))
    hidden = WeightNormalized(layers.Dense(16))(inputs)
    return classifier(inputs, layers.ReLU()(hidden), numbers(6))
