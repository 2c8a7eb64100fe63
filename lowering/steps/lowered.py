"""A lowered graph as one plan per task, with the programs that the plans call.

The graph must be the result of the pipeline: its nodes are XLA calls, sends, receives, copies, and host nodes (ops on
queues and accumulators, branches and loops that wait), each on a device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dflow.lowering.passes.task_control_flow import tasks_of
from dflow.lowering.placement.work import is_asynchronous
from dflow.lowering.programs.discharge import Discharged, discharge
from dflow.lowering.steps.plan import (
    Branch,
    Call,
    CheckIds,
    Copy,
    Item,
    Plan,
    Read,
    Recv,
    Scalar,
    Scan,
    Send,
    UseResource,
    While,
)
from dflow.lowering.values.moved_reads import moved_reads, variables_read
from dflow.tracing.devices.device_name import split_device_name
from dflow.tracing.errors import InternalError
from dflow.tracing.ir import ops
from dflow.tracing.ir.effects import Effect
from dflow.tracing.ir.graph import Graph, Literal, Node, Operand, Value
from dflow.tracing.ir.resource_op import ResourceOp
from dflow.tracing.ir.types import HANDLES, dtype_name
from dflow.tracing.jaxprs.callbacks import checks_ids
from dflow.tracing.parallel_iterations import DEFAULT_PARALLEL_ITERATIONS
from dflow.tracing.primitives.id_checks import IDS
from dflow.tracing.source import at


@dataclass(frozen=True)
class Lowered:
    """What one task does in one step: its plan, and the functions of its programs, which calls name by index."""

    plan: Plan
    functions: tuple[Discharged, ...]


def make_plans(graph: Graph, caller: str, keys: Mapping[Value, str]) -> dict[str, Lowered]:
    """Return the plan of each task for a graph that the task `caller` runs, the caller's first.

    `keys` has each variable's key in its store. The feeds of the caller's plan are the graph's array inputs, then its
    `literals`.
    """
    moved = moved_reads(graph)
    first = _Maker(caller, keys, moved_reads=moved)
    makers = {caller: first}
    feeds: list[Operand] = [value for value in graph.inputs if not isinstance(value.type, HANDLES)]
    feeds += [output for output in graph.outputs if isinstance(output, Literal)]
    first.feeds = [first.register_of(operand) for operand in feeds]
    for node in graph.nodes:
        for task in tasks_of(node):
            makers.setdefault(task, _Maker(task, keys, moved_reads=moved)).add(node)
    first.fetches = [first.register_of(output) for output in graph.outputs]
    return {task: maker.lowered() for task, maker in makers.items()}


def literals(graph: Graph) -> list[Any]:
    """Return the literals among a graph's outputs, as arrays."""
    return [output.array for output in graph.outputs if isinstance(output, Literal)]


def _device(node: Node) -> str:
    """Return the device, within its task, on which a node runs; empty for any."""
    return split_device_name(node.device or "")[1]


class _Share:
    """The share of a task in a branch or loop: all of it, or the task's partition of one on several tasks."""

    def __init__(self, node: Node, task: str) -> None:
        self._node, self._task = node, task
        self._tasks: tuple[str, ...] = node.attributes.get("tasks", ())
        self.is_divided = bool(self._tasks)

    @property
    def index(self) -> Operand:
        """The operand that is the index of the branch."""
        picks = self._node.attributes.get("picks")
        return self._node.inputs[picks[self._tasks.index(self._task)] if picks else 0]

    def takes(self, position: int) -> bool:
        """Whether the operand of the bodies at index `position` is an array for this task."""
        given = self._node.bodies[0].inputs[position]
        return not isinstance(given.type, HANDLES) and (not self.is_divided or given.device == self._task)

    @property
    def gives(self) -> list[int]:
        """The indices of the results on this task."""
        homes = self._node.attributes.get("homes", ())
        return [
            position for position in range(len(self._node.array_outputs)) if not homes or homes[position] == self._task
        ]

    def given(self, body: Graph) -> list[Operand]:
        """Return the outputs of the task's share of a body."""
        if self._node.op is ops.ctrl_while and body is self._node.bodies[0]:
            return [body.outputs[self._tasks.index(self._task) if self.is_divided else 0]]
        return [body.outputs[position] for position in self.gives]


