"""A plan that is ready to run: its compiled programs, and the items that each item waits for.

Invariant: an executable's plan does not change, so any number of steps may run it concurrently.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from graphlib import TopologicalSorter
from typing import Any

import jax.numpy as jnp
import msgspec
import numpy as np

from dflow.lowering.programs.program import Program
from dflow.lowering.steps.plan import (
    Branch,
    Call,
    CheckIds,
    Copy,
    Item,
    Plan,
    Read,
    Recv,
    Scan,
    Send,
    UseResource,
    While,
    calls_in,
)
from dflow.lowering.values.devices import device_named
from dflow.lowering.values.payload_layout import PayloadLayout
from dflow.tracing.ir import ops
from dflow.tracing.ir.resource_op import ResourceOp
from dflow.tracing.ir.types import parse_dtype

#: Stands for all variables and resources: an item that touches this may touch any.
ANYTHING = ""


#: Effects of an item on the order of queues and variables: it uses or writes a variable, does what other threads learn
#: from, or learns what others did.
_USES, _WRITES, _RELEASES, _ACQUIRES = _ROLES = ("uses", "writes", "releases", "acquires")
#: Two items with these roles keep their order in the program.
_IN_ORDER = ((_WRITES, _RELEASES), (_ACQUIRES, _USES))


class Executable:
    """What one task runs in one step: a plan, with its programs by index, and the order of its items, by index.

    needs       the items that each item needs
    dependents  the items that need each item, transfers first
    waiting     the items whose results come later than the item was started
    takers      the items that take each register
    bodies      executables of the plans that branches and loops run; they share the programs
    layouts     the types of the values of each receive
    awaited     the registers that must be computed before a copy starts
    fetched     the registers that the plan returns
    """

    def __init__(self, plan: Plan, programs: Sequence[Program] = ()) -> None:
        self.plan, self.programs = plan, programs
        self.bodies = tuple(Executable(body, programs) for body in plan.bodies)
        self.fetched = frozenset(plan.fetches)
        self.scalars = tuple(
            (scalar.register, jnp.asarray(np.frombuffer(scalar.data, parse_dtype(scalar.dtype))[0]))
            for scalar in plan.scalars
        )
        self.devices = {item.device: device_named(item.device) for item in plan.items if isinstance(item, Copy)}
        self.layouts = {
            index: PayloadLayout(item.types, item.fill)
            for index, item in enumerate(plan.items)
            if isinstance(item, Recv)
        }
        self.needs = needed = needs(plan)
        #: The `execute.CompiledPlan`, once the plan has run.
        self.compiled: Any = None
        #: Whether a run of the plan has ended: the first one may compile programs again. True without programs.
        self.has_run = not programs
        self.dependents: list[list[int]] = [[] for _ in plan.items]
        # Transfers first, so that they start before a later call occupies the device.
        for index in sorted(range(len(needed)), key=lambda index: not isinstance(plan.items[index], Copy | Send)):
            for producer in needed[index]:
                self.dependents[producer].append(index)
        self.awaited = {index: found for index in range(len(needed)) if (found := self._awaited_by(index))}
        self.waiting = frozenset(
            index
            for index, item in enumerate(plan.items)
            if index in self.awaited or isinstance(item, Recv | UseResource | Branch | While | Scan)
        )

    def _awaited_by(self, index: int) -> tuple[int, ...]:
        """Return the registers that must be computed before a copy starts: one result of each item in its `after`.

        Only a copy to a CPU device waits for them, as it would start once its source is ready. Other devices run their
        work in the order of submission.
        """
        item = self.plan.items[index]
        if not isinstance(item, Copy) or self.devices[item.device].platform != "cpu":
            return ()
        return tuple(register for earlier in item.after for register in gives(self.plan.items[earlier])[:1])

    @cached_property
    def is_asynchronous(self) -> bool:
        """Whether no item blocks the thread that runs it, except a send of values that are still being computed."""
        return all(
            (item.asynchronous and not item.keeps)
            if isinstance(item, Call)
            else isinstance(item, Read | Send | Recv | UseResource)
            for item in self.plan.items
        )

    @cached_property
    def resource_ops(self) -> Mapping[int, ResourceOp]:
        """The ops of queues and accumulators, by item.

        An op owns its operands if other tasks have sent them, and the plan does not return them: then their memory
        never changes.
        """
        items = self.plan.items
        recvs = [item for item in items if isinstance(item, Recv) and item.source != self.plan.task]
        received = {register for item in recvs for register in item.gives} - self.fetched
        return {
            index: msgspec.structs.replace(item.op, owned=received.issuperset(item.takes))
            for index, item in enumerate(items)
            if isinstance(item, UseResource)
        }

    @cached_property
    def updates(self) -> bool:
        """Whether its calls change variables."""
        return any(call.writes for call in calls_in(self.plan))

    @cached_property
    def changing(self) -> frozenset[int]:
        """The items that may change state, and the items that need one of these."""
        return self._with_dependents(index for index, item in enumerate(self.plan.items) if may_change(item))

    @cached_property
    def stateful(self) -> frozenset[int]:
        """The items that read or change state, and the items that need one of these."""
        return self._with_dependents(index for index, item in enumerate(self.plan.items) if self._touched_by(item))

    @cached_property
    def sends_of_feeds(self) -> frozenset[int]:
        """The sends of values that the feeds alone determine, such as the row numbers of a lookup."""
        items = self.plan.items
        received = self._with_dependents(index for index, item in enumerate(items) if isinstance(item, Recv))
        sends = {index for index, item in enumerate(items) if isinstance(item, Send)}
        return frozenset(sends - self.stateful - received)

    def _with_dependents(self, items: Iterable[int]) -> frozenset[int]:
        """Return the items, and the items that need one of these."""
        found = {*items}
        ready = list(found)
        while ready:
            later = {*self.dependents[ready.pop()]} - found
            found |= later
            ready += later
        return frozenset(found)

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """The keys of the variables that its calls use."""
        return tuple(dict.fromkeys(key for call in calls_in(self.plan) for key in (*call.writes, *call.reads)))

    @cached_property
    def takers(self) -> Mapping[int, tuple[int, ...]]:
        """The items that take each register."""
        found: dict[int, list[int]] = {}
        for index, item in enumerate(self.plan.items):
            for register in dict.fromkeys(takes(item)):
                found.setdefault(register, []).append(index)
        return {register: tuple(items) for register, items in found.items()}

    @cached_property
    def sent(self) -> frozenset[int]:
        """The reads whose values are sent and not used otherwise."""
        items = self.plan.items
        return frozenset(
            index
            for index, item in enumerate(items)
            if isinstance(item, Read)
            and all(
                isinstance(items[taker], Send) for register in item.gives for taker in self.takers.get(register, ())
            )
        )

    def sent_results(self, index: int) -> tuple[int, ...]:
        """Positions, among the results of a call, of the values for other tasks."""
        items = self.plan.items
        return tuple(
            position
            for position, register in enumerate(gives(items[index]))
            if any(isinstance(items[taker], Send) for taker in self.takers.get(register, ()))
        )

    @cached_property
    def touched(self) -> Mapping[str, bool]:
        """The variables, queues and accumulators that the plan touches, and whether it changes each."""
        return _merged(map(self._touched_by, self.plan.items))

    @cached_property
    def follows(self) -> Mapping[int, frozenset[int]]:
        """For each item of a loop's body, the items of the previous iteration that it runs after, for shared state.

        Items of one iteration that touch the same state are ordered already. So the first of them wait for the last
        ones of the previous iteration. Besides, items that release data to other threads or tasks run after writes of
        variables, and items that use variables run after items that acquire such data, as the pass `order` does within
        an iteration.
        """
        accesses: dict[str, list[tuple[int, bool]]] = {}
        for index in TopologicalSorter(dict(enumerate(needs(self.plan)))).static_order():
            for key, changes in self._touched_by(self.plan.items[index]).items():
                accesses.setdefault(key, []).append((index, changes))
        found: dict[int, set[int]] = {}
        for line in accesses.values():
            changing = [position for position, (_, changes) in enumerate(line) if changes]
            if changing:
                first, last = line[changing[0]][0], line[changing[-1]][0]
                for index, _ in line[: changing[0] + 1]:
                    found.setdefault(index, set()).add(last)
                found[first].update(index for index, _ in line[changing[-1] :])
        doing: dict[str, list[int]] = {role: [] for role in _ROLES}
        for index, item in enumerate(self.plan.items):
            for role in self._roles_of(item):
                doing[role].append(index)
        for earlier, later in _IN_ORDER:
            for index in doing[later] if doing[earlier] else ():
                found.setdefault(index, set()).update(doing[earlier])
        return {index: frozenset(before) for index, before in found.items()}

    @cached_property
    def roles(self) -> frozenset[str]:
        """The roles of the plan's items."""
        return frozenset[str]().union(*map(self._roles_of, self.plan.items))

    @cached_property
    def followed(self) -> Mapping[int, tuple[int, ...]]:
        """For each item, the items of the next iteration that wait for it."""
        found: dict[int, list[int]] = {}
        for index, before in self.follows.items():
            for other in before:
                found.setdefault(other, []).append(index)
        return {index: tuple(later) for index, later in found.items()}

    def _roles_of(self, item: Item) -> Iterable[str]:
        match item:
            case Call() if item.writes:
                return _USES, _WRITES
            case Call() if item.reads:
                return (_USES,)
            case Read():
                return (_USES,)
            case UseResource():
                return (_RELEASES if ops.RESOURCE_OPS[item.op.name].releases else _ACQUIRES,)
            case Branch() | While() | Scan():
                return frozenset[str]().union(*(self.bodies[body].roles for body in bodies_of(item)))
        return ()

    def _touched_by(self, item: Item) -> dict[str, bool]:
        found: dict[str, bool] = {}
        match item:
            case Call():
                found = dict.fromkeys(item.reads, False) | dict.fromkeys(item.writes, True)
                if item.touches_anything:
                    found[ANYTHING] = True
            case Read():
                found = dict.fromkeys(item.keys, False)
            case UseResource():
                found = {item.key: True}
            case Branch() | While() | Scan():
                found = _merged(self.bodies[body].touched for body in bodies_of(item))
        if found:
            found.setdefault(ANYTHING, False)
        return found


