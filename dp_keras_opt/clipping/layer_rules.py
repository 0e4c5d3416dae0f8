"""One rule per layer: the per-example gradients of its variables, from what was recorded.

A rule serves exactly the class that it is registered for (a subclass may compute something else)
and only the configurations that its `when` admits; every other layer goes to the general engine.
`hub_rules` has those of packages that are never imported for it, `recurrent_rules` those of loops.
`Σ a ⊗ b` in the docstrings is the gradient of a kernel: inputs a, output gradients b, summed over
positions.
"""

import functools
import math
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras import layers

from dp_keras_opt._keras import broadcast_by_row, can_broadcast, is_rematerialized
from dp_keras_opt.clipping.factors import (
    LEAST_OF_PARTS,
    DenseGradients,
    Lookup,
    Mapped,
    OuterProducts,
    sizes_of,
    with_rounding,
)
from dp_keras_opt.clipping.patches import channels_last, convolution_patches, depthwise_gradients
from dp_keras_opt.clipping.precision import in_a_row, in_parts, rounding
from dp_keras_opt.layers import StandardizedConv2D

_RULES = {}

#: Ways of quantizing a kernel after which it stays as it is, and bias and LoRA train beside it.
_ROUNDED = (None, "int8", "int4")


class Rule(NamedTuple):
    """How the book-keeping engine serves a layer: by its `factors`, its `copies`, or its `loop`.

    Attributes:
        factors: function of (layer, deltas, *args, **kwargs) that yields (variable, Factor) pairs,
            where `deltas` is the gradient of the loss in the layer's output before its activation,
            and the others are the arguments of the call.
        when: function of the layer; False where the rule does not hold.
        copies: function of (layer, own, inputs) that gives {attribute: value}, what stands for
            attributes of the layer during a call, so that each example meets its own copies
            `own(variable)`, (B, *shape), of the dtype of the call or of another one. The backward
            pass gives their gradients.
        for_all: whether a call on what is the same for all rows, (T,) or (1, T), may be taken for
            one on as many copies of it as there are rows, (B, T).
        loop: function of (layer, record, *args, **kwargs) that stands for `inner_loop` of a
            recurrent layer, and calls `record(source, factors)` of each tensor whose gradient gives
            (variable, Factor) pairs by `factors`. It serves all variables in the layer.
    """

    factors: Any
    when: Any
    copies: Any = None
    for_all: bool = False
    loop: Any = None


def rule(*layer_classes, when=lambda layer: True, for_all=False):
    """Registers the decorated generator, a `Rule.factors`, as the rule of these classes.

    A class of a package that must not be imported goes by name, "module.qualified name".
    """

    def register(factors):
        _RULES.update(dict.fromkeys(layer_classes, Rule(factors, when, for_all=for_all)))
        return factors

    return register


def rule_by_copies(*layer_classes, when=lambda layer: True):
    """Registers the decorated function, a `Rule.copies`, as the rule of these classes."""

    def register(copies):
        _RULES.update(dict.fromkeys(layer_classes, Rule(None, when, copies)))
        return copies

    return register


def rule_by_loop(*layer_classes, when=lambda layer: True):
    """Registers the decorated function, a `Rule.loop`, as the rule of these classes."""

    def register(loop):
        _RULES.update(dict.fromkeys(layer_classes, Rule(None, when, loop=loop)))
        return loop

    return register


def _registered(layer):
    kind = type(layer)
    return _RULES.get(kind) or _RULES.get(f"{kind.__module__}.{kind.__qualname__}")


def goes_by_name(layer):
    """Whether the rule of this layer is registered for what its class is called."""
    return type(layer) not in _RULES


def rule_for(layer):
    """The rule of this layer, or None."""
    found = _registered(layer)
    plain = _quantization(layer) in _ROUNDED and not is_rematerialized(layer)
    return found if found is not None and plain and found.when(layer) else None


