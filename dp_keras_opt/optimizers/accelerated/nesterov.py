"""Nesterov's method, with the gradient taken where it takes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import keras
import tensorflow as tf
from keras import ops

from dp_keras_opt.optimizers.accelerated.velocity import WithVelocity

if TYPE_CHECKING:
    from dp_keras_opt.noise.released import Released


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class DPNesterov(WithVelocity):
    """Differentially private Nesterov: z = x_t + β(x_t − x_{t−1}), x_{t+1} = z − α·g̃(z).

    The gradient is taken at z: the training step moves the variables there and back again, so that
    between steps they hold x and evaluation, checkpoints and export see x. (`DPSGD(nesterov=True)`
    keeps z in the variables, as Keras does.)

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
    DP-NAG; Nesterov, "Introductory lectures on convex optimization: a basic course", Springer,
    2004, doi:10.1007/978-1-4419-8853-9.
    """

    takes_geometry = True

    def build(self, variables: Sequence[keras.Variable]) -> None:
        if self.built:
            return
        super().build(variables)
        self._extrapolated = self.add_variable((), dtype="bool", name="extrapolated")

    def prepare(self, variables: Sequence[keras.Variable]) -> None:
        super().prepare(variables)
        beta = ops.where(self._extrapolated, 0.0, self._beta)  # 0 if the variables are at z already
        for variable, v in zip(variables, self._velocities, strict=True):
            self.assign_add(variable, ops.cast(beta, v.dtype) * v)
        self.assign(self._extrapolated, ops.convert_to_tensor(True))

    def update_step(
        self, gradient: tf.Tensor, variable: keras.Variable, learning_rate: tf.Tensor
    ) -> None:
        step = ops.cast(learning_rate, variable.dtype) * ops.cast(gradient, variable.dtype)
        self._accelerate(variable, step)
        self.assign_sub(variable, step)

    def update(self, released: Sequence[Released]) -> None:
        super().update(released)
        self.assign(self._extrapolated, ops.convert_to_tensor(False))
