"""Batches whose sampling is known, so that the accountant is told the truth about it.

A privacy guarantee depends on how examples get into batches. `poisson_batches` samples them the
way the accountant assumes, and says so; `assume_sampling` carries the word of a user who samples.
Both give `Batches`, which `DPModel.fit` takes. Made within the scope of a
`MultiWorkerMirroredStrategy`, they are this worker's part of batches that all workers share.
"""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf
from keras.src.trainers import data_adapters

from dp_keras_opt import arrays, replicas
from dp_keras_opt import users as by_user
from dp_keras_opt.accounting.sampling import Sampling
from dp_keras_opt.checks import whole_number
from dp_keras_opt.noise.entropy import numpy_generator
from dp_keras_opt.types import Adjacency

__all__ = [
    "Batches",
    "Rows",
    "assume_sampling",
    "cyclic_poisson",
    "fixed_order_epochs",
    "poisson_batches",
    "poisson_users",
    "with_public",
]


class Rows(NamedTuple):
    """The third element of each `(x, y, rows)` batch: which rows count, and how much.

    `DPModel` lets `mask` weight the loss and *all* metrics. Keras would count padding in those
    that are not weighted. A mask [users, K] says that of the users·K rows each K consecutive ones
    are those of one user, and are clipped as one.
    """

    mask: Any  # float32 [rows] or [users, K], 1 for an example and 0 for padding
    sample_weight: Any = None  # None, or the user's weights: float32 [rows], or a structure of it
    public: Any = None  # None, or float32 [rows]: 1 / their number for rows declared public, else 0


#: What is said where padding could no longer be told from data.
LOST_ROWS = (
    "The batches are padded, and what says which of their rows are padding is lost: the Rows, the "
    "third element of each batch. Copies of an example would count as data, and one example would "
    "move the sum by many times the clip norm at an unchanged ε. Pass the Rows on as they are; to "
    "change examples on the way, use batches.map(lambda x, y: ...), which keeps them."
)


@dataclasses.dataclass(frozen=True, eq=False)
class Batches:
    """A data set of batches, with the statement of how they were sampled.

    It exists because attributes set on a `tf.data.Dataset` are lost by its `map`, `prefetch` and
    `repeat`. To change examples on the way, as for augmentation, call `map`. Whoever replaces the
    data set (`dataclasses.replace(batches, dataset=...)`) keeps each batch as it is, its `Rows`
    included: `cache` would repeat the same draws in every epoch, `unbatch` and `shuffle` would mix
    them, and the statement would be false.

    Attributes:
        dataset: what `keras.Model.fit` takes.
        sampling: the `dp.accounting.Sampling`.
        physical_batch_size: the number of rows to process at a time, of which the rows of every
            batch are a multiple; or None: all at once.
        steps_per_epoch: the number of batches in an iteration, or None: unknown.
        arrangement: the number that the order, or the groups, of the examples were drawn from; to
            be kept as secret as the noise. None where there is neither.
        workers: how many processes take part in each batch, of which `dataset` has the rows of
            this one.
    """

    dataset: Any = dataclasses.field(repr=False)
    sampling: Sampling
    physical_batch_size: int | None = None
    steps_per_epoch: int | None = None
    arrangement: int | None = dataclasses.field(default=None, repr=False)
    workers: int = 1

    def map(self, function: Callable[[Any, Any], tuple[Any, Any]]) -> Batches:
        """The same batches with `function(x, y)` in the place of each example (x, y).

        It is called on every row alone, padding and public rows included, whenever a batch is
        drawn: random augmentation is another each time, and no example can depend on others. Which
        rows count, their weights and the sampling stay as they are.

        Args:
            function: takes x and y of one example, without the dimension of the batch, and returns
                its new x and y, of the same shapes for all examples. It is traced by `tf.data`.

        Raises:
            TypeError: the data is no `tf.data.Dataset`, or `function` does not return (x, y).
        """
        if not isinstance(self.dataset, tf.data.Dataset):
            raise TypeError(
                "map needs batches of a tf.data.Dataset, received those of a "
                f"{type(self.dataset).__name__}. Change the examples where they are made."
            )
        pairs = self.dataset.map(lambda x, y, *rows: (x, y))
        signature = pairs.unbatch().map(function).element_spec  # traced, and never run
        if not isinstance(signature, tuple) or len(signature) != 2:
            raise TypeError(
                f"function(x, y) must return a tuple (x, y) of one example; it returns {signature}."
            )

        def each(x, y, *rows):
            mapped = tf.map_fn(lambda pair: function(*pair), (x, y), fn_output_signature=signature)
            return (*mapped, *rows)

        mapped = self.dataset.map(each, num_parallel_calls=tf.data.AUTOTUNE)
        return dataclasses.replace(self, dataset=mapped.prefetch(tf.data.AUTOTUNE))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)

    def __len__(self) -> int:
        if self.steps_per_epoch is None:
            raise TypeError("The number of batches is not known.")
        return self.steps_per_epoch

    def __bool__(self):
        return True  # not len(self), which may be unknown


