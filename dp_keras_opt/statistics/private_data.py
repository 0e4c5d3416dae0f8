"""Numbers about private data, each released with noise and entered in a ledger."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from scipy import stats

from dp_keras_opt.accounting.budget import Budget
from dp_keras_opt.accounting.ledger import Ledger
from dp_keras_opt.accounting.sampling import Sampling
from dp_keras_opt.accounting.segment import TRAINING, Segment
from dp_keras_opt.checks import is_number, whole_number
from dp_keras_opt.data.users import examples_by_user
from dp_keras_opt.noise import entropy
from dp_keras_opt.noise.gaussian import Gaussian
from dp_keras_opt.noise.laplace import Laplace
from dp_keras_opt.noise.thresholded import ThresholdedGaussian
from dp_keras_opt.statistics import contributions, quantiles
from dp_keras_opt.statistics.columns import check_order, chunks
from dp_keras_opt.statistics.contributions import Units
from dp_keras_opt.statistics.release import planned, released
from dp_keras_opt.statistics.vocabulary import Vocabulary, as_text, word_counts
from dp_keras_opt.types import Adjacency

_MECHANISMS = {"gaussian": Gaussian, "laplace": Laplace}
_TAILS = {"gaussian": stats.norm, "laplace": stats.laplace(scale=0.5**0.5)}  # of deviation 1

#: A bin that nobody is in is taken for one that somebody is in, with this probability in all.
_FALSE_ALARM = 1e-3


class Estimate(NamedTuple):
    """A released number, or several.

    Attributes:
        value: with noise; a float, or an array.
        noise_std: the standard deviation of the noise in each.
    """

    value: Any
    noise_std: float


class Moments(NamedTuple):
    """Mean and variance, of one release.

    Attributes:
        mean: with noise; a float, or an array.
        variance: with noise, at least 0.
        mean_std: the standard deviation of the noise in the mean.
        variance_std: that of the noise in the mean square, which is most of that in the variance.
    """

    mean: Any
    variance: Any
    mean_std: Any
    variance_std: Any


@dataclasses.dataclass(frozen=True, eq=False)
class PrivateData:
    """Whose data numbers are about, and where what they cost is accounted.

        ledger = dp.accounting.Ledger()
        ratings = dp.statistics.PrivateData(ledger, users=user_ids)
        mean, _ = ratings.mean(stars, bounds=(1, 5), epsilon=0.1, delta=1e-7)
        model.ledger = ledger  # its training adds to it

    Each method computes one statistic, adds noise for ε at δ, and enters it in the ledger before
    it returns; called twice, it releases twice. Together they cost less than the sum of their ε:
    `ledger.epsilon(delta)` has what all of them and the training cost.

    Formal guarantee: each release is (ε, δ)-differentially private for one unit, whatever the rows
    hold (NaN counts nothing, infinities as the bounds), and the ledger counts it in full. A unit's
    rows share its contribution: each of m counts 1/m, so that their number does not matter. Noise
    is drawn in double precision, as with `secure_noise`, from bits of the operating system, and
    sums are exact.
    What is given in advance (bounds, edges, categories, how many words a unit has at most, epsilon)
    must not come from these data, nor may the choice of what to ask depend on them but through
    what was released. n, the number of units, counts as public, as it does in training.

    Args:
        ledger: the `accounting.Ledger` that counts what is released. Give it to the model.
        users: None, where each row is one unit; or the ids of whose rows they are, integers or
            strings, one for each row in their order.
        unit: what is protected, in words, as in the `Sampling` of the training: with another word
            the guarantees do not add up. Defaults to "example", or "user" with `users`.
        adjacency: which data sets are neighbours, as in the `Sampling` of the training. With
            `fit(x, y)` on arrays it is "zero_out".
        noise: "gaussian"; or "laplace", for δ = 0.
        data_set: the name of the data. Another name than that of the training data says that no
            unit is in both: what they cost then does not add up.
        budget: None, or the `accounting.Budget` by a privacy filter that holds for all that is
            released of these data: how much noise the next number gets may then depend on results.

    Raises:
        TypeError: the ids are no integers or strings.
        ValueError: another argument is none of these.
    """

    ledger: Ledger
    users: Any = dataclasses.field(default=None, repr=False)
    unit: str | None = None
    adjacency: Adjacency = "add_or_remove_one"
    noise: Literal["gaussian", "laplace"] = "gaussian"
    data_set: str = TRAINING
    budget: Budget | None = None
    _process: Any = dataclasses.field(default=None, init=False, repr=False)

    def __reduce__(self):
        raise TypeError(
            "PrivateData cannot be copied or pickled: what the copy releases would be in a ledger "
            "that nobody reads. Make one in the process that needs it, on a ledger of its own, and "
            "merge that."
        )

    def __post_init__(self) -> None:
        object.__setattr__(self, "_process", entropy.process())
        if not isinstance(self.ledger, Ledger):
            raise ValueError(
                f"ledger must be a dp_keras_opt.accounting.Ledger, received {self.ledger!r}: what "
                "is released must be counted somewhere. Make one, and give it to the model that is "
                "trained on the same data: model.ledger = ledger."
            )
        if self.noise not in _MECHANISMS:
            raise ValueError(f"noise must be one of {list(_MECHANISMS)}; received {self.noise!r}.")
        if not isinstance(self.data_set, str) or not self.data_set:
            raise ValueError(f"data_set must be a name; received {self.data_set!r}.")
        if self.budget is not None and not (isinstance(self.budget, Budget) and self.budget.filter):
            raise ValueError(
                f"budget must be an accounting.Budget by a privacy filter, received {self.budget}. "
                "Any other is kept by callbacks.PrivacyBudget, which counts what is in the ledger."
            )
        numbers = None
        if self.users is not None:
            owned = examples_by_user(self.users, np.size(self.users))
            numbers = np.empty(np.size(self.users), np.int64)
            for number, rows in enumerate(owned):
                numbers[rows] = number
        object.__setattr__(self, "users", numbers)
        self._sampling(2)  # refuses what is no adjacency or unit

    def count(
        self, where: npt.ArrayLike, epsilon: float, delta: float, purpose: str = "a count"
    ) -> Estimate:
        """How many units are as said.

        Args:
            where: a boolean for each row.
            epsilon, delta: what the release may cost.
            purpose: what it is, in words, for the statement.
        """
        units = self._units()

        def bins(rows):
            if rows.dtype != bool or rows.ndim != 1:
                raise ValueError(
                    f"where must be one boolean a row; received {rows.dtype}, {rows.shape}."
                )
            return np.where(rows, 0, -1)

        found = contributions.counts(self._chunks(where), units, bins, 1)
        value, std = self._release("count", found, 1.0, units, epsilon, delta, purpose)
        return Estimate(float(value[0]), std)

    def histogram(
        self,
        values: Any,
        edges: Sequence[float],
        epsilon: float,
        delta: float,
        purpose: str = "a histogram",
    ) -> Estimate:
        """How many units have values in each bin, as `numpy.histogram` counts them.

        Args:
            values: one number a row, or several, which share its contribution. What is in no bin
                does not count.
            edges: of the bins, ascending; fixed without a look at the data.
            epsilon, delta: what the release may cost.
            purpose: what it is, in words, for the statement.

        Returns:
            An `Estimate` of len(edges) − 1 counts. They may be negative.
        """
        found, units = self._binned(values, _edges(edges), to_ends=False)
        return Estimate(*self._release("histogram", found, 1.0, units, epsilon, delta, purpose))

    def category_counts(
        self,
        values: Any,
        categories: Sequence[Any],
        epsilon: float,
        delta: float,
        purpose: str = "counts of categories",
    ) -> Estimate:
        """How many units have each of some categories that are known beforehand.

        Args:
            values: one string or integer a row. What is no category does not count.
            categories: a list, each once; fixed without a look at the data. `vocabulary` finds
                categories that are not known.
            epsilon, delta: what the release may cost.
            purpose: what it is, in words, for the statement.

        Returns:
            An `Estimate` of a count for each category, in their order. They may be negative.
        """
        known = np.asarray(categories)
        if known.ndim != 1 or not len(known) or len(np.unique(known)) < len(known):
            raise ValueError(f"categories must be a list, each once; received {categories!r}.")
        order, units = np.argsort(known), self._units()

        def bins(rows):
            rows = np.asarray(rows)
            if rows.dtype.kind in "OS":
                rows = np.array([as_text(each) for each in rows.ravel()]).reshape(rows.shape)
            if rows.ndim != 1 or (rows.dtype.kind == "U") != (known.dtype.kind == "U"):
                raise ValueError(
                    f"values must be one of the categories a row, of {known.dtype}; received "
                    f"{rows.dtype} of shape {rows.shape}."
                )
            place = order[np.minimum(np.searchsorted(known, rows, sorter=order), len(known) - 1)]
            return np.where(known[place] == rows, place, -1)

        found = contributions.counts(self._chunks(values), units, bins, len(known))
        return Estimate(*self._release("histogram", found, 1.0, units, epsilon, delta, purpose))

    def total(
        self,
        values: Any,
        bounds: tuple[float, float],
        epsilon: float,
        delta: float,
        purpose: str = "a sum",
    ) -> Estimate:
        """The sum over units of what each has in all, brought within bounds.

        Args:
            values: one number a row.
            bounds: (lower, upper), of the sum of one unit's rows; fixed without a look at the data.
            epsilon, delta: what the release may cost.
            purpose: what it is, in words, for the statement.
        """
        lower, upper = _bounds(bounds)
        largest, units = float(max(abs(lower), abs(upper))), self._units()
        sums = np.clip(contributions.totals(self._chunks(values), units), lower, upper)
        found = contributions.vector_sum(
            [sums], Units(), lambda each: each[:, None] / largest, self._norm
        )
        value, std = self._release("sum", found * largest, largest, units, epsilon, delta, purpose)
        return Estimate(float(value[0]), std)

    def mean(
        self,
        values: Any,
        bounds: tuple[npt.ArrayLike, npt.ArrayLike],
        epsilon: float,
        delta: float,
        purpose: str = "a mean",
    ) -> Estimate:
        """The mean over units of the mean of their rows.

        Args:
            values: a number a row, or a vector of d.
            bounds: (lower, upper), numbers or vectors, to which each value is brought; fixed
                without a look at the data. The wider they are, the more noise there is.
            epsilon, delta: what the release may cost.
            purpose: what it is, in words, for the statement.
        """
        middle, half = _centred(bounds)
        shape, units = _row_shape(values), self._units()
        size = self._length(shape, 1.0)

        def vectors(rows):
            return _scaled(rows, middle, half).reshape(len(rows), -1) / size

        found = contributions.vector_sum(self._chunks(values, shape), units, vectors, self._norm)
        value, std = self._release("mean", found * size, size, units, epsilon, delta, purpose)
        value, std = np.reshape(value, shape) / units.number, std / units.number
        return Estimate(_plain(middle + half * value), _plain(half * std))

    def mean_and_variance(
        self,
        values: Any,
        bounds: tuple[npt.ArrayLike, npt.ArrayLike],
        epsilon: float,
        delta: float,
        purpose: str = "mean and variance",
        *,
        over: Sequence[int] = (),
    ) -> Moments:
        """Mean and variance over units and their rows, of one release.

        Args:
            values: a number a row, or an array.
            bounds: as for `mean`.
            epsilon, delta: what the release may cost.
            purpose: what it is, in words, for the statement.
            over: further axes that are averaged over, such as (1, 2) of images; that of the rows
                is 0.
        """
        middle, half = _centred(bounds)
        over = tuple(whole_number(axis, "over", 1, "Axis 0 is that of the rows.") for axis in over)
        units, row = self._units(), _row_shape(values)
        shape = tuple(size for axis, size in enumerate(row, 1) if axis not in over)
        # u² − ½ is shorter than u², so that less noise is needed; at u = ±1 both are longest.
        size = self._length(shape, 1.5 if self._norm == "l1" else 1.25**0.5)

        def vectors(rows):
            u = _scaled(rows, middle, half)
            parts = (np.mean(each, axis=over) if over else each for each in (u, u**2 - 0.5))
            return np.concatenate([part.reshape(len(rows), -1) for part in parts], axis=1) / size

        found = contributions.vector_sum(self._chunks(values, row), units, vectors, self._norm)
        value, std = self._release(
            "mean_and_variance", found * size, size, units, epsilon, delta, purpose
        )
        u, square = (np.reshape(part, shape) for part in np.split(value / units.number, 2))
        variance, std = np.maximum(square + 0.5 - u**2, 0.0), std / units.number
        return Moments(
            _plain(middle + half * u), _plain(half**2 * variance),
            _plain(half * std), _plain(half**2 * std),
        )  # fmt: skip

    def quantiles(
        self,
        values: Any,
        probabilities: Sequence[float],
        bounds: tuple[float, float],
        epsilon: float,
        delta: float,
        purpose: str = "quantiles",
        *,
        bins: int = 256,
    ) -> Estimate:
        """Quantiles, all of one release, however many there are.

        Args:
            values: one number a row, or several, which share its contribution.
            probabilities: of the quantiles, in [0, 1].
            bounds: (lower, upper), to which values are brought; fixed without a look at the data.
            epsilon, delta: what the release may cost.
            purpose: what it is, in words, for the statement.
            bins: of how many equal bins between the bounds the counts are; quantiles are
                interpolated within them.

        Returns:
            An `Estimate` of the quantiles, with the deviation of the noise in the *shares* of the
            units below them, at most: that in the quantiles depends on how dense the data are.
        """
        lower, upper = _bounds(bounds)
        wanted = np.asarray(probabilities, np.float64)
        if wanted.ndim != 1 or not np.all((wanted >= 0) & (wanted <= 1)):
            raise ValueError(
                f"probabilities must be a list, in [0, 1]; received {probabilities!r}."
            )
        edges = np.linspace(lower, upper, whole_number(bins, "bins", 2) + 1)
        counted, units = self._binned(values, edges, to_ends=True)
        size = quantiles.sensitivity(bins, self._norm)
        value, std = self._release(
            "cumulative_counts", quantiles.times_root(counted), size, units, epsilon, delta, purpose
        )
        found = quantiles.quantiles(value, edges, units.number, wanted)
        return Estimate(found, std * quantiles.sensitivity(bins, "l2") / units.number)

    def bounds(
        self,
        values: Any,
        epsilon: float,
        delta: float,
        purpose: str = "bounds",
        *,
        least: float = 2.0**-20,
        most: float = 2.0**40,
    ) -> tuple[float, float]:
        """Powers of two between which nearly all values lie, where nothing is known of them.

        Counts, with noise, how many units have values between any two successive powers of two, and
        takes the first and the last of these bins that stand out of the noise. A few extreme values
        do not.

        Args:
            values: one number a row, or several, which share its contribution.
            epsilon, delta: what the release may cost.
            purpose: what it is, in words, for the statement.
            least, most: what is less than `least`, or more than `most`, in size counts as that.

        Raises:
            ValueError: no bin stands out of the noise. It was released all the same, and counts.
        """
        if not 0 < least < most:
            raise ValueError(f"least and most must be 0 < least < most; received {least}, {most}.")
        powers = np.exp2(np.arange(np.floor(np.log2(least)), np.ceil(np.log2(most)) + 1))
        edges = np.concatenate([-powers[::-1], [0.0], powers])
        counted, units = self._binned(values, edges, to_ends=True)
        value, std = self._release("histogram", counted, 1.0, units, epsilon, delta, purpose)
        above = std * _TAILS[self.noise].isf(-np.expm1(np.log1p(-_FALSE_ALARM) / len(value)))
        found = np.flatnonzero(value > above)
        if not len(found):
            raise ValueError(
                f"No range of values stands out of the noise, whose deviation is {std:.3g} of "
                f"{units.number} units. The release counts all the same. Allow a larger "
                "epsilon, or give bounds that you know."
            )
        return float(edges[found[0]]), float(edges[found[-1] + 1])

    def vocabulary(
        self,
        values: Any,
        most_per_unit: int,
        epsilon: float,
        delta: float,
        purpose: str = "a vocabulary",
        *,
        size: int | None = None,
        split: Callable[[Any], Any] | None = None,
        without: Iterable[Any] = (),
    ) -> Vocabulary:
        """The words of the data that enough units use, by noisy counts of these.

        Half of δ is for the noise, half for words that one unit alone has, which show with this
        probability. Words that fewer than some tens of units use do not show.

        Args:
            values: rows of strings or integers: (n,), or (n, k), or a `tf.RaggedTensor`.
            most_per_unit: for how many words of its own a unit counts, at most; of more, so many
                are drawn. The noise grows with its root.
            epsilon, delta: what the release may cost; δ > 0.
            purpose: what it is, in words, for the statement.
            size: None, or how many words there are at most: those of the largest noisy counts.
            split: None, or a function that makes words of an array of rows, such as
                `tf.strings.split`; of each row alone.
            without: words that are not counted.

        Raises:
            ValueError: δ is 0, or noise is "laplace"; no word is used by enough units. (It was
                released all the same, and counts.)
        """
        if self.noise != "gaussian" or not (is_number(delta) and 0 < delta < 1):
            raise ValueError(
                f"A vocabulary needs noise='gaussian' and a delta in (0, 1), e.g. 1e-7; received "
                f"noise={self.noise!r}, delta={delta!r}. That a word is in the data at all is a "
                "secret, too, and without a probability of failure none could be told."
            )
        most = whole_number(most_per_unit, "most_per_unit", 1, "Give the most words of a unit.")
        units, mechanism = self._units(), ThresholdedGaussian(delta / 2)
        every, counted = word_counts(
            self._chunks(values), units, most, split=split, without=without
        )
        value, std = self._release(
            "word_counts", counted, most**0.5, units, epsilon, delta, purpose, mechanism
        )
        threshold = mechanism.threshold(std, most)
        order = np.argsort(-value, kind="stable")
        order = order[value[order] >= threshold][:size]
        if not len(order):
            raise ValueError(
                f"No word reaches the threshold of {threshold:.4g} of {units.number} units. "
                "The release counts all the same. Allow a larger epsilon, fewer words per unit, or "
                "give a list of words that you know."
            )
        words = [every[place] for place in order]
        return Vocabulary(words, value[order], std, threshold, units.number)

    # What all of them do.

    @property
    def _unit(self):
        return self.unit or ("example" if self.users is None else "user")

    @property
    def _mechanism(self):
        return _MECHANISMS[self.noise]()

    @property
    def _norm(self):
        return self._mechanism.norm

    def _units(self):
        return Units(self.users)

    def _chunks(self, values, shape=None):
        """The rows, of which `users` must name the users, and which must have one shape."""
        if self.users is not None and isinstance(values, tf.data.Dataset):
            check_order(values)
        for rows in chunks(values):
            if shape is not None and tuple(rows.shape[1:]) != shape:
                raise ValueError(
                    f"Rows have the shapes {shape} and {tuple(rows.shape[1:])}: one of more "
                    "numbers than the others would contribute more. Pad all of them to one length."
                )
            yield rows

    def _sampling(self, number):
        if self._process != entropy.process():
            raise RuntimeError(
                "This PrivateData was made in the process that this one forked from, whose ledger "
                "would not know of a release here. Make one here, on a ledger of its own, and "
                "merge that."
            )
        return Sampling.full(number, self.adjacency, unit=self._unit)

    def _length(self, shape, longest):
        """The norm of a vector of as many numbers, each at most `longest`."""
        size = int(np.prod(shape))
        return longest * (size if self._norm == "l1" else size**0.5)

    def _binned(self, values, edges, *, to_ends):
        """(how many units are in each bin, the units); what is outside is in the first or last."""
        units, row = self._units(), _row_shape(values)
        several = int(np.prod(row))

        def bins(rows):
            rows = np.asarray(rows, np.float64)
            inner = np.clip(rows, edges[0], edges[-1]) if to_ends else rows
            place = np.searchsorted(edges, inner, side="right") - 1
            place = np.where(inner == edges[-1], len(edges) - 2, place)
            return np.where(np.isnan(rows), -1, place).ravel()

        shared = units if several == 1 else _Shared(units, several)
        found = contributions.counts(self._chunks(values, row), shared, bins, len(edges) - 1)
        return found, units

    def _release(
        self, statistic, total, sensitivity, units, epsilon, delta, purpose, mechanism=None
    ):
        segment = self._planned(
            statistic, sensitivity, units.number, epsilon, delta, purpose, mechanism=mechanism
        )
        return released(total, segment, self.ledger)

    def _plan_scores(
        self, number: int, epsilon: float, delta: float, purpose: str, times: int = 1
    ) -> Segment:
        """What the ledger is to say of sums of vectors of norm 1 at most, so many times together.

        Args:
            number: n, how many units there are.
            epsilon, delta: what all of them may cost together.
            purpose: what they are, in words.
            times: how often they are released.
        """
        return self._planned("scores", 1.0, number, epsilon, delta, purpose, times)

    def _planned(
        self, statistic, sensitivity, number, epsilon, delta, purpose, times=1, mechanism=None
    ):
        return planned(
            statistic, mechanism or self._mechanism, self._sampling(number), epsilon, delta,
            sensitivity=sensitivity, purpose=purpose, data_set=self.data_set, times=times,
            budget=self.budget,
        )  # fmt: skip


class _Shared:
    """Units whose rows have several numbers, which share the contribution of their row."""

    def __init__(self, units, several):
        self._units, self._several = units, several

    def rows(self, count):
        owners, shares = self._units.rows(count // self._several)
        return np.repeat(owners, self._several), np.repeat(shares, self._several) / self._several


def _row_shape(values):
    return tuple(next(chunks(values)).shape[1:])


def _edges(edges):
    found = np.asarray(edges, np.float64)
    if found.ndim != 1 or len(found) < 2 or not np.all(np.diff(found) > 0):
        raise ValueError(f"edges must be a list of ascending numbers; received {edges!r}.")
    return found


def _centred(bounds):
    """(middle, half the width) of bounds, numbers or arrays."""
    try:
        lower, upper = (np.asarray(each, np.float64) for each in bounds)
        is_range = (
            np.all(np.isfinite(lower)) and np.all(np.isfinite(upper)) and np.all(lower < upper)
        )
    except (TypeError, ValueError):
        is_range = False
    if not is_range:
        raise ValueError(
            f"bounds must be (lower, upper), finite and ascending; received {bounds!r}. Without "
            "bounds one value could move the result as far as it likes. Take them from what the "
            "values mean, or from `PrivateData.bounds`, and never from the data themselves."
        )
    return (lower + upper) / 2, (upper - lower) / 2


def _bounds(bounds):
    """(lower, upper) as numbers."""
    middle, half = _centred(bounds)
    if middle.ndim:
        raise ValueError(f"bounds must be two numbers; received {bounds!r}.")
    return float(middle - half), float(middle + half)


def _scaled(rows, middle, half):
    """Rows within [−1, 1], which the bounds are brought to."""
    return np.clip((np.asarray(rows, np.float64) - middle) / half, -1.0, 1.0)


def _plain(value):
    return float(value) if np.ndim(value) == 0 else value
