"""What the window of a convolution sees, place by place."""

import itertools
import math

import tensorflow as tf

from dp_keras_opt.clipping.factors import sizes_of


def channels_last(layer, tensor):
    """A tensor of the layer's data format as (B, *places, channels)."""
    if layer.data_format == "channels_last":
        return tensor
    rank = tensor.shape.rank
    return tf.transpose(tensor, (0, *range(2, rank), 1))


def convolution_patches(layer, images):
    """The patches (B, T, window, channels) that the layer's kernel is multiplied with.

    Args:
        layer: a convolution; kernel size, strides, dilation and padding are read.
        images: (B, *places, channels).
    """
    channels, size = images.shape[-1], math.prod(layer.kernel_size)
    plain = set(layer.dilation_rate) == {1} and len(set(layer.strides)) == 1
    if len(layer.kernel_size) == 2 and plain:
        # A depthwise convolution that picks each entry once is faster than slices.
        pick = tf.tile(tf.reshape(tf.eye(size), (*layer.kernel_size, 1, size)), (1, 1, channels, 1))
        strides = (1, *layer.strides, 1)
        images = tf.cast(images, tf.float32)
        patches = tf.nn.depthwise_conv2d(images, pick, strides, layer.padding.upper())
        rows, *places, _ = sizes_of(patches)
        patches = tf.reshape(patches, (rows, math.prod(places), channels, size))
        return tf.transpose(patches, (0, 1, 3, 2))
    windows = list(_windows(layer, tf.cast(images, tf.float32)))
    rows, *places, _ = sizes_of(windows[0])
    shape = (rows, math.prod(places), channels)
    return tf.stack([tf.reshape(window, shape) for window in windows], axis=2)


def depthwise_gradients(layer, images, deltas, shape):
    """Per-example gradients (B, *shape) of a depthwise kernel (*window, channels, multiplier)."""
    *_, channels, multiplier = shape
    deltas = tf.cast(deltas, tf.float32)
    deltas = tf.reshape(deltas, (*sizes_of(deltas)[:-1], channels, multiplier))
    places = list(range(1, deltas.shape.rank - 2))
    windows = _windows(layer, tf.cast(images, tf.float32))
    entries = [tf.reduce_sum(window[..., None] * deltas, axis=places) for window in windows]
    return tf.reshape(tf.stack(entries, axis=1), (sizes_of(images)[0], *shape))


def _windows(layer, images):
    """For each entry of the window, what it sees at every place: (B, *places, channels)."""
    sizes, rates = layer.kernel_size, layer.dilation_rate
    strides = tuple(layer.strides)
    padded, counts = [(0, 0)], []
    lengths = sizes_of(images)[1:-1]
    for length, size, stride, rate in zip(lengths, sizes, strides, rates, strict=True):
        extent = (size - 1) * rate + 1
        if layer.padding == "same":
            count = -(-length // stride)
            missing = (count - 1) * stride + extent - length
            missing = tf.maximum(missing, 0) if tf.is_tensor(missing) else max(missing, 0)
            before = missing // 2
        else:
            before = missing = extent - 1 if layer.padding == "causal" else 0
            count = (length + missing - extent) // stride + 1
        padded.append((before, missing - before))
        counts.append(count)
    images = tf.pad(images, [*padded, (0, 0)])
    for offsets in itertools.product(*(range(size) for size in sizes)):
        begin = [offset * rate for offset, rate in zip(offsets, rates, strict=True)]
        slices = [
            slice(first, first + (count - 1) * stride + 1, stride)
            for first, count, stride in zip(begin, counts, strides, strict=True)
        ]
        yield images[(slice(None), *slices)]
