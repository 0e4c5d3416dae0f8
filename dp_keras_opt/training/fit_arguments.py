"""The arguments of `fit`: what they mean beside data of known sampling, and what is refused."""

from __future__ import annotations

import dataclasses
import fnmatch
import warnings
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from dp_keras_opt import data
from dp_keras_opt._keras import can_convert_arrays
from dp_keras_opt.accounting.budget import Budget
from dp_keras_opt.data import Batches


@dataclasses.dataclass
class FitArguments:
    """Those of `keras.Model.fit`, by the same names."""

    x: Any
    y: Any
    batch_size: int | None
    epochs: int
    verbose: str | int
    callbacks: Any
    validation_split: float
    validation_data: Any
    shuffle: bool
    class_weight: Mapping[int, float] | None
    sample_weight: Any
    initial_epoch: int
    steps_per_epoch: int | None
    validation_steps: int | None
    validation_batch_size: int | None
    validation_freq: int


def check_validation_data(given: Any) -> None:
    """Refuses `validation_data` that Keras would refuse once an epoch is spent.

    Raises:
        TypeError: they are `Batches`, or nothing that Keras reads.
    """
    if given is None:
        return
    refuse_batches(given, "validation_data")
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(given)
    refuse_batches(x, "validation_data")
    leaves = [leaf for leaf in tree.flatten((x, y, sample_weight)) if leaf is not None]
    are_lists = any(isinstance(leaf, np.generic) for leaf in leaves)
    are_arrays = can_convert_arrays((x, y, sample_weight)) and not are_lists
    if not (data.are_batches(x) or are_arrays):
        kinds = sorted({type(leaf).__name__ for leaf in leaves})
        raise TypeError(
            "validation_data must be arrays, (x, y) or (x, y, sample_weight), or a "
            f"tf.data.Dataset of batches. Received: {', '.join(kinds)}. np.asarray makes arrays of "
            "lists and of columns."
        )


def readable(given: Any) -> Any:
    """Arrays, with texts as tensors: Keras reads them from few of NumPy's arrays."""

    def read(leaf):
        is_text = isinstance(leaf, np.ndarray) and (
            leaf.dtype.kind in "SU"
            or (leaf.dtype == object and all(isinstance(text, str | bytes) for text in leaf.flat))
        )
        return tf.constant(leaf) if is_text else leaf

    return tree.map_structure(read, given)


def refuse_batches(given: Any, argument: str) -> None:
    """Refuses `Batches` where figures are computed.

    Raises:
        TypeError: these are `Batches`.
    """
    if isinstance(given, Batches):
        raise TypeError(
            f"{argument} cannot be Batches, which are for training: where they are sampled, one "
            "example comes often and another never, and what is computed on them is no figure "
            "about the data. Give arrays or a tf.data.Dataset."
        )


def check_beside(batches: Batches, call: FitArguments) -> None:
    """Refuses arguments of `fit` that say what `Batches` say already, or cannot be honoured.

    Raises:
        ValueError: there is one; the message names it and where it belongs.
    """
    sampler = batches.physical_batch_size is not None
    weighted = _has_weights(batches.dataset)
    instead = {
        "y": "the targets are in the batches: poisson_batches((x, y), ...)",
        "sample_weight": "the weights belong to the examples, from which the batches are drawn: "
        "poisson_batches((x, y, sample_weight), ...), or a third element of batches of your own",
        "class_weight": "the batches have weights already: poisson_batches(..., class_weight=...) "
        "multiplies them in"
        if sampler or weighted
        else "it is multiplied into the weights of "
        "each batch where the batches are made; yield them as its third element",
        "validation_split": "which examples are drawn is settled already. Split the arrays before "
        "you make the batches, and pass validation_data=(x, y)",
        "batch_size": "the batches were drawn for an expected size of "
        f"{batches.sampling.divisor}. Change it there and in the optimizer; rows that are "
        "processed at once are compile(physical_batch_size=...)",
    }
    weighs = isinstance(batches.dataset, tf.data.Dataset | keras.utils.PyDataset)  # Keras does
    honoured = {
        "validation_split": not call.validation_split,
        "batch_size": call.batch_size == batches.sampling.divisor,
        "class_weight": weighs and not (sampler or weighted),
    }
    for argument, reason in instead.items():
        if getattr(call, argument) is not None and not honoured.get(argument):
            raise ValueError(f"fit does not take {argument} beside Batches: {reason}.")


