"""Batches of data that fit in memory, sampled as the accountant assumes.

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
from dp_keras_opt.data import arrays, shards
from dp_keras_opt.data.batches import Batches, RowInfo
from dp_keras_opt.data.samplers import (
    BallsInBinsSampler,
    PoissonSampler,
    WithoutReplacementSampler,
    random_groups,
    random_order,
    rows_of,
)
from dp_keras_opt.data.users import examples_by_user
from dp_keras_opt.deprecation import renamed_arguments
from dp_keras_opt.noise.entropy import numpy_generator
from dp_keras_opt.types import Adjacency
from dp_keras_opt.workers import of_chief, place


def poisson_batches(
    data: tuple[Any, ...] | tf.data.Dataset,
    batch_size: BatchSizeLike,
    steps_per_epoch: int | None = None,
    *,
    physical_batch_size: int | None = None,
    max_batch_size: int | None = None,
    class_weight: Mapping[int, float] | None = None,
    adjacency: Adjacency | None = None,
    unit: str = "example",
    seed: int | None = None,
    max_bytes: int = 4 * 2**30,
) -> Batches:
    """Poisson-sampled batches of data that fit in memory.

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
            and y may be nested dicts, tuples or lists of arrays; or a finite `tf.data.Dataset` of
            such *examples*, not batches, which is read into memory once: random augmentation in it
            would stay what it was then (call `map` on the result instead). Floating-point arrays
            are cast to `keras.config.floatx()`, as by Keras. `sample_weight`: [n], or a structure
            of such arrays for several outputs. Of arrays of numbers one copy is made.
        batch_size: expected number of examples in a batch, from 1 to n. Where it changes during
            the training, `accounting.BatchSizes`, such as {0: 128, 500: 256}: stages by the step
            that they begin with, counted over all epochs. Fixed without looking at the data.
        steps_per_epoch: number of batches in each iteration. Default: ceil(n / batch_size), with
            the largest of several.
        physical_batch_size: rows to process at a time. Default: `batch_size`, the smallest of
            several, plus two standard deviations, rounded up to a multiple of 8, so that most draws
            need one block; with a cap, all of its rows.
        max_batch_size: None, or the most examples in a batch, at least `batch_size`, chosen without
            looking at the data. For one worker.
        class_weight: dict from class to weight, as in `keras.Model.fit` (which refuses it beside
            data that yield weights), for one output of integer or one-hot classes. Classes left
            out weigh 1. Weights computed from private class counts reveal them: use public ones.
        adjacency, unit: see `dp.accounting.Sampling`. Default: "add_or_remove_one"; with a cap
            "zero_out", the only one that it can be accounted under.
        seed: None, or an integer for reproducible batches. Whoever knows the seed knows who is in
            which batch, so that amplification by sampling is void; a warning says so.
        max_bytes: the most memory that the copy of the data may take. Arrays that would take more
            are refused before they are read.

    Returns:
        `Batches` of `(x, y, RowInfo)`. In the element spec the first dimension of all tensors is
        None, or `physical_batch_size` if that is n or more, or with a cap its multiple that holds
        `max_batch_size`; all others are static.

    Raises:
        ValueError, TypeError: for arguments out of range or of another type, and for data that
            are empty, of unequal lengths, infinite, batched or larger than `max_bytes`; several
            workers have a cap.

    Reference, for the cap: Ganesh, "Tighter privacy analysis for truncated Poisson sampling", 2025,
    arXiv:2508.15089.
    """
    examples, n = arrays.examples(data, class_weight, max_bytes)
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
    root = _root("poisson_batches", seed)
    shards.check_same_data(examples)
    everyone = [np.arange(n)]
    return _drawn_afresh(
        examples, sampling, everyone, steps_per_epoch, physical_batch_size, root=root
    )


def poisson_users(
    data: Any,
    users: npt.ArrayLike,
    batch_size: BatchSizeLike,
    steps_per_epoch: int | None = None,
    *,
    examples_per_user: int,
    physical_batch_size: int | None = None,
    class_weight: Mapping[int, float] | None = None,
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
        data: `(x, y)` or `(x, y, sample_weight)` of arrays, as for `poisson_batches`; not a
            `tf.data.Dataset`, whose order need not be that of `users`.
        users: [n examples], the id of the user of each example: integers or strings.
        batch_size: expected number of *users* in a batch, from 1 to their number, or that of each
            stage, as for `poisson_batches`; what the optimizer's `batch_size` must be.
        steps_per_epoch: number of batches in each iteration. Default: ceil(n / batch_size).
        examples_per_user: K, chosen without looking at the data. Memory and time go by K rows for
            each user, however many of them are filled.
        physical_batch_size: rows to process at a time, of which whole users are taken, at least
            one. Default: that of `batch_size` plus two standard deviations users.
        class_weight, adjacency, seed, max_bytes: as for `poisson_batches`.
        unit: what a user is called in the statement.

    Returns:
        `Batches` of `(x, y, RowInfo)`. The first dimension of x and y is users·K.

    Raises:
        ValueError, TypeError: as `poisson_batches`; there is not one id for each example, or ids
            are neither integers nor strings.
    """
    examples, n, owned = _units(
        "poisson_users", data, users, examples_per_user, class_weight, max_bytes
    )
    sizes = _size_or_sizes(batch_size, n, "user")
    sampling = Sampling.poisson(n, sizes, adjacency, unit=unit, examples_per_unit=examples_per_user)
    root = _root("poisson_users", seed)
    everyone = [np.arange(n)]
    return _drawn_afresh(
        examples, sampling, everyone, steps_per_epoch, physical_batch_size, owned, root
    )


