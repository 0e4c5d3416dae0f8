"""Which variables are clipped together, and to what bound."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from dp_keras_opt._keras import layers_of, trained_in
from dp_keras_opt.clipping import per_example
from dp_keras_opt.clipping.query import Query


def clip_groups(model: keras.Model, query: Query) -> list[tuple[Sequence[int], Any]]:
    """Which variables are clipped together, and to what bound.

    Returns:
        A list of (indices into `model.trainable_variables`, bound C_l).

    Raises:
        ValueError: proportions are given, and not for exactly the layers that are trained; or
            bounds, and not one for each group.
    """
    variables = model.trainable_variables
    given = tf.unstack(query.clip_norm) if query.counts else []
    if query.style == "flat" or query.population == "public":
        return [(range(len(variables)), given[0] if given else query.clip_norm)]
    by_layer = variables_by_layer(model)
    shares = dict.fromkeys(by_layer, 1.0) if query.style == "per_layer" else query.style
    if set(shares) != set(by_layer):
        raise ValueError(
            f"clipping={query.style!r} must name exactly the layers that are trained: "
            f"{sorted(by_layer)}."
        )
    whole = sum(shares.values()) if query.norm == "l1" else math.hypot(*shares.values())
    index = {id(variable): place for place, variable in enumerate(variables)}
    groups = [[index[id(v)] for v in by_layer[name]] for name in shares]
    bounds = given or [query.clip_norm * (share / whole) for share in shares.values()]
    if len(bounds) != len(groups):
        raise ValueError(
            f"There are {len(bounds)} bounds for {len(groups)} layers, some of equal paths. Name "
            f"them: clipping={{layer: proportion, ...}}, with {sorted(by_layer)}."
        )
    return list(zip(groups, bounds, strict=True))


def variables_by_layer(model):
    """The trainable variables of each layer that owns some, by the layer's name.

    A variable of several layers belongs to the first. Layers of equal names are told apart by the
    path of their variables, and by a number where that is the same, too.
    """
    owners, seen = {}, set()
    for layer in layers_of(model):
        below = {id(v) for child in per_example.children(layer) for v in trained_in(child)}
        owned = [v for v in trained_in(layer) if id(v) not in below | seen]
        seen.update(id(v) for v in owned)
        if owned:
            path = owned[0].path.rpartition("/")[0]
            names = itertools.chain([layer.name, path], (f"{path}_{k}" for k in itertools.count(2)))
            owners[next(name for name in names if name not in owners)] = owned
    return owners
