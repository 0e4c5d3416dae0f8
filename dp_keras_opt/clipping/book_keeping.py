"""The book-keeping engine: one forward pass, one backward pass, inputs × output gradients.

While the training step is traced, each layer that has a rule records its input and its output
before the activation. One `tape.gradient` of the loss in those outputs then gives all that the
rules need; no gradient of a variable is ever computed by the tape.

Reference: Bu, Wang, Zha and Karypis, "Differentially private optimization on large model at small
cost", ICML 2023, arXiv:2210.00038.
"""

import contextlib
import functools
import itertools
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from dp_keras_opt._keras import method_of_call, patched
from dp_keras_opt.clipping import grouped_rows, per_example, row_reads
from dp_keras_opt.clipping.batch import valid_rows
from dp_keras_opt.clipping.factors import DenseGradients, joined, sizes_of
from dp_keras_opt.clipping.graphs import current_graph
from dp_keras_opt.clipping.layer_rules import rule_for
from dp_keras_opt.clipping.objective import losses_and_outputs
from dp_keras_opt.clipping.patches import compiled
from dp_keras_opt.clipping.query import AT_WEIGHTS, Query

_ERRORS = (ValueError, TypeError, tf.errors.InvalidArgumentError)

_ELSEWHERE = (
    "it is called within a loop, branch or function of TensorFlow (tf.while_loop, tf.cond, "
    "tf.function), out of which its gradient cannot be had. Call it outside, on the whole batch, "
    "and select from what it gives"
)


class CallFailed(ValueError):
    """The engine of a layer cannot serve one of its calls."""

    def __init__(self, layer, reason):
        super().__init__(f"layer '{layer.name}': {reason}")
        self.layer = layer


class Call(NamedTuple):
    """One call of a layer during the forward pass.

    Attributes:
        layer: the layer.
        source: the tensor whose gradient is wanted, with the batch as first axis.
        factors: function of that gradient that yields (variable, Factor) pairs.
    """

    layer: Any
    source: Any
    factors: Any


def per_example_gradients(model, batch, per_example_loss, engines, loss_scale=1.0):
    """The per-example gradients of every trainable variable, as factors.

    Args:
        model: a built model.
        batch: a `Batch`.
        per_example_loss: function of (y, y_pred, sample_weight) that gives the losses (B,); None
            for the objective that the model was compiled with.
        engines: which engine serves which layer.
        loss_scale: factor on the loss of the backward pass, undone in the gradients.

    Returns:
        (losses (B,), outputs of the model, one `Factor` or None per trainable variable); None where
        the loss does not depend on the variable.
    """
    losses, y_pred, (gradients,) = gradients_for(
        [Query()], model, batch, per_example_loss, engines, loss_scale
    )
    return losses, y_pred, gradients


def gradients_for(queries, model, batch, per_example_loss, engines, loss_scale=1.0):
    """What `per_example_gradients` gives, with the gradients that each query asks for.

    Of a query with several points these are the sums over its points. What a forward pass leaves
    behind (seeds, moving statistics) is kept of the last one only, which is that at the weights as
    they are, if there is one: all have the same dropout.

    Args:
        queries: some `Query`s.
        model, batch, per_example_loss, engines, loss_scale: as for `per_example_gradients`.

    Returns:
        (losses (B,) and outputs at the first point of the first query, a list of factors for each
        query).
    """
    asked = [query.points or (AT_WEIGHTS,) for query in queries]
    every = list(itertools.chain(*asked)) or [AT_WEIGHTS]  # losses are wanted without a query, too
    points, passes = {id(point): point for point in every}, {}
    for number in sorted(points, key=lambda number: points[number].offset is None):
        point, is_last = points[number], len(passes) == len(points) - 1
        by_row = row_reads.read_by_row(model, queries, engines.ruled)
        with by_row, _weights_at(point, model, is_last) as moved:
            passes[number] = _pass(
                model, batch, per_example_loss, engines, loss_scale, point.coefficient, moved
            )
    losses, y_pred, _ = passes[id(every[0])]
    gradients = [
        list(map(_summed, zip(*(passes[id(point)][2] for point in of_query), strict=True)))
        for of_query in asked
    ]
    return losses, y_pred, gradients


