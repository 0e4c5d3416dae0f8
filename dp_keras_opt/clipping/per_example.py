"""The general engine: a layer run one example at a time, vectorised, each with its own weights.

Every example gets its own copy of the layer's variables, so that the one backward pass gives the
gradient of each copy: the per-example gradients. It serves any layer, also the whole model, and
since an example sees nothing of the others, the layer cannot mix them. It costs memory in
proportion to rows × variables of the layer; `max_rows` bounds it and the training step then takes
the batch in chunks.
"""

import functools
import math
import os

import keras
import tensorflow as tf
from keras import tree

from dp_keras_opt._keras import layers_of, mask_of, seed_generators, set_mask, trained_in
from dp_keras_opt.clipping import observed
from dp_keras_opt.clipping.graphs import operations
from dp_keras_opt.clipping.loops import runs_loop

#: Memory for per-example copies of variables, in bytes.
MEMORY = 2**28


def children(layer):
    """The direct sublayers of a layer or model."""
    return layers_of(layer, include_self=False, recursive=False)


def owns_variables(layer):
    """Whether trainable variables belong to this layer itself and not to a sublayer of it."""
    below = {id(v) for child in children(layer) for v in trained_in(child)}
    return any(id(v) not in below for v in trained_in(layer))


def is_unit(layer, open_sizes=True):
    """Whether a layer without a rule is run as a whole, and not sublayer by sublayer."""
    return runs_loop(layer, open_sizes) or owns_variables(layer)


def has_loops(layer):
    """Whether the layer, or one inside it, runs others in a loop; XLA cannot vectorise that."""
    return any(map(runs_loop, layers_of(layer)))


