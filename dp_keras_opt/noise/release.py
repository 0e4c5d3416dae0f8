"""The privacy barrier: the one place where clipped sums become releasable numbers."""

from typing import Any, NamedTuple

import tensorflow as tf


class Released(NamedTuple):
    """A privatized statistic. All that is computed from it is post-processing and free.

    Attributes:
        value: one float32 tensor per trainable variable, in the geometry of the query.
        noise_std: std of the noise in each coordinate of `value`, a scalar.
    """

    value: list
    noise_std: Any


def release(releases, queries, sums, *, batch_size, alpha, step, source):
    """Adds the noise and divides by the expected batch size (spec: core.md, step 4).

    A function and not a method, so that no optimizer can override it.

    Args:
        releases: the optimizer's static tuple of `Release`.
        queries: the `Query` of each sum, with its clip norm.
        sums: for each query the clipped sums, one tensor per variable.
        batch_size: the *expected* batch size B, a public constant.
        alpha: the noise schedule's factor of this step.
        step: the step number from 0, for mechanisms whose variance depends on it.
        source: the `NoiseSource` to draw from.

    Returns:
        One `Released` for each of `releases`.

    Raises:
        ValueError: a sum was clipped in another norm than its noise is for.
    """
    answers = []
    for part in releases:
        query, total = queries[part.query], sums[part.query]
        if part.multiplier == 0:  # without noise, also where the clip norm is infinite: 0·∞ = 0
            answers.append(Released([value / batch_size for value in total], 0.0))
            continue
        if query.norm != part.mechanism.norm:
            raise ValueError(
                f"{type(part.mechanism).__name__} noise needs sums clipped in the "
                f"{part.mechanism.norm} norm; these were clipped in the {query.norm} norm."
            )
        scale = part.multiplier * alpha * query.clip_norm
        noise = part.mechanism.unit_noise([value.shape for value in total], source)
        answers.append(
            Released(
                [(value + scale * z) / batch_size for value, z in zip(total, noise, strict=True)],
                tf.cast(scale * part.mechanism.std(step) / batch_size, tf.float32),
            )
        )
    return answers