def _has_weights(dataset):
    """Whether the batches of a `tf.data.Dataset` have a third element."""
    spec = getattr(dataset, "element_spec", None)
    return isinstance(spec, tuple) and len(spec) == 3


def check_workers(dataset):
    """Refuses a `PyDataset` that may move examples while its workers read the next epoch.

    Keras starts them first, and then calls `on_epoch_begin`: batches of before would come again.
    """
    if not isinstance(dataset, keras.utils.PyDataset):
        return
    reads_ahead = dataset.workers > 1 or (dataset.workers > 0 and dataset.use_multiprocessing)
    if reads_ahead and type(dataset).on_epoch_begin is not keras.utils.PyDataset.on_epoch_begin:
        raise ValueError(
            f"{type(dataset).__name__} has an on_epoch_begin, and workers={dataset.workers}, "
            f"use_multiprocessing={dataset.use_multiprocessing}: Keras starts the workers before "
            "it calls on_epoch_begin, so that the first batches of an epoch may be those of the "
            "order before, and an example come more often than is accounted. Draw or shuffle in "
            "on_epoch_end (and in __init__, for the first epoch), or pass workers=1 and "
            "use_multiprocessing=False."
        )


def check_steps(batches, steps_per_epoch, endless=False):
    """Refuses passes over the data that are not the periods accounted for.

    An example that comes at most once in each of them would come more often. `endless`: whether
    the data will be repeated, so that the end of a pass of unknown length is not seen.
    """
    sampling, whole = batches.sampling, batches.steps_per_epoch
    passes = sampling.in_passes
    ordered = sampling.period > 1 and sampling.separation is not None
    if passes and data.is_endless(batches.dataset):
        raise ValueError(
            f"The data has no end, but {sampling.kind!r} sampling states that an example comes "
            f"once in {sampling.period} steps, one pass over the data: where a pass ends cannot be "
            "seen here, and an example would come more often than is accounted. Leave out "
            "repeat(); fit begins the data anew in each epoch. Or state the sampling that takes "
            "place."
        )
    length = data.number_of_batches(batches.dataset)
    whole_passes = steps_per_epoch in (None, sampling.period) and not endless
    if passes and length is None and not whole_passes:
        raise ValueError(
            f"{sampling.kind!r} sampling is accounted in whole passes over the data, of "
            f"{sampling.period} steps; received steps_per_epoch={steps_per_epoch} with data of "
            "unknown length, which may begin a pass in between: an example would come more often "
            "than is accounted. State the length: "
            "dataset.apply(tf.data.experimental.assert_cardinality(length)); or, on one device, "
            f"pass steps_per_epoch={sampling.period} or leave it out."
        )
    limits = steps_per_epoch, keras.config.max_steps_per_epoch(), length
    of_epoch = min((limit for limit in limits if limit is not None), default=None)
    if passes and isinstance(batches.dataset, keras.utils.PyDataset) and of_epoch != length:
        raise ValueError(
            f"{sampling.kind!r} sampling is accounted in whole passes over the data, of {length} "
            f"batches; an epoch of {of_epoch} would end within one. There Keras calls the "
            "PyDataset's on_epoch_end and on_epoch_begin: where they put the examples in another "
            "order, one comes more often than is accounted. Leave out steps_per_epoch (and "
            "keras.config.set_max_steps_per_epoch)."
        )
    if ordered and whole is not None and steps_per_epoch not in (None, whole):
        raise ValueError(
            f"{sampling.kind!r} sampling is accounted in whole passes over the data, here of "
            f"{whole} steps; received steps_per_epoch={steps_per_epoch}. Leave it out."
        )
    if length is not None and length % sampling.period:
        raise ValueError(
            f"A pass over the data has {length} batches, but {sampling.kind!r} sampling states "
            f"that an example comes once in {sampling.period}: it would come more often than is "
            "accounted. State the sampling that takes place (drop_remainder=True where the last "
            "batch is dropped)."
        )


