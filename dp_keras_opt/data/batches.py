"""Batches that state how they were sampled, so that the accountant is told the truth about it."""

from __future__ import annotations

import dataclasses
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from dp_keras_opt import deprecation
from dp_keras_opt._keras import is_grain_dataset, is_tf_dataset, is_torch_dataloader
from dp_keras_opt.accounting.sampling import Passes, Sampling
from dp_keras_opt.data import failures, fresh_randomness
from dp_keras_opt.data.buckets import Blocks, blocks_of
from dp_keras_opt.data.doubts import is_reshuffled
from dp_keras_opt.data.mapping import writes_variables
from dp_keras_opt.workers import place


class RowInfo(NamedTuple):
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
    "The batches are padded, and what says which of their rows are padding is lost: the RowInfo, "
    "the third element of each batch. Copies of an example would count as data, and one example "
    "would move the sum by many times the clip norm at an unchanged ε. Pass the RowInfo on as it "
    "is; to change examples on the way, use batches.map(lambda x, y: ...), which keeps it."
)


@dataclasses.dataclass(frozen=True, eq=False)
class Batches:
    """A data set of batches, with the statement of how they were sampled.

    It exists because attributes set on a `tf.data.Dataset` are lost by its `map`, `prefetch` and
    `repeat`. To change examples on the way, as for augmentation, call `map`. Whoever replaces the
    data set (`dataclasses.replace(batches, dataset=...)`) keeps each batch as it is, its `RowInfo`
    included: `cache` would repeat the same draws in every epoch, `unbatch` and `shuffle` would mix
    them, and the statement would be false.

    Attributes:
        dataset: what `keras.Model.fit` takes.
        sampling: the `dp.accounting.Sampling`.
        physical_batch_size: the number of rows to process at a time, of which the rows of every
            batch are a multiple; of `Blocks`, those of the last. Or None: all at once.
        steps_per_epoch: the number of batches in an iteration, or None: unknown.
        order_seed: the seed that the order, or the groups, of the examples were drawn from; to be
            kept as secret as the noise. None where there is neither.
        workers: how many processes take part in each batch, of which `dataset` has the rows of
            this one.
        examples: what a sampler of `dp.data` draws from; see `unreadable`. None where the batches
            are somebody's own, as of `assume_sampling`: the sampling is then what is stated.

    Raises:
        ValueError: as `assume_sampling`.
    """

    dataset: Any = dataclasses.field(repr=False)
    sampling: Sampling
    physical_batch_size: int | None = None
    steps_per_epoch: int | None = None
    order_seed: int | None = dataclasses.field(default=None, repr=False)
    workers: int = 1
    examples: Any = dataclasses.field(default=None, repr=False)

    arrangement = deprecation.renamed_attribute("arrangement", "order_seed")

    def __post_init__(self) -> None:
        if self.examples is None and not self.sampling.is_stated:
            _check_stated(self.dataset, self.sampling, stacklevel=5)
            # Past the lock of a frozen class: somebody's word, whoever called the constructor.
            object.__setattr__(self, "sampling", _stated(self.sampling))

    def map(self, function: Callable[[Any, Any], tuple[Any, Any]]) -> Batches:
        """The same batches with `function(x, y)` in the place of each example (x, y).

        It is called on every row alone, padding and public rows included, whenever a batch is
        drawn: random augmentation is another each time, and no example can depend on others. Which
        rows count, their weights and the sampling stay as they are.

        Args:
            function: takes x and y of one example, without the dimension of the batch, and returns
                its new x and y, of the same shapes for all examples. It is traced by `tf.data`.

        Raises:
            TypeError: the data is no `tf.data.Dataset`, or of `Blocks`; or `function` does not
                return (x, y).
        """
        if not isinstance(self.dataset, tf.data.Dataset):
            raise TypeError(
                "map needs batches of a tf.data.Dataset, received those of a "
                f"{type(self.dataset).__name__}. Change the examples where they are made."
            )
        if isinstance(self.dataset.element_spec, Blocks):
            raise TypeError(
                "These batches are put into buckets, and their examples padded already. Give the "
                "function as map= of the sampler, which calls it on each example before that."
            )
        pair = self.dataset.map(lambda x, y, *rows: (x, y)).unbatch().element_spec
        one = fresh_randomness.traced(function, *pair)
        made = one.structured_outputs
        if not isinstance(made, tuple) or len(made) != 2:
            found = tf.nest.map_structure(tf.type_spec_from_value, made)
            raise TypeError(
                f"function(x, y) must return a tuple (x, y) of one example; it returns {found}."
            )
        signature = [tf.type_spec_from_value(leaf) for leaf in _present(made)]

        def each(*leaves):
            return tf.map_fn(
                lambda row: _present(one(*_filled(pair, row))),
                leaves,
                fn_output_signature=signature,
            )

        traced = tf.function(each).get_concrete_function(*_present(self.dataset.element_spec[:2]))
        at_once = None if writes_variables(traced.graph) else tf.data.AUTOTUNE
        held = fresh_randomness.is_drawn_in_operations(traced)
        run = _called_from_python(traced) if held else traced
        mapped = self.dataset.map(
            lambda x, y, *rows: (*_filled(made, run(*_present((x, y)))), *rows),
            num_parallel_calls=at_once,
        )
        return dataclasses.replace(self, dataset=mapped.prefetch(2))

    @property
    def unreadable(self) -> dict[int, str]:
        """The records that could not be read and contributed nothing: by index, and why.

        Of `skip_unreadable=True`, and as far as they were drawn. Private, as the data are.
        """
        return dict(getattr(self.examples, "unreadable", {}))

    def __iter__(self) -> Iterator[Any]:
        passes = self.sampling.passes
        counted = self.examples is None  # a sampler counts its passes itself, whoever reads them
        with failures.as_raised():
            for number, batch in enumerate(self.dataset):
                if passes and counted and number % self.sampling.period == 0:
                    passes.begin()
                if passes:
                    passes.handed += 1
                yield batch

    def __len__(self) -> int:
        if self.steps_per_epoch is None:
            raise TypeError("The number of batches is not known.")
        return self.steps_per_epoch

    def __bool__(self):
        return True  # not len(self), which may be unknown


