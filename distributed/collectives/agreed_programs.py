"""Compare the programs of the members of a process group before they run, and refuse programs that differ.

A program over all processes is one computation. If one process has traced another constant, each process goes on with
different values and no error. If it has traced another operation, or calls another function, the others wait in a
collective without end. So each call is a point that all members come to, where they exchange a description of it. In
a step of a training loop, a call of the step's own program needs no message if all members have compared it before: the
members have already met at the begin of the step.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any
from weakref import WeakKeyDictionary

from dflow.distributed.collectives.process_group import ProcessGroup
from dflow.distributed.training.applying import applied_to
from dflow.distributed.training.compared_steps import settings_of
from dflow.lowering.steps.program_watch import WatchedProgram, is_shared
from dflow.tracing.context_values import within
from dflow.tracing.errors import StrategyError
from dflow.tracing.ir.types import AccumulatorType, QueueType
from dflow.tracing.state.resources import Variable
from dflow.tracing.syntax.listing import ListedItem, array_item, listing

#: By kind of an item, the remedy if it differs.
_REMEDIES = {
    "closed-over array": "pass it in the batch, or draw it from a dflow.Generator made within strategy.variables()",
    "variable of this process": "make it within strategy.variables(), with the same first value on all workers",
    "variable": "make the variables within strategy.variables(), in one order and with the same names on all workers",
    "value": "assign the same value on all workers",
    "setting": "give the optimizer the same settings on all workers",
}
_REMEDY = "run the same step on all workers, and pass what differs between them in the batch"
#: Characters of each item's digest in a message.
_SHORT = 12


@dataclass
class _AgreedStep:
    """A step of a loop, at the begin of which the workers have met.

    point       description of that point of the program
    is_covered  whether a call of a program needs no message if the members have compared it before; true at most until
                the step's first call
    """

    point: str
    is_covered: bool


class AgreedPrograms:
    """Compares the programs of a group's member with those of the others before they run; used by one thread."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        #: The items of each program, and their digest.
        self._listed: WeakKeyDictionary[WatchedProgram, tuple[list[ListedItem], str]] = WeakKeyDictionary()
        #: The programs that all members have compared within steps, by digest.
        self._agreed: set[str] = set()
        #: Keys of the variables of this process whose values were compared, since steps use them.
        self._compared: set[str] = set()
        self._step: ContextVar[_AgreedStep | None] = ContextVar("dflow_agreed_step", default=None)

    @contextmanager
    def step(self, point: str, *, is_one_call: bool) -> Iterator[None]:
        """Return the context of a step; `point` describes the point of the program that all members have come to.

        is_one_call  whether the step is one call of a function of `dflow.jit`
        """
        with within(self._step, _AgreedStep(point, is_one_call)):
            yield

    def called(self, program: WatchedProgram, args: Any, kwargs: Any, leaves: Sequence[Any]) -> None:
        """Compare a program with those of the other members before it is called: see `ProgramWatch`.

        Outside of steps, compares only programs whose processes wait for each other or that write variables which
        all have. In a step of one call, a program that was compared in a step before needs no message.

        Raises StrategyError if the programs differ, or for a step with a queue or accumulator of this process.
        """
        step = self._step.get()
        if step is None:
            if self._writes_shared(program) or (_reads_shared(program) and program.is_collective(args, kwargs, leaves)):
                self.compare(f"a call of {program.name!r}", self._listing(program)[0])
            return
        items, digest = self._listing(program)
        is_agreed = digest in self._agreed
        if step.is_covered and is_agreed:
            step.is_covered = False
            return
        own = [] if is_agreed else [one for one in program.variables if not is_shared(one.sharding)]
        values = [array_item("variable of this process", one.name, one.read()) for one in own]
        if not is_agreed:
            items = listing(program.traced, settings_of(applied_to(program.variables)))
        self.compare(f"a call of {program.name!r} in {step.point}", [*items, *values])
        refuse_own_resources(program)
        self._agreed.add(digest)
        self._compared.update(one.key for one in own)
        step.is_covered = False

    def written(self, variable: Variable, kind: str, operands: Sequence[Any]) -> None:
        """Compare a write outside of programs with those of the other members, if they have the variable too.

        Raises StrategyError if the writes differ. See `ProgramWatch`.
        """
        if is_shared(variable.sharding) or variable.key in self._compared:
            items = [array_item("value", f"of {kind} {number}", one) for number, one in enumerate(operands)]
            self.compare(f"a write to variable {variable.name!r} outside of steps", items)

    def compare(self, point: str, items: Sequence[ListedItem]) -> None:
        """Wait for all members; raise StrategyError in all unless they have the same items at this point."""
        words = self._group.exchange(point, _digest(items))
        if len({*words}) == 1:
            return
        short = [hashlib.sha256(one.text.encode()).hexdigest()[:_SHORT] for one in items]
        told = [json.loads(word) for word in self._group.exchange(f"{point}, which differs", json.dumps(short))]
        rows = [*zip_longest(*told)]
        number = next(number for number, row in enumerate(rows) if len({*row}) > 1)
        mine = items[number] if number < len(items) else ListedItem("", "", "none")
        found = self._group.exchange(f"{point}, item {number}", json.dumps([mine.kind, mine.shown]))
        kinds, shown = zip(*map(json.loads, found), strict=True)
        kind = next(filter(None, kinds))
        described = "".join(f"\n    {name}: {one}" for name, one in zip(self._group.names, shown, strict=True))
        raise StrategyError(
            f"{point}: expected the same {kind} on all workers, got{described}", _REMEDIES.get(kind, _REMEDY)
        )

    def _listing(self, program: WatchedProgram) -> tuple[list[ListedItem], str]:
        if program not in self._listed:
            items = listing(program.traced)
            self._listed[program] = items, _digest(items)
        return self._listed[program]

    def _writes_shared(self, program: WatchedProgram) -> bool:
        return any(
            one.key in program.writes and (is_shared(one.sharding) or one.key in self._compared)
            for one in program.variables
        )


def _digest(items: Sequence[ListedItem]) -> str:
    return hashlib.sha256(json.dumps([one.text for one in items]).encode()).hexdigest()


def _reads_shared(program: WatchedProgram) -> bool:
    return any(is_shared(one.sharding) for one in program.variables)


def refuse_own_resources(program: WatchedProgram) -> None:
    """Raise StrategyError for a program that takes a value from a queue, or uses an accumulator, of this process.

    Such a value differs between the processes, while their programs assume that it is the same on all.
    """
    for node in program.traced.graph.all_nodes():
        if not node.op.is_on_resource or not node.inputs:
            continue
        operand = node.inputs[0]
        if isinstance(operand.type, AccumulatorType):
            raise StrategyError(
                f"AllReduce: {program.name!r}: expected no accumulator, got {node.op.method} of one that each worker "
                "has for itself",
                "leave it out: AllReduce averages the gradients of all workers; accumulators of several are for Sync "
                "and Async",
                at=node.loc,
            )
        if isinstance(operand.type, QueueType) and node.array_outputs:
            raise StrategyError(
                f"AllReduce: {program.name!r}: expected values that are the same on all workers, got {node.op.method} "
                "of a queue that each worker has for itself",
                "take from the queue in the loop, as this worker's part of the batch:\n"
                "    strategy.run(step, (queue.dequeue() for _ in range(steps)), steps=steps)",
                at=node.loc,
            )
