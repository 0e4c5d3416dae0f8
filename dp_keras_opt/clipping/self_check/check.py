"""The engines of a model, and that they may be used: the whole check, in its order."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dp_keras_opt import deprecation
from dp_keras_opt._keras import compiled_metrics, layers_of, own_trained, trained_in
from dp_keras_opt.clipping import per_example, state_changes, tensorflow_settings, validation
from dp_keras_opt.clipping.batch import Batch, map_leaves
from dp_keras_opt.clipping.book_keeping import CallFailed
from dp_keras_opt.clipping.engines import Engines, engines_for
from dp_keras_opt.clipping.identity import is_of_libraries
from dp_keras_opt.clipping.layer_rules import goes_by_name, rule_for
from dp_keras_opt.clipping.normalization import names
from dp_keras_opt.clipping.objective import (
    Objective,
    losses_and_outputs,
    losses_of,
    outputs_and_intermediates,
)
from dp_keras_opt.clipping.self_check.engine_check import wrong_variables
from dp_keras_opt.clipping.self_check.independence import (
    check_independence,
    check_independent_gradients,
    check_loss_alone,
    is_random_in_inference,
)
from dp_keras_opt.clipping.self_check.lengths import check_lengths, require_length
from dp_keras_opt.clipping.self_check.passes import DOES_NOT_RUN, Passes, with_tapes
from dp_keras_opt.clipping.self_check.synthetic import Synthetic

#: Rows of a small and of a larger batch, odd and even; unlikely as sizes of anything else in a
#: model. The larger one can be cut into pairs, triples and so on, as code that mixes may do.
_FEW, _MANY = 3, 18

#: Where counters of steps are put to see what begins late; how many of the least and the largest
#: numbers that are compared with, and of states in which several differ, are tried besides; and by
#: how many draws.
_STEPS, _COMPARED, _MIXED, _OF_LATER = 10**6, 4, 16, 3

#: At most so many rows of a large batch, of which code may treat some otherwise than others.
_LARGE = 256

#: (rows, magnitude of floats, whether the changed row is an outlier, style) of the independence
#: check.
_DRAWS = (
    (_FEW, 1.0, False, "real"),
    (_MANY, 1.0, False, "whole"),
    (_MANY, 1.0, True, "real"),
    (_MANY, 1.0, False, "missing"),
    (_MANY, 1.0, False, "bright"),
    (_MANY, 1.0, False, "dark"),
    (_MANY, 1.0, False, "bright, late"),
    (_MANY, 1.0, False, "dark, late"),
    (_MANY, 1e3, False, "real"),
    (_FEW, 1e3, True, "real"),
)


@deprecation.renamed_arguments(rows="num_rows")
@tensorflow_settings.without_tf32()  # it compares, and could not tell a mistake from such rounding
def checked_engines(
    model: keras.Model,
    batch: Batch,
    num_rows: int | None = None,
    *,
    per_example_loss: Callable[..., tf.Tensor] | None = None,
    show: Callable[[Batch, tf.Tensor, Any], Any] | None = None,
) -> Engines:
    """The engines that serve this model, each shown to be right on a synthetic batch.

    Args:
        model: a built and compiled `DPModel`.
        batch: a `Batch` whose shapes and dtypes the synthetic one takes; its values are not read.
        num_rows: how many rows the model is run on at once in training, so that no more are needed
            here, but two; None where that is not known.
        per_example_loss: function of (y, y_pred, sample_weight) that gives the losses (B,); by
            default the objective that the model was compiled with.
        show: function of (batch, losses (B,), outputs) by which a training step updates metrics;
            None where it updates none.

    Returns:
        Rules and layers of their own as far as these are right; where that fails, the whole model
        is run one example at a time, and a warning names the variables.

    Raises:
        ValueError: the model mixes examples, keeps what it saw of them, or changes what a row gives
            with the length of its batch; or no engine reproduces its gradients.
    """
    validation.validate(model)

    def run(rows, training=True):
        return losses_and_outputs(model, rows, training, per_example_loss)

    def forward(rows, training=True):
        return run(rows, training)[0]

    most = _MANY if num_rows is None else max(2, num_rows)
    few, large = min(_FEW, most), _rows_of_large(model, num_rows)
    _build(model, forward, batch, few)
    eager = model.run_eagerly or tf.config.functions_run_eagerly()
    assignments = with_tapes(state_changes.check_assignments, model, run, batch, eager, show)
    weights = [*model.trainable_variables, *assignments.other]
    before = state_changes.Snapshot(model, assignments, [*weights, *assignments.switches])
    passes = Passes(model, forward, eager)
    synthetic = Synthetic(batch, few, assignments.texts, assignments.compared)
    if per_example_loss is None and isinstance(model.loss, Objective):
        passes.objective = f"The objective '{model.loss.name}'"
    try:
        narrow, wide = _usable(model, passes, synthetic, before)
        is_random = passes.run(wide, before).is_random
        away = _elsewhere(model, assignments, weights, before, lambda at: passes.why_not(wide, at))
        _check_lengths(model, passes, synthetic, wide, (before, away), is_random)
        _check_rows(passes, synthetic, batch, wide, (before, away), is_random, most, large)
        if not _is_of_libraries(model):
            _check_gradients(passes, synthetic, (before, away))
        if is_random:
            _check_loss(model, per_example_loss, passes, wide, before)
        for number, states in enumerate(_later(model, assignments, passes, wide, before)):
            draws = _DRAWS[: _OF_LATER if number else None]
            _check_rows(passes, synthetic, batch, wide, states, is_random, most, draws=draws)
        del away  # as large as the model
        engines = engines_for(model, bool(synthetic.open_leaves))
        engines = _right_engines(
            model, per_example_loss, engines, (narrow, wide), before, is_random
        )
    finally:
        before.shift = 0
        before.put_back()
    return engines._replace(hidden=tuple(assignments.hidden), moving=tuple(assignments.moving))


def _is_of_libraries(model):
    """Whether all that a model runs is code of libraries, which layers put together."""
    layers = layers_of(model)
    held = [value for layer in layers for value in vars(layer).values() if callable(value)]
    operations = [each for layer in layers for each in getattr(layer, "operations", ())]
    return all(map(is_of_libraries, (*layers, *held, *keras.tree.flatten(model.loss)))) and all(
        isinstance(each, keras.layers.Layer) for each in operations
    )


def _build(model, forward, batch, rows):
    """Makes what the first call makes: a later one would be in the trace of a step."""
    metrics = compiled_metrics(model)
    built = all(layer.built for layer in layers_of(model))
    if built and (metrics is None or metrics.built):
        return
    synthetic, _ = Synthetic(batch).pair(np.random.default_rng(0), rows)
    before = state_changes.Snapshot(model)
    forward(synthetic)  # building calls layers more often, and makes variables and layers
    if metrics is not None and not metrics.built:
        metrics.build(synthetic.y, model(synthetic.x, training=True))
    before.put_back()
    validation.validate(model)


def _usable(model, passes, synthetic, before):
    """Batches with finite losses, of the smallest and of the widest range of values, if possible.

    Where masks are, not all may be masked; words that the model does not know may be, all of them.
    """

    def why_not(batch):
        return passes.why_not(batch, before, with_gradients=bool(synthetic.open_leaves))

    def found(wide):
        for _ in range(20):
            batch, _ = synthetic.pair(random, synthetic.rows, wide=wide)
            if why_not(batch) is None:
                break
        return batch

    synthetic.widen(model, why_not)
    require_length(synthetic)
    random = np.random.default_rng(0)
    wide, narrow = found(True), found(False)
    return (narrow if why_not(narrow) is None else wide), wide


def _elsewhere(model, assignments, weights, before, why_not):
    """The model's state at other weights: what is 0 at the first step is not so later.

    Weights are moved by random numbers of their own size, or of that of an initial value; other
    numbers that a loss holds, such as the weight of a penalty, upwards.
    """
    random, trained = np.random.default_rng(1), {id(v) for v in model.trainable_variables}
    for size in (1.0, 0.1):
        before.put_back()
        for variable in weights:
            value = np.asarray(tf.convert_to_tensor(variable), np.float32)
            usual = max(1, math.prod(value.shape[:-1])) ** -0.5 if value.ndim > 1 else 0.5
            moved = random.standard_normal(value.shape, np.float32)  # in place: it may be large
            moved *= size * max(usual, float(np.linalg.norm(value)) / max(1, value.size) ** 0.5)
            if id(variable) not in trained:
                np.abs(moved, out=moved)
            moved += value
            variable.assign(tf.cast(moved, variable.dtype))
        away = state_changes.Snapshot(model, assignments, weights)
        if why_not(away) is None:
            return away
    return before


def _later(model, assignments, passes, batch, before):
    """Pairs of states that training may come to, by which what waits for them begins.

    All that is read and not trained, such as counts and flags, is far in one pair, and on; in
    others it is 0, and off; 1; −1; and what the graph compares with. Where there are several, each
    is one of these, or as it is, in some more. The second of a pair is a pass on.
    """
    switches = assignments.switches
    if not switches:
        return
    before.put_back()
    compared = assignments.compared
    values = [_STEPS, 0, 1, -1, *compared[:_COMPARED], *compared[_COMPARED:][-_COMPARED:]]
    now = [np.asarray(tf.convert_to_tensor(variable)) for variable in switches]
    alike = [[np.full_like(each, _of_dtype(v, each.dtype)) for each in now] for v in values]
    states = [now, *alike]
    of_each = [
        [one for (one,) in _distinct([[a] for a in own])] for own in zip(*states, strict=True)
    ]
    if math.prod(map(len, of_each)) <= _MIXED:
        states += itertools.product(*of_each)
    else:
        random = np.random.default_rng(4)
        states += [[own[random.integers(len(own))] for own in of_each] for _ in range(_MIXED)]
    for then in _distinct(states)[1:]:
        before.put_back()
        for variable, number in zip(switches, then, strict=True):
            variable.assign(number)
        state = state_changes.Snapshot(model, assignments, switches)
        if passes.why_not(batch, state) is None:
            after = state_changes.Snapshot(model, assignments, switches)
            yield state, after if passes.why_not(batch, after) is None else state


def _distinct(states):
    """Those lists of arrays that did not come before."""
    found: dict[bytes, Any] = {}
    for each in states:
        found.setdefault(b"".join(array.tobytes() for array in each), each)
    return list(found.values())


def _of_dtype(value, dtype):
    """A number as one of this dtype, or the nearest that it has room for."""
    if tf.as_dtype(dtype).is_integer:
        value = min(max(value, tf.as_dtype(dtype).min), tf.as_dtype(dtype).max // 2)
    return np.asarray(value).astype(dtype)


def _check_lengths(model, passes, synthetic, wide, states, is_random):
    """Whether rows change with the length of their batch, where the data leaves it open."""
    if not synthetic.open_leaves:
        return

    def why_not(batch, at=states[0]):
        return passes.why_not(batch, at, with_gradients=True)

    signed, _ = synthetic.pair(np.random.default_rng(1), synthetic.rows, magnitude=2.0)
    for at in states:
        for batch in (wide, signed):
            if batch is wide or why_not(batch, at) is None:
                check_lengths(
                    model,
                    lambda rows, at=at: passes.losses_and_gradients(rows, at, not is_random),
                    why_not,
                    synthetic,
                    batch,
                )


def _rows_of_large(model, num_rows):
    """How many rows code of somebody's own may have before it in training; 0 without such code."""
    if _is_of_libraries(model):
        return 0
    expected = model.optimizer.batch_size if num_rows is None else num_rows
    return min(_LARGE, expected) if isinstance(expected, int) else _LARGE


