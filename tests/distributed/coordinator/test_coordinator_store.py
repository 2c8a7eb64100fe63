"""The coordinator's file: crashes, damage, a full disk, writes that were lost, and a folder that is removed."""

from __future__ import annotations

import itertools
import shutil
import sqlite3
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflow.distributed.client.coordinator_client import CoordinatorClient
from dflow.distributed.client.coordinator_session import SessionSettings
from dflow.distributed.coordinator.coordinator_events import Asked, Log, Persist, SendReply, Started
from dflow.distributed.coordinator.coordinator_part import CoordinatorCore, CoordinatorSettings
from dflow.distributed.coordinator.coordinator_state import CoordinatorState
from dflow.distributed.coordinator.coordinator_store import MemoryStore, SqliteStore
from dflow.distributed.coordinator.decisions import Decisions
from dflow.distributed.coordinator.durable_records import Change, DurableRecords, apply_changes
from dflow.distributed.coordinator.state_marks import StateMarks
from dflow.distributed.coordinator.surviving_store import RETRY_S, SurvivingStore
from dflow.distributed.coordinator_role import make_coordinator, make_coordinator_state
from dflow.distributed.snapshots.cluster_snapshots import ClusterSnapshots
from dflow.distributed.snapshots.resumption import EPOCH, SNAPSHOT
from dflow.distributed.snapshots.snapshot_messages import CaptureState, Saved, SnapshotCommitted
from dflow.distributed.training.run_progress import RunProgress
from dflow.distributed.training.work_messages import ClaimSteps, TrainingPlan
from dflow.distributed.transport.memory import MemoryNetwork
from dflow.distributed.wire.messages.basic import Failure
from dflow.distributed.wire.messages.coordination import Decided, ElectOnce
from dflow.distributed.wire.messages.message import Mark, Message
from dflow.distributed.wire.messages.placement import PlaceVariable
from dflow.distributed.wire.messages.roster import Join
from dflow.distributed.wire.messages.status import GetStatus, Report, WorkerProgress
from dflow.tracing.errors import ConfigError, DeadlineExceeded, DflowError, InternalError
from tests.distributed.snapshots.recovering_tasks import PS, WORKER, Tasks
from tests.effort import examples

WRITES: list[list[Change]] = [
    [Change("a", b"1"), Change("b", b"2")],
    [Change("a", b"3"), Change("b", None), Change("c", b"4")],
    [Change("c", None), Change("unknown", None)],
    [Change("b", b"5"), Change("a", None), Change("c", b"6"), Change("d", b"")],
]


def states() -> list[dict[str, bytes]]:
    """States after each number of complete writes."""
    rows: dict[str, bytes] = {}
    found = [dict(rows)]
    for changes in WRITES:
        apply_changes(rows, changes)
        found.append(dict(rows))
    return found


