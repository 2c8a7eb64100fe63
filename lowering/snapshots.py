"""Which calls only read variables that are then copied to other devices: XLA would make one more copy of each."""

from __future__ import annotations

from dflow.tracing import ops
from dflow.tracing.device_name import split_device_name
from dflow.tracing.graph import Graph, Node, Value


def snapshots(graph: Graph) -> frozenset[Node]:
    """The calls on devices whose results are the values of variables, which copies alone take.

    So their results may be the buffers of the variables themselves: nobody can hand them on, donate them or keep them.
    """
    kept = {output for output in graph.outputs if isinstance(output, Value)}

    def is_copied(value: Value) -> bool:
        users = graph.uses.get(value, ())
        return bool(users) and value not in kept and all(user.op is ops.dev_copy for user in users)

    return frozenset(
        node
        for node in graph.nodes
        if node.op is ops.xla_call
        and split_device_name(node.device or "")[1]
        and all(inner.op is ops.var_read for inner in node.bodies[0].nodes)
        and all(output in node.bodies[0].producers for output in node.bodies[0].outputs)
        and all(map(is_copied, node.outputs))
    )
