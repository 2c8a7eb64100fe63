"""Find the calls that only read variables for copies and sends: run by XLA, they would make one more copy of each."""

from __future__ import annotations

from dflow.tracing.ir import ops
from dflow.tracing.ir.graph import Graph, Node, Value


def moved_reads(graph: Graph) -> frozenset[Node]:
    """Return the calls whose results are values of variables and are used by copies and sends alone.

    So their results may be the buffers of the variables themselves: no user returns, donates or keeps them.
    """
    kept = {output for output in graph.outputs if isinstance(output, Value)}

    def is_moved(value: Value) -> bool:
        users = graph.uses.get(value, ())
        return bool(users) and value not in kept and all(user.op in (ops.dev_copy, ops.net_send) for user in users)

    return frozenset(
        node
        for node in graph.nodes
        if node.op is ops.xla_call
        and all(inner.op is ops.var_read for inner in node.bodies[0].nodes)
        and all(output in node.bodies[0].producers for output in node.bodies[0].outputs)
        and all(map(is_moved, node.outputs))
    )


def variables_read(read: Node) -> list[Value]:
    """Return the variable of each result of a read."""
    (body,) = read.bodies
    outer = dict(zip(body.inputs, read.values, strict=True))
    return [outer[ref] for output in body.outputs if isinstance(output, Value) for ref in body.producers[output].values]
