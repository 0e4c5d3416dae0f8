"""How good a model is on private data: one pass over them, one release of all figures together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dp_keras_opt import _keras, clipping
from dp_keras_opt.accounting.segment import TRAINING
from dp_keras_opt.checks import is_number, whole_number
from dp_keras_opt.clipping import precision
from dp_keras_opt.clipping.batch import Batch, map_leaves
from dp_keras_opt.clipping.self_check.passes import DOES_NOT_RUN
from dp_keras_opt.data import Batches, examples
from dp_keras_opt.model import DPModel
from dp_keras_opt.statistics import metrics as known_metrics
from dp_keras_opt.statistics.columns import check_batched, check_order
from dp_keras_opt.statistics.contributions import Units, vector_sum
from dp_keras_opt.statistics.private_data import Estimate, PrivateData
from dp_keras_opt.statistics.release import released
from dp_keras_opt.training.losses import per_example_losses
from dp_keras_opt.types import Norm

#: Rows of the first batch are enough to see that one changes others.
_FEW = 8


def evaluate(
    model: keras.Model,
    data: Any,
    metrics: Any,
    private: PrivateData,
    epsilon: float,
    delta: float,
    purpose: str | None = None,
    *,
    weights: Sequence[float] | None = None,
    batch_size: int = 256,
) -> dict[str, Estimate]:
    """Scores of a model on private data, released with noise for ε at δ.

        test = dp.statistics.PrivateData(model.ledger, data_set="test")  # nobody of the training
        scores = dp.statistics.evaluate(model, (x, y), ["accuracy"], test, 0.5, 1e-7)
        accuracy, noise_std = scores["accuracy"]

    All metrics share one release. The model runs in inference mode, as it is.

    Formal guarantee: that of `PrivateData`, if model and metrics compute each row's part from that
    row alone, which is tried on the first batch. Rows that are not finite count 0.

    Args:
        model: any Keras model; with the metric `Loss`, compiled.
        data: (x, y), arrays or structures of them, in memory or on disk; a source, as for
            `data.poisson_batches`; or a finite `tf.data.Dataset` of batches (x, y), where rows have
            users in the same order each time.
        metrics: one or several of `statistics.metrics`, or "accuracy", "auc".
        private: whose data they are, and the ledger that counts the release. Its `data_set` is
            that of the training, unless nobody is in both.
        epsilon, delta: what it may cost.
        purpose: what it is, in words, for the statement.
        weights: None, or how much of the noise budget each metric gets: with twice the weight it
            has half the noise. Fixed without a look at the data.
        batch_size: how many rows are processed at once; a `tf.data.Dataset` has its own.

    Returns:
        An `Estimate` for each figure, by name.

    Raises:
        TypeError: the data are of no such kind, or a metric has no bounded form.
        ValueError: the data have sample weights, no rows or no end; a metric or the model mixes
            rows; or as the methods of `PrivateData`.
    """
    if not isinstance(private, PrivateData):
        raise TypeError(
            "private must be a dp_keras_opt.statistics.PrivateData, which says whose data these "
            f"are and which ledger counts the release; received {private!r}."
        )
    of_training = private.data_set == TRAINING
    if of_training and isinstance(model, DPModel) and private.ledger is not model.ledger:
        raise ValueError(
            "private.ledger is not the ledger of the model, whose statement would not know of "
            "this release of its training data. Pass PrivateData(model.ledger); or say that nobody "
            "is in both: PrivateData(..., data_set='test')."
        )
    rows = Rows(data, batch_size)
    scores = Scores(metrics, private._norm, weights)
    if private.users is not None:
        rows.check_order()
    units = private._units()
    total = scores.total(model, rows, units)
    segment = private._plan_scores(
        units.number, epsilon, delta, purpose or f"{scores} of {model.name!r}"
    )
    return scores.estimates(*released(total, segment, private.ledger), units.number)


class Rows:
    """Private data, once through at each iteration, in batches (x, y).

    Args:
        data, batch_size: as for `evaluate`.

    Raises:
        TypeError, ValueError: they are no such data.
    """

    def __init__(self, data: Any, batch_size: int = 256) -> None:
        self._batch_size = whole_number(batch_size, "batch_size")
        if isinstance(data, Batches):
            raise TypeError(
                "Scores are not of Batches, which are sampled for training: one example would come "
                "often and another never. Give (x, y), or a tf.data.Dataset of batches."
            )
        weighted = isinstance(data, tuple) and len(data) == 3 and data[2] is not None
        if isinstance(data, tf.data.Dataset):
            if int(data.cardinality()) == tf.data.INFINITE_CARDINALITY:
                raise ValueError("The data have no end: each row counts once. Leave out repeat().")
            spec = data.element_spec
            weighted = isinstance(spec, tuple) and len(spec) == 3
            if not weighted and not (isinstance(spec, tuple) and len(spec) == 2):
                raise TypeError(f"The data set must give batches (x, y); its elements are {spec}.")
            if any(leaf.shape.rank == 0 for leaf in tf.nest.flatten(spec)):
                raise ValueError("The data set must give batches of rows: add .batch(256).")
            if any(None in leaf.shape[1:] for leaf in tf.nest.flatten(spec)):
                raise ValueError(
                    "The rows of the data set have no fixed shape, so that the longest of a batch "
                    "may pad all others, and change what the model makes of them. Pad all to one "
                    f"length, padded_batch(..., padded_shapes=...). Its elements are {spec}."
                )
        if weighted:
            raise ValueError(
                "sample_weight is not taken with private scores: a weight makes one row count more "
                "than another, and each may count 1 at most. Multiply it into the values of a "
                "statistics.metrics.Mean, which brings them within bounds, and give (x, y)."
            )
        if isinstance(data, tf.data.Dataset):
            check_batched(data)
        else:
            data = examples.of(data)
        self._data = data

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        if isinstance(self._data, tf.data.Dataset):
            yield from (batch for batch in self._data if length(batch))
            return
        self._data.begin()
        for start in range(0, self._data.num_examples, self._batch_size):
            stop = min(start + self._batch_size, self._data.num_examples)
            (x, y, weight), _ = self._data.gather(tf.range(start, stop, dtype=tf.int64))
            if weight is not None:
                raise ValueError("The source gives sample weights: have it give (x, y) alone.")
            yield x, y

    def check_order(self) -> None:
        """Refuses rows that come in another order at each pass, for which ids are given.

        Raises:
            ValueError: they do.
        """
        if isinstance(self._data, tf.data.Dataset):
            check_order(self._data)

    def count(self) -> int:
        """How many rows there are.

        Raises:
            ValueError: there are none.
        """
        of_arrays = not isinstance(self._data, tf.data.Dataset)
        found = self._data.num_examples if of_arrays else sum(map(length, self))
        if not found:
            raise ValueError("The data are empty: there is nothing to score.")
        return found


class Scores:
    """Metrics as one vector of each row, of norm 1 at most, and what follows from their sum.

    Args:
        metrics, weights: as for `evaluate`.
        norm: "l2" or "l1".

    Raises:
        TypeError, ValueError: as `metrics.get`; or the weights are none.
    """

    def __init__(self, metrics: Any, norm: Norm, weights: Sequence[float] | None = None) -> None:
        self.metrics = known_metrics.get(metrics)
        weights = [1.0] * len(self.metrics) if weights is None else list(weights)
        if len(weights) != len(self.metrics) or not all(
            is_number(each) and 0 < each < np.inf for each in weights
        ):
            raise ValueError(
                f"weights must be one positive number for each of {len(self.metrics)} metrics; "
                f"received {weights!r}."
            )
        self._norm = norm
        self._scales = np.array(weights) / np.linalg.norm(weights, 1 if norm == "l1" else 2)
        self._sizes: list[int] = []
        self._function: Any = None  # of a batch, traced for this model and its loss
        self._traced_for: tuple[Any, Any, Any] = (None, None, None)
        self._is_checked = False

    def __str__(self):
        return ", ".join(metric.name for metric in self.metrics)

    def __getstate__(self):
        # A graph is not copied.
        return vars(self) | {"_function": None, "_traced_for": (None, None, None)}

    def check(self, model: keras.Model, rows: Rows) -> None:
        """Tries model and metrics on the first rows, before anything is paid for.

        Raises:
            ValueError: as `total`; or a metric does not fit the targets and outputs.
        """
        self._trace(model)
        first = next(iter(rows), None)
        if first is not None:
            self._vectors_of(first)

    def total(self, model: keras.Model, rows: Rows, units: Units) -> np.ndarray:
        """Σ over the units of the mean of their rows' vectors: a secret.

        Raises:
            ValueError: a metric or the model mixes rows, or the data are empty.
        """
        self._trace(model)
        total = vector_sum(rows, units, self._vectors_of, self._norm)
        if not total.ndim:
            raise ValueError("The data are empty: there is nothing to score.")
        return total

    def estimates(self, noisy: np.ndarray, noise_std: float, number: int) -> dict[str, Estimate]:
        """The figures, from the sum with noise."""
        found: dict[str, Estimate] = {}
        parts = np.split(noisy, np.cumsum(self._sizes)[:-1])
        for metric, part, scale in zip(self.metrics, parts, self._scales.tolist(), strict=True):
            found |= metric.estimates(part / scale, noise_std / scale, number)
        return found

    def _trace(self, model):
        self._is_checked = False  # in every pass: the weights are others
        loss = _keras.compiled_loss(model), getattr(model, "loss", None)
        if any(getattr(each, "from_logits", False) for each in tf.nest.flatten(loss[1])):
            for metric in self.metrics:
                metric.check_logits()
        if any(a is not b for a, b in zip(self._traced_for, (model, *loss), strict=True)):
            self._traced_for = model, *loss
            self._function = tf.function(
                lambda x, y: self._scored(model, x, y), reduce_retracing=True
            )

    def _vectors_of(self, batch):
        """(B, d), of each row one vector of all metrics, float64."""
        model, number = self._traced_for[0], length(batch)
        parts = [part.numpy() for part in self._function(*batch)[1]]
        self._sizes = [part.shape[1] for part in parts]
        for metric, part in zip(self.metrics, parts, strict=True):
            if len(part) != number:
                raise ValueError(
                    f"The metric {metric.name!r} gives {len(part)} values for {number} rows. "
                    "Return one value a row."
                )
        self._check(model, batch)
        scaled = (each * np.float64(part) for each, part in zip(self._scales, parts, strict=True))
        return np.concatenate(list(scaled), axis=1)

    def _scored(self, model, x, y):
        """(outputs and losses, the vectors of each metric) of a batch."""
        if any(metric.takes_losses for metric in self.metrics):
            losses, y_pred = _losses_and_outputs(model, x, y)
        else:
            losses, y_pred = None, model(x, training=False)
        return (y_pred, losses), self._vectors(y, y_pred, losses)

    def _vectors(self, y, y_pred, losses):
        found = (
            metric.vectors(losses, losses) if metric.takes_losses else metric.vectors(y, y_pred)
            for metric in self.metrics
        )  # fmt: skip
        return [tf.where(tf.math.is_finite(part), part, 0.0) for part in found]

    def _check(self, model, batch):
        """Compares the rows of the first batch with the same rows in parts of it, and one alone.

        What mixes rows, as the mean of a batch does, gives them other values there. The metrics
        get the same outputs, which the model is compared on apart: of outputs that are rounded
        otherwise a class may be another.
        """
        number = length(batch)
        if self._is_checked or number < 2:
            return
        (y_pred, losses), whole = self._scored(model, *batch)
        for part in (slice(0, number // 2), slice(number // 2, number), slice(0, 1)):
            x, y = (map_leaves(lambda t, part=part: t[part], each) for each in batch)
            again, _ = self._scored(model, x, y)
            pairs = zip(tf.nest.flatten((y_pred, losses)), tf.nest.flatten(again), strict=True)
            if not all(a is None or _agree(a, b, part) for a, b in pairs):
                raise ValueError(
                    f"The model {model.name!r} gives rows other outputs or losses in another "
                    "batch, in inference: it mixes rows, so that one could move the figures of "
                    "all, or it draws random numbers. Use a model that computes each row alone."
                )
            of_part = self._vectors(y, *(_rows_of(each, part) for each in (y_pred, losses)))
            for metric, one, other in zip(self.metrics, whole, of_part, strict=True):
                if not _agree(one, other, part):
                    raise ValueError(
                        f"The metric {metric.name!r} gives rows other values in another batch: it "
                        "mixes rows, so that one could move the figures of all. Compute each row's "
                        "value from that row alone."
                    )
        self._check_changed(model, [map_leaves(lambda t: t[:_FEW], each) for each in batch])
        self._is_checked = True

    def _check_changed(self, model, batch):
        """Compares the other rows where the first one is another, as no row here may be."""
        others = slice(1, length(batch))
        given, whole = self._scored(model, *batch)
        for changed in _with_another_first(batch):
            try:
                found, vectors = self._scored(model, *changed)
            except DOES_NOT_RUN:
                continue  # the model, or the metric, has no place for such values
            pairs = zip(tf.nest.flatten(given), tf.nest.flatten(found), strict=True)
            pairs = [*pairs, *zip(whole, vectors, strict=True)]
            if not all(a is None or _agree(a, b[others], others) for a, b in pairs):
                raise ValueError(
                    f"Of the model {model.name!r} and the metrics {self}, one gives rows other "
                    "values where another row of their batch is changed: it mixes rows, so that "
                    "one could move the figures of all, as hinge does with labels of which one is "
                    "not 0 or 1. Compute each row's value from that row alone."
                )


def _with_another_first(batch):
    """Batches in which the first row has inputs that are 0, or large; or labels that are rare."""

    def changed(structure, value):
        def one(rows):
            if isinstance(rows, tf.RaggedTensor | tf.SparseTensor):
                return rows
            rows = tf.convert_to_tensor(rows)
            if not (rows.dtype.is_floating or rows.dtype.is_integer):
                return rows
            return tf.concat([tf.cast(value(rows[:1]), rows.dtype), rows[1:]], axis=0)

        return map_leaves(one, structure)

    x, y = batch
    for factor in (0, 1000):
        yield changed(x, lambda t, factor=factor: t * tf.cast(factor, t.dtype)), y
    for label in (-1, 0, 1, 2, 255):
        yield x, changed(y, lambda t, label=label: tf.fill(tf.shape(t), label))


def length(batch: Any) -> int:
    """How many rows a batch has."""
    return int(tf.shape(tf.nest.flatten(batch)[0])[0])


def _losses_and_outputs(model, x, y):
    if isinstance(model, DPModel) and model.compiled:  # an Objective, what layers add
        return clipping.losses_and_outputs(model, Batch(x, y), training=False)
    compiled = _keras.compiled_loss(model)
    if compiled is None:
        raise ValueError(
            "The metric Loss is that of compile(loss=...), and the model has none. Compile it "
            "with one (that changes no weight), or give Mean(function, bounds, name)."
        )
    y_pred = model(x, training=False)
    return per_example_losses(compiled, y, y_pred)[0], y_pred


def _rows_of(structure, part):
    """Rows of tensors, with what belongs to them."""
    return map_leaves(lambda t: _keras.rows_with_attached(t, lambda each: each[part]), structure)


def _agree(whole, alone, part):
    """Whether rows are the same up to rounding, which is coarse in half precision and in TF32."""
    whole, alone = np.asarray(whole[part]), np.asarray(alone)
    if whole.shape != alone.shape or alone.dtype.kind in "OSU":
        return np.array_equal(whole, alone)
    is_coarse = precision.is_coarse() or alone.dtype.itemsize < 4
    whole, alone = whole.astype(np.float64), alone.astype(np.float64)
    over = tuple(range(1, alone.ndim))
    finite = np.where(np.isfinite(alone), np.abs(alone), 0.0)
    largest = np.max(finite, axis=over, keepdims=True, initial=0.0)
    error = (0.05 if is_coarse else 1e-4) * largest + 1e-6
    return bool(np.isclose(whole, alone, rtol=0.0, atol=error, equal_nan=True).all())
