"""Which ledgers shaped which variables: weights carry what they cost, whoever holds them.

A variable may be in several models: a model and its private counterpart, an encoder and what is
built around it. Each ledger that records steps on a variable is kept with it, as long as it lives.
"""

import copy
import weakref

from dp_keras_opt._keras import layers_of, own_states

_ledgers: dict[int, list] = {}  # id of a variable, which has no hash -> ledgers
_last_record = 0


def record(variables, ledger):
    """Notes that what `ledger` records, now and later, may be in these variables."""
    global _last_record
    _last_record += 1
    for variable in variables:
        if id(variable) not in _ledgers:
            _ledgers[id(variable)] = []
            weakref.finalize(variable, _ledgers.pop, id(variable), None).atexit = False
        if not any(known is ledger for known in _ledgers[id(variable)]):
            _ledgers[id(variable)].append(ledger)


def last_record():
    """A number that changes whenever something is recorded."""
    return _last_record


def ledgers_of(variables):
    """The ledgers of these variables, each once."""
    found = {id(each): each for v in variables for each in _ledgers.get(id(v), ())}
    return list(found.values())


def copied(variables, copies):
    """Notes that the values of `variables` are in `copies`, with what they have cost so far."""
    for ledger in ledgers_of(variables):
        record(copies, copy.copy(ledger))  # what is spent later is in the originals alone


def moved_by(model):
    """The variables that a training step of the model may move: trained ones, and states."""
    states = (
        variable for layer in layers_of(model) if layer.trainable for variable in own_states(layer)
    )
    return [*model.trainable_variables, *states]
