"""What is taken as a clip norm: a number, a public function of the step, or a `Quantile`."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dp_keras_opt.clipping import graphs
from dp_keras_opt.clipping.bounds import LEAST, MOST, bound
from dp_keras_opt.clipping.quantile import Quantile


class ClipNormSchedule:
    """C_t, the clip norm of step t (from 0), which a Keras schedule gives.

    Bound and noise of a step are both multiples of the one C_t, so that ε does not depend on it.
    What does is that C_t is fixed in advance: the schedule is traced once, here, and must read
    nothing but the step.

    Args:
        schedule: a `keras.optimizers.schedules.LearningRateSchedule`.

    Raises:
        ValueError: the schedule reads a variable, draws at random or runs Python in its graph; or
            it gives no single number.
    """

    def __init__(self, schedule: keras.optimizers.schedules.LearningRateSchedule) -> None:
        self.schedule = schedule
        name = type(schedule).__name__

        def value(step):
            return tf.reshape(tf.cast(schedule(step), tf.float32), ())

        with tf.init_scope():
            step = tf.TensorSpec((), tf.int64)
            try:
                self._value = tf.function(value, autograph=False).get_concrete_function(step)
            except (ValueError, TypeError) as error:
                raise ValueError(
                    f"clip_norm={name} must give one number for each step, by operations of Keras "
                    f"or TensorFlow: {error}"
                ) from error
            self._values = tf.function(lambda steps: tf.vectorized_map(self._value, steps))
        reads = [t for t in self._value.captured_inputs if t.dtype == tf.resource]
        doubtful = {
            operation.type
            for operation in graphs.operations(self._value.graph)
            if operation.op_def.is_stateful and not graphs.functions(operation)
        }
        if reads or doubtful & (graphs.PYTHON | {"ReadVariableOp"}):
            raise ValueError(
                f"clip_norm={name} reads a variable or runs Python in its graph: what it gives "
                "could depend on the data, and no ε holds for that. Pass a schedule that is a "
                "function of the step alone, such as those of keras.optimizers.schedules."
            )
        if doubtful:
            raise ValueError(
                f"clip_norm={name} does more than compute a number from the step "
                f"({', '.join(sorted(doubtful))}), or another number at every call. Pass a "
                "schedule that is a function of the step alone."
            )

    def at(self, step: int | tf.Tensor) -> tf.Tensor:
        """C of one step, a float32 scalar (for the graph; `step` may be a tensor)."""
        return self._value(tf.cast(step, tf.int64))

    def values(self, start: int, steps: int) -> np.ndarray:
        """C of steps start .. start + steps − 1, float32."""
        return self._values(tf.range(start, start + steps, dtype=tf.int64)).numpy()

    def check(self, start: int, steps: int) -> None:
        """Refuses steps at which C is no bound that float32 suffices for.

        Raises:
            ValueError: naming the first of them.
        """
        values = self.values(start, steps)
        wrong = np.flatnonzero(~((values >= LEAST) & (values <= MOST)))
        if len(wrong):
            raise ValueError(
                f"clip_norm={type(self.schedule).__name__} is {values[wrong[0]]} at step "
                f"{start + wrong[0]}, and must be a positive number from {LEAST} to {MOST} at "
                "every step."
            )

    def get_config(self) -> dict[str, Any]:
        return keras.saving.serialize_keras_object(self.schedule)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClipNormSchedule) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __str__(self) -> str:
        config = self.schedule.get_config()
        arguments = ", ".join(f"{key}={value!r}" for key, value in config.items() if key != "name")
        return f"{type(self.schedule).__name__}({arguments})"


def resolve(name: str, value: Any) -> float | ClipNormSchedule | Quantile:
    """A bound, a `Quantile`, or the `ClipNormSchedule` of a Keras schedule; or of what one was
    serialised to.

    Raises:
        ValueError: it is none of these.
    """
    if isinstance(value, dict) and "class_name" in value:
        value = keras.saving.deserialize_keras_object(value)
    if isinstance(value, ClipNormSchedule | Quantile):
        return value
    if isinstance(value, keras.optimizers.schedules.LearningRateSchedule):
        return ClipNormSchedule(value)
    if callable(value):
        raise ValueError(
            f"{name} must be a number or a keras.optimizers.schedules.LearningRateSchedule, which "
            f"is a function of the step alone; received {value!r}."
        )
    return bound(name, value)


def at(clip_norm: float | ClipNormSchedule, step: Any) -> float | tf.Tensor:
    """C at a step: the number, or a float32 scalar."""
    return clip_norm.at(step) if isinstance(clip_norm, ClipNormSchedule) else clip_norm


def refuse_quantile(clip_norm: Any, owner: str, reason: str) -> None:
    """Raises a `ValueError` where this is a `Quantile`, which `owner` does not take."""
    if isinstance(clip_norm, Quantile):
        raise ValueError(
            f"{owner} does not take clip_norm={clip_norm}: {reason}. Give a number, or a schedule "
            "of the step."
        )
