"""The record of what was spent: which steps ran, with which noise, on which batches."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from dp_keras_opt import deprecation
from dp_keras_opt.accounting import accountant as accountants
from dp_keras_opt.accounting import versions
from dp_keras_opt.accounting.events import step_event
from dp_keras_opt.accounting.journal import Journal, read
from dp_keras_opt.accounting.plan import Plan
from dp_keras_opt.accounting.privacy_filters import FilterBudget, admit, common_filter
from dp_keras_opt.accounting.privacy_statement import statement
from dp_keras_opt.accounting.protocols import Optimizer
from dp_keras_opt.accounting.repetitions import RandomRepetitions
from dp_keras_opt.accounting.risk import Risk, risk_of
from dp_keras_opt.accounting.sampling import Sampling, check_sampling, need_sampling
from dp_keras_opt.accounting.segment import TRAINING, Segment, stated
from dp_keras_opt.checks import whole_number
from dp_keras_opt.noise import schedules
from dp_keras_opt.noise.mechanism import Release
from dp_keras_opt.types import Accountant, Path

_MOST_STEPS = 2**40

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _alone(method: _Method) -> _Method:
    """A method that no other thread meets halfway: what both enter would be counted once."""

    @functools.wraps(method)
    def held(self, *args, **kwargs):
        with self._lock:
            return method(self, *args, **kwargs)

    return held  # type: ignore[return-value]


class Ledger:
    """What a model has spent, over all its runs; kept in a file, if one is given.

    Steps are reserved *before* they run, so that a crash over-counts and never under-counts:

        ledger.begin(optimizer.releases, sampling)
        ledger.reserve(100)          # about to run 100 steps
        ledger.settle(100, 37)       # only 37 of them ran

    With a file, `model.ledger = Ledger("spent.jsonl")` records on disk what every model with this
    ledger spends: whatever kills the process, a later `Ledger` of that file counts at least the
    steps that ran. So that not every step waits for the disk, 1% of the steps so far are reserved
    ahead, by which a crash over-counts. Whoever tries several models on the same data gives all of
    them one ledger.

    Formal guarantee: `epsilon` bounds the privacy loss of every step reserved and not given
    back, if the steps released what `begin` was told, on batches sampled as it was told. Not
    covered: whatever else was computed from the data (`statement` lists it).

    With shuffled sampling and balls in bins a segment starts with a fresh pass over the data: begin
    another one wherever the pipeline starts over before the end of an epoch.

    Args:
        path: None, or the file, which is made if there is none. It is locked until `unlock`, or
            until the process ends.

    Raises:
        ValueError: the file is not a ledger, was altered, or is of a later version of the library.
        RuntimeError: the file is in use.
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._lock = threading.RLock()
        self._closed = []
        self._current: Any = None
        self._pending = 0  # steps reserved and not yet settled
        self._journal = None if path is None else Journal(path)
        self._unlocked: pathlib.Path | None = None  # the file that was given up
        self._earlier = {}  # run -> what was planned of it before the last plan
        if self._journal:
            self._closed = list(self._journal.segments)

    @classmethod
    def of_segments(cls, segments: Sequence[Segment]) -> Ledger:
        """The ledger, in memory, of these segments, all of them closed."""
        ledger = cls()
        ledger._closed = list(segments)
        return ledger

    @classmethod
    def read(cls, path: Path) -> Ledger:
        """What a ledger file says, also while another process writes to it; a copy in memory.

        Raises:
            ValueError: the file is not a ledger, was altered, or is of a later version of the
                library.
            OSError: the file cannot be read.
        """
        return cls.of_segments(read(path))

    @property
    def path(self) -> pathlib.Path | None:
        """Of the file; None without one."""
        return None if self._journal is None else self._journal.path

    @classmethod
    def of(cls, optimizer: Optimizer, sampling: Sampling, steps: int) -> Ledger:
        """The planned ledger of `steps` steps of `optimizer` on batches of `sampling`.

        Args:
            optimizer: an optimizer of `dp_keras_opt.optimizers`, with its noise multiplier set.
            sampling: the `Sampling` of the batches.
            steps: number of steps, from 0.

        Raises:
            ValueError: the optimizer and the sampling disagree on the batch size, the noise
                multiplier is not set, or the noise schedule is shorter than `steps`.
        """
        steps = whole_number(steps, "steps", 0, "Give the number of training steps.")
        check_sampling(optimizer, sampling)
        ledger = cls()
        ledger.begin(
            optimizer.releases, sampling, optimizer.noise_schedule, clip_norm=optimizer.clip_norm
        )
        ledger.reserve(steps)
        return ledger

    @property
    def segments(self) -> tuple[Segment, ...]:
        """All segments, oldest first."""
        return (*self._closed, *([self._current] if self._current else []))

    def of_data_set(self, name: str = TRAINING) -> tuple[Segment, ...]:
        """The segments of what was released of one data set, oldest first."""
        return tuple(segment for segment in self.segments if segment.data_set == name)

    def _asked_for(self, name):
        """The same, of a data set that the ledger must know, if it knows any."""
        found = self.of_data_set(name)
        if self.segments and not found:
            names = sorted({segment.data_set for segment in self.segments})
            raise ValueError(
                f"Of the data set {name!r} the ledger has nothing, but of {names}. Name one of "
                "these: what was released of them is not nothing."
            )
        return found

    @property
    def current(self) -> Segment | None:
        """The segment that the next steps belong to, None before `begin` and after `close`."""
        return self._current

    @property
    def steps(self) -> int:
        """Number of steps of all segments."""
        return _steps(self.segments)

    @_alone
    def begin(
        self,
        releases: Sequence[Release],
        sampling: Sampling,
        schedule: schedules.NoiseSchedule | None = None,
        clip_norm: Any = None,
        first_step: int = 0,
        run: str | None = None,
        selection: RandomRepetitions | None = None,
        plan: Plan | None = None,
        filter: FilterBudget | None = None,
        conditions: Sequence[str] = (),
    ) -> None:
        """Starts a new segment, to which the next steps belong.

        Args:
            releases: tuple of `dp_keras_opt.noise.Release`.
            sampling: the `Sampling` of the batches to come.
            schedule: noise schedule, None for constant noise.
            clip_norm: C, or its schedule, for the statement.
            first_step: place of the next step in the schedule.
            run: name of the segment, if several processes record the same one; default: fresh.
            selection: None, or the `RandomRepetitions` of which this run was the best.
            plan: None, or the `Plan` that its noise was found for.
            filter: None, or `Budget.filter`, of a budget that is kept by a privacy filter.
            conditions: names of what the guarantee rests on besides: "noise seed", "batch seed",
                "stated sampling". The statement says what they mean.

        Raises:
            ValueError: an argument is of the wrong type; the filter is not that of the steps
                before, or cannot price these.
            RuntimeError: the ledger has given up its file.
        """
        self._need_file()
        need_sampling(sampling)
        segment = Segment(
            run=run or secrets.token_hex(16),
            releases=tuple(releases),
            schedule=schedules.get(schedule),
            sampling=sampling,
            clip_norm=stated(clip_norm),
            first_step=first_step,
            selection=selection,
            plan=plan,
            filter=filter and filter.after(_steps(self.of_data_set())),
            after=tuple(sorted(s.state for s in self.segments if s.planned_steps > s.steps > 0)),
            conditions=tuple(conditions),
        )
        _check_accountable(segment, self.of_data_set(segment.data_set))
        self.close()
        self._current = segment

    @_alone
    def enter(self, segment: Segment) -> None:
        """Counts what is about to be released beside the training, once and as a whole.

        The run that goes on is not interrupted by it, but under a privacy filter, whose budget the
        release keeps, too.

        Args:
            segment: a `Segment` of another run than those that the ledger knows.

        Raises:
            ValueError: its noise cannot be accounted, the ledger knows its run, or what is left of
                the budget of a privacy filter does not allow it.
            RuntimeError: the ledger has given up its file.
        """
        self._need_file()
        if any(known.run == segment.run for known in self.segments):
            raise ValueError(f"Run {segment.run} is in the ledger already. Enter a release once.")
        before = [known for known in self.of_data_set(segment.data_set) if known.steps]
        held = segment.filter or common_filter(before)
        if held is not None:
            segment = dataclasses.replace(segment, filter=held.after(_steps(before)))
        _check_accountable(segment, before)
        if segment.filter is not None and not segment.filter.is_kept([*before, segment]):
            raise ValueError(
                f"The release would exceed the budget of the privacy filter ({segment.filter}). "
                "Release it with more noise, or not at all."
            )
        self.absorb(Ledger.of_segments([segment]))

    def segment(self, run: str, steps: int) -> Segment:
        """The segment of a run after exactly this number of steps.

        Raises:
            ValueError: there is none.
        """
        for segment in self.segments:
            if (segment.run, segment.steps) == (run, steps):
                return segment
        raise ValueError(
            f"The ledger has no run {run} of {steps} steps: the model is another one, or of "
            "another time, than the one whose run is resumed. Load the model that was saved "
            "with it, or train on without it, which begins a new run."
        )

    @_alone
    def resume(self, run: str, steps: int) -> None:
        """Makes the closed segment of a run the current one again, under a new name.

        The new name keeps apart what two processes do that both go on with the same run.

        Raises:
            ValueError: there is none of exactly this number of steps.
            RuntimeError: the ledger has given up its file.
        """
        self._need_file()
        self.close()
        found = self.segment(run, steps)
        resumed = dataclasses.replace(found, run=secrets.token_hex(16))
        if self._journal:
            self._journal.record(resumed, continues=run)
        self._current = resumed  # first: who reads in between counts twice, not nothing
        self._closed.remove(found)

    @_alone
    def plan(self, steps: float, run: str | None = None) -> None:
        """Says how many further steps of the current segment are planned, before they run.

        The plan stays, and is what `statement` guarantees, unless `fulfil` says that nothing but
        the data and the ledger ended the training.

        Args:
            steps: a number >= 0; `math.inf` where it is not known. No more count than the noise
                schedule has left.
            run: None, or the segment that they belong to.

        Raises:
            ValueError: no segment has begun.
            RuntimeError: the current segment is that of another run.
        """
        if steps != math.inf:
            steps = whole_number(steps, "steps", 0, "Give the number of steps to come.")
        self._need_current(run)
        current = self._current
        self._earlier[current.run] = current.planned
        planned = current.steps + min(steps, current.end[0])
        self._replace(current, planned=max(current.planned or 0, planned))

    @_alone
    def fulfil(self, run: str) -> None:
        """Says that a run did what was planned last, or as much as there were data or budget for.

        Results had no part in how many steps ran, so these are the whole of the plan.
        """
        for segment in self.segments:
            if segment.run == run:
                planned = max(self._earlier.get(run) or 0, segment.steps)
                self._replace(segment, planned=planned)

    @_alone
    def reserve(self, steps: int, run: str | None = None) -> None:
        """Counts `steps` steps that are about to run.

        Args:
            steps: how many.
            run: None, or the segment that they belong to.

        Raises:
            ValueError: no segment has begun, or there is noise for fewer steps.
            RuntimeError: the current segment is that of another run.
        """
        steps = whole_number(steps, "steps", 0, "Reserve the number of steps about to run.")
        self._need_current(run)
        self._current.check_end(steps)
        if self._journal:
            self._journal.reserve(self._current, steps)
        self._add(steps)
        self._pending += steps

    @_alone
    def settle(self, reserved: int, executed: int, run: str | None = None) -> None:
        """Gives back those reserved steps that provably did not run.

        Where that ends the segment within an epoch, the next steps need a `begin`: the pass over
        the data may start afresh.

        Args:
            reserved: steps of an earlier `reserve`.
            executed: how many of them ran, or may have run.
            run: None, or the segment that they belong to; where another has begun since, they all
                stay counted.

        Raises:
            ValueError: more steps are said to have run, or are settled, than were reserved.
        """
        reserved = whole_number(reserved, "reserved", 0, "Give the number passed to reserve.")
        executed = whole_number(executed, "executed", 0, "Give the number of steps that ran.")
        if executed > reserved:
            raise ValueError(
                f"executed={executed} exceeds reserved={reserved}: steps ran that were not "
                "accounted. Reserve all steps before they run."
            )
        if run is not None and (self._current is None or self._current.run != run):
            return
        if reserved > self._pending:
            raise ValueError(
                f"reserved={reserved} exceeds the {self._pending} steps of this segment that are "
                "reserved and not settled. Settle each reservation once, before `begin` or "
                "`merge`."
            )
        self._pending -= reserved
        if executed == reserved:
            return
        self._add(executed - reserved)
        if self._current.breaks_off and not self._pending:
            self.close()

    def epsilon(
        self,
        delta: float,
        accountant: Accountant = "auto",
        exact: bool = False,
        data_set: str = TRAINING,
    ) -> float:
        """Epsilon of all that was released of a data set, as if it had been fixed beforehand.

        See `accountant.epsilon_of`. Of steps under a privacy filter it is what they spent, by its
        sum; the guarantee is `epsilon_as_planned`.
        """
        return accountants.epsilon_of(self._asked_for(data_set), delta, accountant, exact)

    def epsilon_as_planned(
        self, delta: float, accountant: Accountant = "auto", data_set: str = TRAINING
    ) -> float:
        """Epsilon of what was planned, at least that of the steps that ran.

        It is the guarantee where a stop may have looked at results, as early stopping does. Where
        how many steps were planned is not known, those that ran count. Steps that kept the budget
        of a privacy filter have the guarantee of that budget, whatever results decided.
        """
        return accountants.promised(self._asked_for(data_set), delta, accountant).epsilon

    def epsilon_bracket(self, delta: float, accountant: Accountant = "auto") -> tuple[float, float]:
        """(lower, upper): `epsilon` is the upper one; with `exact=True` it would lie between.

        They differ where a noise schedule has more than 400 distinct factors, which are rounded.
        """
        return accountants.epsilon_bracket(self._asked_for(TRAINING), delta, accountant)

    def risk(self, accountant: Accountant = "auto", data_set: str = TRAINING) -> Risk:
        """What any attack on one unit can gain at most from all that was released of a data set.

        From the whole distribution of privacy losses, which says more than ε at one δ; where there
        is none, or with "rdp" and "pure", from ε at several δ. Of what was planned, where results
        may have stopped the training; of the budget of a privacy filter that was kept.

        Returns:
            `accounting.Risk`, which has the figures as methods; print it for a summary.

        Raises:
            ValueError: the steps do not compose to one guarantee, or the accountant cannot price
                them.
        """
        return risk_of(self._asked_for(data_set), accountant)

    def affordable_steps(
        self, epsilon: float, delta: float, accountant: Accountant = "auto"
    ) -> int:
        """How many further steps of the current segment keep within the budget.

        Args:
            epsilon: the budget, a number >= 0 or infinite.
            delta: as in `epsilon`.
            accountant: "auto", "rdp", "pld", "pure" or a privacy filter.

        Returns:
            The largest n such that the epsilon of all steps and n more is at most the budget;
            0 if it is spent already; at most what is left of the noise schedule, and 2**40.

        Raises:
            ValueError: no segment has begun, or an argument is out of range.
        """
        self._need_current()
        limit = min(self._current.end[0], _MOST_STEPS)
        past = [each for each in self._closed if each.data_set == self._current.data_set]
        return accountants.affordable_steps(past, self._current, limit, epsilon, delta, accountant)

    def statement(self, delta: float, accountant: Accountant = "auto", group_size: int = 1) -> str:
        """The guarantee in words; see `accounting.statement`."""
        return statement(self, delta, accountant, group_size)

    @_alone
    def merge(self, other: Ledger) -> None:
        """Adds the history of `other`, counting once what both have recorded.

        Segments of the same run are one history: the longer one counts. Others are added. The
        current segment is closed, so that later steps have a new run of their own.

        Args:
            other: a `Ledger`, e.g. the one of a loaded checkpoint.

        Raises:
            ValueError: `other` is not a ledger, or gives one run different contents.
        """
        self.absorb(other)
        self.close()

    @_alone
    def absorb(self, other: Ledger) -> None:
        """Does as `merge`, but goes on with the current segment, unless `other` knows more of it.

        Under a privacy filter it goes on with none: a segment knows all that was before it.

        Raises:
            ValueError: as `merge`.
        """
        if not isinstance(other, Ledger):
            raise ValueError(f"other must be a Ledger; received {other!r}.")
        known, new = {segment.run: segment for segment in self.segments}, {}
        for segment in other.segments:
            own = known.get(segment.run)
            if own is not None and own is not segment:
                _check_same(own, segment)
            if segment.steps and (own is None or _progress(own) < _progress(segment)):
                known[segment.run] = new[segment.run] = segment
        current = self._current
        beside = [each for each in new.values() if current and each.data_set == current.data_set]
        filtered = any(segment.filter for segment in (*beside, current) if segment)
        if current and (current.run in new or (beside and filtered)):
            self.close()
        kept = {segment.run: segment for segment in self._closed}
        self._closed = list((kept | new).values())
        for segment in new.values():
            if self._journal:
                self._journal.record(segment)

    # A copy that trains on is another run than the original, and has no file.

    def __copy__(self):
        return Ledger.of_segments(self.segments)

    def __deepcopy__(self, memo):
        return self.__copy__()

    def __reduce__(self):
        if self._journal:
            raise TypeError(
                f"A ledger with a file, {self.path}, cannot be pickled, as for another process: "
                "what is spent there would be in no file. Give each process a ledger with a file "
                "of its own, and merge what Ledger.read gives; or pickle copy.copy(ledger)."
            )
        return Ledger.of_segments, (self.segments,)

    def to_json(self) -> str:
        """The ledger as text."""
        segments = [segment.to_config() for segment in self.segments if segment.steps]
        return json.dumps({**versions.STAMP, "segments": segments}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Ledger:
        """The ledger that `to_json` wrote, with all its segments closed.

        Raises:
            ValueError: the text is not that of a ledger, or is of a later version of the library.
        """
        not_one = "text is not a ledger of this version of dp_keras_opt: it"
        try:
            content = json.loads(text)
            versions.check(content | {"format": content["format"]}, not_one)  # it must have one
            segments = [Segment.from_config(config) for config in content["segments"]]
            return cls.of_segments(segments)
        except versions.NewerLedgerError:
            raise
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"text is not a ledger of this version of dp_keras_opt: {error}. "
                "Give the text that Ledger.to_json returned."
            ) from error

    def _need_file(self):
        if self._unlocked is not None:
            raise RuntimeError(
                f"The ledger has given up its file {self._unlocked}, which would not know of "
                "further steps. Assign Ledger(path) to the model again."
            )

    def _need_current(self, run=None):
        if self._current is not None and run not in (None, self._current.run):
            raise RuntimeError(
                "Another model began a run on this ledger in between, as threads may: these steps "
                "would be counted as its steps, with its noise. Train one model at a time, or give "
                "each thread a ledger of its own and merge them."
            )
        if self._current is None:
            raise ValueError(
                "The ledger has no current segment: call begin(releases, sampling) first, also "
                "after merge and from_json."
            )

    def _add(self, steps):
        self._current = dataclasses.replace(self._current, steps=self._current.steps + steps)

    def _replace(self, segment, **changes):
        changed = dataclasses.replace(segment, **changes)
        if segment is self._current:
            self._current = changed
        else:
            self._closed[self._closed.index(segment)] = changed
        if self._journal and self._journal.knows(segment.run):
            self._journal.record(changed)

    @_alone
    def close(self) -> None:
        """Ends the current segment: the next steps need a `begin`."""
        self.sync()
        if self._current and self._current.steps:
            self._closed.append(self._current)
        self._current, self._pending = None, 0

    @_alone
    def _drop_last(self):
        """Takes out the last segment, which another entry covers: of a private selection."""
        self.close()
        self._closed.pop()

    @_alone
    def sync(self) -> None:
        """Writes into the file how many steps of the current segment ran, without those ahead."""
        if self._journal and self._current and self._journal.knows(self._current.run):
            self._journal.record(self._current)

    @_alone
    def unlock(self) -> None:
        """Ends the current segment and gives up the file, for another process to write to."""
        self.close()
        if self._journal:
            self._journal.close()
            self._unlocked, self._journal = self.path, None

    release = deprecation.renamed_attribute("release", "unlock")


