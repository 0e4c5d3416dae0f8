"""Synthetic batches: of the form of the data, with values that the model takes, found by trying."""

from __future__ import annotations

import bisect
import itertools
import math
import string
from collections.abc import Callable, Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from dp_keras_opt._keras import layers_of
from dp_keras_opt.clipping.batch import Batch

#: Numbers of ids to try, besides those that are sizes of something in the model.
_SIZES = (2, 3, 10, 100, 256, 1_000, 2**15, 2**16)
#: What stands for a label that is not there, besides numbers of classes.
_MARKS = (-1, -100, 255, -999, np.nan)
_MOST_MARKS = 16
#: What one row of inputs may be all of, for which code may leave out a batch.
_LONE = (np.nan, np.inf, 1e30, 0)
#: Lengths to try where the data leaves them open, besides such sizes. None of them is a number of
#: rows of the check.
_LENGTHS = (2, 4, 6, 7, 8, 9, 12, 16, 24, 32, 64, 100, 128, 256, 512, 1024)
_LONGEST = 2048
#: What stands for a vocabulary, at most.
_WORDS = 100
#: What may be between words, besides what stands in the model.
_SEPARATORS = " |,;:/\t\n_-"


class Synthetic:
    """Draws batches of the form of another one.

    An integer may be an id, and a model takes as many as it has a table or a vocabulary for. Each
    input gets the largest range with which the model runs, of those that sizes in the model
    suggest; strings are random, numerals, and words that the model knows.

    What an input takes are *pools*, each a `range` or a sorted array. A pool is drawn first and
    then one of its values, so that small ids come as often as large ones: a GPU looks up ids beyond
    a table without an error.

    Attributes:
        rows: of the batches with which it is tried what a model takes.
        marks: (value, the places of leaves that take it) of values that inputs or targets take in
            some rows, besides their pools or seldom among them: of labels that are not there, and
            what the model asks for.
        lone: the same of values that all inputs of one row may have.
        length: what stands for the sizes that the form leaves open, besides the number of rows;
            None where it leaves none, or where no length runs.
        reason: why no length runs, None where one does.
    """

    def __init__(
        self,
        form: Batch,
        rows: int = 2,
        texts: Sequence[str] = (),
        numbers: Sequence[float] = (),
    ) -> None:
        """
        Args:
            form: a batch of which shapes and dtypes are read, and no values.
            rows: how many rows are enough.
            texts: short strings that stand in the model, such as separators of words.
            numbers: those that it tests others for equality with.
        """
        self.rows, self._texts, self._numbers = rows, texts, numbers
        self._structure = (form.x, form.y, form.sample_weight)
        self._leaves = tf.nest.flatten(self._structure)
        self._pools = [_usual(leaf) for leaf in self._leaves]
        self._of_x, self._of_xy = (
            len(tf.nest.flatten(self._structure[:number])) for number in (1, 2)
        )
        self.marks: list[tuple[float, list[int]]] = []
        self.lone: list[tuple[float, list[int]]] = []
        self.length: int | None = None
        self.reason: str | None = None

    def widen(self, model: keras.Model, why_not: Callable[[Batch], str | None]) -> None:
        """Finds out what the inputs of a model take.

        Args:
            model: a built model.
            why_not: why the model gives no finite losses for a batch, None where it does.
        """
        vocabularies, sizes = _vocabularies(model), _sizes(model)
        if self._start(why_not, vocabularies, sizes):
            self._widen(model, why_not, vocabularies, sizes)

    @property
    def open_leaves(self) -> list[str]:
        """Names of the tensors that have open sizes besides the number of rows."""
        named = zip(("x", "y", "sample_weight"), self._structure, strict=True)
        leaves = [
            (name, *pair) for name, part in named for pair in keras.tree.flatten_with_path(part)
        ]
        return [
            name + "".join(f"[{key!r}]" for key in path)
            for name, path, leaf in leaves
            if _is_open(leaf)
        ]

    def pair(
        self,
        random: np.random.Generator,
        rows: int,
        row: int = 0,
        magnitude: float = 1.0,
        outlier: bool = False,
        wide: bool = True,
        style: str = "real",
        mark: tuple[float, list[int]] | None = None,
    ) -> tuple[Batch, Batch]:
        """Two batches that differ in one row.

        Floats are of the given magnitude, of both signs above 1; of the style "whole" they are few
        whole numbers, as labels and ids in a table of floats are; of the style "missing" some of x
        are NaN. With `outlier` those of the changed row are a million times larger, and its other
        values go from one extreme to the other. Without `wide`, integers are 0 and 1, and strings
        such as the model need not know. Of the style "bright" the changed row of x is of extremes,
        and the others are of small numbers and then of zeros, or the other way round where it is
        "late"; "dark" is the reverse: a row as a whole differs from all others then, and begins or
        ends where the others are padding. With a `mark` of `marks` or `lone` all of the changed row
        that may be it is, and some of others where the model tests for it.
        """

        def two(leaf, pools, place):
            if leaf is None:
                return None, None
            floats = style if place < self._of_x or style == "whole" else "real"
            shape, one = self._shape(leaf, rows), slice(row, row + 1)
            shade, _, when = floats.partition(", ")
            if shade in ("bright", "dark"):
                dark, bright = _dark_and_bright(random, pools, shape, leaf.dtype, when == "late")
                values, others = (dark, bright) if shade == "bright" else (bright, dark)
                changed = values.copy()
                changed[one] = others[one]
            elif pools is None:
                values = _floats(random, shape, leaf.dtype, magnitude, floats)
                changed = values.copy()
                changed[one] = _floats(random, (1, *shape[1:]), leaf.dtype, magnitude, floats)
                if outlier:
                    changed[one] *= 1e6 if leaf.dtype.size > 2 else 1e3
            else:
                pools = pools if wide else pools[:1]
                values = _drawn(random, pools, shape)
                changed = values.copy()
                changed[one] = _drawn(random, pools, (1, *shape[1:]))
                same = changed[one] == values[one]
                if outlier and same.size:
                    same.flat[random.integers(same.size)] = True
                low, high = _extremes(pools)
                values[one] = np.where(same, low, values[one])
                changed[one] = np.where(same, high, changed[one])
            if mark is not None and place in mark[1]:
                if mark in self.marks and mark[0] in self._numbers:
                    some = random.random(shape) < 0.3
                    values[some] = changed[some] = mark[0]
                with np.errstate(over="ignore"):  # of half precision
                    changed[one] = mark[0]
            return _tensor(values, leaf), _tensor(changed, leaf)

        places = range(len(self._leaves))
        first, second = zip(*map(two, self._leaves, self._pools, places), strict=True)
        return self._batch(first), self._batch(second)

    def longer(self, batch: Batch) -> Iterator[Batch]:
        """A batch with its open sizes larger by several numbers, filled as `padded_batch` does."""
        tensors = tf.nest.flatten((batch.x, batch.y, batch.sample_weight))
        length = self.length or 0
        for number in sorted({1, 2 * length, 16}):
            yield self._batch(
                leaf if leaf is None else _padded(tensor, leaf, number)
                for leaf, tensor in zip(self._leaves, tensors, strict=True)
            )

    # What the model takes.

    def _start(self, why_not, vocabularies, sizes):
        """Finds values, and a length, with which the model runs at all."""
        usual, is_open = self._pools, any(map(_is_open, self._leaves))
        lengths = dict.fromkeys([*_LENGTHS, *(size for size in sizes if 3 < size <= _LONGEST)])
        words = [pool for pool in vocabularies if isinstance(pool[0], str)]
        numbers = [pool for pool in vocabularies if not isinstance(pool[0], str)]
        texts = [np.array([""], object), *words, _DIGITS[:1]]
        starts = texts, [range(1), range(1, 2), *numbers]
        for start in itertools.product(*starts):
            self._pools = [
                _first(leaf, start if place < self._of_x else (range(1),))
                for place, leaf in enumerate(self._leaves)
            ]
            for self.length in lengths if is_open else (None,):
                reason = why_not(self._trial())
                if reason is None:
                    self.reason = None
                    return True
                self.reason = self.reason or reason
        self._pools, self.length = usual, None
        return False

    def _widen(self, model, why_not, vocabularies, sizes):
        """Has each input take all that it can, beside what it and those before it take."""
        outputs = tf.nest.flatten(model(self._trial().x, training=False))
        widths = sorted({2} | {t.shape[-1] for t in outputs if t.shape.rank and t.shape[-1] > 1})
        for place, leaf in enumerate(self._leaves):
            if self._pools[place] is None or leaf.dtype.is_bool:
                continue

            def runs(pools, place=place):
                pools = [*self._pools[:place], pools, *self._pools[place + 1 :]]
                return why_not(self._trial(pools)) is None

            def takes(pool, leaf=leaf, runs=runs):
                return _fits(leaf, pool) and runs([pool])

            if leaf.dtype == tf.string:
                words = vocabularies or [_LETTERS]
                between = (" ", *self._texts, "".join([_SEPARATORS, *self._texts]))
                pairs = [*itertools.product(words, between), *((_DIGITS, t) for t in self._texts)]
                sentences = itertools.starmap(_sentences, pairs)
                others = [_LETTERS, _DIGITS, *vocabularies, *sentences]
                ranges = []
            elif place < self._of_x:
                others = [range(-1, 0), *vocabularies]
                ranges = _longest(takes, [range(size) for size in sizes])
            else:
                others = []
                ranges = _longest(takes, [range(width) for width in widths])
            found = [*ranges, *filter(takes, others)]
            if found and not runs(found):  # together: those that go with the ones before
                alone, found = found, []
                for pool in alone:
                    if runs([*found, pool]):
                        found.append(pool)
            self._pools[place] = found or self._pools[place]
        for mark in dict.fromkeys([*_MARKS, *widths, *self._numbers]):
            asked = mark in self._numbers
            places = [
                place
                for place in range(0 if asked else self._of_x, self._of_xy)
                if _takes_mark(self._leaves[place], self._pools[place], mark, asked)
                and why_not(self._trial(marked=(place, mark))) is None
            ]
            if places and len(self.marks) < _MOST_MARKS:
                self.marks.append((mark, places))
        of_x = list(zip(range(self._of_x), self._leaves, self._pools, strict=False))
        lone = [(mark, [n for n, *leaf in of_x if _takes_lone(*leaf, mark)]) for mark in _LONE]
        self.lone = [(mark, places) for mark, places in lone if places]

    def _trial(self, pools=None, marked=(None, None)):
        """Rows with the extremes of each pool, and what lies between them.

        `marked`: (the place of a leaf, what that is in the last row), if any.
        """
        random = np.random.default_rng(0)

        def tensor(leaf, pools, place):
            if leaf is None:
                return None
            shape = self._shape(leaf, self.rows)
            if pools is None:
                values = _floats(random, shape, leaf.dtype, 1.0)
            else:
                values = [*_extremes(pools), *_drawn(random, pools, (32,))]
                dtype = object if leaf.dtype == tf.string else np.int64
                values = np.resize(np.array(values, dtype), shape)
            if place == marked[0]:
                values[-1] = marked[1]
            return _tensor(values, leaf)

        places = range(len(self._leaves))
        return self._batch(map(tensor, self._leaves, pools or self._pools, places))

    def _shape(self, leaf, rows):
        return (rows, *((self.length or 2) if size is None else size for size in leaf.shape[1:]))

    def _batch(self, tensors):
        return Batch(*tf.nest.pack_sequence_as(self._structure, list(tensors)))


