"""One model, trained without privacy and with it: what comes of it, how fast, how exactly.

python -m tests.zoo.trial gru          # prints a `Result` as JSON
"""

import collections
import importlib.metadata
import json
import math
import statistics
import sys
import time
import warnings
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

import dp_keras_opt as dp
from dp_keras_opt.clipping import Query, clipped_sums
from tests.helpers.per_example import clip_and_sum, one_at_a_time
from tests.zoo.catalog import FIXED, REFUSED, ROWS, RULE, TRAINS
from tests.zoo.example import BATCH_SIZE, Example

#: Models of fewer weights are held to gradients of one example at a time.
SMALL = 100_000

#: What the error of a clipped sum must stay below.
LARGEST_ERROR = 1e-4

#: After the first step, so many are not timed; then so many are, or fewer if these take this long.
_WARM_UP, _TIMED, _SECONDS = 3, 20, 20.0


class Result(NamedTuple):
    """What came of a model; what was not measured is None.

    Attributes:
        name: of its row.
        outcome: `TRAINS`, `FIXED`, `REFUSED`, or "failed" and "not run yet".
        unexpected: what is otherwise than the catalogue says, "" if nothing is.
        weights: how many numbers the model has.
        engines: how many layers each engine serves, and which classes have no rule.
        keras_milliseconds, private_milliseconds: the median of a step.
        keras_first_seconds, private_first_seconds: from `compile` to the end of the first step.
        error: of a clipped sum, relative to its largest entry.
        message: why it was refused, or why `fix` was needed.
        warned: what was warned of.
        versions: of the packages.
    """

    name: str
    outcome: str
    unexpected: str = ""
    weights: int | None = None
    engines: str = ""
    keras_milliseconds: float | None = None
    private_milliseconds: float | None = None
    keras_first_seconds: float | None = None
    private_first_seconds: float | None = None
    error: float | None = None
    message: str = ""
    warned: str = ""
    versions: str = ""


class Tried(NamedTuple):
    """A model that took a first private step, or did not.

    Attributes:
        model: the private one, None if it was refused.
        example: the `Example`, of the model that `fix` made where it was needed.
        outcome, message, warned: those of `Result`.
        served: what `clipping.explain` says, () if it was refused.
        seconds: from `compile` to the end of the first step.
    """

    model: keras.Model | None
    example: tuple
    outcome: str
    message: str = ""
    warned: str = ""
    served: tuple = ()
    seconds: float | None = None

    def differs_from(self, expected):
        """What is otherwise than expected, "" if nothing is."""
        engines = {served.engine for served in self.served}
        return expected.why_not(self.outcome, engines, self.message)


def tried(row):
    """Builds the model of a row and takes one private step, after `fix` if a refusal names it."""
    example = _with_tensors(row.build())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcome, message = TRAINS, ""
        try:
            try:
                model, seconds = _first_private_step(example)
            except ValueError as error:
                if "clipping.fix(model)" not in str(error):
                    raise
                outcome, message = FIXED, _line(error)
                example = example._replace(model=dp.clipping.fix(example.model))
                model, seconds = _first_private_step(example)
        except (TypeError, ValueError) as error:
            return Tried(None, example, REFUSED, _line(error))
    found = [str(each.message) for each in caught if each.category is UserWarning]
    warned = " ".join(dict.fromkeys(_line(each) for each in found))
    served = tuple(dp.clipping.explain(model))
    return Tried(model, example, outcome, message, warned, served, seconds)


def _with_tensors(example):
    """Keras takes no strings of NumPy in a batch."""
    x, y = tf.nest.map_structure(tf.convert_to_tensor, (example.x, example.y))
    return example._replace(x=x, y=y)


def _line(error):
    return " ".join(str(error).split())


def _first_private_step(example):
    start = time.perf_counter()
    model = dp.make_private(example.model)
    optimizer = dp.optimizers.DPSGD(
        1e-3, clip_norm=1.0, noise_multiplier=1.0, batch_size=BATCH_SIZE
    )
    model.compile(optimizer, example.loss)
    model.sampling = dp.accounting.Sampling.poisson(
        num_examples=100 * BATCH_SIZE, batch_size=BATCH_SIZE
    )
    model.train_on_batch(example.x, example.y)
    return model, time.perf_counter() - start


