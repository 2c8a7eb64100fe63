"""Give each node a device.

An op on a variable goes to the variable's device. A stated device is kept. An op of an update (`with-state`) goes to
the device or task whose variables its results feed; if they feed several, to that of the variables it is made from. Ops
on queues belong to their task, without a device. All other nodes stay on the caller's task.

If nothing names one of the caller's devices, nodes on the caller's task run where JAX puts them. Otherwise each of them
has a device. If one device is used, it is that one. If several are, an op that states none goes to the device with most
of the bytes of its operands, else to that of its first user, else to the default device. An argument goes directly to
the device that takes it; if several do, to the default one if it is among them, else to the first.

A branch or loop is on the tasks of its ops. If these are several, each result is on the task that computes it, which
`homes` lists; a carried value stays there in all iterations. The node's `device` is then the caller's task, if that is
one of them, else the first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from dflow.lowering.passes.stated import Stated
from dflow.lowering.passes.task_control_flow import homes_of, tasks_within
from dflow.tracing.devices.device import WITH_STATE
from dflow.tracing.devices.device_name import device_name, task_of
from dflow.tracing.ir.graph import Graph, Node, Value
from dflow.tracing.ir.ops import CONTROL_OPS
from dflow.tracing.ir.types import HOST_HANDLES, ArrayType
from dflow.tracing.primitives.state_primitives import wire_p


@dataclass(frozen=True)
class Place:
    """Place on `tasks`. The caller's task is `local`; it has `devices`, the default one first.

    Raises DeviceError for a task or device that does not exist.
    """

    local: str
    tasks: tuple[str, ...]
    devices: tuple[str, ...] = ()
    name: ClassVar[str] = "place"
    #: The bodies of branches and loops share the devices of the whole, so they are placed with it.
    is_of_whole: ClassVar[bool] = True

    def __call__(self, graph: Graph) -> Graph:
        stated = Stated(self.local, self.tasks, self.devices)
        return _Placing(stated, stated.used(graph)).graph(graph)


class _Placing:
    """One run over a graph. `used` are the caller's devices in use; it is empty if nothing names one."""

    def __init__(self, stated: Stated, used: Sequence[str]) -> None:
        self._stated, self._local, self._used = stated, stated.local, used
        self._default = self._local
        if used:
            first = device_name(self._local, stated.devices[0])
            self._default = used[0] if len(used) == 1 else first

    def graph(self, graph: Graph) -> Graph:
        refs = {value: dataclasses.replace(value, device=self._of_ref(value)) for value in graph.refs}
        graph = self._with_bodies(graph)
        devices = self._devices(graph, refs)
        arguments = self._arguments(graph, devices)
        return self._made(graph, refs | arguments, devices)

    def _body(self, graph: Graph) -> Graph:
        """Place a body; its arguments get no device, as they are where the previous iteration left them."""
        refs = {value: dataclasses.replace(value, device=self._of_ref(value)) for value in graph.refs}
        graph = self._with_bodies(graph)
        return self._made(graph, refs, self._devices(graph, refs))

    def _with_bodies(self, graph: Graph) -> Graph:
        """Return the graph with the bodies of branches and loops placed."""
        if not any(node.op in CONTROL_OPS for node in graph.nodes):
            return graph
        nodes = (self._with_placed_bodies(node) if node.op in CONTROL_OPS else node for node in graph.nodes)
        return dataclasses.replace(graph, nodes=tuple(nodes))

    def _with_placed_bodies(self, node: Node) -> Node:
        placed = dataclasses.replace(node, bodies=tuple(map(self._body, node.bodies)))
        tasks = tasks_within(placed)
        device = self._local if self._local in tasks or not tasks else tasks[0]
        placed = dataclasses.replace(placed, device=device)
        if len(tasks) < 2:
            return placed
        return dataclasses.replace(placed, attributes={**placed.attributes, "homes": homes_of(placed, device)})

    def _made(
        self,
        graph: Graph,
        inputs: Mapping[Value, Value],
        devices: Mapping[int, str],
    ) -> Graph:
        nodes = tuple(_on(devices[id(node)], node.with_operands(inputs)) for node in graph.nodes)
        outputs = tuple(inputs.get(output, output) if isinstance(output, Value) else output for output in graph.outputs)
        return Graph(tuple(inputs.get(value, value) for value in graph.inputs), nodes, outputs)

    def _of_ref(self, ref: Value) -> str:
        device = self._stated.full(ref.device, ref.name)
        if isinstance(ref.type, HOST_HANDLES):
            return device or self._local
        return device or self._default

    def _is_here(self, device: str | None) -> bool:
        return task_of(device or self._local) == self._local

    def _is_device(self, device: str | None) -> bool:
        """Whether `device` is one of the caller's devices, and not a task."""
        return device is not None and device != self._local and self._is_here(device)

    def _devices(self, graph: Graph, refs: Mapping[Value, Value]) -> dict[int, str]:
        many = len(self._stated.tasks) > 1 or len(self._used) > 1
        fed = _places_fed(graph, refs, self._local) if many else {}
        placed: dict[int, str | None] = {}
        for node in graph.nodes:
            touched = [resource for _, resource in node.effects if resource is not None]
            if node.op.primitive is wire_p:
                # The node sets the codec of its operand, so it is on the operand's device.
                [operand] = node.inputs
                made = graph.producers.get(operand) if isinstance(operand, Value) else None
                placed[id(node)] = placed[id(made)] if made is not None else self._default
            elif node.op in CONTROL_OPS:
                placed[id(node)] = node.device
            elif touched:
                placed[id(node)] = refs[touched[0]].device
            elif node.device == WITH_STATE:
                placed[id(node)] = self._with_state(node, fed, graph, placed) or self._beside(node, graph, placed)
            elif node.device is not None:
                placed[id(node)] = self._stated.full(node.device, node.outputs[0].name, node) or self._default
            else:
                placed[id(node)] = self._beside(node, graph, placed)
        for node in reversed(graph.nodes):
            if placed[id(node)] is None:
                users = [placed[id(user)] for value in node.outputs for user in graph.uses.get(value, ())]
                placed[id(node)] = next((device for device in users if self._is_device(device)), self._default)
        return {number: device or self._default for number, device in placed.items()}

    def _beside(self, node: Node, graph: Graph, placed: Mapping[int, str | None]) -> str | None:
        """Return the device with most bytes of the node's operands; None if none is on a device."""
        if len(self._used) < 2:
            return self._default
        bytes_on: dict[str, int] = {}
        for value in dict.fromkeys(node.values):
            device = placed[id(graph.producers[value])] if value in graph.producers else None
            if device is not None and self._is_device(device) and isinstance(value.type, ArrayType):
                bytes_on[device] = bytes_on.get(device, 0) + value.type.size_bytes
        return max(bytes_on, key=lambda device: bytes_on[device]) if bytes_on else None

    def _with_state(
        self, node: Node, fed: Mapping[int, frozenset[str]], graph: Graph, placed: Mapping[int, str | None]
    ) -> str | None:
        if not fed:
            return self._default
        if len(fed[id(node)]) == 1:
            [place] = fed[id(node)]
            return place if place != self._local else None
        made_from = [placed[id(graph.producers[value])] for value in node.values if value in graph.producers]
        return next((device for device in made_from if device not in (None, self._local)), None)

    def _arguments(self, graph: Graph, devices: Mapping[int, str]) -> dict[Value, Value]:
        """Return the arguments that devices of the caller take, each with its device."""
        found = {}
        for value in graph.inputs:
            users = [devices[id(user)] for user in graph.uses.get(value, ())]
            takers = [device for device in users if self._is_device(device)]
            if takers and isinstance(value.type, ArrayType):
                home = self._default if self._default in takers else takers[0]
                found[value] = dataclasses.replace(value, device=home)
        return found


def _on(device: str, node: Node) -> Node:
    return Node(node.op, node.inputs, node.outputs, node.attributes, node.bodies, device, node.after, node.origin)


def _places_fed(graph: Graph, refs: Mapping[Value, Value], local: str) -> Mapping[int, frozenset[str]]:
    """Return, for each node, the devices of the variables that its results reach through ops of the update alone.

    A result that any other op takes counts as feeding the caller's task, `local`.
    """
    outputs = {output for output in graph.outputs if isinstance(output, Value)}
    fed: dict[int, frozenset[str]] = {}
    for node in reversed(graph.nodes):
        touched = [resource for _, resource in node.effects if resource is not None]
        if touched:
            fed[id(node)] = frozenset(refs[ref].device or local for ref in touched)
            continue
        places: set[str] = set()
        for value in node.outputs:
            for user in graph.uses.get(value, ()):
                is_passed_on = user.must_run or user.device == WITH_STATE or user.op.primitive is wire_p
                places |= fed[id(user)] if is_passed_on else {local}
            places |= {local} if value in outputs else set()
        fed[id(node)] = frozenset(places)
    return fed
