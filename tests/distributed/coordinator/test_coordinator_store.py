"""Stores of a coordinator's state: the promises of both kinds, and a file's content after a crash."""

from __future__ import annotations

import itertools
import shutil
import sqlite3
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflow.distributed.client.coordinator_client import CoordinatorClient
from dflow.distributed.coordinator.coordinator_state import CoordinatorState
from dflow.distributed.coordinator.coordinator_store import MemoryStore, SqliteStore
from dflow.distributed.coordinator.durable_records import Change, DurableRecords, apply_changes
from dflow.distributed.coordinator_role import make_coordinator
from dflow.distributed.transport.memory import MemoryNetwork
from dflow.distributed.wire.messages.status import GetStatus, Report, WorkerProgress
from dflow.tracing.errors import ConfigError, DflowError, InternalError
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
    "statement",
    [
        "UPDATE records SET value = x'35' WHERE key = 'c'",
        "UPDATE records SET key = 'e' WHERE key = 'c'",
    ],
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