def why_no_rule(layer):
    """What keeps a layer from being served by a rule, in words."""
    if _registered(layer) is None:
        return f"no rule for {type(layer).__name__}"
    if _quantization(layer) not in _ROUNDED:
        return f"no rule for {type(layer).__name__} quantized to {_quantization(layer)}"
    return f"the rule for {type(layer).__name__} does not hold for how this one is configured"


def _quantization(layer):
    return getattr(layer, "quantization_mode", None)


def sum_to(tensor, shape):
    """Per-example sums (B, *shape) over the axes that a broadcast from `shape` has added."""
    tensor = tf.cast(tensor, tf.float32)
    padded = (1,) * (tensor.shape.rank - 1 - len(shape)) + tuple(shape)
    axes = [
        axis
        for axis, size in enumerate(padded, 1)
        if size == 1 and (axis <= len(padded) - len(shape) or tensor.shape[axis] != 1)
    ]
    total = tf.reduce_sum(tensor, axis=axes)
    return DenseGradients(tf.reshape(total, (sizes_of(tensor)[0], *shape)))


def _bias(layer, deltas):
    if layer.bias is not None:
        yield layer.bias, sum_to(deltas, layer.bias.shape)


def flat(tensor):
    """(B, ..., C) as (B, 1, T, C), one group of T positions; T = 1 for (B, C)."""
    rows, *positions, last = sizes_of(tensor)
    return tf.reshape(tensor, (rows, 1, math.prod(positions), last))


# Dense layers.


@rule(layers.Dense)
def dense(layer, deltas, inputs):
    """kernel Σ a ⊗ b, bias Σ b; a LoRA-enabled kernel is K + s·A·B with K frozen."""
    if not _has_lora(layer):
        yield layer.kernel, OuterProducts(flat(inputs), flat(deltas), layer.kernel.shape)
    else:
        a, b, scaled = _lora(layer.lora_kernel_a, layer.lora_kernel_b, layer, deltas)
        inputs = tf.cast(inputs, tf.float32)
        low = flat(tf.tensordot(scaled, b, [[-1], [1]]))
        yield layer.lora_kernel_a, OuterProducts(flat(inputs), low, a.shape)
        low = flat(tf.tensordot(inputs, a, 1))
        yield layer.lora_kernel_b, OuterProducts(low, flat(scaled), b.shape)
    yield from _bias(layer, deltas)


def _has_lora(layer):
    return getattr(layer, "lora_enabled", False)


def _lora(variable_a, variable_b, layer, deltas):
    """A, B and the gradient in the product A·B, which is scaled by alpha/rank."""
    scale = layer.lora_alpha / layer.lora_rank
    a, b = (tf.cast(v.value, tf.float32) for v in (variable_a, variable_b))
    return a, b, scale * tf.cast(deltas, tf.float32)


def _letters(layer):
    """The equation of an EinsumDense as (input, kernel, output), an ellipsis written out."""
    sources, output = layer.equation.replace(" ", "").split("->")
    source, kernel = sources.split(",")
    return source, kernel, output


def _einsum_is_plain(layer):
    """Rows of the batch first and nowhere else, each kernel axis in the input or the output."""
    source, kernel, output = (spec.replace("...", "") for spec in _letters(layer))
    first = _letters(layer)[0][0], _letters(layer)[2][0]
    return (
        (first in [(".", ".")] or (first[0] == first[1] and first[0] not in kernel))
        and all(len(set(spec)) == len(spec) for spec in (source, kernel, output))
        and set(kernel) <= set(source) | set(output)
        and (not _has_lora(layer) or _einsum_takes_lora(source, kernel, output, layer))
    )


def _einsum_takes_lora(source, kernel, output, layer):
    """Whether one of two einsums is that of A, and the other that of B; see `einsum_dense`."""
    if _quantization(layer) is not None:  # Keras multiplies by B along the last axis
        return output[-1:] == kernel[-1:] and kernel[-1] not in source
    return (kernel[-1] in output) != (kernel[-1] in source)


