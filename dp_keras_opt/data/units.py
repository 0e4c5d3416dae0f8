"""What is drawn, examples or users of all workers together, and which of it this worker draws."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import numpy as np
import tensorflow as tf

from dp_keras_opt.checks import whole_number
from dp_keras_opt.data import examples as examples_
from dp_keras_opt.data.samplers import random_groups, random_order
from dp_keras_opt.data.sources.columns import OnDisk, open_column
from dp_keras_opt.data.sources.opening import as_source
from dp_keras_opt.data.users import as_array, examples_by_user
from dp_keras_opt.workers import gathered, place


@dataclasses.dataclass(frozen=True)
class OwnShard:
    """This worker's part of data that are split over workers: see `own_shard`."""

    data: Any = dataclasses.field(repr=False)


def own_shard(data: Any) -> OwnShard:
    """Says that the data are this worker's part of the whole, which no other worker has.

    Without it all workers open the same data, and each draws from its share of the examples. With
    it a worker needs only its own files. The draw is over the examples of all workers together:
    their number is the sum, and `batch_size` that of the whole batch.

    Args:
        data: what a sampler of `dp.data` takes.

    Returns:
        What a sampler takes in its place, within the scope of the strategy.

    Guarantee: it rests on this statement. An example, or with `users` a person, that two workers
    have is drawn by both, and ε is then larger than reported. Workers with the same number of
    examples and the same first and last of them, or with a common user, are refused.
    """
    return OwnShard(data)


