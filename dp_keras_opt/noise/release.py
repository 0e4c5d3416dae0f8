"""The privacy barrier: the one place where clipped sums become releasable numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from dp_keras_opt.clipping.query import Query
from dp_keras_opt.noise.mechanism import Release
from dp_keras_opt.noise.released import Released
from dp_keras_opt.noise.source import NoiseSource


def release(
    releases: Sequence[Release],
    queries: Sequence[Query],
    sums: Sequence[list[tf.Tensor]],
    *,
    batch_size: int | tf.Tensor,
    alpha: float | tf.Tensor,
    source: NoiseSource,
) -> list[Released]:
    """Adds the noise and divides by the expected batch size: (sum + noise)/B.

    A function and not a method, so that no optimizer can override it.

    Args:
        releases: the optimizer's static tuple of `Release`.
        queries: the `Query` of each sum, with its clip norm.
        sums: for each query the clipped sums, one tensor per variable.
        batch_size: the *expected* batch size B of this step, which is public.
        alpha: the noise schedule's factor of this step.
        source: the `NoiseSource` to draw from.

    Returns:
        One `Released` for each of `releases`.

    Raises:
        ValueError: a sum was clipped in another norm than its noise is for, a sum over private
            rows would be released as public, or counts, or rows of tables, as part of a mean.
    """
    answers = []
    for index, part in enumerate(releases):
        if part.statistic == "public_values":
            answers.append(Released([], 0.0))
            continue
        query, total = queries[part.query], sums[part.query]
        if part.statistic == "public_mean":  # the engine has divided by the number of public rows
            if query.population != "public":
                raise ValueError("A sum over private rows cannot be released as a public mean.")
            answers.append(Released(list(total), 0.0))
            continue
        if query.counts != (part.statistic == "mean_and_counts"):
            raise ValueError(f"Counts beside a sum cannot be released as a {part.statistic!r}.")
        if query.counts:
            answers.append(_mean_and_counts(part, query, total, batch_size, alpha, source, index))
            continue
        if (query.tables is not None) != (part.statistic == "mean_of_rows"):
            raise ValueError(f"Rows of tables cannot be released as a {part.statistic!r}.")
        if query.tables is not None:
            answers.append(_mean_of_rows(part, query, total, batch_size, alpha, source, index))
            continue
        if part.statistic == "mean_and_square":
            answers.append(_mean_and_square(part, query, total, batch_size, alpha, source, index))
            continue
        if part.multiplier == 0:  # without noise, also where the clip norm is infinite: 0·∞ = 0
            mean = [value / batch_size for value in total]
            answers.append(Released(mean, 0.0, **_seen(query)))
            continue
        _check_norm(part, query.norm)
        scale = part.multiplier * alpha * query.sensitivity
        std = _std(part, source, index)
        noise = part.mechanism.unit_noise([value.shape for value in total], source, (index, 0))
        noisy = _noisy(total, scale, noise, batch_size)
        noise_std = tf.cast(scale * std / batch_size, tf.float32)
        answers.append(Released(noisy, noise_std, **_seen(query)))
    return answers


def _seen(query) -> dict[str, Any]:
    """How the answer was seen; where squares are summed, they are in the geometry of s²."""
    scale = [s**2 for s in query.scale] if query.square and query.scale else query.scale
    return {"scale": scale, "geometry": query.geometry, "centre": query.centre}


def _noisy(values, scale, noise, divisor=1.0):
    """(value + scale·noise)/divisor in the precision of the noise, then rounded to float32."""

    dtype = noise[0].dtype if noise else tf.float32
    scale, divisor = tf.cast(scale, dtype), tf.cast(divisor, dtype)
    exact = [(tf.cast(v, dtype) + scale * z) / divisor for v, z in zip(values, noise, strict=True)]
    return [tf.cast(value, tf.float32) for value in exact]


def _std(part, source, index):
    """Std of a coordinate of the unit noise that is drawn next."""
    step = source.memory.steps((index, 0)).read_value() if part.mechanism.is_correlated else 0
    return part.mechanism.std(step)


def _check_norm(part, norm):
    if norm != part.mechanism.norm:
        raise ValueError(
            f"{type(part.mechanism).__name__} noise needs sums clipped in the "
            f"{part.mechanism.norm} norm; these were clipped in the {norm} norm."
        )


def _mean_and_counts(part, query, total, batch_size, alpha, source, index):
    """The mean and the shares below the bounds, as one release; see `Release.noise_on_sum`."""
    *sums, counts = total
    on_sum = part.noise_on_sum(counts.shape[0]) * alpha * query.sensitivity
    std, noise = 0.0, [tf.zeros_like(value) for value in total]
    if part.multiplier:
        _check_norm(part, "l2")  # what is bounded in L1 is so in L2
        std = _std(part, source, index)
        noise = part.mechanism.unit_noise([value.shape for value in total], source, (index, 0))
    return Released(
        _noisy(sums, on_sum, noise[:-1], batch_size),
        tf.cast(on_sum * std / batch_size, tf.float32),
        **_seen(query),
        shares=0.5 + _noisy([counts], part.count_noise * alpha, noise[-1:], batch_size)[0],
    )


def _mean_and_square(part, query, total, batch_size, alpha, source, index):
    """(g, g²) as one release of joint sensitivity S: noise σS on g, σS/√λ on g²."""
    joint = part.joint
    mean = [value / batch_size for value in total]
    # Changes nothing for batches of up to N examples, and bounds the square for larger ones.
    radius = joint.radius(query.clip_norm, batch_size)
    factor = radius / tf.maximum(tf.linalg.global_norm(mean), radius)
    if not math.isinf(radius):
        mean = [g * factor for g in mean]
    square = [tf.square(g) for g in mean]
    if part.multiplier == 0:
        return Released(mean, 0.0, square, **_seen(query))
    _check_norm(part, query.norm)
    scale = part.multiplier * alpha * joint.sensitivity(query.clip_norm, batch_size)
    shapes = [g.shape for g in mean]
    std = _std(part, source, index)
    on_mean = part.mechanism.unit_noise(shapes, source, (index, 0))
    on_square = part.mechanism.unit_noise(shapes, source, (index, 1))
    return Released(
        _noisy(mean, scale, on_mean),
        tf.cast(scale * std, tf.float32),
        _noisy(square, scale / joint.weight**0.5, on_square),
        **_seen(query),
    )


def _mean_of_rows(part, query, total, batch_size, alpha, source, index):
    """The mean, of tables the chosen rows alone, as one release; see `RowSelection`.

    Noise is drawn for the rows that are chosen; that of the others would be dropped.
    """
    if part.mechanism.is_correlated:
        raise ValueError("Correlated noise is of whole tables, and not of rows that are chosen.")
    if (part.rows.threshold is None) != (query.tables.contribution_norm is None):
        raise ValueError("Rows are chosen by counts, which the query must ask for.")
    counts = None
    if part.rows.threshold is not None:
        *total, counts = total
    on_counts, on_sum = part.rows.multipliers(part.multiplier)
    if part.multiplier:
        _check_norm(part, "l2")
        on_sum, on_counts = on_sum * alpha * query.sensitivity, on_counts * alpha
    chosen = _chosen_rows(part, query, total, counts, on_counts, source, index)
    values = list(total)
    for table, rows in chosen.items():
        values[table] = _rows_at(total[table], rows)
    noise = [tf.zeros_like(value) for value in values]
    if part.multiplier:
        whole = [place for place in range(len(values)) if place not in chosen]
        shapes = [values[place].shape for place in whole]
        drawn = part.mechanism.unit_noise(shapes, source, (index, 0))
        for place, draw in zip(whole, drawn, strict=True):
            noise[place] = draw
        for table in chosen:
            noise[table] = _unit_rows(part, source, index, values[table])
    noisy = _noisy(values, on_sum, noise, batch_size)
    for table, rows in chosen.items():
        noisy[table] = tf.IndexedSlices(noisy[table], rows, total[table].dense_shape)
    return Released(noisy, tf.cast(on_sum / batch_size, tf.float32), **_seen(query))


def _chosen_rows(part, query, total, counts, on_counts, source, index):
    """The rows of each table that are released, ascending."""
    trained = query.tables.trained
    if counts is None:
        return {table: tf.where(given)[:, 0] for table, given in trained.items()}
    if part.multiplier:
        bound = query.tables.contribution_norm
        (noise,) = part.mechanism.unit_noise([counts.shape], source, (index, 1))
        (noisy,) = _noisy([counts], on_counts * bound, [noise])
        reached = noisy >= tf.cast(part.rows.threshold * on_counts * bound, tf.float32)
    else:
        reached = counts > 0
    sizes = [total[table].dense_shape[0] for table in trained]
    chosen = {}
    for (table, given), of_table in zip(trained.items(), tf.split(reached, sizes), strict=True):
        chosen[table] = tf.where(of_table if given is None else of_table & given)[:, 0]
    return chosen


def _rows_at(total, rows):
    """These rows of a sum by row, (rows, ...); zeros where it has none."""
    size = tf.cast(total.dense_shape[0], tf.int64)
    places = tf.tensor_scatter_nd_update(
        tf.fill([size], -1), rows[:, None], tf.range(tf.size(rows))
    )  # of each row of the table, that among the chosen ones, or -1: dropped
    places = tf.gather(places, total.indices)
    return tf.math.unsorted_segment_sum(total.values, places, tf.size(rows))


#: How many numbers are drawn at once for rows whose number is known at run time.
_BLOCK = 2**14


def _unit_rows(part, source, index, values):
    """Unit draws in the shape of some rows, of a number that is known at run time."""
    row = values.shape[1:]
    size = max(1, _BLOCK // row.num_elements())
    number = tf.shape(values)[0]
    blocks = tf.map_fn(
        lambda _: part.mechanism.unit_noise([(size, *row)], source, (index, 0))[0],
        tf.range(-(-number // size)),
        fn_output_signature=source.dtype,
        parallel_iterations=1,
    )
    return tf.reshape(blocks, (-1, *row))[:number]
