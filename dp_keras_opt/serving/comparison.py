"""Whether a SavedModel gives what `predict` gives: asked once, on inputs that are not private."""

from __future__ import annotations

import math
import warnings

import keras
import numpy as np
import tensorflow as tf

from dp_keras_opt._keras import layers_of
from dp_keras_opt.clipping import Batch
from dp_keras_opt.clipping.self_check.synthetic import Synthetic
from dp_keras_opt.clipping.state_changes import restored, seeds
from dp_keras_opt.data import held
from dp_keras_opt.serving import signature

#: Magnitudes of synthetic floats: those of standardised features, and those of pixels, which a
#: model may rescale; with three rows of each. Those that a model does not take are left out.
_MAGNITUDES = (1.0, 10.0, 255.0)
_ROWS = 3

#: Distance from 1 to the next number.
_EPSILON = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23, "float64": 2.0**-52}


def check(model, folder, inputs, public_inputs=None):
    """Compares the SavedModel in a folder with the model that it was made of.

    Two graphs of one computation differ by rounding: half of the digits of the lowest precision in
    the model have to agree, relative to the largest entry of a row. A model may amplify rounding
    more, and what compiles `predict` may round otherwise: then they have to agree with those of
    the model as it is called, without being compiled. Rows that are infinite say nothing.

    Args:
        model: a built `DPModel`; its weights and random numbers stay as they are.
        folder: of the SavedModel.
        inputs: structure of `tf.TensorSpec`, from `signature.inputs`.
        public_inputs: None, or inputs to compare on.

    Raises:
        ValueError: an output differs; or no synthetic inputs were found that the model takes.
    """
    states = seeds(model)

    def run(function, *args, **options):
        """What a function gives, with the random numbers of the export."""
        with restored(states):
            return function(*args, **options)

    given = public_inputs is not None
    x = _given(inputs, public_inputs) if given else run(_synthetic, model, inputs)

    def outputs_of(function, **options):
        outputs = signature.named(model, run(function, x, **options))
        return {name: np.asarray(output) for name, output in outputs.items()}

    def predict():
        return outputs_of(model.predict, batch_size=len(tf.nest.flatten(x)[0]), verbose=0)

    served, expected = _served(folder, inputs, x), predict()
    _check_forms(served, expected)
    tolerance = _tolerance(model)
    different = [name for name in served if _differ(served[name], expected[name], tolerance)]
    if not different:
        return
    again, called = predict(), outputs_of(model, training=False)
    random = [name for name in different if np.any(_distance(again[name], expected[name]))]
    own_step = type(model).predict_step is not keras.Model.predict_step
    for name in different:
        rounding = not own_step and not _differ(served[name], called[name], tolerance)
        if name not in random and not rounding:
            raise ValueError(_difference(name, served[name], expected[name]))
    if random:
        warnings.warn(
            f"The outputs {random} are random in inference, and predict does not repeat them: the "
            "SavedModel was compared with predict in their shapes and dtypes alone. Draw the "
            "numbers with keras.random and a SeedGenerator to have them compared in full.",
            stacklevel=4,
        )


def _served(folder, inputs, x):
    """What the signature `serving_default` gives, as a client gets it."""
    serve = tf.saved_model.load(str(folder)).signatures["serving_default"]
    specs = tf.nest.flatten(inputs)
    rows = {spec.name: leaf for spec, leaf in zip(specs, tf.nest.flatten(x), strict=True)}
    return {name: output.numpy() for name, output in serve(**rows).items()}


# Inputs.


def _synthetic(model, inputs):
    """Rows that the model takes, of several magnitudes: no data are looked at."""

    def why_not(batch):
        try:
            outputs = tf.nest.flatten(model(batch.x, training=False))
        except Exception as error:  # whatever a model raises for values that it has no use for
            return f"{type(error).__name__}: {error}"
        floats = [output.numpy() for output in outputs if output.dtype.is_floating]
        finite = all(np.isfinite(output.astype(np.float64)).all() for output in floats)
        return None if finite else "its outputs are not finite"

    synthetic, random = Synthetic(Batch(inputs, None)), np.random.default_rng(0)
    synthetic.widen(model, why_not)
    draws = (synthetic.pair(random, _ROWS, magnitude=each)[0] for each in _MAGNITUDES)
    parts = [draw.x for draw in draws if why_not(draw) is None]  # floats may be ids of a table
    if not parts:
        raise ValueError(
            f"The export of '{model.name}' cannot be compared with predict: no synthetic inputs "
            f"were found that it takes ({synthetic.reason}). Pass public_inputs: some rows as "
            "predict takes them, not private ones."
        )
    return tf.nest.map_structure(lambda *leaves: tf.concat(leaves, 0), *parts)


