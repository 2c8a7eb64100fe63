"""Messages for snapshots of the cluster's state, and for the return to one; each task writes its own part."""

from __future__ import annotations

from dflow.distributed.wire.messages.basic import Ok
from dflow.distributed.wire.messages.message import Message, Notice, Request


class CaptureState(Notice, frozen=True):
    """To a task: capture all state that it holds for the snapshot `number`, report that, and then write it.

    committed  number of the newest complete snapshot, 0 for none; the parts of all others can be removed
    cluster    id of the cluster, written into the part
    """

    number: int
    committed: int = 0
    cluster: str = ""


class StateCaptured(Notice, frozen=True):
    """The task has captured its part of the snapshot `number`: the variables, queues and accumulators `keys`."""

    speaker = "task"

    task: str
    number: int
    keys: tuple[str, ...] = ()


class StateWritten(Notice, frozen=True):
    """The task's part of the snapshot `number` is on its disk; or could not be captured or written, for `failure`.

    Of arrays of `full_bytes` bytes it wrote `written_bytes`; the rest is in files of an earlier part.
    """

    speaker = "task"

    task: str
    number: int
    failure: str = ""
    written_bytes: int = 0
    full_bytes: int = 0


class SnapshotCommitted(Notice, frozen=True):
    """To a task: the snapshot `number` is complete, so earlier and abandoned ones can be removed.

    Sent to all tasks: the snapshot has all state that was made before the notice of the snapshot before it.
    """

    number: int


class LoadState(Notice, frozen=True):
    """To a task: read the snapshot `number` for the return `epoch` of all tasks; with `is_set`, set the state read.

    cluster    id of the cluster that made it
    forgotten  names in it whose state has been freed since, and is not made again
    reopens    whether closed queues are open again, since the processes that closed them begin again
    unsaved    names that are not in it, whose state is freed, since it was made later
    without    tasks that have no part of it
    """

    number: int
    epoch: int
    is_set: bool = False
    cluster: str = ""
    forgotten: tuple[str, ...] = ()
    reopens: bool = False
    unsaved: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


class StateLoaded(Notice, frozen=True):
    """The task has read its part of a snapshot, or with `is_set` has set it; or could not, for `failure`."""

    speaker = "task"

    task: str
    epoch: int
    is_set: bool = False
    failure: str = ""


class Saved(Message, frozen=True):
    """Whether a snapshot has the change of `SaveChanges`; also true if no snapshots are made."""

    is_saved: bool


class SaveChanges(Request[Saved], frozen=True):
    """The task has made a change that no step repeats; answered when a snapshot has it, or after `wait_s`.

    Refused as TaskLost if all tasks return to an earlier snapshot.
    """

    speaker = "task"

    task: str
    wait_s: float


class AnnounceLeave(Request[Ok], frozen=True):
    """The task is going to leave; answered when a snapshot has its state, after which no step begins until it is back.

    Answered immediately if the task holds no state. Refused as TaskLost if no such snapshot can be made.
    """

    speaker = "task"

    task: str


class StateRestored(Notice, frozen=True):
    """To a task: all tasks have returned to a snapshot for the `epoch`-th time; their processes hold its state.

    `undone` of these returns have undone steps; the others were to a snapshot after which no step had begun.
    """

    epoch: int
    undone: int = 0


class Recovered(Message, frozen=True):
    """No state is lost or being restored; the numbers are those of `StateRestored`."""

    epoch: int
    undone: int = 0


class AwaitRecovery(Request[Recovered], frozen=True):
    """Wait until no state is lost, after an error of a step. Refused as TaskLost if state is not restored in time.

    Also refused if no snapshots are made.

    `is_joining`  the task has just joined: wait only while state is being restored
    """

    speaker = "task"

    task: str
    is_joining: bool = False
