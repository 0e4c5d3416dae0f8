"""What a training step assigns to variables, and whether the batch decides what.

A variable that takes in raw data during training has it without noise, and is saved with the
model. Whatever its momentum, and however late it begins, the graph of a pass shows it: each
assignment is followed back to what it depends on. What a graph does not show (code that runs
eagerly, Python inside of a graph) is noticed by its effect, after each execution of the step.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from dp_keras_opt._keras import (
    layers_of,
    own_metrics,
    own_states,
    own_weights,
    seed_generators,
    value_of,
)
from dp_keras_opt.clipping.graphs import PYTHON, compared, constants, current_graph, functions
from dp_keras_opt.clipping.identity import is_of_libraries

#: Operations that take a resource and leave it as it is.
_READS = {
    "Identity",
    "IdentityN",
    "ReadVariableOp",
    "ResourceGather",
    "ResourceGatherNd",
    "VariableShape",
    "VarIsInitializedOp",
    "IsResourceInitialized",
    "LookupTableExportV2",
    "LookupTableFindV2",
    "LookupTableSizeV2",
    "Shape",
}
#: Operations that move a generator of random numbers on. It then counts draws, and holds no data.
_DRAWS = {
    "RngReadAndSkip",
    "RngSkip",
    "StatefulStandardNormalV2",
    "StatefulTruncatedNormal",
    "StatefulUniform",
    "StatefulUniformFullInt",
    "StatefulUniformInt",
}
#: Numbers in a variable that may switch something; kernels have more.
_SWITCHES = 2**12

#: What Python code raises that needs values and is given symbolic tensors.
_NEEDS_VALUES = (AttributeError, RuntimeError, TypeError, ValueError, tf.errors.OpError)


class Assignments(NamedTuple):
    """What a forward pass assigns to.

    Attributes:
        changed: (handle, dtype) of each variable that it may change; those of a batch's making are
            refused, so these depend on weights, seeds and counters alone, or are metrics.
        complete: whether a graph shows all that it may change.
        hidden: variables of layers that other code may change, where it does not.
        moving: variables, metrics apart, that every pass moves on, such as seeds and counters.
        other: numbers, besides weights that are trained or frozen, that the pass may depend on.
        switches: small variables of somebody's own code that it reads and does not train, such as
            a count of steps.
        texts: short strings that stand in it, such as separators of words.
        compared: single numbers that it tests others for equality with, such as ids of words.
    """

    changed: list
    complete: bool
    hidden: list
    moving: list
    other: list
    switches: Sequence = ()
    texts: Sequence = ()
    compared: Sequence = ()


def check_assignments(
    model: keras.Model,
    forward: Callable[[Any], tuple[Any, Any]],
    batch: Any,
    eager: bool,
    show: Callable[[Any, Any, Any], Any] | None = None,
) -> Assignments:
    """Traces a forward and a backward pass, and refuses assignments that depend on the batch.

    Args:
        model: a built model.
        forward: function of a batch that gives its losses and outputs, in training mode.
        batch: a structure of tensors or `TensorSpec`s, of which only these are read.
        eager: whether training will run eagerly, so that code may do what no graph shows.
        show: function of the batch, its losses and outputs that updates metrics, which may keep
            what no pass reads and no model has; None where none are.

    Raises:
        ValueError: a variable, or a table, takes a value that depends on the batch, on how many
            rows it has, or on a metric.
    """
    of_passes: set[int] = set()  # resources that the passes read or write
    of_step: set[int] = set()  # and those that anything does which moves weights
    others: list[Any] = []  # that move weights, besides gradients
    leaves = [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]
    specs = [tf.TensorSpec(leaf.shape, leaf.dtype) for leaf in leaves]

    def run(*tensors):
        rest = iter(tensors)
        given = [None if leaf is None else next(rest) for leaf in tf.nest.flatten(batch)]
        given = tf.nest.pack_sequence_as(batch, given)
        with tf.GradientTape() as tape:  # a gradient written by hand may assign, too
            losses, outputs = forward(given)
        gradients = tape.gradient(losses, [v.value for v in model.trainable_variables])
        of_passes.update(id(outer) for outer, _ in current_graph().captures)
        others[:] = tf.nest.flatten(_without_noise(model))
        of_step.update(id(outer) for outer, _ in current_graph().captures)
        if show is not None:
            show(given, losses, outputs)
        return losses, gradients, others

    try:
        graph = tf.function(run, autograph=False).get_concrete_function(*specs).graph
    except _NEEDS_VALUES:
        if not eager:  # training would fail in the same way
            raise
        return Assignments([], False, _state(model), seeds(model), _numbers(model))
    metrics = {id(handle) for v in _metrics(model) for handle in _handles(v)}
    trace = _Trace(graph, metrics)
    if any(value.from_metric for value in trace.results):
        raise ValueError(
            "The loss, a regularizer, a constraint or the learning rate depends on the value of a "
            "metric, which holds what earlier batches were: their examples would show in steps "
            "that do not count them. Let none of these, and no layer, read a metric."
        )
    of_others = trace.results[len(trace.results) - len(others) :]
    if any(value.from_batch for value in of_others):
        raise ValueError(
            "A regularizer, a constraint or the learning rate depends on the batch, as by a tensor "
            "that a layer keeps: what it does to the weights is neither clipped nor has noise. Let "
            "each depend on weights and counts of steps alone."
        )
    known = {id(h): v.path for v in model.variables for h in _handles(v)}
    names = {id(v.handle): v.name for v in graph.variables} | known
    free = metrics | {id(handle) for v in seeds(model) for handle in _handles(v)}
    for handle, operations in trace.reached.items():
        # What is made in the graph has a name instead of a handle.
        if handle in free or not (isinstance(handle, str) or handle in of_step | known.keys()):
            continue
        for operation in operations:
            if operation.type not in _DRAWS:
                _refuse(names.get(handle), operation)
    written = [handle for handle in trace.written if id(handle) in of_passes]
    shown = set(map(id, written))
    changed = [(h, _dtype(h)) for h in written if _dtype(h) is not None]
    complete = not (eager or trace.has_python)
    state = [] if complete else _state(model)
    hidden = [v for v in state if not shown.intersection(id(h) for h in _handles(v))]
    read = [v for v in graph.variables if id(v.handle) in of_passes]
    further = [v for v in read if id(v.handle) not in known.keys() | metrics]  # of a loss
    moved = [v for v in (*model.variables, *further) if shown.intersection(map(id, _handles(v)))]
    moving = {id(v): v for v in (*seeds(model), *moved)}  # an engine may move more seeds on
    numbers = [*_numbers(model), *(v for v in further if v.dtype.is_floating)]
    fixed = free | {id(h) for v in model.trainable_variables for h in _handles(v)}
    fixed.update(id(h) for v in _of_libraries(model) for h in _handles(v))
    switches = [v for v in read if id(v.handle) not in fixed and _may_switch(v)]
    return Assignments(
        changed, complete, hidden, list(moving.values()), numbers, switches, constants(graph),
        compared(graph),
    )  # fmt: skip


def _without_noise(model):
    """What moves weights beside the gradients: regularizers, constraints and the learning rate."""
    functions = [
        (function, v)
        for v in model.trainable_variables
        for function in (v.regularizer, v.constraint)
        if function is not None
    ]
    return [function(v) for function, v in functions], model.optimizer.learning_rate


def _refuse(name, operation):
    what = f"Variable '{name}'" if name else f"What the operation '{operation.name}' writes to"
    raise ValueError(
        f"{what} is updated from the data during training ({operation.type}), without clipping and "
        "noise, so that it reveals examples whatever ε says. Remove the layer (or the part of the "
        "loss, or the metric) that does so, freeze it, or compute its values from public data "
        "beforehand. Values may depend on weights, random seeds and counts of steps, but not on "
        "the rows of a batch nor on their number."
    )


def _metrics(model):
    own = [m for layer in layers_of(model) for m in own_metrics(layer)]
    return [*model.metrics_variables, *(v for metric in own for v in metric.variables)]


def seeds(model):
    """The states of the generators of random numbers."""
    layers = layers_of(model)
    return [g.state for layer in layers for g in seed_generators(layer)]


def _state(model):
    """Variables that layers made for other things than weights, metrics and seeds."""
    known = {id(v) for v in (*_metrics(model), *seeds(model))}
    known.update(id(v) for v in model.trainable_variables)
    found = []
    for layer in layers_of(model):
        own = [v for v in layer._trackable_children().values() if isinstance(v, tf.Variable)]
        found += [v for v in (*own_states(layer), *own) if id(v) not in known]
    return list({id(v): v for v in found}.values())


def _numbers(model):
    layers = (layer for layer in layers_of(model) if layer.trainable)
    states = [v for layer in layers for v in own_states(layer)]
    return [v for v in states if tf.as_dtype(v.dtype).is_floating]


def _of_libraries(model):
    """Weights of layers that are no code of somebody's own, which make no switches of them."""
    return [v for layer in layers_of(model) if is_of_libraries(layer) for v in own_weights(layer)]


