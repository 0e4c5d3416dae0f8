"""What a served model takes and returns, and under which names."""

from __future__ import annotations

import re

import keras
import numpy as np
import tensorflow as tf

from dp_keras_opt._keras import Functional, get_input_signature, to_snake_case
from dp_keras_opt.counterpart import PrivateWrapper
from dp_keras_opt.data import held

#: What Keras calls the tensor, or the layer, of an `Input` without a name; numbered in the process.
_UNNAMED_INPUT = re.compile(r"(keras_tensor|input_layer)(_\d+)?")


def inputs(model, public_inputs=None):
    """What a built model takes: a structure of `tf.TensorSpec` with names.

    Raises:
        ValueError: that is not known, of a subclassed model.
    """
    if isinstance(model, Functional):
        specs = keras.tree.map_structure(_spec_of_input, model.input)
    elif public_inputs is not None:
        specs = keras.tree.map_structure(_spec_of_array, keras.tree.lists_to_tuples(public_inputs))
    else:
        specs = _specs_of_training(model)
    return _with_names(specs)


def named(model, outputs):
    """The outputs of a model as a flat dict from the name under which each is served."""
    paths, leaves = zip(*keras.tree.flatten_with_path(outputs), strict=True)
    numbered = [f"output_{place}" for place in range(len(leaves))]
    if isinstance(outputs, dict):
        found = ["/".join(map(str, path)) for path in paths]
    else:
        layers = _names_of_layers(model)
        layers = layers if len(layers) == len(leaves) else [None] * len(leaves)
        found = [name or number for name, number in zip(layers, numbered, strict=True)]
    if len(set(found)) < len(found):
        found = numbered
    return dict(zip(found, leaves, strict=True))


def is_flat(outputs):
    """Whether outputs are a tensor, or a list, tuple or dict of tensors: what a signature holds."""
    return all(len(path) < 2 for path, _ in keras.tree.flatten_with_path(outputs))


def _names_of_layers(model):
    """For each output the name that was given to its layer, None for one that Keras made up.

    Keras numbers the names that it makes up, so that they depend on what else was built in the
    process: the next version of a model would be served under another name.
    """
    inner = model.model if isinstance(model, PrivateWrapper) else model
    if isinstance(inner, keras.Sequential) and inner.layers:
        return [_given_name(inner.layers[-1])]
    if isinstance(inner, Functional):
        return [_given_name(tensor._keras_history.operation) for tensor in inner.outputs]
    return []


def _given_name(operation):
    made_up = rf"{re.escape(to_snake_case(type(operation).__name__))}(_\d+)?"
    return None if re.fullmatch(made_up, operation.name) else operation.name


def _spec_of_input(tensor):
    name = None if _UNNAMED_INPUT.fullmatch(tensor.name) else tensor.name
    return tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype, name)


def _spec_of_array(array):
    tensor = held.tensor(np.asarray(array))
    return tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype)


def _specs_of_training(model):
    """Keras knows the structure that the model was built for; the batches know the dtypes."""
    if not model.batch_specs(1):
        raise ValueError(
            f"What the subclassed model '{model.name}' takes is not known, since it was not "
            "trained in this process after compile. Pass public_inputs: some rows as predict takes "
            "them, not private ones."
        )
    structure = get_input_signature(model)[0]
    leaves = model.batch_specs(len(tf.nest.flatten(structure)))
    specs = [tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype) for leaf in leaves]
    return tf.nest.pack_sequence_as(structure, specs)


def _with_names(structure):
    """Specs with the names that they have; or else the keys of a dict, or args_0, args_0_1, ..."""
    pairs = keras.tree.flatten_with_path(structure)
    numbers = iter(["args_0", *(f"args_0_{place}" for place in range(1, len(pairs)))])

    def name(path, spec):
        if spec.name is not None:
            return spec.name
        return "_".join(map(str, path)) if isinstance(structure, dict) else next(numbers)

    leaves = [tf.TensorSpec(spec.shape, spec.dtype, name(path, spec)) for path, spec in pairs]
    return keras.tree.pack_sequence_as(structure, leaves)
