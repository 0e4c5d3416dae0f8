"""How batches are drawn from the data, and which data sets count as neighbours: a class a kind."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any, ClassVar, TypeVar

import dp_accounting
from scipy import stats

from dp_keras_opt import deprecation
from dp_keras_opt.accounting.batch_sizes import BatchSizeLike, BatchSizes, resolve
from dp_keras_opt.accounting.random_allocation import RandomAllocationDpEvent
from dp_keras_opt.checks import whole_number
from dp_keras_opt.noise.mechanism import Release
from dp_keras_opt.types import Adjacency

#: The kinds of sampling by name; see `register`.
KINDS: dict[str, type[Sampling]] = {}

_ALL: tuple[Adjacency, ...] = ("add_or_remove_one", "zero_out", "replace_one")
_FIXED_SIZE: tuple[Adjacency, ...] = ("replace_one", "zero_out")

_Kind = TypeVar("_Kind", bound="type[Sampling]")


def register(kind: _Kind) -> _Kind:
    """Class decorator: makes a kind of sampling known to `Sampling.from_config` and ledgers.

    Raises:
        ValueError: there is another one of its name.
    """
    if KINDS.setdefault(kind.kind, kind) is not kind:
        raise ValueError(f"There is another kind of sampling by the name {kind.kind!r}.")
    return kind


class _TakesKindFirst(abc.ABCMeta):
    """Lets `Sampling(kind, ...)` work, which is deprecated."""

    _OLD = ("num_examples", "batch_size", "adjacency", "unit", "drop_remainder", "groups",
            "examples_per_unit", "is_padded")  # fmt: skip

    def __call__(cls, *args, **kwargs):
        if cls is not Sampling:
            return super().__call__(*args, **kwargs)
        deprecation.warn("Sampling(kind, ...)", "Sampling.poisson(...) or another class method")
        named = dict(zip(("kind", *cls._OLD), args, strict=False)) | kwargs
        return Sampling.from_config(named)


@dataclasses.dataclass(frozen=True)
class Sampling(metaclass=_TakesKindFirst):
    """The sampling that the data pipeline does, with the neighbouring relation to protect.

    The guarantee holds only if the pipeline really samples this way: nothing here can see it.
    Use the class methods, one for each kind of sampling. All that accounting needs to know of a
    kind is in its class: whoever adds one writes a subclass, a frozen dataclass that is decorated
    with `register`.

    Attributes:
        num_examples: n, the number of privacy units in the training set.
        batch_size: B, the *expected* batch size, a public constant.
        adjacency: which data sets are neighbours. "add_or_remove_one": one unit more or fewer;
            "zero_out": the gradient of one unit replaced by 0 (Kairouz et al., "Practical and
            private (deep) learning without sampling or shuffling", 2021, arXiv:2103.00039,
            definition 1.1); "replace_one": one unit changed.
        unit: the privacy unit in words, e.g. "rating" where a row of the data is a rating.
        examples_per_unit: None where a unit is one example; else K where a unit is all examples of
            one person: of a unit that is drawn at most K take part, and are clipped as one, as
            those of `dp.data.poisson_users` are. Training refuses batches that are not so.
        views: K, how many augmented views of each example in a batch are taken. Their gradients are
            averaged before they are clipped as one, so that the unit stays what it is, and so does
            ε: "augmentation multiplicity" (De et al. 2022, arXiv:2204.13650).
        is_padded: whether batches are padded, so that training needs the `RowInfo` that tells
            padding from data. Of batches in hand, and not of the sampling: neither compared nor
            saved.
        passes: None, or the `Passes` that were begun over batches in hand; nor is it.
        has_known_seed: whether batches in hand are drawn from a seed that was given; nor is it.
        is_stated: whether batches in hand are somebody's own, and this is their word; nor is it.

    Raises:
        ValueError: an argument is of the wrong type or out of range, or the adjacency cannot be
            accounted with this kind of sampling.
    """

    num_examples: int
    batch_size: int
    adjacency: Adjacency
    unit: str = "example"
    examples_per_unit: int | None = None
    views: int = dataclasses.field(default=1, kw_only=True)
    is_padded: bool = dataclasses.field(default=False, compare=False, repr=False, kw_only=True)
    passes: Passes | None = dataclasses.field(default=None, compare=False, repr=False, kw_only=True)
    has_known_seed: bool = dataclasses.field(default=False, compare=False, repr=False, kw_only=True)
    is_stated: bool = dataclasses.field(default=False, compare=False, repr=False, kw_only=True)

    #: What the kind is called in ledgers and on the command line.
    kind: ClassVar[str]
    #: The adjacencies under which it can be accounted, the usual one first.
    adjacencies: ClassVar[tuple[Adjacency, ...]] = _ALL
    #: Why others cannot be, in words.
    why_no_other: ClassVar[str] = ""
    #: The accountants that cannot price it, and why.
    unpriced_by: ClassVar[Mapping[str, str]] = {}
    #: Whether each unit is in a batch, or not, by a coin of its own and of that batch.
    is_poisson: ClassVar[bool] = False
    #: Whether chance decides which batches a unit is in, and a release is priced for that.
    is_amplified: ClassVar[bool] = True
    #: Whether batches can be of any size, up to all units.
    varies_in_size: ClassVar[bool] = False
    #: Whether one draw assigns the units to all batches of a pass, which is priced as a whole.
    draws_passes: ClassVar[bool] = False
    #: Whether each unit comes once in an epoch of batches that together have all.
    deals_epochs: ClassVar[bool] = False
    #: Whether all passes go through the units in one order.
    has_one_order: ClassVar[bool] = False
    #: Whether epsilon rests on an assumption that is not proven for this sampling.
    is_heuristic: ClassVar[bool] = False
    #: Whether a batch is all of the data, so that its size is no choice.
    takes_all: ClassVar[bool] = False
    #: For epochs over the data, whether an incomplete last batch is dropped.
    drop_remainder = False
    #: The number of groups of units that take turns.
    groups = 1
    #: The most units in a batch, where larger draws are cut to it.
    max_batch_size = None  # type: int | None
    #: The expected sizes, where they change; then `batch_size` is the largest of them.
    batch_sizes = None  # type: BatchSizes | None

    def __post_init__(self):
        n = self._keep_whole("num_examples", "Give the number of training examples.")
        size = self._keep_whole("batch_size", "Give the expected batch size.")
        if size > n:
            raise ValueError(
                f"batch_size must be at most num_examples={n}; received {size}. "
                "Use Sampling.full to take all examples at every step."
            )
        if self.adjacency not in self.adjacencies:
            known = self.why_no_other and self.adjacency in _ALL
            raise ValueError(
                f"adjacency={self.adjacency!r} cannot be accounted with {self.kind!r} "
                f"sampling{f': {self.why_no_other}' if known else ''}. Use one of "
                f"{list(self.adjacencies)}."
            )
        if not isinstance(self.unit, str) or not self.unit.strip():
            raise ValueError(
                f"unit must be the privacy unit in words, e.g. 'rating'; received {self.unit!r}."
            )
        self._keep_whole("views", "Give the number of augmented views of each example.")
        if self.examples_per_unit is not None:
            most = self._keep_whole("examples_per_unit", "Give the most examples of a unit.")
            if self.unit == "example":
                raise ValueError(
                    f"examples_per_unit={most} says that a unit is several examples; received "
                    "unit='example'. Name what it is: unit='user'."
                )

    def _keep_whole(self, name, fix):
        """Checks a count, and keeps it as an int: sums of NumPy's small integers overflow."""
        value = whole_number(getattr(self, name), name, 1, fix)
        object.__setattr__(self, name, value)
        return value

    # What accounting asks.

    @abc.abstractmethod
    def sampled(self, event: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
        """The event of what a batch releases once it is drawn this way.

        Of a kind that `draws_passes`: of what a pass of such batches releases.

        Args:
            event: the `dp_accounting.DpEvent` on a batch that the unit is in.
        """

    def check_releases(self, releases: Sequence[Release]) -> None:
        """Refuses releases whose noise cannot be priced with this sampling; here none.

        Raises:
            ValueError: the message names what can be.
        """

    @property
    def uncut(self) -> Sampling:
        """The same with draws of all sizes, which costs about as much where few are cut."""
        return self

    @property
    def rows_per_unit(self) -> int | None:
        """How many rows of a batch are clipped as one; None where each is on its own."""
        if self.examples_per_unit is None and self.views == 1:
            return None
        return (self.examples_per_unit or 1) * self.views

    @property
    def of_one_view(self) -> Sampling:
        """The same with one view of each example, for which the noise is the same."""
        return self if self.views == 1 else dataclasses.replace(self, views=1)

    @property
    def divisor(self) -> int | BatchSizes:
        """What the optimizer's `batch_size` must be."""
        return self.batch_size if self.batch_sizes is None else self.batch_sizes

    @property
    def largest_batch(self) -> float:
        """The most units that can be in a batch; infinite where that is all of them."""
        if self.max_batch_size is not None:
            return self.max_batch_size
        return math.inf if self.varies_in_size else self.batch_size

    @property
    def sampling_probability(self) -> float:
        """q, the chance of a unit to be in a batch that it can be in: B/n, or B·groups/n."""
        return self.batch_size * self.groups / self.num_examples

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches in one pass over the data."""
        return math.ceil(self.num_examples / self.batch_size)

    @property
    def fill(self) -> float:
        """The mean number of units in a batch, over `batch_size`.

        Below 1 where each comes once in an epoch of ⌈n/B⌉ batches, and n is no multiple of B.
        """
        if not self.deals_epochs:
            return 1.0
        return min(1.0, self.num_examples / (self.batch_size * self.steps_per_epoch))

    @property
    def period(self) -> int:
        """Of this many consecutive batches, counted from the first, a unit is in at most one."""
        return 1

    @property
    def in_passes(self) -> bool:
        """Whether it is accounted in whole passes over the data, of `period` batches each."""
        return False

    @property
    def separation(self) -> int | None:
        """The least number of steps between two batches of a unit; None where it is not known."""
        return None

    @property
    def noise_adjacency(self) -> Adjacency:
        """The adjacency whose sensitivity the noise of a batch is held against."""
        return self.adjacency

    @property
    def neighboring_relation(self) -> dp_accounting.NeighboringRelation:
        """The relation under which dp_accounting prices `sampled` without another factor 2."""
        return dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE

    # In words.

    @abc.abstractmethod
    def _in_words(self) -> str:
        """How a batch is drawn, in one sentence."""

    def describe(self) -> str:
        """In words, what the guarantee assumes of the data pipeline."""
        unit = self.unit
        views = ""
        if self.views > 1:
            views = (
                f" Of each example in a batch {self.views} views are taken, such as augmentations, "
                "each made of that example alone; their gradients are averaged before they are "
                f"clipped as one, so that what is protected stays the {unit}."
            )
        if self.examples_per_unit is None:
            return self._in_words() + views
        return (
            f"{self._in_words()}{views} Of each {unit} in a batch at most {self.examples_per_unit} "
            f"examples take part, chosen without looking at any other {unit}; the gradient of "
            f"their mean loss is clipped as one. Assumed: each example carries the identifier of "
            f"its {unit}, each {unit} has one identifier, and no two share it."
        )

    @property
    def _chance(self):
        n, size = self.num_examples, self.batch_size
        return f"{size}/{n} = {self.sampling_probability:.4g}"

    # As JSON.

    def get_config(self) -> dict[str, Any]:
        """The kind and the attributes, as JSON-able values."""
        compared = (field.name for field in dataclasses.fields(self) if field.compare)
        config = {"kind": self.kind, **{name: getattr(self, name) for name in compared}}
        if self.views == 1:  # what ledgers of before say, and what reads them
            del config["views"]
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Sampling:
        """The sampling with these attributes; without an adjacency, the usual one of its kind.

        Raises:
            ValueError: there is no such kind, it has no such attribute, or a value is wrong.
        """
        given = dict(config)
        name = given.pop("kind", None)
        if name not in KINDS:
            raise ValueError(f"kind must be one of {list(KINDS)}; received {name!r}.")
        kind = KINDS[name]
        # Ledgers of before name the attributes of all kinds.
        for other in given.keys() - _fields(kind):
            if given.pop(other) != getattr(kind, other, None):
                having = [_spoken(each) for each in KINDS if other in _fields(KINDS[each])]
                raise ValueError(
                    f"Only {' or '.join(having) or 'no'} sampling has {other}; received "
                    f"{other}={config[other]!r} with {name!r} sampling."
                )
        return kind(**{"adjacency": kind.adjacencies[0]} | given)

    # The kinds.

    @classmethod
    def poisson(
        cls,
        num_examples: int,
        batch_size: BatchSizeLike,
        adjacency: Adjacency = "add_or_remove_one",
        *,
        unit: str = "example",
        examples_per_unit: int | None = None,
    ) -> Sampling:
        """Each unit is in each batch independently with probability B/n (batch sizes vary).

        With `BatchSizes`, such as {0: 128, 500: 256}, with probability B_t/n at step t.
        """
        size = resolve("batch_size", batch_size, "Give the expected batch size.")
        common = adjacency, unit, examples_per_unit
        if isinstance(size, BatchSizes):
            return StagedPoisson(num_examples, size.largest, *common, size)
        return Poisson(num_examples, size, *common)

    @classmethod
    def truncated_poisson(
        cls,
        num_examples: int,
        batch_size: int,
        max_batch_size: int,
        adjacency: Adjacency = "zero_out",
        *,
        unit: str = "example",
    ) -> Sampling:
        """Poisson sampling, of whose draws above max_batch_size a random subset is kept."""
        return TruncatedPoisson(
            num_examples, batch_size, adjacency, unit, max_batch_size=max_batch_size
        )

    @classmethod
    def balls_in_bins(
        cls,
        num_examples: int,
        batch_size: int,
        adjacency: Adjacency = "add_or_remove_one",
        *,
        unit: str = "example",
        examples_per_unit: int | None = None,
    ) -> Sampling:
        """In every epoch each unit is in one of its ⌈n/B⌉ batches, drawn at random."""
        return BallsInBins(num_examples, batch_size, adjacency, unit, examples_per_unit)

    @classmethod
    def without_replacement(
        cls,
        num_examples: int,
        batch_size: int,
        adjacency: Adjacency = "replace_one",
        *,
        unit: str = "example",
    ) -> Sampling:
        """Each batch is a fresh, uniformly random subset of exactly B units."""
        return WithoutReplacement(num_examples, batch_size, adjacency, unit)

    @classmethod
    def full(
        cls, num_examples: int, adjacency: Adjacency = "add_or_remove_one", *, unit: str = "example"
    ) -> Sampling:
        """Each batch is the whole training set."""
        return Full(num_examples, num_examples, adjacency, unit)

    @classmethod
    def shuffled(
        cls,
        num_examples: int,
        batch_size: int,
        adjacency: Adjacency = "replace_one",
        *,
        unit: str = "example",
        drop_remainder: bool = False,
    ) -> Sampling:
        """Epochs over a shuffled data set, in which each unit comes at most once an epoch.

        Accounted without amplification, as one release per started epoch. Set `drop_remainder`
        where the pipeline drops an incomplete last batch: its epochs are then a step shorter.
        """
        return Shuffled(num_examples, batch_size, adjacency, unit, drop_remainder=drop_remainder)

    @classmethod
    def shuffled_accounted_as_poisson(
        cls,
        num_examples: int,
        batch_size: int,
        adjacency: Adjacency = "add_or_remove_one",
        *,
        unit: str = "example",
        drop_remainder: bool = False,
    ) -> Sampling:
        """Shuffled epochs, accounted as if they were Poisson sampled: a heuristic, not a proof.

        Common practice, which may under-state epsilon; every statement says so.
        """
        return ShuffledAccountedAsPoisson(
            num_examples, batch_size, adjacency, unit, drop_remainder=drop_remainder
        )

    @classmethod
    def fixed_order(
        cls,
        num_examples: int,
        batch_size: int,
        adjacency: Adjacency = "replace_one",
        *,
        unit: str = "example",
        drop_remainder: bool = False,
        examples_per_unit: int | None = None,
    ) -> Sampling:
        """Epochs in one order, the same in each: an example's steps are an epoch's length apart.

        What correlated noise needs; accounted without amplification, like `shuffled`.
        """
        return FixedOrder(
            num_examples, batch_size, adjacency, unit, examples_per_unit, drop_remainder
        )

    @classmethod
    def cyclic_poisson(
        cls,
        num_examples: int,
        batch_size: int,
        groups: int,
        adjacency: Adjacency = "add_or_remove_one",
        *,
        unit: str = "example",
        examples_per_unit: int | None = None,
    ) -> Sampling:
        """Poisson sampling from one group of units after the other, in turns.

        Each unit is assigned to a group without looking at the data. At step t those of group
        t mod groups are in the batch, each independently with probability B·groups/n. So a unit's
        steps are at least `groups` apart, as correlated noise wants it, and still amplified.
        """
        return CyclicPoisson(num_examples, batch_size, adjacency, unit, examples_per_unit, groups)


class Passes:
    """Counts the passes over batches, where a draw depends on those before it or on the step.

    Attributes:
        begun: how many.
        handed: how many batches a loop over the `Batches` was given, in all of them.
        next_step: the step of the training that the next pass begins with, as the model says.
        first_step: the one that the last pass began with.
    """

    def __init__(self) -> None:
        self.begun = self.handed = self.next_step = self.first_step = 0

    def begin(self) -> int:
        """Begins a pass, and returns its first step."""
        self.begun, self.first_step = self.begun + 1, self.next_step
        return self.first_step


def _spoken(name):
    return name.replace("_", " ").replace("poisson", "Poisson")


def _fields(kind):
    return {field.name for field in dataclasses.fields(kind)}


@register
@dataclasses.dataclass(frozen=True)
class Poisson(Sampling):
    """Each unit is in each batch independently with probability q = B/n.

    Reference: the amplification is that of the sampled Gaussian mechanism; Mironov, Talwar and
    Zhang, "Rényi differential privacy of the sampled Gaussian mechanism", 2019, arXiv:1908.10530.
    """

    kind = "poisson"
    is_poisson = varies_in_size = True

    def sampled(self, event: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
        return dp_accounting.PoissonSampledDpEvent(self.sampling_probability, event)

    def _in_words(self):
        return (
            f"Poisson sampling: each {self.unit} is in each batch independently with probability "
            f"{self._chance}."
        )


@register
@dataclasses.dataclass(frozen=True)
class StagedPoisson(Poisson):
    """Each unit is in the batch of step t independently with probability q_t = B_t/n.

    The B_t are fixed before the training, and public. Each step is priced with its own probability:
    the sampled Gaussian mechanisms of different probabilities compose as any others. What asks for
    one batch size is given the largest, which over-counts.
    """

    batch_sizes: BatchSizes | None = None

    kind = "staged_poisson"

    def __post_init__(self):
        sizes = self.batch_sizes if isinstance(self.batch_sizes, BatchSizes) else None
        if sizes is None:  # as JSON has it
            sizes = BatchSizes(self.batch_sizes or {})
            object.__setattr__(self, "batch_sizes", sizes)
        super().__post_init__()
        if self.batch_size != sizes.largest:
            raise ValueError(
                f"batch_size={self.batch_size} must be the largest of the expected sizes, "
                f"{sizes}. Use Sampling.poisson(num_examples, batch_sizes)."
            )

    def sampled_at(self, event: dp_accounting.DpEvent, size: float) -> dp_accounting.DpEvent:
        """`sampled` for batches of this expected size."""
        return dp_accounting.PoissonSampledDpEvent(min(size / self.num_examples, 1.0), event)

    def get_config(self) -> dict[str, Any]:
        assert self.batch_sizes is not None  # for the type checker
        stages = [list(stage) for stage in self.batch_sizes.stages]
        return super().get_config() | {"batch_sizes": stages}

    def _in_words(self):
        return (
            f"Poisson sampling: each {self.unit} is in each batch independently, with probability "
            f"B/{self.num_examples} for the expected size B of that step, which is public: "
            f"{self.batch_sizes}."
        )


#: Why accountants cannot price a cut draw, with the version of dp_accounting that is installed.
_UNPRICED_CUT = (
    {
        name: "dp_accounting has only a privacy loss distribution for it. Use accountant='pld', or "
        "Poisson sampling without a cap."
        for name in ("rdp", "pure")
    }
    if hasattr(dp_accounting, "TruncatedSubsampledGaussianDpEvent")
    else {
        name: f"dp_accounting {metadata.version('dp-accounting')}, which is installed, cannot. "
        "Update dp-accounting, or take Poisson sampling without a cap."
        for name in ("rdp", "pure", "pld")
    }
)


@register
@dataclasses.dataclass(frozen=True)
class TruncatedPoisson(Sampling):
    """Poisson sampling with q = B/n; of draws above M units a uniformly random subset of M is kept.

    Why dp_accounting's event bounds it, as long as n is public. Let R be the others that were
    drawn. With |R| < M nothing is cut, and the step is Poisson's. Otherwise the kept ones are a
    uniform subset W of M others or, with a probability p that does not depend on W, the unit in
    the place of one of them, w. So with and without the unit's gradient g the sums are mixtures of
    ΣW with ΣW − w + g, and of ΣW with ΣW − w. Of all mixtures (1−p)·N(0) + p·N(x) and
    (1−p)·N(0) + p·N(y) with norms up to 2C, those with x = −y of norm 2C are the furthest apart in
    every hockey-stick divergence: as E(a·e^U − b·e^V + c)₊ of Gaussian U and V, with a, b ≥ 0,
    falls in their covariance, by Slepian's inequality, x and y are opposite; then the largest set
    is a half-line, and grows with both norms. That is the event's pair. Which of the two cases it
    was is the same with and without g, so that their mixture bounds both.

    Reference: Ganesh, "Tighter privacy analysis for truncated Poisson sampling", 2025,
    arXiv:2508.15089.
    """

    max_batch_size: int = 0

    kind = "truncated_poisson"
    adjacencies = ("zero_out",)
    why_no_other = (
        "how often a draw is cut depends on the number of units, which an added one changes, and "
        "for a replaced one no bound is established. Take 'zero_out', or no cap"
    )
    unpriced_by = _UNPRICED_CUT
    varies_in_size = True

    def __post_init__(self):
        super().__post_init__()
        most = self._keep_whole("max_batch_size", "Give the most examples of a batch.")
        if most < self.batch_size:
            raise ValueError(
                f"max_batch_size={most} is below the expected batch_size={self.batch_size}: most "
                "draws would be cut. Choose a cap several standard deviations above it."
            )
        if self.examples_per_unit is not None:
            raise ValueError(
                "Truncated Poisson sampling is accounted for units that are one example each; "
                f"received examples_per_unit={self.examples_per_unit}. Use Sampling.poisson."
            )

    @property
    def uncut(self) -> Sampling:
        return Poisson(self.num_examples, self.batch_size, self.adjacency, self.unit)

    def sampled(self, event: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
        if isinstance(event, dp_accounting.NonPrivateDpEvent):
            return event
        if not isinstance(event, dp_accounting.GaussianDpEvent):
            raise ValueError(f"{_CUT_GAUSSIAN_ONLY}; received: {type(event).__name__}.")
        n, q, most = self.num_examples, self.sampling_probability, self.max_batch_size
        if stats.binom.sf(most - 1, n - 1, q) < 1e-200:  # never, as far as any δ can tell
            return dp_accounting.PoissonSampledDpEvent(q, event)
        return dp_accounting.TruncatedSubsampledGaussianDpEvent(n, q, most, event.noise_multiplier)

    def check_releases(self, releases: Sequence[Release]) -> None:
        _need_gaussian(releases, _CUT_GAUSSIAN_ONLY, "Use noise='gaussian', or leave out the cap.")

    def _in_words(self):
        return (
            f"Truncated Poisson sampling: each {self.unit} is drawn for each batch independently "
            f"with probability {self._chance}; of a draw of more than {self.max_batch_size} a "
            "uniformly random subset of that size is kept."
        )


_CUT_GAUSSIAN_ONLY = (
    "Truncated Poisson sampling is priced for Gaussian noise that is independent from step to step"
)


def _need_gaussian(releases, only, instead):
    """Refuses other noise than Gaussian noise that is independent from step to step."""
    for mechanism in (each.mechanism for each in releases if not each.is_public):
        if mechanism.is_correlated or not isinstance(
            mechanism.event(1.0), dp_accounting.GaussianDpEvent
        ):
            raise ValueError(f"{only}; received: {type(mechanism).__name__} noise. {instead}")


@register
@dataclasses.dataclass(frozen=True)
class BallsInBins(Sampling):
    """In every epoch each unit is in one of its t = ⌈n/B⌉ batches, drawn at random.

    All units are assigned independently of each other, anew in each epoch. An epoch is priced as a
    whole, once it has begun.

    Reference: Chua et al., "Balls-and-bins sampling for DP-SGD", AISTATS 2025, arXiv:2412.16802.
    """

    kind = "balls_in_bins"
    adjacencies = ("add_or_remove_one", "zero_out")
    why_no_other = (
        "which pair of outputs is the worst for a replaced unit is not proven. Take 'zero_out', "
        "which also leaves the number of units as it is, or account the epochs without "
        "amplification, as Sampling.shuffled"
    )
    varies_in_size = True
    draws_passes = True
    deals_epochs = True

    def sampled(self, event: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
        return self.epoch([(event, self.steps_per_epoch)])

    def epoch(self, events: Sequence[tuple[dp_accounting.DpEvent, int]]) -> dp_accounting.DpEvent:
        """The event of one epoch.

        Args:
            events: pairs (the event on a batch that the unit is in, how many batches have it), in
                any order.

        Raises:
            ValueError: one of them is not a Gaussian release, the only kind that is priced.
        """
        for event, _ in events:
            if isinstance(event, dp_accounting.NonPrivateDpEvent):
                return event
            if not isinstance(event, dp_accounting.GaussianDpEvent):
                raise ValueError(f"{_GAUSSIAN_ONLY}; received: {type(event).__name__}. {_INSTEAD}")
        multipliers = tuple((event.noise_multiplier, count) for event, count in events)
        return RandomAllocationDpEvent(multipliers, self.steps_per_epoch)

    def check_releases(self, releases: Sequence[Release]) -> None:
        _need_gaussian(releases, _GAUSSIAN_ONLY, _INSTEAD)

    @property
    def period(self) -> int:
        return self.steps_per_epoch

    @property
    def in_passes(self) -> bool:
        return self.period > 1

    def _in_words(self):
        unit, steps = self.unit, self.steps_per_epoch
        return (
            f"Balls in bins: at the start of every epoch each {unit} is put, independently of all "
            f"others and uniformly at random, into one of the epoch's {steps} batches, whose "
            f"number is fixed, so that it comes exactly once an epoch. An epoch that was begun is "
            "accounted as a whole."
        )


_GAUSSIAN_ONLY = "Balls in bins are priced for Gaussian noise that is independent from step to step"
_INSTEAD = (
    "Use noise='gaussian'; for Laplace noise, dp_keras_opt.data.poisson_batches; for correlated "
    "noise, fixed_order_epochs or cyclic_poisson."
)


@register
@dataclasses.dataclass(frozen=True)
class WithoutReplacement(Sampling):
    """Each batch is a fresh, uniformly random subset of exactly B units.

    Reference: Wang, Balle and Kasiviswanathan, "Subsampled Rényi differential privacy and
    analytical moments accountant", AISTATS 2019, arXiv:1808.00087, theorem 27.
    """

    kind = "without_replacement"
    adjacencies = _FIXED_SIZE
    why_no_other = "with the batch size fixed, an added example displaces another"
    unpriced_by = {
        "pld": "dp_accounting has no privacy loss distribution for it. Use accountant='rdp', or "
        "Poisson sampling."
    }

    def sampled(self, event: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
        return dp_accounting.SampledWithoutReplacementDpEvent(
            self.num_examples, self.batch_size, event
        )

    @property
    def noise_adjacency(self) -> Adjacency:
        """That of a replaced example, under each adjacency.

        The theorem also compares the batches that hold the example with those that hold another in
        its place: that moves the sum by 2C. An example whose gradient is zeroed is a replaced one,
        so `zero_out` has the guarantee of `replace_one`; no better is proven.
        """
        return "replace_one"

    @property
    def neighboring_relation(self) -> dp_accounting.NeighboringRelation:
        return dp_accounting.NeighboringRelation.REPLACE_ONE

    def _in_words(self):
        return (
            "Sampling without replacement: each batch is a fresh, uniformly random subset of "
            f"exactly {self.batch_size} of the {self.num_examples} {self.unit}s."
        )


@register
@dataclasses.dataclass(frozen=True)
class Full(Sampling):
    """Each batch is the whole training set: no amplification."""

    kind = "full"
    takes_all = True
    is_amplified = False

    def __post_init__(self):
        super().__post_init__()
        if self.batch_size != self.num_examples:
            raise ValueError(
                f"batch_size must equal num_examples={self.num_examples} for full batches; "
                f"received {self.batch_size}. Use Sampling.full(num_examples), or another kind of "
                "sampling."
            )

    def sampled(self, event: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
        return event

    @property
    def separation(self) -> int | None:
        return 1

    def _in_words(self):
        return (
            f"Full batches: every step takes all {self.num_examples} {self.unit}s, so there is no "
            "amplification by sampling."
        )


@dataclasses.dataclass(frozen=True)
class _Epochs(Sampling):
    """Passes over the data, in each of which a unit comes at most once."""

    deals_epochs = True
    drop_remainder: bool = False

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.drop_remainder, bool):
            raise ValueError(
                f"drop_remainder must be True or False; received {self.drop_remainder!r}."
            )

    @property
    def steps_per_epoch(self) -> int:
        if self.drop_remainder:
            return self.num_examples // self.batch_size
        return super().steps_per_epoch


@dataclasses.dataclass(frozen=True)
class _OncePerEpoch(_Epochs):
    """Accounted as one release per started pass, at worst the one with the least noise."""

    adjacencies = _FIXED_SIZE
    why_no_other = "an added example shifts all later batches"
    is_amplified = False

    def sampled(self, event: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
        return event

    @property
    def period(self) -> int:
        return self.steps_per_epoch

    @property
    def in_passes(self) -> bool:
        return self.period > 1


@register
@dataclasses.dataclass(frozen=True)
class Shuffled(_OncePerEpoch):
    """Epochs over a shuffled data set, accounted without amplification by the shuffling."""

    kind = "shuffled"

    def _in_words(self):
        return (
            f"Shuffled epochs of {self.steps_per_epoch} steps in which each {self.unit} comes at "
            "most once, accounted without amplification by sampling."
        )


@register
@dataclasses.dataclass(frozen=True)
class ShuffledAccountedAsPoisson(_Epochs):
    """Shuffled epochs, priced as if each step were Poisson sampled: a heuristic.

    Reference: that the true epsilon can be much larger is shown by Chua, Ghazi, Kamath, Kumar,
    Manurangsi, Sinha and Zhang, "How private are DP-SGD implementations?", ICML 2024,
    arXiv:2403.17673.
    """

    kind = "shuffled_accounted_as_poisson"
    is_heuristic = True

    def sampled(self, event: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
        return dp_accounting.PoissonSampledDpEvent(self.sampling_probability, event)

    def _in_words(self):
        return (
            "HEURISTIC, NOT A PROVEN GUARANTEE: the data were shuffled, but accounted as if each "
            f"{self.unit} were in each batch independently with probability {self._chance} "
            "(Poisson sampling); the true epsilon may be larger."
        )


@register
@dataclasses.dataclass(frozen=True)
class FixedOrder(_OncePerEpoch):
    """Epochs in one order: a unit's steps are exactly an epoch's length apart."""

    kind = "fixed_order"
    has_one_order = True

    @property
    def separation(self) -> int | None:
        return self.steps_per_epoch

    def _in_words(self):
        return (
            f"Epochs of {self.steps_per_epoch} steps in one fixed order, in which each {self.unit} "
            "comes at most once, always at the same step; accounted without amplification by "
            "sampling."
        )


@register
@dataclasses.dataclass(frozen=True)
class CyclicPoisson(Sampling):
    """Poisson sampling with q = B·groups/n from groups of units that take turns.

    Reference: Choquette-Choo et al., "(Amplified) banded matrix factorization: a unified approach
    to private training", NeurIPS 2023, arXiv:2306.08153, section 5.
    """

    groups: int = 1

    kind = "cyclic_poisson"
    is_poisson = varies_in_size = True

    def __post_init__(self):
        super().__post_init__()
        n, size = self.num_examples, self.batch_size
        groups = self._keep_whole("groups", "Give the number of groups.")
        if size * groups > n:
            raise ValueError(
                f"batch_size={size} from one of {groups} groups of {n} {self.unit}s would need a "
                f"sampling probability above 1. Use at most {n // size} groups, or a smaller batch."
            )

    def sampled(self, event: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
        return dp_accounting.PoissonSampledDpEvent(self.sampling_probability, event)

    @property
    def steps_per_epoch(self) -> int:
        """In whole rounds of the groups."""
        return self.groups * math.ceil(self.num_examples / (self.batch_size * self.groups))

    @property
    def period(self) -> int:
        return self.groups

    @property
    def separation(self) -> int | None:
        return self.groups

    def _in_words(self):
        unit, n, size = self.unit, self.num_examples, self.batch_size
        return (
            f"Cyclic Poisson sampling: the {unit}s are divided into {self.groups} groups without "
            f"looking at them, which take turns; in its group's turn, each {unit} is in the batch "
            f"independently with probability {size}*{self.groups}/{n} = "
            f"{self.sampling_probability:.4g}."
        )


def need_sampling(sampling):
    """Refuses what is no `Sampling`."""
    if not isinstance(sampling, Sampling):
        raise ValueError(
            f"sampling must be a dp_keras_opt.accounting.Sampling; received {sampling!r}. "
            "Use e.g. Sampling.poisson(num_examples, batch_size)."
        )


def check_sampling(optimizer, sampling):
    """Refuses an optimizer whose noise does not fit batches that are sampled this way."""
    need_sampling(sampling)
    if optimizer.batch_size != sampling.divisor:
        raise ValueError(
            f"The optimizer divides by batch_size={optimizer.batch_size}, the sampling has "
            f"batch_size={sampling.divisor}. Give both the same expected batch size; an optimizer "
            "that took its own from an earlier fit keeps it: compile with a new one."
        )
    optimizer.check_sampling(sampling)
    sampling.check_releases(optimizer.releases_for(1.0))
