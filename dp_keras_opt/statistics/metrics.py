"""Figures about how good a model is, of which each row's part is bounded.

A row adds a vector of norm 1 at most to a sum, computed from its own target and output alone. The
figures are computed from the sum with noise, and cost nothing more.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dp_keras_opt import _keras
from dp_keras_opt.checks import is_number, whole_number
from dp_keras_opt.statistics.private_data import Estimate
from dp_keras_opt.training.losses import of_unmasked

__all__ = ["AUC", "Accuracy", "ConfusionMatrix", "Loss", "Mean", "Metric"]


class Metric(abc.ABC):
    """A figure from the sum of vectors, one of each row.

    Attributes:
        name: under which the figure is released.
        output: None; or the name or place, in targets and outputs alike, of the output that it is
            about, where a model has several.
        takes_losses: whether it is given the losses of the rows, in the place of targets and
            outputs.
    """

    takes_losses = False

    def __init__(self, name: str, output: str | int | None = None) -> None:
        self.name = name
        self.output = output

    @property
    def figures(self) -> tuple[str, ...]:
        """The names of what `estimates` gives."""
        return (self.name,)

    def check_logits(self) -> None:
        """Refuses outputs that are logits, as the model's loss says; here none.

        Raises:
            ValueError: it is for probabilities.
        """
        return

    @abc.abstractmethod
    def vectors(self, y_true: Any, y_pred: Any) -> tf.Tensor:
        """(B, d), of each row a vector of norm 1 at most; over the positions of a row their mean.

        Args:
            y_true, y_pred: targets and outputs of a batch; the losses (B,) twice where it
                `takes_losses`.
        """

    @abc.abstractmethod
    def estimates(self, total: np.ndarray, noise_std: float, number: int) -> dict[str, Estimate]:
        """The figures.

        Args:
            total: the sum of the vectors, with noise.
            noise_std: its standard deviation in each coordinate.
            number: n, how many units there are.
        """

    def _chosen(self, y_true, y_pred):
        """Target and output that it is about."""
        if self.output is not None:
            y_true, y_pred = (_part(each, self.output, self.name) for each in (y_true, y_pred))
        if any(each is None or keras.tree.is_nested(each) for each in (y_true, y_pred)):
            raise ValueError(
                f"The metric {self.name!r} is of one target and one output, and there are none or "
                "several. Name the one that it is about, output='name' or its place; or give a "
                "function of all of them: Mean(function, bounds)."
            )
        return tf.convert_to_tensor(y_true), tf.convert_to_tensor(y_pred)


class Mean(Metric):
    """The mean over units of a value of each row, brought within bounds.

    Args:
        function: of (y_true, y_pred), batches, that gives a value of each row from that row alone,
            (B,), or of each of its positions, which are averaged: a metric function of Keras, such
            as `keras.metrics.mean_absolute_error`, a `keras.losses.Loss`, or one of your own. Of a
            model with several outputs it is given all of them, unless `output` names one.
        bounds: (lower, upper), to which each value is brought; fixed without a look at the data.
            The wider, the more noise. What is no number counts as the middle.
        name: under which it is released.
        output: as for `Metric`.

    Raises:
        TypeError: the function is none of these.
        ValueError: the bounds are none.
    """

    def __init__(
        self,
        function: Callable[[Any, Any], Any],
        bounds: tuple[float, float],
        name: str,
        output: str | int | None = None,
    ) -> None:
        super().__init__(name, output)
        if isinstance(function, keras.metrics.Metric) or not callable(function):
            raise TypeError(
                f"Mean takes a function of (y_true, y_pred) that gives one value a row, such as "
                f"keras.metrics.mean_absolute_error; received {function!r}. A Keras metric that "
                "keeps sums over batches bounds no row's part in them."
            )
        self.function = function.call if isinstance(function, keras.losses.Loss) else function
        self.lower, self.upper = _bounds(bounds)

    def vectors(self, y_true: Any, y_pred: Any) -> tf.Tensor:
        if self.output is not None:
            y_true, y_pred = self._chosen(y_true, y_pred)
        values = tf.convert_to_tensor(self.function(y_true, y_pred))
        if values.shape.rank == 0:
            raise ValueError(
                f"The function of the metric {self.name!r} reduces over the batch, so that one "
                "row's value is mixed with the others'. Return one value a row, without the mean."
            )
        masks = {id(m): m for m in map(_keras.mask_of, keras.tree.flatten(y_pred)) if m is not None}
        mask = next(iter(masks.values())) if len(masks) == 1 else None
        return _mean_over_positions(self._scaled(values)[..., None], mask)

    def _scaled(self, values):
        """Within [−1, 1], which the bounds are brought to."""
        values = tf.cast(values, tf.float32)
        middle, half = (self.lower + self.upper) / 2, (self.upper - self.lower) / 2
        scaled = (tf.clip_by_value(values, self.lower, self.upper) - middle) / half
        return tf.where(tf.math.is_nan(values), 0.0, scaled)

    def estimates(self, total: np.ndarray, noise_std: float, number: int) -> dict[str, Estimate]:
        middle, half = (self.lower + self.upper) / 2, (self.upper - self.lower) / 2
        return {
            self.name: Estimate(
                float(middle + half * total[0] / number), float(half * noise_std / number)
            )
        }


class Accuracy(Mean):
    """The share of units that are classified correctly: the accuracy that `compile` would take.

    Over the positions of a row their share; where a mask hides some, that of the others.

    Args:
        name, output: as for `Mean`.
    """

    def __init__(self, name: str = "accuracy", output: str | int | None = None) -> None:
        super().__init__(_correct, (0.0, 1.0), name, output)

    def vectors(self, y_true: Any, y_pred: Any) -> tf.Tensor:
        self._chosen(y_true, y_pred)  # refuses several outputs
        return super().vectors(y_true, y_pred)


class Loss(Mean):
    """The mean loss that the model was compiled with, each row's brought within (0, bound).

    Without regularizers, which are the same for all rows. What is no number counts as the bound.

    Args:
        bound: fixed without a look at the data; for a cross-entropy of k classes, log k is that
            of guessing.
        name: as for `Mean`.
    """

    takes_losses = True

    def __init__(self, bound: float, name: str = "loss") -> None:
        super().__init__(_as_it_is, (0.0, bound), name)

    def _scaled(self, values):
        return super()._scaled(tf.where(tf.math.is_nan(values), self.upper, values))


class ConfusionMatrix(Metric):
    """How many units of each class are taken for which: [true class, predicted class].

    From it, without further cost: `balanced_accuracy`, the mean recall of the classes; of two
    classes `precision` and `recall` of class 1. Of units with several rows or positions, it counts
    their shares. Noisy counts may be negative.

    Args:
        num_classes: k; each of the k² counts has the same noise, however many there are.
        name, output: as for `Mean`.
        from_logits: of two classes with one output, whether that is a logit (else a probability).
    """

    def __init__(
        self,
        num_classes: int,
        name: str = "confusion_matrix",
        output: str | int | None = None,
        from_logits: bool = False,
    ) -> None:
        super().__init__(name, output)
        self.num_classes = whole_number(num_classes, "num_classes", 2, "Give how many there are.")
        self.threshold = 0.0 if from_logits else 0.5

    @property
    def figures(self) -> tuple[str, ...]:
        of_two = ("precision", "recall") if self.num_classes == 2 else ()
        return (self.name, "balanced_accuracy", *of_two)

    def vectors(self, y_true: Any, y_pred: Any) -> tf.Tensor:
        y_true, y_pred = self._chosen(y_true, y_pred)
        mask, number = _keras.mask_of(y_pred), self.num_classes
        true, outputs = _classes_and_outputs(y_true, y_pred, number, self.name)
        if outputs.shape[-1] == 1:
            predicted = tf.cast(outputs[..., 0] > self.threshold, tf.int32)
        else:
            predicted = tf.argmax(outputs, axis=-1, output_type=tf.int32)
        counts = (true >= 0) & (true < number) & _are_finite(outputs)
        place = tf.where(counts, number * true + predicted, -1)
        return _mean_over_positions(tf.one_hot(place, number**2), mask)

    def estimates(self, total: np.ndarray, noise_std: float, number: int) -> dict[str, Estimate]:
        matrix = np.reshape(total, (self.num_classes, self.num_classes))
        found = {self.name: Estimate(matrix, noise_std)}
        found["balanced_accuracy"] = _share(_balanced_accuracy, matrix, noise_std)
        if self.num_classes == 2:
            found["precision"] = _share(
                lambda m: m[1, 1] / _at_least_one(m[:, 1]), matrix, noise_std
            )
            found["recall"] = _share(lambda m: m[1, 1] / _at_least_one(m[1]), matrix, noise_std)
        return found


class AUC(Metric):
    """The area under the ROC curve of a classifier of two classes, from one histogram.

    Scores are counted in bins, for either class: the area is exact for scores rounded to their
    bins, of which two of a bin count as a tie. More bins round less and have more noise in all.

    Args:
        bins: of how many equal bins within [0, 1] the counts are, or their inner edges, ascending;
            fixed without a look at the data. Edges where scores lie are better than many bins.
        name, output: as for `Mean`.
        from_logits: whether outputs are logits, of which the sigmoid is counted.
    """

    def __init__(
        self,
        bins: int | Sequence[float] = 20,
        name: str = "auc",
        output: str | int | None = None,
        from_logits: bool = False,
    ) -> None:
        super().__init__(name, output)
        if isinstance(bins, int):
            whole_number(bins, "bins", 2, "Give how many bins there are.")
            bins = np.linspace(0, 1, bins + 1)[1:-1].tolist()
        self.edges = np.asarray(bins, np.float32)
        if self.edges.ndim != 1 or not len(self.edges) or not np.all(np.diff(self.edges) > 0):
            raise ValueError(f"bins must be a number, or ascending edges; received {bins!r}.")
        self.from_logits = from_logits

    def check_logits(self) -> None:
        if not self.from_logits:
            raise ValueError(
                f"The metric {self.name!r} counts probabilities, and the model's loss says that "
                "its outputs are logits, most of which would be in the first bin or the last. Pass "
                "statistics.metrics.AUC(from_logits=True)."
            )

    def vectors(self, y_true: Any, y_pred: Any) -> tf.Tensor:
        y_true, y_pred = self._chosen(y_true, y_pred)
        mask, bins = _keras.mask_of(y_pred), len(self.edges) + 1
        label, outputs = _classes_and_outputs(y_true, y_pred, 2, self.name)
        score = tf.cast(outputs[..., -1], tf.float32)
        if self.from_logits:
            both = outputs.shape[-1] == 2
            score = tf.sigmoid(score - tf.cast(outputs[..., 0], tf.float32) if both else score)
        flat = tf.searchsorted(self.edges, tf.reshape(score, [-1]), side="right")
        place = bins * label + tf.reshape(flat, tf.shape(score))
        counts = (label >= 0) & (label < 2) & _are_finite(outputs)
        return _mean_over_positions(tf.one_hot(tf.where(counts, place, -1), 2 * bins), mask)

    def estimates(self, total: np.ndarray, noise_std: float, number: int) -> dict[str, Estimate]:
        return {self.name: _share(_area, np.reshape(total, (2, -1)), noise_std)}


#: What stands where a name is given that has no bounded form of its own.
_INSTEAD = {
    "loss": "Loss(bound), which brings each row's loss within (0, bound)",
    "precision": "ConfusionMatrix(2), which gives precision and recall, too",
    "recall": "ConfusionMatrix(2), which gives precision and recall, too",
    "f1_score": "ConfusionMatrix(num_classes), from which it follows",
}
_NAMED: dict[str, Callable[[], Metric]] = {
    "accuracy": Accuracy, "acc": lambda: Accuracy("acc"), "auc": AUC,
}  # fmt: skip


def get(identifiers: Any) -> list[Metric]:
    """The metrics that were given, as a list: one or several, by name or as objects.

    Raises:
        TypeError, ValueError: one has no bounded form; or two give figures of the same name.
    """
    several = isinstance(identifiers, list | tuple)
    found = [_get(each) for each in (identifiers if several else [identifiers])]
    names = [figure for metric in found for figure in metric.figures]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled or not found:
        raise ValueError(
            f"metrics must be one or several, with names that tell them apart; received several of "
            f"{doubled}." if doubled else "metrics must be one or several; received none."
        )  # fmt: skip
    return found


def _get(identifier):
    if isinstance(identifier, Metric):
        return identifier
    name = identifier if isinstance(identifier, str) else getattr(identifier, "name", None)
    if isinstance(identifier, str) and name.lower() in _NAMED:
        return _NAMED[name.lower()]()
    usual = "Mean(function, bounds, name), which brings each row's value within bounds"
    instead = next((use for known, use in _INSTEAD.items() if known in str(name).lower()), usual)
    raise TypeError(
        f"The metric {identifier!r} says not by how much one row can move it, so no noise can be "
        f"scaled for it. Use dp_keras_opt.statistics.metrics.{instead}."
    )


# Of rows.


def _correct(y_true, y_pred):
    """1 for each row, or position, that is classified correctly."""
    y_true, y_pred = tf.convert_to_tensor(y_true), tf.convert_to_tensor(y_pred)
    if y_pred.shape.rank == 1:
        y_true, y_pred = tf.reshape(y_true, [-1, 1]), y_pred[:, None]
    is_binary, is_sparse = _keras.is_binary_or_sparse_categorical(y_true, y_pred)
    if is_binary:
        if y_true.shape.rank < y_pred.shape.rank:
            y_true = y_true[..., None]
        return keras.metrics.binary_accuracy(y_true, y_pred)
    if is_sparse:
        return keras.metrics.sparse_categorical_accuracy(y_true, y_pred)
    return keras.metrics.categorical_accuracy(y_true, y_pred)


def _as_it_is(losses, _):
    return losses


def _part(structure, place, name):
    try:
        return structure[place]
    except (KeyError, IndexError, TypeError):
        known = list(structure) if isinstance(structure, dict) else type(structure).__name__
        raise ValueError(
            f"The metric {name!r} is about output {place!r}, but there is {known}. Targets and "
            "outputs need it alike: name it as both have it."
        ) from None


def _classes_and_outputs(y_true, y_pred, number, name):
    """(the true class (B, ...), outputs (B, ..., k), or (B, ..., 1) of two classes)."""
    outputs = y_pred[:, None] if y_pred.shape.rank == 1 else y_pred
    width = outputs.shape[-1]
    if width not in (number, 1) or (width == 1 and number != 2):
        raise ValueError(
            f"The metric {name!r} is of {number} classes, but the output has {width} columns. Give "
            "the number of classes that the output has; one column is for two classes."
        )
    y_true = tf.cast(y_true, tf.int32)
    if y_true.shape.rank == outputs.shape.rank:
        one_hot = y_true.shape[-1] == width and width > 1
        y_true = tf.argmax(y_true, -1, output_type=tf.int32) if one_hot else y_true[..., 0]
    return y_true, outputs


def _are_finite(outputs):
    return tf.reduce_all(tf.math.is_finite(outputs), axis=-1)


def _mean_over_positions(values, mask):
    """(B, d) from (B, ..., d): of each row the mean over its positions that no mask hides."""
    if values.shape.rank == 2:
        return values
    if mask is not None and mask.shape.rank < values.shape.rank:
        values = of_unmasked(values, mask)
    return tf.reduce_mean(values, axis=range(1, values.shape.rank - 1))


def _bounds(bounds):
    try:
        lower, upper = bounds
    except (TypeError, ValueError):
        lower = upper = None
    if not (is_number(lower) and is_number(upper) and -np.inf < lower < upper < np.inf):
        raise ValueError(
            f"Bounds must be finite and ascending; received {bounds!r}. Without bounds one row "
            "could move the mean as far as it likes. Take them from what the values mean."
        )
    return float(lower), float(upper)


# Of noisy counts.


def _share(function, counts, noise_std):
    """A share that is computed from noisy counts, and how far their noise moves it.

    To first order: the length of the gradient is what independent noise in all counts is multiplied
    by. Where counts are few beside their noise it is a rough guide.
    """
    counts = tf.constant(counts, tf.float64)
    with tf.GradientTape() as tape:
        tape.watch(counts)
        value = function(counts)
    slope = float(tf.norm(tape.gradient(value, counts)))
    return Estimate(float(np.clip(value, 0.0, 1.0)), slope * noise_std)


def _at_least_one(counts):
    """How many there are: noise may make nobody, or fewer, of a few."""
    return tf.maximum(tf.reduce_sum(counts, axis=-1), 1.0)


def _balanced_accuracy(matrix):
    return tf.reduce_mean(tf.linalg.diag_part(matrix) / _at_least_one(matrix))


def _area(histogram):
    negative, positive = histogram[0], histogram[1]
    below = tf.cumsum(negative, exclusive=True) + negative / 2
    return tf.reduce_sum(positive * below) / (_at_least_one(negative) * _at_least_one(positive))
