"""Give each node a device.

An op on a variable goes where the variable lives. A stated device is kept. An op of an update (`with-state`) goes to
the one place whose variables its results feed; when they feed several, to that of the variables it is made from. What
waits for queues is the task's own, on none of its devices. All else stays with the caller.

While nothing names one of the caller's devices, to stay with the caller is to run wherever JAX runs it. Once something
does, everything of the caller's has a device: where one is used, that one; where several are, an op that states none
goes where most of the bytes lie that it takes, then where its first user is, then to the default device. An argument
goes straight to the device that takes it; where several do, to the default one if it is among them, else to the first.

A branch or loop is where the ops in it are. Where these are on several tasks it is on all of them, each result on the
task that makes it, which `homes` says; what it carries is there from turn to turn. Its `device` is then the caller's
task, if that is one of them, else the first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from dflow.lowering.passes.divided import homes_of, tasks_within
from dflow.lowering.passes.stated import Stated
from dflow.tracing.device import WITH_STATE
from dflow.tracing.device_name import device_name, task_of
from dflow.tracing.graph import Graph, Node, Value
from dflow.tracing.ops import CONTROL_OPS
from dflow.tracing.types import HOST_HANDLES, ArrayType
from dflow.tracing.wire_codecs import wire_p


@dataclass(frozen=True)
class Place:
    """Place on `tasks`; the caller's own is `local` and has `devices`, of which the first is the default.

    Raises DeviceError for a task or device that is not there.
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
    """One run over a graph whose caller uses the devices `used`; none of them where nothing names one."""

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
        """A body, whose arguments lie where the turn before has left them."""
        refs = {value: dataclasses.replace(value, device=self._of_ref(value)) for value in graph.refs}
        graph = self._with_bodies(graph)
        return self._made(graph, refs, self._devices(graph, refs))

    def _with_bodies(self, graph: Graph) -> Graph:
        """The graph with the bodies of branches and loops placed."""
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
        """Whether it is one of the caller's devices, rather than a task."""
        return device is not None and device != self._local and self._is_here(device)

    def _devices(self, graph: Graph, refs: Mapping[Value, Value]) -> dict[int, str]:
        many = len(self._stated.tasks) > 1 or len(self._used) > 1
        fed = _places_fed(graph, refs, self._local) if many else {}
        placed: dict[int, str | None] = {}
        for node in graph.nodes:
            touched = [resource for _, resource in node.effects if resource is not None]
            if node.op.primitive is wire_p:
                # It says how its operand travels from where that is.
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
        """The device with most of the bytes that the node takes; None where they lie on none."""
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
        """The arguments that a device of the caller's takes, as they are there."""
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
    """For each node, where the variables are that its results end up in, through ops of the update alone.

    What anything else takes counts as the caller's, `local`.
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