def _given(inputs, public_inputs):
    """Public rows as tensors of the dtypes that the model takes."""
    specs, leaves = keras.tree.flatten(inputs), keras.tree.flatten(public_inputs)
    tensors = [held.tensor(np.asarray(leaf)) for leaf in leaves]
    if len(specs) != len(tensors) or not all(
        tensor.shape.is_compatible_with(spec.shape) and tensor.shape[0] and (tensor.dtype
        == tf.string) == (spec.dtype == tf.string)
        for spec, tensor in zip(specs, tensors, strict=True)
    ):  # fmt: skip
        raise ValueError(
            f"public_inputs must be rows of what the model takes, {specs}; received "
            f"{[(tensor.dtype.name, tuple(tensor.shape)) for tensor in tensors]}."
        )
    tensors = [
        tensor if tensor.dtype == spec.dtype else tf.cast(tensor, spec.dtype)
        for spec, tensor in zip(specs, tensors, strict=True)
    ]
    return keras.tree.pack_sequence_as(inputs, tensors)


# Differences.


def _check_forms(served, expected):
    """Refuses outputs of other names, shapes or dtypes."""
    found, wanted = (
        {name: (output.dtype.name, output.shape) for name, output in outputs.items()}
        for outputs in (served, expected)
    )
    if found != wanted:
        raise ValueError(
            f"The SavedModel gives {found} where predict gives {wanted}, so nothing was written. "
            "What is served is `call`: has the model a `predict_step` of its own?"
        )


def _tolerance(model):
    """What rounding may do, relative to the largest entry of a row."""
    dtypes = {str(layer.compute_dtype) for layer in layers_of(model)}
    return math.sqrt(max(_EPSILON.get(dtype, _EPSILON["float32"]) for dtype in dtypes))


def _differ(served, expected, tolerance):
    """Whether a row differs by more than rounding; integers and strings have to be the same."""
    allowed = 0.0
    if tf.as_dtype(expected.dtype).is_floating:
        entries = np.abs(expected.astype(np.float64).reshape(len(expected), -1))
        allowed = tolerance * entries.max(axis=1, initial=0.0)
    return np.any(_distance(served, expected) > allowed)


def _distance(served, expected):
    """The largest difference in each row; 0 for rows of which not all is finite."""
    if expected.dtype == object:  # strings
        distance = np.asarray(served != expected, np.float64)
    else:
        served, expected = served.astype(np.float64), expected.astype(np.float64)
        with np.errstate(invalid="ignore"):
            distance = np.nan_to_num(np.abs(served - expected), nan=np.inf)
        finite = np.isfinite(expected).reshape(len(expected), -1).all(axis=1)
        distance[~finite] = 0.0
    return distance.reshape(len(expected), -1).max(axis=1, initial=0.0)


def _difference(name, served, expected):
    """What to say of an output that differs."""
    distance = _distance(served, expected)
    if expected.dtype == object:
        how_far = f"in {np.mean(distance > 0):.0%} of the rows"
    else:
        row = int(distance.argmax())
        how_far = f"by up to {distance[row]:.3g} (predict: {_largest(expected[row]):.3g} at most)"
    return (
        f"The output '{name}' of the SavedModel differs from predict {how_far} on inputs that are "
        "not private, so nothing was written. Look for a layer that does something else in a graph "
        "than in predict: Python state or randomness fixed when it is traced, a `training` "
        "argument that is not passed on, a `predict_step` of the model's own. What is served is "
        "model(x, training=False)."
    )


def _largest(row):
    return np.abs(row.astype(np.float64)).max(initial=0.0)
