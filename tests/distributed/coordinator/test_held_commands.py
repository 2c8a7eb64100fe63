"""The commands that wait until the records behind them are written."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dflow.distributed.coordinator.coordinator_events import SendReply
from dflow.distributed.coordinator.durable_records import DurableRecords
from dflow.distributed.coordinator.elections import Elections
from dflow.distributed.coordinator_role import make_coordinator_state
from dflow.distributed.snapshots.resumption import EPOCH, SNAPSHOT
from dflow.distributed.snapshots.snapshot_messages import CaptureState, Saved, SnapshotCommitted
from dflow.distributed.training.plan_messages import TrainingPlan
from dflow.distributed.training.run_progress import RunProgress
from dflow.distributed.wire.messages.coordination import Decided
from dflow.distributed.wire.messages.message import Message

REPLY = SendReply(1, Decided("value"))


def planned(records: DurableRecords) -> None:
    RunProgress(records).note_plan(TrainingPlan("fit", "/job:worker/task:0", 0, 10))


def elected(records: DurableRecords) -> None:
    Elections(records).elect("evaluation", "/job:worker/task:0", 1)


@pytest.mark.parametrize(("change", "expected"), [(planned, False), (elected, True)])
def test_a_reply_waits_for_what_may_not_be_lost(change: Callable[[DurableRecords], None], expected: bool) -> None:
    records = DurableRecords()
    change(records)
    state = make_coordinator_state({})
    assert state.waits(REPLY, {one.key for one in records.take_changes()}) is expected


@pytest.mark.parametrize("message", [SnapshotCommitted(1), CaptureState(1, 0, ""), Saved(True)], ids=str)
def test_a_message_that_tells_of_a_record_waits_for_it(message: Message) -> None:
    state = make_coordinator_state({})
    tells = state.waits(SendReply(1, message), {SNAPSHOT}), state.waits(SendReply(1, message), {EPOCH})
    assert tells == (not isinstance(message, CaptureState), isinstance(message, CaptureState))
    assert not state.waits(REPLY, {SNAPSHOT, EPOCH})