def each(callbacks: Any) -> list[Any]:
    """The callbacks that were given, as a list: one, several, or a `CallbackList` of them."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    if isinstance(callbacks, list | tuple):
        return [single for callback in callbacks for single in each(callback)]
    return [] if callbacks is None else [callbacks]


def refuse_bare_checkpoints(callbacks: Any) -> None:
    """Refuses callbacks that write weights without what they have spent.

    Raises:
        ValueError: there is one.
    """
    for callback in each(callbacks):
        if any(kind.__name__ == "OrbaxCheckpoint" for kind in type(callback).__mro__):
            raise ValueError(
                "OrbaxCheckpoint writes the weights without the ledger, and who goes on from them "
                "would begin at ε = 0. Use ModelCheckpoint or BackupAndRestore, which keep it."
            )


def may_go_on(callbacks: Any) -> bool:
    """Whether one of these callbacks leaves out epochs of a `fit` that an earlier one has done."""
    return any(
        isinstance(callback, keras.callbacks.BackupAndRestore) for callback in each(callbacks)
    )


def budget_of(callbacks: Any) -> Budget | None:
    """The `Budget` that one of these callbacks carries, or None.

    Raises:
        ValueError: there are several.
    """
    carried = (getattr(callback, "budget", None) for callback in each(callbacks))
    budgets = [budget for budget in carried if isinstance(budget, Budget)]
    if len(budgets) > 1:
        raise ValueError(
            f"Several budgets ({', '.join(map(str, budgets))}) were given, of which one would be "
            "kept. Pass the one that is to hold; a further PrivacyReport states ε at another δ."
        )
    return budgets[0] if budgets else None


def private_scores(call: FitArguments) -> Any | None:
    """The callback that releases scores on private data, or None.

    Such have a method `enter_evaluations`, which counts what they will release.

    Raises:
        ValueError: there are several; or figures without noise stand beside them.
    """
    found = [
        callback for callback in each(call.callbacks) if hasattr(callback, "enter_evaluations")
    ]
    raw = "validation_split" if call.validation_split else "validation_data"
    if len(found) > 1:
        raise ValueError(
            "fit takes one PrivateValidation: several would write the same names into the logs. "
            "Give one all metrics."
        )
    if found and (call.validation_split or call.validation_data is not None):
        raise ValueError(
            f"fit does not take {raw} beside {type(found[0]).__name__}: it puts figures without "
            "noise into the same logs, as val_..., and everything that reads these would see "
            "them. Leave it out; figures of public data are model.evaluate(...) after the fit."
        )
    return found[0] if found else None


def reports_first(callbacks: Any) -> Any:
    """Callbacks that write into `logs` before those that read them."""
    if callbacks is None or isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    callbacks = callbacks if isinstance(callbacks, list | tuple) else [callbacks]
    return sorted(callbacks, key=lambda callback: not hasattr(callback, "private_logs"))


def warn_of_monitors(callbacks: Any) -> None:
    """Warns of callbacks that steer the training by figures computed from the raw data.

    What is not known to be something else is such a figure: `val_...` are figures about other
    data, and callbacks name what they log from released values in `private_logs`.
    """
    callbacks = each(callbacks)
    known = ["val_*", "learning_rate", "lr"]
    for callback in callbacks:
        known += getattr(callback, "private_logs", ())
    raw = []
    for callback in callbacks:
        name = _monitored(callback)
        if name is not None and not any(fnmatch.fnmatchcase(name, one) for one in known):
            raw.append(f"{type(callback).__name__} (monitor={name!r})")
    if raw:
        warnings.warn(
            f"Training is steered by figures that are computed from the raw training data, without "
            f"noise, by {', '.join(raw)}: the weights then depend on the data in a way that no ε "
            "covers. Use a val_ metric on public data, a fixed number of steps, or a figure that "
            "is private: 'epsilon' of PrivacyReport, those of OptimizerReport. PrivacyBudget stops "
            "by what was spent.",
            stacklevel=3,
        )


def _monitored(callback):
    """The name of the figure by which a callback decides something, None where it does not."""
    if isinstance(callback, keras.callbacks.TerminateOnNaN):
        return "loss"
    if not getattr(callback, "save_best_only", True):
        return None  # a ModelCheckpoint that keeps all
    name = getattr(callback, "monitor", None)
    return name if isinstance(name, str) else None
