"""Random bits of the operating system, and what tells a process from its forks."""

import os
import secrets

import numpy as np

_forks = [0]


def _count_fork():
    # In every child of the process, also in those that only load data: nothing else happens here.
    _forks[0] += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


def process():
    """What tells this process from the one that it was forked from, also where ids come again."""
    return os.getpid(), _forks[0]


def words(count):
    """An int64 array of that many random words."""
    return np.frombuffer(secrets.token_bytes(8 * count), dtype=np.int64)


def numpy_generator(seed=None):
    """A NumPy generator for sampling batches, from OS entropy unless `seed` is given."""
    return np.random.Generator(np.random.PCG64(secrets.randbits(256) if seed is None else seed))
