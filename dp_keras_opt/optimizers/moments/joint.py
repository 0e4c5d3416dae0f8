"""The mean gradient and its square released together, with noise on both."""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf
from keras import ops

from dp_keras_opt.accounting.batch_sizes import BatchSizes
from dp_keras_opt.checks import is_number, whole_number
from dp_keras_opt.noise.mechanism import JointMoments, Release
from dp_keras_opt.optimizers import clip_norms
from dp_keras_opt.optimizers.clip_norms import ClipNormSchedule
from dp_keras_opt.optimizers.moments.base import Rule, SecondMoment
from dp_keras_opt.types import Adjacency

if TYPE_CHECKING:
    from dp_keras_opt.accounting.sampling import Sampling
    from dp_keras_opt.noise.released import Released


class JointRelease(SecondMoment, abc.ABC):
    """What `Joint` and `Independent` share; each says how mean and square are weighted.

    Args:
        max_batch_size, adjacency: see `Joint`.
    """

    def __init__(
        self, max_batch_size: int | None = None, adjacency: Adjacency = "add_or_remove_one"
    ) -> None:
        if max_batch_size is not None:
            max_batch_size = whole_number(max_batch_size, "max_batch_size")
        if adjacency not in ("add_or_remove_one", "zero_out", "replace_one"):
            raise ValueError(
                "adjacency must be 'add_or_remove_one', 'zero_out' or 'replace_one', received "
                f"{adjacency!r}."
            )
        self.max_batch_size = max_batch_size
        self.adjacency = adjacency

    @abc.abstractmethod
    def _weight(self, rule):
        """λ."""

    def check(self, rule: Rule) -> None:
        clip_norms.refuse_quantile(
            rule.clip_norm,
            f"second_moment={type(self).__name__}",
            "mean and square are released as one, with a sensitivity for one clip norm",
        )
        if rule.noise.norm != "l2":
            raise ValueError(
                f"second_moment={type(self).__name__} releases (g, g²) as one Gaussian vector: its "
                f"sensitivity is known in L2, and noise={type(rule.noise).__name__} needs L1. Use "
                "Gaussian noise, or another second_moment."
            )

    def check_sampling(self, sampling: Sampling) -> None:
        least = JointMoments.SAFE_FOR_ALL_SIZES
        largest = sampling.largest_batch
        bound = self.max_batch_size or (0 if sampling.varies_in_size else largest)
        if bound < min(largest, least):
            which = "A size that a draw hardly ever exceeds costs little."
            if sampling.max_batch_size is not None:
                which = f"No batch of this sampling exceeds {sampling.max_batch_size}."
            raise ValueError(
                f"second_moment={type(self).__name__} under {sampling.kind} sampling needs a "
                f"max_batch_size of at least {min(largest, least)}: batches can be larger, so the "
                f"sensitivity of the squared gradient is not bounded without it. {which}"
            )
        if self.adjacency != sampling.noise_adjacency:
            raise ValueError(
                f"The noise of second_moment={type(self).__name__} was scaled for "
                f"adjacency={self.adjacency!r}, but {sampling.kind} sampling under "
                f"{sampling.adjacency!r} needs that of {sampling.noise_adjacency!r}. Pass "
                f"adjacency={sampling.noise_adjacency!r} to it."
            )

    def check_projection(self) -> None:
        self._refuse_projection("releases the squares of the gradient, weight by weight")

    def releases(self, rule: Rule, noise_multiplier: float) -> tuple[Release, ...]:
        for name, value in (("batch_size", rule.batch_size), ("clip_norm", rule.clip_norm)):
            if isinstance(value, BatchSizes | ClipNormSchedule):
                raise ValueError(
                    f"second_moment={type(self).__name__} has a sensitivity for one {name}; "
                    f"received {name}={value}. Use one, or another second_moment."
                )
        joint = JointMoments(self._weight(rule), self._largest(rule), self.adjacency)
        return (Release(0, "mean_and_square", noise_multiplier, rule.noise, joint),)

    def _largest(self, rule):
        return rule.batch_size if self.max_batch_size is None else self.max_batch_size

    def squares(
        self, rule: Rule, released: Sequence[Released], gradients: Sequence[tf.Tensor]
    ) -> Sequence[tf.Tensor]:
        square: Any = released[0].square
        return square

    def root(self, rule: Rule, v_hat: tf.Tensor) -> tf.Tensor:
        return ops.sqrt(ops.maximum(v_hat, 0.0)) + rule.epsilon

    def get_config(self) -> dict[str, Any]:
        return {"max_batch_size": self.max_batch_size, "adjacency": self.adjacency}


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class Joint(JointRelease):
    """Releases the mean gradient and its square together, noise on both.

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

    Reference: Kalinin, Upadhyay and Lampert, "Continual release moment estimation with differential
    privacy", 2025, arXiv:2502.06597.
    """

    def __init__(
        self,
        weight: float,
        max_batch_size: int | None = None,
        adjacency: Adjacency = "add_or_remove_one",
    ) -> None:
        super().__init__(max_batch_size, adjacency)
        if not is_number(weight) or not 0 < weight < math.inf:
            raise ValueError(f"weight (λ) must be positive and finite, received {weight!r}.")
        self.weight = float(weight)

    def _weight(self, rule):
        return self.weight

    def get_config(self) -> dict[str, Any]:
        return {"weight": self.weight} | super().get_config()


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class Independent(JointRelease):
    """Independent moment estimation: half of the budget to g, half to g².

    It is `Joint` with λ = (B/((2N−1)C))².

    Args:
        max_batch_size, adjacency: see `Joint`.

    Reference: Ganesh, McMahan and Thakurta, "On design principles for private adaptive optimizers",
    2025, arXiv:2507.01129v1, Algorithm 6, which prints 2B + 1 where its derivation gives 2B − 1.
    """

    def _weight(self, rule):
        return (rule.batch_size / ((2 * self._largest(rule) - 1) * rule.clip_norm)) ** 2
