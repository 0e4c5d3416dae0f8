"""What is in a TensorFlow graph, and in the functions that it calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

#: Operations that call back into the Python process that made them.
PYTHON = frozenset({"EagerPyFunc", "PyFunc", "PyFuncStateless"})


def current_graph() -> tf.Graph | None:
    """The graph that is being traced, None in eager execution."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def functions(operation: tf.Operation) -> list[str]:
    """Names of the functions that an operation calls."""
    names = []
    for attribute in operation.node_def.attr.values():
        if attribute.HasField("func"):
            names.append(attribute.func.name)
        names += [function.name for function in attribute.list.func]
    return [name for name in names if name]


def nodes(graph: tf.Graph) -> list[Any]:
    """The definitions of all operations of a graph, and of the functions in its library."""
    definition = graph.as_graph_def()
    library = definition.library.function
    return [*definition.node, *(node for function in library for node in function.node_def)]


def constants(graph: tf.Graph, longest: int = 16) -> list[str]:
    """The single strings, not longer than that, that stand in a graph or its functions."""
    tensors = (o.outputs[0] for o in operations(graph) if o.type == "Const")
    values = [tf.get_static_value(tensor) for tensor in tensors if tensor.dtype == tf.string]
    single = (np.asarray(value, object).ravel()[0] for value in values if np.size(value) == 1)
    texts = {text.decode(errors="ignore") for text in single}
    return sorted(text for text in texts if 0 < len(text) <= longest)


def compared(graph: tf.FuncGraph) -> list[float]:
    """The single numbers that something in a graph, or its functions, is tested for equality with.

    Such as the id of a word that stands for others, or what stands for a label that is not there.
    """
    found = {_number(outer) for outer, _ in graph.captures}  # some may be compared
    for operation in operations(graph):
        if operation.type in ("Equal", "NotEqual"):
            found |= {_number(tf.get_static_value(tensor)) for tensor in operation.inputs}
    return sorted(found - {None})


def _number(value):
    """The only number of a tensor or array; None where it has others, or is none."""
    if isinstance(value, tf.Tensor) and not hasattr(value, "numpy"):
        return None
    if value is None or getattr(value, "dtype", None) in (tf.resource, tf.variant, tf.string):
        return None
    array = np.asarray(value)
    return array.item() if array.size == 1 and array.dtype.kind in "iuf" else None


def operations(graph: tf.Graph) -> Iterator[tf.Operation]:
    """All operations of a graph, and of the functions that it calls."""
    for operation in graph.get_operations():
        yield operation
        for name in functions(operation):
            inner = getattr(graph._get_function(name), "graph", None)
            if inner is not None:
                yield from operations(inner)
