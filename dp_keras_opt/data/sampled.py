"""Batches that are sampled as the accountant assumes, of data in memory or on disk.

Made within the scope of a `MultiWorkerMirroredStrategy`, they are this worker's part of batches
that all workers share.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from dp_keras_opt.accounting import batch_sizes
from dp_keras_opt.accounting.batch_sizes import BatchSizeLike, BatchSizes
from dp_keras_opt.accounting.sampling import Passes, Sampling
from dp_keras_opt.checks import whole_number
from dp_keras_opt.data import ending, failures
from dp_keras_opt.data.batches import Batches, RowInfo
from dp_keras_opt.data.buckets import Blocks, Buckets, rows_at_a_time
from dp_keras_opt.data.samplers import (
    BallsInBinsSampler,
    PoissonSampler,
    WithoutReplacementSampler,
    rows_of,
)
from dp_keras_opt.data.units import Units
from dp_keras_opt.deprecation import renamed_arguments
from dp_keras_opt.noise.entropy import numpy_generator
from dp_keras_opt.types import Adjacency, Map
from dp_keras_opt.workers import gathered, of_chief, place


def poisson_batches(
    data: Any,
    batch_size: BatchSizeLike,
    steps_per_epoch: int | None = None,
    *,
    physical_batch_size: int | None = None,
    max_batch_size: int | None = None,
    map: Map | None = None,
    views: int = 1,
    buckets: Buckets | None = None,
    class_weight: Mapping[int, float] | None = None,
    skip_unreadable: bool = False,
    adjacency: Adjacency | None = None,
    unit: str = "example",
    seed: int | None = None,
    max_bytes: int = 4 * 2**30,
) -> Batches:
    """Poisson-sampled batches.

    Each of the n examples is in each batch independently with probability `batch_size / n`, so
    that the number of examples varies around `batch_size` and may be 0. A batch is padded to the
    smallest multiple of `physical_batch_size` rows, at least one, that holds the draw: oversize
    draws lose nothing (the model processes the blocks in turn and adds noise once), and an empty
    draw is a block of padding, a step of noise only. Padding has mask 0, weight 0 and the values
    of example 0, which are valid ids for embeddings.

    With `max_batch_size`, of a larger draw a uniformly random subset of that many is kept, and
    every batch is padded to that many rows: memory is bounded, and XLA compiles one shape. The
    guarantee is then one under "zero_out", by accountant "pld". A cap that often cuts costs privacy
    (`calibrate` warns); one five standard deviations above `batch_size` hardly ever does.

    Guarantee: batches are drawn as `.sampling` of the result states, with entropy of the operating
    system, anew in each iteration: no epoch repeats an earlier one.

    Args:
        data: `(x, y)` or `(x, y, sample_weight)` of arrays with equal first dimension n, where x
            and y may be nested dicts, tuples or lists of arrays; y is None for an objective without
            targets (of arrays in memory, without `map`). Of those in memory one copy is made; those
            on disk, of `np.memmap`, h5py or zarr, or the paths of `.npy` files, stay there, and
            only what is drawn is read. Or a *source* of examples that are read when
            they are drawn: what `image_folder`, `text_folder` and `TFRecords` give, the path of
            what `write` has written, of a Feather or of a Parquet file (which is read into memory),
            data sets of Hugging Face, grain, ArrayRecord and TFDS, frames of pandas and Polars,
            tables of Arrow, a `keras.utils.PyDataset` of single examples, or a `Source` of one's
            own. Or a finite `tf.data.Dataset` of *examples*, not batches, which is read into
            memory once: random augmentation in it would stay what it was then. Floating-point
            arrays are cast to `keras.config.floatx()`, as by Keras. `sample_weight`: [n], or a
            structure of such arrays for several outputs.
        batch_size: expected number of examples in a batch, from 1 to n. Where it changes during
            the training, `accounting.BatchSizes`, such as {0: 128, 500: 256}: stages by the step
            that they begin with, counted over all epochs. Fixed without looking at the data.
        steps_per_epoch: number of batches in each iteration. Default: ceil(n / batch_size), with
            the largest of several.
        physical_batch_size: rows to process at a time. Default: `batch_size`, the smallest of
            several, plus two standard deviations, rounded up to a multiple of 8, so that most draws
            need one block; with a cap, all of its rows. With buckets those of the longest, and as
            much of the others; default: a 32nd of `batch_size`, so that little is padding.
        max_batch_size: None, or the most examples in a batch, at least `batch_size`, chosen without
            looking at the data. For one worker.
        map: None, or a function of one example: of x and y, or of what an example of a source is
            where that is no tuple, such as a dict of columns. Returns (x, y), of the same shapes
            for all examples; weights stay. It is called on each example alone, anew whenever that
            is drawn, so that it cannot mix examples and random augmentation is another each time.
            TensorFlow traces it; `PythonFunction` is for what cannot be traced. It must not
            remember: one that keeps what it has seen, in a variable or a cache, and lets it into
            later examples mixes them, which nothing here can notice, and ε would be false.
        views: K, how many times `map` is called on each example of a batch. The gradients of the K
            views are averaged before they are clipped as one, so that ε is that of one view. A
            batch has K rows for each example, which memory and time go by: see
            `physical_batch_size`. Metrics are over views.
        buckets: None, or `Buckets`, for examples of several lengths, as texts: each is padded to
            the next of a few lengths, by its own length alone. Columns in memory may then be arrays
            of objects that are each an array, or a `tf.RaggedTensor`.
        class_weight: dict from class to weight, as in `keras.Model.fit` (which refuses it beside
            data that yield weights), for one output of integer or one-hot classes. Classes left
            out weigh 1. Weights computed from private class counts reveal them: use public ones.
        skip_unreadable: whether an example that cannot be read, decoded or mapped counts as one
            that contributes nothing, and is told of by `unreadable` of the result; default: it is
            an error, which names it.
        adjacency, unit: see `dp.accounting.Sampling`. Default: "add_or_remove_one"; with a cap
            "zero_out", the only one that it can be accounted under.
        seed: None, or an integer for reproducible batches. Whoever knows the seed knows who is in
            which batch, so that amplification by sampling is void; a warning says so.
        max_bytes: the most memory that the copy of data in memory may take. Arrays that would
            take more are refused before they are read; what stays on disk does not count.

    Returns:
        `Batches` of `(x, y, RowInfo)`. In the element spec the first dimension of all tensors is
        None, or `physical_batch_size` if that is n or more, or with a cap its multiple that holds
        `max_batch_size`; all others are static. With buckets, of `Blocks` of such.

    Raises:
        ValueError, TypeError: for arguments out of range or of another type, and for data that
            are empty, of unequal lengths, infinite, batched or larger than `max_bytes`; several
            workers have a cap; there are views without `map`.

    References. For views, there called augmentation multiplicity: De, Berrada, Hayes, Smith and
    Balle, "Unlocking high-accuracy differentially private image classification through scale",
    2022, arXiv:2204.13650. For the cap: Ganesh, "Tighter privacy analysis for truncated Poisson
    sampling", 2025, arXiv:2508.15089.
    """
    units = Units.of(
        "poisson_batches",
        data,
        class_weight=class_weight,
        max_bytes=max_bytes,
        map=map,
        views=views,
        buckets=buckets,
        skip_unreadable=skip_unreadable,
    )
    n = units.number
    size = _size_or_sizes(batch_size, n, "example")
    if max_batch_size is None:
        sampling = Sampling.poisson(n, size, adjacency or "add_or_remove_one", unit=unit)
    elif isinstance(size, BatchSizes):
        raise ValueError(
            f"max_batch_size={max_batch_size} cuts draws of one expected size; received "
            f"batch_size={size}. Leave out one of the two."
        )
    else:
        sampling = Sampling.truncated_poisson(
            n, size, max_batch_size, adjacency or "zero_out", unit=unit
        )
        _need_one_worker("max_batch_size cuts")
    return _drawn_afresh(
        units,
        sampling,
        views,
        steps_per_epoch,
        physical_batch_size,
        root=_root("poisson_batches", seed),
    )


def poisson_users(
    data: Any,
    users: npt.ArrayLike | str,
    batch_size: BatchSizeLike,
    steps_per_epoch: int | None = None,
    *,
    examples_per_user: int,
    physical_batch_size: int | None = None,
    map: Map | None = None,
    views: int = 1,
    buckets: Buckets | None = None,
    class_weight: Mapping[int, float] | None = None,
    skip_unreadable: bool = False,
    adjacency: Adjacency = "add_or_remove_one",
    unit: str = "user",
    seed: int | None = None,
    max_bytes: int = 4 * 2**30,
) -> Batches:
    """Poisson-sampled batches of users, of whom each is clipped as one: user-level privacy.

    Each of the n users is in each batch independently with probability `batch_size / n`. Of a user
    who is drawn at most `examples_per_user` = K examples take part, a fresh, uniformly random
    subset of their own where there are more. A user's loss is the mean of those of the examples
    that take part, and the gradient of that mean is clipped to the optimizer's `clip_norm`.

    A batch has K rows for each user, one user after the other; rows that a user does not fill are
    padding, as are users up to the next multiple of the block. `RowInfo.mask` is [users, K], which
    tells `DPModel` whose the rows are. Metrics are over examples.

    Guarantee: batches are drawn as `.sampling` of the result states, with entropy of the operating
    system, anew in each iteration. The ε is that of all examples of one user together. It takes for
    granted that each person has one id and no two share one; and, as the number of examples
    elsewhere, the number of users is public.

    Args:
        data: as for `poisson_batches`; not a `tf.data.Dataset`, whose order need not be that of
            `users`.
        users: [n examples], the id of the user of each example: integers or strings; or the name
            of the column of a table that has them.
        batch_size: expected number of *users* in a batch, from 1 to their number, or that of each
            stage, as for `poisson_batches`; what the optimizer's `batch_size` must be.
        steps_per_epoch: number of batches in each iteration. Default: ceil(n / batch_size).
        examples_per_user: K, chosen without looking at the data. Memory and time go by K rows for
            each user, however many of them are filled.
        physical_batch_size: rows to process at a time, of which whole users are taken, at least
            one. Default: that of `batch_size` plus two standard deviations users.
        map, views, buckets, class_weight, skip_unreadable, adjacency, seed, max_bytes: as for
            `poisson_batches`.
        unit: what a user is called in the statement.

    Returns:
        `Batches` of `(x, y, RowInfo)`. The first dimension of x and y is users·K·views.

    Raises:
        ValueError, TypeError: as `poisson_batches`; there is not one id for each example, or ids
            are neither integers nor strings.
    """
    units = Units.of(
        "poisson_users",
        data,
        users,
        examples_per_user,
        class_weight=class_weight,
        max_bytes=max_bytes,
        map=map,
        views=views,
        buckets=buckets,
        skip_unreadable=skip_unreadable,
    )
    n = units.number
    sizes = _size_or_sizes(batch_size, n, "user")
    sampling = Sampling.poisson(n, sizes, adjacency, unit=unit, examples_per_unit=examples_per_user)
    root = _root("poisson_users", seed)
    return _drawn_afresh(units, sampling, views, steps_per_epoch, physical_batch_size, root=root)


def balls_in_bins(
    data: Any,
    batch_size: int,
    *,
    users: npt.ArrayLike | str | None = None,
    examples_per_user: int | None = None,
    physical_batch_size: int | None = None,
    map: Map | None = None,
    views: int = 1,
    buckets: Buckets | None = None,
    class_weight: Mapping[int, float] | None = None,
    skip_unreadable: bool = False,
    adjacency: Adjacency = "add_or_remove_one",
    unit: str | None = None,
    seed: int | None = None,
    max_bytes: int = 4 * 2**30,
) -> Batches:
    """Epochs over the data, each example in one batch of each, drawn at random.

    At the start of an epoch each of the n examples is put into one of its t = ceil(n / batch_size)
    batches, uniformly and independently of all others. So every example comes exactly once an
    epoch, as in Keras's own epochs, and the number of examples in a batch varies around n / t and
    may be 0. Batches are padded as those of `poisson_batches`: oversize ones lose nothing, and an
    empty one is a step of noise only. The optimizer divides by `batch_size`, whatever was drawn.

    With `users`, each *user* is put into one of the batches, with at most `examples_per_user` of
    their examples, and is clipped as one, as by `poisson_users`.

    Guarantee: batches are drawn as `.sampling` of the result states, with entropy of the operating
    system, anew in each iteration. The draw of an epoch is kept nowhere else than in the iteration.
    An epoch that was begun is accounted as a whole: an iteration that is broken off costs as much
    as one that is not. Have one iteration at a time.

    Args:
        data: as for `poisson_batches`; no `tf.data.Dataset` where there are users.
        batch_size: expected number of examples, or of users, in a batch, from 1 to n.
        users: None, or [n examples] ids, as for `poisson_users`.
        examples_per_user: K, the most examples of a user in an epoch, for `users`.
        physical_batch_size, map, views, buckets, class_weight, skip_unreadable, max_bytes: as for
            `poisson_batches`.
        adjacency: "add_or_remove_one" or "zero_out".
        unit: what is protected, in words. Default: "example", or "user".
        seed: as for `poisson_batches`: it voids the amplification, and a warning says so.

    Returns:
        `Batches` of `(x, y, RowInfo)`, an epoch in each iteration.

    Raises:
        ValueError, TypeError: as `poisson_batches` and `poisson_users`; or only one of `users` and
            `examples_per_user` is given.

    Reference: Chua et al., "Balls-and-bins sampling for DP-SGD", AISTATS 2025, arXiv:2412.16802.
    """
    units = Units.of(
        "balls_in_bins",
        data,
        users,
        examples_per_user,
        class_weight=class_weight,
        max_bytes=max_bytes,
        map=map,
        views=views,
        buckets=buckets,
        skip_unreadable=skip_unreadable,
    )
    sampling = Sampling.balls_in_bins(
        units.number,
        _size(batch_size, units),
        adjacency,
        unit=unit or units.word,
        examples_per_unit=examples_per_user,
    )
    sampling = dataclasses.replace(sampling, passes=Passes(), views=views)
    root = _root("balls_in_bins", seed)
    block = _block(sampling, physical_batch_size, units.examples.buckets)
    sampler = BallsInBinsSampler(sampling, units.own, block, units.examples_of, root)
    return _of_sampler(units.examples, sampler, block, sampling.steps_per_epoch)


def without_replacement_batches(
    data: Any,
    batch_size: int,
    steps_per_epoch: int | None = None,
    *,
    physical_batch_size: int | None = None,
    map: Map | None = None,
    views: int = 1,
    buckets: Buckets | None = None,
    class_weight: Mapping[int, float] | None = None,
    skip_unreadable: bool = False,
    adjacency: Adjacency = "replace_one",
    unit: str = "example",
    seed: int | None = None,
    max_bytes: int = 4 * 2**30,
) -> Batches:
    """Batches that are each a uniformly random subset of one size.

    Each batch has exactly `batch_size` of the n examples, drawn without looking at other batches:
    an example can come in two that follow each other, or in none of an epoch. All batches have one
    static shape. Where they need not be of one size, `poisson_batches` are accounted far better.

    Guarantee: batches are drawn as `.sampling` of the result states, with entropy of the operating
    system, anew in each iteration.

    Args:
        data, steps_per_epoch, map, views, buckets, class_weight, skip_unreadable, seed, max_bytes:
            as for `poisson_batches`.
        batch_size: examples in a batch, from 1 to n.
        physical_batch_size: rows to process at a time, to a multiple of which batches are padded.
            Default: `batch_size`.
        adjacency: "replace_one" or "zero_out".
        unit: what is protected, in words.

    Returns:
        `Batches` of `(x, y, RowInfo)`.

    Raises:
        ValueError, TypeError: as `poisson_batches`; there are several workers.

    Reference: Wang, Balle and Kasiviswanathan, "Subsampled Rényi differential privacy and
    analytical moments accountant", AISTATS 2019, arXiv:1808.00087.
    """
    units = Units.of(
        "without_replacement_batches",
        data,
        class_weight=class_weight,
        max_bytes=max_bytes,
        map=map,
        views=views,
        buckets=buckets,
        skip_unreadable=skip_unreadable,
    )
    batch_size = _size(batch_size, units)
    sampling = Sampling.without_replacement(units.number, batch_size, adjacency, unit=unit)
    _need_one_worker("without_replacement_batches draws")
    return _drawn_afresh(
        units,
        sampling,
        views,
        steps_per_epoch,
        physical_batch_size,
        root=_root("without_replacement_batches", seed),
        sampler=WithoutReplacementSampler,
    )


@renamed_arguments(arrangement="order_seed")
def cyclic_poisson(
    data: Any,
    batch_size: int,
    groups: int,
    steps_per_epoch: int | None = None,
    *,
    users: npt.ArrayLike | str | None = None,
    examples_per_user: int | None = None,
    physical_batch_size: int | None = None,
    map: Map | None = None,
    views: int = 1,
    buckets: Buckets | None = None,
    class_weight: Mapping[int, float] | None = None,
    skip_unreadable: bool = False,
    adjacency: Adjacency = "add_or_remove_one",
    unit: str | None = None,
    order_seed: int | None = None,
    max_bytes: int = 4 * 2**30,
) -> Batches:
    """Poisson-sampled batches from groups that take turns: for correlated noise, amplified.

    Each of the n examples is assigned to one of the groups at random, whatever the others are, and
    stays there. At step t each example of group t mod `groups` is in the batch with probability
    `batch_size * groups / n`, independently. So the steps of an example are at least `groups`
    apart: noise of at most that many bands is accounted as amplified by the sampling.

    With `users`, each *user* is assigned to a group and drawn in its turn, with at most
    `examples_per_user` of their examples, and is clipped as one, as by `poisson_users`.

    Guarantee: as `poisson_batches`, in every iteration from the first group on. Have one iteration
    at a time.

    Args:
        data, batch_size, users, examples_per_user, unit: as for `balls_in_bins`.
        physical_batch_size, map, views, buckets: as for `poisson_batches`.
        class_weight, skip_unreadable, adjacency, max_bytes: as for `poisson_batches`.
        groups: from the bands of the noise to n / batch_size.
        steps_per_epoch: a multiple of `groups`. Default: the least one that is n / batch_size or
            more.
        order_seed: None, or what `DPModel.resume_run` returned, for the groups of that run.

    Returns:
        `Batches` of `(x, y, RowInfo)`.

    Raises:
        ValueError, TypeError: as `balls_in_bins`; too many groups, or `steps_per_epoch` is no
            multiple of them; an `order_seed` that can be guessed, under "add_or_remove_one".

    Reference: Choquette-Choo et al., "(Amplified) banded matrix factorization: a unified approach
    to private training", NeurIPS 2023, arXiv:2306.08153, section 5.
    """
    units = Units.of(
        "cyclic_poisson",
        data,
        users,
        examples_per_user,
        class_weight=class_weight,
        max_bytes=max_bytes,
        map=map,
        views=views,
        buckets=buckets,
        skip_unreadable=skip_unreadable,
    )
    n, word = units.number, units.word
    groups = whole_number(groups, "groups", 1, f"There are {n} {word}s.", maximum=n)
    sampling = Sampling.cyclic_poisson(
        n,
        _size(batch_size, units),
        groups,
        adjacency,
        unit=unit or word,
        examples_per_unit=examples_per_user,
    )
    if steps_per_epoch is not None and steps_per_epoch % groups:
        raise ValueError(
            f"steps_per_epoch={steps_per_epoch} is not a multiple of groups={groups}: the next "
            "iteration would begin with the first group too soon."
        )
    # Those that are drawn have 128 random bits.
    if order_seed is not None and order_seed < 2**64 and adjacency == "add_or_remove_one":
        raise ValueError(
            f"order_seed={order_seed} can be guessed. Whoever knows it knows the group of each "
            f"{word} by its place; without one {word} the places of those after it are others, and "
            "so are their groups: the guarantee for one added or removed would not hold. Leave "
            "order_seed=None, or give what resume_run returned; or, for groups that are known, "
            "adjacency='zero_out'."
        )
    order_seed = _shared_seed() if order_seed is None else order_seed
    members = units.in_groups(groups, order_seed)
    batches = _drawn_afresh(units, sampling, views, steps_per_epoch, physical_batch_size, members)
    return dataclasses.replace(batches, order_seed=order_seed)


@renamed_arguments(arrangement="order_seed")
def fixed_order_epochs(
    data: Any,
    batch_size: int,
    *,
    users: npt.ArrayLike | str | None = None,
    examples_per_user: int | None = None,
    drop_remainder: bool = False,
    map: Map | None = None,
    views: int = 1,
    buckets: Buckets | None = None,
    class_weight: Mapping[int, float] | None = None,
    skip_unreadable: bool = False,
    adjacency: Adjacency = "replace_one",
    unit: str | None = None,
    order_seed: int | None = None,
    max_bytes: int = 4 * 2**30,
) -> Batches:
    """Epochs over the data, in one order: for correlated noise.

    The order is drawn once; in every epoch each example comes at the same step, so that the steps
    it takes part in are exactly an epoch's length apart. An incomplete last batch is padded. Have
    one iteration at a time: an epoch that is broken off counts, and the next one begins anew.

    With `users`, each *user* comes once an epoch, with at most `examples_per_user` of their
    examples, a fresh, uniformly random subset where there are more, and is clipped as one.

    Args:
        data, users, examples_per_user, unit: as for `balls_in_bins`.
        map, views, buckets, class_weight, skip_unreadable, adjacency, max_bytes: as for
            `poisson_batches`.
        batch_size: examples, or users, in a batch, from 1 to n.
        drop_remainder: whether an incomplete last batch is left out.
        order_seed: None, or what `DPModel.resume_run` returned, for the order of that run.

    Returns:
        `Batches` of `(x, y, RowInfo)`, an epoch in each iteration.

    Raises:
        ValueError, TypeError: as `balls_in_bins`.
    """
    units = Units.of(
        "fixed_order_epochs",
        data,
        users,
        examples_per_user,
        class_weight=class_weight,
        max_bytes=max_bytes,
        map=map,
        views=views,
        buckets=buckets,
        skip_unreadable=skip_unreadable,
    )
    batch_size = _size(batch_size, units)
    sampling = Sampling.fixed_order(
        units.number,
        batch_size,
        adjacency,
        unit=unit or units.word,
        drop_remainder=drop_remainder,
        examples_per_unit=examples_per_user,
    )
    sampling = dataclasses.replace(sampling, passes=Passes(), views=views)
    steps = sampling.steps_per_epoch
    order_seed = _shared_seed() if order_seed is None else order_seed
    own = units.in_order(steps, batch_size, order_seed)
    per_unit = sampling.rows_per_unit or 1
    rows = block = own.shape[1] * per_unit
    if buckets is not None:
        block = per_unit * _block(sampling, None, buckets)

    def draws():
        sampling.passes.begin()
        return (rows_of(numpy_generator(), each, units.examples_of, sampling) for each in own)

    return _gathered(units.examples, draws, rows, block, sampling, steps, order_seed)


def _size_or_sizes(batch_size, n, word):
    return batch_sizes.resolve("batch_size", batch_size, f"There are {n} {word}s.", n)


def _size(batch_size, units):
    n = units.number
    return whole_number(batch_size, "batch_size", 1, f"There are {n} {units.word}s.", maximum=n)


def _drawn_afresh(
    units,
    sampling,
    views,
    steps_per_epoch,
    physical_batch_size,
    groups=None,
    root=None,
    sampler=PoissonSampler,
):
    """`Batches` that a `PoissonSampler` draws.

    Args:
        units: the `Units`.
        sampling: the `Sampling`, of one view.
        views, steps_per_epoch, physical_batch_size: as for `poisson_batches`.
        groups: None, or the units of each group that this worker draws.
        root: None, or the generator of all draws.
        sampler: `PoissonSampler`, or a subclass.
    """
    sampling = dataclasses.replace(sampling, views=views)
    if sampling.batch_sizes is not None or sampling.period > 1:
        sampling = dataclasses.replace(sampling, passes=Passes())
    if steps_per_epoch is None:
        steps_per_epoch = sampling.steps_per_epoch
    steps_per_epoch = whole_number(steps_per_epoch, "steps_per_epoch")
    block = _block(sampling, physical_batch_size, units.examples.buckets)
    padded = block
    if sampling.largest_batch < math.inf:  # all batches are padded to one size
        padded = block * -(-sampling.largest_batch // block)
    groups = [units.own] if groups is None else groups
    draws = sampler(sampling, groups, steps_per_epoch, padded, units.examples_of, root)
    return _of_sampler(units.examples, draws, block, steps_per_epoch)


def _block(sampling, physical_batch_size, buckets):
    """How many units are processed at a time.

    Default: what most draws of a worker's share need; of the longest of buckets, a small part.
    """
    per_unit = sampling.rows_per_unit or 1
    if physical_batch_size is None and buckets is not None:
        sizes = sampling.batch_sizes
        size = sampling.batch_size if sizes is None else sizes.smallest
        physical_batch_size = per_unit * rows_at_a_time(size / place()[1])
    if physical_batch_size is None and sampling.largest_batch < math.inf:
        physical_batch_size = sampling.largest_batch
    elif physical_batch_size is None:
        sizes = sampling.batch_sizes
        share = (sampling.batch_size if sizes is None else sizes.smallest) / place()[1]
        most = min(share + 2 * share**0.5, sampling.num_examples)
        physical_batch_size = per_unit * 8 * int(np.ceil(most / 8))
    physical_batch_size = whole_number(physical_batch_size, "physical_batch_size")
    return max(1, physical_batch_size // per_unit)


def _of_sampler(examples, sampler, block, steps):
    """`Batches` of as many draws of a sampler, padded to whole blocks of units."""
    sampling = dataclasses.replace(sampler.sampling, has_known_seed=sampler.root is not None)
    per_unit = sampling.rows_per_unit or 1
    most = min(sampling.largest_batch, sampling.num_examples)
    rows = sampler.block * per_unit if sampler.block >= most else None
    return _gathered(examples, lambda: iter(sampler), rows, block * per_unit, sampling, steps)


def _need_one_worker(what):
    """Refuses several workers, for a draw that is of all units together."""
    if place()[1] > 1:
        raise ValueError(
            f"{what} the draw of all examples together, and each of the {place()[1]} workers draws "
            "only from its own. Use poisson_batches without max_batch_size, or one worker."
        )


def _check_alike(sampling, steps):
    """Refuses workers that were told to sample in different ways: what is stated holds for none."""
    everyones = gathered(f"{sampling}, {steps} batches an epoch".encode())
    if len(set(everyones)) > 1:
        raise ValueError(
            f"The workers sample in different ways: {'; '.join(e.decode() for e in everyones)}. "
            "Give all of them the same arguments."
        )


def _gathered(examples, draws, rows, block, sampling, steps, order_seed=None):
    """`Batches` of the examples whose indices `draws` yields.

    Args:
        examples: `InMemory` or `FromSource`.
        draws: function that gives an iterator of int64 arrays: i for an example, ~i (negative) for
            padding with the values of example i.
        rows: how many there are of it in a batch, where that is always the same.
        block: how many of them are processed at a time.
        sampling: the `Sampling`.
        steps: the number of batches.
        order_seed: as of `Batches`.
    """

    _check_alike(sampling, steps)

    def indices():
        with failures.kept():
            examples.begin()
            for each in ending.until_end(draws()):
                yield np.repeat(each, sampling.views)

    per_unit = sampling.rows_per_unit

    def gather(indices):
        if examples.buckets is None:
            return element(*examples.gather(indices))
        found = examples.gather_buckets(indices, per_unit or 1)
        return Blocks(tuple(element(*each) for each in found))

    def element(columns, mask):
        x, y, weight = columns
        weight = tf.nest.map_structure(lambda w: None if w is None else w * mask, weight)
        if per_unit is not None:
            mask = tf.reshape(mask, (-1, per_unit))
        return x, y, RowInfo(mask, weight)

    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = False  # they copy the tensors
    # Its thread often misses that a pass ends, which then waits for it: up to a minute.
    options.autotune.enabled = False
    dataset = (
        tf.data.Dataset.from_generator(indices, output_signature=tf.TensorSpec([rows], tf.int64))
        # Captures the tensors: as constants they could not exceed 2 GB.
        .map(gather, num_parallel_calls=tf.data.AUTOTUNE)
        .apply(tf.data.experimental.assert_cardinality(steps))
        .prefetch(2)
        .with_options(options)
    )
    # Without their `RowInfo`, training refuses batches that are padded.
    padded = dataclasses.replace(sampling, is_padded=True)
    return Batches(dataset, padded, block, steps, order_seed, place()[1], examples)


def _root(name, seed):
    """Where a seed is given, the generator of all draws; then a warning."""
    if seed is None:
        return None
    warnings.warn(
        f"{name} got seed={seed}: whoever knows the seed knows who is in which batch, and against "
        "them sampling amplifies nothing, and under add_or_remove_one there is no guarantee at "
        "all. Leave seed=None outside of tests.",
        stacklevel=3,
    )
    worker = place()[0]
    return numpy_generator([seed, worker] if worker else seed)


def _shared_seed():
    """A fresh secret seed, the same on all workers."""
    return int.from_bytes(of_chief(secrets.token_bytes(16)), "big")