def _is_open(leaf):
    return leaf is not None and None in leaf.shape[1:]


def _padded(tensor, leaf, number):
    by = [[0, number if size is None else 0] for size in leaf.shape[1:]]
    return tf.pad(tensor, [[0, 0], *by], constant_values=tf.zeros((), leaf.dtype))  # or ""


def _longest(takes, ranges):
    """The growing ranges that are taken, if what is taken is taken up to some range."""
    if ranges and takes(ranges[-1]):
        return ranges
    return ranges[: bisect.bisect(ranges, False, key=lambda pool: not takes(pool))]


def _letters():
    random = np.random.default_rng(0)
    words = ["".join(random.choice([*string.ascii_letters], n)) for n in range(1, 20)]
    return np.array(sorted(["", "two words", *words]), object)


_LETTERS = _letters()
_DIGITS = np.array([f"{number}" for number in range(10)], object)
_BOOLS = np.array([False, True])


def _usual(leaf):
    """The pools of a leaf of which nothing is known; None for floats."""
    if leaf is None or leaf.dtype.is_floating or leaf.dtype.is_complex:
        return None
    if leaf.dtype == tf.string:
        return [np.array([""], object)]
    return [_BOOLS if leaf.dtype.is_bool else range(2)]


def _first(leaf, pools):
    """`_usual`, with one of these pools where it fits."""
    usual = _usual(leaf)
    return usual and ([pool for pool in pools if _fits(leaf, pool)] or usual)


