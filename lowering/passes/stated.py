"""The devices that a graph names, as full names, with errors for devices that do not exist."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dflow.lowering.values.devices import no_device
from dflow.tracing.devices.device import WITH_CALLER, WITH_STATE, choices_in
from dflow.tracing.devices.device_name import device_name, no_such_job, short_device_name, split_device_name, task_of
from dflow.tracing.errors import DeviceError
from dflow.tracing.ir.graph import Graph, Node
from dflow.tracing.ir.ops import CONTROL_OPS
from dflow.tracing.ir.types import RefType


@dataclass(frozen=True)
class Stated:
    """The names that a graph may use: `tasks`, with the caller's, `local`, and its `devices`, the default one first."""

    local: str
    tasks: tuple[str, ...]
    devices: tuple[str, ...]

    def full(self, device: str | None, what: str, node: Node | None = None) -> str | None:
        """Return the full name of a stated device; None for one that leaves the choice among the caller's devices open.

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

    def used(self, graph: Graph) -> tuple[str, ...]:
        """Return the caller's devices that a graph and its bodies name, and the default one if any node needs it."""
        named = [self.full(*one) for one in _stated(graph)]
        used = dict.fromkeys(device for device in named if device and device != task_of(device))
        if used and None in named:
            used[device_name(self.local, self.devices[0])] = None
        return tuple(used)


def _stated(graph: Graph) -> Iterator[tuple[str | None, str, Node | None]]:
    """Yield the device, name and node of each variable (whose node is None) and of each node with a stated device."""
    for ref in graph.refs:
        if isinstance(ref.type, RefType):
            yield ref.device, ref.name, None
    for node in graph.nodes:
        if node.device not in (None, WITH_STATE) and not any(ref is not None for _, ref in node.effects):
            yield node.device, node.outputs[0].name, node
        if node.op in CONTROL_OPS:
            for body in node.bodies:
                yield from _stated(body)
