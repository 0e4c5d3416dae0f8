"""Heavy ball: a gradient step and a share of the last step."""

import keras
import tensorflow as tf
from keras import ops

from dp_keras_opt.optimizers.accelerated.velocity import WithVelocity


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class DPHeavyBall(WithVelocity):
    """Differentially private heavy ball: x_{t+1} = x_t − α·g̃(x_t) + β(x_t − x_{t−1}).

    Equal to steps of size α/(1−β) along an exponential average of the privatized gradients.

    Args:
        learning_rate: α, a float, a Keras schedule or a callable. Defaults to 0.01.
        momentum: β in [0, 1). Defaults to 0.9.
        strong_convexity: None, or μ > 0, for β = (1 − √(μα))/(1 + √(μα)) in place of `momentum`.
        {{private_arguments}}
        {{keras_arguments}}

    Raises:
        ValueError: an argument is out of range, or would mean something else here than in Keras.

    Reference: Kuru, Birbil, Gürbüzbalaban and Yıldırım, "Differentially private accelerated
    optimization algorithms", SIAM J. Optim. 32, 2022, doi:10.1137/20M1355847 (arXiv:2008.01989),
    DP-SHB; Polyak, "Some methods of speeding up the convergence of iteration methods", USSR Comput.
    Math. and Math. Phys. 4(5), 1964, doi:10.1016/0041-5553(64)90137-5.
    """

    takes_geometry = True

    def update_step(
        self, gradient: tf.Tensor, variable: keras.Variable, learning_rate: tf.Tensor
    ) -> None:
        rate = ops.cast(learning_rate, variable.dtype)
        velocity = self._accelerate(variable, rate * ops.cast(gradient, variable.dtype))
        self.assign_add(variable, velocity)
