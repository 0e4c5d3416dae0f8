"""The models in Keras, and steps of `fit`; `keras` is Keras 3, or `tf_keras` for TF Privacy."""

import functools
import time

import numpy as np


def mlp(layers, inputs):
    hidden = layers.Dense(512, activation="relu")(inputs)
    hidden = layers.Dense(512, activation="relu")(hidden)
    return layers.Dense(10)(hidden)


def cnn(layers, inputs):
    hidden = layers.Conv2D(16, 8, strides=2, padding="same", activation="relu")(inputs)
    hidden = layers.MaxPooling2D(2, 1)(hidden)
    hidden = layers.Conv2D(32, 4, strides=2, activation="relu")(hidden)
    hidden = layers.MaxPooling2D(2, 1)(hidden)
    hidden = layers.Dense(32, activation="relu")(layers.Flatten()(hidden))
    return layers.Dense(10)(hidden)


def bow500(layers, inputs):
    return layers.Dense(500)(inputs)


def transformer(layers, inputs):
    table = layers.Embedding(2000, 128)
    return layers.Dense(2000)(blocks(layers, inputs, table, 128, 2, 4))


def gpt2(layers, inputs):
    table = layers.ReversibleEmbedding(50_257, 768)
    return table(blocks(layers, inputs, table, 768, 12, 12), reverse=True)


def blocks(layers, inputs, table, width, number, heads):
    """What a decoder makes of tokens, before its head."""
    positions = inputs * 0 + np.arange(inputs.shape[1], dtype="int32")
    hidden = table(inputs) + layers.Embedding(inputs.shape[1], width)(positions)
    for _ in range(number):
        normed = layers.LayerNormalization(epsilon=1e-5)(hidden)
        attention = layers.MultiHeadAttention(heads, width // heads)
        hidden = hidden + attention(normed, normed, use_causal_mask=True)
        normed = layers.LayerNormalization(epsilon=1e-5)(hidden)
        wide = layers.Dense(4 * width, activation="gelu")(normed)
        hidden = hidden + layers.Dense(width)(wide)
    return layers.LayerNormalization(epsilon=1e-5)(hidden)


def bert(layers, inputs):
    positions = inputs * 0 + np.arange(inputs.shape[1], dtype="int32")
    hidden = layers.Embedding(30_522, 256)(inputs) + layers.Embedding(128, 256)(positions)
    hidden = layers.LayerNormalization(epsilon=1e-12)(hidden)
    for _ in range(4):
        attended = layers.MultiHeadAttention(4, 64)(hidden, hidden)
        hidden = layers.LayerNormalization(epsilon=1e-12)(hidden + attended)
        wide = layers.Dense(1024, activation="gelu")(hidden)
        hidden = layers.LayerNormalization(epsilon=1e-12)(hidden + layers.Dense(256)(wide))
    return layers.Dense(2)(layers.Dense(256, activation="tanh")(hidden[:, 0]))


def bilstm(layers, inputs):
    hidden = layers.Embedding(10_000, 128)(inputs)
    hidden = layers.Bidirectional(layers.LSTM(128, return_sequences=True))(hidden)
    return layers.Dense(17)(hidden)


def application(name, layers, inputs, **options):
    """A network of `keras.applications` for ten classes, with group normalization."""
    from keras import applications

    import dp_keras_opt as dp

    network = getattr(applications, name)(
        input_tensor=inputs, weights=None, classes=10, classifier_activation=None, **options
    )
    return dp.clipping.fix(network)(inputs)


mobilenet_v3 = functools.partial(application, "MobileNetV3Small", include_preprocessing=False)
efficientnet_v2 = functools.partial(application, "EfficientNetV2B0", include_preprocessing=False)
convnext = functools.partial(application, "ConvNeXtTiny", include_preprocessing=False)
resnet50 = functools.partial(application, "ResNet50")


def inputs_and_outputs(keras, name, workload):
    """The functional model of a workload, as the two arguments of `keras.Model`."""
    dtype = "int32" if workload.kind in ("tokens", "text", "tagged") else "float32"
    inputs = keras.Input(workload.input, dtype=dtype)
    return inputs, globals()[name](keras.layers, inputs)


def fit_steps(keras, model, data):
    """The `run` that fits a model to batches that never end.

    It takes the time from the end of the first batch to that of the last: what `fit` does before
    and after (0.3 s) is no part of a step.
    """

    class Clock(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.ends = []

        def on_train_batch_end(self, batch, logs=None):
            float(logs["loss"])  # there once the step has run, on a GPU too
            self.ends.append(time.perf_counter())

    def run(steps):
        clock = Clock()
        model.fit(data, steps_per_epoch=steps + 1, shuffle=False, verbose=0, callbacks=[clock])
        return 1e3 * (clock.ends[-1] - clock.ends[0]) / steps

    return run


def optimizer_megabytes(model):
    """A function that gives the size of the optimizer's variables, once they are there."""
    return lambda: sum(np.prod(v.shape) * 4 / 2**20 for v in model.optimizer.variables)
