"""Which engine serves which layer of a model, and why."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import keras

from dp_keras_opt.clipping import book_keeping, per_example
from dp_keras_opt.clipping.fix import names
from dp_keras_opt.clipping.layer_rules import why_no_rule


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


def explain(model: keras.Model) -> list[Served]:
    """Prints which engine serves which layer, and returns it as a list of `Served`.

    Below the table are the sums by engine, and the reason for each engine that is not a rule.

    Args:
        model: a built model. Once it has trained privately, the engines are those that passed the
            check before the first step; until then, those that its layers ask for.
    """
    checked = list(getattr(model, "_plans", {}).values())
    plan = checked[-1] if checked else book_keeping.plan(model)
    served = [*_trained(model, plan), *_frozen(model)]
    _print(served)
    return served


def _trained(model, plan):
    """A row for each layer that owns trained variables, and one for all that runs as a unit."""
    reasons = {id(layer): _why_general(layer) for layer in plan.general}
    reasons |= {id(layer): f"demoted: {reason}" for layer, reason in plan.demoted}
    unseen = {id(v): v for v in model.trainable_variables}
    whole = {}  # id of a layer in a model that runs as a whole -> why
    for path, layer in _with_paths(model):
        parts, engine, reason = [layer], "rule", whole.get(id(layer), reasons.get(id(layer), ""))
        if isinstance(layer, keras.Model) and reason:
            whole |= {id(part): reason for part in layer._flatten_layers()}
        if id(layer) in whole:
            engine = "whole model, one example at a time"
        elif reason:  # such as an RNN, whose weights are those of its cell
            parts, engine = layer._flatten_layers(), "one example at a time"
        own = [unseen.pop(id(v)) for part in parts for v in _own(part) if id(v) in unseen]
        if own:
            yield Served(path, type(layer).__name__, _size(own), engine, reason)


def _frozen(model):
    for path, layer in _with_paths(model):
        if _own(layer) and not layer.trainable_variables:
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
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def _size(variables):
    return sum(math.prod(v.shape) for v in variables)


def _why_general(layer):
    if isinstance(layer, keras.Model) and not layer._trainable_variables:
        return "weights are trained that are inside of frozen layers"
    return why_no_rule(layer)


def _print(served):
    rows = [("layer", "class", "weights", "engine")]
    rows += [(s.layer, s.kind, f"{s.weights:,}", s.engine) for s in served]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
    engines, reasons = {}, {}
    for each in served:
        engines.setdefault(each.engine, []).append(each)
        if each.reason:
            reasons.setdefault(each.reason, []).append(each.layer)
    print("\n" + "; ".join(f"{engine}: {_sums(rows)}" for engine, rows in engines.items()))
    for reason, layers in reasons.items():
        print(f"{names(layers)}: {reason}")


def _sums(rows):
    plural = "s" * (len(rows) > 1)
    return f"{len(rows)} layer{plural}, {sum(row.weights for row in rows):,} weights"