def _may_switch(variable):
    dtype = tf.as_dtype(variable.dtype)
    is_number = dtype.is_bool or dtype.is_integer or dtype.is_floating
    return is_number and (variable.shape.num_elements() or 0) <= _SWITCHES


def _handles(variable):
    """The resources of a variable: one, or one a replica."""
    value = value_of(variable)
    return [part.handle for part in getattr(value, "values", (value,))]


def _dtype(handle):
    """The dtype of the variable behind a handle, None for a table."""
    data = getattr(handle, "_handle_data", None)
    return tf.dtypes.as_dtype(data.shape_and_type[0].dtype) if data and data.is_set else None


class _Value(NamedTuple):
    """What a tensor may hold: something of the batch, or of a metric; and what it may stand for."""

    from_batch: bool = False
    resources: frozenset = frozenset()
    from_metric: bool = False

    @property
    def from_data(self):
        """Whether it may hold something of examples: a metric was updated from earlier batches."""
        return self.from_batch or self.from_metric

    def join(self, *others):
        """What one of these, or something made of them, may hold."""
        values = (self, *others)
        return _Value(
            any(value.from_batch for value in values),
            frozenset().union(*(value.resources for value in values)),
            any(value.from_metric for value in values),
        )

    @property
    def held(self):
        """The same without what it stands for."""
        return self._replace(resources=frozenset())


