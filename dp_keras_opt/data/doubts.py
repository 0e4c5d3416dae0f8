"""What data seem to be, and must not be: batches, examples several times, or shuffled anew."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dp_keras_opt.clipping.graphs import nodes
from dp_keras_opt.data.sources.stacking import without_lists


def refuse_copies(data: Any) -> None:
    """Refuses data in which `repeat` or a list of indices has the examples several times.

    n would be that many times too large, and each copy would be drawn, and clipped, by itself.
    What is copied otherwise cannot be seen.

    Raises:
        ValueError: it is such data, or several data sets under their names.
    """
    if type(data).__module__.startswith("datasets.") and isinstance(data, dict):
        raise ValueError(
            f"`data`, a {type(data).__name__}, has several parts: {list(data)}. Give one of them, "
            "such as data['train']."
        )
    if _is_repeated(data):
        raise ValueError(
            f"`data`, a {type(data).__name__}, has its examples several times, by `repeat` or by "
            "indices that come twice: the probability of an example would be batch_size / n of an "
            "n that is too large, and each of its copies would be drawn by itself. Leave it out: "
            "`epochs` and `steps_per_epoch` say how long a training is."
        )


def _is_repeated(data):
    package = type(data).__module__.partition(".")[0]
    if package == "datasets" and hasattr(data, "cache_files"):
        table = data._indices  # a table without rows is false, but there
        indices = None if table is None else table.column(0)
        return _has_twice(data.data) or (
            indices is not None and len(indices.unique()) < len(indices)
        )
    if package == "pyarrow" and hasattr(data, "column"):
        return _has_twice(data)
    # By the names of classes, as TensorFlow and grain tell nothing else.
    if isinstance(data, tf.data.Dataset):
        kind, inputs = type(data).__name__, data._inputs()
        if "ZipDataset" in kind:  # beside examples, one thing that stands beside each is no copy
            inputs = [each for each in inputs if not _is_one_repeated(each)]
        twice = "ConcatenateDataset" in kind and inputs[0] is inputs[1]
        return twice or _repeats(data) or any(map(_is_repeated, inputs))
    if package == "grain":
        repeats = type(data).__name__ == "RepeatMapDataset"
        return repeats or any(map(_is_repeated, getattr(data, "parents", ())))
    return False


def _repeats(dataset):
    return "RepeatDataset" in type(dataset).__name__ and int(dataset._count) != 1


def _is_one_repeated(dataset):
    return _repeats(dataset) and int(dataset._inputs()[0].cardinality()) == 1


def _has_twice(table):
    """Whether a table of Arrow has the same memory twice."""
    if not table.num_columns:
        return False
    chunks = [chunk for chunk in table.column(0).chunks if len(chunk)]
    places = [
        (chunk.offset, *(each and each.address for each in chunk.buffers())) for chunk in chunks
    ]
    return len(set(places)) < len(places)


def is_reshuffled(data: Any) -> bool:
    """Whether data show that they may come in another order whenever they are gone through."""
    if isinstance(data, keras.utils.PyDataset):
        kind, plain = type(data), keras.utils.PyDataset
        moves = (kind.on_epoch_begin, kind.on_epoch_end)
        return moves != (plain.on_epoch_begin, plain.on_epoch_end)
    if isinstance(data, tf.data.Dataset):
        return data.options().deterministic is False or _is_reshuffled(data)
    if type(data).__module__.partition(".")[0] == "grain":
        return _is_shuffled_by_grain(data)
    sampler = getattr(data, "sampler", None)  # of a DataLoader of PyTorch
    inner = getattr(getattr(data, "batch_sampler", None), "sampler", None)
    return any("Random" in type(each).__name__ for each in (sampler, inner))


def _is_reshuffled(data):
    kind = type(data).__name__
    if "CacheDataset" in kind:
        return False
    if "ShuffleDataset" in kind and getattr(data, "_reshuffle_each_iteration", True):
        return True
    if getattr(data, "_deterministic", None) == "false":  # what is ready first, comes first
        return True
    parts = [node for each in data._functions() for node in nodes(each.function.graph)]
    if "ParallelInterleave" in kind:  # which keeps it in its operation alone
        parts += tf.compat.v1.GraphDef.FromString(data._as_serialized_graph().numpy()).node
    return any(map(_reshuffles, parts)) or any(map(_is_reshuffled, data._inputs()))


def _reshuffles(node):
    """Whether a node of a graph is a data set that comes in another order each time."""
    anew = "reshuffle_each_iteration" in node.attr and node.attr["reshuffle_each_iteration"].b
    return anew or node.attr["deterministic"].s == b"false"


def _is_shuffled_by_grain(data):
    """Whether it is both shuffled and repeated: each repetition is shuffled anew."""
    sampler = getattr(data, "_sampler", None)
    if getattr(sampler, "_shuffle", False):
        return getattr(sampler, "_num_epochs", None) != 1
    names = _names(data)
    return any("Shuffle" in name for name in names) and any("Repeat" in name for name in names)


def _names(data):
    parents = getattr(data, "parents", ())
    return [type(data).__name__, *(name for parent in parents for name in _names(parent))]


def warn_of_batches(data: Any) -> None:
    """Warns of single elements that look like batches: each would count as one example."""
    try:
        sizes = {np.shape(leaf)[:1] for leaf in tf.nest.flatten(without_lists(data[0]))}
    except Exception:  # it is told of where it is drawn
        return
    if len(sizes) == 1 and sizes != {()}:
        warnings.warn(
            f"The elements of the {type(data).__name__} look like batches of {sizes.pop()[0]} "
            "rows, and each of them would count as one example, drawn and clipped as a whole: ε "
            "would be that of a batch. Give single examples; if each element is one, as a series "
            "with a target for each of its steps, all is well.",
            stacklevel=5,
        )


def warn_of_batched_dataset(dataset: tf.data.Dataset) -> None:
    """Warns of a data set that was cut into batches: each would count as one example."""
    sizes = {
        leaf.shape[0] if leaf.shape.rank else None for leaf in tf.nest.flatten(dataset.element_spec)
    }
    if len(sizes) == 1 and None not in sizes and is_batched(dataset):
        (size,) = sizes
        warnings.warn(
            f"`data` looks like batches of {size} rows, and each of them would count as one "
            "example, drawn and clipped as a whole. If the rows are the examples, call "
            "`.unbatch()`; if each is one example, as a window of a series, all is well.",
            stacklevel=6,
        )


def is_batched(dataset: tf.data.Dataset) -> bool:
    """Whether `batch` was called on the data set, and its batches were not taken apart since.

    TensorFlow tells by the private names of its classes only; where they differ, it is not known.
    """
    kind = type(dataset).__name__
    if "BatchDataset" in kind:  # not _UnbatchDataset, nor _RebatchDataset
        return True
    inputs = getattr(dataset, "_inputs", list)()
    is_of_others = any(each in kind for each in ("Unbatch", "FlatMap", "Interleave"))
    return bool(inputs) and not is_of_others and all(map(is_batched, inputs))
