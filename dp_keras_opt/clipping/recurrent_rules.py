"""Rules for recurrent layers: the products with their inputs are taken before the loop.

The gates of a cell see z_t = x_t·K + b + h_{t-1}·R at step t, of an input x_t and the state h_{t-1}
before it. Here x·K + b of all steps is one product, and Keras's own loop goes over that instead of
x. The gradient of the loss in it is that in z, and gives those of the variables:

    K: Σ_t x_t ⊗ dz_t        R: Σ_t h_{t-1} ⊗ dz_t        b: Σ_t dz_t

In a `ConvLSTM` the products are convolutions, and the sums are over the places, too. With dropout
each gate may see an x and an h of its own: `seen` is a list of one tensor for all gates, or of one
for each.
"""

import functools
import math
from types import SimpleNamespace

import tensorflow as tf
from keras import layers

from dp_keras_opt._keras import ConvLSTMCell, is_rematerialized, own_trained, patched, trained_in
from dp_keras_opt.clipping.factors import DenseGradients, OuterProducts, sizes_of
from dp_keras_opt.clipping.layer_rules import rule_by_loop
from dp_keras_opt.clipping.patches import channels_last, convolution_patches

# Each cell's (new states, its output first; what else the gradient of R takes), from x·K + b and
# the states. `times(h)` is h·R with its dropout, `times(h, a, b)` that of the gates from a to b.


def _simple(cell, x, states, times):
    return [cell.activation(x + times(states[0]))], []


def _lstm(cell, x, states, times):
    h, c = states
    i, f, new, o = tf.split(x + times(h), 4, _channels(cell))
    c = cell.recurrent_activation(f) * c + cell.recurrent_activation(i) * cell.activation(new)
    return [cell.recurrent_activation(o) * cell.activation(c), c], []


def _gru(cell, x, states, times):
    (h,) = states
    x_z, x_r, x_new = tf.split(x, 3, -1)
    by_h = times(h) if cell.reset_after else times(h, 0, 2)
    h_z, h_r, *h_new = tf.split(by_h, 3 if cell.reset_after else 2, -1)
    z, r = cell.recurrent_activation(x_z + h_z), cell.recurrent_activation(x_r + h_r)
    new = cell.activation(x_new + (r * h_new[0] if h_new else times(r * h, 2, 3)))
    return [z * h + (1 - z) * new], [r]


#: How many gates a cell has, and what it computes.
_CELLS = {
    layers.SimpleRNNCell: (1, _simple),
    layers.LSTMCell: (4, _lstm),
    layers.GRUCell: (3, _gru),
    ConvLSTMCell: (4, _lstm),
}


def _is_plain(layer):
    """Whether it runs one of these cells, and nothing else in it trains."""
    cell = layer.cell
    # Of these Keras sets the outputs of other steps than the masked ones to zero, and h_{t-1} too.
    zeros_others = layer.unroll and layer.go_backwards and layer.zero_output_for_mask
    return (
        type(cell) in _CELLS
        and not zeros_others
        and not is_rematerialized(cell)
        and max(cell.dropout, cell.recurrent_dropout) < 1
        and cell.compute_dtype == layer.compute_dtype
        and {id(v) for v in trained_in(layer)} <= {id(v) for v in own_trained(cell)}
    )