@contextlib.contextmanager
def _weights_at(point, model, keeps):
    """The scope in which the trainable variables have the values of a point.

    Args:
        point: the `Point`.
        model: the model.
        keeps: whether what other variables are assigned is kept.

    Yields:
        These values, which no tape knows; none where they are the variables' own.
    """
    if point.offset is None:
        yield []
        return
    moved = [
        (variable, variable + tf.cast(offset, variable.dtype))
        for variable, offset in zip(model.trainable_variables, point.offset, strict=True)
    ]
    with keras.StatelessScope(state_mapping=moved, collect_losses=True) as scope:
        yield [value for _, value in moved]
    for variable in model.non_trainable_variables if keeps else ():
        value = scope.get_current_value(variable)
        if value is not None:
            variable.assign(value)


def _pass(model, batch, per_example_loss, engines, loss_scale, coefficient, moved):
    count = sizes_of(tf.nest.flatten(batch.x)[0])[0]
    with tf.GradientTape() as tape, recording(engines, batch.num_rows, count) as calls:
        tape.watch(moved)  # it records what depends on something watched
        losses, y_pred = losses_and_outputs(model, batch, True, per_example_loss)
        objective = tf.reduce_sum(_counted(losses, batch)) * loss_scale
    deltas = tape.gradient(objective, [call.source for call in calls])
    factor = coefficient if loss_scale == 1 else coefficient / loss_scale
    with compiled(bool(getattr(model, "jit_compile", True))):
        return losses, y_pred, _gradients(model, batch, calls, deltas, factor)


def _summed(factors):
    """The sum of the gradients of several uses of one variable, as one `Factor`; None of none."""
    used = [factor for factor in factors if factor is not None]
    return functools.reduce(joined, used) if used else None


def _counted(losses, batch):
    """What the rows that some query may ask for add to the objective, 0 for padding."""
    if batch.mask is None:
        return losses
    counted = valid_rows(batch, losses)
    if batch.public is not None:
        counted |= batch.public > 0
    if batch.rows_per_user is not None:
        losses *= tf.cast(grouped_rows.shares(batch.mask), losses.dtype)
    return tf.where(counted, losses, 0.0)


def _gradients(model, batch, calls, deltas, factor):
    """One `Factor` or None per trainable variable: the sum of those of its uses."""
    uses = {id(variable): [] for variable in model.trainable_variables}
    is_one = not tf.is_tensor(factor) and factor == 1
    for call, delta in zip(calls, deltas, strict=True):
        if delta is None:
            continue
        delta = tf.convert_to_tensor(delta)  # slices of one, where rows were gathered
        if delta.shape[0] is None and batch.num_rows is not None:  # lost on the way, as by strings
            delta = tf.ensure_shape(delta, (batch.num_rows, *delta.shape[1:]))
        if delta.shape[0] != batch.num_rows:
            reason = f"it gives {call.source.shape}, without one row for each of {batch.num_rows}"
            raise CallFailed(call.layer, reason)
        delta = tf.cast(delta, tf.float32)
        for variable, gradient in call.factors(delta if is_one else delta * factor):
            if id(variable) in uses:  # frozen variables have no gradient
                uses[id(variable)].append(gradient)
    return [_summed(used) for used in uses.values()]


@contextlib.contextmanager
def recording(engines, num_rows, count):
    """Records the calls of layers while a forward pass is traced.

    Args:
        engines: which layers, and how.
        num_rows: of the batch, None if it is not static.
        count: the same as a scalar tensor where it is not.

    Yields:
        The list of `Call`s, filled by the forward pass.

    Raises:
        CallFailed: a layer cannot be run one example at a time.
    """
    calls, failures, repeated, graph = [], [], [], current_graph()

    def record(layer, source, factors):
        if getattr(source, "graph", None) is not graph:  # it would seem to have no gradient
            failures.append(CallFailed(layer, _ELSEWHERE))
            raise failures[-1]
        calls.append(Call(layer, source, factors))

    with contextlib.ExitStack() as patches:
        for layer in engines.ruled:
            method = method_of_call(layer)
            if rule_for(layer).copies is not None:
                recorder = _copying_recorder(layer, record, failures)
            elif rule_for(layer).loop is not None:
                recorder, method = _loop_recorder(layer, record, failures), "inner_loop"
            else:
                recorder = _recorder(layer, record, repeated, num_rows, count, engines)
            patches.enter_context(patched(layer, method, recorder))
        for layer in engines.general:
            recorder = _per_example_recorder(layer, record, failures, num_rows, engines)
            patches.enter_context(patched(layer, method_of_call(layer), recorder))
        try:
            yield calls
        except Exception as error:  # Keras replaces what is raised inside of a layer
            if failures:
                raise failures[0] from error
            if repeated:  # not all that takes one for all rows takes one for each
                raise CallFailed(repeated[0], error) from error
            raise