@rule(layers.EinsumDense, when=_einsum_is_plain)
def einsum_dense(layer, deltas, inputs):
    """kernel Σ a ⊗ b over the axes that it does not share, bias Σ b; LoRA as two products."""
    source, kernel, output = _written_out(_letters(layer), inputs.shape.rank)
    source, inputs = _summed(source, kernel + output, inputs)
    if not _has_lora(layer):
        shape = layer.kernel.shape
        yield layer.kernel, _einsum_factor((source, kernel, output), inputs, deltas, shape)
    else:
        a, b, scaled = _lora(layer.lora_kernel_a, layer.lora_kernel_b, layer, deltas)
        inputs, last = tf.cast(inputs, tf.float32), kernel[-1]
        rank = next(letter for letter in _LETTERS if letter not in source + kernel + output)
        kernel_a, kernel_b = kernel[:-1] + rank, rank + last
        if last in output:  # A, then B
            middle = output.replace(last, rank)
            of_a, of_b = (source, kernel_a, middle), (middle, kernel_b, output)
            low = tf.einsum(f"{source},{kernel_a}->{middle}", inputs, a)
            low_deltas = tf.einsum(f"{output},{kernel_b}->{middle}", scaled, b)
            pairs = (inputs, low_deltas), (low, scaled)
        else:  # B, then A
            middle = source.replace(last, rank)
            of_a, of_b = (middle, kernel_a, output), (source, kernel_b, middle)
            low = tf.einsum(f"{source},{kernel_b}->{middle}", inputs, b)
            low_deltas = tf.einsum(f"{output},{kernel_a}->{middle}", scaled, a)
            pairs = (low, scaled), (inputs, low_deltas)
        yield layer.lora_kernel_a, _einsum_factor(of_a, *pairs[0], a.shape)
        yield layer.lora_kernel_b, _einsum_factor(of_b, *pairs[1], b.shape)
    yield from _bias(layer, deltas)


def _summed(source, others, inputs):
    """The inputs summed over axes that nothing else has, as they are before the product."""
    axes = [i for i, letter in enumerate(source) if letter not in others]
    return "".join(c for c in source if c in others), tf.reduce_sum(inputs, axis=axes)


_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def _written_out(equation, rank):
    """The equation with letters in place of the ellipsis."""
    source, kernel, output = equation
    free = [letter for letter in _LETTERS if letter not in source + kernel + output]
    extra = "".join(free[: rank - len(source.replace("...", ""))])
    return source.replace("...", extra), kernel, output.replace("...", extra)


def _einsum_factor(equation, inputs, deltas, shape):
    """The gradient of the kernel in einsum("source,kernel->output", inputs, kernel)."""
    source, kernel, output = equation
    groups = "".join(c for c in kernel if c in source and c in output)
    ins = "".join(c for c in kernel if c in source and c not in output)
    outs = "".join(c for c in kernel if c not in source)
    positions = "".join(c for c in source[1:] if c in output and c not in kernel)

    def arranged(tensor, letters, last):
        order = [letters.index(c) for c in letters[0] + groups + positions + last]
        tensor = tf.transpose(tensor, order)
        sizes = dict(zip(letters[0] + groups + positions + last, sizes_of(tensor), strict=True))
        parts = (letters[0], groups, positions, last)
        return tf.reshape(tensor, [math.prod(sizes[c] for c in part) for part in parts])

    sizes = dict(zip(kernel, shape, strict=True))
    grouped = groups + ins + outs
    return OuterProducts(
        arranged(inputs, source, ins),
        arranged(deltas, output, outs),
        shape,
        [sizes[c] for c in grouped],
        [grouped.index(c) for c in kernel],
    )


# Embeddings.


def ids_of(inputs, size):
    rows, *positions = sizes_of(inputs)
    ids = tf.cast(tf.reshape(inputs, (rows, math.prod(positions))), tf.int32)
    return tf.where(ids < 0, ids + size, ids)  # Keras counts these from the end of the table


