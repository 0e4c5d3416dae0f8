"""DP-AdaGrad: AdaGrad on privatized gradients."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from dp_keras_opt.accounting.batch_sizes import BatchSizeLike
from dp_keras_opt.optimizers.adaptive import AdaptiveOptimizer
from dp_keras_opt.optimizers.geometries import Geometry
from dp_keras_opt.optimizers.moments import SecondMomentLike
from dp_keras_opt.optimizers.projection import GaLore
from dp_keras_opt.optimizers.recursions import running_sum
from dp_keras_opt.optimizers.settings import FilterLike, NoiseLike, NoiseScheduleLike
from dp_keras_opt.optimizers.sparse_embeddings import SparseEmbeddings
from dp_keras_opt.types import ClipNorm, ClippingStyle, LearningRate


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class DPAdagrad(AdaptiveOptimizer, keras.optimizers.Adagrad):
    """Differentially private AdaGrad.

    v ← v + square, w ← w − η·g̃/root(v); by default the square is g̃² and the root √v + ε. (Keras's
    own divides by √(v + ε), and starts v at 0.1.)

    Args:
        learning_rate: a float, a Keras schedule or a callable. Defaults to 0.001.
        initial_accumulator_value: v before the first step. Defaults to 0.0.
        epsilon: added to the root. Defaults to 1e-7.
        {{private_arguments}}
        {{keras_arguments}}

    Raises:
        ValueError: an argument is out of range, or would mean something else here than in Keras.

    Reference: Duchi, Hazan and Singer, "Adaptive subgradient methods for online learning and
    stochastic optimization", JMLR 12, 2011, https://jmlr.org/papers/v12/duchi11a.html; Ganesh,
    McMahan and Thakurta, "On design principles for private adaptive optimizers", 2025,
    arXiv:2507.01129v1, Algorithms 5 to 9.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        initial_accumulator_value: float = 0.0,
        epsilon: float = 1e-7,
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
            initial_accumulator_value=initial_accumulator_value,
            epsilon=epsilon,
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

    @property
    def second_moments(self) -> Sequence[keras.Variable]:
        return self._accumulators

    def accumulate(self, v: Any, square: Any) -> Any:
        return running_sum(v, square)

    def update_step(
        self, gradient: tf.Tensor, variable: keras.Variable, learning_rate: tf.Tensor
    ) -> None:
        gradient = ops.cast(gradient, variable.dtype)
        rate = ops.cast(learning_rate, variable.dtype)
        self._move(variable, rate * gradient / self._root(variable))
