"""DP-RMSProp: RMSProp on privatized gradients."""

from typing import Any

import keras
import tensorflow as tf
from keras import ops

from dp_keras_opt.accounting.batch_sizes import BatchSizeLike
from dp_keras_opt.optimizers.adaptive import AdaptiveOptimizer
from dp_keras_opt.optimizers.geometries import Geometry
from dp_keras_opt.optimizers.moments import SecondMomentLike
from dp_keras_opt.optimizers.projection import GaLore
from dp_keras_opt.optimizers.recursions import running_mean
from dp_keras_opt.optimizers.settings import FilterLike, NoiseLike, NoiseScheduleLike
from dp_keras_opt.optimizers.sparse_embeddings import SparseEmbeddings
from dp_keras_opt.types import ClipNorm, ClippingStyle, LearningRate


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class DPRMSprop(AdaptiveOptimizer, keras.optimizers.RMSprop):
    """Differentially private RMSProp.

    v ← ρ·v + (1−ρ)·square, w ← w − η·g̃/root(v), without bias correction; by default the square is
    g̃² and the root √v + ε. (Keras's own divides by √(v + ε).)

    Args:
        learning_rate: a float, a Keras schedule or a callable. Defaults to 0.001.
        rho: ρ, decay of v. Defaults to 0.9.
        momentum: decay of the accumulated steps, 0 for none. Defaults to 0.0.
        epsilon: added to the root. Defaults to 1e-7.
        {{private_arguments}}
        {{keras_arguments}}

    Raises:
        ValueError: an argument is out of range, or would mean something else here than in Keras; or
            `centered=True`, which is defined for none of the sources of the moment.

    Reference: Tieleman and Hinton, "Lecture 6.5: rmsprop, divide the gradient by a running average
    of its recent magnitude", 2012; Ganesh, McMahan and Thakurta, "On design principles for private
    adaptive optimizers", 2025, arXiv:2507.01129v1, Algorithms 5 to 9.
    """

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
        if kwargs.pop("centered", False):
            raise ValueError("DPRMSprop does not take centered=True; use DPAdam or leave it out.")
        super().__init__(
            learning_rate=learning_rate,
            rho=rho,
            momentum=momentum,
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
    def has_momentum(self) -> bool:
        return self.momentum > 0

    def accumulate(self, v: Any, square: Any) -> Any:
        return running_mean(v, square, self.rho)

    def update_step(
        self, gradient: tf.Tensor, variable: keras.Variable, learning_rate: tf.Tensor
    ) -> None:
        rate = ops.cast(learning_rate, variable.dtype)
        step = rate * ops.cast(gradient, variable.dtype) / self._root(variable)
        if self.momentum > 0:
            m = self._momentums[self._get_variable_index(variable)]
            self.assign(m, self.momentum * m + step)
            step = ops.convert_to_tensor(m)
        self._move(variable, step)
