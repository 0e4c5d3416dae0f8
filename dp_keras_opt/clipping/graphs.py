"""What is in a TensorFlow graph, and in the functions that it calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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


def operations(graph: tf.Graph) -> Iterator[tf.Operation]:
    """All operations of a graph, and of the functions that it calls."""
    for operation in graph.get_operations():
        yield operation
        for name in functions(operation):
            inner = getattr(graph._get_function(name), "graph", None)
            if inner is not None:
                yield from operations(inner)
