"""DP-Muon: orthogonal steps of matrices, with what noise bends of them taken off."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from dp_keras_opt.accounting.batch_sizes import BatchSizeLike
from dp_keras_opt.noise.released import Released
from dp_keras_opt.optimizers.geometries import Geometry
from dp_keras_opt.optimizers.private_optimizer import PrivateOptimizer
from dp_keras_opt.optimizers.settings import FilterLike, NoiseLike, NoiseScheduleLike
from dp_keras_opt.types import ClipNorm, ClippingStyle, LearningRate


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class DPMuon(PrivateOptimizer, keras.optimizers.Muon):
    """Differentially private Muon.

    For each weight matrix m ← μ·m + g̃ and w ← w − η·r·O(g̃ + μ·m) (without `nesterov`: O(m)), with
    g̃ the privatized gradient, O the five steps of Newton and Schulz that bring all singular values
    near 1, and r = `rms_rate`·√(the longer side). All other variables, embeddings and the layers in
    `exclude_layers` go to Keras's Adam. A matrix is, as in Keras, what has two axes: the kernels of
    attention and of convolutions have more, and its biases for queries, keys and values have two.

    Of a noisy matrix M + N, O is on average not O(M) but O(M) + ½Σ v·∂²O(M) + …, where v is the
    variance of N in each coordinate, which is public. With `bias_correction` a step goes along

        2·O(M) − ½(O(M + √v·z) + O(M − √v·z)),  z standard normal,

    whose bias is of the order of v². z is drawn from the number of the step, costs no privacy, and
    takes two more O of each matrix. It helps where the noise in M is small beside its singular
    values; where noise is most of M, so are the terms that are left.

    Args:
        learning_rate: η: a float, a Keras schedule or a callable. Defaults to 0.001.
        momentum: μ in [0, 1). Defaults to 0.95.
        nesterov: whether O is taken of g̃ + μ·m. Defaults to True.
        bias_correction: whether the first term of the noise's bias is taken off. Defaults to False.
        exclude_layers: None, or parts of the paths of variables, as regular expressions, that go
            to Adam. That of the layer of outputs belongs here.
        exclude_embeddings: whether embeddings go to Adam. Defaults to True.
        rms_rate: factor on the step, or None for r = 1. Defaults to 0.2.
        adam_lr_ratio: Adam's learning rate over η. Defaults to 1.
        adam_beta_1: decay of Adam's first moment. Defaults to 0.9.
        adam_beta_2: decay of Adam's second moment. Defaults to 0.999.
        epsilon: Adam's, added to the root. Defaults to 1e-7.
        {{private_arguments}}
        {{keras_arguments}}

    Raises:
        ValueError: an argument is out of range, or would mean something else here than in Keras; or
            `bias_correction` is wanted of a momentum whose noise is not a sum of independent
            parts, as with correlated noise or a filter.

    Guarantee: that of `DPSGD`: all that is done with g̃ is post-processing.

    Reference: Kim and Fan, "DP-Muon: differentially private optimization via matrix-orthogonalized
    momentum", 2026, arXiv:2605.12994, Algorithm 1, with Keras's polynomial in place of its own. The
    correction does what that paper's DP-MuonBC is for; its formula is this library's.
    """

    takes_geometry = True

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        momentum: float = 0.95,
        nesterov: bool = True,
        bias_correction: bool = False,
        *,
        exclude_layers: Sequence[str] | None = None,
        exclude_embeddings: bool = True,
        rms_rate: float | None = 0.2,
        adam_lr_ratio: float = 1.0,
        adam_beta_1: float = 0.9,
        adam_beta_2: float = 0.999,
        epsilon: float = 1e-7,
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
        decay = kwargs.pop("weight_decay", None)  # one for all: Keras has two
        super().__init__(
            learning_rate=learning_rate,
            momentum=momentum,
            nesterov=nesterov,
            exclude_layers=None if exclude_layers is None else list(exclude_layers),
            exclude_embeddings=exclude_embeddings,
            rms_rate=rms_rate,
            adam_lr_ratio=adam_lr_ratio,
            adam_beta_1=adam_beta_1,
            adam_beta_2=adam_beta_2,
            epsilon=epsilon,
            weight_decay=decay,
            adam_weight_decay=decay,
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
            raise ValueError(f"momentum must be in [0, 1), received {momentum!r}.")
        self.bias_correction = bool(bias_correction)
        self._check_correction()

    @property
    def has_momentum(self) -> bool:
        return self.momentum > 0

    def build(self, variables: Sequence[keras.Variable]) -> None:
        if self.built:
            return
        self._check_correction()  # again: settings can be set anew until here
        super().build(variables)
        # The variance of the noise in the momentum of each matrix; where a geometry makes that of
        # its coordinates differ, of each.
        self._noise_powers = [
            self.add_variable(
                () if self.geometry is None else variable.shape, dtype="float32", name="noise_power"
            )
            if self.bias_correction and velocity is None
            else None
            for variable, velocity in zip(variables, self.adam_velocities, strict=True)
        ]

    def _check_correction(self):
        """Refuses a correction of noise whose variance in the momentum is not known."""
        linked = {"noise": self.noise.is_correlated, "gradient_filter": self.gradient_filter}
        for name, is_linked in linked.items():
            if self.bias_correction and is_linked:
                raise ValueError(
                    "bias_correction=True adds up the variance of the noise in the momentum, which "
                    "takes noise that is independent from step to step. With "
                    f"{name}={type(getattr(self, name)).__name__} it is not. Leave one of them out."
                )

    def update(self, released: Sequence[Released]) -> None:
        answer = self._answer(released)
        std, count = answer.noise_std, len(answer.value)
        self._untracked.noise_stds = std if isinstance(std, list) else [std] * count
        self._apply(self._regularized(answer.value), std)
        del self._untracked.noise_stds

    def update_step(
        self, gradient: tf.Tensor, variable: keras.Variable, learning_rate: tf.Tensor
    ) -> None:
        index = self._get_variable_index(variable)
        if self.adam_velocities[index] is not None:
            super().update_step(gradient, variable, learning_rate)
            return
        gradient = ops.cast(gradient, variable.dtype)
        m = self.momentums[index]
        self.assign(m, self.momentum * m + gradient)
        m = ops.convert_to_tensor(m)
        matrix = gradient + self.momentum * m if self.nesterov else m
        # In float32: squares of small gradients would vanish from a norm in half precision.
        direction = self._direction(index, ops.cast(matrix, "float32"))
        step = self.lr_adjust(ops.cast(learning_rate, "float32") * direction)
        self.assign_sub(variable, ops.cast(step, variable.dtype))

    def _direction(self, index, matrix):
        """O of the matrix, in float32, without the first term of what its noise bends of it."""
        direction = self.zeropower_via_newtonschulz5(matrix, self.ns_steps)
        if not self.bias_correction:
            return direction
        seed = ops.stack([ops.cast(self.iterations, "int32"), index])
        z = tf.random.stateless_normal(matrix.shape, seed, alg="philox")
        shift = ops.sqrt(self._noise_power(index)) * z
        both = (
            self.zeropower_via_newtonschulz5(matrix + sign * shift, self.ns_steps)
            for sign in (1, -1)
        )
        return 2 * direction - sum(both) / 2

    def _noise_power(self, index):
        """v: the variance of the noise in each coordinate of what O is taken of, at this step."""
        power = tf.convert_to_tensor(self._noise_powers[index])
        new = ops.square(ops.cast(self._untracked.noise_stds[index], "float32"))
        in_momentum = self.momentum**2 * power + new
        self.assign(self._noise_powers[index], in_momentum)
        if not self.nesterov:
            return in_momentum
        return self.momentum**4 * power + (1 + self.momentum) ** 2 * new

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        for name in ("muon_a", "muon_b", "muon_c", "ns_steps", "adam_weight_decay"):
            del config[name]  # Keras's
        exclude = self.exclude_layers or None
        return config | {"bias_correction": self.bias_correction, "exclude_layers": exclude}
