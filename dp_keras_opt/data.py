"""Batches whose sampling is known, so that the accountant is told the truth about it.

A privacy guarantee depends on how examples get into batches. `poisson_batches` samples them the
way the accountant assumes, and says so; `assume_sampling` carries the word of a user who samples.
Both give `Batches`, which `DPModel.fit` takes.
"""

import dataclasses
import numbers
import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from dp_keras_opt.accounting.sampling import Sampling
from dp_keras_opt.noise.entropy import numpy_generator


class Rows(NamedTuple):
    """The third element of each `(x, y, rows)` batch: which rows count, and how much.

    `DPModel` lets `mask` weight the loss and *all* metrics. Keras would count padding in those
    that are not weighted.
    """

    mask: Any  # float32 [rows], 1 for an example and 0 for padding
    sample_weight: Any = None  # None, or the user's weights: float32 [rows], or a structure of it
    public: Any = None  # None, or float32 [rows]: 1 / their number for rows declared public, else 0


@dataclasses.dataclass(frozen=True, eq=False)
class Batches:
    """A data set of batches, with the statement of how they were sampled.

    It exists because attributes set on a `tf.data.Dataset` are lost by its `map`, `prefetch` and
    `repeat`. To process batches further, replace the data set and keep the statement:
    `dataclasses.replace(batches, dataset=batches.dataset.map(augment))`. Only what keeps each
    batch as it is may follow the sampling: `cache` would repeat the same draws in every epoch,
    `unbatch` and `shuffle` would mix them, and the statement would be false.

    Attributes:
        dataset: what `keras.Model.fit` takes.
        sampling: the `dp.accounting.Sampling`.
        physical_batch_size: the number of rows to process at a time, of which the rows of every
            batch are a multiple; or None: all at once.
        steps_per_epoch: the number of batches in an iteration, or None: unknown.
    """

    dataset: Any = dataclasses.field(repr=False)
    sampling: Sampling
    physical_batch_size: int | None = None
    steps_per_epoch: int | None = None

    def __iter__(self):
        return iter(self.dataset)

    def __len__(self):
        if self.steps_per_epoch is None:
            raise TypeError("The number of batches is not known.")
        return self.steps_per_epoch

    def __bool__(self):
        return True  # not len(self), which may be unknown


