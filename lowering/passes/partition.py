"""Cut the graph at device borders: each value that crosses is moved once per destination.

The graph stays one graph. Afterwards every operand of a node is on the node's device. What joins two tasks is a
`net.send` and a `net.recv` of the same edge, named for the variable it carries, else for its value. What joins two
devices of one task is a `dev.copy`. What a task itself does, on none of its devices, takes values where they lie.

A value that is to travel by a codec is encoded before it is sent and decoded where it comes: once per destination and
codec, and its edge is named for both. Where it does not go to another task, the wish is forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from dflow.tracing import ops
from dflow.tracing.device_name import split_device_name, task_of
from dflow.tracing.graph import FreshNames, Graph, Node, Operand, Origin, Value
from dflow.tracing.types import HANDLES, ArrayType, TokenType
from dflow.tracing.wire_codecs import encoded_type, wire_p


@dataclass(frozen=True)
class Partition:
    """Add the transfers of a placed graph whose caller is `local`."""

    local: str
    name: ClassVar[str] = "partition"

    def __call__(self, graph: Graph) -> Graph:
        is_here = all(node.device == self.local and not _is_wish(node) for node in graph.nodes)
        if is_here and self._takes_all_here(graph):
            return graph
        cut = _Cut(graph, self.local)
        for node in graph.nodes:
            cut.add(node)
        outputs = tuple(cut.at(output, self.local) for output in graph.outputs)
        return Graph(graph.inputs, tuple(cut.nodes), outputs)

    def _takes_all_here(self, graph: Graph) -> bool:
        return all(value.device in (None, self.local) or isinstance(value.type, HANDLES) for value in graph.inputs)


def _is_wish(node: Node) -> bool:
    return node.op.primitive is wire_p


class _Way(NamedTuple):
    """A value as its users take it: what is made, how it is to travel, and what it is called then."""

    value: Value
    codec: str
    name: str


class _Cut:
    def __init__(self, graph: Graph, local: str) -> None:
        self.nodes: list[Node] = []
        self._graph = graph
        self._fresh = graph.fresh_names()
        self._device = {value: value.device or local for value in graph.inputs}
        self._ways: dict[Value, _Way] = {}
        #: Numbers that are to travel by a codec, which are sent to nobody.
        self._numbers: dict[Value, Operand] = {}
        self._copies: dict[tuple[Value, str, str], Value] = {}
        self._edges: dict[tuple[Value, str], str] = {}
        self._fresh_edge = FreshNames()

    def add(self, node: Node) -> None:
        assert node.device is not None
        if _is_wish(node):
            self._note(node)
            return
        inputs = self._inputs(node.inputs, node.device)
        self._device.update(dict.fromkeys(node.outputs, node.device))
        self.nodes.append(
            Node(node.op, inputs, node.outputs, node.attributes, node.bodies, node.device, (), node.origin)
        )

    def _note(self, node: Node) -> None:
        [operand], [wished] = node.inputs, node.outputs
        if not isinstance(operand, Value) or operand in self._numbers:
            self._numbers[wished] = self._numbers[operand] if isinstance(operand, Value) else operand
            return
        before = self._way(operand)
        name = before.name if wished.name.isdigit() else wished.name
        self._ways[wished] = _Way(before.value, node.attributes["codec"], name)

    def _way(self, value: Value) -> _Way:
        return self._ways.get(value) or _Way(value, "none", value.name)

    def _inputs(self, operands: Sequence[Operand], device: str) -> tuple[Operand, ...]:
        return tuple(self.at(operand, device) for operand in operands)

    def at(self, operand: Operand, device: str) -> Operand:
        """The operand as it is on `device`, moved there when it is elsewhere."""
        if isinstance(operand, Value) and operand in self._numbers:
            return self._numbers[operand]
        if not isinstance(operand, Value) or isinstance(operand.type, HANDLES):
            return operand
        return self._brought(self._way(operand), device)

    def _brought(self, way: _Way, device: str) -> Value:
        value, here, task = way.value, self._device[way.value], task_of(device)
        if device in (here, task_of(here)):
            return value
        assert isinstance(value.type, ArrayType)
        is_crossing = task != task_of(here)
        codec = way.codec if is_crossing and encoded_type(way.codec, value.type) is not None else "none"
        key = (value, codec, device)
        if key not in self._copies:
            if not is_crossing:
                self._copies[key] = self._copied(value, here, device)
            elif task == device:
                self._copies[key] = self._transfer(way._replace(codec=codec), here, device)
            else:
                arrived = self._brought(way, task)
                self._copies[key] = self._brought(_Way(arrived, "none", arrived.name), device)
        return self._copies[key]

    def _copied(self, value: Value, source: str, device: str) -> Value:
        _, local = split_device_name(device)
        copy = Value(self._fresh(f"{value.name}.{local.replace(':', '')}"), value.type)
        self._moved(Node(ops.dev_copy, (value,), (copy,), {"source": source}, (), device, (), self._origin(value)))
        return copy

    def _transfer(self, way: _Way, source: str, destination: str) -> Value:
        value, codec = way.value, way.codec
        assert isinstance(value.type, ArrayType)
        origin = self._origin(value)
        sent, named = value, {} if codec == "none" else {"codec": codec}
        if codec != "none":
            sent = self._encoded(value, codec, source)
        assert isinstance(sent.type, ArrayType)
        token = Value(self._fresh(f"{value.name}.sent"), TokenType())
        copy = Value(self._fresh(f"{value.name}.received"), sent.type.strong)
        edge = self._edge(way)
        send = {"edge": edge, "destination": destination, **named}
        recv = {"edge": edge, "source": task_of(source), "type": sent.type.strong, **named}
        self._moved(Node(ops.net_send, (sent,), (token,), send, (), source, (), origin))
        self._moved(Node(ops.net_recv, (), (copy,), recv, (), destination, (), origin))
        if codec == "none":
            return copy
        left = Value(self._fresh(f"{value.name}.decoded"), value.type.strong)
        attributes = {"codec": codec, "type": value.type.strong}
        self._moved(Node(ops.net_decode, (copy,), (left,), attributes, (), destination, (), origin))
        return left

    def _encoded(self, value: Value, codec: str, source: str) -> Value:
        """The value as a codec makes it, once for all destinations."""
        key = (value, codec, source)
        if key not in self._copies:
            assert isinstance(value.type, ArrayType)
            made = encoded_type(codec, value.type)
            assert made is not None
            small = Value(self._fresh(f"{value.name}.encoded"), made)
            node = Node(ops.net_encode, (value,), (small,), {"codec": codec}, (), source, (), self._origin(value))
            self._moved(node)
            self._copies[key] = small
        return self._copies[key]

    def _moved(self, node: Node) -> None:
        assert node.device is not None
        self._device.update(dict.fromkeys(node.outputs, node.device))
        self.nodes.append(node)

    def _origin(self, value: Value) -> Origin | None:
        producer = self._graph.producers.get(value)
        return producer.origin if producer is not None else None

    def _edge(self, way: _Way) -> str:
        value, producer = way.value, self._graph.producers.get(way.value)
        if (value, way.codec) not in self._edges:
            if producer is not None and producer.op is ops.var_read:
                [ref] = producer.values
                name = ref.name
            elif producer is not None and way.name.isdigit():
                name = f"{producer.op.name}.{way.name}"
            else:
                name = way.name
            self._edges[value, way.codec] = self._fresh_edge(name if way.codec == "none" else f"{name}:{way.codec}")
        return self._edges[value, way.codec]
