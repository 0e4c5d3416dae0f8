"""What a source of the second moment is, and the plain one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import keras
import tensorflow as tf
from keras import ops

from dp_keras_opt import deprecation
from dp_keras_opt.clipping.query import Query
from dp_keras_opt.noise.mechanism import Release

if TYPE_CHECKING:
    from dp_keras_opt.accounting.sampling import Sampling
    from dp_keras_opt.noise.released import Released


class Rule(Protocol):
    """What a source knows of the optimizer that it serves (an `AdaptiveOptimizer`).

    Attributes:
        epsilon: of the rule.
        iterations: the number of steps done.
        linear: whether v̂ is linear in the squares that v took in.
        clip_norm, batch_size, noise_multiplier, noise: its settings.
        current_clip_norm, expected_batch_size: C and B of this step.
        noise_on_sum: the noise's std over C.
        geometry: None, or in what examples are clipped.
        sparse_embeddings: None, or tables of which each step moves some rows.
        second_moments: the variables that hold v, one per trainable variable.
        geometry_moments: those whose values the geometry is made of.
    """

    epsilon: float
    iterations: Any
    linear: Any
    clip_norm: Any
    batch_size: Any
    current_clip_norm: Any
    expected_batch_size: Any
    noise_multiplier: Any
    noise_on_sum: Any
    noise: Any
    geometry: Any
    sparse_embeddings: Any
    second_moments: Any
    geometry_moments: Any

    def query(self, scale: Any = None, clip_norm: Any = None) -> Query:
        """A query with the optimizer's bound and style, in the geometry `scale`."""

    def mean_release(self, noise_multiplier: float) -> Release:
        """The release of what is asked first."""

    def accumulate(self, v: Any, square: Any) -> Any:
        """The next v."""

    def corrected(self, v: Any, steps: Any) -> Any:
        """v̂ after this many steps."""

    def to_subspace(self, gradients: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        """Gradients where the rule works: projected, if it works in a subspace."""

    def add_variable(self, shape: Any, initializer: Any = "zeros", **kwargs: Any) -> Any:
        """Keras's."""

    def assign(self, variable: Any, value: Any) -> None:
        """Keras's."""


class SecondMoment:
    """A source of the second moment; this one is the base and the plain case.

    Whoever adds a source overrides what differs; of a step most differ in `squares` alone. `rule`
    is the optimizer that it belongs to.
    """

    #: Whether the examples are clipped in the geometry of v.
    scaled = False
    #: Whether the optimizer needs public rows in each batch (`data.with_public`).
    needs_public = False
    #: Whether it asks of private rows for one mean only, in whatever geometry the optimizer has.
    takes_geometry = False

    def check(self, rule: Rule) -> None:
        """Refuses rules that the source does not go with."""

    def check_sampling(self, sampling: Sampling) -> None:
        """Refuses batches for which the sensitivity would not be bounded."""

    def check_projection(self) -> None:
        """Refuses to have v in a subspace where the source knows it for each weight only."""
        if self.scaled:
            self._refuse_projection("clips in the geometry of v, which it needs for each weight")

    def _refuse_projection(self, reason):
        raise ValueError(
            f"second_moment={type(self).__name__} {reason}; with a projection v lives in a "
            "subspace. Use 'post_processing' or 'bias_corrected'."
        )

    def check_geometry(self, name: str) -> None:
        """Refuses an optimizer's geometry of this name, unless one mean is all that is asked."""
        if self.scaled or not self.takes_geometry:
            raise ValueError(
                f"geometry={name} and second_moment={type(self).__name__} cannot be joined: the "
                "source clips in a geometry of its own, or asks for more than one mean of the "
                "private rows. Use 'post_processing' or 'bias_corrected', or leave one of them out."
            )

    def check_sparse_embeddings(self) -> None:
        """Refuses tables of which few rows are released, unless one mean is all that is asked."""
        if self.scaled or self.needs_public or not self.takes_geometry:
            raise ValueError(
                f"sparse_embeddings and second_moment={type(self).__name__} cannot be joined: the "
                "source needs whole tables in each step. Use 'post_processing' or "
                "'bias_corrected', or leave one of them out."
            )

    def build(self, rule: Rule, variables: Sequence[keras.Variable]) -> None:
        """Creates the source's own variables."""

    def prepare(self, rule: Rule) -> None:
        """Sets what a step begins with; twice is as once."""

    def queries(self, rule: Rule) -> tuple[Query, ...]:
        """The queries of this step; changes nothing."""
        if not self.scaled:
            return (rule.query(),)
        return (rule.query(scale=[1.0 / root for root in self._geometry_roots(rule)]),)

    def releases(self, rule: Rule, noise_multiplier: float) -> tuple[Release, ...]:
        """The releases of every step."""
        return (rule.mean_release(noise_multiplier),)

    def squares(
        self, rule: Rule, released: Sequence[Released], gradients: Sequence[tf.Tensor]
    ) -> Sequence[tf.Tensor]:
        """What v takes in at this step, one tensor per variable.

        Args:
            rule: the optimizer.
            released: the list of `noise.Released` for `releases`.
            gradients: the privatized gradients in the geometry of 1, where the rule works.
        """
        return [ops.square(gradient) for gradient in gradients]

    def update(
        self, rule: Rule, released: Sequence[Released], gradients: Sequence[tf.Tensor]
    ) -> None:
        """v takes in the `squares` of this step, by the rule's recursion."""
        squares = self.squares(rule, released, gradients)
        for v, square in zip(rule.second_moments, squares, strict=True):
            # By TensorFlow: what Keras gives may still be the variable, which adds no rows at all
            # as a bias.
            rule.assign(v, rule.accumulate(tf.convert_to_tensor(v), ops.cast(square, v.dtype)))

    def estimate(self, rule: Rule, v: tf.Tensor, steps: int | tf.Tensor) -> tf.Tensor:
        """v̂ after this many steps; where noise was taken off or added, it may be negative."""
        return rule.corrected(v, steps)

    def root(self, rule: Rule, v_hat: tf.Tensor) -> tf.Tensor:
        """What the step is divided by."""
        return ops.sqrt(v_hat) + rule.epsilon

    def _geometry_roots(self, rule):
        """1/s_t = √v̂_{t−1} + ε, in float32: known before the data is touched."""
        return [
            ops.cast(self._geometry_root(rule, self.estimate(rule, v, rule.iterations)), "float32")
            for v in self._geometry_moments(rule)
        ]

    def _geometry_moments(self, rule):
        return [ops.convert_to_tensor(v) for v in rule.geometry_moments]

    def _geometry_root(self, rule, v_hat):
        return self.root(rule, v_hat)

    def get_config(self) -> dict[str, Any]:
        """Constructor arguments, as in Keras."""
        return {}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SecondMoment:
        """The source with these constructor arguments."""
        return cls(**config)

    # Names of before.

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        gone = {"receive", "accumulate"} & set(vars(cls))
        if gone:
            raise TypeError(
                f"{cls.__name__} overrides {', '.join(sorted(gone))}, which nothing calls any "
                "more. Override `squares`, which says what v takes in, or `update`."
            )

    def receive(self, rule: Rule, released: Sequence[Released]) -> Sequence[tf.Tensor]:
        """Deprecated: use `released[0].unscaled().value`."""
        deprecation.warn("SecondMoment.receive", "released[0].unscaled().value")
        return released[0].unscaled().value

    def noise_std(self, released: Sequence[Released]) -> Any:
        """Deprecated: use `released[0].unscaled().noise_std`."""
        deprecation.warn("SecondMoment.noise_std", "released[0].unscaled().noise_std")
        return released[0].unscaled().noise_std

    def accumulate(self, rule: Rule, index: int, v: tf.Tensor, gradient: tf.Tensor) -> tf.Tensor:
        """Deprecated: use `update`."""
        deprecation.warn("SecondMoment.accumulate", "SecondMoment.update")
        return rule.accumulate(v, ops.square(gradient))


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class PostProcessing(SecondMoment):
    """v from the squares of the privatized gradient: E[v̂] = g² + noise variance.

    Reference: Ganesh, McMahan and Thakurta, "On design principles for private adaptive optimizers",
    2025, arXiv:2507.01129v1, Algorithm 5.
    """

    takes_geometry = True
