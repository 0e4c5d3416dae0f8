"""Any other Keras optimizer made private, by post-processing."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from dp_keras_opt import replicas
from dp_keras_opt.optimizers.private_optimizer import (
    _REFUSED,
    PRIVATE_ARGUMENTS,
    PrivateOptimizer,
    refuse_arguments,
)
from dp_keras_opt.types import LearningRate

if TYPE_CHECKING:
    from dp_keras_opt.noise.release import Released


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class DPOptimizer(PrivateOptimizer, keras.optimizers.Optimizer):
    """Gives a Keras optimizer (Lion, Nadam, AdamW, …) privatized gradients instead of raw ones.

    All that the inner optimizer does is post-processing of the privatized gradient, so the
    guarantee is that of DP-SGD.

    Args:
        optimizer: a new `keras.optimizers.Optimizer`, or its name or configuration.
        clip_norm, batch_size: see `PrivateOptimizer`.
        **kwargs: the other arguments of `PrivateOptimizer`.

    Raises:
        ValueError: `optimizer` is already private or built, scales the loss, or clips or
            accumulates the batch gradient itself.
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer | str | Mapping[str, Any],
        *,
        clip_norm: float,
        batch_size: int,
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        refuse_arguments("DPOptimizer", kwargs)
        unknown = set(kwargs) - set(PRIVATE_ARGUMENTS)
        if unknown:
            raise ValueError(
                f"DPOptimizer does not take {', '.join(sorted(unknown))}. What is not about "
                "privacy is set on the inner optimizer."
            )
        inner = keras.optimizers.get(optimizer)
        if isinstance(inner, PrivateOptimizer | keras.optimizers.LossScaleOptimizer):
            raise ValueError(f"{type(inner).__name__} cannot be wrapped; pass a plain optimizer.")
        if inner.built:
            raise ValueError("The inner optimizer was used before; pass a new one.")
        for argument, reason in _REFUSED.items():
            if getattr(inner, argument, None):
                raise ValueError(f"The inner optimizer has {argument} set: {reason}.")
        super().__init__(
            learning_rate=0.0,  # unused: the inner optimizer has its own
            clip_norm=clip_norm,
            batch_size=batch_size,
            name=name,
            **kwargs,
        )
        self.inner = inner

    def build(self, variables: Sequence[keras.Variable]) -> None:
        if self.built:
            return
        super().build(variables)
        self.inner.build(variables)

    @property
    def variables(self) -> list[keras.Variable]:
        return super().variables + self.inner.variables

    @property
    def learning_rate(self) -> Any:
        return self.inner.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: LearningRate) -> None:
        self.inner.learning_rate = learning_rate

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        self.inner.exclude_from_weight_decay(var_list, var_names)

    @property
    def smooths(self) -> bool:
        names = ("momentum", "beta_1")
        return any((getattr(self.inner, name, 0.0) or 0.0) > 0 for name in names)

    def update(self, released: Sequence[Released]) -> None:
        gradients = self._regularized(released[0].value)
        filtered = self._filtered(gradients, released[0].noise_std)
        outside = tf.distribute.in_cross_replica_context()
        with replicas.updating_once(self.inner) if outside else contextlib.nullcontext():
            self.inner.apply(filtered, self._trainable_variables)
        self._iterations.assign_add(1)

    def finalize_variable_values(self, var_list: Sequence[keras.Variable]) -> None:
        self.inner.finalize_variable_values(var_list)

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        return {name: config[name] for name in ("name", *PRIVATE_ARGUMENTS)} | {
            "optimizer": keras.saving.serialize_keras_object(self.inner)
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> DPOptimizer:
        inner = keras.saving.deserialize_keras_object(
            config["optimizer"], custom_objects=custom_objects
        )
        return cls(**(config | {"optimizer": inner}))