def balls_in_bins(
    data: tuple[Any, ...] | tf.data.Dataset,
    batch_size: int,
    *,
    users: npt.ArrayLike | None = None,
    examples_per_user: int | None = None,
    physical_batch_size: int | None = None,
    class_weight: Mapping[int, float] | None = None,
    adjacency: Adjacency = "add_or_remove_one",
    unit: str | None = None,
    seed: int | None = None,
    max_bytes: int = 4 * 2**30,
) -> Batches:
    """Epochs over data that fit in memory, each example in one batch of each, drawn at random.

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
        data: as for `poisson_batches`; arrays where there are users.
        batch_size: expected number of examples, or of users, in a batch, from 1 to n.
        users: None, or [n examples] ids, as for `poisson_users`.
        examples_per_user: K, the most examples of a user in an epoch, for `users`.
        physical_batch_size, class_weight, max_bytes: as for `poisson_batches`.
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
    examples, n, owned = _units(
        "balls_in_bins", data, users, examples_per_user, class_weight, max_bytes
    )
    sampling = Sampling.balls_in_bins(
        n,
        _size(batch_size, n, owned),
        adjacency,
        unit=unit or _word(owned),
        examples_per_unit=examples_per_user,
    )
    sampling = dataclasses.replace(sampling, passes=Passes())
    root = _root("balls_in_bins", seed)
    block = _block(sampling, physical_batch_size)
    worker, workers = place()
    own = np.arange(n)[worker::workers]
    sampler = BallsInBinsSampler(sampling, own, block, owned, root)
    return _of_sampler(examples, sampler, block, sampling.steps_per_epoch)


def without_replacement_batches(
    data: tuple[Any, ...] | tf.data.Dataset,
    batch_size: int,
    steps_per_epoch: int | None = None,
    *,
    physical_batch_size: int | None = None,
    class_weight: Mapping[int, float] | None = None,
    adjacency: Adjacency = "replace_one",
    unit: str = "example",
    seed: int | None = None,
    max_bytes: int = 4 * 2**30,
) -> Batches:
    """Batches of data that fit in memory, each a uniformly random subset of one size.

    Each batch has exactly `batch_size` of the n examples, drawn without looking at other batches:
    an example can come in two that follow each other, or in none of an epoch. All batches have one
    static shape. Where they need not be of one size, `poisson_batches` are accounted far better.

    Guarantee: batches are drawn as `.sampling` of the result states, with entropy of the operating
    system, anew in each iteration.

    Args:
        data, steps_per_epoch, class_weight, seed, max_bytes: as for `poisson_batches`.
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
    examples, n = arrays.examples(data, class_weight, max_bytes)
    batch_size = whole_number(batch_size, "batch_size", 1, f"There are {n} examples.", maximum=n)
    sampling = Sampling.without_replacement(n, batch_size, adjacency, unit=unit)
    _need_one_worker("without_replacement_batches draws")
    root = _root("without_replacement_batches", seed)
    everyone = [np.arange(n)]
    kind = WithoutReplacementSampler
    return _drawn_afresh(
        examples, sampling, everyone, steps_per_epoch, physical_batch_size, None, root, kind
    )


