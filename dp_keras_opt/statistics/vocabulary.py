"""Which words the data have, and how many units use them: as far as that may be told."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from dp_keras_opt.noise import entropy
from dp_keras_opt.statistics.contributions import Units


class Vocabulary(NamedTuple):
    """Words that enough units use, those of the largest noisy counts first.

    Attributes:
        words: a list, of strings or integers.
        counts: how many units use each, with noise, float64.
        noise_std: of the counts.
        threshold: the least noisy count that a word may be released with.
        num_units: n, how many units there are.
    """

    words: list[Any]
    counts: np.ndarray
    noise_std: float
    threshold: float
    num_units: int


def word_counts(
    chunks: Iterable[Any],
    units: Units,
    most_per_unit: int,
    *,
    split: Callable[[Any], Any] | None = None,
    without: Iterable[Any] = (),
) -> tuple[list[Any], np.ndarray]:
    """(the words that a unit counts for, how many count for each): a secret.

    Each unit counts once for each of at most `most_per_unit` words of its own. Where it has more,
    they are drawn at random, without a look at any other unit; the others are no words of its:
    with a count of 0 each would have one more chance to reach the threshold.

    Args:
        chunks: arrays of rows, or `tf.RaggedTensor`s, whose elements are words.
        units: whose they are.
        most_per_unit: k.
        split: None, or a function that makes words of each row.
        without: words that are not counted.
    """
    numbers: dict[Any, int] = {}
    without, pairs = set(without), []
    for rows in chunks:
        of_units, _ = units.rows(_length(rows))
        rows = rows if split is None else split(rows)
        if _length(rows) != len(of_units):
            raise ValueError(
                f"split made {_length(rows)} rows of {len(of_units)}: whose words they are is not "
                "known. It must give the words of each row, as tf.strings.split does."
            )
        owners, words = _flat(rows)
        found, places = np.unique(words, return_inverse=True)
        known = np.array([numbers.setdefault(word, len(numbers)) for word in found.tolist()], int)
        pairs.append(np.stack([of_units[owners], known[places.ravel()]], axis=1))
    every = np.unique(np.concatenate(pairs), axis=0)
    for word in without:
        every = every[every[:, 1] != numbers.get(word, -1)]
    found, counts = np.unique(_capped(every, most_per_unit)[:, 1], return_counts=True)
    words = list(numbers)
    return [words[number] for number in found], counts.astype(np.float64)


def _capped(pairs, most):
    """Of the pairs of each unit as many as `most`, at random."""
    pairs = entropy.numpy_generator().permutation(pairs)
    pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
    _, firsts, counts = np.unique(pairs[:, 0], return_index=True, return_counts=True)
    place = np.arange(len(pairs)) - np.repeat(firsts, counts)
    return pairs[place < most]


def _length(rows):
    return int(rows.nrows()) if isinstance(rows, tf.RaggedTensor) else len(rows)


def _flat(rows):
    """(which row each word is of, the words), flat arrays; strings as Python has them."""
    if isinstance(rows, tf.RaggedTensor):
        while rows.ragged_rank > 1:
            rows = rows.merge_dims(1, 2)
        owners, words = rows.value_rowids().numpy(), rows.flat_values.numpy()
        owners, words = np.repeat(owners, words.size // max(len(owners), 1)), words.ravel()
    else:
        rows = np.asarray(rows)
        words = rows.ravel()
        owners = np.repeat(np.arange(len(rows)), words.size // len(rows))
    if words.dtype.kind in "OSU":
        words = np.array([as_text(word) for word in words.tolist()], object)
    elif words.dtype.kind not in "iu":
        raise ValueError(f"Words must be strings or integers; received {words.dtype}.")
    return owners, words


def as_text(word: Any) -> str:
    """A word as Python has it; of bytes that are no UTF-8, what can be read."""
    return word.decode("utf-8", "replace") if isinstance(word, bytes) else str(word)
