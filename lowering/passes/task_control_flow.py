"""Branches and loops on several tasks: which tasks these are, and the task of each result."""

from __future__ import annotations

from collections.abc import Iterator

from dflow.tracing.devices.device_name import task_of
from dflow.tracing.ir import ops
from dflow.tracing.ir.graph import Graph, Node, Value


def tasks_within(node: Node) -> tuple[str, ...]:
    """Return the tasks of the ops in a placed node's bodies, then those in its `homes`, each once."""
    return tuple(dict.fromkeys([*(task_of(device) for device in _devices(node)), *node.attributes.get("homes", ())]))


def _devices(node: Node) -> Iterator[str]:
    for body in node.bodies:
        for inner in body.nodes:
            if inner.op in ops.CONTROL_OPS:
                yield from tasks_within(inner) or [inner.device or ""]
            else:
                yield inner.device or ""


def tasks_of(node: Node) -> tuple[str, ...]:
    """Return the tasks that a node of a cut graph runs on."""
    tasks: tuple[str, ...] = node.attributes.get("tasks", ())
    return tasks or (task_of(node.device or ""),)


def made_on(node: Node, value: Value) -> str:
    """Return the task of a result of a placed node."""
    homes: tuple[str, ...] = node.attributes.get("homes", ())
    if homes and value in node.array_outputs:
        return homes[node.array_outputs.index(value)]
    return task_of(node.device or "")


def homes_of(node: Node, otherwise: str) -> tuple[str, ...]:
    """Return the task for each result of a branch or loop with placed bodies: the task where the bodies compute it.

    For a result that they compute on several tasks, or return unchanged from their inputs, it is `otherwise`.
    """
    arms = node.bodies if node.op is ops.ctrl_cond else node.bodies[-1:]
    return tuple(_common(arms, position, otherwise) for position in range(len(node.array_outputs)))


def _common(arms: tuple[Graph, ...], position: int, otherwise: str) -> str:
    outputs = [(arm, arm.outputs[position]) for arm in arms]
    found = {made_on(arm.producers[v], v) for arm, v in outputs if isinstance(v, Value) and v in arm.producers}
    return found.pop() or otherwise if len(found) == 1 else otherwise
