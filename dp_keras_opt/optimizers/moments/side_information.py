"""A second moment from public data, or one that is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf
from keras import ops

from dp_keras_opt.clipping.query import Query
from dp_keras_opt.noise.mechanism import Release
from dp_keras_opt.optimizers.moments.base import Rule, SecondMoment

if TYPE_CHECKING:
    from dp_keras_opt.noise.released import Released


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class SideInformation(SecondMoment):
    """v from somewhere else than the private data.

    Args:
        values: the second moment itself: a list with one array per trainable variable, or a
            callable of the step number (from 0) that gives such a list. None estimates v from the
            public rows of each batch (`data.with_public`), by the rule's own recursion.
        scaled: whether the examples are also clipped in the geometry of v.

    Guarantee: none about the data that `values` was computed from. Declare only what is public.

    Reference: Li, Zaheer, Reddi and Smith, "Private adaptive optimization with side information",
    ICML 2022, arXiv:2202.05963; Ganesh, McMahan and Thakurta, "On design principles for private
    adaptive optimizers", 2025, arXiv:2507.01129v1, Algorithm 9.
    """

    takes_geometry = True

    def __init__(
        self,
        values: Sequence[npt.ArrayLike] | Callable[[tf.Tensor], Sequence[Any]] | None = None,
        scaled: bool = False,
    ) -> None:
        self.values = values
        self.scaled = bool(scaled)
        self.needs_public = values is None

    def check(self, rule: Rule) -> None:
        if self.values is not None and getattr(rule, "amsgrad", False):
            raise ValueError("amsgrad=True means nothing where the second moment is given.")

    def check_projection(self) -> None:
        super().check_projection()
        if self.values is not None:
            self._refuse_projection("is given for each weight")

    def build(self, rule: Rule, variables: Sequence[keras.Variable]) -> None:
        if self.values is None:
            return
        with tf.init_scope():  # now, and not at every step of the graph that may be traced here
            values = self._at(tf.constant(0, tf.int64), variables)
            for v, value, variable in zip(rule.second_moments, values, variables, strict=True):
                value = np.asarray(value, np.float32)
                if not (np.isfinite(value).all() and (value >= 0).all()):
                    raise ValueError(
                        f"side_information for variable '{variable.path}' must be finite and at "
                        "least 0: it is a second moment."
                    )
                v.assign(value)

    def _at(self, step, variables):
        """The values at a step, their shapes checked."""
        values = list(self.values(step) if callable(self.values) else self.values)
        if len(values) != len(variables):
            raise ValueError(
                f"side_information has {len(values)} arrays for {len(variables)} trainable "
                "variables."
            )
        for value, variable in zip(values, variables, strict=True):
            if tuple(np.shape(value)) != tuple(variable.shape):
                raise ValueError(
                    f"side_information has shape {tuple(np.shape(value))} for variable "
                    f"'{variable.path}' of shape {tuple(variable.shape)}."
                )
        return values

    def _geometry_moments(self, rule):
        if not callable(self.values):
            return super()._geometry_moments(rule)
        values = self._at(ops.convert_to_tensor(rule.iterations), rule.second_moments)
        pairs = zip(values, rule.second_moments, strict=True)
        return [ops.convert_to_tensor(value, v.dtype) for value, v in pairs]

    def prepare(self, rule: Rule) -> None:
        if callable(self.values):
            for v, value in zip(rule.second_moments, self._geometry_moments(rule), strict=True):
                rule.assign(v, value)

    def queries(self, rule: Rule) -> tuple[Query, ...]:
        public = (Query(population="public"),) if self.needs_public else ()
        return super().queries(rule) + public

    def releases(self, rule: Rule, noise_multiplier: float) -> tuple[Release, ...]:
        # So that the privacy statement says what was declared public.
        statistic: Literal["public_mean", "public_values"] = (
            "public_mean" if self.needs_public else "public_values"
        )
        public = Release(1, statistic, 0.0, rule.noise)
        return (*super().releases(rule, noise_multiplier), public)

    def squares(
        self, rule: Rule, released: Sequence[Released], gradients: Sequence[tf.Tensor]
    ) -> Sequence[tf.Tensor]:
        return [ops.square(gradient) for gradient in rule.to_subspace(released[1].value)]

    def update(
        self, rule: Rule, released: Sequence[Released], gradients: Sequence[tf.Tensor]
    ) -> None:
        if self.needs_public:  # values that are given stay as they are
            super().update(rule, released, gradients)

    def estimate(self, rule: Rule, v: tf.Tensor, steps: int | tf.Tensor) -> tf.Tensor:
        return super().estimate(rule, v, steps) if self.needs_public else v

    def get_config(self) -> dict[str, Any]:
        values = self.values
        if values is not None and not callable(values):
            values = [np.asarray(value).tolist() for value in values]
        return {"values": keras.saving.serialize_keras_object(values), "scaled": self.scaled}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SideInformation:
        values = keras.saving.deserialize_keras_object(config["values"])
        return cls(**config | {"values": values})