def _check_accountable(segment, before):
    """Refuses a segment that cannot be accounted, or not beside those before it.

    Raises:
        ValueError: the message names what cannot be.
    """
    step_event(segment.releases, segment.sampling.noise_adjacency)
    segment.sampling.check_releases(segment.releases)
    admit(before, segment)
    _check_units(before, segment)


def _check_units(segments, new):
    """Refuses rows that were counted as units of several rows: their guarantees would not add up.

    Raises:
        ValueError: a statistic is of more units than the training that protects them has.
    """
    for known in segments:
        if known.sampling.unit != new.sampling.unit:
            continue
        for one, other in ((known.sampling, new.sampling), (new.sampling, known.sampling)):
            if one.examples_per_unit is not None and one.num_examples < other.num_examples:
                raise ValueError(
                    f"The training is of {one.num_examples} {one.unit}s, each with all of their "
                    f"rows, and what is released beside it of {other.num_examples} {one.unit}s: "
                    "were rows counted as such? Give the ids: PrivateData(..., users=ids)."
                )


def _steps(segments):
    return sum(segment.steps for segment in segments)


def _progress(segment):
    """Of two records of a run the later one has more steps, or knows that the plan is done."""
    done = segment.planned is not None and segment.planned <= segment.steps
    return segment.steps, done, segment.planned_steps


def _check_same(segment, other):
    """Refuses two records of one run that differ in more than how far it came."""
    other = dataclasses.replace(other, steps=segment.steps, planned=segment.planned)
    if other.to_config() != segment.to_config():
        raise ValueError(
            f"Run {segment.run} is recorded with different noise or sampling in the two ledgers: "
            "one of them was altered."
        )
