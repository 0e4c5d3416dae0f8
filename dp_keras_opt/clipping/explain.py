"""Which engine serves which layer of a model."""

from __future__ import annotations

import math
from typing import NamedTuple

import keras

from dp_keras_opt.clipping import book_keeping
from dp_keras_opt.clipping.clipped_sum import variables_by_layer


class Served(NamedTuple):
    """A layer that owns variables, and how its per-example gradients are found.

    Attributes:
        layer: its name.
        kind: its class.
        weights: how many numbers it trains.
        engine: "rule" (book-keeping, at the cost of ordinary training), "one example at a time"
            (of this layer alone, vectorized), "whole model, one example at a time", or "frozen".
    """

    layer: str
    kind: str
    weights: int
    engine: str


def explain(model: keras.Model) -> list[Served]:
    """Prints which engine serves which layer, and returns it as a list of `Served`.

    Args:
        model: a built model. Once it has trained privately, the engines are those that passed the
            check before the first step; until then, those that its layers ask for.
    """
    checked = list(getattr(model, "_plans", {}).values())
    plan = checked[-1] if checked else book_keeping.plan(model)
    served = [*_trained(model, plan), *_frozen(model)]
    columns = [("layer", "class", "weights", "engine")]
    columns += [(s.layer, s.kind, f"{s.weights:,}", s.engine) for s in served]
    widths = [max(map(len, column)) for column in zip(*columns, strict=True)]
    for row in columns:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    return served


def _trained(model, plan):
    owners = {id(v): layer for layer in model._flatten_layers() for v in layer.trainable_variables}
    ruled = {id(v) for layer in plan.ruled for v in layer.trainable_variables}
    units = {id(v): layer for layer in plan.general for v in layer.trainable_variables}
    rows = {}
    for name, variables in variables_by_layer(model).items():
        key = id(variables[0])
        layer, engine = owners[key], "rule"
        if key not in ruled and isinstance(units[key], keras.Model):
            engine = "whole model, one example at a time"
        elif key not in ruled:  # such as an RNN, whose weights are those of its cell
            layer, engine = units[key], "one example at a time"
            name = layer.name
        weights = sum(math.prod(v.shape) for v in variables)
        if id(layer) in rows:
            weights += rows[id(layer)].weights
        rows[id(layer)] = Served(name, type(layer).__name__, weights, engine)
    return rows.values()


def _frozen(model):
    for layer in model._flatten_layers(include_self=False):
        if (
            layer.non_trainable_weights
            and not layer.trainable_weights
            and not list(layer._flatten_layers(include_self=False, recursive=False))
        ):
            weights = sum(math.prod(v.shape) for v in layer.non_trainable_weights)
            yield Served(layer.name, type(layer).__name__, weights, "frozen")
