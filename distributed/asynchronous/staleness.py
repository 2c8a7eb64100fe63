"""Bounded staleness of one run of asynchronous training: which steps may run at the same time; no I/O.

The staleness of a step is the number of updates by other steps between its reads and its own update. The steps of a run
are counted when they begin and when they end; a version is the number of steps that have ended. Values of version v
include v steps. When `begun` steps have begun, at most `begun - 1 - v` others can be applied between a step's reads and
its own update, in whatever order the tasks apply them. So a step may begin only if that stays within the limit for each
step that runs.

Invariants:
- `begun - 1 - version` of each running step is at most `limit`;
- a worker runs one step at a time, and steps begin in the order of the requests;
- a worker's steps are numbered, since notices may come late or twice: the end of an earlier step than its newest one is
  ignored;
- each request gets one answer: the first that waits when the running steps have ended, at the latest. A step ends when
  its worker reports that, begins another one, or has left;
- a request that has waited too long keeps its turn, for the worker to ask again;
- values that were fetched before their step began (held) are used only if each other worker can still begin a step
  while this one runs: otherwise they would delay the others, and are fetched again.

Not counted is an update of a failed step, or of a worker that has left, which a task is applying at the moment when it
learns of that.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dflow.distributed.asynchronous.staleness_messages import StepAdmitted
from dflow.distributed.coordinator.coordinator_events import SendReply
from dflow.distributed.wire.messages.basic import Failure
from dflow.tracing.devices.task_name import short_task_name


@dataclass
class BoundedSteps:
    """The steps of the run `name`; each lacks at most `limit` updates of others.

    first  the first version, greater than all versions of earlier runs of this name: a version that a worker holds from
           such a run is then too old
    """

    name: str
    limit: int
    first: int = 0
    #: Numbers of steps that have begun and ended, from `first` on.
    begun: int = field(init=False)
    ended: int = field(init=False)
    #: By worker in a step: the version of its values.
    running: dict[str, int] = field(default_factory=dict)
    #: By waiting worker, in the order of the requests: its request, None if that has waited too long, and the
    #: version of its held values.
    waiting: dict[str, tuple[int | None, int | None]] = field(default_factory=dict)
    #: By worker that takes part: the number of the newest step that it asked for.
    workers: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.begun = self.ended = self.first

    @property
    def is_idle(self) -> bool:
        """Whether no worker takes part, so that the run may be forgotten."""
        return not self.workers

    def begin(self, request: int, worker: str, number: int, held: int | None = None) -> list[SendReply]:
        """Queue a worker's request to begin a step, and end its earlier step; return the answers that are due.

        If the worker's earlier request still waits, it is refused, and this one gets its turn.

        number  of the step, greater than those of the worker's earlier ones; the same if it asks again
        held    version of the values that were fetched for the step already; None if there are none
        """
        replaced = self._refused(
            worker, f"a later request of {short_task_name(worker)} has taken the place of this one"
        )
        self._ended(worker)
        self.workers[worker], self.waiting[worker] = number, (request, held)
        return [*replaced, *self._admitted()]

    def end(self, worker: str, number: int, *, is_last: bool = False) -> list[SendReply]:
        """End the worker's step `number`, or withdraw its request; return the answers that are due.

        Does nothing for an earlier step than its newest one.

        is_last  whether the worker takes part no more
        """
        if self.workers.get(worker, number) > number:
            return []
        if is_last:
            return self.leave(worker)
        self.waiting.pop(worker, None)
        self._ended(worker)
        return self._admitted()

    def leave(self, worker: str) -> list[SendReply]:
        """Remove a worker that has left the run or the cluster: end its step, and refuse its request with TaskLost."""
        refused = self._refused(worker, f"{short_task_name(worker)} has left {self.name!r}", "TaskLost")
        self.workers.pop(worker, None)
        self.waiting.pop(worker, None)
        self._ended(worker)
        return [*refused, *self._admitted()]

    def timed_out(self, request: int) -> list[SendReply]:
        """Refuse a request with DeadlineExceeded, unless it was answered; its worker keeps its turn."""
        worker = next((worker for worker, (waiting, _) in self.waiting.items() if waiting == request), None)
        if worker is None:
            return []
        full = ", ".join(map(short_task_name, sorted(filter(self._is_full, self.running))))
        first = short_task_name(next(iter(self.waiting)))
        before = f"the steps of {full} have ended" if full else f"{first} has begun its step"
        text = f"run {self.name!r} with max_staleness={self.limit}: no step may begin before {before}"
        refused = self._refused(worker, text, "DeadlineExceeded")
        self.waiting[worker] = None, None
        return refused

    def _refused(self, worker: str, text: str, kind: str = "RemoteError") -> list[SendReply]:
        request, _ = self.waiting.get(worker, (None, None))
        return [] if request is None else [SendReply(request, Failure(kind, text))]

    def _ended(self, worker: str) -> None:
        if self.running.pop(worker, None) is not None:
            self.ended += 1

    def _is_full(self, worker: str) -> bool:
        """Whether the worker's step could lack too many updates if another step began."""
        return self.begun - self.running[worker] > self.limit

    def _admitted(self) -> list[SendReply]:
        replies: list[SendReply] = []
        while self.waiting and not any(map(self._is_full, self.running)):
            worker, (request, held) = next(iter(self.waiting.items()))
            if request is None:
                break
            del self.waiting[worker]
            uses_held = held is not None and self.begun - held + len(self.workers) - 1 <= self.limit
            self.running[worker] = held if held is not None and uses_held else self.ended
            self.begun += 1
            replies.append(SendReply(request, StepAdmitted(self.ended, uses_held, len(self.workers))))
        return replies