def max_rows(layers):
    """How many rows fit in `MEMORY` when each has copies of the variables of `layers`."""
    numbers = sum(math.prod(v.shape) for layer in layers for v in trained_in(layer))
    return None if not numbers else max(1, MEMORY // (4 * numbers))


def arguments_with_rows(layer, num_rows, args, kwargs):
    """Places of the tensors among the flattened arguments that have one row per example.

    Raises:
        ValueError: there is none.
    """
    flat = tree.flatten((args, kwargs))
    batched = [i for i, leaf in enumerate(flat) if _has_rows(leaf, num_rows)]
    if not batched:
        raise ValueError(
            f"Layer '{layer.name}' was called without any tensor that has one row per example, so "
            "its per-example gradients are not defined. Pass the batch through the layer."
        )
    return batched


def call(layer, forward, num_rows, args, kwargs, batched, sequential=False, repeats=None):
    """Runs `forward`, the layer's own `call`, on each example of the batch alone.

    Args:
        layer: the layer.
        forward: its unpatched `call`.
        num_rows: of the batch, None if it is not static.
        args, kwargs: the arguments of the call.
        batched: which of them to split, as `arguments_with_rows` gives it.
        sequential: one example after another, in a loop, where XLA cannot compile a vectorised
            loop.
        repeats: how many times an example stands in the batch that is of it alone, as found before;
            None finds out whether TensorFlow needs two (`is_miscomputed`).

    Returns:
        (outputs of the layer for the batch, list of (variable, its copies (rows, *shape)), how many
        times an example was repeated).
    """
    variables = trained_in(layer)
    flat = tree.flatten((args, kwargs))
    count = tf.shape(flat[batched[0]])[0] if num_rows is None else num_rows
    copies = [tf.repeat(tf.convert_to_tensor(v)[None], count, axis=0) for v in variables]
    structure, has_mask, beside = [], [], []

    def one_example(slices, repeats=1):
        leaves = list(flat)
        for i, leaf in zip(batched, slices["leaves"], strict=True):
            leaves[i] = tf.repeat(leaf[None], repeats, axis=0) if repeats > 1 else leaf[None]
        one_args, one_kwargs = tree.pack_sequence_as((args, kwargs), leaves)
        own_weights = list(zip(variables, slices["copies"], strict=True))
        scope = keras.StatelessScope(state_mapping=own_weights, collect_losses=True)
        with scope, observed.frame() as seen:
            outputs = forward(*one_args, **one_kwargs)
        structure[:] = [outputs]
        beside[:] = [seen, len(scope.losses)]
        leaves = [leaf for leaf in tree.flatten(outputs) if leaf is not None]
        masks = [mask_of(leaf) for leaf in leaves]
        has_mask[:] = [mask is not None for mask in masks]
        found = (*leaves, *masks, *scope.losses, *tree.flatten([output for _, output in seen]))
        return [_only(t, repeats) for t in found if t is not None]

    slices = {"leaves": [flat[i] for i in batched], "copies": copies}
    mapping = keras.ops.map if sequential else tf.vectorized_map
    if repeats is None and not sequential:
        repeats = _repeats(one_example, slices)
    results = mapping(functools.partial(one_example, repeats=repeats or 1), slices)
    _advance_seeds(layer)
    outputs, others = results[: len(has_mask)], iter(results[len(has_mask) :])
    for output, masked in zip(outputs, has_mask, strict=True):
        if masked:
            set_mask(output, next(others))
    seen, losses = beside
    for _ in range(losses):
        keras.layers.Layer.add_loss(layer, next(others))
    for name, output in seen:
        observed.observe(name, _packed(output, others))
    packed = _packed(structure[0], iter(outputs))
    return packed, list(zip(variables, copies, strict=True)), repeats


def _packed(structure, leaves):
    return tree.map_structure(lambda leaf: None if leaf is None else next(leaves), structure)


def _only(tensor, repeats):
    if tensor.shape.rank == 0 or tensor.shape[0] not in (None, repeats):
        raise ValueError(f"it gives {tensor.shape} for one example, without a row of its own")
    return tensor[0]


def _repeats(one_example, slices):
    """How often an example has to stand in its batch for TensorFlow to compute its products right.

    Raises:
        ValueError: twice is not enough.
    """
    for repeats in (1, 2):
        of_each = functools.partial(one_example, repeats=repeats)
        if not is_miscomputed(functools.partial(tf.vectorized_map, of_each), slices):
            return repeats
    raise ValueError(
        "on this CPU TensorFlow computes products of matrices in it wrong, one example at a time; "
        "set TF_ENABLE_ONEDNN_OPTS=0 in the environment"
    )


def is_miscomputed(function, arguments):
    """Whether a function has products of matrices that TensorFlow computes wrong on the CPU.

    With oneDNN, TensorFlow 2.18 to 2.21 reads beyond the memory of what it multiplies where
    [R, 1, M, K] meets one [K, N] for all: another example's numbers, or the end of the process. It
    is what a batch of one becomes, vectorised, beside weights that are not the example's own.

    Args:
        function: of a structure of tensors; it is traced, and not run.
        arguments: that structure.
    """
    if os.environ.get("TF_ENABLE_ONEDNN_OPTS") == "0" or tf.config.list_physical_devices("GPU"):
        return False
    specs = tf.nest.map_structure(tf.TensorSpec.from_tensor, arguments)
    graph = tf.function(function, autograph=False).get_concrete_function(specs).graph
    return any(map(_is_miscomputed, operations(graph)))


def _is_miscomputed(operation):
    if not operation.type.startswith("BatchMatMul"):
        return False
    one, other = (tensor.shape for tensor in operation.inputs)
    if one.rank is None or other.rank is None:
        return True
    return one.rank == 4 and one[0] != 1 and one[1] == 1 and all(d == 1 for d in other[:-2])


def _has_rows(leaf, num_rows):
    if not tf.is_tensor(leaf) or leaf.shape.rank in (None, 0):
        return False
    return leaf.shape[0] == num_rows


def _advance_seeds(layer):
    # What the vectorised call assigns stays in its scope; the next step must draw another mask.
    for part in layers_of(layer):
        for generator in seed_generators(part):
            generator.next()
