"""The schedule's program on variables of ps tasks: workers place, create, write and read them, as `ClusterHome` does.

A worker asks the coordinator for a variable's task, or uses an earlier answer, which may be out of date. One more
variable is written only by the worker that the coordinator has elected, which may be declared dead before it writes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dflow.distributed.wire.codec import decode_array, encode_array
from dflow.distributed.wire.failures import error_of
from dflow.distributed.wire.messages.basic import ArrayInfo
from dflow.distributed.wire.messages.coordination import ElectOnce
from dflow.distributed.wire.messages.message import Request
from dflow.distributed.wire.messages.placement import Placed, PlaceVariable
from dflow.distributed.wire.messages.variables import (
    CreateVariable,
    CreateVariables,
    ReadVariables,
    VariablesCreated,
    WriteVariable,
)
from dflow.tracing.devices.task_name import short_task_name
from dflow.tracing.errors import DflowError
from tests.simulation.checks import Require
from tests.simulation.tasks import Member, SimulatedTasks

NAMES = ("a", "b", "c")
#: The variable of the elected worker.
OWNED = "owned"
PAUSE_S = 1.5
ANSWER_S = 8.0
_INITIAL = np.zeros((), np.int32)


@dataclass
class _SeenVariable:
    """A variable: the process that answered for it first, the numbers written, and whether a write was answered."""

    process: str = ""
    written: set[int] = field(default_factory=set)
    is_written: bool = False


class VariableChecks:
    """The invariants of variables; `require` records a violation.

    - `one life`   one process answers for a variable, so no other has created it again;
    - `none lost`  a read gives a number that was written, or the initial value unless a write was answered before;
    - `one writes` an elected worker reads the number that it wrote last: no worker that was elected before it has
                   written since.
    """

    def __init__(self, require: Require) -> None:
        self._require = require
        self._seen = {name: _SeenVariable() for name in (*NAMES, OWNED)}
        self._numbers = 0

    def writes(self, name: str) -> int:
        """Return a number for a worker to write, different from all others."""
        self._numbers += 1
        self._seen[name].written.add(self._numbers)
        return self._numbers

    def wrote(self, name: str) -> None:
        """A worker has received the answer to its write."""
        self._seen[name].is_written = True

    def is_written(self, name: str) -> bool:
        """Whether a write was answered."""
        return self._seen[name].is_written

    def read(self, name: str, number: int, was_written: bool) -> None:
        """A worker has read a number; `was_written` is whether a write was answered before the read was sent."""
        text = f"{name!r} is read as {number}"
        self._require(number in self._seen[name].written or not number, "none lost", f"{text}, which no worker wrote")
        self._require(number > 0 or not was_written, "none lost", f"{text}, the initial value, after a write")

    def read_own(self, worker: str, number: int, wrote: int) -> None:
        """An elected worker has read a number after the answer to its write."""
        text = f"{worker} is elected and wrote {wrote} to {OWNED!r}, and reads {number}"
        self._require(number == wrote, "one writes", text)

    def answered(self, name: str, process: str) -> None:
        """A process has created, written or read the variable."""
        seen = self._seen[name]
        seen.process = seen.process or process
        text = f"{process} answers for {name!r}, which {seen.process} held"
        self._require(process == seen.process, "one life", text)


class VariablesWorker:
    """A worker that uses variables at random, `ops` times in all."""

    def __init__(self, member: Member, tasks: SimulatedTasks, checks: VariableChecks, ops: int, seed: str) -> None:
        self.is_complete = False
        self._member, self._tasks, self._checks, self._ops = member, tasks, checks, ops
        self._random = random.Random(f"variables {seed} {member.process}")
        self._placed: dict[str, Placed] = {}

    def run(self) -> None:
        """Use the variables."""
        for _ in range(self._ops):
            try:
                self._member.sleep(PAUSE_S * self._random.random())
                if self._random.random() < 0.2:
                    self._use_owned()
                else:
                    self._use(self._random.choice(NAMES))
            except DflowError as error:
                self._member.failed(error)
        self.is_complete = True

    def _use_owned(self) -> None:
        """Write the variable of the elected worker, if it is this one, and read it again."""
        if not self._member.ask_coordinator(ElectOnce("owner", self._member.name)).elected:
            return
        self._find(OWNED)
        self._member.sleep(PAUSE_S * self._random.random())
        number = self._checks.writes(OWNED)
        self._ask(OWNED, WriteVariable(OWNED, "int32", ()), encode_array(np.asarray(number, np.int32)))
        self._member.say(f"is elected and wrote {number}")
        self._member.sleep(PAUSE_S * self._random.random())
        answer = self._ask(OWNED, ReadVariables((OWNED,)))
        self._checks.read_own(str(self._member.process), int(decode_array("int32", (), answer.payload)), number)

    def _find(self, name: str) -> None:
        """Find the task of a variable, and create it there unless it exists."""
        if name not in self._placed or self._random.random() < 0.3:
            request = PlaceVariable(name, "int32", (), 4, "ps")
            placed = self._placed[name] = self._member.ask_coordinator(request)
            variable = CreateVariable(name, "int32", (), arrays=1, process=placed.process)
            message = CreateVariables((variable,), (ArrayInfo("int32", ()),))
            self._ask(name, message, encode_array(_INITIAL))
            self._member.say(f"has created or found {name!r}")

    def _use(self, name: str) -> None:
        self._find(name)
        if self._random.random() < 0.5:
            number = self._checks.writes(name)
            self._ask(name, WriteVariable(name, "int32", ()), encode_array(np.asarray(number, np.int32)))
            self._checks.wrote(name)
            self._member.say(f"wrote {number} to {name!r}")
            return
        was_written = self._checks.is_written(name)
        answer = self._ask(name, ReadVariables((name,)))
        number = int(decode_array("int32", (), answer.payload))
        self._member.say(f"read {number} from {name!r}")
        self._checks.read(name, number, was_written)

    def _ask(self, name: str, message: Request[Any], payload: Any = b"") -> Any:
        host = short_task_name(self._placed[name].task)
        process = self._tasks.connections.far(self._member.server.peer(self._placed[name].task))
        answer = self._member.ask(host, message, payload, timeout_s=ANSWER_S)
        if isinstance(answer.message, VariablesCreated):
            for failure in answer.message.failures.values():
                raise error_of(failure)
        self._checks.answered(name, process)
        return answer
