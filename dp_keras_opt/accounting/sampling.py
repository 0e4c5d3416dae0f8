"""How batches are drawn from the data, and which data sets count as neighbours."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from dp_keras_opt.checks import whole_number
from dp_keras_opt.types import Adjacency

#: For each kind of sampling, the adjacencies under which it can be accounted.
ADJACENCIES = {
    "poisson": ("add_or_remove_one", "zero_out", "replace_one"),
    "without_replacement": ("replace_one", "zero_out"),
    "full": ("add_or_remove_one", "zero_out", "replace_one"),
    "shuffled": ("replace_one", "zero_out"),
    "fixed_order": ("replace_one", "zero_out"),
    "cyclic_poisson": ("add_or_remove_one", "zero_out", "replace_one"),
    "shuffled_accounted_as_poisson": ("add_or_remove_one", "zero_out", "replace_one"),
}

_WHY_NOT_ADD_OR_REMOVE = {
    "without_replacement": "with the batch size fixed, an added example displaces another",
    "shuffled": "an added example shifts all later batches",
    "fixed_order": "an added example shifts all later batches",
}


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The sampling that the data pipeline does, with the neighbouring relation to protect.

    The guarantee holds only if the pipeline really samples this way: nothing here can see it.
    Use the class methods, one for each kind of sampling.

    Attributes:
        kind: "poisson", "without_replacement", "full", "shuffled",
            "shuffled_accounted_as_poisson", "fixed_order" or "cyclic_poisson".
        num_examples: n, the number of privacy units in the training set.
        batch_size: B, the *expected* batch size, a public constant.
        adjacency: which data sets are neighbours. "add_or_remove_one": one unit more or fewer;
            "zero_out": the gradient of one unit replaced by 0; "replace_one": one unit changed.
        unit: the privacy unit in words, e.g. "rating" where a row of the data is a rating.
        drop_remainder: for shuffled epochs, whether an incomplete last batch is dropped.
        groups: for cyclic Poisson sampling, into how many groups the units are divided.
        examples_per_unit: None where a unit is one example; else K where a unit is all examples of
            one person: of a unit that is drawn at most K take part, and are clipped as one, as
            those of `dp.data.poisson_users` are. Training refuses batches that are not so.

    Raises:
        ValueError: an argument is of the wrong type or out of range, or the adjacency cannot be
            accounted with this kind of sampling.
    """

    kind: str
    num_examples: int
    batch_size: int
    adjacency: Adjacency
    unit: str = "example"
    drop_remainder: bool = False
    groups: int = 1
    examples_per_unit: int | None = None
    #: Whether batches are padded, so that training needs the `Rows` that tell padding from data.
    #: Of batches in hand, and not of the sampling: neither compared nor saved.
    is_padded: bool = dataclasses.field(default=False, compare=False, repr=False)

    def __post_init__(self):
        if self.kind not in ADJACENCIES:
            raise ValueError(f"kind must be one of {list(ADJACENCIES)}; received {self.kind!r}.")
        n = whole_number(
            self.num_examples, "num_examples", 1, "Give the number of training examples."
        )
        size = whole_number(self.batch_size, "batch_size", 1, "Give the expected batch size.")
        if size > n:
            raise ValueError(
                f"batch_size must be at most num_examples={n}; received {size}. "
                "Use Sampling.full to take all examples at every step."
            )
        if self.kind == "full" and size != n:
            raise ValueError(
                f"batch_size must equal num_examples={n} for full batches; received {size}. "
                "Use Sampling.full(num_examples), or another kind of sampling."
            )
        if self.adjacency not in ADJACENCIES[self.kind]:
            why = _WHY_NOT_ADD_OR_REMOVE.get(self.kind)
            because = f": {why}" if why and self.adjacency == "add_or_remove_one" else ""
            raise ValueError(
                f"adjacency={self.adjacency!r} cannot be accounted with {self.kind!r} "
                f"sampling{because}. Use one of {list(ADJACENCIES[self.kind])}."
            )
        if not isinstance(self.unit, str) or not self.unit.strip():
            raise ValueError(
                f"unit must be the privacy unit in words, e.g. 'rating'; received {self.unit!r}."
            )
        if not isinstance(self.drop_remainder, bool) or (
            self.drop_remainder and not self.kind.startswith(("shuffled", "fixed_order"))
        ):
            raise ValueError(
                "drop_remainder must be True or False, and only epochs over the data have a "
                f"remainder; received {self.drop_remainder!r} with {self.kind!r} sampling."
            )
        groups = whole_number(self.groups, "groups", 1, "Give the number of groups.")
        if groups > 1 and self.kind != "cyclic_poisson":
            raise ValueError(
                f"Only cyclic Poisson sampling has groups; received groups={groups} with "
                f"{self.kind!r} sampling."
            )
        if size * groups > n:
            raise ValueError(
                f"batch_size={size} from one of {groups} groups of {n} {self.unit}s would need a "
                f"sampling probability above 1. Use at most {n // size} groups, or a smaller batch."
            )
        self._check_examples_per_unit()
        object.__setattr__(self, "groups", groups)
        object.__setattr__(self, "num_examples", n)
        object.__setattr__(self, "batch_size", size)

    def _check_examples_per_unit(self):
        most = self.examples_per_unit
        if most is None:
            return
        most = whole_number(most, "examples_per_unit", 1, "Give the most examples of a unit.")
        object.__setattr__(self, "examples_per_unit", most)
        if self.unit == "example":
            raise ValueError(
                f"examples_per_unit={most} says that a unit is several examples; received "
                "unit='example'. Name what it is: unit='user'."
            )

    @classmethod
    def poisson(
        cls,
        num_examples: int,
        batch_size: int,
        adjacency: Adjacency = "add_or_remove_one",
        *,
        unit: str = "example",
        examples_per_unit: int | None = None,
    ) -> Sampling:
        """Each unit is in each batch independently with probability B/n (batch sizes vary)."""
        return cls(
            "poisson",
            num_examples,
            batch_size,
            adjacency,
            unit,
            examples_per_unit=examples_per_unit,
        )

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
        return cls("without_replacement", num_examples, batch_size, adjacency, unit)

    @classmethod
    def full(
        cls, num_examples: int, adjacency: Adjacency = "add_or_remove_one", *, unit: str = "example"
    ) -> Sampling:
        """Each batch is the whole training set."""
        return cls("full", num_examples, num_examples, adjacency, unit)

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
        return cls("shuffled", num_examples, batch_size, adjacency, unit, drop_remainder)

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
        kind = "shuffled_accounted_as_poisson"
        return cls(kind, num_examples, batch_size, adjacency, unit, drop_remainder)

    @classmethod
    def fixed_order(
        cls,
        num_examples: int,
        batch_size: int,
        adjacency: Adjacency = "replace_one",
        *,
        unit: str = "example",
        drop_remainder: bool = False,
    ) -> Sampling:
        """Epochs in one order, the same in each: an example's steps are an epoch's length apart.

        What correlated noise needs; accounted without amplification, like `shuffled`.
        """
        return cls("fixed_order", num_examples, batch_size, adjacency, unit, drop_remainder)

    @classmethod
    def cyclic_poisson(
        cls,
        num_examples: int,
        batch_size: int,
        groups: int,
        adjacency: Adjacency = "add_or_remove_one",
        *,
        unit: str = "example",
    ) -> Sampling:
        """Poisson sampling from one group of units after the other, in turns.

        Each unit is assigned to a group without looking at the data. At step t those of group
        t mod groups are in the batch, each independently with probability B·groups/n. So a unit's
        steps are at least `groups` apart, as correlated noise wants it, and still amplified.
        """
        return cls("cyclic_poisson", num_examples, batch_size, adjacency, unit, groups=groups)

    @property
    def is_poisson(self) -> bool:
        """Whether units are drawn independently, so that batches can be of any size."""
        return self.kind in ("poisson", "cyclic_poisson")

    @property
    def sampling_probability(self) -> float:
        """q, the chance of a unit to be in a batch that it can be in: B/n, or B·groups/n."""
        return self.batch_size * self.groups / self.num_examples

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one pass over the data; of cyclic sampling, in whole rounds of the groups."""
        if self.drop_remainder:
            return self.num_examples // self.batch_size
        return self.groups * math.ceil(self.num_examples / (self.batch_size * self.groups))

    @property
    def period(self) -> int:
        """Each unit is in at most one batch of so many consecutive ones, counted from the start."""
        if self.kind in ("shuffled", "fixed_order"):
            return self.steps_per_epoch
        return self.groups

    @property
    def separation(self) -> int | None:
        """How many steps two batches of a unit are apart at least, None where it is not known."""
        known = {"full": 1, "fixed_order": self.steps_per_epoch, "cyclic_poisson": self.groups}
        return known.get(self.kind)

    @property
    def noise_adjacency(self) -> Adjacency:
        """The adjacency whose sensitivity the noise of a batch is held against.

        The bound for subsets of fixed size (Wang et al. 2019, theorem 27) also compares the batches
        that hold the example with those that hold another in its place: that moves the sum by 2C,
        whatever the adjacency. An example whose gradient is zeroed is a replaced one, so `zero_out`
        has the guarantee of `replace_one`; no better is proven.
        """
        return "replace_one" if self.kind == "without_replacement" else self.adjacency

    @property
    def is_heuristic(self) -> bool:
        """Whether epsilon rests on an assumption that is not proven for this sampling."""
        return self.kind == "shuffled_accounted_as_poisson"

    def describe(self) -> str:
        """In words, what the guarantee assumes of the data pipeline."""
        unit, n, size = self.unit, self.num_examples, self.batch_size
        chance = f"{size}/{n} = {self.sampling_probability:.4g}"
        drawn = {
            "poisson": f"Poisson sampling: each {unit} is in each batch independently with "
            f"probability {chance}.",
            "without_replacement": f"Sampling without replacement: each batch is a fresh, "
            f"uniformly random subset of exactly {size} of the {n} {unit}s.",
            "full": f"Full batches: every step takes all {n} {unit}s, so there is no "
            "amplification by sampling.",
            "shuffled": f"Shuffled epochs of {self.steps_per_epoch} steps in which each {unit} "
            "comes at most once, accounted without amplification by sampling.",
            "fixed_order": f"Epochs of {self.steps_per_epoch} steps in one fixed order, in which "
            f"each {unit} comes at most once, always at the same step; accounted without "
            "amplification by sampling.",
            "cyclic_poisson": f"Cyclic Poisson sampling: the {unit}s are divided into "
            f"{self.groups} groups without looking at them, which take turns; in its group's "
            f"turn, each {unit} is in the batch independently with probability "
            f"{size}*{self.groups}/{n} = {self.sampling_probability:.4g}.",
            "shuffled_accounted_as_poisson": "HEURISTIC, NOT A PROVEN GUARANTEE: the data were "
            f"shuffled, but accounted as if each {unit} were in each batch independently with "
            f"probability {chance} (Poisson sampling); the true epsilon may be larger.",
        }[self.kind]
        if self.examples_per_unit is None:
            return drawn
        return (
            f"{drawn} Of each {unit} in a batch at most {self.examples_per_unit} examples take "
            f"part, chosen without looking at any other {unit}; the gradient of their mean loss is "
            f"clipped as one. Assumed: each example carries the identifier of its {unit}, each "
            f"{unit} has one identifier, and no two share it."
        )

    def get_config(self) -> dict[str, Any]:
        """The attributes, as JSON-able values."""
        config = dataclasses.asdict(self)
        del config["is_padded"]
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Sampling:
        """The sampling with these attributes."""
        return cls(**config)


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
    if optimizer.batch_size != sampling.batch_size:
        raise ValueError(
            f"The optimizer divides by batch_size={optimizer.batch_size}, the sampling has "
            f"batch_size={sampling.batch_size}. Give both the same expected batch size."
        )
    optimizer.check_sampling(sampling)
