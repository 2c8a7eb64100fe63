"""From a lowered graph to one plan a task, with the programs that the plan calls.

The graph must have been through the pipeline: its nodes are XLA calls, sends, receives, and what a
host does itself (ops on queues and accumulators, branches and loops that wait), each on a device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dflow.lowering.discharge import Discharged, discharge
from dflow.lowering.placement.work import is_quick
from dflow.lowering.plan import Branch, Call, Copy, Item, Plan, Read, Recv, Scalar, Scan, Send, UseResource, While
from dflow.lowering.snapshots import snapshots
from dflow.tracing import ops
from dflow.tracing.callbacks import calls_python
from dflow.tracing.device_name import split_device_name, task_of
from dflow.tracing.effects import Effect
from dflow.tracing.errors import InternalError
from dflow.tracing.graph import Graph, Literal, Node, Operand, Value
from dflow.tracing.source import at
from dflow.tracing.turns import PARALLEL_TURNS
from dflow.tracing.types import HANDLES, ArrayType, dtype_name


@dataclass(frozen=True)
class TaskPlan:
    """A task's plan and the functions that its calls name by index."""

    plan: Plan
    programs: tuple[Discharged, ...]


@dataclass(frozen=True)
class Compiled:
    """The plans of a graph. The caller feeds its own plan the graph's array inputs, then `literals`."""

    local: TaskPlan
    remote: Mapping[str, TaskPlan]
    literals: tuple[Literal, ...]


def make_plans(graph: Graph, local: str, keys: Mapping[Value, str]) -> Compiled:
    """The plans of a lowered graph whose caller is `local`; `keys` names each variable in its task's store."""
    moved = snapshots(graph)
    makers: dict[str, _Maker] = {local: _Maker(local, keys, snapshots=moved)}
    feeds: list[Operand] = [value for value in graph.inputs if not isinstance(value.type, HANDLES)]
    literals = tuple(output for output in graph.outputs if isinstance(output, Literal))
    caller = makers[local]
    caller.feeds = [caller.slot(operand) for operand in (*feeds, *literals)]
    for node in graph.nodes:
        assert node.device is not None
        task = task_of(node.device)
        makers.setdefault(task, _Maker(task, keys, snapshots=moved)).add(node)
    caller.fetches = [caller.slot(output) for output in graph.outputs]
    plans = {task: maker.plan() for task, maker in makers.items()}
    return Compiled(plans.pop(local), plans, literals)


def _device(node: Node) -> str:
    """The device of its task that a node runs on; empty for any."""
    return split_device_name(node.device or "")[1]


