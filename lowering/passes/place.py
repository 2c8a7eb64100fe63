"""Give each node a device.

An op on a variable goes to the variable's device. A device that the program names is kept. An op of an update
(`with-state`) goes to the device or task whose variables its results feed; if they feed several, to that of the
variables it is made from. Ops on queues belong to their task, without a device. All other nodes stay on the caller's
task.

If nothing names one of the caller's devices, nodes on the caller's task run where JAX puts them. Otherwise each of them
has a device. If one device is used, it is that one. If several are, an op that states none goes to the device with most
of the bytes of its operands, else to that of its first user, else to the default device. An argument goes directly to
the device that takes it; if several do, to the default one if it is among them, else to the first.

A branch or loop is on the tasks of its ops. If these are several, each result is on the task that computes it, which
`homes` lists; a carried value stays there in all iterations. The node's `device` is then the caller's task, if that is
one of them, else the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from dflow.lowering.passes.task_control_flow import homes_of, tasks_within
from dflow.lowering.values.devices import no_device
from dflow.tracing.devices.device import WITH_CALLER, WITH_STATE, choices_in
from dflow.tracing.devices.device_name import device_name, no_such_job, short_device_name, split_device_name, task_of
from dflow.tracing.errors import DeviceError
from dflow.tracing.ir.graph import Graph, Node, Value
from dflow.tracing.ir.ops import CONTROL_OPS
from dflow.tracing.ir.types import HOST_HANDLES, ArrayType, RefType
from dflow.tracing.primitives.first_rows import first_rows_p
from dflow.tracing.primitives.state_primitives import wire_p


@dataclass(frozen=True)
class Place:
    """Place on `tasks`. The caller's task is `local`; it has `devices`, the default one first.

    Raises DeviceError for a task or device that does not exist.
    """

    local: str
    tasks: tuple[str, ...]
    devices: tuple[str, ...] = ()

    def __call__(self, graph: Graph) -> Graph:
        return _Placing(self, self._used(graph)).graph(graph)

    def full_name(self, device: str | None, what: str, node: Node | None = None) -> str | None:
        """Return the full name of a device; None if it leaves the choice among the caller's devices open.

        Raises DeviceError for a task or device that does not exist; the message says that `what` is placed on it.
        """
        task, local = split_device_name(device or WITH_CALLER)
        if device in (None, WITH_CALLER, WITH_STATE, self.local):
            return None
        loc = node.loc if node is not None else None
        if choices_in(device) is not None:
            raise DeviceError(
                f"%{what} is to be where a step is shortest, and on a cluster that is not chosen",
                "name a task, or a device of this process",
                at=loc,
            )
        if local and task not in ("", self.local):
            raise DeviceError(
                f"%{what} is placed on {device}, and a task chooses among its devices itself",
                f"name the task alone, {short_device_name(task)}",
                at=loc,
            )
        if local and local not in self.devices:
            fact, remedy = no_device(local, self.devices)
            raise DeviceError(f"%{what} is placed on {local}, but {fact}", remedy, at=loc)
        if not local and task not in self.tasks:
            if expected := no_such_job(task, self.tasks):
                raise DeviceError(f"%{what}: {expected}", "correct the name", at=loc)
            offered = ", ".join(map(short_device_name, self.tasks))
            raise DeviceError(
                f"%{what} is placed on {device}, but no task offers it; the tasks are {offered}",
                "name one of these, or start more tasks",
                at=loc,
            )
        return device_name(self.local, local) if local else task

    def _used(self, graph: Graph) -> tuple[str, ...]:
        """Return the caller's devices that a graph and its bodies name, and the default one if any node needs it."""
        named = [self.full_name(*each) for each in _named(graph)]
        used = dict.fromkeys(device for device in named if device and device != task_of(device))
        if used and None in named:
            used[device_name(self.local, self.devices[0])] = None
        return tuple(used)


def _named(graph: Graph) -> Iterator[tuple[str | None, str, Node | None]]:
    """Yield the device, name and node of each variable (whose node is None) and of each node that names a device."""
    for ref in graph.refs:
        if isinstance(ref.type, RefType):
            yield ref.device, ref.name, None
    for node in graph.nodes:
        if node.device not in (None, WITH_STATE) and not any(ref is not None for _, ref in node.effects):
            yield node.device, node.outputs[0].name, node
        if node.op in CONTROL_OPS:
            for body in node.bodies:
                yield from _named(body)