def _present(structure):
    """The leaves of a structure of tensors, or of specs, but for those that are None."""
    return [leaf for leaf in tf.nest.flatten(structure) if not _is_none(leaf)]


def _filled(structure, leaves):
    """The structure with these leaves, and None where it has that."""
    rest = iter(leaves)
    return tf.nest.map_structure(lambda old: None if _is_none(old) else next(rest), structure)


def _is_none(leaf):
    return leaf is None or isinstance(leaf, type(tf.type_spec_from_value(None)))


def _called_from_python(traced):
    """The same traced function for `tf.data`, which calls it from Python."""
    specs = [tf.type_spec_from_value(tensor) for tensor in traced.structured_outputs]

    def run(*leaves):
        found = tf.py_function(lambda *given: traced(*given), leaves, specs)
        for tensor, spec in zip(found, specs, strict=True):
            if isinstance(spec, tf.TensorSpec):
                tensor.set_shape(spec.shape)
        return found

    return run


Batches.__init__ = deprecation.renamed_arguments(  # type: ignore[method-assign]
    arrangement="order_seed"
)(Batches.__init__)


def assume_sampling(data: Any, sampling: Sampling) -> Batches:
    """Batches that the user samples, with the user's word for how.

    The library cannot check that word, and the privacy guarantee rests on it: if the examples get
    into batches in another way, the reported ε is wrong. The privacy statement says whose word it
    is.

    Where rows are padded to the longest of their batch (`padded_batch`), with 0, "" or False, the
    model must mask the padding; `fit` refuses it otherwise. A fixed length must not be chosen by
    looking at the data.

    Args:
        data: batches as `keras.Model.fit` takes them: a `tf.data.Dataset`, a
            `keras.utils.PyDataset`, a generator, or a DataLoader of PyTorch or grain; of `(x, y)`
            or `(x, y, sample_weight)`, where `RowInfo` may stand for the weights. For several
            workers, this one's part of each batch, of examples that no other worker has.
        sampling: the `dp.accounting.Sampling` that takes place.

    Returns:
        `Batches`.

    Raises:
        TypeError: if `sampling` is no `Sampling`, or `data` are no batches, or are `Batches`.
        ValueError: if all batches are of one size, and `sampling` states another; if it is that of
            batches whose sizes change; if it states one order, and the data may come in another
            in each pass.
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
    _check_stated(data, sampling)
    steps = number_of_batches(data)
    return Batches(data, _stated(sampling), steps_per_epoch=steps, workers=place()[1])


def _stated(sampling):
    """The sampling as somebody's word, with a count of its own for the passes over their data."""
    passes = Passes() if sampling.in_passes else sampling.passes
    return dataclasses.replace(sampling, is_stated=True, passes=passes)


