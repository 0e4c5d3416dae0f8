"""DP-Yogi: Adam with a second moment that moves by bounded steps."""

from typing import Any

import keras

from dp_keras_opt.accounting.batch_sizes import BatchSizeLike
from dp_keras_opt.optimizers.adam import DPAdam
from dp_keras_opt.optimizers.geometries import Geometry
from dp_keras_opt.optimizers.moments import SecondMomentLike
from dp_keras_opt.optimizers.projection import GaLore
from dp_keras_opt.optimizers.recursions import bounded_step
from dp_keras_opt.optimizers.settings import FilterLike, NoiseLike, NoiseScheduleLike
from dp_keras_opt.optimizers.sparse_embeddings import SparseEmbeddings
from dp_keras_opt.types import ClipNorm, ClippingStyle, LearningRate


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class DPYogi(DPAdam):
    """Differentially private Yogi.

    DPAdam with v ← v + (1−β2)·sign(square − v)·square: v follows the square slowly where it is far
    below it.

    Args:
        learning_rate: a float, a Keras schedule or a callable. Defaults to 0.01.
        beta_1: decay of the first moment. Defaults to 0.9.
        beta_2: decay of the second moment. Defaults to 0.999.
        epsilon: added to the root of the second moment. Defaults to 1e-3, as in Yogi's paper.
        amsgrad: whether to divide by the largest v so far. Defaults to False.
        {{private_arguments}}
        {{keras_arguments}}

    Raises:
        ValueError: an argument is out of range, or would mean something else here than in Keras.

    Reference: Zaheer, Reddi, Sachan, Kale and Kumar, "Adaptive methods for nonconvex optimization",
    NeurIPS 2018, https://papers.nips.cc/paper/8186-adaptive-methods-for-nonconvex-optimization,
    Algorithm 2; Ganesh, McMahan and Thakurta, "On design principles for private adaptive
    optimizers", 2025, arXiv:2507.01129v1, Algorithms 5 to 9.
    """

    linear = False

    def __init__(
        self,
        learning_rate: LearningRate = 0.01,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-3,
        amsgrad: bool = False,
        *,
        clip_norm: ClipNorm,
        batch_size: BatchSizeLike | None = None,
        noise_multiplier: float | None = None,
        second_moment: SecondMomentLike = "post_processing",
        noise: NoiseLike = "gaussian",
        noise_schedule: NoiseScheduleLike = None,
        clipping: ClippingStyle = "flat",
        normalize: bool = False,
        gradient_filter: FilterLike = None,
        projection: GaLore | None = None,
        geometry: Geometry | None = None,
        sparse_embeddings: SparseEmbeddings | None = None,
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
            clip_norm=clip_norm,
            batch_size=batch_size,
            noise_multiplier=noise_multiplier,
            second_moment=second_moment,
            noise=noise,
            noise_schedule=noise_schedule,
            clipping=clipping,
            normalize=normalize,
            gradient_filter=gradient_filter,
            projection=projection,
            geometry=geometry,
            sparse_embeddings=sparse_embeddings,
            secure_noise=secure_noise,
            seed=seed,
            **kwargs,
        )

    def accumulate(self, v: Any, square: Any) -> Any:
        return bounded_step(v, square, self.beta_2)