def _recorder(layer, record, repeated, num_rows, count, engines):
    forward, rule = getattr(layer, method_of_call(layer)), rule_for(layer)
    numbers = itertools.count()

    def is_for_all(inputs):
        """Whether it is called on the same for all rows, as on positions: (T,) or (1, T).

        Decided by the self-check, whose batch size nothing else in a model is likely to share.
        """
        if not rule.for_all or engines.splits is None:
            return False
        shape, place = tuple(getattr(inputs, "shape", ())), (id(layer), next(numbers))
        if place not in engines.splits and None not in (*shape, num_rows) and num_rows != 1:
            alike = shape[0] == 1 if len(shape) == 2 else len(shape) == 1 and shape[0] != num_rows
            engines.splits[place] = alike
        return engines.splits.get(place, False)

    def call(inputs, *args, **kwargs):
        products = []

        def activation(product):
            products.append(product)
            return layer_activation(product)

        layer_activation = getattr(layer, "activation", None)
        if is_for_all(inputs):
            repeated.append(layer)
            inputs = tf.convert_to_tensor(inputs)
            inputs = tf.repeat(tf.reshape(inputs, (1, -1)), count, axis=0)
        if layer_activation is None:
            outputs = forward(inputs, *args, **kwargs)
            products.append(outputs)
        else:
            with patched(layer, "activation", activation):
                outputs = forward(inputs, *args, **kwargs)
        (source,) = products
        options = {k: v for k, v in kwargs.items() if k not in ("training", "mask")}

        def factors(deltas):
            try:
                return list(rule.factors(layer, deltas, inputs, *args, **options))
            except _ERRORS as error:
                raise CallFailed(layer, error) from error

        record(layer, source, factors)
        return outputs

    return call


def _copying_recorder(layer, record, failures):
    """For a rule by copies: each example meets weights of its own, in the layer's own call."""
    forward, rule = getattr(layer, method_of_call(layer)), rule_for(layer)

    def call(inputs, *args, **kwargs):
        def own(variable, dtype=None):
            weights = tf.convert_to_tensor(variable)
            weights = tf.cast(weights, dtype or weights.dtype)
            copies = tf.broadcast_to(weights, (sizes_of(inputs)[0], *weights.shape))
            record(layer, copies, lambda g: [(variable, DenseGradients(g))])
            return copies

        with contextlib.ExitStack() as patches:
            try:
                for name, value in rule.copies(layer, own, inputs).items():
                    patches.enter_context(patched(layer, name, value))
                return forward(inputs, *args, **kwargs)
            except _ERRORS as error:
                failures.append(CallFailed(layer, error))
                raise

    return call


def _loop_recorder(layer, record, failures):
    """For a rule by a loop: it takes the place of the layer's own."""
    rule = rule_for(layer)

    def loop(*args, **kwargs):
        try:
            return rule.loop(layer, functools.partial(record, layer), *args, **kwargs)
        except _ERRORS as error:
            failures.append(CallFailed(layer, error))
            raise

    return loop


def _per_example_recorder(layer, record, failures, num_rows, engines):
    forward, numbers = getattr(layer, method_of_call(layer)), itertools.count()

    def call(*args, **kwargs):
        try:
            batched, repeats = per_example.arguments_with_rows(layer, num_rows, args, kwargs), None
            number = id(layer), next(numbers)
            if engines.splits is not None:
                batched, repeats = engines.splits.get(number, (batched, None))
            outputs, copies, repeats = per_example.call(
                layer, forward, num_rows, args, kwargs, batched, engines.sequential, repeats
            )
            if engines.splits is not None:
                engines.splits[number] = batched, repeats
        except _ERRORS as error:
            failures.append(CallFailed(layer, error))
            raise
        for variable, copy in copies:

            def factors(g, variable=variable):
                return [(variable, DenseGradients(g))]

            record(layer, copy, factors)
        return outputs

    return call