def poisson_batches(
    data: tuple[Any, ...] | tf.data.Dataset,
    batch_size: int,
    steps_per_epoch: int | None = None,
    *,
    physical_batch_size: int | None = None,
    class_weight: Mapping[int, float] | None = None,
    adjacency: Adjacency = "add_or_remove_one",
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

    Guarantee: batches are drawn as `.sampling` of the result states, with entropy of the operating
    system, anew in each iteration: no epoch repeats an earlier one.

    Args:
        data: `(x, y)` or `(x, y, sample_weight)` of arrays with equal first dimension n, where x
            and y may be nested dicts, tuples or lists of arrays; or a finite `tf.data.Dataset` of
            such *examples*, not batches, which is read into memory once: random augmentation in it
            would stay what it was then (call `map` on the result instead). Floating-point arrays
            are cast to `keras.config.floatx()`, as by Keras. `sample_weight`: [n], or a structure
            of such arrays for several outputs. Of arrays of numbers one copy is made.
        batch_size: expected number of examples in a batch, from 1 to n.
        steps_per_epoch: number of batches in each iteration. Default: ceil(n / batch_size).
        physical_batch_size: rows to process at a time. Default: `batch_size` plus two standard
            deviations, rounded up to a multiple of 8, so that most draws need one block.
        class_weight: dict from class to weight, as in `keras.Model.fit` (which refuses it beside
            data that yield weights), for one output of integer or one-hot classes. Classes left
            out weigh 1. Weights computed from private class counts reveal them: use public ones.
        adjacency, unit: see `dp.accounting.Sampling`.
        seed: None, or an integer for reproducible batches. Whoever knows the seed knows who is in
            which batch, so that amplification by sampling is void; a warning says so.
        max_bytes: the most memory that the copy of the data may take. Arrays that would take more
            are refused before they are read.

    Returns:
        `Batches` of `(x, y, Rows)`. In the element spec the first dimension of all tensors is
        None, or `physical_batch_size` if that is n or more; all others are static.

    Raises:
        ValueError, TypeError: for arguments out of range or of another type, and for data that
            are empty, of unequal lengths, infinite, batched or larger than `max_bytes`.
    """
    examples, n = arrays.examples(data, class_weight, max_bytes)
    batch_size = whole_number(batch_size, "batch_size", 1, f"There are {n} examples.", maximum=n)
    sampling = Sampling.poisson(n, batch_size, adjacency=adjacency, unit=unit)
    root = _root("poisson_batches", seed)
    _check_same_data(examples)
    everyone = [np.arange(n)]
    return _poisson(examples, sampling, everyone, steps_per_epoch, physical_batch_size, root)


def poisson_users(
    data: Any,
    users: npt.ArrayLike,
    batch_size: int,
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
    padding, as are users up to the next multiple of the block. `Rows.mask` is [users, K], which
    tells `DPModel` whose the rows are. Metrics are over examples.

    Guarantee: batches are drawn as `.sampling` of the result states, with entropy of the operating
    system, anew in each iteration. The ε is that of all examples of one user together. It takes for
    granted that each person has one id and no two share one; and, as the number of examples
    elsewhere, the number of users is public.

    Args:
        data: `(x, y)` or `(x, y, sample_weight)` of arrays, as for `poisson_batches`; not a
            `tf.data.Dataset`, whose order need not be that of `users`.
        users: [n examples], whose each example is: integers or strings.
        batch_size: expected number of *users* in a batch, from 1 to their number; what the
            optimizer's `batch_size` must be.
        steps_per_epoch: number of batches in each iteration. Default: ceil(n / batch_size).
        examples_per_user: K, chosen without looking at the data. Memory and time go by K rows for
            each user, however many of them are filled.
        physical_batch_size: rows to process at a time, of which whole users are taken, at least
            one. Default: that of `batch_size` plus two standard deviations users.
        class_weight, adjacency, seed, max_bytes: as for `poisson_batches`.
        unit: what a user is called in the statement.

    Returns:
        `Batches` of `(x, y, Rows)`. The first dimension of x and y is users·K.

    Raises:
        ValueError, TypeError: as `poisson_batches`; there is not one id for each example, or ids
            are neither integers nor strings.
    """
    if isinstance(data, tf.data.Dataset):
        raise TypeError(
            "poisson_users needs arrays: the examples of a tf.data.Dataset can come in another "
            "order than their users. Received: a tf.data.Dataset. Read it into arrays first."
        )
    examples, n = arrays.examples(data, class_weight, max_bytes)
    owned = by_user.examples_by_user(users, n)
    batch_size = whole_number(
        batch_size, "batch_size", 1, f"There are {len(owned)} users.", maximum=len(owned)
    )
    most = whole_number(examples_per_user, "examples_per_user")
    sampling = Sampling.poisson(
        len(owned), batch_size, adjacency, unit=unit, examples_per_unit=most
    )
    root = _root("poisson_users", seed)
    _check_same_data((*examples, np.asarray(users)))
    everyone = [np.arange(len(owned))]
    return _poisson(examples, sampling, everyone, steps_per_epoch, physical_batch_size, root, owned)


def cyclic_poisson(
    data: tuple[Any, ...] | tf.data.Dataset,
    batch_size: int,
    groups: int,
    steps_per_epoch: int | None = None,
    *,
    physical_batch_size: int | None = None,
    class_weight: Mapping[int, float] | None = None,
    adjacency: Adjacency = "add_or_remove_one",
    unit: str = "example",
    arrangement: int | None = None,
    max_bytes: int = 4 * 2**30,
) -> Batches:
    """Poisson-sampled batches from groups that take turns: for correlated noise, amplified.

    Each of the n examples is assigned to one of the groups at random, whatever the others are, and
    stays there. At step t each example of group t mod `groups` is in the batch with probability
    `batch_size * groups / n`, independently. So the steps of an example are at least `groups`
    apart: noise of at most so many bands is accounted as amplified by the sampling.

    Guarantee: as `poisson_batches`, in every iteration from the first group on.

    Args:
        data, batch_size, physical_batch_size, class_weight, adjacency, unit, max_bytes: as for
            `poisson_batches`.
        groups: from the bands of the noise to n / batch_size.
        steps_per_epoch: a multiple of `groups`. Default: the least one that is n / batch_size or
            more.
        arrangement: None, or what `DPModel.resume_run` returned, for the groups of that run.

    Returns:
        `Batches` of `(x, y, Rows)`.

    Raises:
        ValueError, TypeError: as `poisson_batches`; too many groups, or `steps_per_epoch` is no
            multiple of them.

    Reference: Choquette-Choo et al., "(Amplified) Banded Matrix Factorization", NeurIPS 2023,
    section 5.
    """
    examples, n = arrays.examples(data, class_weight, max_bytes)
    batch_size = whole_number(batch_size, "batch_size", 1, f"There are {n} examples.", maximum=n)
    groups = whole_number(groups, "groups", 1, f"There are {n} examples.", maximum=n)
    sampling = Sampling.cyclic_poisson(n, batch_size, groups, adjacency, unit=unit)
    if steps_per_epoch is not None and steps_per_epoch % groups:
        raise ValueError(
            f"steps_per_epoch={steps_per_epoch} is not a multiple of groups={groups}: the next "
            "iteration would begin with the first group too soon."
        )
    _check_same_data(examples)
    arrangement = _arrangement(arrangement)
    group = numpy_generator(arrangement).integers(groups, size=n)
    members = [np.flatnonzero(group == turn) for turn in range(groups)]
    batches = _poisson(examples, sampling, members, steps_per_epoch, physical_batch_size)
    return dataclasses.replace(batches, arrangement=arrangement)


def fixed_order_epochs(
    data: tuple[Any, ...] | tf.data.Dataset,
    batch_size: int,
    *,
    drop_remainder: bool = False,
    class_weight: Mapping[int, float] | None = None,
    adjacency: Adjacency = "replace_one",
    unit: str = "example",
    arrangement: int | None = None,
    max_bytes: int = 4 * 2**30,
) -> Batches:
    """Epochs over data that fit in memory, in one order: for correlated noise.

    The order is drawn once; in every epoch each example comes at the same step, so that the steps
    it takes part in are exactly an epoch's length apart. An incomplete last batch is padded.

    Args:
        data, class_weight, adjacency, unit, max_bytes: as for `poisson_batches`.
        batch_size: examples in a batch, from 1 to n.
        drop_remainder: whether an incomplete last batch is left out.
        arrangement: None, or what `DPModel.resume_run` returned, for the order of that run.

    Returns:
        `Batches` of `(x, y, Rows)`, an epoch in each iteration.

    Raises:
        ValueError, TypeError: as `poisson_batches`.
    """
    examples, n = arrays.examples(data, class_weight, max_bytes)
    batch_size = whole_number(batch_size, "batch_size", 1, f"There are {n} examples.", maximum=n)
    sampling = Sampling.fixed_order(
        n, batch_size, adjacency, unit=unit, drop_remainder=drop_remainder
    )
    steps = sampling.steps_per_epoch
    _check_same_data(examples)
    arrangement = _arrangement(arrangement)
    order: np.ndarray = np.full(steps * batch_size, -1, np.int64)
    order[:n] = numpy_generator(arrangement).permutation(n)[: len(order)]
    worker, workers = replicas.place()
    order = np.pad(
        order.reshape(steps, batch_size), [(0, 0), (0, -batch_size % workers)], constant_values=-1
    )[:, worker::workers]
    rows = order.shape[1]

    def epoch():
        yield from order

    dataset = _gathered(examples, epoch, rows, steps)
    return Batches(dataset, _padded(sampling), rows, steps, arrangement, workers)


def with_public(
    private: Batches, public: tuple[Any, Any], public_batch_size: int | None = None
) -> Batches:
    """Adds rows of public data to each private batch, for optimizers that use them.

    Args:
        private: `Batches`, e.g. of `poisson_batches`.
        public: `(x, y)` of arrays shaped like the private examples; data that needs no protection.
        public_batch_size: number of public rows in each batch, drawn without replacement. Default:
            all of them.

    Returns:
        `Batches` whose elements end in the public rows. These are neither clipped nor noised nor
        accounted, have weight 1, and count in no metric.

    Guarantee: none about the public data; every privacy statement says that it was used. Declare
    only data public that is: a user who asks nothing of it, or data that anyone may have.

    Raises:
        ValueError: the structures or shapes do not match those of the private data.
    """
    if not isinstance(private, Batches) or not isinstance(private.dataset, tf.data.Dataset):
        raise ValueError(
            "private must be Batches of a tf.data.Dataset, such as poisson_batches gives; received "
            f"{private!r}."
        )
    x, y, _ = arrays.tensors(public, max_bytes=2**40)
    count = len(keras.tree.flatten(x)[0])
    size = count if public_batch_size is None else public_batch_size
    size = whole_number(
        size, "public_batch_size", 1, f"There are {count} public examples.", maximum=count
    )
    ours = tuple(private.dataset.element_spec[:2])
    theirs = tf.nest.map_structure(lambda t: tf.TensorSpec((None, *t.shape[1:]), t.dtype), (x, y))
    try:
        tf.nest.map_structure(_check_same_form, ours, theirs)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"Public data of the form {theirs} stand beside private data of the form {ours}. Give "
            "both the same form."
        ) from error

    def join(x_private, y_private, rows=None):
        chosen = tf.range(count) if size == count else tf.random.shuffle(tf.range(count))[:size]
        number = tf.shape(keras.tree.flatten(x_private)[0])[0]
        rows = _as_rows(rows, number)
        together = _rows_per_user(rows) or 1  # public rows are no user's, but fill up users' places
        filling = -size % together
        mine = keras.tree.map_structure(
            lambda t: tf.gather(t, tf.pad(chosen, [(0, filling)])), (x, y)
        )

        def append(private_part, public_part):
            return tf.concat([private_part, public_part], axis=0)

        joined = keras.tree.map_structure(append, (x_private, y_private), mine)
        weight = keras.tree.map_structure(
            lambda w: None if w is None else append(w, tf.ones((size + filling,), w.dtype)),
            rows.sample_weight,
        )
        share = tf.pad(tf.fill((size,), 1.0 / (size * private.workers)), [(number, filling)])
        ends = [(0, (size + filling) // together)] + [(0, 0)] * (rows.mask.shape.rank - 1)
        return (*joined, Rows(tf.pad(rows.mask, ends), weight, share))

    return dataclasses.replace(private, dataset=private.dataset.map(join))


def assume_sampling(data: Any, sampling: Sampling) -> Batches:
    """Batches that the user samples, with the user's word for how.

    The library cannot check that word, and the privacy guarantee rests on it: if the examples get
    into batches in another way, the reported ε is wrong.

    Where rows are padded to the longest of their batch (`padded_batch`), with 0, "" or False, the
    model must mask the padding; `fit` refuses it otherwise. A fixed length must not be chosen by
    looking at the data.

    Args:
        data: batches as `keras.Model.fit` takes them: a `tf.data.Dataset`, a
            `keras.utils.PyDataset`, a generator, or a DataLoader of PyTorch or grain; of `(x, y)`
            or `(x, y, sample_weight)`, where `Rows` may stand for the weights. For several
            workers, this one's part of each batch, of examples that no other worker has.
        sampling: the `dp.accounting.Sampling` that takes place.

    Returns:
        `Batches`.

    Raises:
        TypeError: if `sampling` is no `Sampling`, or `data` are no batches, or are `Batches`.
        ValueError: if all batches are of one size, and `sampling` states another.
    """
    if not isinstance(sampling, Sampling):
        raise TypeError(
            "`sampling` must be a dp.accounting.Sampling, such as Sampling.poisson(num_examples, "
            f"batch_size). Received: {sampling!r}"
        )
    if isinstance(data, Batches):
        raise TypeError(
            f"`data` states its sampling already: {data!r}. To change its examples, call its map."
        )
    if not are_batches(data):
        raise TypeError(
            "`data` must be batches that Keras reads: a tf.data.Dataset, a "
            "keras.utils.PyDataset, a generator, or a DataLoader of PyTorch or grain. Received: "
            f"{type(data).__name__}. For one pass over an iterable of batches, give "
            "(batch for batch in data). For arrays, use `dp.data.poisson_batches`."
        )
    workers = replicas.place()[1]
    size = _fixed_batch_size(data)
    if size is not None and sampling.is_poisson:
        warnings.warn(
            f"`sampling` is Poisson, but `data` has batches of exactly {size} rows: batches of a "
            "fixed size are not Poisson, and the reported ε would be wrong. Use "
            "`dp.data.poisson_batches`, or state the sampling that takes place.",
            stacklevel=2,
        )
    elif size is not None and size * workers != sampling.batch_size:
        raise ValueError(
            f"`sampling` states batches of {sampling.batch_size} examples, but those of `data` "
            f"have {size}{f' for each of {workers} workers' if workers > 1 else ''}. Make them "
            "agree."
        )
    steps = number_of_batches(data)
    return Batches(data, sampling, steps_per_epoch=steps, workers=workers)


def are_batches(data):
    """Whether Keras reads batches from such an object."""
    kinds = tf.data.Dataset | keras.utils.PyDataset | types.GeneratorType
    by_name = (
        data_adapters.is_tf_dataset,
        data_adapters.is_torch_dataloader,
        data_adapters.is_grain_dataset,
    )
    return isinstance(data, kinds) or any(is_kind(data) for is_kind in by_name)


def for_keras(data):
    """The data as `keras.Model.fit` takes them."""
    return _PlainRows(data) if isinstance(data, keras.utils.PyDataset) else data


class _PlainRows(keras.utils.PyDataset):
    """A `PyDataset` with `()` for what its `Rows` do not have: Keras has no type for None there."""

    def __init__(self, batches):
        super().__init__(batches.workers, batches.use_multiprocessing, batches.max_queue_size)
        self.batches = batches

    @property
    def num_batches(self):
        return self.batches.num_batches

    def __getitem__(self, index):
        batch = self.batches[index]
        if not isinstance(batch, tuple | list) or not isinstance(batch[-1], Rows):
            return batch
        *others, rows = batch
        return (*others, Rows(*(() if part is None else part for part in rows)))

    def on_epoch_begin(self):
        self.batches.on_epoch_begin()

    def on_epoch_end(self):
        self.batches.on_epoch_end()


def deal(batches, hands):
    """The data set of a `Batches`, each batch dealt out to so many hands in turn.

    All hands are of equal size: padding makes up for the rows that are missing. A user's rows stay
    in one hand.
    """

    def hand(batch, index):
        x, y, rows = keras.utils.unpack_x_y_sample_weight(batch)
        rows = _as_rows(rows, tf.shape(tf.nest.flatten(x)[0])[0])
        together = _rows_per_user(rows) or 1

        def part(tensor, together=together):
            if tensor is None:
                return None
            missing = -tf.shape(tensor)[0] % (hands * together)
            padded = tf.pad(tensor, [(0, missing)] + [(0, 0)] * (tensor.shape.rank - 1))
            places = tf.reshape(tf.range(tf.shape(padded)[0]), (-1, hands, together))
            return tf.gather(padded, tf.reshape(places[:, index], [-1]))

        parts = keras.tree.map_structure(part, (x, y, rows._replace(mask=None)))
        return (*parts[:2], parts[2]._replace(mask=part(rows.mask, 1)))

    def all_hands(*batch):
        indices = tf.data.Dataset.range(hands, output_type=tf.int32)
        return indices.map(lambda index: hand(batch, index))

    return batches.dataset.flat_map(all_hands) if hands > 1 else batches.dataset


def _as_rows(weights, number):
    """The third element of a batch of so many rows, as `Rows`."""
    return weights if isinstance(weights, Rows) else Rows(tf.ones((number,)), weights)


def _rows_per_user(rows):
    """K where `Rows` are K for each user, None where each stands for itself."""
    return rows.mask.shape[1] if rows.mask.shape.rank == 2 else None


def _gathered(tensors, draws, rows, steps, together=None):
    """The data set of batches whose examples `draws` yields as indices.

    Args:
        tensors: (x, y, sample_weight).
        draws: function that gives an iterator of int64 arrays: i for an example, ~i (negative) for
            padding with the values of example i.
        rows: their length, where it is always the same.
        steps: how many there are.
        together: K where each K rows are one user's.
    """

    def gather(indices):
        mask = tf.cast(indices >= 0, tf.float32)
        places = tf.maximum(indices, -1 - indices)
        batch_x, batch_y, weight = tf.nest.map_structure(
            lambda values: None if values is None else tf.gather(values, places), tensors
        )
        weight = tf.nest.map_structure(lambda w: None if w is None else w * mask, weight)
        if together is not None:
            mask = tf.reshape(mask, (-1, together))
        return batch_x, batch_y, Rows(mask, weight)

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


def _poisson(
    examples, sampling, members, steps_per_epoch, physical_batch_size, root=None, owned=None
):
    """`Batches` in which `members[t mod groups]`, arrays of indices, are drawn at step t.

    They are indices of examples or, with `owned`, of users: `owned[user]` are a user's examples.
    """
    n, together = sampling.num_examples, sampling.examples_per_unit or 1
    # Each worker draws from examples of its own: whatever the workers draw, none is drawn twice,
    # and each is drawn independently of all others, as it is by one worker.
    worker, workers = replicas.place()
    members = [turn[worker::workers] for turn in members]
    if steps_per_epoch is None:
        steps_per_epoch = sampling.steps_per_epoch
    if physical_batch_size is None:
        share = sampling.batch_size / workers
        physical_batch_size = together * 8 * int(np.ceil(min(share + 2 * share**0.5, n) / 8))
    steps_per_epoch = whole_number(steps_per_epoch, "steps_per_epoch")
    physical_batch_size = whole_number(physical_batch_size, "physical_batch_size")
    block = max(1, physical_batch_size // together)

    def draws():
        return _draws(sampling, members, steps_per_epoch, block, root, owned)

    rows = block * together if block >= n else None
    dataset = _gathered(examples, draws, rows, steps_per_epoch, sampling.examples_per_unit)
    return Batches(dataset, _padded(sampling), block * together, steps_per_epoch, workers=workers)


def _draws(sampling, members, steps, block, root=None, owned=None):
    """The indices of each step's draw, as `_poisson` says, in blocks of so many units."""
    # A seeded iteration has a stream of its own: how far an earlier one was prefetched before
    # it was abandoned is a matter of timing, and must not change the draws of this one.
    seeded = None if root is None else root.spawn(1)[0]
    for step in range(steps):
        rng = seeded or numpy_generator()  # nothing is kept that a fork of the process could repeat
        drawn = _padded_draw(
            rng, members[step % len(members)], sampling.sampling_probability, block
        )
        if owned is not None:
            drawn = by_user.examples_of(rng, owned, drawn, sampling.examples_per_unit)
        yield drawn


def _padded(sampling):
    """The sampling of batches that are padded: without their `Rows`, training refuses them."""
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
    worker = replicas.place()[0]
    return numpy_generator([seed, worker] if worker else seed)


def _padded_draw(rng, members, probability, block):
    """The indices of one Poisson draw of `members`, padded with -1 to a multiple of `block`.

    n independent coins with probability q show heads Binomial(n, q) times and, given that number,
    on every subset of that size with equal probability. So drawing the number and then a uniform
    subset is the same distribution, without n random numbers a step.
    """
    size = rng.binomial(len(members), probability)
    indices = np.full(block * max(1, -(-size // block)), -1, np.int64)
    indices[:size] = members[rng.choice(len(members), size, replace=False, shuffle=False)]
    return indices


def _arrangement(given):
    """The number that an order is drawn from: a fresh one for all workers, or the one given."""
    if given is not None:
        return given
    return int.from_bytes(replicas.of_chief(secrets.token_bytes(16)), "big")


def _check_same_data(examples):
    """Refuses workers that hold different examples, or in another order.

    They share the examples out by their places, and one could come to two workers.
    """
    if replicas.place()[1] == 1:
        return
    digest = hashlib.blake2b()
    for leaf in tf.nest.flatten(examples):
        if leaf is not None:
            values = np.asarray(leaf)
            digest.update(str(values.shape).encode())
            if values.dtype == object:
                digest.update(repr(values.tolist()).encode())
            else:
                digest.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
    if len(set(replicas.gathered(digest.digest()))) > 1:
        raise ValueError(
            "The workers were given different data, or the same in another order, so that an "
            "example could come to two of them. Load the same arrays on all workers."
        )


def number_of_batches(data):
    """How many batches an iteration over `data` has, None where that is not known, or no end is."""
    try:
        return data.num_batches if isinstance(data, keras.utils.PyDataset) else len(data)
    except (TypeError, NotImplementedError):  # infinite, unknown or a generator
        return None


def is_endless(data):
    """Whether an iteration over `data` is known to have no end."""
    if isinstance(data, tf.data.Dataset):
        return int(data.cardinality()) == tf.data.INFINITE_CARDINALITY
    return isinstance(data, keras.utils.PyDataset) and data.num_batches is None


def check_rows(batches):
    """Refuses batches of a sampler that have lost their `Rows`, which tell padding from data."""
    spec = getattr(batches.dataset, "element_spec", None)
    if batches.physical_batch_size is None or spec is None:
        return
    if not (isinstance(spec, tuple) and len(spec) == 3 and isinstance(spec[2], Rows)):
        raise ValueError(LOST_ROWS)


def _fixed_batch_size(data):
    """The static number of examples in all batches of a `tf.data.Dataset`, if there is one."""
    spec = getattr(data, "element_spec", None)
    if isinstance(spec, tuple) and any(isinstance(part, Rows) for part in spec):
        return None  # the rows are fixed, the examples among them are not
    sizes = {leaf.shape[0] for leaf in tf.nest.flatten(spec) if getattr(leaf, "shape", ())}
    return sizes.pop() if len(sizes) == 1 else None


def _check_same_form(ours, theirs):
    if ours.dtype != theirs.dtype or not ours.shape[1:].is_compatible_with(theirs.shape[1:]):
        raise ValueError("The shapes or the types of the examples differ.")