def _vocabularies(model):
    """What the lookup layers of a model know: sorted arrays of strings or integers."""
    found = {}
    for layer in layers_of(model):
        # Without "", which stands for padding: a row of nothing else may have no loss.
        known = set(layer.get_vocabulary()) if hasattr(layer, "get_vocabulary") else ()
        words = sorted(set(known) - {""})
        if words:
            words = words[:: -(-len(words) // _WORDS)] or words
            dtype = object if isinstance(words[0], str) else np.int64
            found[tuple(words)] = np.array(words, dtype)
    return list(found.values())


def _sentences(words, between):
    """Up to ten words each, with this string between them."""
    random = np.random.default_rng(0)
    drawn = (random.choice(words, 1 + number % 10) for number in range(20))
    return np.array(sorted(between.join(map(str, some)) for some in drawn), object)


def _sizes(model):
    """Numbers of ids, or of positions, that something in a model suggests, in rising order."""
    sizes = {size for variable in model.variables for size in variable.shape}
    lookups = [layer for layer in layers_of(model) if hasattr(layer, "get_vocabulary")]
    known = {len(layer.get_vocabulary()) for layer in lookups}
    return sorted(size for size in {*_SIZES, *sizes, *known} if size > 1)


def _fits(leaf, pool):
    """Whether values of a pool are of the kind of a leaf."""
    if leaf.dtype == tf.string or not leaf.dtype.is_integer:
        return leaf.dtype == tf.string and isinstance(pool[0], str)
    return not isinstance(pool[0], str) and leaf.dtype.min <= pool[0] <= pool[-1] <= leaf.dtype.max


def _takes_mark(leaf, pools, mark, asked):
    """Whether a leaf can be this mark, which is not, or only seldom, among its other values.

    `asked`: whether the model tests for it.
    """
    if leaf is None or leaf.dtype == tf.string or leaf.dtype.is_bool:
        return False
    if pools is None:  # floats are whole numbers in other draws
        rare = asked and not -1 <= mark <= 2
        return leaf.dtype.is_floating and (rare or math.isnan(mark) or mark < -100)
    fits = float(mark).is_integer() and leaf.dtype.min <= mark <= leaf.dtype.max
    return fits and not any(mark in pool and (len(pool) <= 10 or not asked) for pool in pools)


def _takes_lone(leaf, pools, mark):
    """Whether all of a leaf can be this in one row, whatever the model makes of it."""
    if leaf is None or leaf.dtype == tf.string or leaf.dtype.is_bool:
        return False
    return pools is None or (mark == 0 and any(0 in pool for pool in pools))


def _dark_and_bright(random, pools, shape, dtype, is_late):
    """Small values, half of each row what stands for none; and extremes, of one kind or of both.

    With `is_late` it is the first half that is none, and only what is bright has negative numbers.
    """
    size = math.prod(shape[1:])
    is_none = np.arange(size) < size // 2 if is_late else np.arange(size) > size // 2
    is_none = np.broadcast_to(is_none, (shape[0], size)).reshape(shape)
    if pools is None:
        dark = np.where(is_none, 0.0, random.uniform(0.0 if is_late else -0.01, 0.01, shape))
        both = dark, random.choice([-1.0, 1.0], shape)
        return tuple(each.astype(dtype.as_numpy_dtype) for each in both)
    none, (low, high) = "" if dtype == tf.string else 0, _extremes(pools)
    if dtype == tf.string:
        dark, bright = _drawn(random, pools, shape), _drawn(random, pools, shape)
        bright[bright == none] = high
    else:
        dark, bright = _drawn(random, pools[:1], shape), np.full(shape, high)
        if is_late and low < 0:
            bright[random.random(shape) < 0.3] = low
    if any(none in pool for pool in pools):
        dark[is_none] = none
    return dark, bright


def _extremes(pools):
    return min(pool[0] for pool in pools), max(pool[-1] for pool in pools)


def _drawn(random, pools, shape):
    """Values of the pools, each as likely as the others."""
    which = random.integers(len(pools), size=shape)
    places = random.integers(np.array([len(pool) for pool in pools])[which])
    values = np.empty(shape, object if isinstance(pools[0][0], str) else np.int64)
    for number, pool in enumerate(pools):
        of_pool = places[which == number]
        values[which == number] = of_pool + pool.start if isinstance(pool, range) else pool[of_pool]
    return values


def _floats(random, shape, dtype, magnitude, style="real"):
    low = 0.1 if magnitude <= 1 else -magnitude
    values = random.uniform(low, magnitude, shape)
    if style == "whole":
        values = random.choice([-1.0, 0.0, 1.0, 2.0], shape)
    elif style == "missing":
        values = np.where(random.random(shape) < 0.3, np.nan, values)
    return values.astype(dtype.as_numpy_dtype)


def _tensor(values, leaf):
    if leaf.dtype != tf.string:
        values = values.astype(leaf.dtype.as_numpy_dtype)
    return tf.constant(values, leaf.dtype)
