"""The data of a `fit`: how they are sampled, and what Keras is given of them."""

from __future__ import annotations

import math
import sys
import warnings
from typing import Any, NamedTuple

import tensorflow as tf
from keras import tree

from dp_keras_opt import data, workers
from dp_keras_opt._keras import compiled_loss, train_validation_split
from dp_keras_opt.accounting import Ledger, Sampling
from dp_keras_opt.accounting.batch_sizes import BatchSizes
from dp_keras_opt.accounting.budget import Budget
from dp_keras_opt.accounting.sampling import BallsInBins, Shuffled
from dp_keras_opt.data import Batches
from dp_keras_opt.training import fit_arguments, replicated
from dp_keras_opt.training.fit_arguments import FitArguments

#: What `keras.Model.fit` takes where no batch size is given.
_KERAS_BATCH_SIZE = 32


class Taken(NamedTuple):
    """What was settled about the data of a `fit`.

    Attributes:
        sampling: how they are sampled.
        order_seed: the seed of the order of the examples, or None.
        steps: how many steps an epoch has at most, infinite where that is not known.
        block: rows that are processed at a time, None where batches come as they are.
        pass_length: after how many steps the data end; None where that is not known for sure.
        is_chosen: whether the sampling was chosen here: nobody stated it, or calibrated for it.
    """

    sampling: Sampling
    order_seed: int | None
    steps: float
    block: int | None
    pass_length: int | None = None
    is_chosen: bool = False