@rule_by_loop(
    layers.RNN, layers.SimpleRNN, layers.LSTM, layers.GRU,
    layers.ConvLSTM1D, layers.ConvLSTM2D, layers.ConvLSTM3D,
    when=_is_plain,
)  # fmt: skip
def recurrent(layer, record, sequences, initial_state, mask, training=False):
    """Keras's loop, over x·K + b (B, T, ..., gates), which gives h_{t-1} beside the outputs.

    The outputs of masked steps are no states, but those before are not needed: dz is 0 there.
    """
    cell, axis = layer.cell, _channels(layer.cell)
    gates, advance = _CELLS[type(cell)]
    kernel, recurrent_kernel, bias = (
        None if v is None else tf.cast(tf.convert_to_tensor(v), cell.compute_dtype)
        for v in (cell.kernel, cell.recurrent_kernel, cell.bias)
    )
    units = kernel.shape[-1] // gates
    biases = [] if bias is None else tf.unstack(tf.reshape(bias, (-1, gates * units)))
    x_masks = _masks(cell.get_dropout_mask(sequences[:, 0]), training)
    h_masks = _masks(cell.get_recurrent_dropout_mask(initial_state[0]), training)
    x_seen = _through(tf.cast(sequences, cell.compute_dtype), [m[:, None] for m in x_masks])
    times_x, times_h, x_window, h_window = _multiplications(cell)
    rows, steps, *_ = sizes_of(sequences)
    product = _by_gate(times_x, [_merged(x) for x in x_seen], kernel, axis)
    source = tf.reshape(product, (rows, steps, *product.shape[1:]))
    if biases:
        source += tf.reshape(biases[0], (-1,) + (1,) * (-1 - axis))

    def times(h, first=0, last=gates):
        part = recurrent_kernel
        if last - first < gates:
            part = part[..., first * units : last * units]
        product = _by_gate(times_h, _through(h, h_masks[first:last]), part, axis)
        return product + biases[1] if len(biases) > 1 else product

    def step(x, states):
        new_states, others = advance(cell, x, states, times)
        return tf.concat([new_states[0], states[0], *others], axis), new_states

    with patched(layer, "cell", step), patched(layer, "return_sequences", True):
        last, given, states = layers.RNN.inner_loop(layer, source, initial_state, mask)
    outputs, *given = tf.split(given, given.shape[axis] // units, axis)

    def factors(deltas):
        h, *others = (tf.reverse(t, [1]) for t in given) if layer.go_backwards else given
        h_seen = _through(h, [m[:, None] for m in h_masks])
        x_deltas = h_deltas = _places(cell, deltas)
        for r in others:  # resets h before the product with R, or the product
            if cell.reset_after:
                ones = tf.ones_like(r)
                h_deltas *= tf.cast(tf.concat([ones, ones, r], -1), tf.float32)
            else:
                h_seen = [*(h_seen * gates)[: gates - 1], r * h_seen[-1]]
        yield cell.kernel, _gradient(cell, x_seen, x_deltas, kernel, x_window)
        yield cell.recurrent_kernel, _gradient(cell, h_seen, h_deltas, recurrent_kernel, h_window)
        sums = [tf.reduce_sum(each, axis=1) for each in (x_deltas, h_deltas)[: len(biases)]]
        if biases:
            yield cell.bias, DenseGradients(tf.reshape(tf.stack(sums, 1), (-1, *bias.shape)))

    record(source, factors)
    return tf.split(last, last.shape[axis] // units, axis)[0], outputs, states


def _channels(cell):
    """The axis of the gates, counted from the end: the same with the axis of time and without."""
    first = getattr(cell, "data_format", None) == "channels_first"
    return -1 - cell.rank if first else -1


def _masks(found, training):
    """The dropout masks of a cell: none, one for all gates, or one for each."""
    if found is None or not training:
        return []
    return found if isinstance(found, list) else [found]


def _through(tensor, masks):
    """What the gates see of a tensor."""
    return [tensor * mask for mask in masks] or [tensor]


def _by_gate(multiply, seen, kernel, axis):
    """The product of what each gate sees with its part of the kernel."""
    kernels = tf.split(kernel, len(seen), -1)
    return tf.concat([multiply(*pair) for pair in zip(seen, kernels, strict=True)], axis)


def _merged(tensor):
    """(B, T, ...) as (B·T, ...)."""
    rows, steps, *sizes = sizes_of(tensor)
    return tf.reshape(tensor, (rows * steps, *sizes))


def _places(cell, tensor, window=None):
    """(B, T, ...) as (B, T·places, channels), or all that the kernel sees through its window."""
    rows, steps, *_ = sizes_of(tensor)
    tensor = _merged(tensor)
    if isinstance(cell, ConvLSTMCell):
        tensor = channels_last(cell, tensor)
    if window is not None:
        merged, places, *seen = sizes_of(tensor := convolution_patches(window, tensor))
        tensor = tf.reshape(tensor, (merged, places, math.prod(seen)))
    _, *places, channels = sizes_of(tensor)
    return tf.reshape(tensor, (rows, steps * math.prod(places), channels))


def _gradient(cell, seen, deltas, kernel, window):
    """The gradient of a kernel, each gate of which has an input of its own if there are several."""
    *_, outputs = kernel.shape
    inputs = tf.stack([_places(cell, one, window) for one in seen], axis=1)
    groups, width = len(seen), outputs // len(seen)
    rows, places, _ = sizes_of(deltas)
    deltas = tf.transpose(tf.reshape(deltas, (rows, places, groups, width)), (0, 2, 1, 3))
    layout = (groups, inputs.shape[-1], width)
    return OuterProducts(inputs, deltas, kernel.shape, layout, (1, 0, 2))


def _multiplications(cell):
    """(x·K, h·R; the windows through which K and R see x and h): functions of x or h and kernel."""
    if not isinstance(cell, ConvLSTMCell):
        return tf.matmul, tf.matmul, None, None
    ones = (1,) * cell.rank
    window = SimpleNamespace(
        kernel_size=cell.kernel_size, strides=ones, dilation_rate=ones, padding="same"
    )
    times_x = functools.partial(cell.input_conv, padding=cell.padding)
    return times_x, cell.recurrent_conv, cell, window
