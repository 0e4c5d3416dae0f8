"""What DPAdam, DPAdagrad, DPRMSprop and DPYogi share: a rule × a source of the second moment."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf
from keras import ops

from dp_keras_opt import deprecation
from dp_keras_opt.optimizers import moments
from dp_keras_opt.optimizers.moments import SecondMomentLike
from dp_keras_opt.optimizers.private_optimizer import PrivateOptimizer
from dp_keras_opt.optimizers.settings import Setting

if TYPE_CHECKING:
    from dp_keras_opt.accounting.sampling import Sampling
    from dp_keras_opt.clipping.query import Query
    from dp_keras_opt.noise.mechanism import Release
    from dp_keras_opt.noise.released import Released


class AdaptiveOptimizer(PrivateOptimizer):
    """Mixin of the adaptive rules.

    A rule says how v takes in a square (`accumulate`), how v̂ follows from v (`corrected`), and its
    `update_step`, which divides by `_root(variable)`; where the squares come from is the business
    of `second_moment`.

    Args:
        *args: those of the Keras optimizer.
        second_moment: see below.
        **kwargs: those of `PrivateOptimizer`.
    """

    second_moment = Setting(
        # A copy, since a source has state that belongs to one optimizer.
        lambda name, value: copy.copy(moments.get(value)),
        'where v comes from: "post_processing", "bias_corrected", "independent", '
        '"scale_then_privatize", "side_information" (with public rows), "noiseless", or an object '
        "of `dp_keras_opt.optimizers.moments` (which has the options of each, and `Joint`).",
    )

    #: Whether v̂ is linear in the squares that v took in.
    linear = True

    takes_projection = True
    takes_geometry = True
    takes_sparse_embeddings = True

    def __init__(
        self, *args: Any, second_moment: SecondMomentLike = "post_processing", **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.epsilon = float(self.epsilon)  # a NumPy number would bring its dtype along
        self.second_moment = second_moment
        self.second_moment.check(self)
        self._check_geometry()
        self._check_sparse_embeddings()

    # The rule.

    def accumulate(self, v: Any, square: Any) -> Any:
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
        """What the steps are divided by the root of, and the geometry is made of: v, unless the
        rule says otherwise."""
        return self.second_moments

    # The flow of a step.

    def build(self, variables: Sequence[keras.Variable]) -> None:
        if self.built:
            return
        self.second_moment.check(self)  # it may have been set after construction
        super().build(variables)
        self.second_moment.build(self, variables)

    def prepare(self, variables: Sequence[keras.Variable]) -> None:
        super().prepare(variables)
        self.second_moment.prepare(self)

    def queries(self) -> tuple[Query, ...]:
        return self.second_moment.queries(self)

    def _check_projection(self):
        super()._check_projection()
        self.second_moment.check_projection()

    def _check_geometry(self):
        super()._check_geometry()
        if self.geometry is not None and "second_moment" in vars(self._untracked):
            self.second_moment.check_geometry(type(self.geometry).__name__)

    def _check_sparse_embeddings(self):
        super()._check_sparse_embeddings()
        if self.sparse_embeddings is not None and "second_moment" in vars(self._untracked):
            self.second_moment.check_sparse_embeddings()

    def releases_for(self, noise_multiplier: float) -> tuple[Release, ...]:
        return self.second_moment.releases(self, noise_multiplier) + self._public_releases()

    def check_sampling(self, sampling: Sampling) -> None:
        super().check_sampling(sampling)
        self.second_moment.check_sampling(sampling)

    @property
    def needs_public(self) -> bool:  # type: ignore[override]
        return self.second_moment.needs_public

    def update(self, released: Sequence[Released]) -> None:
        answer = self._answer(released)
        gradients = self._projected(self._regularized(answer.value))
        with self._on_rows():
            self._update_second_moment(released, gradients)
        self._step(self._filtered(gradients, answer.noise_std))

    def _update_second_moment(self, released, gradients):
        """v takes in this step: what was released, and the gradients where the rule works."""
        pairs = zip(gradients, self.second_moments, strict=True)
        self.second_moment.update(self, released, [ops.cast(g, v.dtype) for g, v in pairs])

    def _step(self, gradients):
        vars(self)["_shared"] = {}  # past Keras, which would take it for state
        try:
            super()._step(gradients)
        finally:
            del vars(self)["_shared"]

    def _once(self, name, make):
        """What `make` gives, which in one step is the same for all variables: computed once."""
        shared = vars(self).get("_shared", {})
        if name not in shared:
            shared[name] = make()
        return shared[name]

    def _steps_taken(self, variable):
        """How many steps the moments of a variable hold after this one; of a table, of each row."""
        index, by_row = self._get_variable_index(variable), self._untracked.by_row
        if by_row is not None and index in by_row.tables:
            return self._once(("steps", index), lambda: by_row.steps_of(index))
        return self._once("steps", lambda: self._steps_in_moments(self.iterations + 1))

    def _debiased(self, moment, beta, steps):
        """A moment without what it has of its start at 0."""
        is_shared = vars(self).get("_shared", {}).get("steps") is steps
        factor = self._once(beta, lambda: debias(beta, steps)) if is_shared else debias(beta, steps)
        return moment * ops.cast(factor, moment.dtype)

    def _root(self, variable):
        """What the step of a variable is divided by, from v after this step's update."""
        v = ops.convert_to_tensor(self.geometry_moments[self._get_variable_index(variable)])
        source = self.second_moment
        return source.root(self, source.estimate(self, v, self._steps_taken(variable)))

    @property
    def second_moment_estimates(self) -> list[tf.Tensor]:
        steps, by_row = self._steps_in_moments(self.iterations), self._untracked.by_row
        of_rows = {} if by_row is None else by_row.steps
        return [
            self.second_moment.estimate(self, ops.convert_to_tensor(v), of_rows.get(index, steps))
            for index, v in enumerate(self.geometry_moments)
        ]

    def dominant(self, index: int, v: tf.Tensor) -> tf.Tensor:
        """Deprecated: use `geometry_moments`."""
        deprecation.warn(f"{type(self).__name__}.dominant", "geometry_moments")
        return ops.convert_to_tensor(self.geometry_moments[index])


def debias(beta, steps):
    """1/(1 − β^steps), what a moment is multiplied with; it is 0 before the first step."""
    # expm1, because 1 − β^steps loses four of float32's seven digits where β is close to 1.
    weight = -ops.expm1(ops.cast(steps, "float32") * math.log(beta)) if beta else 1.0
    return 1.0 / ops.maximum(weight, 1e-30)