class _Placing:
    """One run over a graph. `used` are the caller's devices in use; it is empty if nothing names one."""

    def __init__(self, place: Place, used: Sequence[str]) -> None:
        self._place, self._local, self._used = place, place.local, used
        self._default = self._local
        if used:
            self._default = used[0] if len(used) == 1 else device_name(self._local, place.devices[0])

    def graph(self, graph: Graph, *, is_body: bool = False) -> Graph:
        """Place a graph. Arguments of a body get no device, as they are where the previous iteration left them."""
        refs = {value: replace(value, device=self._of_ref(value)) for value in graph.refs}
        if any(node.op in CONTROL_OPS for node in graph.nodes):
            nodes = (self._with_placed_bodies(node) if node.op in CONTROL_OPS else node for node in graph.nodes)
            graph = replace(graph, nodes=tuple(nodes))
        devices = self._devices(graph, refs)
        new = refs if is_body else refs | self._arguments(graph, devices)
        placed = tuple(_on(devices[id(node)], node.with_operands(new)) for node in graph.nodes)
        outputs = tuple(new.get(output, output) if isinstance(output, Value) else output for output in graph.outputs)
        return Graph(tuple(new.get(value, value) for value in graph.inputs), placed, outputs)

    def _with_placed_bodies(self, node: Node) -> Node:
        placed = replace(node, bodies=tuple(self.graph(body, is_body=True) for body in node.bodies))
        tasks = tasks_within(placed)
        device = self._local if self._local in tasks or not tasks else tasks[0]
        placed = replace(placed, device=device)
        if len(tasks) < 2:
            return placed
        return replace(placed, attributes={**placed.attributes, "homes": homes_of(placed, device)})

    def _of_ref(self, ref: Value) -> str:
        device = self._place.full_name(ref.device, ref.name)
        if isinstance(ref.type, HOST_HANDLES):
            return device or self._local
        return device or self._default

    def _is_device(self, device: str | None) -> bool:
        """Whether `device` is one of the caller's devices, and not a task."""
        return device is not None and device != self._local and task_of(device) == self._local

    def _devices(self, graph: Graph, refs: Mapping[Value, Value]) -> dict[int, str]:
        many = len(self._place.tasks) > 1 or len(self._used) > 1
        fed = _devices_fed(graph, refs, self._local) if many else {}
        placed: dict[int, str | None] = {}
        for node in graph.nodes:
            touched = [resource for _, resource in node.effects if resource is not None]
            if node.op.primitive in (wire_p, first_rows_p):
                # The node says how its operand is sent, so it is on the operand's device.
                operand = node.inputs[0]
                made = graph.producers.get(operand) if isinstance(operand, Value) else None
                placed[id(node)] = placed[id(made)] if made is not None else self._default
            elif node.op in CONTROL_OPS:
                placed[id(node)] = node.device
            elif touched:
                placed[id(node)] = refs[touched[0]].device
            elif node.device == WITH_STATE:
                placed[id(node)] = self._with_state(node, fed, graph, placed) or self._beside(node, graph, placed)
            elif node.device is not None:
                placed[id(node)] = self._place.full_name(node.device, node.outputs[0].name, node) or self._default
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
            [device] = fed[id(node)]
            return device if device != self._local else None
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
                found[value] = replace(value, device=home)
        return found


def _on(device: str, node: Node) -> Node:
    # `dataclasses.replace` takes twice as long.
    return Node(node.op, node.inputs, node.outputs, node.attributes, node.bodies, device, node.after, node.origin)


def _devices_fed(graph: Graph, refs: Mapping[Value, Value], local: str) -> Mapping[int, frozenset[str]]:
    """Return, by id of each node, the devices of the variables that it touches or that its results feed.

    Only ops that are part of an update pass a result on to a variable. A result that the caller gets, or that any other
    op takes, feeds the caller's task, `local`.
    """
    outputs = {output for output in graph.outputs if isinstance(output, Value)}
    fed: dict[int, frozenset[str]] = {}
    for node in reversed(graph.nodes):
        touched = [resource for _, resource in node.effects if resource is not None]
        if touched:
            fed[id(node)] = frozenset(refs[ref].device or local for ref in touched)
            continue
        devices: set[str] = set()
        for value in node.outputs:
            for user in graph.uses.get(value, ()):
                is_passed_on = user.must_run or user.device == WITH_STATE or user.op.primitive is wire_p
                devices |= fed[id(user)] if is_passed_on else {local}
            devices |= {local} if value in outputs else set()
        fed[id(node)] = frozenset(devices)
    return fed
