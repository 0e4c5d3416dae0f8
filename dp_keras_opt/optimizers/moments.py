"""Where the second moment of an adaptive optimizer comes from: one strategy a source.

The private gradient is noisy, and squaring it squares the noise. Each strategy answers three
questions, for any of the rules (Adam, AdaGrad, RMSProp, Yogi): what is asked of the data, what the
rule's accumulator v takes in, and what the step is divided by. Formulas: the paper on design
principles for private adaptive optimizers, Algorithms 5 to 9.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf
from keras import ops

from dp_keras_opt.checks import is_number, whole_number
from dp_keras_opt.clipping.query import Query
from dp_keras_opt.noise.mechanism import JointMoments, Release
from dp_keras_opt.types import Adjacency

if TYPE_CHECKING:
    from dp_keras_opt.accounting.sampling import Sampling
    from dp_keras_opt.noise.release import Released
    from dp_keras_opt.optimizers.adaptive import AdaptiveOptimizer

__all__ = [
    "BiasCorrected",
    "Independent",
    "Joint",
    "Noiseless",
    "PostProcessing",
    "ScaleThenPrivatize",
    "SecondMoment",
    "SideInformation",
    "get",
]


class SecondMoment:
    """A source of the second moment; this one is the base and the plain case.

    Whoever adds a source overrides what differs. `rule` is the optimizer it belongs to. The methods
    `queries`, `receive` and `accumulate` of one step are traced one after the other; what an
    earlier one leaves in an attribute is a tensor of that trace, of no use beyond it.
    """

    #: Whether the examples are clipped in the geometry of v.
    scaled = False
    #: Whether the optimizer needs public rows in each batch (`data.with_public`).
    needs_public = False

    def check(self, rule: AdaptiveOptimizer) -> None:
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

    def build(self, rule: AdaptiveOptimizer, variables: Sequence[keras.Variable]) -> None:
        """Creates what the source has to remember."""

    def queries(self, rule: AdaptiveOptimizer) -> tuple[Query, ...]:
        """The queries of this step."""
        if not self.scaled:
            return (rule.query(),)
        self._roots = [tf.cast(root, tf.float32) for root in self._geometry_roots(rule)]
        return (rule.query(scale=[1.0 / root for root in self._roots]),)

    def releases(self, rule: AdaptiveOptimizer, noise_multiplier: float) -> tuple[Release, ...]:
        """The releases of every step."""
        return (Release(0, "mean", noise_multiplier, rule.noise),)

    def receive(self, rule: AdaptiveOptimizer, released: Sequence[Released]) -> list[tf.Tensor]:
        """Takes in the answers; returns the privatized gradients, in the geometry of 1."""
        if not self.scaled:
            return released[0].value
        return [g * root for g, root in zip(released[0].value, self._roots, strict=True)]

    def noise_std(self, released: Sequence[Released]) -> tf.Tensor | list[tf.Tensor]:
        """Std of the noise in what `receive` has returned; a list of tensors where they differ."""
        std = released[0].noise_std
        return [std * root for root in self._roots] if self.scaled else std

    def accumulate(
        self, rule: AdaptiveOptimizer, index: int, v: tf.Tensor, gradient: tf.Tensor
    ) -> tf.Tensor:
        """The new v of one variable."""
        return rule.accumulate(v, ops.square(gradient))

    def estimate(self, rule: AdaptiveOptimizer, v: tf.Tensor, steps: int | tf.Tensor) -> tf.Tensor:
        """v̂ after this many steps; where noise was taken off or added, it may be negative."""
        return rule.corrected(v, steps)

    def root(self, rule: AdaptiveOptimizer, v_hat: tf.Tensor) -> tf.Tensor:
        """What the step is divided by."""
        return ops.sqrt(v_hat) + rule.epsilon

    def _geometry_roots(self, rule):
        """1/s_t = √v̂_{t−1} + ε: known before the data is touched."""
        return [
            self._geometry_root(
                rule, self.estimate(rule, ops.convert_to_tensor(v), rule.iterations)
            )
            for v in rule.geometry_moments
        ]

    def _geometry_root(self, rule, v_hat):
        return self.root(rule, v_hat)

    def get_config(self) -> dict[str, Any]:
        """Constructor arguments, as in Keras."""
        return {}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SecondMoment:
        """The source with these constructor arguments."""
        return cls(**config)


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class PostProcessing(SecondMoment):
    """v from the squares of the privatized gradient (Algorithm 5): E[v̂] = g² + noise variance."""


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class BiasCorrected(SecondMoment):
    """Post-processing with the noise's share taken off (Algorithm 7, DP-AdamBC).

    Divides by √max(v̂ − Φ, ε²). Φ is v's own recursion run on the noise variance of each step, so
    it is right for every linear rule and under a noise schedule. The recursions of Yogi and AMSGrad
    are not linear, and are refused.
    """

    def check(self, rule: AdaptiveOptimizer) -> None:
        if not rule.linear:
            raise ValueError(
                "second_moment='bias_corrected' needs a second moment that is linear in the "
                f"squares; that of {type(rule).__name__} is not, as it is configured here. Use "
                "DPAdam (without amsgrad), DPRMSprop or DPAdagrad."
            )

    def build(self, rule: AdaptiveOptimizer, variables: Sequence[keras.Variable]) -> None:
        self._power = rule.add_variable((), dtype="float32", name="noise_power")

    def receive(self, rule: AdaptiveOptimizer, released: Sequence[Released]) -> list[tf.Tensor]:
        power = ops.square(ops.convert_to_tensor(released[0].noise_std, "float32"))
        rule.assign(self._power, rule.accumulate(ops.convert_to_tensor(self._power), power))
        return super().receive(rule, released)

    def estimate(self, rule: AdaptiveOptimizer, v: tf.Tensor, steps: int | tf.Tensor) -> tf.Tensor:
        phi = rule.corrected(ops.convert_to_tensor(self._power), steps)
        v_hat = super().estimate(rule, v, steps)
        return v_hat - ops.cast(phi, v_hat.dtype)

    def root(self, rule: AdaptiveOptimizer, v_hat: tf.Tensor) -> tf.Tensor:
        return ops.sqrt(ops.maximum(v_hat, rule.epsilon**2))


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class ScaleThenPrivatize(SecondMoment):
    """Clips and adds noise in the geometry of the last v̂ (Algorithm 8), then scales back.

    s_t = 1/(√v̂_{t−1} + ε_s1), with v from the scaled-back privatized gradients. Scaled gradients
    have a norm near √d, d the number of weights: tune `clip_norm` anew, relative to √d.

    Args:
        epsilon: ε_s1 of the geometry; None takes the optimizer's epsilon.
    """

    scaled = True

    def __init__(self, epsilon: float | None = None) -> None:
        if epsilon is not None and not (is_number(epsilon) and 0 < epsilon < math.inf):
            raise ValueError(f"epsilon must be positive and finite, received {epsilon!r}.")
        self.epsilon = epsilon

    def check(self, rule: AdaptiveOptimizer) -> None:
        if not (self.epsilon or rule.epsilon):
            raise ValueError("scale_then_privatize needs epsilon > 0: s_1 is 1/epsilon.")

    def _geometry_root(self, rule, v_hat):
        return ops.sqrt(v_hat) + (rule.epsilon if self.epsilon is None else self.epsilon)

    def get_config(self) -> dict[str, Any]:
        return {"epsilon": self.epsilon}


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class Joint(SecondMoment):
    """Releases the mean gradient and its square together, noise on both (Algorithm 6).

    (g, √λ·g²) is one Gaussian release of joint sensitivity S: noise σS on g and σS/√λ on g², with g
    the clipped batch mean. Negative values of the noisy v̂ are taken as 0.

    Args:
        weight: λ > 0, how much of the noise goes to g rather than to g².
        max_batch_size: N, a bound on the realised batch size. None where every batch has the
            expected size or less (fixed-size sampling). Under Poisson sampling it must be given,
            and be at least 4. The batch mean is projected onto the ball of radius N·C/B, which
            bounds the sensitivity of g² for every draw, and changes nothing in draws of up to N
            examples.
        adjacency: the neighbouring relation that S is for; it must be that of the sampling.
    """

    def __init__(
        self,
        weight: float,
        max_batch_size: int | None = None,
        adjacency: Adjacency = "add_or_remove_one",
    ) -> None:
        if max_batch_size is not None:
            max_batch_size = whole_number(max_batch_size, "max_batch_size")
        if adjacency not in ("add_or_remove_one", "zero_out", "replace_one"):
            raise ValueError(
                "adjacency must be 'add_or_remove_one', 'zero_out' or 'replace_one', received "
                f"{adjacency!r}."
            )
        self.weight = self._checked_weight(weight)
        self.max_batch_size = max_batch_size
        self.adjacency = adjacency

    def check(self, rule: AdaptiveOptimizer) -> None:
        if rule.noise.norm != "l2":
            raise ValueError(
                f"second_moment={type(self).__name__} releases (g, g²) as one Gaussian vector: its "
                f"sensitivity is known in L2, and noise={type(rule.noise).__name__} needs L1. Use "
                "Gaussian noise, or another second_moment."
            )

    def check_sampling(self, sampling: Sampling) -> None:
        least = JointMoments.SAFE_FOR_ALL_SIZES
        largest = math.inf if sampling.is_poisson else sampling.batch_size
        bound = self.max_batch_size or (0 if sampling.is_poisson else largest)
        if bound < min(largest, least):
            raise ValueError(
                f"second_moment={type(self).__name__} under {sampling.kind} sampling needs a "
                f"max_batch_size of at least {min(largest, least)}: batches can be larger, so the "
                "sensitivity of the squared gradient is not bounded without it. A size that a draw "
                "hardly ever exceeds costs little."
            )
        if self.adjacency != sampling.noise_adjacency:
            raise ValueError(
                f"The noise of second_moment={type(self).__name__} was scaled for "
                f"adjacency={self.adjacency!r}, but {sampling.kind} sampling under "
                f"{sampling.adjacency!r} needs that of {sampling.noise_adjacency!r}. Pass "
                f"adjacency={sampling.noise_adjacency!r} to it."
            )

    @staticmethod
    def _checked_weight(weight):
        if not is_number(weight) or not 0 < weight < math.inf:
            raise ValueError(f"weight (λ) must be positive and finite, received {weight!r}.")
        return float(weight)

    def releases(self, rule: AdaptiveOptimizer, noise_multiplier: float) -> tuple[Release, ...]:
        joint = JointMoments(self._weight(rule), self._largest(rule), self.adjacency)
        return (Release(0, "mean_and_square", noise_multiplier, rule.noise, joint),)

    def _weight(self, rule):
        return self.weight

    def _largest(self, rule):
        return rule.batch_size if self.max_batch_size is None else self.max_batch_size

    def check_projection(self) -> None:
        self._refuse_projection("releases the squares of the gradient, weight by weight")

    def receive(self, rule: AdaptiveOptimizer, released: Sequence[Released]) -> list[tf.Tensor]:
        self._squares: Any = released[0].square
        return released[0].value

    def accumulate(
        self, rule: AdaptiveOptimizer, index: int, v: tf.Tensor, gradient: tf.Tensor
    ) -> tf.Tensor:
        return rule.accumulate(v, self._squares[index])

    def root(self, rule: AdaptiveOptimizer, v_hat: tf.Tensor) -> tf.Tensor:
        return ops.sqrt(ops.maximum(v_hat, 0.0)) + rule.epsilon

    def get_config(self) -> dict[str, Any]:
        return {
            "weight": self.weight,
            "max_batch_size": self.max_batch_size,
            "adjacency": self.adjacency,
        }


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class Independent(Joint):
    """`Joint` with λ = (B/((2N−1)C))²: half of the budget to each (independent moment estimation).

    Args:
        max_batch_size, adjacency: see `Joint`.
    """

    def __init__(
        self, max_batch_size: int | None = None, adjacency: Adjacency = "add_or_remove_one"
    ) -> None:
        super().__init__(None, max_batch_size, adjacency)  # type: ignore[arg-type]

    @staticmethod
    def _checked_weight(weight):
        return None  # it follows from batch size and clip norm

    def _weight(self, rule):
        return (rule.batch_size / ((2 * self._largest(rule) - 1) * rule.clip_norm)) ** 2

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        config.pop("weight")
        return config


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class SideInformation(SecondMoment):
    """v from somewhere else than the private data (Algorithm 9).

    Args:
        values: the second moment itself: a list with one array per trainable variable, or a
            callable of the step number (from 0) that gives such a list. None estimates v from the
            public rows of each batch (`data.with_public`), by the rule's own recursion.
        scaled: whether the examples are also clipped in the geometry of v.

    Guarantee: none about the data that `values` was computed from. Declare only what is public.
    """

    def __init__(
        self,
        values: Sequence[npt.ArrayLike] | Callable[[tf.Tensor], Sequence[Any]] | None = None,
        scaled: bool = False,
    ) -> None:
        self.values = values
        self.scaled = bool(scaled)
        self.needs_public = values is None

    def check(self, rule: AdaptiveOptimizer) -> None:
        if self.values is not None and getattr(rule, "amsgrad", False):
            raise ValueError("amsgrad=True means nothing where the second moment is given.")

    def check_projection(self) -> None:
        super().check_projection()
        if self.values is not None:
            self._refuse_projection("is given for each weight")

    def build(self, rule: AdaptiveOptimizer, variables: Sequence[keras.Variable]) -> None:
        if self.values is None:
            return
        with tf.init_scope():  # now, and not at every step of the graph that may be traced here
            values = self._at(tf.constant(0, tf.int64), variables)
            for v, value, variable in zip(rule.second_moments, values, variables, strict=True):
                value = np.asarray(value, np.float32)
                if not (np.isfinite(value).all() and (value >= 0).all()):
                    raise ValueError(
                        f"side_information for variable '{variable.path}' must be finite and at "
                        "least 0: it is a second moment."
                    )
                v.assign(value)

    def _at(self, step, variables):
        """The values at a step, their shapes checked."""
        values = list(self.values(step) if callable(self.values) else self.values)
        if len(values) != len(variables):
            raise ValueError(
                f"side_information has {len(values)} arrays for {len(variables)} trainable "
                "variables."
            )
        for value, variable in zip(values, variables, strict=True):
            if tuple(np.shape(value)) != tuple(variable.shape):
                raise ValueError(
                    f"side_information has shape {tuple(np.shape(value))} for variable "
                    f"'{variable.path}' of shape {tuple(variable.shape)}."
                )
        return values

    def queries(self, rule: AdaptiveOptimizer) -> tuple[Query, ...]:
        if callable(self.values):
            values = self._at(ops.convert_to_tensor(rule.iterations), rule.second_moments)
            for v, value in zip(rule.second_moments, values, strict=True):
                rule.assign(v, ops.convert_to_tensor(value, v.dtype))
        public = (Query(rows="public"),) if self.needs_public else ()
        return super().queries(rule) + public

    def releases(self, rule: AdaptiveOptimizer, noise_multiplier: float) -> tuple[Release, ...]:
        # So that the privacy statement says what was declared public.
        statistic: Literal["public_mean", "public_values"] = (
            "public_mean" if self.needs_public else "public_values"
        )
        public = Release(1, statistic, 0.0, rule.noise)
        return (*super().releases(rule, noise_multiplier), public)

    def receive(self, rule: AdaptiveOptimizer, released: Sequence[Released]) -> list[tf.Tensor]:
        gradients = super().receive(rule, released)  # in the geometry that was asked for
        self._public: Any = released[1].value if self.needs_public else None
        return gradients

    def accumulate(
        self, rule: AdaptiveOptimizer, index: int, v: tf.Tensor, gradient: tf.Tensor
    ) -> tf.Tensor:
        return (
            rule.accumulate(v, ops.square(rule.in_subspace(index, self._public[index])))
            if self.needs_public
            else v
        )

    def estimate(self, rule: AdaptiveOptimizer, v: tf.Tensor, steps: int | tf.Tensor) -> tf.Tensor:
        return super().estimate(rule, v, steps) if self.needs_public else v

    def get_config(self) -> dict[str, Any]:
        values = self.values
        if values is not None and not callable(values):
            values = [np.asarray(value).tolist() for value in values]
        return {"values": keras.saving.serialize_keras_object(values), "scaled": self.scaled}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SideInformation:
        values = keras.saving.deserialize_keras_object(config["values"])
        return cls(**config | {"values": values})


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class Noiseless(SecondMoment):
    """v from the clipped gradients without noise: a baseline that is NOT private.

    The ledger says ε = ∞. A warning says so at construction.

    Args:
        scaled: whether the examples are also clipped in the geometry of v.
    """

    def __init__(self, scaled: bool = False) -> None:
        warnings.warn(
            "second_moment='noiseless' uses gradients without noise: the training is not private "
            "(ε = ∞). It is a baseline for comparisons only.",
            stacklevel=2,
        )
        self.scaled = bool(scaled)

    def queries(self, rule: AdaptiveOptimizer) -> tuple[Query, ...]:
        queries = super().queries(rule)
        return (*queries, rule.query()) if self.scaled else queries

    def releases(self, rule: AdaptiveOptimizer, noise_multiplier: float) -> tuple[Release, ...]:
        exact = Release(int(self.scaled), "mean", 0.0, rule.noise)  # of the query without geometry
        return (*super().releases(rule, noise_multiplier), exact)

    def receive(self, rule: AdaptiveOptimizer, released: Sequence[Released]) -> list[tf.Tensor]:
        self._exact = released[1].value
        return super().receive(rule, released)

    def accumulate(
        self, rule: AdaptiveOptimizer, index: int, v: tf.Tensor, gradient: tf.Tensor
    ) -> tf.Tensor:
        return rule.accumulate(v, ops.square(rule.in_subspace(index, self._exact[index])))

    def get_config(self) -> dict[str, Any]:
        return {"scaled": self.scaled}


_NAMES = {
    "post_processing": PostProcessing,
    "bias_corrected": BiasCorrected,
    "independent": Independent,
    "scale_then_privatize": ScaleThenPrivatize,
    "side_information": SideInformation,
    "noiseless": Noiseless,
}


def get(identifier: SecondMoment | str | Mapping[str, Any]) -> SecondMoment:
    """Resolves a source of the second moment: an object, a name, or a serialised one.

    Raises:
        ValueError: nothing is known by that name; "joint" needs its weight: moments.Joint(weight).
    """
    if isinstance(identifier, dict):
        identifier = keras.saving.deserialize_keras_object(identifier)
    if isinstance(identifier, str):
        if identifier == "joint":
            raise ValueError("second_moment='joint' needs its weight λ: moments.Joint(weight).")
        if identifier not in _NAMES:
            raise ValueError(
                f"second_moment={identifier!r} is not known; use one of {sorted(_NAMES)}, "
                "moments.Joint(weight), or another object of dp_keras_opt.optimizers.moments."
            )
        identifier = _NAMES[identifier]()
    if not isinstance(identifier, SecondMoment):
        raise ValueError(
            "second_moment must be a name or an object of dp_keras_opt.optimizers.moments; "
            f"received {identifier!r}."
        )
    return identifier
