"""Base of the parts of a coordinator: each decides for one subject, by events that all parts hear of.

Why: the coordinator knows members, placement of variables and the commands of an event, and nothing of the subjects
that it serves. A part has the handlers of its messages, and hears of members that join, leave or send heartbeats, and
of time. `coordinator_role.py` lists the parts of the role; they hear of an event in that order.

Invariants: a part is a pure function of events, and keeps what must last in `core.records`; it may use the parts that
are listed before it (`core.part`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import msgspec

from dflow.distributed.coordinator.cluster_news import ClusterNews
from dflow.distributed.coordinator.coordinator_events import Command
from dflow.distributed.coordinator.durable_records import DurableRecords
from dflow.distributed.coordinator.membership import Membership, ReleaseTask
from dflow.distributed.coordinator.variable_directory import VariableDirectory
from dflow.distributed.wire.handler_table import HandlerTable
from dflow.distributed.wire.messages.message import Message
from dflow.distributed.wire.messages.roster import Heartbeat
from dflow.tracing.errors import InternalError

Kind = TypeVar("Kind", bound="CoordinatorPart")


@dataclass(frozen=True)
class CoordinatorSettings:
    """Timeouts of a coordinator, in s.

    `heartbeat_timeout_s`  a task without a heartbeat for this time has left, unless it is a holder; after a restart,
                           the time to rejoin
    `rejoin_s`             a task without a connection for this time has left, unless it is a holder
    `holder_timeout_s`     a holder (a task that holds variables, queues or accumulators) has left after this time
                           without a heartbeat; before, it is away, and steps wait for it
    `snapshot_every_s`     time between two snapshots of the state of all tasks; 0 for none
    `stall_timeout_s`      a busy task that has ended no step for this time is stalled, despite its heartbeats
    """

    heartbeat_timeout_s: float = 10.0
    rejoin_s: float = 1.0
    holder_timeout_s: float = 60.0
    stall_timeout_s: float = 60.0
    snapshot_every_s: float = 0.0


class Received(msgspec.Struct, frozen=True, gc=False):
    """How a message arrived: when, over which connection, and as which request; `life` is its speaker's, or 0."""

    at_s: float
    peer: int
    ask: int
    life: int


#: The handlers of a part's requests return the reply, or commands with its `SendReply` now or later.
Requests = HandlerTable[Kind, Received, Message | Sequence[Command]]
Notices = HandlerTable[Kind, Received, Sequence[Command]]