@dataclass
class _Maker:
    task: str
    keys: Mapping[Value, str]
    feeds: list[int] = field(default_factory=list)
    fetches: list[int] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    programs: list[Discharged] = field(default_factory=list)
    slots: dict[Operand, int] = field(default_factory=dict)
    makers: dict[Value, int] = field(default_factory=dict)
    scalars: list[Scalar] = field(default_factory=list)
    bodies: list[Plan] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    snapshots: frozenset[Node] = frozenset()

    def slot(self, operand: Operand) -> int:
        return self.slots.setdefault(operand, len(self.slots))

    def add(self, node: Node) -> None:
        after = tuple(dict.fromkeys(self.makers[value] for value in node.after if value in self.makers))
        self.makers.update(dict.fromkeys(node.outputs, len(self.items)))
        self.items.append(self._item(node, after))
        self.names.append(f"%{node.outputs[0].name} ({node.op.name}){at(node.loc)}")

    def _item(self, node: Node, after: tuple[int, ...]) -> Item:
        if node.op is ops.net_send:
            edge, destination = node.attributes["edge"], node.attributes["destination"]
            return Send(edge, destination, self.slot(node.inputs[0]), after)
        if node.op is ops.net_recv:
            type: ArrayType = node.attributes["type"]
            edge, source = node.attributes["edge"], node.attributes["source"]
            return Recv(edge, source, self.slot(node.outputs[0]), dtype_name(type.dtype), type.shape, after)
        if node.op is ops.dev_copy:
            return Copy(_device(node), self.slot(node.inputs[0]), self.slot(node.outputs[0]), after)
        if node in self.snapshots:
            return self._read(node, after)
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
            self._key(ref),
            node.op.name,
            takes=self._takes(operands),
            gives=tuple(self.slot(value) for value in node.array_outputs),
            line=at(node.loc),
            after=after,
            **node.attributes,
        )

    def _control(self, node: Node, after: tuple[int, ...]) -> Branch | While | Scan:
        numbers = tuple(self._body(node, body) for body in node.bodies)
        takes = self._takes([operand for operand in node.inputs if not isinstance(operand.type, HANDLES)])
        gives = tuple(self.slot(value) for value in node.array_outputs)
        if node.op is ops.ctrl_cond:
            return Branch(numbers, takes, gives, after)
        parallel = node.attributes.get("parallel", PARALLEL_TURNS)
        if node.op is ops.ctrl_while:
            test, repeated = numbers
            return While(test, repeated, node.attributes["carry"], takes, gives, after, parallel)
        stacked = tuple(str(output.type) for output in node.bodies[0].outputs[node.attributes["carry"] :])
        options = {key: node.attributes[key] for key in ("length", "reverse", "carry", "rows")}
        return Scan(numbers[0], **options, stacked=stacked, takes=takes, gives=gives, after=after, parallel=parallel)

    def _body(self, node: Node, body: Graph) -> int:
        """The number of a body, whose programs join those of the whole plan."""
        keys = {
            ref: self._key(operand)
            for ref, operand in zip(body.inputs, node.handed, strict=True)
            if isinstance(ref.type, HANDLES)
        }
        maker = _Maker(self.task, keys, programs=self.programs)
        maker.feeds = [maker.slot(value) for value in body.inputs if not isinstance(value.type, HANDLES)]
        maker.snapshots = snapshots(body)
        for inner in body.nodes:
            maker.add(inner)
        maker.fetches = list(maker._takes(body.outputs))
        self.bodies.append(maker.plan().plan)
        return len(self.bodies) - 1

    def _takes(self, operands: Sequence[Operand]) -> tuple[int, ...]:
        """The slots of operands; that of a number is filled from the start."""
        for operand in operands:
            if isinstance(operand, Literal) and operand not in self.slots:
                type = operand.type
                data = np.asarray(operand.value).astype(type.dtype).tobytes()
                self.scalars.append(Scalar(self.slot(operand), dtype_name(type.dtype), data))
        return tuple(self.slot(operand) for operand in operands)

    def _read(self, node: Node, after: tuple[int, ...]) -> Read:
        (body,) = node.bodies
        outer = dict(zip(body.inputs, node.handed, strict=True))
        reads = {value: outer[ref] for inner in body.nodes for value in inner.outputs for ref in inner.values}
        keys = tuple(self._key(reads[output]) for output in body.outputs if isinstance(output, Value))
        return Read(keys, tuple(self.slot(value) for value in node.outputs), after)

    def _call(self, node: Node, after: tuple[int, ...]) -> Call:
        (body,) = node.bodies
        pure = discharge(body)
        outer = dict(zip(body.inputs, node.handed, strict=True))
        self.programs.append(pure)
        return Call(
            program=len(self.programs) - 1,
            writes=tuple(self._key(outer[ref]) for ref in pure.written),
            reads=tuple(self._key(outer[ref]) for ref in pure.read),
            takes=tuple(self.slot(outer[value]) for value in pure.operands),
            gives=tuple(self.slot(value) for value in node.array_outputs),
            after=after,
            device=_device(node),
            touches_anything=any(effect is Effect.UNKNOWN for effect, _ in node.effects),
            keeps=self._keeps(node),
            quick=is_quick(node),
        )

    def _keeps(self, node: Node) -> bool:
        """Whether the call overwrites none of the variables it writes."""
        written = {ref for effect, ref in node.effects if effect is Effect.WRITE}
        donated = {node.inputs[index] for index in node.attributes["donate"]}
        if written and not donated and calls_python(node.bodies[0]):
            return True
        if donated != written:
            raise InternalError(f"{node} donates {donated} but writes {written}; run the pass 'donate'")
        return False

    def _key(self, operand: Operand) -> str:
        assert isinstance(operand, Value)
        return self.keys[operand]

    def plan(self) -> TaskPlan:
        plan = Plan(
            self.task,
            len(self.slots),
            tuple(self.items),
            tuple(self.feeds),
            tuple(self.fetches),
            tuple(self.scalars),
            tuple(self.bodies),
            tuple(self.names),
        )
        return TaskPlan(plan, tuple(self.programs))
