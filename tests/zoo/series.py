"""Models of series and of graphs."""

import keras

from tests.zoo.example import Example, classifier, integers, numbers

layers, ops = keras.layers, keras.ops


def gru():
    """A forecast of the next value."""
    inputs = keras.Input((10, 3))
    model = keras.Model(inputs, layers.Dense(1)(layers.GRU(8)(inputs)))
    return Example(model, numbers(10, 3), numbers(1, seed=1))


def temporal_convolutions():
    """Causal convolutions, ever wider, with a residual beside each (TCN)."""
    inputs = keras.Input((16, 2))
    hidden = layers.Conv1D(6, 1)(inputs)
    for dilation in (1, 2, 4):
        block = hidden
        for _ in range(2):
            options = {"padding": "causal", "dilation_rate": dilation, "activation": "relu"}
            block = layers.Conv1D(6, 2, **options)(block)
        hidden = layers.Add()([hidden, block])
    return classifier(inputs, layers.GlobalAveragePooling1D()(hidden), numbers(16, 2))


def transformer_of_a_series():
    """Attention over the time of a series, as in Keras's example of classification."""
    inputs = keras.Input((12, 6))
    attended = layers.MultiHeadAttention(2, 4)(inputs, inputs)
    hidden = layers.LayerNormalization()(layers.Add()([inputs, attended]))
    fed = layers.Conv1D(6, 1)(layers.Conv1D(8, 1, activation="relu")(hidden))
    hidden = layers.LayerNormalization()(layers.Add()([hidden, fed]))
    return classifier(inputs, layers.GlobalAveragePooling1D()(hidden), numbers(12, 6))


def conv_lstm():
    """The next picture of a film."""
    inputs = keras.Input((4, 8, 8, 1))
    hidden = layers.ConvLSTM2D(4, 3, padding="same")(inputs)
    model = keras.Model(inputs, layers.Conv2D(1, 3, padding="same")(hidden))
    return Example(model, numbers(4, 8, 8, 1), numbers(8, 8, 1, seed=1))


def cnn_lstm():
    """A convolution of each picture of a film, and an LSTM over these."""
    inputs = keras.Input((4, 8, 8, 1))
    hidden = layers.TimeDistributed(layers.Conv2D(4, 3, activation="relu"))(inputs)
    hidden = layers.TimeDistributed(layers.Flatten())(hidden)
    return classifier(inputs, layers.LSTM(8)(hidden), numbers(4, 8, 8, 1))


def ctc():
    """Letters of a line of handwriting, or of speech, whose places are not known."""
    inputs = keras.Input((12, 5))
    hidden = layers.Conv1D(8, 3, padding="same", activation="relu")(inputs)
    model = keras.Model(inputs, layers.Dense(6)(hidden))
    return Example(model, numbers(12, 5), integers(6, 4, low=1), keras.losses.CTC())


@keras.saving.register_keras_serializable("zoo")
class GraphConvolution(layers.Layer):
    """Each node takes in the mean of its neighbours."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units

    def build(self, shapes):
        self.kernel = self.add_weight(shape=(shapes[0][-1], self.units), name="kernel")
        self.bias = self.add_weight(shape=(self.units,), initializer="zeros", name="bias")

    def call(self, inputs):
        nodes, adjacency = inputs
        degrees = ops.sum(adjacency, axis=-1, keepdims=True) + 1
        return ops.relu(ops.matmul(adjacency, ops.matmul(nodes, self.kernel)) / degrees + self.bias)

    def get_config(self):
        return super().get_config() | {"units": self.units}


def graph_convolution():
    """Graphs of six nodes, each with its adjacency as a matrix."""
    inputs = [keras.Input((6, 4)), keras.Input((6, 6))]
    hidden = GraphConvolution(8)([GraphConvolution(8)(inputs), inputs[1]])
    edges = (numbers(6, 6, seed=2) > 0).astype("float32")
    pooled = layers.GlobalAveragePooling1D()(hidden)
    return classifier(inputs, pooled, [numbers(6, 4), edges])
