"""What the window of a convolution sees, place by place."""

import contextlib
import contextvars
import functools
import math

import numpy as np
import tensorflow as tf

from dp_keras_opt.clipping.factors import sizes_of

_COMPILED = contextvars.ContextVar("_COMPILED", default=True)

#: From so many places on, TensorFlow's own kernel, called row by row, beats gathering the window.
_MANY_PLACES = 196

#: Numbers in a constant of a graph, at most.
_CONSTANT = 2**18


@contextlib.contextmanager
def compiled(by_xla):
    """Says whether XLA compiles what is traced in this block."""
    token = _COMPILED.set(by_xla)
    try:
        yield
    finally:
        _COMPILED.reset(token)


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
    images, size = tf.cast(images, tf.float32), math.prod(layer.kernel_size)
    if images.shape[-1] == 1 and layer.padding != "causal" and set(layer.dilation_rate) == {1}:
        # Single numbers are gathered slowly; a convolution that picks each one is faster.
        pick = tf.reshape(tf.eye(size), (*layer.kernel_size, 1, size))
        patches = tf.nn.convolution(images, pick, layer.strides, layer.padding.upper())
        rows, *places, _ = sizes_of(patches)
        return tf.reshape(patches, (rows, math.prod(places), size, 1))
    return tf.gather(_pixels(images), _seen(layer, images), axis=1)


def depthwise_gradients(layer, images, deltas, shape):
    """Per-example gradients (B, *shape) of a depthwise kernel (*window, channels, multiplier)."""
    *_, channels, multiplier = shape
    rows, *places, _ = sizes_of(deltas)
    images, deltas = tf.cast(images, tf.float32), tf.cast(deltas, tf.float32)
    if _has_kernel(layer, deltas):

        def of_row(row):
            image, delta = (tensor[None] for tensor in row)
            strides, padding = (1, *layer.strides, 1), layer.padding.upper()
            return tf.nn.depthwise_conv2d_backprop_filter(image, shape, delta, strides, padding)

        return tf.map_fn(of_row, (images, deltas), fn_output_signature=tf.float32)
    deltas = tf.reshape(deltas, (rows, math.prod(places), channels, multiplier))
    pixels, seen = _pixels(images), _seen(layer, images)

    def entry(place_seen):
        window = tf.gather(pixels, place_seen, axis=1)
        return tf.reduce_sum(window[..., None] * deltas, axis=1)

    entries = [entry(seen[:, index]) for index in range(math.prod(layer.kernel_size))]
    return tf.reshape(tf.stack(entries, axis=1), (rows, *shape))


def _has_kernel(layer, deltas):
    """Whether TensorFlow has a kernel for the gradient in a depthwise kernel, and a fast one."""
    places = deltas.shape[1:-1]
    return (
        not _COMPILED.get()  # XLA's own takes seconds on the CPU
        and not tf.config.list_physical_devices("GPU")  # which would wait for each row
        and len(set(layer.strides)) == 1
        and set(layer.dilation_rate) == {1}
        and places.rank == 2
        and (places.num_elements() or 0) >= _MANY_PLACES
    )


def _pixels(images):
    """The pixels one after another, (B, 1 + places, channels), the first one black."""
    rows, *places, channels = sizes_of(images)
    return tf.pad(tf.reshape(images, (rows, math.prod(places), channels)), [(0, 0), (1, 0), (0, 0)])


def _seen(layer, images):
    """Which of the pixels each place sees through each entry of the window: (T, window)."""
    dimensions, lengths = len(layer.kernel_size), sizes_of(images)[1:-1]
    # Where it is known and not large it is one constant of the graph, and not how to compute it.
    is_known = not any(map(tf.is_tensor, lengths))
    if is_known and math.prod((*lengths, *layer.kernel_size)) <= _CONSTANT:
        arange = functools.partial(np.arange, dtype=np.int32)
        where, reshape = np.where, np.reshape
    else:
        arange, where, reshape = tf.range, tf.where, tf.reshape
    index, inside, counts = 0, True, []
    for axis, length in enumerate(lengths):
        size, stride, rate = (
            of[axis] for of in (layer.kernel_size, layer.strides, layer.dilation_rate)
        )
        extent = (size - 1) * rate + 1
        if layer.padding == "same":
            count = -(-length // stride)
            missing = (count - 1) * stride + extent - length
            before = (tf.maximum(missing, 0) if tf.is_tensor(missing) else max(missing, 0)) // 2
        else:
            before = extent - 1 if layer.padding == "causal" else 0
            count = (length + before - extent) // stride + 1
        seen = arange(count)[:, None] * stride + arange(size) * rate - before
        shape = [1] * (2 * dimensions)
        shape[axis], shape[dimensions + axis] = count, size
        seen = reshape(seen, shape)
        index = index * length + seen
        inside = inside & (seen >= 0) & (seen < length)
        counts.append(count)
    table = where(inside, 1 + index, 0)
    return reshape(table, (math.prod(counts), math.prod(layer.kernel_size)))