@rule(layers.Embedding, for_all=True)  # positions
def embedding(layer, deltas, inputs):
    """The rows that were looked up; LoRA-enabled, the table is E + s·A·B with E frozen."""
    ids = ids_of(inputs, layer.input_dim)
    deltas = tf.reshape(deltas, (*sizes_of(ids), layer.output_dim))
    if not _has_lora(layer):
        yield layer.embeddings, Lookup(ids, deltas, layer.embeddings.shape)
    else:
        a, b, scaled = _lora(layer.lora_embeddings_a, layer.lora_embeddings_b, layer, deltas)
        yield layer.lora_embeddings_a, Lookup(ids, tf.tensordot(scaled, b, [[-1], [1]]), a.shape)
        low = flat(tf.gather(a, ids))
        yield layer.lora_embeddings_b, OuterProducts(low, flat(scaled), b.shape)


if hasattr(layers, "ReversibleEmbedding"):

    @rule(
        layers.ReversibleEmbedding,
        "keras_hub.src.layers.modeling.reversible_embedding.ReversibleEmbedding",
        when=lambda layer: getattr(layer, "logit_soft_cap", None) is None,
    )
    def reversible_embedding(layer, deltas, inputs, reverse=False):
        """An embedding, or with `reverse` the product with its table (or with another one)."""
        if not reverse:
            yield from embedding(layer, deltas, inputs)
        elif layer.tie_weights:
            if not _has_lora(layer):
                shape = layer.embeddings.shape
                yield layer.embeddings, OuterProducts(flat(deltas), flat(inputs), shape)
            elif _quantization(layer) is None:  # of a quantized table Keras leaves A·B out here
                a, b, scaled = _lora(
                    layer.lora_embeddings_a, layer.lora_embeddings_b, layer, deltas
                )
                inputs = tf.cast(inputs, tf.float32)
                low = flat(tf.tensordot(inputs, b, [[-1], [1]]))
                yield layer.lora_embeddings_a, OuterProducts(flat(scaled), low, a.shape)
                low = flat(tf.tensordot(scaled, a, 1))
                yield layer.lora_embeddings_b, OuterProducts(low, flat(inputs), b.shape)
        else:
            kernel = layer.reverse_embeddings
            yield kernel, OuterProducts(flat(inputs), flat(deltas), kernel.shape)


# Convolutions: dense layers over the patches that the kernel sees.


@rule(layers.Conv1D, layers.Conv2D, layers.Conv3D)
def convolution(layer, deltas, inputs):
    """kernel Σ patch ⊗ b over the places; groups have kernels of their own."""
    inputs, deltas = channels_last(layer, inputs), channels_last(layer, deltas)
    *window, channels, filters = shape = layer.kernel.shape  # `channels` of one group
    patches = convolution_patches(layer, inputs)  # (B, T, window, all channels)
    groups, size, (rows, places, *_) = layer.groups, math.prod(window), sizes_of(patches)
    patches = tf.reshape(patches, (rows, places, size, groups, channels))
    patches = tf.reshape(
        tf.transpose(patches, (0, 3, 1, 2, 4)), (rows, groups, places, size * channels)
    )
    width = filters // groups
    grouped = tf.reshape(deltas, (rows, places, groups, width))
    grouped = tf.transpose(grouped, (0, 2, 1, 3))
    if not _has_lora(layer):
        layout = (groups, size, channels, width)
        yield layer.kernel, OuterProducts(patches, grouped, shape, layout, (1, 2, 0, 3))
    else:  # the groups share A, and have filters of their own in B
        a, b, scaled = _lora(layer.lora_kernel_a, layer.lora_kernel_b, layer, grouped)
        rank, patches = a.shape[-1], tf.cast(patches, tf.float32)
        low = tf.einsum("bgto,rgo->bgtr", scaled, tf.reshape(b, (rank, groups, width)))
        inputs = tf.reshape(patches, (rows, 1, groups * places, size * channels))
        low = tf.reshape(low, (rows, 1, groups * places, rank))
        yield layer.lora_kernel_a, OuterProducts(inputs, low, a.shape)
        low = tf.tensordot(patches, tf.reshape(a, (size * channels, rank)), 1)
        layout = (groups, rank, width)
        yield layer.lora_kernel_b, OuterProducts(low, scaled, b.shape, layout, (1, 0, 2))
    yield from _bias(layer, deltas)


