"""Cut the graph at device borders: each value that crosses is moved once per destination.

The graph stays one graph. Afterwards every operand of a node is on the node's device. What joins two tasks is a
`net.send` and a `net.recv` of the same edge, named for the variable it carries, else for its value. What joins two
devices of one task is a `dev.copy`. What a task itself does, on none of its devices, takes values where they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from dflow.tracing import ops
from dflow.tracing.device_name import split_device_name, task_of
from dflow.tracing.graph import FreshNames, Graph, Node, Operand, Origin, Value
from dflow.tracing.types import HANDLES, ArrayType, TokenType


@dataclass(frozen=True)
class Partition:
    """Add the transfers of a placed graph whose caller is `local`."""

    local: str
    name: ClassVar[str] = "partition"

    def __call__(self, graph: Graph) -> Graph:
        if all(node.device == self.local for node in graph.nodes) and self._takes_all_here(graph):
            return graph
        cut = _Cut(graph, self.local)
        for node in graph.nodes:
            cut.add(node)
        outputs = tuple(cut.at(output, self.local) for output in graph.outputs)
        return Graph(graph.inputs, tuple(cut.nodes), outputs)

    def _takes_all_here(self, graph: Graph) -> bool:
        return all(value.device in (None, self.local) or isinstance(value.type, HANDLES) for value in graph.inputs)


class _Cut:
    def __init__(self, graph: Graph, local: str) -> None:
        self.nodes: list[Node] = []
        self._graph = graph
        self._fresh = graph.fresh_names()
        self._device = {value: value.device or local for value in graph.inputs}
        self._copies: dict[tuple[Value, str], Value] = {}
        self._edges: dict[Value, str] = {}
        self._fresh_edge = FreshNames()

    def add(self, node: Node) -> None:
        assert node.device is not None
        inputs = self._inputs(node.inputs, node.device)
        self._device.update(dict.fromkeys(node.outputs, node.device))
        self.nodes.append(
            Node(node.op, inputs, node.outputs, node.attributes, node.bodies, node.device, (), node.origin)
        )

    def _inputs(self, operands: Sequence[Operand], device: str) -> tuple[Operand, ...]:
        return tuple(self.at(operand, device) for operand in operands)

    def at(self, operand: Operand, device: str) -> Operand:
        """The operand as it is on `device`, moved there when it is elsewhere."""
        if not isinstance(operand, Value) or isinstance(operand.type, HANDLES):
            return operand
        here, task = self._device[operand], task_of(device)
        if device in (here, task_of(here)):
            return operand
        if (operand, device) not in self._copies:
            if task == task_of(here):
                self._copies[operand, device] = self._copied(operand, here, device)
            elif task == device:
                self._copies[operand, device] = self._transfer(operand, here, device)
            else:
                return self.at(self.at(operand, task), device)
        return self._copies[operand, device]

    def _copied(self, value: Value, source: str, device: str) -> Value:
        _, local = split_device_name(device)
        copy = Value(self._fresh(f"{value.name}.{local.replace(':', '')}"), value.type)
        self._moved(Node(ops.dev_copy, (value,), (copy,), {"source": source}, (), device, (), self._origin(value)))
        return copy

    def _transfer(self, value: Value, source: str, destination: str) -> Value:
        assert isinstance(value.type, ArrayType)
        producer, origin = self._graph.producers.get(value), self._origin(value)
        token = Value(self._fresh(f"{value.name}.sent"), TokenType())
        copy = Value(self._fresh(f"{value.name}.received"), value.type.strong)
        edge = self._edge(value, producer)
        send = {"edge": edge, "destination": destination}
        recv = {"edge": edge, "source": task_of(source), "type": value.type.strong}
        self._moved(Node(ops.net_send, (value,), (token,), send, (), source, (), origin))
        self._moved(Node(ops.net_recv, (), (copy,), recv, (), destination, (), origin))
        return copy

    def _moved(self, node: Node) -> None:
        assert node.device is not None
        self._device.update(dict.fromkeys(node.outputs, node.device))
        self.nodes.append(node)

    def _origin(self, value: Value) -> Origin | None:
        producer = self._graph.producers.get(value)
        return producer.origin if producer is not None else None

    def _edge(self, value: Value, producer: Node | None) -> str:
        if value not in self._edges:
            ref = producer.inputs[0] if producer is not None and producer.op is ops.var_read else value
            assert isinstance(ref, Value)
            name = f"{producer.op.name}.{value.name}" if producer is not None and value.name.isdigit() else ref.name
            self._edges[value] = self._fresh_edge(name)
        return self._edges[value]
