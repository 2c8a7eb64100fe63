"""The commands that wait until the records behind them are written, while the coordinator's disk takes no writes.

Why: a record is lost if the coordinator's process ends before the record is written, and tasks may know of it by then.
A record of finished steps may be lost: the steps are claimed again, and tasks apply none twice. A record of the task of
a variable, a member, an election or a number may not be lost, since the coordinator's next process would decide
otherwise. Invariant: while such a record is not written, tasks get no message, as if the coordinator were away; later
they get all messages, in order.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from dflow.distributed.coordinator.coordinator_events import Broadcast, Command, SendReply
from dflow.distributed.coordinator.durable_records import SHELL
from dflow.distributed.snapshots.resumption import EPOCH, SNAPSHOT
from dflow.distributed.wire.messages.snapshots import CaptureState, LoadState, Saved, SnapshotCommitted

#: Beginnings of the keys of records whose newest changes may be lost.
_MAY_BE_LOST = (
    *("run/", "worker/", "progress/", "training plan/", "not finite/", "result/", "revision"),
    *(SHELL, EPOCH, SNAPSHOT),
)
#: Messages that tell of a record, and its key.
_TELL = {CaptureState: EPOCH, LoadState: EPOCH, SnapshotCommitted: SNAPSHOT, Saved: SNAPSHOT}


def waits(command: Command, unwritten: Collection[str]) -> bool:
    """Whether a command waits until the records of these keys are written."""
    if not isinstance(command, Broadcast | SendReply):
        return False
    kind: Any = type(command.message)
    if _TELL.get(kind) in unwritten:
        return True
    return any(not key.startswith(_MAY_BE_LOST) for key in unwritten)