_CONSTANT = _Value()


class _Trace:
    """Follows the placeholders of a traced function through its operations.

    Attributes:
        reached: from each resource that depends on them, or on a metric, to the operations that
            wrote it so.
        written: the handles that some operation writes to.
        has_python: whether Python code runs inside of the graph.
        results: what the outputs of the function may hold.
    """

    def __init__(self, graph, metrics):
        self.reached, self.has_python, self._metrics = {}, False, metrics
        self._changed, self._results = set(), {}
        handles = {inner.name: outer for outer, inner in graph.captures}
        arguments = [_argument(t, handles) for t in graph.inputs]
        before = None
        while before != len(self.reached):  # what was assigned from the batch counts as the batch
            before = len(self.reached)
            self._results.clear()
            results = self._function("", graph, arguments, False)
        self.results = results
        self.written = [handle for handle in handles.values() if id(handle) in self._changed]

    def _function(self, name, graph, arguments, decided):
        """What a function returns. `decided`: whether the batch decides that it runs."""
        key = name, tuple(arguments), decided
        if key not in self._results:
            values = {t.name: value for t, value in zip(graph.inputs, arguments, strict=True)}
            for operation in _in_order(graph):
                inputs = [values[t.name] for t in operation.inputs]
                results = self._operation(graph, operation, inputs, decided)
                names = [t.name for t in operation.outputs]
                values.update(zip(names, results, strict=True))
            self._results[key] = [values[t.name] for t in graph.outputs]
        return self._results[key]

    def _operation(self, graph, operation, inputs, decided):
        called = {name: graph._get_function(name) for name in functions(operation)}
        if called and all(hasattr(function, "graph") for function in called.values()):
            graphs = [(name, function.graph) for name, function in called.items()]
            return self._call(operation, graphs, inputs, decided)
        self.has_python |= operation.type in PYTHON or bool(called)
        both = _CONSTANT.join(*inputs)
        if both.resources and operation.type not in _READS and "Summary" not in operation.type:
            self._changed |= both.resources
            if both.from_data or decided:
                for resource in both.resources:
                    self.reached.setdefault(resource, []).append(operation)
        if not inputs and any(t.dtype == tf.resource for t in operation.outputs):
            both = _Value(resources=frozenset([operation.name]))  # made, or found, in the graph
        read = _Value(
            both.from_batch or not both.resources.isdisjoint(self.reached),
            from_metric=both.from_metric or not both.resources.isdisjoint(self._metrics),
        )
        return [
            both.join(read) if t.dtype in (tf.resource, tf.variant) else read
            for t in operation.outputs
        ]

    def _call(self, operation, functions, inputs, decided):
        if operation.type in ("While", "StatelessWhile"):
            return self._loop(operation, dict(functions), inputs, decided)
        if operation.type in ("If", "StatelessIf", "Case", "StatelessCase"):
            which, *inputs = inputs
            results = [self._function(*f, inputs, decided or which.from_data) for f in functions]
            which = which.held
            return [which.join(*outcomes) for outcomes in zip(*results, strict=True)]
        if len(functions) == 1 and len(functions[0][1].inputs) == len(inputs):
            results = self._function(*functions[0], inputs, decided)
            if len(results) == len(operation.outputs):
                return results
        both = _CONSTANT.join(*inputs)  # another way of calling: anything may go anywhere
        for name, graph in functions:
            arguments = [both] * len(graph.inputs)
            both = both.join(*self._function(name, graph, arguments, decided or both.from_data))
        return [both] * len(operation.outputs)

    def _loop(self, operation, functions, state, decided):
        names = [operation.get_attr(part).name for part in ("cond", "body")]
        condition, body = ((name, functions[name]) for name in names)
        before = None
        while state != before:
            before = state
            (goes_on,) = self._function(*condition, state, decided)
            decided |= goes_on.from_data
            results = self._function(*body, state, decided)
            goes_on = goes_on.held
            state = [goes_on.join(*values) for values in zip(before, results, strict=True)]
        return state


