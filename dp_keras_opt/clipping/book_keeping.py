"""The book-keeping engine: one forward pass, one backward pass, inputs × output gradients.

While the training step is traced, each layer that has a rule records its input and its output
before the activation. One `tape.gradient` of the loss in those outputs then gives all that the
rules need; no gradient of a variable is ever computed by the tape (Bu et al., "Differentially
private optimization on large model at small cost", 2023).
"""

import contextlib
import itertools
from typing import Any, NamedTuple

import tensorflow as tf

from dp_keras_opt.clipping import per_example
from dp_keras_opt.clipping.factors import Materialized
from dp_keras_opt.clipping.layer_rules import rule_for


class Plan(NamedTuple):
    """Which engine serves which layer.

    Attributes:
        ruled: layers served by their rule.
        general: layers (or the whole model) run one example at a time, vectorised.
        sequential: whether these take the examples one after another instead.
        splits: for each call of a `general` layer, which of its arguments have one row per example,
            and how many times an example is repeated (`per_example.call`); filled by the
            self-check, whose batch size nothing else in a model is likely to share. None goes by
            the size of each argument.
        hidden: variables that code may change which no graph shows; they must stay as they are.
        moving: variables that every pass moves on, such as seeds and counters.
        demoted: (layer of `general`, why a faster engine did not do) for each that was demoted.
    """

    ruled: tuple
    general: tuple
    sequential: bool = False
    splits: dict | None = None
    hidden: tuple = ()
    moving: tuple = ()
    demoted: tuple = ()

    def demote(self, layers, model, reason):
        """The plan with a slower engine for these layers, where theirs has failed, and why.

        Instead of its rule, a layer is run one example at a time; instead of the layer alone, the
        one around it is, and so on up to the model.
        """
        around = {id(c): p for p in model._flatten_layers() for c in per_example.children(p)}
        units = [layer if layer in self.ruled else around.get(id(layer), model) for layer in layers]
        units = [unit for unit in units if not any(_inside(unit, other) for other in units)]

        def others(planned):
            return [p for p in planned if not any(p is u or _inside(p, u) for u in units)]

        ruled, general = others(self.ruled), [*others(self.general), *dict.fromkeys(units)]
        demoted = (*self.demoted, *((unit, reason) for unit in units))
        return self._replace(ruled=tuple(ruled), general=tuple(general), splits={}, demoted=demoted)


_ERRORS = (ValueError, TypeError, tf.errors.InvalidArgumentError)


class CallFailed(ValueError):
    """The engine of a layer cannot serve one of its calls."""

    def __init__(self, layer, reason):
        super().__init__(f"layer '{layer.name}': {reason}")
        self.layer = layer


class Call(NamedTuple):
    """One call of a layer during the forward pass.

    Attributes:
        layer: the layer.
        source: the tensor whose gradient is wanted.
        factors: function of that gradient that yields (variable, Factor) pairs.
        output: a tensor of the call with the batch as first axis, to check the number of rows.
    """

    layer: Any
    source: Any
    factors: Any
    output: Any


def plan(model):
    """Walks the model and gives each layer that owns trainable variables an engine."""
    ruled, general = [], []

    def walk(layer):
        if not layer.trainable_variables:
            return
        ruled_here = rule_for(layer) is not None
        if ruled_here:
            ruled.append(layer)
        elif per_example.is_unit(layer):
            general.append(layer)
            return
        for child in per_example.children(layer):  # of a ruled layer: an activation with weights
            walk(child)

    walk(model)
    return Plan(tuple(dict.fromkeys(ruled)), tuple(dict.fromkeys(general)), splits={})


def _inside(layer, other):
    """Whether `layer` is one of those that `other` is made of."""
    below = other._flatten_layers(include_self=False)
    return any(layer is part for part in below)


@contextlib.contextmanager
def recording(plan, rows):
    """Records the calls of the planned layers while a forward pass is traced.

    Args:
        plan: which layers.
        rows: number of rows of the batch, None if it is not static.

    Yields:
        The list of `Call`s, filled by the forward pass.

    Raises:
        CallFailed: a layer cannot be run one example at a time.
    """
    calls, failures = [], []
    with contextlib.ExitStack() as patches:
        for layer in plan.ruled:
            patches.enter_context(_patched(layer, "call", _recorder(layer, calls)))
        for layer in plan.general:
            recorder = _per_example_recorder(layer, calls, failures, rows, plan)
            patches.enter_context(_patched(layer, "call", recorder))
        try:
            yield calls
        except Exception as error:  # Keras replaces what is raised inside of a layer
            if failures:
                raise failures[0] from error
            raise


@contextlib.contextmanager
def _patched(layer, name, value):
    """Shadows an attribute for a while, past Keras's attribute tracking."""
    shadowed = vars(layer).get(name)
    object.__setattr__(layer, name, value)
    try:
        yield
    finally:
        if shadowed is None:
            object.__delattr__(layer, name)
        else:
            object.__setattr__(layer, name, shadowed)


def _recorder(layer, calls):
    forward, rule = layer.call, rule_for(layer)

    def call(inputs, *args, **kwargs):
        products = []

        def activation(product):
            products.append(product)
            return layer_activation(product)

        layer_activation = getattr(layer, "activation", None)
        if layer_activation is None:
            outputs = forward(inputs, *args, **kwargs)
            products.append(outputs)
        else:
            with _patched(layer, "activation", activation):
                outputs = forward(inputs, *args, **kwargs)
        (source,) = products
        options = {k: v for k, v in kwargs.items() if k not in ("training", "mask")}

        def factors(deltas):
            try:
                return list(rule.factors(layer, deltas, inputs, *args, **options))
            except _ERRORS as error:
                raise CallFailed(layer, error) from error

        calls.append(Call(layer, source, factors, source))
        return outputs

    return call


def _per_example_recorder(layer, calls, failures, rows, plan):
    forward, numbers = layer.call, itertools.count()

    def call(*args, **kwargs):
        try:
            batched, repeats = per_example.arguments_with_rows(layer, rows, args, kwargs), None
            number = id(layer), next(numbers)
            if plan.splits is not None:
                batched, repeats = plan.splits.get(number, (batched, None))
            outputs, copies, repeats = per_example.call(
                layer, forward, rows, args, kwargs, batched, plan.sequential, repeats
            )
            if plan.splits is not None:
                plan.splits[number] = batched, repeats
        except _ERRORS as error:
            failures.append(CallFailed(layer, error))
            raise
        for variable, copy in copies:

            def factors(g, variable=variable):
                return [(variable, Materialized(g))]

            calls.append(Call(layer, copy, factors, copy))
        return outputs

    return call
