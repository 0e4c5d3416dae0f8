"""AdaDPS: clipping and noise in the geometry of public gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras

from dp_keras_opt.accounting.batch_sizes import BatchSizeLike
from dp_keras_opt.optimizers.moments import SideInformation
from dp_keras_opt.optimizers.rmsprop import DPRMSprop
from dp_keras_opt.optimizers.settings import FilterLike, NoiseLike, NoiseScheduleLike
from dp_keras_opt.types import ClipNorm, ClippingStyle, LearningRate

if TYPE_CHECKING:
    from dp_keras_opt.noise.released import Released


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class AdaDPS(DPRMSprop):
    """Clips and noises in the geometry of public gradients.

    w ← w − η·g̃, with g̃ the privatized mean of the gradients preconditioned by 1/(√v + ε), and then
    v ← ρ·v + (1−ρ)·p², p the mean gradient of the public rows of the batch. The geometry is fixed
    before the batch is touched, so it is that of the public gradients up to the step before.

    Args:
        learning_rate: η, a float, a Keras schedule or a callable. Defaults to 0.001.
        rho: ρ, decay of v. Defaults to 0.9.
        momentum: decay of the accumulated steps, 0 for none. Defaults to 0.0.
        epsilon: ε, added to the root. Defaults to 1e-7.
        {{private_arguments}}
        {{keras_arguments}}

    Raises:
        ValueError: an argument is out of range, or would mean something else here than in Keras.

    Reference: Li, Zaheer, Reddi and Smith, "Private adaptive optimization with side information",
    ICML 2022, arXiv:2202.05963, Algorithm 1.
    """

    takes_projection = False  # v is known for each weight only

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        rho: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-7,
        *,
        clip_norm: ClipNorm,
        batch_size: BatchSizeLike | None = None,
        noise_multiplier: float | None = None,
        noise: NoiseLike = "gaussian",
        noise_schedule: NoiseScheduleLike = None,
        clipping: ClippingStyle = "flat",
        normalize: bool = False,
        gradient_filter: FilterLike = None,
        secure_noise: bool = False,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            learning_rate=learning_rate,
            rho=rho,
            momentum=momentum,
            epsilon=epsilon,
            second_moment=SideInformation(scaled=True),
            clip_norm=clip_norm,
            batch_size=batch_size,
            noise_multiplier=noise_multiplier,
            noise=noise,
            noise_schedule=noise_schedule,
            clipping=clipping,
            normalize=normalize,
            gradient_filter=gradient_filter,
            secure_noise=secure_noise,
            seed=seed,
            **kwargs,
        )

    def update(self, released: Sequence[Released]) -> None:
        answer = released[0].unscaled()
        gradients = self._regularized(answer.value)
        # The step comes before v moves on: it divides by the root that the geometry was made of.
        self._step(self._filtered(gradients, answer.noise_std))
        self._update_second_moment(released, gradients)

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        del config["second_moment"]
        return config
