"""Models of text."""

import keras
import numpy as np

from tests.zoo.example import Example, classes, classifier, integers, numbers

layers, ops = keras.layers, keras.ops
WORDS, LENGTH = 40, 10


def bidirectional_lstm():
    """Two layers of LSTM in both directions, with a mask of padding, as in Keras's example."""
    inputs = keras.Input((LENGTH,), dtype="int32")
    hidden = layers.Embedding(WORDS, 8, mask_zero=True)(inputs)
    hidden = layers.Bidirectional(layers.LSTM(6, return_sequences=True))(hidden)
    hidden = layers.Bidirectional(layers.LSTM(6))(hidden)
    return classifier(inputs, hidden, integers(WORDS, LENGTH))


def strings():
    """Words as they are: the model splits them up, and looks them up."""
    split = layers.TextVectorization(
        vocabulary=["the", "cat", "dog", "is", "in", "wood"], output_sequence_length=6
    )
    inputs = keras.Input((), dtype="string")
    hidden = layers.GlobalAveragePooling1D()(layers.Embedding(8, 6)(split(inputs)))
    texts = ["the cat is in the wood", "the dog", "in the wood is a dog", "the cat is in"]
    return classifier(inputs, hidden, np.array(texts * 2))


def bag_of_words():
    inputs = keras.Input((LENGTH,), dtype="int32")
    hidden = layers.CategoryEncoding(WORDS, output_mode="multi_hot")(inputs)
    hidden = layers.Dropout(0.3)(layers.Dense(16, activation="relu")(hidden))
    return classifier(inputs, hidden, integers(WORDS, LENGTH))


def tied_embeddings():
    """A language model whose table of words is also its last layer."""
    table = layers.ReversibleEmbedding(WORDS, 8, tie_weights=True, name="table")
    inputs = keras.Input((LENGTH,), dtype="int32")
    positions = layers.Embedding(LENGTH, 8)(ops.arange(LENGTH))
    hidden = table(inputs) + positions
    attended = layers.MultiHeadAttention(2, 4)(hidden, hidden, use_causal_mask=True)
    hidden = layers.LayerNormalization()(hidden + attended)
    model = keras.Model(inputs, table(hidden, reverse=True))
    return Example(model, integers(WORDS, LENGTH), integers(WORDS, LENGTH, seed=1), classes())


def translation():
    """A GRU that reads, and one that writes, with attention over what was read."""
    source = keras.Input((LENGTH,), dtype="int32")
    target = keras.Input((LENGTH - 1,), dtype="int32")
    read = layers.GRU(8, return_sequences=True)(layers.Embedding(WORDS, 8)(source))
    wrote = layers.GRU(8, return_sequences=True)(layers.Embedding(WORDS, 8)(target))
    context = layers.Attention()([wrote, read])
    outputs = layers.Dense(WORDS)(layers.Concatenate()([wrote, context]))
    model = keras.Model([source, target], outputs)
    x = [integers(WORDS, LENGTH), integers(WORDS, LENGTH - 1, seed=1)]
    return Example(model, x, integers(WORDS, LENGTH - 1, seed=2), classes())


class Mixture(layers.Layer):
    """Each position goes through all experts, and takes what its gate says of each."""

    def __init__(self, experts, units, **kwargs):
        super().__init__(**kwargs)
        self.gate = layers.Dense(experts, activation="softmax")
        sizes = {"output_shape": (None, experts, units), "activation": "relu"}
        self.experts = layers.EinsumDense("bti,iej->btej", **sizes)

    def build(self, shape):
        self.gate.build(shape)
        self.experts.build(shape)

    def call(self, inputs):
        return ops.einsum("bte,btej->btj", self.gate(inputs), self.experts(inputs))


class ExpertsFirst(Mixture):
    """The same with the experts on the first axis, as models of keras_hub have them."""

    def __init__(self, experts, units, **kwargs):
        super().__init__(experts, units, **kwargs)
        self.number = experts
        sizes = {"output_shape": (None, None, units), "activation": "relu"}
        self.experts = layers.EinsumDense("ebti,eij->ebtj", **sizes)

    def build(self, shape):
        self.gate.build(shape)
        self.experts.build((self.number, *shape))

    def call(self, inputs):
        outputs = self.experts(ops.repeat(inputs[None], self.number, axis=0))
        return ops.einsum("bte,ebtj->btj", self.gate(inputs), outputs)


def mixture_of_experts():
    return _mixed(Mixture(4, 6))


def mixture_with_experts_first():
    return _mixed(ExpertsFirst(4, 6))


def three_experts_first():
    """As many as the check of a model has rows at first."""
    return _mixed(ExpertsFirst(3, 6))


def _mixed(mixture):
    inputs = keras.Input((5, 4))
    hidden = layers.GlobalAveragePooling1D()(mixture(inputs))
    return classifier(inputs, hidden, numbers(5, 4))