@renamed_arguments(arrangement="order_seed")
def cyclic_poisson(
    data: tuple[Any, ...] | tf.data.Dataset,
    batch_size: int,
    groups: int,
    steps_per_epoch: int | None = None,
    *,
    users: npt.ArrayLike | None = None,
    examples_per_user: int | None = None,
    physical_batch_size: int | None = None,
    class_weight: Mapping[int, float] | None = None,
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

    Guarantee: as `poisson_batches`, in every iteration from the first group on.

    Args:
        data, batch_size, users, examples_per_user, unit: as for `balls_in_bins`.
        physical_batch_size, class_weight, adjacency, max_bytes: as for `poisson_batches`.
        groups: from the bands of the noise to n / batch_size.
        steps_per_epoch: a multiple of `groups`. Default: the least one that is n / batch_size or
            more.
        order_seed: None, or what `DPModel.resume_run` returned, for the groups of that run.

    Returns:
        `Batches` of `(x, y, RowInfo)`.

    Raises:
        ValueError, TypeError: as `balls_in_bins`; too many groups, or `steps_per_epoch` is no
            multiple of them.

    Reference: Choquette-Choo et al., "(Amplified) banded matrix factorization: a unified approach
    to private training", NeurIPS 2023, arXiv:2306.08153, section 5.
    """
    examples, n, owned = _units(
        "cyclic_poisson", data, users, examples_per_user, class_weight, max_bytes
    )
    word = _word(owned)
    groups = whole_number(groups, "groups", 1, f"There are {n} {word}s.", maximum=n)
    sampling = Sampling.cyclic_poisson(
        n,
        _size(batch_size, n, owned),
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
    order_seed = _shared_seed() if order_seed is None else order_seed
    members = random_groups(n, groups, order_seed)
    batches = _drawn_afresh(
        examples, sampling, members, steps_per_epoch, physical_batch_size, owned
    )
    return dataclasses.replace(batches, order_seed=order_seed)


@renamed_arguments(arrangement="order_seed")
def fixed_order_epochs(
    data: tuple[Any, ...] | tf.data.Dataset,
    batch_size: int,
    *,
    users: npt.ArrayLike | None = None,
    examples_per_user: int | None = None,
    drop_remainder: bool = False,
    class_weight: Mapping[int, float] | None = None,
    adjacency: Adjacency = "replace_one",
    unit: str | None = None,
    order_seed: int | None = None,
    max_bytes: int = 4 * 2**30,
) -> Batches:
    """Epochs over data that fit in memory, in one order: for correlated noise.

    The order is drawn once; in every epoch each example comes at the same step, so that the steps
    it takes part in are exactly an epoch's length apart. An incomplete last batch is padded.

    With `users`, each *user* comes once an epoch, with at most `examples_per_user` of their
    examples, a fresh, uniformly random subset where there are more, and is clipped as one.

    Args:
        data, users, examples_per_user, unit: as for `balls_in_bins`.
        class_weight, adjacency, max_bytes: as for `poisson_batches`.
        batch_size: examples, or users, in a batch, from 1 to n.
        drop_remainder: whether an incomplete last batch is left out.
        order_seed: None, or what `DPModel.resume_run` returned, for the order of that run.

    Returns:
        `Batches` of `(x, y, RowInfo)`, an epoch in each iteration.

    Raises:
        ValueError, TypeError: as `balls_in_bins`.
    """
    examples, n, owned = _units(
        "fixed_order_epochs", data, users, examples_per_user, class_weight, max_bytes
    )
    batch_size = _size(batch_size, n, owned)
    sampling = Sampling.fixed_order(
        n,
        batch_size,
        adjacency,
        unit=unit or _word(owned),
        drop_remainder=drop_remainder,
        examples_per_unit=examples_per_user,
    )
    steps = sampling.steps_per_epoch
    order_seed = _shared_seed() if order_seed is None else order_seed
    order = random_order(n, steps, batch_size, order_seed)
    worker, workers = place()
    filled = np.pad(order, [(0, 0), (0, -batch_size % workers)], constant_values=-1)
    own = filled[:, worker::workers]
    rows = own.shape[1] * (examples_per_user or 1)

    def draws():
        return (rows_of(numpy_generator(), units, owned, sampling) for units in own)

    dataset = _gathered(examples, draws, rows, steps, examples_per_user)
    return Batches(dataset, _padded(sampling), rows, steps, order_seed, workers)


def _units(name, data, users, examples_per_user, class_weight, max_bytes):
    """The examples as tensors, and whose they are.

    Returns:
        (x, y, sample_weight); n, the number of examples or of users; None, or the indices of each
        user's examples.
    """
    if (users is None) != (examples_per_user is None):
        raise ValueError(
            "users and examples_per_user go together: whose the examples are, and how many of a "
            f"user take part. Received: examples_per_user={examples_per_user} "
            f"{'without' if users is None else 'with'} users."
        )
    if users is None:
        examples, n = arrays.examples(data, class_weight, max_bytes)
        shards.check_same_data(examples)
        return examples, n, None
    if isinstance(data, tf.data.Dataset):
        raise TypeError(
            f"{name} with users needs arrays: the examples of a tf.data.Dataset can come in "
            "another order than their users. Received: a tf.data.Dataset. Read it into arrays "
            "first."
        )
    whole_number(examples_per_user, "examples_per_user")
    examples, n = arrays.examples(data, class_weight, max_bytes)
    owned = examples_by_user(users, n)
    shards.check_same_data((*examples, np.asarray(users)))
    return examples, len(owned), owned


def _size_or_sizes(batch_size, n, word):
    return batch_sizes.resolve("batch_size", batch_size, f"There are {n} {word}s.", n)


def _word(owned):
    return "example" if owned is None else "user"


def _size(batch_size, n, owned):
    return whole_number(batch_size, "batch_size", 1, f"There are {n} {_word(owned)}s.", maximum=n)


def _drawn_afresh(
    examples,
    sampling,
    groups,
    steps_per_epoch,
    physical_batch_size,
    owned=None,
    root=None,
    sampler=PoissonSampler,
):
    """`Batches` that a `PoissonSampler` draws: of examples or, with `owned`, of users.

    Args:
        examples: (x, y, sample_weight), structures of tensors.
        sampling: the `Sampling`.
        groups: the indices of the units of each group.
        steps_per_epoch, physical_batch_size: as for `poisson_batches`.
        owned: None, or the indices of each user's examples.
        root: None, or the generator of all draws.
        sampler: `PoissonSampler`, or a subclass.
    """
    # Each worker draws from units of its own: whatever the workers draw, none is drawn twice, and
    # each is drawn independently of all others, as it is by one worker.
    worker, workers = place()
    groups = [members[worker::workers] for members in groups]
    if sampling.batch_sizes is not None:
        sampling = dataclasses.replace(sampling, passes=Passes())
    if steps_per_epoch is None:
        steps_per_epoch = sampling.steps_per_epoch
    steps_per_epoch = whole_number(steps_per_epoch, "steps_per_epoch")
    block = _block(sampling, physical_batch_size)
    padded = block
    if sampling.largest_batch < math.inf:  # all batches are padded to one size
        padded = block * -(-sampling.largest_batch // block)
    draws = sampler(sampling, groups, steps_per_epoch, padded, owned, root)
    return _of_sampler(examples, draws, block, steps_per_epoch)


def _block(sampling, physical_batch_size):
    """How many units are processed at a time; default: what most draws of a worker's share need."""
    per_unit = sampling.examples_per_unit or 1
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
    sampling = sampler.sampling
    per_unit = sampling.examples_per_unit or 1
    most = min(sampling.largest_batch, sampling.num_examples)
    rows = sampler.block * per_unit if sampler.block >= most else None
    dataset = _gathered(examples, lambda: iter(sampler), rows, steps, sampling.examples_per_unit)
    return Batches(dataset, _padded(sampling), block * per_unit, steps, workers=place()[1])


def _need_one_worker(what):
    """Refuses several workers, for a draw that is of all units together."""
    if place()[1] > 1:
        raise ValueError(
            f"{what} the draw of all examples together, and each of the {place()[1]} workers draws "
            "only from its own. Use poisson_batches without max_batch_size, or one worker."
        )


def _gathered(tensors, draws, rows, steps, rows_per_user=None):
    """The data set of batches whose examples `draws` yields as indices.

    Args:
        tensors: (x, y, sample_weight).
        draws: function that gives an iterator of int64 arrays: i for an example, ~i (negative) for
            padding with the values of example i.
        rows: their length, where it is always the same.
        steps: how many there are.
        rows_per_user: K where each K rows are one user's.
    """

    def gather(indices):
        mask = tf.cast(indices >= 0, tf.float32)
        places = tf.maximum(indices, -1 - indices)
        batch_x, batch_y, weight = tf.nest.map_structure(
            lambda values: None if values is None else tf.gather(values, places), tensors
        )
        weight = tf.nest.map_structure(lambda w: None if w is None else w * mask, weight)
        if rows_per_user is not None:
            mask = tf.reshape(mask, (-1, rows_per_user))
        return batch_x, batch_y, RowInfo(mask, weight)

    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = False  # they copy the tensors
    return (
        tf.data.Dataset.from_generator(draws, output_signature=tf.TensorSpec([rows], tf.int64))
        # Captures the tensors: as constants they could not exceed 2 GB.
        .map(gather, num_parallel_calls=tf.data.AUTOTUNE)
        .apply(tf.data.experimental.assert_cardinality(steps))
        .prefetch(tf.data.AUTOTUNE)
        .with_options(options)
    )


def _padded(sampling):
    """The sampling of batches that are padded: without their `RowInfo`, training refuses them."""
    return dataclasses.replace(sampling, is_padded=True)


def _root(name, seed):
    """Where a seed is given, the generator of all draws; then a warning."""
    if seed is None:
        return None
    warnings.warn(
        f"{name} got seed={seed}: whoever knows the seed knows who is in which batch, and against "
        "them sampling amplifies nothing. Leave seed=None outside of tests.",
        stacklevel=3,
    )
    worker = place()[0]
    return numpy_generator([seed, worker] if worker else seed)


def _shared_seed():
    """A fresh secret seed, the same on all workers."""
    return int.from_bytes(of_chief(secrets.token_bytes(16)), "big")