def _check_rows(passes, synthetic, form, wide, states, is_random, most, large=0, draws=_DRAWS):
    """Whether rows change with the others; once among many, where `large` is more than `most`."""
    random, alone_in = np.random.default_rng(2), "training"
    if is_random:
        in_both = any(is_random_in_inference(passes, wide, at) for at in states)
        alone_in = None if in_both else "inference"
    # Of numbers for which there is a trace; and of one, where the data may have single rows.
    is_open = any(leaf is not None and leaf.shape[0] is None for leaf in tf.nest.flatten(form))
    few = min(_FEW, most)
    marks = (*synthetic.marks, *synthetic.lone) if draws == _DRAWS else ()
    draws = [(*draw, None) for draw in draws]
    draws += [(_MANY, 1.0, False, "real", mark) for mark in marks]
    draws += [(large, 1.0, True, "real", None)] * (large > _MANY)
    for number, (rows, magnitude, outlier, style, mark) in enumerate(draws):
        rows = min(rows, max(most, large))
        others = [few if rows == most else most] if few < most else []
        copies = [*others, 1] if is_open or not others else others
        must_be_finite = mark is not None or style not in ("real", "whole")
        for row, at in zip((0, rows - 1), states, strict=True):
            if row == 0 and mark in synthetic.lone:
                continue  # once is enough
            drawn = synthetic.pair(random, rows, row, magnitude, outlier, style=style, mark=mark)
            at.shift = 2 * number + (row > 0)  # other random numbers each time, the same for both
            check_independence(passes, *drawn, row, at, alone_in, copies, must_be_finite)
    states[0].shift = 0