def poisson_batches(
    data,
    batch_size,
    steps_per_epoch=None,
    *,
    physical_batch_size=None,
    class_weight=None,
    adjacency="add_or_remove_one",
    unit="example",
    seed=None,
    max_bytes=4 * 2**30,
):
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
            such *examples*, not batches, which is read into memory once. Floating-point arrays are
            cast to `keras.config.floatx()`, as by Keras. `sample_weight`: [n], or a structure of
            such arrays for several outputs.
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
        max_bytes: the most memory that the data may take. Reading a `tf.data.Dataset` takes up to
            twice as much for a moment.

    Returns:
        `Batches` of `(x, y, Rows)`. In the element spec the first dimension of all tensors is
        None, or `physical_batch_size` if that is n or more; all others are static.

    Raises:
        ValueError, TypeError: for arguments out of range or of another type, and for data that
            are empty, of unequal lengths, infinite, batched or larger than `max_bytes`.
    """
    examples, n = _examples(data, class_weight, max_bytes)
    batch_size = _integer("batch_size", batch_size, at_most=n)
    if steps_per_epoch is None:
        steps_per_epoch = -(-n // batch_size)
    if physical_batch_size is None:
        physical_batch_size = 8 * int(np.ceil(min(batch_size + 2 * batch_size**0.5, n) / 8))
    steps_per_epoch = _integer("steps_per_epoch", steps_per_epoch)
    physical_batch_size = _integer("physical_batch_size", physical_batch_size)
    if seed is not None:
        warnings.warn(
            f"poisson_batches got seed={seed}: whoever knows the seed knows which examples are in "
            "which batch, and against them sampling amplifies nothing. Leave seed=None outside of "
            "tests.",
            stacklevel=2,
        )
    root = None if seed is None else numpy_generator(seed)

    def draws():
        # A seeded iteration has a stream of its own: how far an earlier one was prefetched before
        # it was abandoned is a matter of timing, and must not change the draws of this one.
        rng = numpy_generator() if root is None else root.spawn(1)[0]
        for _ in range(steps_per_epoch):
            yield _padded_draw(rng, n, batch_size, physical_batch_size)

    rows = physical_batch_size if physical_batch_size >= n else None
    dataset = _gathered(examples, draws, rows, steps_per_epoch)
    sampling = Sampling.poisson(n, batch_size, adjacency=adjacency, unit=unit)
    return Batches(dataset, sampling, physical_batch_size, steps_per_epoch)


def fixed_order_epochs(
    data,
    batch_size,
    *,
    drop_remainder=False,
    class_weight=None,
    adjacency="replace_one",
    unit="example",
    max_bytes=4 * 2**30,
):
    """Epochs over data that fit in memory, in one order: for correlated noise.

    The order is drawn once; in every epoch each example comes at the same step, so that the steps
    it takes part in are exactly an epoch's length apart. An incomplete last batch is padded.

    Args:
        data, class_weight, adjacency, unit, max_bytes: as for `poisson_batches`.
        batch_size: examples in a batch, from 1 to n.
        drop_remainder: whether an incomplete last batch is left out.

    Returns:
        `Batches` of `(x, y, Rows)`, an epoch in each iteration.

    Raises:
        ValueError, TypeError: as `poisson_batches`.
    """
    examples, n = _examples(data, class_weight, max_bytes)
    batch_size = _integer("batch_size", batch_size, at_most=n)
    sampling = Sampling.fixed_order(
        n, batch_size, adjacency, unit=unit, drop_remainder=drop_remainder
    )
    steps = sampling.steps_per_epoch
    order = np.full(steps * batch_size, -1, np.int64)
    order[:n] = numpy_generator().permutation(n)[: len(order)]

    def epoch():
        yield from order.reshape(steps, batch_size)

    dataset = _gathered(examples, epoch, batch_size, steps)
    return Batches(dataset, sampling, batch_size, steps)


def with_public(private, public, public_batch_size=None):
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
    x, y, _ = _tensors(public, max_bytes=2**40)
    count = len(keras.tree.flatten(x)[0])
    size = count if public_batch_size is None else public_batch_size
    size = _integer("public_batch_size", size, at_most=count)
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
        mine = keras.tree.map_structure(lambda t: tf.gather(t, chosen), (x, y))
        number = tf.shape(keras.tree.flatten(x_private)[0])[0]
        if not isinstance(rows, Rows):
            rows = Rows(tf.ones((number,)), rows)

        def append(private_part, public_part):
            return tf.concat([private_part, public_part], axis=0)

        joined = keras.tree.map_structure(append, (x_private, y_private), mine)
        weight = keras.tree.map_structure(
            lambda w: None if w is None else append(w, tf.ones((size,), w.dtype)),
            rows.sample_weight,
        )
        share = append(tf.zeros((number,)), tf.fill((size,), 1.0 / size))
        return (*joined, Rows(append(rows.mask, tf.zeros((size,))), weight, share))

    return dataclasses.replace(private, dataset=private.dataset.map(join))


def assume_sampling(data, sampling):
    """Batches that the user samples, with the user's word for how.

    The library cannot check that word, and the privacy guarantee rests on it: if the examples get
    into batches in another way, the reported ε is wrong.

    Args:
        data: batches as `keras.Model.fit` takes them: a `tf.data.Dataset`, a
            `keras.utils.PyDataset`, or a generator of `(x, y)` or `(x, y, sample_weight)`.
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
            f"`data` states its sampling already: {data!r}. To process it further, use "
            "dataclasses.replace(batches, dataset=...)."
        )
    no_batches = str | bytes | tuple | list | dict | np.ndarray | tf.Tensor
    if isinstance(data, no_batches) or not isinstance(data, Iterable | keras.utils.PyDataset):
        raise TypeError(
            "`data` must be batches: a tf.data.Dataset, a keras.utils.PyDataset or a generator. "
            f"Received: {type(data).__name__}. For arrays, use `dp.data.poisson_batches`."
        )
    size = _fixed_batch_size(data)
    if size is not None and sampling.kind == "poisson":
        warnings.warn(
            f"`sampling` is Poisson, but `data` has batches of exactly {size} rows: batches of a "
            "fixed size are not Poisson, and the reported ε would be wrong. Use "
            "`dp.data.poisson_batches`, or state the sampling that takes place.",
            stacklevel=2,
        )
    elif size is not None and size != sampling.batch_size:
        raise ValueError(
            f"`sampling` states batches of {sampling.batch_size} examples, but those of `data` "
            f"have {size}. Make them agree."
        )
    try:
        steps = data.num_batches if isinstance(data, keras.utils.PyDataset) else len(data)
    except (TypeError, NotImplementedError):  # infinite, unknown or a generator
        steps = None
    return Batches(data, sampling, steps_per_epoch=steps)


