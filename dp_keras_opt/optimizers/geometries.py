"""In what coordinates, and around what, examples are clipped: learned from what was released.

Where gradients differ more in some directions than in others, a ball around 0 is a poor bound:
noise has to be as large in all directions as what the longest one needs. An example then
contributes clip(M(g − a)), and the noisy mean is taken back: a + M⁻¹(...). M and a follow from
earlier releases or from public data, and cost no privacy.
"""

from __future__ import annotations

import abc
import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from dp_keras_opt.checks import is_number
from dp_keras_opt.clipping.query import Query

if TYPE_CHECKING:
    from dp_keras_opt.noise.released import Released
    from dp_keras_opt.optimizers.private_optimizer import PrivateOptimizer


class Geometry(abc.ABC):
    """What an optimizer takes as `geometry`; of the methods, two may be left as they are.

    It has state, which belongs to one optimizer: each takes a copy. Tensors of it are optimizer
    variables, saved and loaded with it.
    """

    #: Whether it comes from what was declared public.
    uses_public = False
    #: Whether the noise may depend on that of earlier steps.
    takes_correlated_noise = True

    @abc.abstractmethod
    def build(self, optimizer: PrivateOptimizer, variables: Sequence[keras.Variable]) -> None:
        """Creates the state, as variables of the optimizer."""

    @abc.abstractmethod
    def seen(self, optimizer: PrivateOptimizer, query: Query) -> Query:
        """The query in this geometry, known before the data is touched; changes nothing."""

    def begin(self, optimizer: PrivateOptimizer, model: keras.Model) -> None:  # noqa: B027
        """Before the first step of a model; here there is nothing to do."""

    def update(  # noqa: B027
        self, optimizer: PrivateOptimizer, released: Released, answer: Released
    ) -> None:
        """Learns from a release; here nothing.

        Args:
            optimizer: that it was built for.
            released: what was released, as it was seen.
            answer: the same in the coordinates of the gradient (`Released.unscaled`).
        """

    @abc.abstractmethod
    def get_config(self) -> dict[str, Any]:
        """Constructor arguments, as in Keras."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Geometry:
        """The geometry with these constructor arguments."""
        return cls(**config)

    def __repr__(self):
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.get_config().items())
        return f"{type(self).__name__}({arguments})"


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class Mean(Geometry):
    """A centre alone: what is clipped is how an example's gradient differs from the mean so far.

    a_t = m_{t−1}/(1 − β^{t−1}), m_t = β·m_{t−1} + (1 − β)·g̃_t, of the released gradients g̃. Costs
    one buffer of the size of the model. Noise in a is the same for all examples, and comes back
    whole: it pays where the mean is long beside what the examples differ by and beside the noise.

    Args:
        beta: β in [0, 1).

    Raises:
        ValueError: β is out of range.

    Reference: Pichapati, Suresh, Yu, Reddi and Kumar, "AdaCliP: adaptive clipping for private SGD",
    2019, arXiv:1908.07643, of which it is the centre.
    """

    def __init__(self, beta: float = 0.9) -> None:
        if not (is_number(beta) and 0 <= beta < 1):
            raise ValueError(f"beta must be in [0, 1), received {beta!r}.")
        self.beta = float(beta)

    def build(self, optimizer: PrivateOptimizer, variables: Sequence[keras.Variable]) -> None:
        self._means = [
            optimizer.add_variable(v.shape, dtype="float32", name="geometry_mean")
            for v in variables
        ]
        #: 1 − β^t: what the means have of the gradients so far.
        self._weight = optimizer.add_variable((), dtype="float32", name="geometry_weight")

    def centre(self) -> list[tf.Tensor]:
        """a: the mean of the gradients so far, 0 before the first."""
        weight = tf.convert_to_tensor(self._weight)
        return [tf.math.divide_no_nan(tf.convert_to_tensor(m), weight) for m in self._means]

    def seen(self, optimizer: PrivateOptimizer, query: Query) -> Query:
        return query._replace(centre=self.centre())

    def update(self, optimizer: PrivateOptimizer, released: Released, answer: Released) -> None:
        for mean, gradient in zip(self._means, answer.value, strict=True):
            optimizer.assign(mean, self._next(mean, tf.cast(gradient, tf.float32)))
        optimizer.assign(self._weight, self._next(self._weight, 1.0))

    def _next(self, mean, new, beta=None):
        beta = self.beta if beta is None else beta
        return beta * tf.convert_to_tensor(mean) + (1 - beta) * new

    def get_config(self) -> dict[str, Any]:
        return {"beta": self.beta}


class Spread(Mean):
    """A centre, and coordinates from what examples differ by around it: `AdaClip`, `GeoClip`."""

    takes_correlated_noise = False

    def __init__(self, beta: float, beta_2: float, low: float, high: float) -> None:
        super().__init__(beta)
        if not (is_number(beta_2) and 0 < beta_2 < 1):
            raise ValueError(f"beta_2 must be in (0, 1), received {beta_2!r}.")
        if not (is_number(low) and is_number(high) and 0 < low <= high < float("inf")):
            raise ValueError(f"0 < low <= high must hold, received low={low!r}, high={high!r}.")
        self.beta_2, self.low, self.high = float(beta_2), float(low), float(high)

    def _kept(self, variance):
        """Within the bounds."""
        return tf.clip_by_value(tf.convert_to_tensor(variance), self.low, self.high)

    def get_config(self) -> dict[str, Any]:
        config = {"beta_2": self.beta_2, "low": self.low, "high": self.high}
        return super().get_config() | config


def get(identifier: Geometry | Mapping[str, Any] | None) -> Geometry | None:
    """Resolves a geometry: None, an object, or a serialised one; a copy, since it has state.

    Raises:
        ValueError: it is nothing of these.
    """
    if isinstance(identifier, dict):
        identifier = keras.saving.deserialize_keras_object(identifier)
    if identifier is not None and not isinstance(identifier, Geometry):
        raise ValueError(
            "geometry must be None or an object of dp_keras_opt.geometries, received "
            f"{identifier!r}."
        )
    return copy.copy(identifier)
