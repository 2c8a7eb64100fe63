"""Cut the graph at device borders: each value that crosses is moved once per destination.

The graph stays one graph. Afterwards every operand of a node is on the node's device. Two tasks are joined by a
`net.send` and a `net.recv` of the same edge, which is named after the variable that it carries, else after the value.
Two devices of one task are joined by a `dev.copy`. A node of a task without a device takes values from any of the
task's devices.

A branch or loop on several tasks is run by each of them, with its partition of the bodies. One task computes the index
of the branch, or the result of a loop's test in each iteration, and sends it to the others. The carried values of a
loop are on the tasks in `homes`. All other inputs of the bodies are sent, before it starts, to each task that uses
them, as an argument for each. Within a body values cross borders as elsewhere; an edge in a loop carries one value per
iteration.

A value with a codec is encoded before it is sent and decoded on arrival: once per destination and codec. Its edge is
named after both. The codec is ignored where the value stays on its task.

Of a result of `first_rows` only the first rows are sent, by a `net.send` that takes their number too. The `net.recv`
gives the number beside the array, so that an op there which needs it does not wait for another message.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from dflow.lowering.passes.task_control_flow import made_on, tasks_within
from dflow.tracing.devices.device_name import split_device_name, task_of
from dflow.tracing.ir import ops
from dflow.tracing.ir.graph import FreshNames, Graph, Node, Operand, Value
from dflow.tracing.ir.types import HANDLES, ArrayType, TokenType
from dflow.tracing.ir.wire_codecs import encoded_type
from dflow.tracing.primitives.first_rows import first_rows_p
from dflow.tracing.primitives.state_primitives import wire_p

#: Type of a number of rows.
_COUNT = ArrayType(np.dtype("int32"), ())


def partition(graph: Graph, local: str) -> Graph:
    """Add the transfers of a placed graph whose caller is `local`."""
    return graph if _is_on(local, graph) else _cut_whole(graph, local, FreshNames())


def _is_on(local: str, graph: Graph) -> bool:
    """Whether all of a graph is on one task, without devices, and no value has a codec."""
    arguments = (value.device for value in graph.inputs if not isinstance(value.type, HANDLES))
    bodies = (body for node in graph.nodes if node.op in ops.CONTROL_OPS for body in node.bodies)
    return (
        all(device in (None, local) for device in arguments)
        and all(node.device == local and node.op.primitive is not wire_p for node in graph.nodes)
        and all(_is_on(local, body) for body in bodies)
    )


def _cut_whole(graph: Graph, task: str, fresh_edge: FreshNames) -> Graph:
    """Return the cut of a graph, or of a body, that one task runs."""
    cut = _Cut(graph, {value: value.device or task for value in graph.inputs}, fresh_edge)
    cut.add_all()
    outputs = tuple(cut.at(output, task) for output in graph.outputs)  # may add transfers
    return Graph(graph.inputs, tuple(cut.nodes), outputs)


class _EdgeValue(NamedTuple):
    """A value as its users take it: the value itself, its codec, and the name of its edge.

    `first`  the node that says that it counts by its first rows, if any; `value` is then its operand
    """

    value: Value
    codec: str
    name: str
    first: Node | None = None


class _Cut:
    """A graph while it is partitioned: the nodes and the transfers that were added to it.

    where    device of each input
    divided  the inputs to split, if this is a body that several tasks run: each becomes one input on the task in
             `where`, or without that, one input on every task that uses it
    """

    def __init__(
        self, graph: Graph, where: Mapping[Value, str], fresh_edge: FreshNames, divided: Collection[Value] = ()
    ) -> None:
        self.nodes: list[Node] = []
        self._graph = graph
        self._fresh = graph.fresh_names()
        self._where, self._divided = where, divided
        self._device = dict(where)
        #: The input that replaces an input of `divided` on a task.
        self._inputs: dict[tuple[Value, str], Value] = {}
        self._ways: dict[Value, _EdgeValue] = {}
        #: Literals with a codec, which are never sent.
        self._numbers: dict[Value, Operand] = {}
        self._copies: dict[tuple[Value, str, str], Value] = {}
        #: The `first_rows` nodes that were added, since an op on their task takes the result.
        self._filled: dict[Node, Value] = {}
        self._edges: dict[tuple[Value, str], str] = {}
        self._fresh_edge = fresh_edge

    def add_all(self) -> None:
        """Add every node, with its operands moved to its device."""
        for node in self._graph.nodes:
            assert node.device is not None
            if node.op.primitive is wire_p:
                self._note(node)
            elif node.op.primitive is first_rows_p and self._is_sendable(node.inputs[0]):
                self._note_rows(node, node.inputs[0])
            elif node.op in ops.CONTROL_OPS and len(tasks := tasks_within(node)) > 1:
                self._add_divided(node, tasks)
            else:
                device = node.device
                inputs = tuple(self.at(operand, device) for operand in node.inputs)
                bodies = node.bodies
                if node.op in ops.CONTROL_OPS:
                    bodies = tuple(_cut_whole(body, device, self._fresh_edge) for body in bodies)
                is_same = inputs == node.inputs and bodies is node.bodies
                self._add(node if is_same else replace(node, inputs=inputs, bodies=bodies))

    def _add(self, node: Node) -> None:
        self._device.update((value, node.device or "") for value in node.outputs)
        if node.op in ops.CONTROL_OPS:
            self._device.update((value, made_on(node, value)) for value in node.array_outputs)
        self.nodes.append(node)

    def _add_divided(self, node: Node, within: Sequence[str]) -> None:
        """Add a branch or loop that several tasks run, the task of the node's device first."""
        tasks = tuple(dict.fromkeys([task_of(node.device or ""), *within]))
        cuts = [_cut_of_divided(node, body, self._fresh_edge) for body in node.bodies]
        outputs = [cut.part(node, body, tasks) for cut, body in zip(cuts, node.bodies, strict=True)]
        positions = [
            (position, task)
            for position in range(len(node.handed))
            for task in tasks
            if any(cut.takes(position, task) for cut in cuts)
        ]
        handed = [self.at(node.handed[position], task) for position, task in positions]
        own, extra, attributes = node.inputs[: node.op.own_operands], [], {**node.attributes, "tasks": tasks}
        for index in own:
            # Each other task gets the index of the branch as an additional operand, which no body uses.
            extra = [(self.at(index, task), task) for task in tasks[1:]]
            first = len(own) + len(handed)
            attributes["picks"] = (0, *range(first, first + len(extra)))
        if "rows" in attributes:
            attributes["rows"] = sum(position >= len(node.handed) - attributes["rows"] for position, _ in positions)
        bodies = tuple(cut.made(positions, extra, given) for cut, given in zip(cuts, outputs, strict=True))
        inputs = (*(self.at(index, tasks[0]) for index in own), *handed, *(operand for operand, _ in extra))
        self._add(replace(node, inputs=inputs, attributes=attributes, bodies=bodies, device=tasks[0]))

    def part(self, node: Node, body: Graph, tasks: Sequence[str]) -> tuple[Operand, ...]:
        """Cut this body of a divided node; return its outputs, each on its home.

        If the body is a loop's test, return a copy of its result on every task.
        """
        self.add_all()
        if node.op is ops.ctrl_while and body is node.bodies[0]:
            return tuple(self.at(body.outputs[0], task) for task in tasks)
        homes = node.attributes["homes"] if node.array_outputs else ()
        return tuple(self.at(output, home) for output, home in zip(body.outputs, homes, strict=True))

    def takes(self, position: int, task: str) -> bool:
        """Whether a task takes the input at index `position`. A handle is taken by its own task alone."""
        value = self._graph.inputs[position]
        if isinstance(value.type, HANDLES):
            return task == task_of(value.device or "")
        return (value, task) in self._inputs or self._where.get(value) == task

    def made(
        self, positions: Sequence[tuple[int, str]], extra: Sequence[tuple[Operand, str]], outputs: tuple[Operand, ...]
    ) -> Graph:
        """Return the body, with an input for each index and task in `positions`, and with unused inputs for `extra`."""
        inputs = [self._input(self._graph.inputs[position], task) for position, task in positions]
        inputs += [Value(self._fresh("index"), operand.type, task) for operand, task in extra]
        return Graph(tuple(inputs), tuple(self.nodes), outputs)

    def _input(self, value: Value, task: str) -> Value:
        """Return the input that replaces an input on a task."""
        if isinstance(value.type, HANDLES):
            return value
        if (value, task) not in self._inputs:
            is_first = all(other is not value for other, _ in self._inputs)
            name = value.name if is_first else self._fresh(value.name)
            self._inputs[value, task] = Value(name, value.type, task)
            self._device[self._inputs[value, task]] = task
        return self._inputs[value, task]

    def _note(self, node: Node) -> None:
        [operand], [wished] = node.inputs, node.outputs
        if not isinstance(operand, Value) or operand in self._numbers:
            self._numbers[wished] = self._numbers[operand] if isinstance(operand, Value) else operand
            return
        before = self._way(operand)
        name = before.name if wished.name.isdigit() else wished.name
        self._ways[wished] = before._replace(codec=node.attributes["codec"], name=name)

    def _note_rows(self, node: Node, operand: Value) -> None:
        way = self._way(operand)
        if way.first is not None:
            way = way._replace(value=self._filled_rows(way.first, way.value))
        name = node.outputs[0].name
        self._ways[node.outputs[0]] = way._replace(first=node, name=way.name if name.isdigit() else name)

    def _is_sendable(self, operand: Operand) -> TypeGuard[Value]:
        return isinstance(operand, Value) and operand not in self._numbers

    def _way(self, value: Value) -> _EdgeValue:
        return self._ways.get(value) or _EdgeValue(value, "none", value.name)

    def at(self, operand: Operand, device: str) -> Operand:
        """Return the operand on `device`, moved there if it is elsewhere."""
        if isinstance(operand, Value) and operand in self._numbers:
            return self._numbers[operand]
        if not isinstance(operand, Value) or isinstance(operand.type, HANDLES):
            return operand
        return self._brought(self._way(operand), device)

    def _brought(self, way: _EdgeValue, device: str) -> Value:
        task, value = task_of(device), way.value
        if value in self._divided:
            value = self._input(value, self._where.get(value, task))
        here, way = self._device[value], way._replace(value=value)
        assert isinstance(value.type, ArrayType)
        is_crossing = task != task_of(here)
        encoded = encoded_type(way.codec, value.type) if is_crossing else None
        codec = "none" if encoded is None else way.codec
        if way.first is not None and not (is_crossing and (encoded or value.type).shape[:1] == value.type.shape[:1]):
            # On its task, and under a codec that mixes the rows, the value is whole.
            value = self._filled_rows(way.first, value)
            way = way._replace(value=value, first=None)
        if device in (here, task_of(here)):
            return value
        key = (value if way.first is None else way.first.outputs[0], codec, device)
        if key not in self._copies:
            if not is_crossing:
                self._copies[key] = self._copied(value, here, device)
            elif task == device:
                self._copies[key] = self._transfer(way._replace(codec=codec), here, device)
            else:
                arrived = self._brought(way, task)
                self._copies[key] = self._brought(_EdgeValue(arrived, "none", arrived.name), device)
        return self._copies[key]

    def _filled_rows(self, node: Node, value: Value) -> Value:
        """Return the result of a `first_rows` node, on the device of its operand."""
        if node not in self._filled:
            device = self._device[value]
            inputs = value, self.at(node.inputs[1], device)
            [self._filled[node]] = node.outputs
            self._add(replace(node, inputs=inputs, device=device))
        return self._filled[node]

    def _copied(self, value: Value, source: str, device: str) -> Value:
        _, local = split_device_name(device)
        copy = Value(self._fresh(f"{value.name}.{local.replace(':', '')}"), value.type)
        self._add(Node(ops.dev_copy, (value,), (copy,), {"source": source}, (), device, (), self._origin(value)))
        return copy

    def _transfer(self, way: _EdgeValue, source: str, destination: str) -> Value:
        value, codec = way.value, way.codec
        assert isinstance(value.type, ArrayType)
        origin = self._origin(value)
        named: dict[str, object] = {}
        sent = value
        if codec != "none":
            sent, named = self._encoded(value, codec, source), {"codec": codec}
        assert isinstance(sent.type, ArrayType)
        token = Value(self._fresh(f"{value.name}.sent"), TokenType())
        copy = Value(self._fresh(f"{value.name}.received"), sent.type.strong)
        takes: tuple[Operand, ...] = (sent,)
        gives: tuple[Value, ...] = (copy,)
        if way.first is not None:
            count = way.first.inputs[1]
            named |= {"fill": way.first.attributes["fill"]}
            takes, gives = (sent, self.at(count, source)), (copy, Value(self._fresh(f"{value.name}.rows"), _COUNT))
            if isinstance(count, Value):
                self._copies.setdefault((self._way(count).value, "none", destination), gives[1])
        edge = self._edge(way)
        types = tuple(each.type for each in gives)
        send = {"edge": edge, "destination": destination, **named}
        recv = {"edge": edge, "source": task_of(source), "types": types, **named}
        self._add(Node(ops.net_send, takes, (token,), send, (), source, (), origin))
        self._add(Node(ops.net_recv, (), gives, recv, (), destination, (), origin))
        if codec == "none":
            return copy
        left = Value(self._fresh(f"{value.name}.decoded"), value.type.strong)
        attributes = {"codec": codec, "type": value.type.strong}
        self._add(Node(ops.net_decode, (copy,), (left,), attributes, (), destination, (), origin))
        return left

    def _encoded(self, value: Value, codec: str, source: str) -> Value:
        """Return the encoded value, computed once for all destinations."""
        key = (value, codec, source)
        if key not in self._copies:
            assert isinstance(value.type, ArrayType)
            made = encoded_type(codec, value.type)
            assert made is not None
            small = Value(self._fresh(f"{value.name}.encoded"), made)
            node = Node(ops.net_encode, (value,), (small,), {"codec": codec}, (), source, (), self._origin(value))
            self._add(node)
            self._copies[key] = small
        return self._copies[key]

    def _origin(self, value: Value) -> Any:
        producer = self._graph.producers.get(value)
        return producer.origin if producer is not None else None

    def _edge(self, way: _EdgeValue) -> str:
        value, producer = way.value, self._graph.producers.get(way.value)
        key = (value if way.first is None else way.first.outputs[0], way.codec)
        if key not in self._edges:
            if producer is not None and producer.op is ops.var_read:
                [ref] = producer.values
                name = ref.name
            elif producer is not None and way.name.isdigit():
                name = f"{producer.op.name}.{way.name}"
            else:
                name = way.name
            self._edges[key] = self._fresh_edge(name if way.codec == "none" else f"{name}:{way.codec}")
        return self._edges[key]


def _cut_of_divided(node: Node, body: Graph, fresh_edge: FreshNames) -> _Cut:
    """Return the cut of a body that several tasks run.

    A loop's carried values are inputs on their homes; other inputs are on the tasks that use them.
    """
    where = {value: value.device or "" for value in body.refs}
    if node.op in ops.LOOPS:
        first = len(body.inputs) - node.attributes["carry"] - node.attributes.get("rows", 0)
        homes: tuple[str, ...] = node.attributes.get("homes", ())
        where.update(zip(body.inputs[first:], homes[: node.attributes["carry"]], strict=False))
    return _Cut(body, where, fresh_edge, {value for value in body.inputs if not isinstance(value.type, HANDLES)})