def _check_loss(model, per_example_loss, passes, batch, before):
    """Whether a loss is of its row alone, where the model itself gives others each time."""
    if per_example_loss is None and model.loss is None:
        return  # there is what layers add, and no more
    before.put_back()
    rows = Batch(*map_leaves(tf.convert_to_tensor, (batch.x, batch.y, batch.sample_weight)))
    try:
        given = rows, *outputs_and_intermediates(model, rows, True, per_example_loss)
    except DOES_NOT_RUN:
        return  # outside of a graph

    def losses(of_rows):
        return np.asarray(losses_of(model, *of_rows, per_example_loss))

    check_loss_alone(losses, given, (1, 2, 4), passes.objective)


def _check_gradients(passes, synthetic, states):
    """Whether the gradients of other rows change with a row, whose losses may not show it."""
    random = np.random.default_rng(3)
    for row, at in zip((0, synthetic.rows - 1), states, strict=True):
        drawn = synthetic.pair(random, synthetic.rows, row)
        check_independent_gradients(passes, *drawn, row, at)


def _right_engines(model, per_example_loss, engines, batches, before, is_random):
    """These engines, or the fastest slower ones that are shown to be right."""

    def compare(engines):
        # Vectorizing a loop takes tens of seconds outside of a traced function.
        loops = any(per_example.has_loops(layer) for layer in engines.general)
        engines = engines._replace(sequential=loops)
        return wrong_variables(model, per_example_loss, engines, batches, before, is_random)

    causes = {}  # id of a unit -> (paths of variables, why a faster engine did not do for them)
    for unit in engines.general:
        if isinstance(unit, keras.Model):
            paths = [v.path for v in own_trained(unit) if v.trainable]
            causes[id(unit)] = paths, f"'{unit.name}' owns them itself, and no layer in it does"
    while True:
        wrong, layers, reason = _failures(model, compare, engines)
        if not layers:
            _warn_of_whole_models(engines, causes)
            return engines
        if engines.general == (model,):
            raise ValueError(
                f"The per-example gradients of {wrong} cannot be computed, not even by running the "
                f"model one example at a time: {reason}."
            )
        for layer in layers:
            if layer in engines.ruled and goes_by_name(layer):  # later versions may change a class
                warnings.warn(
                    f"The rule for {type(layer).__name__} '{layer.name}' does not hold for this "
                    f"version of {type(layer).__module__} or this use of it ({reason}); the layer "
                    "is run one example at a time instead. This is exact, but slower.",
                    stacklevel=2,
                )
        engines = engines.demote(layers, model, reason)
        first = next((causes[id(layer)] for layer in layers if id(layer) in causes), None)
        for unit in engines.general:
            causes.setdefault(id(unit), first or (wrong, reason))


