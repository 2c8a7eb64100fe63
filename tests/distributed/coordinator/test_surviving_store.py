"""A coordinator whose disk takes no writes for a while: it goes on, commits no snapshot, and writes all when it can."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

from dflow.distributed.client.coordinator_client import CoordinatorClient
from dflow.distributed.coordinator.coordinator_events import SendReply
from dflow.distributed.coordinator.coordinator_store import MemoryStore, SqliteStore
from dflow.distributed.coordinator.decisions import Decisions
from dflow.distributed.coordinator.durable_records import Change, DurableRecords
from dflow.distributed.coordinator.surviving_store import RETRY_S, SurvivingStore
from dflow.distributed.coordinator_role import make_coordinator, make_coordinator_state
from dflow.distributed.snapshots.cluster_snapshots import ClusterSnapshots
from dflow.distributed.snapshots.resumption import EPOCH, SNAPSHOT
from dflow.distributed.snapshots.snapshot_messages import CaptureState, Saved, SnapshotCommitted
from dflow.distributed.training.run_progress import RunProgress
from dflow.distributed.training.work_messages import ClaimSteps, TrainingPlan
from dflow.distributed.transport.memory import MemoryNetwork
from dflow.distributed.wire.messages.coordination import Decided, ElectOnce
from dflow.distributed.wire.messages.message import Message
from dflow.distributed.wire.messages.status import Report
from dflow.tracing.errors import DeadlineExceeded
from tests.distributed.snapshots.recovering_tasks import PS, WORKER, Tasks


class Disk(MemoryStore):
    """A store whose disk may be full; `tries` counts its writes."""

    def __init__(self) -> None:
        super().__init__()
        self.is_full, self.tries = False, 0

    def write(self, changes: Iterable[Change]) -> None:
        self.tries += 1
        if self.is_full:
            raise OSError("the coordinator's state could not be written: no space left")
        super().write(changes)


def test_changes_that_cannot_be_written_are_written_later_in_their_order(caplog: pytest.LogCaptureFixture) -> None:
    disk = Disk()
    store = SurvivingStore(disk)
    assert store.write([Change("a", b"1"), Change("b", b"1")], 0.0)
    disk.is_full = True
    assert not store.write([Change("a", b"2"), Change("c", b"2")], 1.0)
    assert not store.write([Change("a", b"3"), Change("b", None)], 1.1)
    assert disk.tries == 2, "not at each event"
    assert store.load() == {"a": b"3", "c": b"2"}
    assert disk.load() == {"a": b"1", "b": b"1"}
    assert not store.write([], 1.0 + RETRY_S)
    disk.is_full = False
    assert not store.write([], 1.1 + RETRY_S)
    assert store.write([], 1.0 + 2 * RETRY_S)
    assert disk.load() == store.load() == {"a": b"3", "c": b"2"}
    first, second = caplog.messages
    assert first.startswith("the coordinator's state could not be written: no space left; steps go on, no snapshot is")
    assert second == "the coordinator's state is written again, after 2 s"


def test_a_folder_that_was_removed_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "snapshots"
    folder.mkdir()
    store = SurvivingStore(SqliteStore(folder / "state"))
    store.write([Change("a", b"1"), Change("b", b"1")], 0.0)
    shutil.rmtree(folder)
    assert not store.write([Change("a", b"2")], 1.0)
    assert store.write([Change("b", None)], 1.0 + RETRY_S)
    store.close()
    again = SqliteStore(folder / "state")
    assert again.load() == {"a": b"2"}
    again.close()


def test_a_coordinator_goes_on_and_a_later_one_has_all() -> None:
    network, disk, faults = MemoryNetwork(), Disk(), list[str]()
    coordinator = make_coordinator(network, "", {}, store=disk, tick_s=0.01, on_fault=faults.append)
    client = CoordinatorClient(network, coordinator.address, name=WORKER)
    client.join(WORKER, "here")
    disk.is_full = True
    client.ask(Report("accuracy", 1.0))
    assert client.ask(ClaimSteps("run", WORKER, 60)).count
    with pytest.raises(DeadlineExceeded):  # the next coordinator might choose another task
        client.ask(ElectOnce("what", WORKER), 0.05)
    assert not [key for key in disk.load() if key.startswith(("result/", "office/"))]
    disk.is_full = False
    assert client.ask(ElectOnce("what", WORKER)).elected
    assert coordinator._store.load() == disk.load()
    client.close()
    coordinator.close()
    assert not faults
    again = make_coordinator(network, "", {}, store=disk, tick_s=None)
    assert again.status().results == {"accuracy": 1.0}
    again.close()


def test_no_snapshot_is_made_while_the_records_are_not_written() -> None:
    tasks = Tasks()
    tasks.snapshot()
    tasks.tick(6.0)
    tasks.state.core.is_durable = False
    tasks.settle()
    tasks.tick(6.0)
    tasks.settle()
    assert "the coordinator's state cannot be written" in "".join(tasks.log)
    assert tasks.state.core.part(ClusterSnapshots).committed.number == 1
    assert tasks.gate == 0, "steps go on"
    for _ in range(20):
        tasks.tick(6.0)
        tasks.settle()
    assert len([line for line in tasks.log if "is abandoned" in line]) == 1
    assert all(1 in tasks.disk[task] for task in PS)
    tasks.state.core.is_durable = True
    tasks.tick(6.0)
    tasks.settle()
    assert tasks.state.core.part(ClusterSnapshots).committed.number > 1


def test_a_reply_waits_for_records_that_may_not_be_lost() -> None:
    for change, is_held in (
        (lambda records: RunProgress(records).note_plan(TrainingPlan("fit", WORKER, 0, 10)), False),
        (lambda records: Decisions(records).elect("evaluation", WORKER, 1), True),
    ):
        records = DurableRecords()
        change(records)
        keys = {one.key for one in records.take_changes()}
        assert make_coordinator_state({}).waits(SendReply(1, Decided("value")), keys) is is_held


@pytest.mark.parametrize("message", [SnapshotCommitted(1), CaptureState(1, 0, ""), Saved(True)], ids=str)
def test_a_message_that_tells_of_a_record_waits_for_it(message: Message) -> None:
    state = make_coordinator_state({})
    tells = state.waits(SendReply(1, message), {SNAPSHOT}), state.waits(SendReply(1, message), {EPOCH})
    assert tells == (not isinstance(message, CaptureState), isinstance(message, CaptureState))
    assert not state.waits(SendReply(1, Decided("value")), {SNAPSHOT, EPOCH})
