"""DP-GaLore: DP-Adam in low-dimensional subspaces of the weight matrices."""

from typing import Any

import keras

from dp_keras_opt.accounting.batch_sizes import BatchSizeLike
from dp_keras_opt.optimizers.adam import DPAdam
from dp_keras_opt.optimizers.moments import SecondMomentLike
from dp_keras_opt.optimizers.projection import GaLore
from dp_keras_opt.optimizers.settings import FilterLike, NoiseLike, NoiseScheduleLike
from dp_keras_opt.types import ClipNorm, ClippingStyle, LearningRate


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class DPGaLore(DPAdam):
    """`DPAdam` with `projection=GaLore(rank, update_gap, scale, reset)`.

    With a rank that no weight matrix exceeds it is DPAdam itself. `DPAdam`, `DPAdagrad`, `DPYogi`,
    `DPRMSprop` and `DPSGD` take the projection as well.

    Args:
        learning_rate: a float, a Keras schedule or a callable. Defaults to 0.001.
        rank: r ≥ 1, dimension of the subspace. Defaults to 128.
        update_gap: steps between two changes of the projector. Defaults to 200.
        scale: factor on the steps of projected weights. Defaults to 1.0.
        reset: whether moments and filter start anew with each projector. Defaults to False.
        beta_1: decay of the first moment. Defaults to 0.9.
        beta_2: decay of the second moment. Defaults to 0.999.
        epsilon: added to the root of the second moment. Defaults to 1e-7.
        amsgrad: whether to divide by the largest v so far. Defaults to False.
        {{private_arguments}}
        {{keras_arguments}}

    Raises:
        ValueError: an argument is out of range, or would mean something else here than in Keras.

    Reference: Zhang, Bu, Hong and Razaviyayn, "DOPPLER: differentially private optimizers with
    low-pass filter for privacy noise reduction", NeurIPS 2024, arXiv:2408.13460v1, Algorithm 4;
    Zhao, Zhang, Chen, Wang, Anandkumar and Tian, "GaLore: memory-efficient LLM training by gradient
    low-rank projection", ICML 2024, arXiv:2403.03507.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        rank: int = 128,
        update_gap: int = 200,
        scale: float = 1.0,
        reset: bool = False,
        *,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        clip_norm: ClipNorm,
        batch_size: BatchSizeLike | None = None,
        noise_multiplier: float | None = None,
        second_moment: SecondMomentLike = "post_processing",
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
            beta_1=beta_1,
            beta_2=beta_2,
            epsilon=epsilon,
            amsgrad=amsgrad,
            projection=GaLore(rank, update_gap, scale, reset),
            clip_norm=clip_norm,
            batch_size=batch_size,
            noise_multiplier=noise_multiplier,
            second_moment=second_moment,
            noise=noise,
            noise_schedule=noise_schedule,
            clipping=clipping,
            normalize=normalize,
            gradient_filter=gradient_filter,
            secure_noise=secure_noise,
            seed=seed,
            **kwargs,
        )

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        del config["projection"]
        return config | self.projection.get_config()  # type: ignore[union-attr]
