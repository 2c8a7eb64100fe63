"""Send values that leave a task for another one together as one message.

Each message costs both tasks time, and between processes a wake-up, whatever its size. So sends to one task of values
that are ready at the same moment (results of one node, or arguments of the function) become one send, and their
receives one receive. No value waits for another one to be computed, so nothing on the critical path is delayed by more
than the transfer of the values beside it. That is bounded: a bundle of more than `TOGETHER_BYTES` has only values with
the same users at the destination, which need all of them anyway, and none has more than `MOST_BYTES` unless it is a
single value.

The arguments of an iteration of a loop become ready at different times, so they are not bundled. Nor are arrays
whose first rows alone are sent, since the next value would have another position in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from dflow.tracing.ir import ops
from dflow.tracing.ir.graph import FreshNames, Graph, Node, Value
from dflow.tracing.ir.types import ArrayType

#: Values of at most this size together travel as one message, whatever their users; sending them takes about 0.1 ms.
TOGETHER_BYTES = 1 << 20
#: Limit of a bundle of several values, so that the receiver can use the first ones while the others are sent.
MOST_BYTES = 32 << 20


class _Transfer(NamedTuple):
    """A send of one value, and its receive."""

    send: Node
    receive: Node

    @property
    def size_bytes(self) -> int:
        return sum(type.size_bytes for type in self.receive.attributes["types"] if isinstance(type, ArrayType))


def bundle(graph: Graph) -> Graph:
    """Join the transfers of values that are ready together and go to one task."""
    fresh = FreshNames()
    for edge in {node.attributes["edge"] for node in graph.all_nodes() if node.op is ops.net_send}:
        fresh(edge)

    @cache
    def name(edges: tuple[str, ...]) -> str:
        """Return the edge of a bundle of these edges, the same for all destinations."""
        return fresh(f"{edges[0]}+{len(edges) - 1}")

    return _bundled(graph, name, is_body=False)


def _bundled(graph: Graph, name: Callable[[tuple[str, ...]], str], *, is_body: bool) -> Graph:
    new: dict[Node, Node | None] = {}
    moved: dict[Value, Value] = {}
    for group in _groups(graph, is_body=is_body):
        for bundle in _bundles(graph, group):
            if len(bundle) > 1:
                edge = name(tuple(transfer.send.attributes["edge"] for transfer in bundle))
                send, receive = _joined(bundle, edge)
                new |= dict.fromkeys((node for transfer in bundle for node in transfer), None)
                new |= {bundle[0].send: send, bundle[0].receive: receive}
                moved |= {transfer.send.outputs[0]: send.outputs[0] for transfer in bundle}
    nodes = []
    for node in graph.nodes:
        kept = new.get(node, node)
        if kept is None:
            continue
        if not moved.keys().isdisjoint(kept.after):
            kept = replace(kept, after=tuple(dict.fromkeys(moved.get(value, value) for value in kept.after)))
        if kept.op in ops.CONTROL_OPS:
            kept = replace(kept, bodies=tuple(_bundled(body, name, is_body=True) for body in kept.bodies))
        nodes.append(kept)
    return Graph(graph.inputs, tuple(nodes), graph.outputs)


def _groups(graph: Graph, *, is_body: bool) -> Iterable[Sequence[_Transfer]]:
    """Return the transfers from one task to another whose values are ready together."""
    receives = {(node.attributes["edge"], node.device): node for node in graph.nodes if node.op is ops.net_recv}
    groups: dict[object, list[_Transfer]] = {}
    for send in graph.nodes:
        if send.op is ops.net_send:
            about = send.attributes
            receive = receives[about["edge"], about["destination"]]
            value = send.inputs[0]
            producer = graph.producers.get(value) if isinstance(value, Value) else None
            apart = send if "fill" in about or (producer is None and is_body) else None
            codec = about.get("codec")
            key = send.device, about["destination"], codec, producer, send.after, receive.after, apart
            groups.setdefault(key, []).append(_Transfer(send, receive))
    return groups.values()


def _bundles(graph: Graph, group: Sequence[_Transfer]) -> Iterator[Sequence[_Transfer]]:
    """Divide a group into bundles."""
    by_users: dict[object, list[_Transfer]] = {}
    is_small = sum(transfer.size_bytes for transfer in group) <= TOGETHER_BYTES
    for transfer in group:
        users = None if is_small else graph.uses.get(transfer.receive.outputs[0])
        by_users.setdefault(users, []).append(transfer)
    for transfers in by_users.values():
        bundle: list[_Transfer] = []
        total = 0
        for transfer in transfers:
            total += transfer.size_bytes
            if bundle and total > MOST_BYTES:
                yield bundle
                bundle, total = [], transfer.size_bytes
            bundle.append(transfer)
        yield bundle


def _joined(bundle: Sequence[_Transfer], edge: str) -> _Transfer:
    """Return the transfer of all values of a bundle."""
    send, receive = bundle[0]
    types = tuple(type for transfer in bundle for type in transfer.receive.attributes["types"])
    return _Transfer(
        replace(
            send,
            inputs=tuple(operand for transfer in bundle for operand in transfer.send.inputs),
            attributes={**send.attributes, "edge": edge},
        ),
        replace(
            receive,
            outputs=tuple(value for transfer in bundle for value in transfer.receive.outputs),
            attributes={**receive.attributes, "edge": edge, "types": types},
        ),
    )
