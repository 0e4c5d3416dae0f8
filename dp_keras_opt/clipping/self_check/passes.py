"""Runs a model on synthetic batches, and shows what its layers give."""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from dp_keras_opt._keras import added_losses, layers_of, method_of_call, patched, trained_in
from dp_keras_opt.clipping.batch import Batch
from dp_keras_opt.clipping.graphs import current_graph
from dp_keras_opt.clipping.observed import NotPerExample
from dp_keras_opt.clipping.per_example import children, runs_loop
from dp_keras_opt.clipping.state_changes import Snapshot, seeds

#: What a model raises for ids, words or sizes that it has no place for.
DOES_NOT_RUN = (
    ArithmeticError,
    AssertionError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    tf.errors.OpError,
)


class Pass(NamedTuple):
    """What one forward pass gave.

    Attributes:
        losses: (B,).
        seen: (name of a layer, an argument or a result of its call, or a loss that it added), each
            tensor once.
        is_random: whether it moved a generator of random numbers on. Having one says nothing;
            recurrent layers have one without any dropout.
    """

    losses: np.ndarray
    seen: list[tuple[str, np.ndarray]]
    is_random: bool


class Passes:
    """Forward passes of one model, compiled once for each number of rows.

    Attributes:
        objective: what messages call the loss.
    """

    def __init__(self, model: keras.Model, forward: Callable[..., tf.Tensor], eager: bool) -> None:
        """
        Args:
            model: a built model.
            forward: function (batch, training) that returns the losses (B,).
            eager: whether the model will run eagerly, so that it need not compile.
        """
        self.model, self._forward, self.objective = model, forward, "The loss"
        self._run = self._traced if eager else tf.function(self._traced, autograph=False)
        self._slope = self._gradients if eager else tf.function(self._gradients, autograph=False)

    def run(self, batch: Batch, before: Snapshot, training: bool = True) -> Pass:
        """One pass, which begins at a given state of the model."""
        before.put_back()
        states = list(map(keras.ops.convert_to_numpy, seeds(self.model)))
        losses, seen = self._run(_parts(batch), training)
        now = map(keras.ops.convert_to_numpy, seeds(self.model))
        return Pass(
            np.asarray(losses),
            [(name, np.asarray(tensor)) for one in seen for name, tensor in one.items()],
            not all(map(np.array_equal, states, now)),
        )

    def losses_and_gradients(
        self, batch: Batch, before: Snapshot, training: bool = True, without: int = -1
    ) -> list[np.ndarray]:
        """The losses (B,), and the gradients of a sum of them that weighs each differently.

        `without`: the place of a row whose loss is left out of the sum.
        """
        before.put_back()
        tensors = with_tapes(self._slope, _parts(batch), training, tf.constant(without))
        return [np.asarray(tensor).astype(np.float64) for tensor in tensors]

    def why_not(self, batch: Batch, before: Snapshot, with_gradients: bool = False) -> str | None:
        """Why the model gives no finite losses for a batch, None where it does.

        Args:
            batch: the batch.
            before: the state at which the pass begins.
            with_gradients: whether gradients are needed, too; kernels lack those of some sizes.
        """
        try:
            if with_gradients:
                losses, *_ = self.losses_and_gradients(batch, before)
            else:
                losses = self.run(batch, before).losses
        except NotPerExample:
            raise
        except DOES_NOT_RUN as error:
            return f"{type(error).__name__}: {error}"
        return None if np.isfinite(losses).all() else "its loss is not finite"

    def _traced(self, batch, training):
        seen = {}  # by the tensor's id: what a layer gives is what the next one takes
        with contextlib.ExitStack() as patches:
            for layer in dict.fromkeys(_watched(self.model)):
                method = method_of_call(layer)
                seeing = _seen(layer.name, getattr(layer, method), seen, current_graph())
                patches.enter_context(patched(layer, method, seeing))
            losses = self._forward(Batch(*batch), training)
        for layer in layers_of(self.model):
            for loss in added_losses(layer):
                seen[id(loss)] = layer.name, loss
        return losses, [{name: tensor} for name, tensor in seen.values()]

    def _gradients(self, batch, training, without):
        with tf.GradientTape() as tape:
            losses = self._forward(Batch(*batch), training)
            rows = tf.range(tf.shape(losses)[0])
            weights = tf.cast(tf.where(rows == without, 0, rows + 1), losses.dtype)
            total = tf.reduce_sum(losses * weights)
        gradients = tape.gradient(total, [v.value for v in self.model.trainable_variables])
        return [tf.convert_to_tensor(t) for t in (losses, *gradients) if t is not None]


def is_in_half_precision(model: keras.Model) -> bool:
    """Whether some layer computes in 16 bits."""
    return any(layer.compute_dtype in ("float16", "bfloat16") for layer in layers_of(model))


def agree(one: np.ndarray, other: np.ndarray, model: keras.Model) -> bool:
    """Whether losses or gradients are equal up to the rounding of sums in another order."""
    tolerance = 0.05 if is_in_half_precision(model) else 1e-3
    largest = np.abs(one).max(initial=0.0)
    return bool(np.abs(one - other).max(initial=0.0) <= tolerance * largest + 1e-5)


def with_tapes(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function in a thread of its own.

    While a training step is traced, `tf.init_scope` pauses the gradient tapes of this thread, all
    gradients would be None, and any engines would look right.
    """
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()


def _parts(batch):
    return batch.x, batch.y, batch.sample_weight


def _watched(layer):
    """The innermost layers; the outermost of those that run others in a loop or train nothing.

    Weights that are not trained stay as they are: of layers inside of one that has no others, all
    that matters is what it gives.
    """
    for child in children(layer):
        if trained_in(child) and children(child) and not runs_loop(child, False):
            yield from _watched(child)
        else:
            yield child


def _seen(name, call, seen, graph):
    def seeing(*args, **kwargs):
        result = call(*args, **kwargs)
        for leaf in keras.tree.flatten((args, kwargs, result)):
            if not isinstance(leaf, tf.Tensor) or leaf.dtype in (tf.resource, tf.variant):
                continue
            if getattr(leaf, "graph", None) is graph:  # not of a loop or a branch inside of it
                seen.setdefault(id(leaf), (name, leaf))
        return result

    return seeing