@dataclasses.dataclass(frozen=True, eq=False)
class Units:
    """The units of privacy that batches are drawn from.

    Attributes:
        examples: `InMemory` or `FromSource`, of this process.
        number: n, how many units all workers have.
        own: int64 indices of those that this worker draws.
        examples_of: None where a unit is one example; else the indices of each unit's.
        is_shard: whether other workers have other examples.
    """

    examples: Any
    number: int
    own: np.ndarray
    examples_of: Any = None
    is_shard: bool = False

    @classmethod
    def of(
        cls,
        name,
        data,
        users=None,
        examples_per_user=None,
        class_weight=None,
        max_bytes=2**40,
        *,
        map=None,
        views=1,
        buckets=None,
        skip_unreadable=False,
    ):
        """Those of what a user gives to the sampler of that name.

        Args:
            users, examples_per_user: as for `balls_in_bins`.
            class_weight, max_bytes, map, views, buckets, skip_unreadable: as for `poisson_batches`.
        """
        if views != 1 and map is None:
            raise ValueError(
                f"views={views} are made by map, which augments an example anew for each of them; "
                "received none, so that all views would be the same."
            )
        if (users is None) != (examples_per_user is None):
            raise ValueError(
                "users and examples_per_user go together: whose the examples are, and how many of "
                f"a user take part. Received: examples_per_user={examples_per_user} "
                f"{'without' if users is None else 'with'} users."
            )
        is_shard = isinstance(data, OwnShard)
        data = data.data if is_shard else data
        if users is not None:
            whole_number(examples_per_user, "examples_per_user")
            if isinstance(data, tf.data.Dataset):
                raise TypeError(
                    f"{name} with users needs arrays, or other data that are read by their "
                    "numbers: the examples of a tf.data.Dataset can come in another order than "
                    "their users. Received: a tf.data.Dataset. Read it into arrays, or write it "
                    "with dp.data.write."
                )
            users = _ids_of(users, data)
        examples = examples_.of(
            data,
            class_weight,
            max_bytes,
            map=map,
            padding=buckets,
            skip_unreadable=skip_unreadable,
        )
        count, owned = examples.num_examples, None
        if users is not None:
            owned = examples_by_user(users, count)
            count = len(owned)
        if is_shard:
            _check_apart(examples, users)
            return cls(examples, sum(_counts(count)), np.arange(count), owned, True)
        _check_same(examples, users)
        # Each worker draws from units of its own: whatever the workers draw, none is drawn twice,
        # and each is drawn independently of all others, as it is by one worker.
        worker, workers = place()
        return cls(examples, count, np.arange(count)[worker::workers], owned)

    @property
    def word(self):
        return "example" if self.examples_of is None else "user"

    def in_groups(self, groups, seed):
        """This worker's units of each group, into which all are put at random."""
        _check_order(seed)
        worker, workers = place()
        if self.is_shard:
            return random_groups(len(self.own), groups, [seed, worker])
        return [members[worker::workers] for members in random_groups(self.number, groups, seed)]

    def in_order(self, steps, batch_size, seed):
        """This worker's units of each step of an epoch, [steps, rows]; -1 for padding."""
        _check_order(seed)
        worker, workers = place()
        if self.is_shard:
            rows = -(-len(self.own) // steps)
            return random_order(len(self.own), steps, rows, [seed, worker])
        order = random_order(self.number, steps, batch_size, seed)
        filled = np.pad(order, [(0, 0), (0, -batch_size % workers)], constant_values=-1)
        return filled[:, worker::workers]


def _ids_of(users, data):
    """The id of each example: an array, or that of a column that is given by its name.

    Raises:
        TypeError: the data have no columns.
        ValueError: they have none of this name.
    """
    users = open_column(users)
    if isinstance(users, OnDisk):
        return users.whole()
    if not isinstance(users, str):
        return as_array(users)
    table = as_source(data)
    if not hasattr(table, "whole"):
        raise TypeError(
            f"users={users!r} names a column, and `data` is no table: {type(data).__name__}. Give "
            "the ids as an array."
        )
    if users not in table.names:
        raise ValueError(f"users={users!r} is none of the columns {list(table.names)}.")
    return table.whole(users)


def _check_same(examples, users):
    """Refuses workers that hold different examples, or in another order.

    They share the examples out by their places, and one could come to two workers.
    """
    if place()[1] == 1:
        return
    ids = b"" if users is None else examples_.digest_of([users])
    if len(set(_gathered_alike(examples.digest() + ids, False, users))) > 1:
        raise ValueError(
            "The workers were given different data, or the same in another order, so that an "
            "example could come to two of them. Give all workers the same data; or, where each "
            "has a part that no other has, dp_keras_opt.data.own_shard(data)."
        )


def _check_apart(examples, users):
    """Refuses workers that hold the same examples where each is to have its own."""
    if place()[1] == 1:
        return
    digests = _gathered_alike(examples.digest(), True, users)
    if len(set(digests)) < len(digests):
        raise ValueError(
            "Two workers were given the same data as a part of their own: each example would be "
            "drawn twice. Give each worker its own files, or all of them the same data without "
            "own_shard."
        )
    if users is None:
        return
    ids = [hashlib.blake2b(str(i).encode(), digest_size=8).digest() for i in np.unique(users)]
    everyones = [
        part[i : i + 8] for part in gathered(b"".join(ids)) for i in range(0, len(part), 8)
    ]
    if len(set(everyones)) < len(everyones):
        raise ValueError(
            "A user has examples on two workers, and could be drawn by both. Split the data so "
            "that all examples of a user are on one worker."
        )


def _check_order(seed):
    """Refuses workers of different orders, or groups: an example could come to two of them."""
    digest = hashlib.blake2b(repr(seed).encode(), digest_size=16).digest()  # it is secret
    if place()[1] > 1 and len(set(gathered(digest))) > 1:
        raise ValueError(
            "The workers were given different order_seeds, so that an example could come to two of "
            "them. Give all of them the same, or none: then the first worker draws it."
        )


def _gathered_alike(content, is_shard, users):
    """What each worker gave, once all have been called in the same way, and go on alike.

    Raises:
        ValueError: they have not.
    """
    kind = bytes([is_shard, users is not None])
    everyones = gathered(kind + content)
    if len({each[:2] for each in everyones}) > 1:
        raise ValueError(
            "The workers were called in different ways: own_shard(data), or users, must be given "
            "by all of them or by none."
        )
    return [each[2:] for each in everyones]


def _counts(count):
    return [int.from_bytes(part, "big") for part in gathered(count.to_bytes(8, "big"))]