class CoordinatorPart:
    """A subject's part of the coordinator. Each hook does nothing unless a part defines it.

    Construction takes what lasts from the records that an earlier process of the coordinator wrote.

    `requests`, `notices`  the handlers of its messages
    `copied`               class of the result of `copy`; None if a snapshot has nothing of the part
    `may_be_lost`          beginnings of the keys of its records whose newest changes may be lost; see
                           `CoordinatorState.waits`
    `tells`                by class of message, the key of a record that must be written before the message is sent
    `moments`              moments for tests, by the class of a message or by the key of a record: see `moments.reach`
    """

    requests: ClassVar[HandlerTable[Any, Received, Message | Sequence[Command]]] = HandlerTable()
    notices: ClassVar[HandlerTable[Any, Received, Sequence[Command]]] = HandlerTable()
    copied: ClassVar[type[msgspec.Struct] | None] = None
    may_be_lost: ClassVar[tuple[str, ...]] = ()
    tells: ClassVar[Mapping[type[Message], str]] = {}
    moments: ClassVar[Mapping[type[Message] | str, str]] = {}

    def __init__(self, core: CoordinatorCore) -> None:
        self._core = core

    def on_start(self, at_s: float) -> Sequence[Command]:
        """React to the start of the coordinator."""
        return []

    def on_join(self, task: str, peer: int, is_known: bool, at_s: float) -> Sequence[Command]:
        """React to a task that joined; `is_known` if its process was a member of this cluster before."""
        return []

    def on_heartbeat(self, heartbeat: Heartbeat, received: Received) -> Sequence[Command]:
        """React to a heartbeat of a live task."""
        return []

    def on_leave(self, left: Sequence[ReleaseTask], at_s: float) -> Sequence[Command]:
        """React to tasks that left, all at the same time."""
        return []

    def on_tick(self, at_s: float) -> Sequence[Command]:
        """React to a tick, for instance by failing waits past their deadline."""
        return []

    def after_event(self, at_s: float) -> Sequence[Command]:
        """Decide what follows from an event, after all parts have reacted to it."""
        return []

    def holds_work(self, task: str) -> bool:
        """Whether a task has taken on work that it has not reported."""
        return False

    def work_of(self, task: str) -> str:
        """Describe the work that a task has taken on and not reported; empty if there is none."""
        return ""

    def status(self) -> Mapping[str, Any]:
        """Return the part's fields of a `Status`, by name."""
        return {}

    # Snapshots.

    def steps_done(self) -> int | None:
        """Number of steps done in all runs of training; None before the first run, or if the part counts none."""
        return None

    def copy(self) -> msgspec.Struct | None:
        """Return a copy of its state for a snapshot, or None without `copied`; called while no step runs."""
        return None

    def return_to(self, copy: Any) -> int:
        """Set its state to a copy, of class `copied`; return the number of steps that are done again."""
        return 0

    @classmethod
    def records_of(cls, copy: Any, before: DurableRecords) -> Iterable[tuple[str, msgspec.Struct | Mapping[str, Any]]]:
        """Return keys and records of the part in a cluster that goes on from a copy; `before` has the earlier ones."""
        return ()

    @classmethod
    def inherited(cls, rows: Mapping[str, bytes], parts: Sequence[type[CoordinatorPart]]) -> Mapping[str, bytes]:
        """Return the first records of a cluster after the one with the records `rows`, whose processes have ended."""
        return {}


@dataclass
class CoordinatorCore:
    """Objects that all parts of a coordinator share.

    `jobs`        number of expected tasks by job
    `is_durable`  whether all changes are written; no snapshot is committed while some are not
    `parts`       the parts that are made already, in their order
    """

    settings: CoordinatorSettings
    jobs: Mapping[str, int]
    records: DurableRecords
    is_durable: bool = True
    parts: list[CoordinatorPart] = field(default_factory=list)

    def __post_init__(self) -> None:
        settings = self.settings
        self.members = Membership(
            self.records, self.jobs, settings.heartbeat_timeout_s, settings.rejoin_s, settings.holder_timeout_s
        )
        self.directory = VariableDirectory(self.members, self.records, has_snapshots=settings.snapshot_every_s > 0)
        self.news = ClusterNews(self.members)

    def part(self, kind: type[Kind]) -> Kind:
        """Return the part of this class; raises InternalError if it is not made yet."""
        found = next((part for part in self.parts if isinstance(part, kind)), None)
        if found is None:
            raise InternalError(f"a coordinator has no {kind.__name__}: list it before the part that uses it")
        return found

    def steps_done(self) -> int | None:
        """Number of steps done in all runs of training; None before the first run."""
        return next((done for part in self.parts if (done := part.steps_done()) is not None), None)

    def copies(self) -> dict[str, bytes]:
        """Return the encoded copies of all parts that have one, by class name; called while no step runs."""
        made = ((type(part).__name__, part.copy()) for part in self.parts)
        return {name: msgspec.msgpack.encode(copy) for name, copy in made if copy is not None}

    def return_to(self, copies: Mapping[str, bytes]) -> int:
        """Set all parts to their copies; return the number of steps that are done again."""
        return sum(part.return_to(copy) for part in self.parts for copy in copies_of(type(part), copies))


def copies_of(kind: type[CoordinatorPart], copies: Mapping[str, bytes]) -> Iterator[Any]:
    """Yield the decoded copy of a part, an empty one if `copies` has none; nothing for a part without `copied`."""
    if kind.copied is not None:
        encoded = copies.get(kind.__name__)
        yield kind.copied() if encoded is None else msgspec.msgpack.decode(encoded, type=kind.copied)
