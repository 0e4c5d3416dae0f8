"""Which engine serves which layer of a model, and why."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import keras

from dp_keras_opt import tables
from dp_keras_opt._keras import layers_of, own_weights
from dp_keras_opt.clipping import per_example
from dp_keras_opt.clipping.engines import engines_for
from dp_keras_opt.clipping.layer_rules import why_no_rule
from dp_keras_opt.clipping.normalization import names


class Served(NamedTuple):
    """A layer that owns variables, and how its per-example gradients are found.

    Attributes:
        layer: its path: the names of the layers and models that it is in, and its own. A layer
            that is used in several places has the first.
        kind: its class.
        weights: how many numbers it trains.
        engine: "rule" (book-keeping, at the cost of ordinary training), "one example at a time"
            (of this layer alone, vectorized), "whole model, one example at a time", or "frozen".
        reason: why no rule serves it; "" for "rule" and "frozen".
    """

    layer: str
    kind: str
    weights: int
    engine: str
    reason: str = ""


class Explanation(list[Served]):
    """Which engine serves which layer: a list of `Served`, which reads as a table.

    Below the table are the sums by engine, with the memory that an example takes where it has a
    copy of the weights, and the reason for each engine that is not a rule.
    """

    def __str__(self) -> str:
        cells = [(s.layer, s.kind, f"{s.weights:,}", s.engine) for s in self]
        engines, reasons = {}, {}
        for served in self:
            engines.setdefault(served.engine, []).append(served)
            if served.reason:
                reasons.setdefault(served.reason, []).append(served.layer)
        sums = "; ".join(f"{engine}: {_sums(engine, served)}" for engine, served in engines.items())
        why = [f"{names(layers)}: {reason}" for reason, layers in reasons.items()]
        table = tables.aligned(("layer", "class", "weights", "engine"), cells)
        return "\n".join([table, "", sums, *why])

    __repr__ = __str__


def explain(model: keras.Model) -> Explanation:
    """Which engine serves which layer of a model, and why: print it, or look at its rows.

    Args:
        model: a built model. Once it has trained privately, the engines are those that passed the
            check before the first step; until then, those that its layers ask for.

    Returns:
        A list of `Served`, one for each layer that owns variables; `print` shows it as a table.
    """
    known = getattr(model, "known_engines", lambda: None)  # of a `DPModel`
    engines = known() or engines_for(model)
    return Explanation([*_trained(model, engines), *_frozen(model)])


def _trained(model, engines):
    """A row for each layer that owns trained variables, and one for all that runs as a unit."""
    reasons = {id(layer): why_no_rule(layer) for layer in engines.general}
    reasons |= {id(layer): f"demoted: {reason}" for layer, reason in engines.demoted}
    unseen = {id(v): v for v in model.trainable_variables}
    whole = {}  # id of a layer in a model that runs as a whole -> why
    for path, layer in _with_paths(model):
        parts, engine, reason = [layer], "rule", whole.get(id(layer), reasons.get(id(layer), ""))
        if isinstance(layer, keras.Model) and reason:
            whole |= {id(part): reason for part in layers_of(layer)}
        if id(layer) in whole:
            engine = "whole model, one example at a time"
        elif reason or per_example.runs_loop(
            layer, False
        ):  # an RNN: its weights are those of its cell
            parts, engine = layers_of(layer), "one example at a time" if reason else engine
        own = [unseen.pop(id(v)) for part in parts for v in _own(part) if id(v) in unseen]
        if own:
            yield Served(path, type(layer).__name__, _size(own), engine, reason)


def _frozen(model):
    trained = {id(v) for v in model.trainable_variables}
    for path, layer in _with_paths(model):
        if _own(layer) and not any(id(v) in trained for v in _own(layer)):
            yield Served(path, type(layer).__name__, _size(_own(layer)), "frozen")


def _with_paths(model):
    """Each layer once, with its path; layers of equal paths are told apart by a number."""
    seen, paths = set(), set()

    def walk(layer, prefix):
        seen.add(id(layer))
        numbered = (f"{prefix}{layer.name}_{n}" for n in itertools.count(2))
        candidates = itertools.chain([f"{prefix}{layer.name}"], numbered)
        path = next(each for each in candidates if each not in paths)
        paths.add(path)
        yield path, layer
        for part in per_example.children(layer):
            if id(part) not in seen:
                yield from walk(part, "" if layer is model else f"{path}/")

    return walk(model, "")


def _own(layer):
    """The variables of a layer that are not those of layers in it."""
    return own_weights(layer)


def _size(variables):
    return sum(math.prod(v.shape) for v in variables)


def _sums(engine, served):
    plural, weights = "s" * (len(served) > 1), sum(each.weights for each in served)
    copies = (
        "" if engine in ("rule", "frozen") else f" (a copy for each example: {4 * weights:,} B)"
    )
    return f"{len(served)} layer{plural}, {weights:,} weights{copies}"
