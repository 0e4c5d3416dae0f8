"""Noise schedules: step t's noise multiplier is σ·α_t, with α fixed before training."""

import abc

import keras
import numpy as np


class NoiseSchedule(abc.ABC):
    """Gives α_t, the factor on the noise multiplier at step t (from 0).

    Everything is fixed in advance: a schedule that looked at the data would itself have to be
    accounted.
    """

    #: Number of steps that the schedule covers, None without end. Training past it is refused.
    length = None

    @abc.abstractmethod
    def alphas(self, start, steps):
        """α of steps start .. start + steps − 1, a float64 array (for the accountant)."""

    @abc.abstractmethod
    def alpha(self, step):
        """α of one step, a float32 scalar (for the graph; `step` may be a tensor)."""

    def get_config(self):
        """Constructor arguments, as in Keras."""
        return {}

    @classmethod
    def from_config(cls, config):
        """The schedule with these constructor arguments."""
        return cls(**config)

    def __eq__(self, other):
        return type(self) is type(other) and self.get_config() == other.get_config()

    def __hash__(self):
        return hash((type(self), repr(self.get_config())))


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class Constant(NoiseSchedule):
    """The same noise at every step: α_t = 1."""

    def alphas(self, start, steps):
        return np.ones(steps)

    def alpha(self, step):
        return 1.0


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class Fixed(NoiseSchedule):
    """α from a list fixed in advance.

    Args:
        values: positive finite factors, one a step.

    Raises:
        ValueError: `values` is empty, or holds a number that is not positive and finite.
    """

    def __init__(self, values):
        # float32 is what the graph multiplies with, so it is also what is accounted.
        self.values = np.array(values, np.float32)  # a copy: the caller may write to theirs
        if self.values.ndim != 1 or not self.values.size:
            raise ValueError("A noise schedule needs a non-empty list of factors, one a step.")
        if not (np.isfinite(self.values).all() and (self.values > 0).all()):
            raise ValueError("The factors of a noise schedule must be positive and finite.")
        self.length = len(self.values)

    def alphas(self, start, steps):
        if start + steps > self.length:
            raise ValueError(
                f"The noise schedule ends after {self.length} steps; "
                f"steps up to {start + steps} were asked for."
            )
        return self.values[start : start + steps].astype(np.float64)

    def alpha(self, step):
        return keras.ops.take(self.values, step)

    def get_config(self):
        return {"values": self.values.tolist()}


def get(identifier):
    """Resolves None (constant noise), a list of factors, a `NoiseSchedule` or a serialised one."""
    if identifier is None:
        return Constant()
    if isinstance(identifier, dict):
        identifier = keras.saving.deserialize_keras_object(identifier)
    if isinstance(identifier, NoiseSchedule):
        return identifier
    if isinstance(identifier, list | tuple | np.ndarray):
        return Fixed(identifier)
    raise ValueError(
        "noise_schedule must be None, a list of factors or a dp_keras_opt.noise.schedules "
        f"object; received {identifier!r}."
    )
