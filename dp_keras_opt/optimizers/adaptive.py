"""What DPAdam, DPAdagrad, DPRMSprop and DPYogi share: a rule × a source of the second moment."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf
from keras import ops

from dp_keras_opt.optimizers import moments
from dp_keras_opt.optimizers.private_optimizer import PrivateOptimizer, _FrozenAtBuild

if TYPE_CHECKING:
    from dp_keras_opt.accounting.sampling import Sampling
    from dp_keras_opt.clipping.query import Query
    from dp_keras_opt.noise.mechanism import Release
    from dp_keras_opt.noise.release import Released


class AdaptiveOptimizer(PrivateOptimizer):
    """Mixin of the adaptive rules.

    A rule says how v takes in a square (`accumulate`), how v̂ follows from v (`corrected`), and its
    `update_step`; where the squares come from is the business of `second_moment`.

    Args:
        second_moment: "post_processing", "bias_corrected", "independent", "scale_then_privatize",
            "side_information" (with public rows), "noiseless", or an object of
            `dp_keras_opt.optimizers.moments` (which has the options of each, and `Joint`).
        *args, **kwargs: those of `PrivateOptimizer`.
    """

    # A copy, since a source remembers what belongs to one optimizer.
    second_moment = _FrozenAtBuild(lambda name, value: copy.copy(moments.get(value)))

    #: Whether v̂ is linear in the squares that v took in.
    linear = True

    takes_projection = True

    def __init__(self, *args, second_moment="post_processing", **kwargs):
        super().__init__(*args, **kwargs)
        self.epsilon = float(self.epsilon)  # a NumPy number would bring its dtype along
        self.second_moment = second_moment
        self.second_moment.check(self)

    # The rule.

    def accumulate(self, v, square):
        """The next v; tensors or scalars."""
        raise TypeError(f"{type(self).__name__} does not define how v accumulates.")

    def corrected(self, v: tf.Tensor, steps: int | tf.Tensor) -> tf.Tensor:
        """v̂ after this many steps; here no correction."""
        return v

    @property
    def second_moments(self) -> Sequence[keras.Variable]:
        """The variables that hold v, one per trainable variable."""
        return self._velocities

    @property
    def geometry_moments(self) -> Sequence[keras.Variable]:
        """The variables whose values the geometry is made of: v, unless the rule says otherwise."""
        return self.second_moments

    def dominant(self, index: int, v: tf.Tensor) -> tf.Tensor:
        """What of v the step is divided by; AMSGrad takes the largest so far."""
        return v

    # The flow of a step.

    def build(self, variables: Sequence[keras.Variable]) -> None:
        if self.built:
            return
        self.second_moment.check(self)  # it may have been set after construction
        super().build(variables)
        self.second_moment.build(self, variables)

    def queries(self) -> tuple[Query, ...]:
        return self.second_moment.queries(self)

    def check_projection(self) -> None:
        super().check_projection()
        self.second_moment.check_projection()

    def releases_for(self, noise_multiplier: float) -> tuple[Release, ...]:
        return self.second_moment.releases(self, noise_multiplier)

    def check_sampling(self, sampling: Sampling) -> None:
        super().check_sampling(sampling)
        self.second_moment.check_sampling(sampling)

    @property
    def needs_public(self) -> bool:  # type: ignore[override]
        return self.second_moment.needs_public

    def update(self, released: Sequence[Released]) -> None:
        gradients = self._regularized(self.second_moment.receive(self, released))
        self._apply(gradients, self.second_moment.noise_std(released))

    @property
    def second_moment_estimates(self) -> list[tf.Tensor]:
        return [
            self.second_moment.estimate(
                self, ops.convert_to_tensor(v), self._steps(self.iterations)
            )
            for v in self.geometry_moments
        ]

    def _take_in(self, variable):
        """Updates v of one variable and returns what its step is divided by."""
        index = self._get_variable_index(variable)
        v = self.second_moments[index]
        gradient = ops.cast(self._unfiltered[index], variable.dtype)
        source = self.second_moment
        self.assign(v, source.accumulate(self, index, ops.convert_to_tensor(v), gradient))
        v = self.dominant(index, ops.convert_to_tensor(v))
        return source.root(self, source.estimate(self, v, self._steps(self.iterations + 1)))

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {
            "second_moment": keras.saving.serialize_keras_object(self.second_moment)
        }


def debiased(moment, beta, steps):
    """moment/(1 − β^steps), 0 before the first step (the moment is 0 then)."""
    # expm1, because 1 − β^steps loses four of float32's seven digits where β is close to 1.
    weight = -ops.expm1(ops.cast(steps, "float32") * math.log(beta)) if beta else 1.0
    return moment * ops.cast(1.0 / ops.maximum(weight, 1e-30), moment.dtype)
