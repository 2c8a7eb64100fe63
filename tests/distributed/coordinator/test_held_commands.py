"""The commands that wait until the records behind them are written."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dflow.distributed.coordinator.coordinator_events import SendReply
from dflow.distributed.coordinator.durable_records import DurableRecords
from dflow.distributed.coordinator.elections import Elections
from dflow.distributed.coordinator.held_commands import waits
from dflow.distributed.training.plan_messages import TrainingPlan
from dflow.distributed.training.training_plans import TrainingPlans
from dflow.distributed.wire.messages.coordination import Decided

REPLY = SendReply(1, Decided("value"))


def planned(records: DurableRecords) -> None:
    TrainingPlans(records).note(TrainingPlan("fit", "/job:worker/task:0", 0, 10))


def elected(records: DurableRecords) -> None:
    Elections(records).elect("evaluation", "/job:worker/task:0", 1)


@pytest.mark.parametrize(("change", "expected"), [(planned, False), (elected, True)])
def test_a_reply_waits_for_what_may_not_be_lost(change: Callable[[DurableRecords], None], expected: bool) -> None:
    records = DurableRecords()
    change(records)
    assert waits(REPLY, {one.key for one in records.take_changes()}) is expected
