"""State of the whole cluster, for people and tools, and results reported by programs."""

from __future__ import annotations

import msgspec

from dflow.distributed.wire.messages.basic import Ok
from dflow.distributed.wire.messages.message import Message, Request
from dflow.distributed.wire.messages.roster import EdgeTraffic, TaskInfo


class Report(Request[Ok], frozen=True):
    """A result of the program for the closing table, such as a test accuracy."""

    name: str
    value: float


class VariableInfo(msgspec.Struct, frozen=True):
    """A placed variable, queue or accumulator, by `kind`.

    For `process` see `Placed`, for `is_saved` see `PlaceVariable`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    task: str
    kind: str = "variable"
    process: str = ""
    is_saved: bool = True


class NotFinite(msgspec.Struct, frozen=True):
    """The first loss of a run, by name, that was not a finite number, with its step and worker."""

    step: int
    metric: str
    value: float
    run: str = ""
    task: str = ""


class WorkerProgress(msgspec.Struct, frozen=True):
    """A worker's totals over all runs, and its newest `step_s` and `metrics`.

    `dropped` of its steps came too late for their round of synchronous training. `held` steps are claimed and not
    reported yet.
    """

    task: str
    steps: int
    step_s: float
    metrics: dict[str, float]
    dropped: int = 0
    held: int = 0


class TaskHealth(msgspec.Struct, frozen=True):
    """The newest heartbeat of a live task; see `Heartbeat`.

    `heard_at_s`       time when it arrived
    `stalled_since_s`  time since when the task has made no progress, or None when it is not stalled
    """

    task: str
    heard_at_s: float
    steps: int
    doing: str
    stalled_since_s: float | None


class PartCosts(msgspec.Struct, frozen=True):
    """What the process of a task used while it ran `parts` parts of steps.

    The first part and all that came before it, such as imports and compilation, are not counted: the interval is from
    the first heartbeat that reported the end of a part to the newest one. See `Heartbeat` for the other fields.
    """

    task: str
    parts: int
    processor_s: float
    wakeups: int


class SnapshotSize(msgspec.Struct, frozen=True):
    """The bytes of variables in the newest snapshot, and the bytes written for it.

    The others are rows of large variables that had not changed since earlier snapshots.
    """

    number: int
    written_bytes: int
    full_bytes: int


class Health(Message, frozen=True):
    """`health` is None for a task that is not live or not heard yet; `absence` says why it is not live, or is empty."""

    now_s: float
    health: TaskHealth | None
    absence: str


class GetHealth(Request[Health], frozen=True):
    """Read the newest heartbeat of a task."""

    is_open = True

    task: str


class Status(Message, frozen=True):
    """A snapshot of all that the coordinator shows to people; times are in s since its first start.

    `away`  live tasks without a connection: it has ended, or the task has not yet rejoined after the coordinator's
            restart; each has until its deadline to rejoin
    `left`  number of tasks that have left, including the ones no longer listed
    `result_steps`  of results that a `Trainer` reported: the number of steps of its run that they come after
    `not_finite`  the first non-finite loss of each run and metric
    `costs`  of the newest process of each task that has run more than one part of a step, also after it has left
    `snapshot`  the newest one since the coordinator's own start
    """

    now_s: float
    tasks: tuple[TaskInfo, ...]
    expected: tuple[str, ...]
    workers: tuple[WorkerProgress, ...]
    steps_done: int
    steps_total: int
    variables: tuple[VariableInfo, ...]
    traffic: tuple[EdgeTraffic, ...]
    results: dict[str, float]
    health: tuple[TaskHealth, ...] = ()
    away: tuple[str, ...] = ()
    left: int = 0
    not_finite: tuple[NotFinite, ...] = ()
    costs: tuple[PartCosts, ...] = ()
    snapshot: SnapshotSize | None = None
    result_steps: dict[str, int] = msgspec.field(default_factory=dict)


class ClusterEvent(msgspec.Struct, frozen=True):
    """Something that happened to the cluster, at `at_s`; `number` counts the events of one start of the coordinator.

    `kind`  joined, restarted, left, stalled, returned, evaluation, checkpoint or log
    `task`  full name of the task that it is about, or empty
    """

    number: int
    at_s: float
    kind: str
    task: str
    text: str


class ClusterEvents(Message, frozen=True):
    """Events, oldest first; those between the requested number and the first of these are not kept any more.

    `start`   id of the coordinator's start, whose events these are
    `newest`  number of the newest event, 0 if there is none
    """

    start: str
    newest: int
    events: tuple[ClusterEvent, ...]


class GetEvents(Request[ClusterEvents], frozen=True):
    """Read the events after number `since` of the coordinator's `start`; all that it keeps if it has started again."""

    is_open = True

    since: int = 0
    start: str = ""


class GetStatus(Request[Status], frozen=True):
    """Read the state of the cluster."""

    is_open = True