def _check_stated(data, sampling, stacklevel=3):
    """Refuses what data that are somebody's own show to be sampled otherwise."""
    if sampling.passes and sampling.batch_sizes:
        raise ValueError(
            "`sampling` belongs to batches whose expected sizes follow the steps of their own "
            "passes. Pass those batches to fit, changed by their map where need be, or state "
            "Sampling.poisson(num_examples, batch_sizes) of batches of your own."
        )
    if sampling.has_one_order and is_reshuffled(data):
        raise ValueError(
            "`sampling` states one order for all passes, but `data` may come in another in each, "
            "so that an example would come back after fewer steps than is accounted: they are "
            "shuffled anew, not read deterministically, or have an on_epoch_begin or on_epoch_end "
            "of their own. Call shuffle(..., reshuffle_each_iteration=False), leave out "
            "deterministic=False, or state Sampling.shuffled."
        )
    workers = place()[1]
    size = _fixed_batch_size(data)
    if size is not None and sampling.varies_in_size:
        warnings.warn(
            f"Batches of {sampling.kind} sampling vary in size, but those of `data` have exactly "
            f"{size} rows: the reported ε would be wrong. Use `dp.data.poisson_batches` or "
            "`balls_in_bins`, or state the sampling that takes place.",
            stacklevel=stacklevel,
        )
    elif size is not None and size * workers != sampling.batch_size:
        raise ValueError(
            f"`sampling` states batches of {sampling.batch_size} examples, but those of `data` "
            f"have {size}{f' for each of {workers} workers' if workers > 1 else ''}. Make them "
            "agree."
        )


def are_batches(data):
    """Whether Keras reads batches from such an object."""
    kinds = tf.data.Dataset | keras.utils.PyDataset | types.GeneratorType
    by_name = (
        is_tf_dataset,
        is_torch_dataloader,
        is_grain_dataset,
    )
    return isinstance(data, kinds) or any(is_kind(data) for is_kind in by_name)


def for_keras(data):
    """The data as `keras.Model.fit` takes them."""
    return _WithoutNone(data) if isinstance(data, keras.utils.PyDataset) else data


class _WithoutNone(keras.utils.PyDataset):
    """A `PyDataset` with `()` for what its `RowInfo` lacks: Keras has no type for None there."""

    def __init__(self, batches):
        super().__init__(batches.workers, batches.use_multiprocessing, batches.max_queue_size)
        self.batches = batches

    @property
    def num_batches(self):
        return self.batches.num_batches

    def __getitem__(self, index):
        batch = self.batches[index]
        if not isinstance(batch, tuple | list) or not isinstance(batch[-1], RowInfo):
            return batch
        *others, rows = batch
        return (*others, RowInfo(*(() if part is None else part for part in rows)))

    def on_epoch_begin(self):
        self.batches.on_epoch_begin()

    def on_epoch_end(self):
        self.batches.on_epoch_end()


def row_info(weights, number):
    """The third element of a batch of that many rows, as `RowInfo`."""
    return weights if isinstance(weights, RowInfo) else RowInfo(tf.ones((number,)), weights)


def rows_per_user(rows):
    """K where the rows are K for each user, None where each stands for itself."""
    return rows.mask.shape[1] if rows.mask.shape.rank == 2 else None


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
    """Refuses batches of a sampler that have lost their `RowInfo`, which tell padding from data."""
    spec = getattr(batches.dataset, "element_spec", None)
    if batches.physical_batch_size is None or spec is None:
        return
    for part in blocks_of(spec):
        if not (isinstance(part, tuple) and len(part) == 3 and isinstance(part[2], RowInfo)):
            raise ValueError(LOST_ROWS)


def _fixed_batch_size(data):
    """The static number of examples in all batches of a `tf.data.Dataset`, if there is one."""
    spec = getattr(data, "element_spec", None)
    if isinstance(spec, Blocks):
        return None
    if isinstance(spec, tuple) and any(isinstance(part, RowInfo) for part in spec):
        return None  # the rows are fixed, the examples among them are not
    sizes = {leaf.shape[0] for leaf in tf.nest.flatten(spec) if getattr(leaf, "shape", ())}
    return sizes.pop() if len(sizes) == 1 else None