def take(call: FitArguments, model: Any) -> Taken:
    """Settles how the data are sampled, and replaces them in `call` by what Keras is to read.

    Args:
        call: the arguments of `fit`.
        model: the `DPModel`, compiled.

    Raises:
        ValueError: the data do not say how they are sampled, or an argument has no meaning beside
            them.
    """
    strategy, optimizer = model.distribute_strategy, model.optimizer
    is_replicated = workers.is_used(strategy)
    is_chosen = False
    if not isinstance(call.x, Batches) and (_are_arrays(call.x) or not is_replicated):
        sampling = _sampling_of_arrays(call, optimizer)
        is_chosen = optimizer.calibrated_for is None
        if isinstance(sampling, BallsInBins):
            with strategy.scope():  # this worker's part
                _in_bins(call, sampling, needs_targets=compiled_loss(model) is not None)
        elif not is_replicated:
            if is_chosen and sampling.period > 1:
                _warn_of_shuffling()
            return Taken(sampling, None, sampling.steps_per_epoch, None)
    batches = _checked(call.x, model)
    data.check_rows(batches)
    fit_arguments.check_beside(batches, call)
    fit_arguments.check_workers(batches.dataset)
    call.x, call.shuffle = data.for_keras(batches.dataset), False
    fit_arguments.check_steps(batches, call.steps_per_epoch, endless=is_replicated)  # `distributed`
    call.steps_per_epoch = call.steps_per_epoch or batches.steps_per_epoch
    if is_replicated:
        if batches.sampling.batch_sizes is not None:
            raise ValueError(
                "Batches of several replicas are drawn ahead, over the end of an epoch, where it "
                "is not known yet with which step the next one begins: their expected size cannot "
                f"change; received {batches.sampling.batch_sizes}. Use one size, or one replica."
            )
        if call.steps_per_epoch is None:
            raise ValueError(
                "Several replicas need to know how many batches an epoch has: pass "
                "steps_per_epoch to fit."
            )
        dealt = data.shard(batches, workers.local(strategy))
        call.x = replicated.distributed(strategy, dealt)
        optimizer.noise_source.share(strategy)
    elif isinstance(strategy, tf.distribute.MirroredStrategy):
        # Of one device there is no part of a batch without rows. TensorFlow, which looks for one
        # where sizes vary, asks for the shape of what is None.
        strategy.extended.enable_partial_batch_handling = False
    length = data.number_of_batches(call.x)
    length = math.inf if length is None else length
    if call.steps_per_epoch is not None:
        at_once = model.steps_per_execution  # whole executions, until the data end
        length = min(-(-call.steps_per_epoch // at_once) * at_once, length)
    sampling, block = batches.sampling, batches.physical_batch_size
    # Of one iteration of a sampler of this library, which is not repeated.
    pass_length = sampling.period if sampling.draws_passes and not is_replicated else None
    return Taken(sampling, batches.order_seed, length, block, pass_length, is_chosen)


def _checked(batches, model):
    """`Batches` as they are, once it is clear which rows come to which replica.

    Raises:
        ValueError: it is not.
    """
    strategy = model.distribute_strategy
    replicated.check_compiled(model, model.optimizer)  # again: `fit` may be in another scope
    number = workers.place(strategy)[1]
    if not isinstance(batches, Batches) or (
        workers.is_used(strategy) and not isinstance(batches.dataset, tf.data.Dataset)
    ):
        raise ValueError(
            f"Several replicas need Batches of a tf.data.Dataset, received {batches!r}. Use "
            "dp_keras_opt.data.poisson_batches."
        )
    if batches.workers != number:
        raise ValueError(
            f"The model is trained by {number} workers, and the batches were made for "
            f"{batches.workers}. Make them within `with strategy.scope():`, too."
        )
    return batches


# Arrays.


def _are_arrays(x):
    if x is None or isinstance(x, tf.data.Dataset):
        return False
    return all(getattr(leaf, "shape", ()) and hasattr(leaf, "__len__") for leaf in tree.flatten(x))


def _sampling_of_arrays(call, optimizer):
    """The sampling of arrays, of which `validation_split` is cut off, as by Keras.

    Balls in bins where the optimizer's noise can be priced with them; else shuffled epochs, without
    amplification.
    """
    if not _are_arrays(call.x):
        kind = type(call.x).__name__
        if isinstance(call.x, list | tuple):
            kind += ", a structure of arrays; for one array, np.array(list)"
        raise ValueError(
            f"The data ({kind}) does not say how its batches are sampled, so "
            "no ε can be stated. Use dp_keras_opt.data.poisson_batches, or state what you did: "
            "dp_keras_opt.data.assume_sampling(data, dp_keras_opt.accounting.Sampling...)."
        )
    if call.steps_per_epoch is not None:
        raise ValueError(
            "steps_per_epoch with arrays would use an example twice in what is accounted as one "
            "epoch. Leave it out, or use dp_keras_opt.data.poisson_batches."
        )
    if isinstance(optimizer.batch_size, BatchSizes):
        raise ValueError(
            f"batch_size={optimizer.batch_size} of the optimizer is for Poisson sampling: pass "
            "dp_keras_opt.data.poisson_batches((x, y), batch_size) to fit, and not arrays."
        )
    if call.validation_split and call.validation_data is None:
        examples = fit_arguments.readable((call.x, call.y, call.sample_weight))
        (call.x, call.y, call.sample_weight), call.validation_data = train_validation_split(
            examples, call.validation_split
        )
    call.validation_split = 0.0
    num_examples = tree.flatten(call.x)[0].shape[0]
    of_keras = min(_KERAS_BATCH_SIZE, num_examples)
    call.batch_size = call.batch_size or optimizer.batch_size or of_keras
    accounted, shuffled = optimizer.calibrated_for, Sampling.shuffled(num_examples, call.batch_size)
    planned_so = accounted is not None and (
        (accounted.num_examples, accounted.batch_size) == (num_examples, call.batch_size)
    )
    if isinstance(accounted, Shuffled):  # of as many steps: Keras drops no remainder
        return accounted if planned_so and accounted.period == shuffled.period else shuffled
    if not call.shuffle:
        return shuffled
    if isinstance(accounted, BallsInBins) and planned_so and accounted.examples_per_unit is None:
        return accounted
    for adjacency in ("zero_out", "add_or_remove_one"):
        in_bins = Sampling.balls_in_bins(num_examples, call.batch_size, adjacency)
        try:
            optimizer.check_sampling(in_bins)
            in_bins.check_releases(optimizer.releases_for(1.0))
            return in_bins
        except ValueError:  # noise that is not priced so, or is scaled for another adjacency
            continue
    return shuffled


def _in_bins(call, sampling, needs_targets):
    """Puts balls in bins in the place of the arrays, with their weights.

    Raises:
        ValueError, TypeError: the arrays are not what can be sampled.
    """
    if call.y is None and needs_targets:
        raise ValueError(
            "fit needs targets: the loss is taken of each example and its target. Without any, as "
            "in an autoencoder, pass x as y, too; a dp_keras_opt.Objective needs none."
        )
    if call.class_weight is not None and call.sample_weight is not None:
        raise ValueError(
            "fit does not take class_weight beside sample_weight. Multiply the weight of its class "
            "into each example's sample_weight."
        )
    batches = data.balls_in_bins(
        (call.x, call.y, _weights(call)),
        sampling.batch_size,
        class_weight=call.class_weight,
        adjacency=sampling.adjacency,
        unit=sampling.unit,
        max_bytes=sys.maxsize,  # as Keras, which copies them too
    )
    call.x, call.y, call.sample_weight, call.class_weight = batches, None, None, None


def _weights(call):
    """`sample_weight` as one array [n], or one for each output, as Keras takes it to mean."""

    def column(array):
        is_column = len(getattr(array, "shape", ())) == 2 and array.shape[1] == 1
        return array[:, 0] if is_column else array

    weights = call.sample_weight
    if weights is None:
        return None
    weights = tree.map_structure(column, weights)
    if tree.is_nested(call.y) and not tree.is_nested(weights):
        return tree.map_structure(lambda _: weights, call.y)
    return weights


# What is said of them.


def _warn_of_shuffling():
    warnings.warn(
        "Arrays given to fit are here accounted as shuffled epochs, with a much larger ε than "
        "batches that are sampled: dp_keras_opt.data.poisson_batches((x, y), batch_size), or "
        "balls_in_bins.",
        stacklevel=4,
    )


def warn_of_choice(
    sampling: Sampling, optimizer: Any, steps: float, budget: Budget | None, callbacks: Any
) -> None:
    """Says what was chosen for arrays, and what ε they had before balls in bins were.

    Args:
        sampling: what was chosen.
        optimizer: with its noise.
        steps: how many are planned.
        budget: the budget, or None.
        callbacks: those of `fit`, of which one may have a δ.
    """
    asked = (getattr(each, "delta", None) for each in (budget, *fit_arguments.each(callbacks)))
    deltas = [delta for delta in asked if isinstance(delta, float)]
    delta = deltas[0] if deltas else 0.1 / sampling.num_examples
    before = Sampling.shuffled(sampling.num_examples, sampling.batch_size)
    try:
        epsilon = Ledger.of(optimizer, before, int(steps)).epsilon(delta, "rdp")
        price = (
            f"Accounted as shuffled epochs under replace_one, as it was before, this training "
            f"would have ε = {epsilon:.4g} at δ = {delta:.3g}. "
        )
    except ValueError:  # the noise is not for this adjacency, or none such was possible
        price = ""
    warnings.warn(
        f"Arrays given to fit are sampled as balls in bins: in each epoch each example comes in "
        f"one of {sampling.steps_per_epoch} batches, drawn at random, and their sizes vary. ε is "
        f"that of adjacency {sampling.adjacency!r}. {price}Shuffled epochs are shuffle=False; to "
        "state the sampling, pass dp_keras_opt.data.balls_in_bins((x, y), batch_size, "
        f"adjacency={sampling.adjacency!r}) or poisson_batches.",
        stacklevel=3,
    )
