"""Models of pictures."""

import keras

from tests.zoo.example import Example, classifier, integers, numbers

layers, ops = keras.layers, keras.ops
SHAPE = (16, 16, 3)


def convolutions():
    """A small network without normalization."""
    return _convolved()


def _convolved(*first):
    """Convolutions after some layers that come first."""
    inputs = keras.Input(SHAPE)
    hidden = layers.Rescaling(1 / 255)(inputs)
    for layer in first:
        hidden = layer(hidden)
    hidden = layers.Conv2D(8, 3, activation="relu")(hidden)
    x = integers(256, *SHAPE).astype("float32")
    return classifier(inputs, layers.GlobalAveragePooling2D()(hidden), x)


def separable_convolutions():
    """Depthwise convolutions with group normalization, as in small networks for phones."""
    return _convolved(
        layers.SeparableConv2D(8, 3),
        layers.GroupNormalization(4),
        layers.DepthwiseConv2D(3),
        layers.PReLU(shared_axes=[1, 2]),
    )


def augmentation():
    return _convolved(layers.RandomFlip(), layers.RandomRotation(0.1), layers.RandomContrast(0.2))


def rand_augment():
    return _convolved(layers.RandAugment(value_range=(0, 1)))


def aug_mix():
    return _convolved(layers.AugMix(value_range=(0, 1)))


def mix_up():
    return _convolved(layers.MixUp())


def cut_mix():
    return _convolved(layers.CutMix())


def vision_transformer():
    """Patches, positions, one block of attention."""
    inputs = keras.Input(SHAPE)
    patches = layers.Reshape((16, 12))(layers.Conv2D(12, 4, strides=4)(inputs))
    hidden = patches + layers.Embedding(16, 12)(ops.arange(16))
    normal = layers.LayerNormalization()(hidden)
    hidden = hidden + layers.MultiHeadAttention(2, 6)(normal, normal)
    hidden = hidden + layers.Dense(12, activation="gelu")(layers.LayerNormalization()(hidden))
    return classifier(inputs, layers.GlobalAveragePooling1D()(hidden), numbers(*SHAPE))


def u_net():
    """Segmentation, with batch normalization after each convolution."""
    inputs = keras.Input(SHAPE)

    def block(hidden, filters):
        for _ in range(2):
            hidden = layers.Conv2D(filters, 3, padding="same", use_bias=False)(hidden)
            hidden = layers.ReLU()(layers.BatchNormalization()(hidden))
        return hidden

    first = block(inputs, 8)
    second = block(layers.MaxPooling2D()(first), 16)
    up = layers.Conv2DTranspose(8, 2, strides=2)(second)
    hidden = block(layers.Concatenate()([first, up]), 8)
    outputs = layers.Conv2D(1, 1, activation="sigmoid")(hidden)
    y = integers(2, *SHAPE[:2], 1, seed=1).astype("float32")
    return Example(keras.Model(inputs, outputs), numbers(*SHAPE), y, "binary_crossentropy")


def autoencoder():
    inputs = keras.Input((8, 8, 1))
    hidden = layers.Conv2D(8, 3, strides=2, padding="same", activation="relu")(inputs)
    hidden = layers.Conv2DTranspose(8, 3, strides=2, padding="same", activation="relu")(hidden)
    x = numbers(8, 8, 1)
    return Example(keras.Model(inputs, layers.Conv2D(1, 3, padding="same")(hidden)), x, x)


def transfer():
    """A frozen MobileNet with batch normalization, and a new head."""
    base = _mobile_net()
    base.trainable = False
    return _on_top(base)


def fine_tuning():
    """The same with a MobileNet that is trained, too."""
    return _on_top(_mobile_net())


def fine_tuning_beside_frozen_statistics():
    """The same with batch normalization alone frozen."""
    base = _mobile_net()
    for layer in base.layers:
        if isinstance(layer, layers.BatchNormalization):
            layer.trainable = False
    return _on_top(base)


def _mobile_net():
    options = {"include_top": False, "weights": None, "pooling": "avg"}
    return keras.applications.MobileNetV2((32, 32, 3), alpha=0.35, **options)


def _on_top(base):
    inputs = keras.Input((32, 32, 3))
    return classifier(inputs, base(inputs), numbers(32, 32, 3))
