"""One rule per layer: the per-example gradients of its variables, from what was recorded.

A rule serves exactly the class that it is registered for (a subclass may compute something else)
and only the configurations that its `when` admits; every other layer goes to the general engine.
"""

from typing import Any, NamedTuple

import keras
import tensorflow as tf

from dp_keras_opt.clipping.factors import Materialized, Outer, Rows, flatten_positions

_RULES = {}


class Rule(NamedTuple):
    """How the book-keeping engine serves a layer.

    Attributes:
        factors: function of (layer, inputs, deltas) that yields (variable, Factor) pairs, where
            `deltas` is the gradient of the loss in the layer's output before its activation.
        when: function of the layer; False where the rule does not hold.
    """

    factors: Any
    when: Any


def rule(layer_class, when=lambda layer: True):
    """Registers the decorated generator as the rule of `layer_class`."""

    def register(factors):
        _RULES[layer_class] = Rule(factors, when)
        return factors

    return register


def rule_for(layer):
    """The rule of this layer, or None."""
    found = _RULES.get(type(layer))
    plain = (
        getattr(layer, "quantization_mode", None) is None
        and not getattr(layer, "lora_enabled", False)
        and not getattr(layer, "_remat_mode", None)
    )
    return found if found is not None and plain and found.when(layer) else None


def _bias(deltas):
    """The gradient of a bias over the last axis: the sum over the positions."""
    return Materialized(tf.reduce_sum(tf.cast(deltas, tf.float32), axis=1))


@rule(keras.layers.Dense)
def dense(layer, inputs, deltas):
    """Dense: kernel Σ_t a_t ⊗ b_t over the positions t, bias Σ_t b_t."""
    inputs, deltas = flatten_positions(inputs), flatten_positions(deltas)
    yield layer.kernel, Outer(inputs, deltas, layer.kernel.shape)
    if layer.use_bias:
        yield layer.bias, _bias(deltas)


@rule(keras.layers.Embedding)
def embedding(layer, inputs, deltas):
    """Embedding: the rows that were looked up."""
    rows = tf.shape(inputs)[0] if inputs.shape[0] is None else inputs.shape[0]
    positions = 1 if inputs.shape.rank == 1 else -1
    ids = tf.cast(tf.reshape(inputs, (rows, positions)), tf.int32)
    deltas = tf.reshape(deltas, (rows, positions, layer.output_dim))
    yield layer.embeddings, Rows(ids, deltas, layer.embeddings.shape)


@rule(keras.layers.Conv2D, when=lambda layer: layer.groups == 1)
def conv2d(layer, inputs, deltas):
    """Conv2D: a Dense layer over the patches that the kernel sees."""
    if layer.data_format == "channels_first":
        inputs, deltas = (tf.transpose(t, (0, 2, 3, 1)) for t in (inputs, deltas))
    patches, layout, order = _patches(layer, tf.cast(inputs, tf.float32))
    deltas = flatten_positions(deltas)
    yield layer.kernel, Outer(flatten_positions(patches), deltas, layout, order)
    if layer.use_bias:
        yield layer.bias, _bias(deltas)


def _patches(layer, images):
    """The patches (B, H', W', kernel entries) under a kernel; layout and order of its axes."""
    height, width, channels, filters = layer.kernel.shape
    strides, rates = (1, *layer.strides, 1), layer.dilation_rate
    padding = layer.padding.upper()
    if layer.strides[0] == layer.strides[1] and tuple(rates) == (1, 1):
        # A depthwise convolution that picks each entry once is faster than extract_patches.
        pick = tf.eye(height * width)
        pick = tf.tile(tf.reshape(pick, (height, width, 1, -1)), (1, 1, channels, 1))
        patches = tf.nn.depthwise_conv2d(images, pick, strides, padding)
        return patches, (channels, height, width, filters), (1, 2, 0, 3)
    sizes = (1, height, width, 1)
    patches = tf.image.extract_patches(images, sizes, strides, (1, *rates, 1), padding)
    return patches, (height, width, channels, filters), None