def test_a_crash_at_any_moment_leaves_whole_writes_and_all_that_had_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are copied before each statement, with the content that a kill at that moment would leave."""
    copies: list[tuple[int, Path]] = []
    returned = 0
    numbers = itertools.count()

    def copy(statement: str) -> None:
        place = tmp_path / f"copy{next(numbers)}"
        place.mkdir()
        for file in tmp_path.glob("state*"):
            shutil.copy(file, place)
        copies.append((returned, place / "state"))

    class Traced(sqlite3.Connection):
        def execute(self, sql: str, *rest: object) -> sqlite3.Cursor:
            copy(sql)
            return super().execute(sql, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(sqlite3, "connect", Traced)
    store = SqliteStore(tmp_path / "state")
    copies.clear()
    for changes in WRITES:
        store.write(changes)
        returned += 1
    copy("at the end")
    monkeypatch.undo()
    store.close()
    assert len(copies) > 2 * len(WRITES) + sum(map(len, WRITES))
    for number, path in copies:
        survivor = SqliteStore(path)
        assert survivor.load() == states()[number]
        survivor.close()


#: Fills several pages.
LARGE = b"\x05" * 9000


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Mapping[str, bytes]]:
    """The files of a store that was closed, and of one that was killed, by name."""
    path = tmp_path_factory.mktemp("whole") / "state"
    store = SqliteStore(path)
    for changes in WRITES:
        store.write([*changes, Change("large", LARGE)])
    killed = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    store.close()
    return {"state": {"state": path.read_bytes()}, "state-wal": killed}


@settings(max_examples=examples(150), deadline=None)
@given(where=st.integers(0, 2**20), other=st.integers(1, 255), name=st.sampled_from(["state", "state-wal"]))
def test_a_file_in_which_a_byte_changed_is_refused_or_holds_the_first_whole_writes(
    where: int,
    other: int,
    name: str,
    files: Mapping[str, Mapping[str, bytes]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    for each, whole in files[name].items():
        content = bytearray(whole)
        if each == name:
            content[where % len(content)] ^= other
        (folder / each).write_bytes(content)
    try:
        survivor = SqliteStore(folder / "state")
    except ConfigError:
        return
    rows = dict(survivor.load())
    survivor.close()
    assert rows.pop("large", LARGE) == LARGE
    assert rows in (states()[-1:] if name == "state" else states())


@pytest.mark.parametrize(
    "statement", ["UPDATE records SET value = x'35' WHERE key = 'c'", "UPDATE records SET key = 'e' WHERE key = 'c'"]
)
def test_records_changed_by_other_means_are_refused(tmp_path: Path, statement: str) -> None:
    store = SqliteStore(tmp_path / "state")
    for changes in WRITES:
        store.write(changes)
    store._database.execute(statement)
    store.close()
    with pytest.raises(ConfigError, match=r"state: expected the records that were written, got: records with other ch"):
        SqliteStore(tmp_path / "state")


def test_a_write_is_on_the_disk_when_it_has_returned(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "state")
    assert store._database.execute("PRAGMA synchronous").fetchone() == (2,)
    assert store._database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    store.close()


def test_a_write_that_the_disk_refuses_changes_nothing_and_the_next_one_is_taken(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "state")
    store.write(WRITES[0])
    store._database.execute("PRAGMA max_page_count = 2")
    for _ in range(2):
        with pytest.raises(OSError, match=r"could not be written to .*state: database or disk is full"):
            store.write([Change("a", b"7"), Change("b", None), Change("large", LARGE)])
    store.write(WRITES[1])
    store.close()
    again = SqliteStore(tmp_path / "state")
    assert again.load() == states()[2]
    again.close()


@pytest.mark.parametrize("harm", ["gone", "replaced"])
def test_a_file_that_is_gone_is_noticed_and_made_again(tmp_path: Path, harm: str) -> None:
    store = SqliteStore(tmp_path / "folder" / "state") if (tmp_path / "folder").mkdir() is None else None
    assert store is not None
    store.write(WRITES[0])
    shutil.rmtree(tmp_path / "folder")
    if harm == "replaced":
        (tmp_path / "folder").mkdir()
        other = SqliteStore(tmp_path / "folder" / "state")
        other.write([Change("other", b"1")])
        other.close()
    with pytest.raises(OSError, match="was removed, or replaced by another file"):
        store.write(WRITES[1])
    store.renew(states()[2])
    store.write(WRITES[2])
    store.close()
    again = SqliteStore(tmp_path / "folder" / "state")
    assert again.load() == states()[3]
    again.close()


def test_a_file_that_another_coordinator_has_open_is_refused(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "state")
    with pytest.raises(ConfigError, match=r"cannot be kept in .*state: database is locked; end the other coordinator"):
        SqliteStore(tmp_path / "state")
    store.close()
    SqliteStore(tmp_path / "state").close()


def test_a_file_that_is_something_else_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    text, other = tmp_path / "text", tmp_path / "other"
    text.write_text("no database " * 100)
    with pytest.raises(ConfigError, match="file is not a database"):
        SqliteStore(text)
    assert text.read_text() == "no database " * 100
    with sqlite3.connect(other) as database:
        database.execute("CREATE TABLE things (name TEXT)")
    database.close()
    with pytest.raises(ConfigError, match="no coordinator's state of this version of dflow: its format is 0, and 4"):
        SqliteStore(other)
    with pytest.raises(ConfigError, match="unable to open database file"):
        SqliteStore(tmp_path / "no such folder" / "state")


def test_a_record_of_another_form_is_named() -> None:
    with pytest.raises(InternalError, match="record 'progress/x' is not a WorkerProgress of this version of dflow"):
        list(DurableRecords({"progress/x": b"\x93"}).load("progress/", WorkerProgress))


def test_a_coordinator_that_fails_ends_with_the_reason_and_writes_nothing_of_what_it_was_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network, store, faults = MemoryNetwork(), MemoryStore(), list[str]()
    coordinator = make_coordinator(network, "", {}, store=store, tick_s=None, on_fault=faults.append)
    client = CoordinatorClient(network, coordinator.address, name="/job:worker/task:0")
    client.join("/job:worker/task:0", "here")
    client.ask(Report("accuracy", 1.0))
    before = store.load()
    monkeypatch.setattr(CoordinatorState, "status", lambda state, at_s: 1 // 0)
    with pytest.raises(DflowError):
        client.ask(GetStatus(), 1.0)
    coordinator.tick()
    assert faults == ["it has failed: ZeroDivisionError: integer division or modulo by zero"]
    assert store.load() == before
    coordinator.close()
    client.close()


def test_the_time_of_a_coordinator_goes_on_after_a_restart(tmp_path: Path) -> None:
    """Its deadlines hold although the wall clock is set, and the clock of another process begins anywhere."""
    network, path = MemoryNetwork(), tmp_path / "state"
    now_s = 1_000_000.0
    for began_s, before_s in ((1_000_000.0, 0.0), (5.0, 60.0), (-3e6, 120.0)):
        now_s = began_s
        coordinator = make_coordinator(
            network,
            "",
            {},
            store=SqliteStore(path),
            tick_s=None,
            clock=lambda: now_s,  # noqa: B023
        )
        assert coordinator.status().now_s == before_s
        now_s += 60.0
        client = CoordinatorClient(network, coordinator.address, name="/job:worker/task:0")
        client.join("/job:worker/task:0", "here")
        client.close()
        now_s += 5.0
        coordinator.close()


# A coordinator whose disk takes no writes for a while: it goes on, commits no snapshot, and writes all when it can.


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
        (lambda core: RunProgress(core).note_plan(TrainingPlan("fit", WORKER, 0, 10)), False),
        (lambda core: Decisions(core).elect("evaluation", WORKER, 1), True),
    ):
        records = DurableRecords()
        change(CoordinatorCore(CoordinatorSettings(), {}, records))
        keys = {one.key for one in records.take_changes()}
        assert make_coordinator_state({}).waits(SendReply(1, Decided("value")), keys) is is_held


@pytest.mark.parametrize("message", [SnapshotCommitted(1), CaptureState(1, 0, ""), Saved(True)], ids=str)
def test_a_message_that_tells_of_a_record_waits_for_it(message: Message) -> None:
    state = make_coordinator_state({})
    tells = state.waits(SendReply(1, message), {SNAPSHOT}), state.waits(SendReply(1, message), {EPOCH})
    assert tells == (not isinstance(message, CaptureState), isinstance(message, CaptureState))
    assert not state.waits(SendReply(1, Decided("value")), {SNAPSHOT, EPOCH})


# A coordinator whose state lost its newest changes is detected by the tasks that saw them.


WORKER0, WORKER1 = "/job:worker/task:0", "/job:worker/task:1"
SOON_S = 20.0


@settings(max_examples=examples(200))
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=5))
def test_a_mark_is_missing_exactly_when_a_write_up_to_it_was_lost(lives: list[tuple[int, int]]) -> None:
    """Each life of the coordinator writes `more` times, and then loses its newest writes."""
    writes: list[tuple[Change, ...]] = []
    given_marks: list[tuple[Mark, int]] = []
    for number, (more, lost) in enumerate(lives):
        rows: dict[str, bytes] = {}
        for write in writes:
            apply_changes(rows, write)
        records = DurableRecords(rows)
        marks = StateMarks(records)
        # Of the marks from earlier lives, exactly those of the remaining writes are known.
        marks.started(f"start {number}")
        for place in range(1 + more):
            if place:
                records.put("something", Mark("", place))
            marks.written()
            writes.append(records.take_changes())
            given_marks.append((marks.newest, len(writes)))
        for mark, size in given_marks:
            assert bool(marks.missing(mark)) == (size > len(writes)), mark
        kept = max(len(writes) - lost, 0)
        del writes[kept:]
        given_marks = [(mark, size if size <= kept else 1_000_000) for mark, size in given_marks]


def test_a_coordinator_that_lost_its_newest_write_takes_back_only_tasks_that_saw_nothing_of_it() -> None:
    writes: list[tuple[Change, ...]] = []

    def handled(state: CoordinatorState, event: Started | Asked) -> tuple[Any, list[str]]:
        """Return the answer to a request, and what is logged."""
        commands = state.handle(event)
        writes.extend(command.changes for command in commands if isinstance(command, Persist))
        answers = [command.message for command in commands if isinstance(command, SendReply)]
        return [*answers, None][0], [command.text for command in commands if isinstance(command, Log)]

    first = make_coordinator_state({"ps": 1, "worker": 2})
    handled(first, Started(0.0, "blue"))
    handled(first, Asked(0.0, 1, 1, Join(WORKER0, "h:1", "life 1")))
    roster, _ = handled(first, Asked(0.0, 2, 2, Join(WORKER1, "h:1", "life 2")))
    placed, _ = handled(first, Asked(0.0, 1, 3, PlaceVariable("w", "float32", (), 4, "ps")))
    rows: dict[str, bytes] = {}
    for changes in writes[:-1]:
        apply_changes(rows, changes)
    second = make_coordinator_state({"ps": 1, "worker": 2}, rows=rows)
    handled(second, Started(0.0, "start 2"))
    for peer, is_logged in ((11, True), (12, False)):
        refusal, log = handled(second, Asked(0.0, peer, 1, Join(WORKER0, "h:1", "life 1", "blue", 1, placed.mark)))
        assert log == ([refusal.text] if is_logged else []), "logged once"
        assert refusal.text == (
            "the coordinator's state is older than what worker:0 has seen of it: of the changes up to 4 it has those "
            "up to 3; the file of its state was damaged or replaced, so end the run and start it again with a new one"
        )
    back, _ = handled(second, Asked(0.0, 13, 1, Join(WORKER1, "h:1", "life 2", "blue", 2, roster.mark)))
    assert not isinstance(back, Failure)


def test_a_flipped_bit_in_the_write_ahead_log_is_found_out(tmp_path: Path) -> None:
    network, lost, gone = MemoryNetwork(), list[str](), threading.Event()
    first = make_coordinator(network, "", {"ps": 1, "worker": 1}, store=SqliteStore(tmp_path / "state"), tick_s=None)
    client = CoordinatorClient(network, first.address, name=WORKER0, settings=SessionSettings(longest_pause_s=0.05))
    client.join(WORKER0, "h:1")
    client.session.call_on_lost(lambda reason: (lost.append(reason), gone.set())[1])
    client.ask(PlaceVariable("w", "float32", (), 4, "ps"))
    (tmp_path / "damaged").mkdir()
    for file in tmp_path.glob("state*"):
        shutil.copy(file, tmp_path / "damaged")
    log = tmp_path / "damaged/state-wal"
    data = bytearray(log.read_bytes())
    data[-100] ^= 1
    log.write_bytes(data)
    first.close()
    store = SqliteStore(tmp_path / "damaged/state")
    second = make_coordinator(network, first.address, {"ps": 1, "worker": 1}, store=store, tick_s=None)
    assert gone.wait(SOON_S)
    assert "the coordinator's state is older than what worker:0 has seen of it: of the changes up to" in lost[0]
    client.close()
    second.close()
