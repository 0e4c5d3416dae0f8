"""Random numbers of functions of an example, from seeds that nobody can know.

They are drawn for an example's place in its batch. Where one example is not there, others are in
its place, and so on: only to somebody who cannot know what was drawn for which place are the two
alike. So what `set_random_seed` said, or a generator was given, does not hold here.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from dp_keras_opt.clipping.graphs import nodes

#: As Keras and TensorFlow name the variables of their generators.
_STATES = ("seed_generator_state", "StateVar")

_lock = threading.Lock()
_inside = 0
_kept: Any = None


class NotTraced(ValueError):
    """A function of an example fails for all examples of one form."""


def traced(function: Callable[..., Any], *specs: Any) -> Any:
    """The concrete function that TensorFlow traces, whose random numbers are from fresh seeds.

    Those of operations are from a seed in its graph, and generators that it captures are drawn
    anew.

    Raises:
        NotTraced: it raises an error.
        ValueError: it calls a function that was traced before, with another seed.
    """
    seed = 1 + secrets.randbelow(2**31 - 2)

    def seeded(*arguments):
        tf.compat.v1.set_random_seed(seed)  # of the graph, and of those within it
        return function(*arguments)

    try:
        found = tf.function(seeded).get_concrete_function(*specs)
    except Exception as error:
        why = f"{type(error).__name__}: {error}".strip().rstrip(".")
        raise NotTraced(
            f"The function of an example failed when TensorFlow traced it: {why}. It is given one "
            "example, without the dimension of the batch, as tensors. What needs values, as a "
            "tokenizer in Python does, goes into map=dp_keras_opt.data.PythonFunction(function) "
            "of a sampler."
        ) from error
    known = [node.name for node in nodes(found.graph) if _seed_of(node) not in (None, seed)]
    if known:
        raise ValueError(
            f"The function draws random numbers ({known[0]}) in a tf.function that was traced "
            "before, with a seed that may be known: who is in a batch decides which of them each "
            "example gets. Leave out its @tf.function, or do not call it before."
        )
    for variable in found.graph.variables:
        if any(name in variable.name for name in _STATES):
            numbers = np.frombuffer(secrets.token_bytes(4 * variable.shape[0]), "uint32")
            variable.assign(numbers >> 1)  # of any integer type
    return found


def is_drawn_in_operations(function: Any) -> bool:
    """Whether a traced function draws random numbers in operations, whose state is their own.

    `tf.data` makes them anew, from the same seeds, whenever data are gone through again. Called
    from Python, a function keeps them.
    """
    return any(_seed_of(node) is not None for node in nodes(function.graph))


def _seed_of(node):
    """That of the graph in which it was made; None where it has none, or one of the system's."""
    has_own = "seed2" in node.attr and (node.attr["seed"].i or node.attr["seed2"].i)
    return node.attr["seed"].i if has_own else None


@contextlib.contextmanager
def of_python() -> Iterator[None]:
    """Within, the global generators of Python and NumPy have fresh seeds; then as before.

    Of several threads the first to come in seeds them, and the last to go puts them back.
    """
    global _inside, _kept
    with _lock:
        if not _inside:
            _kept = random.getstate(), np.random.get_state()
            random.seed(secrets.token_bytes(32))
            np.random.seed(np.frombuffer(secrets.token_bytes(32), "uint32"))
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                random.setstate(_kept[0])
                np.random.set_state(_kept[1])
                _kept = None