def _warn_of_whole_models(engines, causes):
    """Names what is to blame where a model is run as a whole, and says what that costs."""
    for model in engines.general:
        if isinstance(model, keras.Model):
            wrong, reason = causes[id(model)]
            weights = sum(math.prod(v.shape) for v in trained_in(model))
            warnings.warn(
                f"The per-layer engines do not cover every use of {names(wrong)} ({reason}); the "
                f"whole model '{model.name}' is run one example at a time instead. This is exact, "
                f"but slower, and each example takes a copy of {weights:,} weights.",
                stacklevel=2,
            )


def _failures(model, compare, engines):
    """Where the engines fail: (paths of variables, the layers they belong to, how)."""
    try:
        wrong = with_tapes(compare, engines)
    except CallFailed as failure:
        paths = [variable.path for variable in trained_in(failure.layer)]
        return paths, [failure.layer], str(failure)
    served = (*engines.ruled, *engines.general)
    layers = [s for s in served if any(v.path in wrong for v in trained_in(s))]
    # A class that has changed may give other outputs with copies, by which all others seem wrong.
    named = [layer for layer in layers if layer in engines.ruled and goes_by_name(layer)]
    copied = [layer for layer in named if rule_for(layer).copies is not None]
    layers = copied or named or layers or [model] * bool(wrong)
    blamed = names([layer.name for layer in layers])
    return wrong, layers, f"layer {blamed}: the sum of the gradients is not that of the batch"
