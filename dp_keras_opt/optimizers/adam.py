"""DP-Adam: Adam on privatized gradients."""

import keras
from keras import ops

from dp_keras_opt.optimizers.private_optimizer import PrivateOptimizer


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class DPAdam(PrivateOptimizer, keras.optimizers.Adam):
    """Differentially private Adam, both moments from the privatized gradient g̃.

    m ← β1·m + (1−β1)·g̃, v ← β2·v + (1−β2)·g̃², w ← w − η·m̂/(√v̂ + ε), with m̂ = m/(1−β1^t) and
    v̂ = v/(1−β2^t). ε stands outside of the bias correction, as in the paper; Keras's own Adam
    divides it by √(1−β2^t). v̂ estimates the squared gradient plus the variance of the noise.

    Args:
        learning_rate: a float, a Keras schedule or a callable. Defaults to 0.001.
        beta_1, beta_2: decay of the moments. Default to 0.9 and 0.999.
        epsilon: added to the root of the second moment. Defaults to 1e-7.
        amsgrad: whether to divide by the largest v so far. Defaults to False.
        clip_norm, batch_size, noise_multiplier, noise, noise_schedule, clipping, normalize, seed:
            see `PrivateOptimizer`.
        **kwargs: `weight_decay`, `use_ema` and the others of `keras.optimizers.Adam`.

    Reference: "post-processing", Algorithm 5 of the paper on design principles for private
    adaptive optimizers; Kingma and Ba, "Adam", ICLR 2015.
    """

    def __init__(
        self,
        learning_rate=0.001,
        beta_1=0.9,
        beta_2=0.999,
        epsilon=1e-7,
        amsgrad=False,
        *,
        clip_norm,
        batch_size,
        noise_multiplier=None,
        **kwargs,
    ):
        super().__init__(
            learning_rate=learning_rate,
            beta_1=beta_1,
            beta_2=beta_2,
            epsilon=epsilon,
            amsgrad=amsgrad,
            clip_norm=clip_norm,
            batch_size=batch_size,
            noise_multiplier=noise_multiplier,
            **kwargs,
        )

    def update_step(self, gradient, variable, learning_rate):
        index = self._get_variable_index(variable)
        m, v = self._momentums[index], self._velocities[index]
        gradient = ops.cast(gradient, variable.dtype)
        step = ops.cast(self.iterations + 1, variable.dtype)
        correction_1 = 1 - ops.power(ops.cast(self.beta_1, variable.dtype), step)
        correction_2 = ops.sqrt(1 - ops.power(ops.cast(self.beta_2, variable.dtype), step))

        self.assign_add(m, (gradient - m) * (1 - self.beta_1))
        self.assign_add(v, (ops.square(gradient) - v) * (1 - self.beta_2))
        if self.amsgrad:
            largest = self._velocity_hats[index]
            self.assign(largest, ops.maximum(largest, v))
            v = largest
        # η·m̂/(√v̂ + ε), both corrections on scalars
        rate = ops.cast(learning_rate, variable.dtype) * correction_2 / correction_1
        self.assign_sub(variable, rate * m / (ops.sqrt(v) + self.epsilon * correction_2))
