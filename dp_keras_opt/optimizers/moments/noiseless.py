"""A second moment from gradients without noise: a baseline that is not private."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf
from keras import ops

from dp_keras_opt.clipping.query import Query
from dp_keras_opt.noise.mechanism import Release
from dp_keras_opt.optimizers import clip_norms
from dp_keras_opt.optimizers.moments.base import Rule, SecondMoment

if TYPE_CHECKING:
    from dp_keras_opt.noise.released import Released


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class Noiseless(SecondMoment):
    """v from the clipped gradients without noise: a baseline that is NOT private.

    The ledger says ε = ∞. A warning says so at construction.

    Args:
        scaled: whether the examples are also clipped in the geometry of v.

    Reference: the non-private preconditioner of Ganesh, McMahan and Thakurta, "On design principles
    for private adaptive optimizers", 2025, arXiv:2507.01129v1.
    """

    def __init__(self, scaled: bool = False) -> None:
        warnings.warn(
            "second_moment='noiseless' uses gradients without noise: the training is not private "
            "(ε = ∞). It is a baseline for comparisons only.",
            stacklevel=2,
        )
        self.scaled = bool(scaled)

    def check(self, rule: Rule) -> None:
        clip_norms.refuse_quantile(
            rule.clip_norm,
            "second_moment='noiseless'",
            "it releases the mean of the clipped gradients without noise",
        )

    def queries(self, rule: Rule) -> tuple[Query, ...]:
        queries = super().queries(rule)
        return (*queries, rule.query()) if self.scaled else queries

    def releases(self, rule: Rule, noise_multiplier: float) -> tuple[Release, ...]:
        exact = Release(int(self.scaled), "mean", 0.0, rule.noise)  # of the query without geometry
        return (*super().releases(rule, noise_multiplier), exact)

    def squares(
        self, rule: Rule, released: Sequence[Released], gradients: Sequence[tf.Tensor]
    ) -> Sequence[tf.Tensor]:
        return [ops.square(gradient) for gradient in rule.to_subspace(released[1].value)]

    def get_config(self) -> dict[str, Any]:
        return {"scaled": self.scaled}