@rule(StandardizedConv2D)
def standardized_convolution(layer, deltas, inputs):
    """A convolution, whose kernel is standardized: its gradient through that."""
    for variable, factor in convolution(layer, deltas, inputs):
        if variable is layer.kernel:
            factor = Standardized(factor, layer)
        yield variable, factor


class Standardized(Mapped):
    """The gradients of a kernel before its standardization, from those behind it.

    Of that of a filter, g, over its deviation σ, the parts along 1 and along the standardized
    filter ŵ are taken away. With n weights, m = mean(ŵ), which is 0 but for rounding, p = mean(ŵ²)
    and the sums of products s = Σg/√n and v = ⟨g, ŵ⟩/√n, the squared norm is

        (‖g‖² − s² − (2 − p)v² + 2m s v)/σ².

    What is taken away is taken from the sum, which is in float32, since such kernels are many. So a
    norm is at least `LEAST_OF_PARTS` of that of g/σ.
    """

    def __init__(self, inner, layer):
        kernel = tf.convert_to_tensor(layer.kernel)  # now: the map may be used when it has moved
        self.standardized, self.deviation = layer.standardized(kernel)
        through = functools.partial(layer.gradient_of_kernel, kernel=kernel)
        super().__init__(inner, through, 1.0 / self.deviation)

    def weighted_sum(self, weights, dtype=tf.float32):
        return self.function(self.inner_factor.weighted_sum(weights, dtype))

    def l1_norm(self, scale=None):
        whole = self.inner_factor.l1_norm(self.stretches("l2", scale))  # the map may: by 2 + max|ŵ|
        return tf.maximum(super().l1_norm(scale), LEAST_OF_PARTS * whole)

    def squared_norm(self, scale=None):
        inner = self.inner_factor
        if scale is not None or inner.is_small:
            whole = inner.squared_norm(self.stretches("l2", scale))
            return tf.maximum(super().squared_norm(scale), LEAST_OF_PARTS**2 * whole)
        filters = inner.as_matrix(self.standardized)  # (G, n, O)
        deviation = inner.as_matrix(tf.broadcast_to(self.deviation, inner.shape))[:, :1]
        deltas, n = inner.deltas / deviation, filters.shape[1]
        whole = OuterProducts(inner.inputs, deltas, inner.shape, inner.layout, inner.order)

        def summed(products):  # (B, G, O), of (B, G, T, O or 1)
            return tf.reduce_sum(products * deltas, axis=2)

        product = functools.partial(tf.einsum, "bgti,gio->bgto")
        along = tf.concat([filters, tf.ones_like(filters[..., :1])], axis=2) / n**0.5
        products = in_parts(product, inner.inputs, along, axis=(3, 1))
        own, ones = summed(products[..., :-1]), summed(products[..., -1:])
        mean, power = (tf.reduce_mean(each, axis=1) for each in (filters, tf.square(filters)))
        away = tf.square(ones) + (2 - power) * tf.square(own) - 2 * mean * ones * own
        away = tf.reduce_sum(away, axis=(1, 2))
        away = tf.where(tf.math.is_finite(away), away, 0.0)  # what is not taken away is bounded
        # s and v are off by ρ Σ terms at most, and no larger than the gradient is long: squares by
        # twice the product of both, of which 1, 2 - p ≤ 2 and what m leaves make less than five.
        (total, count), before = whole.terms("l2"), whole.squared_norm()
        left = tf.maximum(before - away, 0.0)
        left += 10 * rounding(in_a_row(n) + count, full=True) * total * tf.sqrt(before)
        return tf.maximum(with_rounding(left, (total, count)), LEAST_OF_PARTS**2 * before)

    def along(self, direction):
        return self.inner_factor.along(self.function(direction))  # the map is symmetric


