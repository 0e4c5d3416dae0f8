"""How much speaks for it that a model was trained on an example: one number per example."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from dp_keras_opt import _keras, clipping
from dp_keras_opt.checks import whole_number
from dp_keras_opt.clipping.batch import map_leaves
from dp_keras_opt.data import Batches
from dp_keras_opt.model import DPModel
from dp_keras_opt.training.losses import per_example_losses

#: `(x, y)` of arrays, or nested structures of them, with one row per example, or an iterable of
#: such batches.
Examples: TypeAlias = tuple[Any, Any] | Iterable[Any]
#: A function of (model, x, y) for a batch; higher where more speaks for membership.
ScoreFunction: TypeAlias = Callable[[Any, Any, Any], Any]


def negative_loss(model: keras.Model, x: Any, y: Any) -> np.ndarray:
    """Minus the loss with which the model was compiled: of all outputs, by their weights.

    Over sequences the mean over the positions that no mask hides. Regularizers, which are the same
    for all examples, are not in it.

    Raises:
        ValueError: the model has no compiled loss, or one that cannot be taken per example.

    Reference: Yeom, Giacomelli, Fredrikson and Jha, "Privacy risk in machine learning: analyzing
    the connection to overfitting", CSF 2018, arXiv:1709.01604.
    """
    losses, _ = _losses(model, x, y)
    return -losses


def logit_confidence(model: keras.Model, x: Any, y: Any) -> np.ndarray:
    """log(p/(1 − p)) of the probability p that a classifier gives to the true class.

    It ranks examples as p does, without running out of digits where p is nearly 1.

    Args:
        model: one output, (B, classes) or, of two classes, (B,) or (B, 1): logits where the
            compiled loss says `from_logits=True`, else probabilities.
        x: inputs.
        y: class numbers (B,) or (B, 1), or one-hot rows as wide as the output.

    Raises:
        ValueError: output or targets are not those of such a classifier.

    Reference: Carlini, Chien, Nasr, Song, Terzis and Tramèr, "Membership inference attacks from
    first principles", IEEE S&P 2022, arXiv:2112.03570.
    """
    given = model(x, training=False)
    if isinstance(given, (dict, list, tuple)) or len(tree.flatten(y)) != 1:
        raise ValueError(_NOT_A_CLASSIFIER.format("several outputs or targets"))
    logits = _from_logits(model, y, given)
    outputs, y = np.asarray(given, np.float64), np.asarray(tree.flatten(y)[0])
    if outputs.ndim == 1:
        outputs = outputs[:, None]
    if outputs.ndim != 2:
        raise ValueError(_NOT_A_CLASSIFIER.format(f"an output of shape {outputs.shape}"))
    if outputs.shape[1] == 1:  # two classes: sigmoid(z) is softmax(0, z)
        return _of_two_classes(outputs, y, logits)
    if y.shape == outputs.shape:
        if not np.all((y == 0) | (y == 1)) or not np.all(y.sum(axis=1) == 1):
            raise ValueError(_NOT_A_CLASSIFIER.format("targets with more or less than one class"))
        y = y.argmax(axis=1)
    y = _class_numbers(y, len(outputs), outputs.shape[1])
    true = np.arange(outputs.shape[1]) == y[:, None]
    if logits:
        rest = np.where(true, -np.inf, outputs)
        return outputs[true] - np.logaddexp.reduce(rest, axis=1)
    _check_probabilities(outputs, np.abs(outputs.sum(axis=1) - 1) < 1e-2)
    return _log(outputs[true]) - _log(np.where(true, 0, outputs).sum(axis=1))


def negative_gradient_norm(model: keras.Model, x: Any, y: Any) -> np.ndarray:
    """Minus the norm of the example's gradient at the model's weights: a white-box score.

    Examples that a model was trained on until they fit have small gradients.

    Args:
        model: a compiled `DPModel`; `make_private` makes one of another.
        x, y: inputs and targets.

    Raises:
        TypeError: it is another model.
    """
    if not isinstance(model, DPModel):
        raise TypeError(
            "Only a DPModel gives the gradients of single examples. Compile "
            "dp_keras_opt.make_private(model) with a private optimizer and give that, or use the "
            "score 'loss'."
        )
    return -np.asarray(clipping.per_example_norms(model, (x, y)), np.float64)


#: By the names that `attack_report` takes.
SCORES: dict[str, ScoreFunction] = {
    "loss": negative_loss,
    "confidence": logit_confidence,
    "gradient_norm": negative_gradient_norm,
}


def sequence_losses(model: keras.Model, sequences: Examples, batch_size: int = 256) -> np.ndarray:
    """The loss of each sequence, summed over its positions: −log of its probability, in nats.

    Args:
        model: a Keras model compiled with a cross-entropy, whose output has one row per position.
        sequences: `(x, y)`, or `(x, y, sample_weight)` where weights (B, T) of 0 hide positions, or
            an iterable of such batches. Positions that a mask of the output hides count nothing.
        batch_size: how many sequences to look at at once.

    Returns:
        (sequences,), float64.

    Raises:
        ValueError: the model has no compiled loss, or several outputs, or no axis of positions.
    """
    parts = []
    for x, y, weight in batches(sequences, batch_size):
        losses, outputs = _losses(model, x, y, weight)
        if isinstance(outputs, (dict, list, tuple)) or len(outputs.shape) < 3:
            raise ValueError(
                "The loss of a sequence needs a model with one output of shape (batch, positions, "
                "classes)."
            )
        mask = _keras.mask_of(outputs)
        positions = outputs.shape[1] if mask is None else np.sum(np.asarray(mask), axis=1)
        parts.append(losses * positions)  # each loss is a mean over its positions
    return np.concatenate(parts)


def batches(examples: Examples, batch_size: int = 256) -> Iterator[tuple[Any, Any, Any]]:
    """(x, y, sample_weight or None) of at most `batch_size` rows each, as tensors.

    Raises:
        ValueError: there are none, they are no such tuples, or their numbers of rows differ.
    """
    whole_number(batch_size, "batch_size")
    if isinstance(examples, tuple):
        rows = tree.map_structure(_array, _complete(examples))
        counts = sorted({len(array) for array in tree.flatten(rows) if array is not None})
        if len(counts) != 1 or not counts[0]:
            raise ValueError(
                "All arrays of (x, y) need the same number of rows, and at least one; received "
                f"{counts}."
            )
        found: Iterable[Any] = (
            map_leaves(lambda a, s=s: a[s : s + batch_size], rows)
            for s in range(0, counts[0], batch_size)
        )
    elif isinstance(examples, Batches):
        raise ValueError(
            "A private sampler draws some examples several times, others never, and pads its "
            "batches. Give the examples themselves: (x, y), or batches that have each once."
        )
    elif isinstance(examples, keras.utils.PyDataset):  # which no `for` would end
        found = (_complete(examples[i]) for i in range(examples.num_batches))
    else:
        found = map(_complete, examples)
    nothing = True
    for batch in found:
        nothing = False
        yield map_leaves(tf.convert_to_tensor, batch)
    if nothing:
        raise ValueError("There are no examples: the iterable gave no batch.")


_NOT_A_CLASSIFIER = (
    "The score 'confidence' is for a classifier with one output (batch, classes) and one class per "
    "example; this model has {}. Use the score 'loss', or a function of (model, x, y)."
)


def _losses(model, x, y, weight=None):
    """(losses (B,) in float64, outputs)."""
    compiled = _keras.compiled_loss(model)
    if isinstance(model, DPModel) and model.compiled:  # an Objective, what layers add
        batch = clipping.Batch(x, y, weight)
        losses, outputs = clipping.losses_and_outputs(model, batch, training=False)
        return np.asarray(losses, np.float64), outputs
    if compiled is None:
        raise ValueError(
            "The model has no compiled loss. Call model.compile(loss=...) with the loss it was "
            "trained with (that changes no weight), or give a function of (model, x, y) as score."
        )
    outputs = model(x, training=False)
    losses, _ = per_example_losses(compiled, y, outputs, weight)
    return np.asarray(losses, np.float64), outputs


def _of_two_classes(outputs, y, logits):
    y = _class_numbers(y, len(outputs), 2)
    if logits:
        for_one = outputs[:, 0]
    else:
        _check_probabilities(outputs, True)
        for_one = _log(outputs[:, 0]) - _log(1 - outputs[:, 0])
    return np.where(y == 1, for_one, -for_one)


def _class_numbers(y, rows, classes):
    y = y.reshape(rows, -1)
    whole = np.issubdtype(y.dtype, np.number) and np.all(np.mod(y, 1) == 0)
    if y.shape[1] != 1 or not whole or y.min() < 0 or y.max() >= classes:
        raise ValueError(
            _NOT_A_CLASSIFIER.format(f"targets that are no class numbers from 0 to {classes - 1}")
        )
    return y[:, 0].astype(int)


def _complete(batch):
    """(x, y, sample_weight or None)."""
    if not isinstance(batch, tuple | list) or len(batch) not in (2, 3):
        raise ValueError(
            "Examples are (x, y) or (x, y, sample_weight), arrays with one row per example, or an "
            f"iterable of such batches; received {type(batch).__name__}."
        )
    return (*batch, None) if len(batch) == 2 else tuple(batch)


def _array(values):
    """As an array, the fractions as Keras takes them."""
    if values is None:
        return None
    values = np.asarray(values)
    return values.astype(keras.config.floatx()) if values.dtype.kind == "f" else values


def _from_logits(model, y, outputs):
    """Whether the compiled loss reads the outputs as logits."""
    compiled = _keras.compiled_loss(model)
    if compiled is None:
        return False
    if not compiled.built:
        compiled.build(y, outputs)
    return any(getattr(part.loss, "from_logits", False) for part in _keras.flat_losses(compiled))


def _check_probabilities(outputs, sums):
    if not (np.all(outputs >= 0) and np.all(outputs <= 1) and np.all(sums)):
        raise ValueError(
            "The outputs are no probabilities. Compile the model with a loss that says "
            "from_logits=True, so that they are read as logits."
        )


def _log(values):
    return np.log(np.maximum(values, np.finfo(np.float32).tiny))
