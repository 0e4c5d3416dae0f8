"""DP-SGD: the privatized gradient, with momentum if wanted."""

from typing import Any

import keras
import tensorflow as tf
from keras import ops

from dp_keras_opt.accounting.batch_sizes import BatchSizeLike
from dp_keras_opt.optimizers.geometries import Geometry
from dp_keras_opt.optimizers.private_optimizer import PrivateOptimizer
from dp_keras_opt.optimizers.projection import GaLore
from dp_keras_opt.optimizers.settings import FilterLike, NoiseLike, NoiseScheduleLike
from dp_keras_opt.optimizers.sparse_embeddings import SparseEmbeddings
from dp_keras_opt.types import ClipNorm, ClippingStyle, LearningRate


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class DPSGD(PrivateOptimizer, keras.optimizers.SGD):
    """Differentially private stochastic gradient descent.

    With g̃ the clipped, noised mean gradient: w ← w − learning_rate · g̃, and with momentum and
    Nesterov's variant as in `keras.optimizers.SGD`.

    Args:
        learning_rate: a float, a Keras schedule or a callable. Defaults to 0.01.
        momentum: in [0, 1]. Defaults to 0.0.
        nesterov: whether to apply Nesterov momentum. Defaults to False.
        {{private_arguments}}
        {{keras_arguments}}

    Raises:
        ValueError: an argument is out of range, or would mean something else here than in Keras.

    Guarantee: each step is one release of the clipped gradient sum with noise σ·C. What ε that
    amounts to depends on how batches are sampled: see `dp_keras_opt.accounting`.

    Reference: Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar and Zhang, "Deep learning with
    differential privacy", CCS 2016, arXiv:1607.00133, Algorithm 1.
    """

    takes_projection = True
    takes_geometry = True
    takes_sparse_embeddings = True

    def __init__(
        self,
        learning_rate: LearningRate = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        *,
        clip_norm: ClipNorm,
        batch_size: BatchSizeLike | None = None,
        noise_multiplier: float | None = None,
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
            momentum=momentum,
            nesterov=nesterov,
            clip_norm=clip_norm,
            batch_size=batch_size,
            noise_multiplier=noise_multiplier,
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

    def update_step(
        self, gradient: tf.Tensor, variable: keras.Variable, learning_rate: tf.Tensor
    ) -> None:
        step = ops.cast(learning_rate, variable.dtype) * ops.cast(gradient, variable.dtype)
        if self.momentum > 0:
            m = self.momentums[self._get_variable_index(variable)]
            self.assign(m, self.momentum * m - step)  # with the sign that it has in Keras
            step = step - self.momentum * m if self.nesterov else -ops.convert_to_tensor(m)
        self._move(variable, step)