@rule(
    layers.Conv1DTranspose,
    layers.Conv2DTranspose,
    *([layers.Conv3DTranspose] if hasattr(layers, "Conv3DTranspose") else []),
    when=lambda layer: layer.output_padding is None,
)
def transposed_convolution(layer, deltas, inputs):
    """A convolution seen from behind: kernel Σ patch of the output gradient ⊗ input."""
    inputs, deltas = channels_last(layer, inputs), channels_last(layer, deltas)
    *window, filters, channels = layer.kernel.shape
    patches = convolution_patches(layer, deltas)
    rows, places, *_ = sizes_of(patches)
    patches = tf.reshape(patches, (rows, 1, places, math.prod(window) * filters))
    yield layer.kernel, OuterProducts(patches, flat(inputs), layer.kernel.shape)
    yield from _bias(layer, deltas)


@rule(layers.DepthwiseConv1D, layers.DepthwiseConv2D)
def depthwise_convolution(layer, deltas, inputs):
    """One kernel per channel: small enough to write the gradients down."""
    inputs, deltas = channels_last(layer, inputs), channels_last(layer, deltas)
    gradients = depthwise_gradients(layer, inputs, deltas, layer.kernel.shape)
    yield layer.kernel, DenseGradients(gradients)
    yield from _bias(layer, deltas)


@rule(layers.SeparableConv1D, layers.SeparableConv2D)
def separable_convolution(layer, deltas, inputs):
    """A depthwise convolution, then a dense layer over the channels."""
    inputs, deltas = channels_last(layer, inputs), channels_last(layer, deltas)
    depthwise, pointwise = layer.depthwise_kernel, layer.pointwise_kernel
    middle = keras.ops.depthwise_conv(
        inputs,
        tf.cast(depthwise.value, inputs.dtype),
        strides=layer.strides,
        padding=layer.padding,
        dilation_rate=layer.dilation_rate,
        data_format="channels_last",
    )
    matrix = tf.reshape(tf.cast(pointwise.value, tf.float32), pointwise.shape[-2:])
    middle_deltas = tf.tensordot(tf.cast(deltas, tf.float32), matrix, [[-1], [1]])
    yield pointwise, OuterProducts(flat(middle), flat(deltas), pointwise.shape)
    gradients = depthwise_gradients(layer, inputs, middle_deltas, depthwise.shape)
    yield depthwise, DenseGradients(gradients)
    yield from _bias(layer, deltas)


# Normalization. Keras computes it in float32, so that its weights may be float32 in half precision.


@rule_by_copies(layers.LayerNormalization)
def layer_normalization(layer, own, inputs):
    """γ and β of as many axes as the input has, which Keras takes as they are."""
    axes = layer.axis if isinstance(layer.axis, list | tuple) else [layer.axis]
    axes, sizes = [axis % inputs.shape.rank for axis in axes], sizes_of(inputs)
    shape = [size if axis in (0, *axes) else 1 for axis, size in enumerate(sizes)]
    return {name: tf.reshape(copies, shape) for name, copies in _affine(layer, own)}


@rule_by_copies(layers.GroupNormalization, when=can_broadcast)
def group_normalization(layer, own, inputs):
    """γ and β per example, which Keras lays along the groups."""
    return {**dict(_affine(layer, own)), **broadcast_by_row(layer)}


def _affine(layer, own):
    for name in ("gamma", "beta"):
        if getattr(layer, name) is not None:
            yield name, own(getattr(layer, name), tf.float32)


if hasattr(layers, "RMSNormalization"):

    @rule_by_copies(layers.RMSNormalization)
    def rms_normalization(layer, own, inputs):
        """γ, which Keras broadcasts to the last axes, whatever `axis` says."""
        return {"scale": broadcastable(own(layer.scale, tf.float32), inputs.shape.rank)}


def broadcastable(copies, rank):
    """Copies (B, *shape) as (B, 1, ..., *shape): they broadcast where the weight alone would."""
    rows, *shape = sizes_of(copies)
    return tf.reshape(copies, (rows, *(1,) * (rank - 1 - len(shape)), *shape))


@rule(layers.PReLU)
def prelu(layer, deltas, inputs):
    """α Σ −max(−x, 0) · b."""
    negative = -tf.nn.relu(-tf.cast(inputs, tf.float32))
    yield layer.alpha, sum_to(negative * tf.cast(deltas, tf.float32), layer.alpha.shape)
