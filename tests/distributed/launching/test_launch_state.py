"""What a launch finds in its folder of snapshots, and what it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from dflow.distributed.coordinator.coordinator_store import SqliteStore
from dflow.distributed.coordinator.durable_records import Change
from dflow.distributed.launching.launch_state import LaunchState
from dflow.distributed.snapshots.resumption import Snapshot, newest_snapshot
from dflow.distributed.training.work_messages import ClaimSteps, TrainingPlan
from dflow.tracing.errors import ConfigError
from tests.distributed.snapshots.recovering_tasks import PS, WORKER, Tasks, claim

STOCK = {"ps": 2}


def run(state: LaunchState) -> None:
    """Have a coordinator of this launch commit a snapshot after 15 steps."""
    tasks = Tasks()
    claim(tasks, 1)
    claim(tasks, 2, 1, 15)
    commit(state, tasks)


def commit(state: LaunchState, tasks: Tasks) -> None:
    tasks.snapshot()
    store = SqliteStore(state.path)
    store.write([Change(*row) for row in tasks.rows.items()])
    store.close()


def found(state: LaunchState) -> tuple[Mapping[str, bytes], Snapshot | None]:
    store = SqliteStore(state.path)
    rows = store.load()
    store.close()
    return rows, newest_snapshot(rows)


def test_the_next_launch_goes_on_from_the_snapshot(tmp_path: Path) -> None:
    first = LaunchState(tmp_path / "new", "train.py", STOCK)
    assert first.news == f"{tmp_path / 'new'} has no complete snapshot; the job starts from the beginning"
    run(first)
    first.close()
    for _ in range(2):  # also if the second is killed before its first snapshot
        later = LaunchState(tmp_path / "new", "other/train.py", {"ps": 3})
        assert later.news == "the job goes on from snapshot 1, with 15 steps done"
        rows, snapshot = found(later)
        assert snapshot is not None
        assert snapshot.tasks == PS
        assert not any(key.startswith("life/") for key in rows)
        later.close()


def test_the_steps_of_a_trainer_count_from_the_beginning_of_its_run(tmp_path: Path) -> None:
    first, tasks = LaunchState(tmp_path, "train.py", STOCK), Tasks()
    tasks.tell(WORKER, TrainingPlan("fit", WORKER, 50, 300))
    tasks.ask(ClaimSteps("fit 50-100", WORKER, 50, 1))
    tasks.ask(ClaimSteps("fit 50-100", WORKER, 50, 2, 1, 12))
    commit(first, tasks)
    first.close()
    for _ in range(2):
        later = LaunchState(tmp_path, "train.py", STOCK)
        assert later.news == "the job goes on from snapshot 1, with 62 steps done"
        later.close()


def test_a_finished_job_is_not_resumed(tmp_path: Path) -> None:
    first = LaunchState(tmp_path, "train.py", STOCK)
    run(first)
    first.finish()
    first.close()
    later = LaunchState(tmp_path, "other.py", {"ps": 1})
    assert later.news == f"the job whose snapshots are in {tmp_path} has finished; this one starts from the beginning"
    assert found(later)[1] is None
    later.close()


def test_two_launches_do_not_share_a_folder(tmp_path: Path) -> None:
    first = LaunchState(tmp_path, "train.py", STOCK)
    with pytest.raises(ConfigError, match=r"is used by another launch[\s\S]*end it, or give another folder"):
        LaunchState(tmp_path, "train.py", STOCK)
    first.close()
    LaunchState(tmp_path, "train.py", STOCK).close()


def test_another_script_and_fewer_tasks_are_refused(tmp_path: Path) -> None:
    first = LaunchState(tmp_path, "train.py", STOCK)
    run(first)
    first.close()
    with pytest.raises(ConfigError, match=r"expected the script train\.py, whose job has not finished, got other\.py"):
        LaunchState(tmp_path, "other.py", STOCK)
    with pytest.raises(ConfigError, match=r"expected at least --stock ps=2, as its snapshot has .*, got ps=1"):
        LaunchState(tmp_path, "train.py", {"ps": 1})
    LaunchState(tmp_path, "train.py", STOCK).close()


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    first = LaunchState(tmp_path, "train.py", STOCK)
    run(first)
    first.close()
    data = first.path.read_bytes()
    place = data.index(b"v0", data.index(b"placed/v0") + 9)  # in a record, which SQLite does not check
    for damaged in (data[: len(data) // 2], data[:place] + b"x" + data[place + 1 :], b"x" * len(data)):
        first.path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"coordinator\.sqlite: expected the records that were written"):
            LaunchState(tmp_path, "train.py", STOCK)
    first.path.write_bytes(data)
    LaunchState(tmp_path, "train.py", STOCK).close()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--snapshots: expected a folder that can be written"):
        LaunchState(tmp_path / "file" / "snapshots", "train.py", STOCK)
