"""For which operations of a traced function TensorFlow has no kernel on a kind of device.

The wheel for Linux carries the registrations of kernels for GPUs, and of what XLA compiles for
them, on machines without a GPU, too.
"""

import functools

from tensorflow.python.framework.kernels import get_registered_kernels_for_op

#: What calls functions, or stands for their arguments: their bodies are looked at instead.
_CALLS = {
    "Case", "If", "PartitionedCall", "Placeholder", "StatefulPartitionedCall", "StatelessCase",
    "StatelessIf", "StatelessWhile", "While",
}  # fmt: skip


def without_kernel(function, device):
    """{(operation, its types)} of a concrete function and all that it calls.

    Args:
        function: a `ConcreteFunction`.
        device: "GPU", or "XLA_GPU_JIT" for what XLA compiles for GPUs.
    """
    graph = function.graph.as_graph_def()
    bodies = (body.node_def for body in graph.library.function)
    nodes = [node for body in (graph.node, *bodies) for node in body]
    found = {(node.op, _types(node)) for node in nodes if node.op not in _CALLS}
    return {operation for operation in found if not _has_kernel(*operation, device)}


def _types(node):
    """The dtypes among the attributes of a node, by name."""
    found = {}
    for name, value in node.attr.items():
        if name.startswith("_"):
            continue
        if value.WhichOneof("value") == "type":
            found[name] = (value.type,)
        elif value.WhichOneof("value") == "list" and value.list.type:
            found[name] = tuple(value.list.type)
    return tuple(sorted(found.items()))


@functools.cache
def _has_kernel(operation, types, device):
    kernels, types = get_registered_kernels_for_op(operation).kernel, dict(types)
    return any(
        kernel.device_type in (device, "DEFAULT")
        and all(
            set(types.get(each.name, ())) <= set(each.allowed_values.list.type)
            for each in kernel.constraint
        )
        for kernel in kernels
    )
