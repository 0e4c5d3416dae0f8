"""The examples of each user, and which of them take part once the user is drawn. NumPy only."""

import numbers
import warnings

import numpy as np

#: What texts are made of an id that is missing, as by `astype(str)`.
_MISSING = ("", "nan", "NaN", "None", "<NA>", "NaT")


def examples_by_user(users, n):
    """The indices of each user's examples: a list of int64 arrays, one per distinct id.

    Args:
        users: (n,) ids, integers or strings.
        n: the number of examples.

    Raises:
        TypeError: the ids are neither.
        ValueError: there is not one for each example.
    """
    ids = as_array(users)
    kinds = {type(i) for i in ids.flat} if ids.dtype.kind == "O" else {ids.dtype.kind}
    if len(kinds) != 1 or not kinds <= {"i", "u", "S", "U", str, bytes}:
        raise TypeError(
            "`users` must be integers or strings, one kind of them and none missing: an id that is "
            f"not one person's would leave persons unprotected. Received: dtype {ids.dtype}."
        )
    if ids.shape != (n,):
        raise ValueError(
            f"`users` must have one id for each of the {n} examples. Received: shape {ids.shape}"
        )
    names, user, counts = np.unique(ids, return_inverse=True, return_counts=True)
    _warn_of_missing(names)
    return np.split(np.argsort(user, kind="stable"), np.cumsum(counts)[:-1])


def as_array(users):
    """Ids as NumPy has them.

    Raises:
        TypeError: a list has several kinds of them, or an array masks some. NumPy would make a
            string of NaN, and take what is below a mask, and so one person of all who have no id.
    """
    if np.ma.is_masked(users):
        raise TypeError(
            f"`users` must have none missing, but {np.ma.count_masked(users)} ids are masked. Give "
            "each of these examples an id of its own, or leave it out."
        )
    if isinstance(users, list | tuple) and len({_kind(each) for each in users}) > 1:
        raise TypeError(
            "`users` must be integers or strings, one kind of them and none missing; received "
            f"{sorted({type(each).__name__ for each in users})}."
        )
    return np.asarray(users)


def _warn_of_missing(ids):
    """Says which of these, each of which is there once, read like one that is missing."""
    if found := [repr(name) for name in _MISSING if ids.dtype.kind in "OU" and name in ids]:
        warnings.warn(
            f"{' and '.join(found)} is taken for the id of one user. If it stands for ids "
            "that are missing, those persons are protected only as if they were one: give each of "
            "their examples an id of its own, or leave it out.",
            stacklevel=3,
        )


def _kind(value):
    return int if isinstance(value, numbers.Integral) else type(value)


def examples_of(rng, owned, drawn, most):
    """At most `most` examples of each user drawn, a fresh uniform subset where there are more.

    Args:
        rng: NumPy generator.
        owned: what `examples_by_user` gave.
        drawn: int64 indices of users, -1 for none.
        most: K.

    Returns:
        int64 (len(drawn)·K,), K for each user; negative for padding: ~i, where i is an example of
        the same user, and -1 for nobody.
    """
    rows = np.full((len(drawn), most), -1, np.int64)
    for row, user in zip(rows, drawn, strict=True):
        if user < 0:
            continue
        own = owned[user]
        if len(own) > most:
            own = rng.choice(own, most, replace=False, shuffle=False)
        row[:] = ~own[0]
        row[: len(own)] = own
    return rows.ravel()
