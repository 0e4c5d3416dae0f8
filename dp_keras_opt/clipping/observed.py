"""What layers give while a model runs, besides its outputs: their own outputs, and added losses."""

from __future__ import annotations

import contextlib
import contextvars
import difflib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from dp_keras_opt._keras import added_losses, layers_of, method_of_call, patched
from dp_keras_opt.clipping.graphs import current_graph
from dp_keras_opt.clipping.loops import runs_loop

_FRAME: contextvars.ContextVar[list | None] = contextvars.ContextVar("observed", default=None)


class NotPerExample(ValueError):
    """An objective, or a part of it, that does not give each example what is its own."""


@contextlib.contextmanager
def frame() -> Iterator[list[tuple[str, Any]]]:
    """Collects the (name, output) of each call of an observed layer until the end of the block.

    The general engine opens one inside of its loop over examples, and observes again, for all rows
    at once, what it found there.
    """
    seen: list[tuple[str, Any]] = []
    token = _FRAME.set(seen)
    try:
        yield seen
    finally:
        _FRAME.reset(token)


def observe(name: str, output: Any) -> None:
    """Notes what a layer gave in the innermost `frame`."""
    seen = _FRAME.get()
    if seen is not None:
        seen.append((name, output))


@contextlib.contextmanager
def observing(model: keras.Model, names: Sequence[str]) -> Iterator[list[tuple[str, Any]]]:
    """A `frame` in which these layers of a model are observed.

    Raises:
        NotPerExample: no layer has such a name, or several have.
    """
    with contextlib.ExitStack() as patches, frame() as seen:
        for name, layer in layers_named(model, names).items():
            method = method_of_call(layer)
            patches.enter_context(patched(layer, method, _observed(name, getattr(layer, method))))
        yield seen


def _observed(name, call):
    def observed(*args, **kwargs):
        output = call(*args, **kwargs)
        observe(name, output)
        return output

    return observed


def layers_named(model: keras.Model, names: Sequence[str]) -> dict[str, keras.layers.Layer]:
    """The layers of a model that have these names, nested ones as "encoder/z_mean" if need be.

    Raises:
        NotPerExample: no layer has such a name, or several have, or it is run in a loop.
    """
    paths = list(_paths(model)) if names else []
    found = {name: _the_one(model, name, paths) for name in names}
    in_loops = _in_loops(model) if names else {}
    for name, layer in found.items():
        if id(layer) in in_loops:
            raise NotPerExample(
                f"The layer '{name}', an intermediate of the objective, is run by "
                f"'{in_loops[id(layer)]}' in a loop, or as one of its parts, and what it gives "
                "there cannot be seen. Name the layer that runs the loop."
            )
    return found


def _in_loops(model):
    """The name of the layer that runs the loop, by the id of each layer in one."""
    loops = filter(runs_loop, layers_of(model))
    return {id(part): loop.name for loop in loops for part in layers_of(loop, include_self=False)}


def _paths(layer, prefix=""):
    """(path, layer) of all layers in a layer, outer ones first; of a shared one, several."""
    for child in layers_of(layer, include_self=False, recursive=False):
        path = f"{prefix}/{child.name}"
        yield path, child
        yield from _paths(child, path)


def _the_one(model, name, paths):
    found = {id(layer): (path, layer) for path, layer in paths if path.endswith(f"/{name}")}
    if len(found) == 1:
        ((_, layer),) = found.values()
        return layer
    if found:
        candidates = ", ".join(repr(path[1:]) for path, _ in found.values())
        raise NotPerExample(
            f"The intermediate '{name}' of the objective is the name of several layers of "
            f"'{model.name}'. Give more of the path: {candidates}."
        )
    known = list(dict.fromkeys(path.rpartition("/")[2] for path, _ in paths))
    near = difflib.get_close_matches(name, known, n=5, cutoff=0.4) or known[:20]
    raise NotPerExample(
        f"The intermediate '{name}' of the objective is no layer of '{model.name}'. "
        f"Layers of similar names: {', '.join(map(repr, near))}. An operation becomes a layer that "
        "can be named by keras.layers.Identity(name=...)(tensor)."
    )


def by_name(
    names: Sequence[str], seen: Sequence[tuple[str, Any]], num_rows: int | None
) -> dict[str, Any]:
    """What each observed layer gave: its output, or a list of them where it was called repeatedly.

    Raises:
        NotPerExample: a layer was not called, or only inside of a loop; or what it gave has not one
            row for each example.
    """
    found = {}
    for name in names:
        outputs = [output for at, output in seen if at == name]
        if not outputs:
            raise NotPerExample(
                f"The layer '{name}', an intermediate of the objective, is not called by the model."
            )
        for leaf in filter(tf.is_tensor, keras.tree.flatten(outputs)):
            if is_in_a_loop(leaf):
                raise NotPerExample(
                    f"The layer '{name}', an intermediate of the objective, is called in a loop, "
                    "and what it gives there cannot be seen. Name the layer that runs the loop."
                )
            if not has_rows(leaf, num_rows):
                raise NotPerExample(
                    f"The layer '{name}', an intermediate of the objective, gives a tensor of "
                    f"shape {leaf.shape}, without one row for each example"
                    + (f" ({num_rows} here)" if num_rows is not None else "")
                    + ". Name a layer whose output has the batch as its first axis."
                )
        found[name] = outputs[0] if len(outputs) == 1 else outputs
    return found


def added_to(model: keras.Model, num_rows: int | None) -> list[tf.Tensor]:
    """The losses (B,) that layers added in the last call of a model by `add_loss`.

    Raises:
        NotPerExample: one of them has not one number for each example.
    """
    added, in_loops = [], _in_loops(model)
    for layer in layers_of(model):
        for loss in added_losses(layer):
            if is_in_a_loop(loss) or id(layer) in in_loops:
                raise NotPerExample(
                    f"Layer '{layer.name}' calls add_loss in a loop, as over the steps of a "
                    "sequence, of which not all losses can be seen. Add the loss after the loop, "
                    "from what it gives."
                )
            if loss.shape.rank != 1 or not has_rows(loss, num_rows):
                raise NotPerExample(
                    f"Layer '{layer.name}' calls add_loss with a loss that depends on the data and "
                    f"has the shape {loss.shape}, so that it cannot be split into the examples' "
                    "own. Add a vector (B,), one loss for each example: take the mean over all "
                    "axes but the first; or put it into the loss function. If it balances experts "
                    "over the batch, leave it out: layer.add_loss = lambda loss: None."
                )
            added.append(loss)
    return added


def has_rows(tensor: Any, num_rows: int | None) -> bool:
    """Whether the first axis may be that of the batch; None for a number that is not known."""
    shape = tensor.shape
    return bool(shape.rank) and (None in (shape[0], num_rows) or shape[0] == num_rows)


def is_in_a_loop(tensor: Any) -> bool:
    """Whether it is of a graph inside of the one that is traced, as of a step of a loop."""
    return tf.is_symbolic_tensor(tensor) and tensor.graph is not current_graph()