def _in_order(graph):
    """The operations of a graph but its placeholders, each after those that give its inputs.

    They are kept in the order in which they were made, and the gradient of a loop gives it inputs
    that are made later.
    """
    known = {t.name for t in graph.inputs}
    pending = [o for o in graph.get_operations() if not {t.name for t in o.outputs} & known]
    while pending:
        later = []
        for operation in pending:
            if known.issuperset(t.name for t in operation.inputs):
                known.update(t.name for t in operation.outputs)
                yield operation
            else:
                later.append(operation)
        if len(later) == len(pending):
            raise ValueError(
                "The graph of the model has loops of TensorFlow 1, of which it cannot be told what "
                "they assign. Call tf.compat.v1.enable_control_flow_v2()."
            )
        pending = later


def _argument(tensor, handles):
    """A placeholder: of the batch, or what a captured tensor stands for."""
    if tensor.name not in handles:
        return _Value(from_batch=True)
    held = tensor.dtype in (tf.resource, tf.variant)
    return _Value(resources=frozenset([id(handles[tensor.name])])) if held else _CONSTANT


# Putting back, and comparing.


@contextlib.contextmanager
def restored(variables: Iterable[Any]) -> Iterator[None]:
    """Around code that assigns to variables: at the end they have the values of before."""
    values = [(variable, keras.ops.convert_to_numpy(variable)) for variable in variables]
    try:
        yield
    finally:
        for variable, value in values:
            variable.assign(value)


class Snapshot:
    """The values of variables, to be put back.

    Attributes:
        shift: a number that is added to the states of the generators of random numbers.
    """

    def __init__(self, model, assignments=None, weights=()):
        """
        Args:
            model: whose variables.
            assignments: what its forward pass changes; all variables where that is not known.
            weights: variables besides.
        """
        self.shift = 0
        self._seeds = [(state, keras.ops.convert_to_numpy(state)) for state in seeds(model)]
        self._weights = [(v, tf.identity(tf.convert_to_tensor(v))) for v in weights]
        self._handles = [] if assignments is None else assignments.changed
        complete = assignments is not None and assignments.complete
        self._variables = [] if complete else model.variables
        self._values = [tf.raw_ops.ReadVariableOp(resource=h, dtype=d) for h, d in self._handles]
        self._numbers = [keras.ops.convert_to_numpy(v) for v in self._variables]

    def put_back(self) -> None:
        for (handle, _), value in zip(self._handles, self._values, strict=True):
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)
        for variable, number in zip(self._variables, self._numbers, strict=True):
            variable.assign(number)
        for variable, value in self._weights:
            variable.assign(value)
        for state, number in self._seeds:
            state.assign(number + np.array(self.shift, number.dtype))


def unchanged(run: Callable[..., Any], variables: Callable[[], list]) -> Callable[..., Any]:
    """`run`, which raises a ValueError where it has changed a variable that must stay as it is.

    Args:
        run: the function.
        variables: function that gives these variables.
    """

    def digest(variable):
        return hashlib.sha256(np.asarray(variable).tobytes()).digest()

    def checked(*args):
        before = [(variable, digest(variable)) for variable in variables()]
        try:
            return run(*args)
        finally:
            for variable, old in before:
                if digest(variable) != old:
                    _refuse_change(getattr(variable, "path", variable.name))

    return checked


def _refuse_change(name):
    raise ValueError(
        f"Variable '{name}' was changed by a training step, in code that no graph shows, so that "
        "it cannot be told from what. If from the data, it reveals examples whatever ε says: it "
        "has no noise, and is saved with the model. Remove the layer that does so, freeze it, or "
        "change the variable by operations of Keras or TensorFlow alone."
    )