def _first_step(example):
    """The same without privacy."""
    start = time.perf_counter()
    example.model.compile(keras.optimizers.SGD(1e-3), example.loss)
    example.model.train_on_batch(example.x, example.y)
    return example.model, time.perf_counter() - start


def error_of_a_clipped_sum(tried):
    """That to gradients of one example at a time, relative to the largest entry of the sum.

    None where a pass through the model draws random numbers, and for large models.
    """
    private, (base, x, y, loss) = tried.model, tried.example
    if sum(math.prod(v.shape) for v in base.weights) > SMALL:
        return None
    base.compile(loss=loss)

    def loss_of(y, y_pred):
        return base.compute_loss(y=y, y_pred=y_pred)

    if loss_of(y, base(x, training=True)) != loss_of(y, base(x, training=True)):
        return None
    gradients = one_at_a_time(base, loss_of, x, y)
    norms = [math.sqrt(sum((g**2).sum() for g in one)) for one in gradients]
    clip_norm = float(np.median(norms))  # half of the rows are clipped
    expected = clip_and_sum(gradients, clip_norm)
    engines = private.known_engines()
    function = tf.function(
        lambda: clipped_sums(private, (x, y), (Query(clip_norm=clip_norm),), engines).sums[0]
    )
    wrong = max(np.abs(a - e).max() for a, e in zip(function(), expected, strict=True))
    return float(wrong / max(np.abs(e).max() for e in expected))


def measured(row):
    """The `Result` of a row."""
    versions = _versions(row)
    _warm_up()
    private = tried(row)
    weights = sum(math.prod(v.shape) for v in private.example.model.weights)
    result = Result(
        row.name,
        private.outcome,
        private.differs_from(row.expected),
        weights,
        _engines(private.served),
        message=private.message,
        warned=private.warned,
        versions=versions,
    )
    if private.model is None:
        return result
    x, y = private.example.x, private.example.y
    private_milliseconds = _milliseconds(private.model, x, y)
    error = error_of_a_clipped_sum(private)
    exact = error is None or error < LARGEST_ERROR
    plain, seconds = _first_step(_with_tensors(row.build()))
    return result._replace(
        unexpected=result.unexpected or ("" if exact else f"an error of {error:.0e}"),
        keras_milliseconds=_milliseconds(plain, x, y),
        private_milliseconds=private_milliseconds,
        keras_first_seconds=seconds,
        private_first_seconds=private.seconds,
        error=error,
    )


def _warm_up():
    """One step of another model: what TensorFlow does once in a process is not timed."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    ones = tf.ones((BATCH_SIZE, 1))
    _first_step(Example(model, ones, ones))


def _versions(row):
    names = dict.fromkeys(["tensorflow", "keras", row.needs])
    versions = (importlib.metadata.version(name.replace("_", "-")) for name in names)
    return ", ".join(f"{name} {version}" for name, version in zip(names, versions, strict=True))


def _engines(served):
    """How many layers each engine serves, with their classes where it is not a rule."""
    by_engine = collections.defaultdict(collections.Counter)
    for each in served:
        by_engine[each.engine][each.kind] += 1
    parts = []
    for engine, kinds in by_engine.items():
        which = ", ".join(f"{kind}×{number}" for kind, number in kinds.items())
        shown = engine not in (RULE, "frozen")
        parts.append(f"{kinds.total()} {engine}" + f" ({which})" * shown)
    return "; ".join(parts)


def _milliseconds(model, x, y):
    taken, until = [], time.perf_counter() + _SECONDS
    for _ in range(_WARM_UP + _TIMED):
        start = time.perf_counter()
        model.train_on_batch(x, y)
        taken.append(time.perf_counter() - start)
        if time.perf_counter() > until and len(taken) > _WARM_UP:
            break
    return 1e3 * statistics.median(taken[_WARM_UP:])


if __name__ == "__main__":
    keras.utils.set_random_seed(0)
    print(json.dumps(measured(ROWS[sys.argv[1]])._asdict()))