def may_change(item: Item) -> bool:
    """Whether an item may change state, of this process or of others."""
    if isinstance(item, Call):
        return bool(item.writes) or item.touches_anything
    return not isinstance(item, CheckIds | Copy | Read | Recv | Send)


def _merged(touched: Iterable[Mapping[str, bool]]) -> dict[str, bool]:
    found: dict[str, bool] = {}
    for each in touched:
        for key, changes in each.items():
            found[key] = found.get(key, False) or changes
    return found


def may_conflict(one: Executable, other: Executable) -> bool:
    """Whether two plans touch the same state such that their order matters."""
    if any(changes or other.touched[key] for key, changes in one.touched.items() if key in other.touched):
        return True
    pairs = ((one.roles, other.roles), (other.roles, one.roles))
    return any(earlier in before and later in after for before, after in pairs for earlier, later in _IN_ORDER)


def bodies_of(item: Branch | While | Scan) -> tuple[int, ...]:
    """Return the indices of the plans that an item runs."""
    match item:
        case Branch():
            return item.bodies
        case While():
            return (item.test, item.body)
    return (item.body,)


def takes(item: Item) -> tuple[int, ...]:
    """Return the registers that an item takes its values from."""
    match item:
        case Copy():
            return (item.take,)
        case Recv() | Read():
            return ()
    return item.takes


def gives(item: Item) -> tuple[int, ...]:
    """Return the registers that an item fills."""
    match item:
        case Send():
            return ()
        case Copy():
            return (item.give,)
    return item.gives


def needs(plan: Plan) -> list[set[int]]:
    """Return the items that each item waits for."""
    producers = {register: index for index, item in enumerate(plan.items) for register in gives(item)}
    return [
        {producers[register] for register in takes(item) if register in producers} | set(item.after)
        for item in plan.items
    ]
