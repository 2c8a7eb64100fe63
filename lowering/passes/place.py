"""Give each node a device.

An op on a variable goes where the variable lives. A stated device is kept. An op of an update (`with-state`) goes to
the one task whose variables its results feed; when they feed several, to the task of the variables it is made from.
All else stays with the caller.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from dflow.tracing.device import WITH_STATE
from dflow.tracing.errors import DeviceError
from dflow.tracing.graph import Graph, Node, Value
from dflow.tracing.ops import CONTROL_OPS
from dflow.tracing.source import at
from dflow.tracing.task_name import short_task_name


@dataclass(frozen=True)
class Place:
    """Place on `tasks`; the caller's own is `local`. Raises DeviceError for a device that no task offers."""

    local: str
    tasks: tuple[str, ...]
    name: ClassVar[str] = "place"

    def __call__(self, graph: Graph) -> Graph:
        inputs = {
            value: dataclasses.replace(value, device=self._offered(value.device or self.local, value.name))
            for value in graph.refs
        }
        devices = self._devices(graph)
        for node in graph.nodes:
            if node.op in CONTROL_OPS:
                self._check_bodies(node, inputs)
        nodes = tuple(_on(devices[id(node)], node.with_operands(inputs)) for node in graph.nodes)
        return Graph(tuple(inputs.get(value, value) for value in graph.inputs), nodes, graph.outputs)

    def _devices(self, graph: Graph) -> Mapping[int, str]:
        fed = _tasks_fed(graph, self.local) if len(self.tasks) > 1 else {}
        placed: dict[int, str] = {}
        for node in graph.nodes:
            refs = [resource for _, resource in node.effects if resource is not None]
            if refs:
                placed[id(node)] = refs[0].device or self.local
            elif node.device == WITH_STATE:
                placed[id(node)] = self._with_state(node, fed, graph, placed)
            else:
                placed[id(node)] = self._offered(node.device or self.local, node.outputs[0].name, node)
        return placed

    def _check_bodies(self, node: Node, inputs: Mapping[Value, Value]) -> None:
        """The bodies, which are placed by now, and the state they use must be on the caller's task."""
        elsewhere = {
            f"%{ref.name} on {inputs[ref].device}"
            for ref in node.values
            if ref in inputs and not self._is_here(inputs[ref])
        }
        elsewhere |= {
            f"%{inner.outputs[0].name} on {inner.device}"
            for body in node.bodies
            for inner in body.nodes
            if inner.device != self.local
        }
        if elsewhere:
            raise DeviceError(
                f"%{node.outputs[0].name} ({node.op.name}) waits for queues, so {self.local} runs it; "
                f"but it uses {', '.join(sorted(elsewhere))}{at(node.loc)}\n"
                "  read what is elsewhere before, and write it after"
            )

    def _is_here(self, ref: Value) -> bool:
        return ref.device == self.local

    def _with_state(
        self, node: Node, fed: Mapping[int, frozenset[str]], graph: Graph, placed: Mapping[int, str]
    ) -> str:
        if not fed:
            return self.local
        if len(fed[id(node)]) == 1:
            return next(iter(fed[id(node)]))
        made_from = [placed[id(graph.producers[value])] for value in node.values if value in graph.producers]
        return next((device for device in made_from if device != self.local), self.local)

    def _offered(self, device: str, what: str, node: Node | None = None) -> str:
        if device in self.tasks:
            return device
        offered = ", ".join(short_task_name(task) for task in self.tasks)
        where = at(node.loc) if node is not None else ""
        raise DeviceError(
            f"%{what} is placed on {device}, but no task offers it; the tasks are {offered}{where}\n"
            "  name one of these, or start more tasks"
        )


def _on(device: str, node: Node) -> Node:
    return Node(node.op, node.inputs, node.outputs, node.attributes, node.bodies, device, node.after, node.origin)


def _tasks_fed(graph: Graph, local: str) -> Mapping[int, frozenset[str]]:
    """For each node, the tasks of the variables that its results end up in, through ops of the update alone."""
    outputs = {output for output in graph.outputs if isinstance(output, Value)}
    fed: dict[int, frozenset[str]] = {}
    for node in reversed(graph.nodes):
        refs = [resource for _, resource in node.effects if resource is not None]
        if refs:
            fed[id(node)] = frozenset(ref.device or local for ref in refs)
            continue
        tasks: set[str] = set()
        for value in node.outputs:
            for user in graph.uses.get(value, ()):
                tasks |= fed[id(user)] if user.must_run or user.device == WITH_STATE else {local}
            tasks |= {local} if value in outputs else set()
        fed[id(node)] = frozenset(tasks)
    return fed
