"""The book-keeping engine: one forward pass, one backward pass, inputs × output gradients.

While the training step is traced, each layer that has a rule records its input and its output
before the activation. One `tape.gradient` of the loss in those outputs then gives all that the
rules need; no gradient of a variable is ever computed by the tape (Bu et al., "Differentially
private optimization on large model at small cost", 2023).
"""

import contextlib
import itertools
from typing import Any, NamedTuple

from dp_keras_opt.clipping import per_example
from dp_keras_opt.clipping.factors import Materialized
from dp_keras_opt.clipping.layer_rules import rule_for


class Plan(NamedTuple):
    """Which engine serves which layer.

    Attributes:
        ruled: layers served by their rule.
        general: layers (or the whole model) run one example at a time, vectorised.
        sequential: whether these take the examples one after another instead.
        splits: for each call of a `general` layer, which of its arguments have one row per example;
            filled by the self-check, whose batch size nothing else in a model is likely to share.
            None goes by the size of each argument.
    """

    ruled: tuple
    general: tuple
    sequential: bool = False
    splits: dict | None = None

    def without_rules_for(self, layers):
        """The plan that gives these layers to the general engine."""
        ruled = tuple(layer for layer in self.ruled if layer not in layers)
        return self._replace(ruled=ruled, general=(*self.general, *layers), splits={})


class Call(NamedTuple):
    """One call of a layer during the forward pass.

    Attributes:
        source: the tensor whose gradient is wanted.
        factors: function of that gradient that yields (variable, Factor) pairs.
        output: a tensor of the call with the batch as first axis, to check the number of rows.
    """

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


@contextlib.contextmanager
def recording(plan, rows):
    """Records the calls of the planned layers while a forward pass is traced.

    Args:
        plan: which layers.
        rows: number of rows of the batch, None if it is not static.

    Yields:
        The list of `Call`s, filled by the forward pass.
    """
    calls = []
    with contextlib.ExitStack() as patches:
        for layer in plan.ruled:
            patches.enter_context(_patched(layer, "call", _recorder(layer, calls)))
        for layer in plan.general:
            recorder = _per_example_recorder(layer, calls, rows, plan)
            patches.enter_context(_patched(layer, "call", recorder))
        yield calls


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
            return rule.factors(layer, deltas, inputs, *args, **options)

        calls.append(Call(source, factors, source))
        return outputs

    return call


def _per_example_recorder(layer, calls, rows, plan):
    forward, numbers = layer.call, itertools.count()

    def call(*args, **kwargs):
        batched = per_example.arguments_with_rows(layer, rows, args, kwargs)
        if plan.splits is not None:
            batched = plan.splits.setdefault((id(layer), next(numbers)), batched)
        outputs, copies = per_example.call(
            layer, forward, rows, args, kwargs, batched, plan.sequential
        )
        for variable, copy in copies:
            calls.append(
                Call(copy, lambda g, variable=variable: [(variable, Materialized(g))], copy)
            )
        return outputs

    return call