def _gathered(tensors, draws, rows, steps):
    """The data set of batches whose examples `draws` yields as indices, -1 for padding.

    Args:
        tensors: (x, y, sample_weight).
        draws: function that gives an iterator of int64 arrays.
        rows: their length, where it is always the same.
        steps: how many there are.
    """

    def gather(indices):
        mask = tf.cast(indices >= 0, tf.float32)
        batch_x, batch_y, weight = tf.nest.map_structure(
            lambda values: None if values is None else tf.gather(values, tf.maximum(indices, 0)),
            tensors,
        )
        weight = tf.nest.map_structure(lambda w: None if w is None else w * mask, weight)
        return batch_x, batch_y, Rows(mask, weight)

    return (
        tf.data.Dataset.from_generator(draws, output_signature=tf.TensorSpec([rows], tf.int64))
        .map(gather)  # captures the tensors: as constants they could not exceed 2 GB
        .apply(tf.data.experimental.assert_cardinality(steps))
        .prefetch(tf.data.AUTOTUNE)
    )


def _padded_draw(rng, n, batch_size, block):
    """The indices of one Poisson draw, padded with -1 to a multiple of `block`.

    n independent coins with probability q show heads Binomial(n, q) times and, given that number,
    on every subset of that size with equal probability. So drawing the number and then a uniform
    subset is the same distribution, without n random numbers a step.
    """
    size = rng.binomial(n, batch_size / n)
    indices = np.full(block * max(1, -(-size // block)), -1, np.int64)
    indices[:size] = rng.choice(n, size, replace=False, shuffle=False)
    return indices


def _examples(data, class_weight, max_bytes):
    """((x, y, sample_weight) as tensors, their number), class weights multiplied in."""
    max_bytes = _integer("max_bytes", max_bytes)
    if isinstance(data, tf.data.Dataset):
        data = _read(data, max_bytes)
    x, y, sample_weight = _tensors(data, max_bytes)
    if class_weight is not None:
        sample_weight = _weights_of_classes(y, class_weight, sample_weight)
    return (x, y, sample_weight), len(keras.tree.flatten(x)[0])


def _read(dataset, max_bytes):
    """A finite data set of examples as a tuple of structures of NumPy arrays."""
    spec, n = dataset.element_spec, int(dataset.cardinality())
    _check_tuple(spec)
    if n == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            "`data` is an infinite data set, but the probability of an example is batch_size / n. "
            "Remove `repeat()`, or sample batches yourself and use `dp.data.assume_sampling`."
        )
    leaves = tf.nest.flatten(spec)
    if not all(isinstance(leaf, tf.TensorSpec) for leaf in leaves):
        raise TypeError(f"`data` must have dense examples: pad them. Received: {spec}")
    if all(leaf.shape.rank and leaf.shape[0] is None for leaf in leaves):
        raise ValueError(
            f"`data` must be examples, but looks like batches: {spec}. Call `.unbatch()`, or state "
            "the shape of an example with `tf.ensure_shape` in a `map`."
        )
    chunks, rows, size = [], 0, 0
    try:
        for chunk in dataset.batch(128).as_numpy_iterator():
            chunks.append(tf.nest.map_structure(_as_floatx, chunk))
            rows += len(tf.nest.flatten(chunk)[0])
            size += _nbytes(chunks[-1])
            _check_size(size if n < 0 else size * n // rows, max_bytes)
    except tf.errors.InvalidArgumentError as error:
        raise ValueError(
            "`data` must have examples of equal shape: pad them or, if they are batches, call "
            f"`.unbatch()`. TensorFlow says: {error.message}"
        ) from error
    if not chunks:
        raise ValueError("`data` is empty. Received: a data set without examples.")
    return tf.nest.map_structure(lambda *parts: np.concatenate(parts), *chunks)


def _tensors(data, max_bytes):
    """`(x, y, sample_weight)` as structures of tensors of equal length; the last may be None."""
    _check_tuple(data)
    names = ("x", "y", "sample_weight") if len(data) == 3 and data[2] is not None else ("x", "y")
    # Lists become tuples, as in Keras: tf.data takes a list for one tensor.
    data = dict(zip(names, keras.tree.lists_to_tuples(data), strict=False))
    data = {
        name: tf.nest.map_structure(lambda leaf, name=name: _array(name, leaf), structure)
        for name, structure in data.items()
    }
    lengths = {name: [len(a) for a in tf.nest.flatten(s)] for name, s in data.items()}
    distinct = set().union(*lengths.values())
    if not all(lengths.values()) or 0 in distinct:
        raise ValueError(f"`data` is empty. Received lengths: {lengths}")
    if len(distinct) > 1:
        raise ValueError(f"`data` must have arrays of equal length. Received lengths: {lengths}")
    _check_size(_nbytes(data), max_bytes)
    with tf.device("CPU:0"):  # where tf.data gathers, also beside a GPU
        data = tf.nest.map_structure(tf.convert_to_tensor, data)
    return data["x"], data["y"], data.get("sample_weight")


def _array(name, value):
    """One leaf of the data as a NumPy array with a first dimension."""
    array = _as_floatx(np.asarray(value))
    is_object = array.dtype == object and not all(isinstance(v, str | bytes) for v in array.flat)
    if array.ndim == 0 or is_object:
        raise TypeError(
            f"`{name}` must be a dense array of numbers or strings with the examples along its "
            f"first dimension, or a structure of such. Received: {type(value).__name__}"
        )
    if name == "sample_weight":
        array = array.astype(np.float32)
        if array.ndim != 1 or not np.isfinite(array).all():
            raise ValueError(
                "`sample_weight` must have one finite number for each example. Received: shape "
                f"{array.shape}, of which {np.sum(~np.isfinite(array))} are not finite"
            )
    return array


def _as_floatx(array):
    return array.astype(keras.config.floatx()) if array.dtype.kind == "f" else array


def _nbytes(structure):
    arrays = tf.nest.flatten(structure)
    return sum(a.nbytes + (sum(map(len, a.flat)) if a.dtype == object else 0) for a in arrays)


def _weights_of_classes(y, class_weight, sample_weight):
    """The weight of each example's class, times its `sample_weight` where that is given."""
    if not isinstance(class_weight, dict) or not all(
        isinstance(w, numbers.Real) and np.isfinite(w) for w in class_weight.values()
    ):
        raise TypeError(
            f"`class_weight` must be a dict from class to finite weight. Received: {class_weight!r}"
        )
    if tf.nest.is_nested(y) or tf.nest.is_nested(sample_weight):
        raise ValueError(
            "`class_weight` needs one output and one array of weights. Received: a structure of y "
            "or of `sample_weight`. Put the class weights into `sample_weight` instead."
        )
    labels = y.numpy()
    if labels.ndim == 2:
        labels = labels.argmax(axis=1) if labels.shape[1] > 1 else labels[:, 0]
    if labels.ndim != 1 or labels.dtype.kind not in "biuf":
        raise ValueError(
            "`class_weight` needs integer classes of shape [n] or [n, 1], or one-hot classes of "
            f"shape [n, classes]. Received: y of shape {y.shape} and dtype {y.dtype.name}"
        )
    classes, index = np.unique(labels.round().astype(np.int64), return_inverse=True)
    weights = np.array([class_weight.get(int(c), 1.0) for c in classes], np.float32)[index]
    return tf.convert_to_tensor(weights if sample_weight is None else weights * sample_weight)


def _fixed_batch_size(data):
    """The static number of examples in all batches of a `tf.data.Dataset`, if there is one."""
    spec = getattr(data, "element_spec", None)
    if isinstance(spec, tuple) and any(isinstance(part, Rows) for part in spec):
        return None  # the rows are fixed, the examples among them are not
    sizes = {leaf.shape[0] for leaf in tf.nest.flatten(spec) if getattr(leaf, "shape", ())}
    return sizes.pop() if len(sizes) == 1 else None


def _check_tuple(data):
    if not isinstance(data, tuple) or len(data) not in (2, 3):
        what = f"{len(data)} elements" if isinstance(data, tuple) else type(data).__name__
        raise TypeError(
            "`data` must be a tuple (x, y) or (x, y, sample_weight), or a tf.data.Dataset of "
            f"such. Received: {what}. Without targets, as in an autoencoder, use (x, x)."
        )


def _check_same_form(ours, theirs):
    if ours.dtype != theirs.dtype or not ours.shape[1:].is_compatible_with(theirs.shape[1:]):
        raise ValueError("The shapes or the types of the examples differ.")


def _integer(name, value, at_most=None):
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"`{name}` must be an integer. Received: {value!r}")
    if value < 1 or (at_most is not None and value > at_most):
        limits = "at least 1" if at_most is None else f"from 1 to the number of examples, {at_most}"
        raise ValueError(f"`{name}` must be {limits}. Received: {value}")
    return int(value)


def _check_size(size, max_bytes):
    if size > max_bytes:
        raise ValueError(
            f"`data` takes at least {size:,} bytes, but max_bytes={max_bytes:,}. Raise it if there "
            "is memory, or sample batches yourself and use `dp.data.assume_sampling`."
        )
