"""A short round of `make chaos` for some programs; the checks find what they are for."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from dflow.distributed.asynchronous.step_claims import RunsCopy
from dflow.distributed.coordinator.coordinator_store import SqliteStore
from dflow.distributed.coordinator.durable_records import DurableRecords
from dflow.distributed.snapshots.resumption import Snapshot
from dflow.distributed.training.run_progress import ProgressCopy
from dflow.lowering.files.array_files import fill_folder
from dflow.tracing.moments import ROLES
from tests.chaos import __main__ as chaos
from tests.chaos.checks import check_committed, check_group, check_lines, silent_workers
from tests.chaos.faulty_run import Outcome, describe, run_round
from tests.chaos.programs import PROGRAMS
from tests.chaos.programs.integer_model import states
from tests.chaos.schedule import COORDINATOR, LAST, Fault, Schedule, drawn_schedule

#: Limit of a round, in s; it takes half a minute on two idle cores.
LIMIT_S = 400.0


@pytest.mark.once
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("program", "seed", "steps"),
    [
        ("bounded", 711, 600),
        pytest.param("model", 9, 200, marks=pytest.mark.long),
        pytest.param("elements", 34, 300, marks=pytest.mark.long),
    ],
)
def test_a_round_with_faults_of_all_roles(tmp_path: Path, program: str, seed: int, steps: int) -> None:
    schedule = drawn_schedule(seed, {program: PROGRAMS[program].hazards})
    outcome = run_round(schedule, PROGRAMS[program], steps, tmp_path, LIMIT_S)
    assert not outcome.violations, describe(schedule, outcome, tmp_path / "output.log")
    assert {fault.task.partition(":")[0] for fault in schedule.faults} == {"ps", "worker", COORDINATOR}
    # On a busy machine the delay of a fault may last until most steps are done; then it is left out.
    assert len(outcome.faults) > len(schedule.faults) / 2


@pytest.mark.once
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("program", "faults"),
    [
        pytest.param(
            "all-reduce", (Fault("terminate", "worker:1", 0.3), Fault("kill", "worker:0", 0.6)), marks=pytest.mark.long
        ),
        ("hybrid", (Fault("kill", "ps:0", 0.5),)),
    ],
)
def test_workers_that_compute_together_go_on_from_their_checkpoint(
    tmp_path: Path, program: str, faults: tuple[Fault, ...]
) -> None:
    schedule = Schedule(program, 2, faults)
    one_server = replace(PROGRAMS[program], servers=min(PROGRAMS[program].servers, 1))
    outcome = run_round(schedule, one_server, 60, tmp_path, LIMIT_S)
    assert not outcome.violations, describe(schedule, outcome, tmp_path / "output.log")
    for worker in ("worker:0", "worker:1"):
        told = [text for _, name, text in outcome.lines if name == worker]
        begins = [text.removeprefix("begins at ") for text in told if text.startswith("begins at")]
        assert len(begins) == 1 + len(faults), begins
        # SIGTERM to worker 1 loses no step.
        ends = [re.sub(r"run 'train' ends after (\d+) of .* has come to worker:1", r"\1", text) for text in told]
        assert program == "hybrid" or begins[1] in ends, told
    assert not any("Terminating process" in text for _, _, text in outcome.lines)  # JAX's own word


_ELSEWHERE = pytest.mark.long
TASKS, IN_SAVES = ("worker:0", "ps:0", COORDINATOR), ("save", "export", "pause")


@pytest.mark.once
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("program", "task", "moment", "count"),
    [
        ("saving", "ps:0", "save", 3),
        *(pytest.param(*one, marks=_ELSEWHERE) for one in itertools.product(["saving"], TASKS, IN_SAVES, [2])),
        pytest.param("counters", "ps:0", "registration", 1, marks=_ELSEWHERE),
        pytest.param("counters", "ps:1", "creation", 1, marks=_ELSEWHERE),
        pytest.param("counters", "ps:0", "capture", 2, marks=_ELSEWHERE),
        pytest.param("counters", "ps:0", "commit", 2, marks=_ELSEWHERE),
        pytest.param("counters", "worker:1", "first call", 1, marks=_ELSEWHERE),
        pytest.param("counters", COORDINATOR, "commit", 2, marks=_ELSEWHERE),
        pytest.param("counters", COORDINATOR, "restore", 1, marks=_ELSEWHERE),
    ],
)
def test_a_process_is_killed_at_a_moment(tmp_path: Path, program: str, task: str, moment: str, count: int) -> None:
    before = (Fault("kill", "ps:1", 0.3),) if moment == "restore" else ()
    schedule = Schedule(program, 2, (*before, Fault("kill", task, 0.0, moment=moment, count=count)))
    outcome = run_round(schedule, PROGRAMS[program], 200, tmp_path, LIMIT_S)
    assert not outcome.violations, describe(schedule, outcome, tmp_path / "output.log")
    assert f"kill {task} at {moment!r} number {count}" in outcome.faults
    if (program, task) == ("saving", "ps:0"):
        assert outcome.moments == {*PROGRAMS[program].hazards.named} == {*ROLES}


def test_a_schedule_follows_from_its_seed() -> None:
    hazards = {name: program.hazards for name, program in PROGRAMS.items()}
    for seed in range(200):
        schedule = drawn_schedule(seed, hazards)
        assert schedule == drawn_schedule(seed, hazards)
        for fault in schedule.faults:
            assert fault.kind in hazards[schedule.program].kinds[fault.task.partition(":")[0]]
            assert fault.at <= LAST
            assert fault.at >= 0 or not fault.task.startswith("ps")
            assert not fault.moment or fault.moment in ROLES


def committed(folder: Path, counts: tuple[int, int], whole: tuple[Any, Any], ledger: dict[str, Any]) -> list[str]:
    """Return the violations of a snapshot of two tasks with these counters and ranges of applied steps."""
    for index in range(2):
        part = folder / f"ps-{index}" / "3"
        part.mkdir(parents=True)
        applied = [{"run": "train", "call": 0, "whole": whole[index], "begun": {}}]
        fill_folder(part, {f"count {index}": np.int32(counts[index])}, {"applied": applied, "rounds": []})
    records = DurableRecords()
    tasks = tuple(f"/job:ps/task:{index}" for index in range(2))
    copies = {"StepClaims": RunsCopy(ledger["runs"]), "RunProgress": ProgressCopy(rounds=ledger["rounds"])}
    encoded = {part: msgspec.msgpack.encode(copy) for part, copy in copies.items()}
    records.put("snapshot/committed", Snapshot(3, tasks, ("count 0", "count 1"), 0.0, (), "blue", encoded))
    store = SqliteStore(folder / "state")
    store.write(records.take_changes())
    store.close()
    return list(check_committed(folder, folder / "state"))


DONE: dict[str, Any] = {"runs": {}, "rounds": {"train": (4, 9)}}


@pytest.mark.parametrize(
    ("counts", "whole", "ledger", "expected"),
    [
        ((4, 4), ([(0, 4)], [(0, 4)]), DONE, []),
        ((4, 5), ([(0, 4)], [(0, 4)]), DONE, ["snapshot 3: 'count 1' is [5] after 4 steps"]),
        (
            (4, 4),
            ([(0, 4)], [(0, 3), (5, 6)]),
            DONE,
            ["snapshot 3: ps:1 has 1 steps [5] that others have not, and lacks 1 steps [3]"],
        ),
        (
            (4, 4),
            ([(0, 3), (2, 3)],) * 2,
            DONE,
            [f"snapshot 3: ps:{index} has applied 1 steps twice" for index in (0, 1)],
        ),
        ((3, 3), ([(0, 3)],) * 2, DONE, ["snapshot 3: the ledger has 4 rounds as done, and the tasks have applied 3"]),
    ],
)
def test_a_snapshot_that_is_no_serial_prefix_is_found(
    tmp_path: Path, counts: Any, whole: Any, ledger: dict[str, Any], expected: list[str]
) -> None:
    assert committed(tmp_path, counts, whole, ledger) == expected


def test_a_part_that_is_missing_is_found(tmp_path: Path) -> None:
    assert committed(tmp_path, (4, 4), ([(0, 4)], [(0, 4)]), DONE) == []
    (tmp_path / "ps-0" / "3" / "dflow.json").unlink()
    [violation] = check_committed(tmp_path, tmp_path / "state")
    assert "snapshot 3 is committed, and cannot be read: " in violation


def test_an_end_of_a_group_without_a_fault_is_found() -> None:
    lives: Any = [SimpleNamespace(task="worker:0", faults=faults) for faults in (["kill"], [], [])]
    losses = ["Traceback (most recent call last):", "  File", "dflow.tracing.errors.TaskLost: worker:1 has left"]
    others = ["Traceback (most recent call last):", "  File", "worker:0: ps:0 is away", "ValueError: Gloo failed"]
    cause = [*others, "", "The above exception was the direct cause of the following exception:", ""]
    assert list(check_group(lives[:2], [("worker:0", text) for text in (*cause, *losses)])) == []
    assert list(check_group(lives, [("worker:0", text) for text in (*losses, *others)])) == [
        "worker:0 was started 3 times for 1 faults",
        "worker:0 ended by ValueError: Gloo failed",
    ]


def test_a_wrong_checkpoint_is_found(tmp_path: Path) -> None:
    expected = list(itertools.islice(states(), 5))
    for step, state in ((1, expected[2]), (3, expected[3])):
        folder = tmp_path / f"checkpoints/step_{step}"
        folder.mkdir(parents=True)
        fill_folder(folder, state, {})
    assert list(PROGRAMS["all-reduce"].check(5, {}, tmp_path)) == [
        "checkpoints: expected one of step 4, got those of [1, 3]",
        "the checkpoint of step 3 has other values of ['w', 'table'] than an undisturbed run",
    ]


def test_a_traceback_is_found() -> None:
    lines = [("ps:0", "Traceback (most recent call last):"), (COORDINATOR, "Traceback (most recent call last):")]
    assert list(check_lines(lines, [])) == ["ps:0 printed a traceback", "coordinator printed a traceback"]
    assert list(check_lines(lines, [COORDINATOR])) == ["ps:0 printed a traceback"]


@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        ([("worker:0", ["pause"])], {"worker:0"}),
        ([("worker:0", ["kill"]), ("worker:1", ["hold"])], set()),
        ([("worker:0", []), (COORDINATOR, ["cut"])], {"worker:0"}),
    ],
)
def test_only_a_worker_with_a_fault_may_have_been_silent(faults: Any, expected: set[str]) -> None:
    text = "the coordinator did not take this task back: worker:0 left at 82.1 s: no heartbeat for 10.0 s"
    lives: Any = [SimpleNamespace(task=task, faults=kinds) for task, kinds in faults]
    assert silent_workers(lives, [("worker:0", text), ("worker:1", "other")]) == expected


def test_a_failed_round_prints_its_seed_its_faults_and_its_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(schedule: Schedule, program: object, steps: int, folder: Path, limit_s: float) -> Outcome:
        lines = [(1.0, "ps:0", "some line")]
        return Outcome(["counters: expected 5"], faults=["1.00 s: kill ps:0"], lines=lines)

    monkeypatch.setattr(chaos, "run_round", run)
    assert chaos.main(["--minutes", "0", "--seed", "7"]) == 1
    told = capsys.readouterr().out
    for text in ("counters: expected 5", "1.00 s: kill ps:0", "[ps:0] some line", "--minutes 0 --seed 7"):
        assert text in told
