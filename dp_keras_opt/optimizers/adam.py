"""DP-Adam: Adam on privatized gradients, its second moment from the source of your choice."""

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
from dp_keras_opt.optimizers.recursions import running_mean
from dp_keras_opt.optimizers.settings import FilterLike, NoiseLike, NoiseScheduleLike
from dp_keras_opt.optimizers.sparse_embeddings import SparseEmbeddings
from dp_keras_opt.types import ClipNorm, ClippingStyle, LearningRate


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class DPAdam(AdaptiveOptimizer, keras.optimizers.Adam):
    """Differentially private Adam.

    m ← β1·m + (1−β1)·g̃, v ← β2·v + (1−β2)·square, w ← w − η·m̂/root(v̂), with g̃ the privatized
    gradient, m̂ = m/(1−β1^t) and v̂ = v/(1−β2^t). By default (post-processing) the square is g̃² and
    the root √v̂ + ε; other values of `second_moment` replace one or both. ε stands outside of the
    bias correction, as in the paper; Keras's own Adam divides it by √(1−β2^t).

    Args:
        learning_rate: a float, a Keras schedule or a callable. Defaults to 0.001.
        beta_1: decay of the first moment. Defaults to 0.9.
        beta_2: decay of the second moment. Defaults to 0.999.
        epsilon: added to the root of the second moment. Defaults to 1e-7.
        amsgrad: whether to divide by the largest v so far. Defaults to False.
        {{private_arguments}}
        {{keras_arguments}}

    Raises:
        ValueError: an argument is out of range, or would mean something else here than in Keras.

    Reference: Ganesh, McMahan and Thakurta, "On design principles for private adaptive optimizers",
    2025, arXiv:2507.01129v1, Algorithms 5 to 9; Kingma and Ba, "Adam: a method for stochastic
    optimization", ICLR 2015, arXiv:1412.6980, Algorithm 1; `amsgrad`: Reddi, Kale and Kumar, "On
    the convergence of Adam and beyond", ICLR 2018, arXiv:1904.09237, Algorithm 2.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
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
        return running_mean(v, square, self.beta_2)

    def corrected(self, v: tf.Tensor, steps: int | tf.Tensor) -> tf.Tensor:
        return self._debiased(v, self.beta_2, steps)

    @property
    def linear(self) -> bool:  # type: ignore[override]
        return not self.amsgrad

    @property
    def geometry_moments(self) -> Sequence[keras.Variable]:
        return self._velocity_hats if self.amsgrad else self._velocities

    def _update_second_moment(self, released, gradients):
        super()._update_second_moment(released, gradients)
        if self.amsgrad:
            for largest, v in zip(self._velocity_hats, self._velocities, strict=True):
                self.assign(largest, ops.maximum(largest, v))

    def update_step(
        self, gradient: tf.Tensor, variable: keras.Variable, learning_rate: tf.Tensor
    ) -> None:
        gradient = ops.cast(gradient, variable.dtype)
        rate = ops.cast(learning_rate, variable.dtype)
        if self.gradient_filter is None:  # otherwise the filter is the first moment
            m = self._momentums[self._get_variable_index(variable)]
            self.assign_add(m, (gradient - m) * (1 - self.beta_1))
            gradient = ops.convert_to_tensor(m)
            steps = self._steps_taken(variable)
            rate = self._debiased(rate, self.beta_1, steps)  # one number, or one a row, and not m
        self._move(variable, rate * gradient / self._root(variable))