@dataclass
class _Maker:
    task: str
    keys: Mapping[Any, str]
    feeds: list[int] = field(default_factory=list)
    fetches: list[int] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    programs: list[Discharged] = field(default_factory=list)
    registers: dict[Operand, int] = field(default_factory=dict)
    makers: dict[Value, int] = field(default_factory=dict)
    #: The results of branches and loops that several tasks run.
    divided: set[Value] = field(default_factory=set)
    scalars: list[Scalar] = field(default_factory=list)
    bodies: list[Plan] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    moved_reads: frozenset[Node] = frozenset()

    def register_of(self, operand: Operand) -> int:
        return self.registers.setdefault(operand, len(self.registers))

    def add(self, node: Node) -> None:
        before: Iterable[Value] = node.after
        if "tasks" in node.attributes:
            # This node may take results of an earlier divided node on other tasks only. Then only an order edge keeps
            # the two nodes' shares in order on this task.
            before = (*before, *(value for value in node.values if value in self.divided))
        after = tuple(dict.fromkeys(self.makers[value] for value in before if value in self.makers))
        self.divided.update(node.outputs if "tasks" in node.attributes else ())
        self.makers.update(dict.fromkeys(node.outputs, len(self.items)))
        self.items.append(self._item(node, after))
        self.names.append(f"%{node.outputs[0].name} ({node.op.name}){at(node.loc)}")

    def _item(self, node: Node, after: tuple[int, ...]) -> Item:
        if node.op is ops.net_send:
            edge, destination = node.attributes["edge"], node.attributes["destination"]
            return Send(edge, destination, self._takes(node.inputs), after, "fill" in node.attributes)
        if node.op is ops.net_recv:
            edge, source = node.attributes["edge"], node.attributes["source"]
            types = tuple((dtype_name(type.dtype), type.shape) for type in node.attributes["types"])
            fill = node.attributes.get("fill")
            return Recv(edge, source, tuple(map(self.register_of, node.outputs)), types, after, fill)
        if node.op is ops.dev_copy:
            return Copy(_device(node), self.register_of(node.inputs[0]), self.register_of(node.outputs[0]), after)
        if node.op is ops.ids_check:
            size, table = node.attributes["size"], node.attributes["table"]
            gives, noun = tuple(map(self.register_of, node.outputs)), node.attributes.get("noun", IDS)
            return CheckIds(size, table, self._takes(node.inputs), gives, at(node.loc), after, noun)
        if node in self.moved_reads:
            keys = tuple(self.keys[ref] for ref in variables_read(node))
            return Read(keys, tuple(self.register_of(value) for value in node.outputs), after)
        if node.op is ops.xla_call:
            return self._call(node, after)
        if node.op in ops.CONTROL_OPS:
            return self._control(node, after)
        if node.op in ops.HOST_OPS:
            return self._use_resource(node, after)
        raise InternalError(f"{node.op.name} is not part of a lowered graph")

    def _use_resource(self, node: Node, after: tuple[int, ...]) -> UseResource:
        ref, *operands = node.inputs
        return UseResource(
            self.keys[ref],
            ResourceOp(node.op.name, line=at(node.loc), **node.attributes),
            takes=self._takes(operands),
            gives=tuple(self.register_of(value) for value in node.array_outputs),
            after=after,
        )

    def _control(self, node: Node, after: tuple[int, ...]) -> Branch | While | Scan:
        share = _Share(node, self.task)
        numbers = tuple(self._body(node, body) for body in node.bodies)
        taken = [operand for position, operand in enumerate(node.handed) if share.takes(position)]
        gives = tuple(self.register_of(node.array_outputs[position]) for position in share.gives)
        if node.op is ops.ctrl_cond:
            return Branch(numbers, self._takes([share.index, *taken]), gives, after)
        takes = self._takes(taken)
        parallel = node.attributes.get("parallel", DEFAULT_PARALLEL_ITERATIONS)
        carry = sum(position < node.attributes["carry"] for position in share.gives)
        if node.op is ops.ctrl_while:
            test, repeated = numbers
            return While(test, repeated, carry, takes, gives, after, parallel)
        first_row = len(node.handed) - node.attributes["rows"]
        return Scan(
            numbers[0],
            length=node.attributes["length"],
            reverse=node.attributes["reverse"],
            carry=carry,
            rows=sum(map(share.takes, range(first_row, len(node.handed)))),
            stacked=tuple(str(node.bodies[0].outputs[position].type) for position in share.gives[carry:]),
            takes=takes,
            gives=gives,
            after=after,
            parallel=parallel,
        )

    def _body(self, node: Node, body: Graph) -> int:
        """Add the plan of a body and return its index. Its programs are added to those of the whole plan."""
        keys = {
            ref: self.keys[operand]
            for ref, operand in zip(body.inputs, node.handed, strict=True)
            if isinstance(ref.type, HANDLES)
        }
        maker, share = _Maker(self.task, keys, programs=self.programs), _Share(node, self.task)
        maker.feeds = [maker.register_of(value) for position, value in enumerate(body.inputs) if share.takes(position)]
        maker.moved_reads = moved_reads(body)
        for inner in body.nodes:
            if not share.is_divided or self.task in tasks_of(inner):
                maker.add(inner)
        maker.fetches = list(maker._takes(share.given(body)))
        self.bodies.append(maker.lowered().plan)
        return len(self.bodies) - 1

    def _takes(self, operands: Sequence[Operand]) -> tuple[int, ...]:
        """Return the registers of operands. The register of a literal is filled initially."""
        for operand in operands:
            if isinstance(operand, Literal) and operand not in self.registers:
                type = operand.type
                data = np.asarray(operand.value).astype(type.dtype).tobytes()
                self.scalars.append(Scalar(self.register_of(operand), dtype_name(type.dtype), data))
        return tuple(self.register_of(operand) for operand in operands)

    def _call(self, node: Node, after: tuple[int, ...]) -> Call:
        (body,) = node.bodies
        pure = discharge(body)
        outer = dict(zip(body.inputs, node.handed, strict=True))
        self.programs.append(pure)
        return Call(
            program=len(self.programs) - 1,
            writes=tuple(self.keys[outer[ref]] for ref in pure.written),
            reads=tuple(self.keys[outer[ref]] for ref in pure.read),
            takes=tuple(self.register_of(outer[value]) for value in pure.operands),
            gives=tuple(self.register_of(value) for value in node.array_outputs),
            after=after,
            device=_device(node),
            touches_anything=any(effect is Effect.UNKNOWN for effect, _ in node.effects),
            # Its caller raises the error of a check, also if the program only reads.
            keeps=(bool(pure.written) and not node.attributes["donate"]) or checks_ids(body),
            asynchronous=is_asynchronous(node),
        )

    def lowered(self) -> Lowered:
        plan = Plan(
            self.task,
            len(self.registers),
            tuple(self.items),
            tuple(self.feeds),
            tuple(self.fetches),
            tuple(self.scalars),
            tuple(self.bodies),
            tuple(self.names),
        )
        return Lowered(plan, tuple(self.programs))
