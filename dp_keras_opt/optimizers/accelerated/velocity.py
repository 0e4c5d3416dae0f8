"""What heavy ball and Nesterov share: a velocity, and its decay."""

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from dp_keras_opt.accounting.batch_sizes import BatchSizeLike
from dp_keras_opt.optimizers.geometries import Geometry
from dp_keras_opt.optimizers.private_optimizer import PrivateOptimizer
from dp_keras_opt.optimizers.settings import FilterLike, NoiseLike, NoiseScheduleLike
from dp_keras_opt.types import ClipNorm, ClippingStyle, LearningRate


class WithVelocity(PrivateOptimizer, keras.optimizers.Optimizer):
    """A rule with a velocity v_t = x_t − x_{t−1} and its decay β.

    Args:
        learning_rate: α, a float, a Keras schedule or a callable. Defaults to 0.01.
        momentum: β in [0, 1). Defaults to 0.9.
        strong_convexity: None, or μ > 0, for β = (1 − √(μα))/(1 + √(μα)) in place of `momentum`.
        {{private_arguments}}
        {{keras_arguments}}

    Raises:
        ValueError: an argument is out of range, or would mean something else here than in Keras.
    """

    has_momentum = True

    def __init__(
        self,
        learning_rate: LearningRate = 0.01,
        momentum: float = 0.9,
        strong_convexity: float | None = None,
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
        **kwargs: Any,
    ) -> None:
        super().__init__(
            learning_rate=learning_rate,
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
        )
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum (β) must be in [0, 1), received {momentum!r}.")
        if strong_convexity is not None and not 0 < strong_convexity < float("inf"):
            raise ValueError(f"strong_convexity (μ) must be positive, received {strong_convexity}.")
        self.momentum = float(momentum)
        self.strong_convexity = strong_convexity

    def build(self, variables: Sequence[keras.Variable]) -> None:
        if self.built:
            return
        super().build(variables)
        self._velocities = self.add_optimizer_variables(variables, "velocity")

    @property
    def _beta(self):
        """β of this step."""
        if self.strong_convexity is None:
            return ops.convert_to_tensor(self.momentum, "float32")
        root = ops.sqrt(self.strong_convexity * ops.cast(self.learning_rate, "float32"))
        return (1 - root) / (1 + root)

    def _accelerate(self, variable, step):
        """v ← βv − step; returns it."""
        v = self._velocities[self._get_variable_index(variable)]
        self.assign(v, ops.cast(self._beta, v.dtype) * v - step)
        return ops.convert_to_tensor(v)

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {
            "momentum": self.momentum,
            "strong_convexity": self.strong_convexity,
        }
