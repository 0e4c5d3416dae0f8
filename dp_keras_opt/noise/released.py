"""What the privacy barrier lets through, and how it is taken back to where gradients live."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf


class Released(NamedTuple):
    """A privatized statistic. All that is computed from it is post-processing and free.

    Attributes:
        value: one float32 tensor per trainable variable, in the geometry of the query.
        noise_std: std of the noise in each coordinate of `value`, a scalar; or a list of one tensor
            per variable, where coordinates differ.
        square: for the statistic "mean_and_square", the noisy squares of the mean; else None.
        scale: the geometry s of the query, one tensor per variable, or None for 1: `value` is the
            noisy mean of s ⊙ gradient.
        shares: for the statistic "mean_and_counts", the noisy share of the units below each bound,
            (L,), with the expected batch size for their number; else None.
        geometry: that of the query where it is a matrix M, or None: `value` is the noisy mean of
            M·gradient.
        centre: a of the query, or None for 0: gradients were taken less a.
    """

    value: list[tf.Tensor]
    noise_std: float | tf.Tensor | list[tf.Tensor]
    square: list[tf.Tensor] | None = None
    scale: Sequence[tf.Tensor] | None = None
    shares: tf.Tensor | None = None
    geometry: Any = None
    centre: Sequence[tf.Tensor] | None = None

    def unscaled(self) -> Released:
        """The same statistic in the coordinates of the gradient: value and noise over s or M, a
        added; this one, if it is in them."""
        if self.scale is None and self.geometry is None and self.centre is None:
            return self
        value, std, square = self.value, self.noise_std, self.square
        if self.scale is not None:
            stds = std if isinstance(std, list) else [std] * len(value)
            square = square and [q / s**2 for q, s in zip(square, self.scale, strict=True)]
            value = [v / s for v, s in zip(value, self.scale, strict=True)]
            std = [std / s for std, s in zip(stds, self.scale, strict=True)]
        elif self.geometry is not None:
            inverse = self.geometry.inverse
            value = inverse.image(value)
            std = [std * each for each in inverse.deviations([tuple(v.shape) for v in value])]
        if self.centre is not None:
            value = [v + a for v, a in zip(value, self.centre, strict=True)]
        return Released(value, std, square, shares=self.shares)
