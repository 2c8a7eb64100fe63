"""Every message has its handler, in the tables of the coordinator or of a task."""

from __future__ import annotations

import pytest

from dflow.distributed.coordinator import coordinator_state
from dflow.distributed.coordinator_role import COORDINATOR_PARTS
from dflow.distributed.snapshots.pause_messages import HoldSteps
from dflow.distributed.snapshots.snapshot_messages import CaptureState, LoadState, SnapshotCommitted, StateRestored
from dflow.distributed.task.task_server import TaskServer
from dflow.distributed.task_role import TASK_PARTS
from dflow.distributed.training.work_messages import RunRefused
from dflow.distributed.wire.codec import MESSAGES
from dflow.distributed.wire.handler_table import HandlerTable
from dflow.distributed.wire.messages.message import Message, Notice, Request
from dflow.distributed.wire.messages.roster import Announcement, Roster, RosterChange
from dflow.distributed.wire.messages.status import GetStatus
from dflow.tracing.errors import InternalError

#: Handled by the coordinator's client.
OF_CLIENTS = {
    Announcement,
    CaptureState,
    HoldSteps,
    LoadState,
    RosterChange,
    RunRefused,
    SnapshotCommitted,
    StateRestored,
}


def handled(table: str) -> list[str]:
    """Return the messages in the tables `requests` or `notices` of the coordinator and of a task."""
    parts = [part for part in (TaskServer, *TASK_PARTS, *COORDINATOR_PARTS) if table in vars(part)]
    tables = [getattr(coordinator_state, table.upper()), *(getattr(part, table) for part in parts)]
    return [kind.__name__ for one in tables for kind in one.handlers]


def of(kind: type[Message]) -> list[str]:
    return sorted(message.__name__ for message in MESSAGES if issubclass(message, kind))


def test_each_request_has_one_handler() -> None:
    assert sorted(handled("requests")) == of(Request)


def test_each_notice_is_handled() -> None:
    assert sorted({*handled("notices"), *(kind.__name__ for kind in OF_CLIENTS)}) == of(Notice)


def test_a_second_handler_of_a_message_is_refused() -> None:
    table: HandlerTable[None, None, None] = HandlerTable()
    table.handles(GetStatus)(lambda role, message, arrival: None)
    with pytest.raises(InternalError, match="GetStatus has two handlers in one table: expected one"):
        table.handles(GetStatus)(lambda role, message, arrival: None)
    assert table.get(Roster) is None
