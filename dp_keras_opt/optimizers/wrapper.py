"""Any other Keras optimizer made private, by post-processing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from dp_keras_opt import workers
from dp_keras_opt.accounting.batch_sizes import BatchSizeLike
from dp_keras_opt.optimizers import settings
from dp_keras_opt.optimizers.geometries import Geometry
from dp_keras_opt.optimizers.private_optimizer import PrivateOptimizer
from dp_keras_opt.optimizers.settings import FilterLike, NoiseLike, NoiseScheduleLike
from dp_keras_opt.optimizers.updates_once import updating_once
from dp_keras_opt.types import ClipNorm, ClippingStyle, LearningRate

if TYPE_CHECKING:
    from dp_keras_opt.noise.released import Released


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class DPOptimizer(PrivateOptimizer, keras.optimizers.Optimizer):
    """Gives a Keras optimizer (Lion, Nadam, AdamW, …) privatized gradients instead of raw ones.

    All that the inner optimizer does is post-processing of the privatized gradient, so the
    guarantee is that of DP-SGD.

    Args:
        optimizer: a new `keras.optimizers.Optimizer`, or its name or configuration. Where training
            runs on several replicas, a copy of it with the same configuration does the work
            (`inner`).
        {{private_arguments}}
        name: of the optimizer. Defaults to that of the class.
        **kwargs: `average_from`, as for the others; what else is not about privacy is set on the
            inner optimizer.

    Raises:
        ValueError: `optimizer` is already private or built, scales the loss, or clips or
            accumulates the batch gradient itself; or an argument belongs to it.

    Reference: Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar and Zhang, "Deep learning with
    differential privacy", CCS 2016, arXiv:1607.00133, Algorithm 1, up to the step.
    """

    takes_geometry = True

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer | str | Mapping[str, Any],
        *,
        clip_norm: ClipNorm,
        batch_size: BatchSizeLike | None = None,
        noise_multiplier: float | None = None,
        noise: NoiseLike = "gaussian",
        noise_schedule: NoiseScheduleLike = None,
        clipping: ClippingStyle = "flat",
        normalize: bool = False,
        gradient_filter: FilterLike = None,
        geometry: Geometry | None = None,
        secure_noise: bool = False,
        seed: int | None = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        settings.refuse_keras_arguments("DPOptimizer", kwargs)
        unknown = set(kwargs) - {"projection", "sparse_embeddings", "average_from"}
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
        if inner.use_ema and kwargs.get("average_from") is not None:
            raise ValueError(
                "average_from keeps a uniform average, and the inner optimizer's use_ema=True an "
                "exponential one. Leave one of them out."
            )
        for argument, reason in settings.REFUSED.items():
            if getattr(inner, argument, None):
                raise ValueError(f"The inner optimizer has {argument} set: {reason}.")
        super().__init__(
            learning_rate=0.0,  # unused: the inner optimizer has its own
            clip_norm=clip_norm,
            batch_size=batch_size,
            noise_multiplier=noise_multiplier,
            noise=noise,
            noise_schedule=noise_schedule,
            clipping=clipping,
            normalize=normalize,
            gradient_filter=gradient_filter,
            geometry=geometry,
            secure_noise=secure_noise,
            seed=seed,
            **kwargs,
            name=name,
        )
        #: The class to save, since `inner` may be of one that is made here.
        self._inner_class = type(inner)
        several = workers.is_used(tf.distribute.get_strategy())
        self.inner = updating_once(inner) if several else inner

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

    def _rule(self) -> keras.optimizers.Optimizer:
        return self.inner

    @property
    def has_momentum(self) -> bool:
        names = ("momentum", "beta_1")
        return any((getattr(self.inner, name, 0.0) or 0.0) > 0 for name in names)

    def update(self, released: Sequence[Released]) -> None:
        answer = self._answer(released)
        filtered = self._filtered(self._regularized(answer.value), answer.noise_std)
        self.inner.apply(filtered, self._trainable_variables)
        self._update_model_variables_moving_average(self._trainable_variables)
        self._iterations.assign_add(1)

    def finalize_variable_values(self, var_list: Sequence[keras.Variable]) -> None:
        self.inner.finalize_variable_values(var_list)
        super().finalize_variable_values(var_list)

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        inner = self.inner
        if type(inner) is not self._inner_class:
            inner = self._inner_class.from_config(inner.get_config())
        own = ("name", "plan", "average_from", *settings.settings_of(type(self)))
        return {name: config[name] for name in own if name in config} | {
            "optimizer": keras.saving.serialize_keras_object(inner)
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> DPOptimizer:
        inner = keras.saving.deserialize_keras_object(
            config["optimizer"], custom_objects=custom_objects
        )
        return super().from_config(config | {"optimizer": inner}, custom_objects)
