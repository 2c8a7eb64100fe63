"""The launcher from the command line, with scripts that use no JAX."""

import math
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

import dflow
from dflow.distributed.launching import launcher
from dflow.distributed.launching.launch_plan import LaunchPlan
from dflow.distributed.launching.launcher import LONGEST_CAUSE, _Launch, _with_ends, cause_of
from dflow.distributed.process.stop_signal import StopSignal
from dflow.distributed.wire.messages.roster import TaskInfo
from dflow.distributed.wire.messages.status import NotFinite, Status
from dflow.tracing.accepted_faults import accepted
from dflow.tracing.errors import TaskLost, VariableError
from tests.distributed.processes import CONNECT, Spawned, exists, wait_for_end

WAIT = (
    CONNECT
    + """
print("pid", os.getpid())
threading.Event().wait()
"""
)


def launch(
    tmp_path: Path, script: str, workers: int = 1, *arguments: str, ps: int = 0, options: Sequence[str] = ()
) -> Spawned:
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    words = ("--ps", str(ps), "--workers", str(workers), "--logs", str(tmp_path / "logs"), *options)
    return Spawned("-m", "dflow", "launch", "--all-tables", *words, "script.py", *arguments, cwd=tmp_path)


def ran(*arguments: Any, **options: Any) -> tuple[int, str]:
    with launch(*arguments, **options) as launched:
        return launched.finish()


def connected(script: str) -> str:
    return CONNECT + script


def pids(launched: Spawned, count: int) -> list[int]:
    return [int(line.split()[-1]) for line in launched.read_until("] pid ", count)]


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_scripts_that_finish_give_0_and_their_lines_a_prefix(tmp_path: Path) -> None:
    script = connected("""
print("hello from", os.environ["DFLOW_JOB"], index, sys.argv[1:])
print("events go to", os.environ["DFLOW_RUN_DIR"])
print("[bold]not markup[/bold]", file=sys.stderr)
client.leave()
""")
    status, output = ran(tmp_path, script, 2, "--lr", "3")
    assert status == 0, output
    assert "[worker:0] hello from worker 0 ['--lr', '3']\n" in output
    assert "[worker:1] hello from worker 1 ['--lr', '3']\n" in output
    assert "[worker:1] [bold]not markup[/bold]\n" in output
    assert f"[worker:1] events go to {tmp_path / 'logs'}\n" in output
    assert "dflow coordinator listening" not in output
    assert "dflow: to watch: dflow status --watch --coordinator 127.0.0.1:" in output.splitlines()[1]


def test_a_fault_in_native_code_prints_the_stacks_of_the_task(tmp_path: Path) -> None:
    status, output = ran(tmp_path, "import ctypes\nctypes.string_at(0)")
    assert status == 1, output
    assert "[worker:0] Fatal Python error: Segmentation fault\n" in output
    assert re.search(r'\[worker:0\]   File ".*script.py", line 2 in <module>\n', output), output
    assert "worker:0 ended: killed by SIGSEGV" in output


def test_a_full_disk_under_the_output_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(CONNECT + "print('hello')\nclient.leave()\nopen('done', 'w').close()")
    words = ("-m", "dflow", "launch", "--ps", "0", "--logs", str(tmp_path / "logs"), "script.py")
    with open("/dev/full", "w") as full:
        subprocess.run(
            [sys.executable, *words], cwd=tmp_path, stdout=full, stderr=subprocess.DEVNULL, timeout=60, check=False
        )
    assert (tmp_path / "done").exists()
    assert (tmp_path / "logs/worker-0.log").read_text().endswith("hello\n")
    launcher = (tmp_path / "logs/launcher.log").read_text()
    assert launcher.count("the output cannot be shown: No space left on device; the logs have it") == 1


@pytest.mark.parametrize(
    ("done", "is_finite", "accept", "status"),
    [
        (5, True, "", 0),
        (4, True, "", 1),
        (4, True, "short", 0),
        (4, False, "short", 1),
        (5, False, "", 1),
        (5, False, "not-finite", 0),
        (4, False, "short,not-finite", 0),
    ],
)
def test_the_exit_status_tells_faults_of_runs_that_are_not_accepted(
    done: int, is_finite: bool, accept: str, status: int
) -> None:
    shown: list[str] = []
    launched: Any = SimpleNamespace(
        _plan=LaunchPlan("train.py", accept=accepted(accept)),
        _view=SimpleNamespace(show_event=shown.append),
        _status=SimpleNamespace(
            steps_done=done, steps_total=5, not_finite=() if is_finite else (NotFinite(3, "loss", math.inf, "run_0"),)
        ),
    )
    assert _Launch._faults(launched) == status
    assert len(shown) == status
    launched._status = None
    assert _Launch._faults(launched) == 0


def test_other_faults_to_accept_are_refused() -> None:
    with pytest.raises(dflow.ConfigError, match="DFLOW_ACCEPT: expected short or not-finite, got nan"):
        accepted("short, nan")


def test_a_script_that_never_joins_has_not_done_its_part(tmp_path: Path) -> None:
    status, output = ran(tmp_path, "print('done, alone')")
    assert status == 1, output
    assert "[worker:0] done, alone" in output
    assert "dflow: worker:0 finished and had never joined the cluster" in output
    assert "its script has to call dflow.connect()" in output


def test_a_crash_lets_the_others_end_and_gives_1(tmp_path: Path) -> None:
    script = connected("""
if index == 0:
    raise RuntimeError("no more")
left = threading.Event()
client.session.call_on_roster(lambda roster: left.set() if any(info.left for info in roster.tasks) else None)
assert left.wait(60)
print("went on")
client.leave()
""")
    status, output = ran(tmp_path, script, 2)
    assert status == 1, output
    assert "[worker:0] RuntimeError: no more" in output
    assert "dflow: worker:0 ended: exit status 1; 1 of 2 workers go on" in output
    assert re.search(r"worker:0 .*exit status 1: RuntimeError: no more", output), output
    assert "[worker:1] went on" in output


def test_a_killed_worker_is_reported_and_the_run_is_good(tmp_path: Path) -> None:
    script = connected("""
steps = client.ask(ClaimSteps("run", client.task, 1)).steps if index == 0 else range(0)
client.ask(Report(f"claimed {index}", 1.0))
if index == 0:
    assert steps == range(1)
    os.kill(os.getpid(), signal.SIGKILL)
seen = threading.Event()
client.session.call_on_roster(lambda roster: seen.set() if any(info.left for info in roster.tasks) else None)
assert seen.wait(60)
assert client.ask(ClaimSteps("run", client.task, 1)).steps == range(1)
assert client.ask(ClaimSteps("run", client.task, 1, done=1, step_s=0.25, metrics={"loss": 0.5})).steps == range(1, 1)
client.ask(Report("accuracy", 0.9375))
client.leave()
""")
    status, output = ran(tmp_path, script, 2)
    assert status == 0, output
    assert "dflow: worker:0 ended: killed by SIGKILL; 1 of 2 workers go on" in output
    assert "0.9375" in output
    assert "Steps: 1 of 1" in output
    assert "killed by SIGKILL (" in output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_every_process_and_gives_130(tmp_path: Path, number: signal.Signals) -> None:
    with launch(tmp_path, WAIT, 2) as launched:
        workers = pids(launched, 2)
        everyone = children_of(launched.process.pid)
        assert len(everyone) == 3
        assert set(workers) < set(everyone)
        launched.process.send_signal(number)
        status, output = launched.finish()
    assert status == 130, output
    _, rest = output.split(f"dflow: {number.name}: ending all processes")
    assert "it is tried again" not in rest
    assert re.search(r"worker:1 .* killed by SIGTERM", rest), output
    assert re.search(r"\ndflow: the next launch goes on from the checkpoints .*--snapshots FOLDER.*\n$", rest), output
    assert not any(exists(pid) for pid in everyone)


@pytest.mark.once
def test_a_worker_deaf_to_sigterm_is_killed_with_all_it_started(tmp_path: Path) -> None:
    script = connected("""
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleeper = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"])
print("pid", sleeper.pid)
print("pid", os.getpid())
sleeper.wait()
""")
    with launch(tmp_path, script) as launched:
        started = pids(launched, 2)
        launched.process.send_signal(signal.SIGINT)
        launched.process.send_signal(signal.SIGINT)
        status, output = launched.finish()
    assert status == 130, output
    wait_for_end(started)


def test_a_killed_launcher_takes_all_with_it(tmp_path: Path) -> None:
    with launch(tmp_path, WAIT, 2) as launched:
        pids(launched, 2)
        everyone = children_of(launched.process.pid)
        assert len(everyone) == 3
        launched.process.kill()
        wait_for_end(everyone)


def test_a_dead_coordinator_ends_the_run(tmp_path: Path) -> None:
    with launch(tmp_path, WAIT, 2) as launched:
        workers = pids(launched, 2)
        [coordinator] = set(children_of(launched.process.pid)) - set(workers)
        os.kill(coordinator, signal.SIGKILL)
        status, output = launched.finish()
    assert status == 1, output
    assert "coordinator ended (killed by SIGKILL) while workers needed it" in output
    assert not any(exists(pid) for pid in workers)


def test_a_missing_script_is_said_before_anything_starts(tmp_path: Path) -> None:
    with Spawned("-m", "dflow", "launch", "nothing.py", cwd=tmp_path) as launched:
        status, output = launched.finish()
    assert status == 2
    assert "there is no script 'nothing.py' in" in output


def test_a_worker_that_fails_is_started_again_and_its_end_is_what_counts(tmp_path: Path) -> None:
    script = connected("""
from pathlib import Path
if not Path("been here").exists():
    Path("been here").touch()
    print("the first time")
    os.kill(os.getpid(), signal.SIGKILL)
print("the second time")
client.leave()
""")
    status, output = ran(tmp_path, script, options=["--restart", "on-failure:2"])
    assert status == 0, output
    assert "dflow: worker:0 ended: killed by SIGKILL; it is started again immediately (restart 1 of 2)" in output
    assert "[worker:0] the second time" in output
    assert (tmp_path / "logs/worker-0.log").read_text() == "the first time\nthe second time\n"
    assert "it is started again immediately (restart 1 of 2)" in (tmp_path / "logs/launcher.log").read_text()


def test_a_signal_comes_through_while_a_restart_is_due(tmp_path: Path) -> None:
    with launch(tmp_path, "raise SystemExit(3)", options=["--restart", "on-failure:9"]) as launched:
        launched.read_until("restart 2 of 9")
        launched.process.send_signal(signal.SIGTERM)
        status, output = launched.finish()
    assert status == 130, output


@pytest.mark.once
def test_a_dead_ps_task_ends_the_run_unless_it_may_come_back_empty(tmp_path: Path) -> None:
    script = connected("""
lives = []
both = threading.Event()
def note(roster):
    lives[:] = [info for info in roster.tasks if info.task == "/job:ps/task:0"]
    if len(lives) == 2:
        both.set()
client.session.call_on_roster(note)
roster = client.wait_for_tasks(["/job:ps/task:0"], timeout_s=60)
siblings = open(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read().split()
[ps] = [pid for pid in siblings if b"task" in open(f"/proc/{pid}/cmdline", "rb").read().split(bytes(1))]
os.kill(int(ps), signal.SIGKILL)
assert both.wait(60)
client.leave()
""")
    status, output = ran(tmp_path, script, ps=1)
    assert status == 1, output
    assert "ps:0 ended (killed by SIGKILL) while workers needed it, so the run ends" in output
    assert "AssertionError" not in output, "the worker waited for its own deadline"
    remedy = "to go on after such an end, launch with --restart ps=on-failure and --snapshots FOLDER"
    assert output.endswith(f"dflow: {remedy}\n"), output
    status, output = ran(tmp_path, script, ps=1, options=["--restart", "ps=on-failure"])
    assert status == 0, output
    assert "ps:0 ended: killed by SIGKILL; it is started again immediately (restart 1 of 3)" in output
    assert "ps:0 runs again and is empty: the variables that it held are lost" in output


def test_a_worker_can_be_kept_on_its_own_cores(tmp_path: Path) -> None:
    cores = os.sched_getaffinity(0)
    script = CONNECT + "print('cores', os.sched_getaffinity(0), os.environ['NPROC'])\nclient.leave()"
    status, output = ran(tmp_path, script, len(cores), options=["--cpus-per-worker", "1"])
    assert status == 0, output
    for index, core in enumerate(sorted(cores)):
        assert f"[worker:{index}] cores {{{core}}} 1\n" in output


class Stopped(StopSignal):
    """Has stopped, and leaves the signals of the test's process alone."""

    def __init__(self) -> None:
        pass

    def wait(self, timeout_s: float | None = None) -> int | None:
        return signal.SIGINT


class Ending:
    """A program that ends when it is asked to."""

    tail = ()

    def __init__(self, at_end: Callable[[], None]) -> None:
        self._at_end = at_end
        self._status: int | None = None

    def poll(self) -> int | None:
        return self._status

    def terminate(self) -> None:
        if self._status is None:
            self._status = -signal.SIGTERM
            self._at_end()

    def kill(self) -> None:
        raise AssertionError("it has ended")


@pytest.mark.parametrize("is_running", [True, False])
def test_what_a_coordinator_tells_of_tasks_that_are_being_ended_is_only_logged(is_running: bool) -> None:
    shown, logged = list[tuple[str, str]](), list[tuple[str, str]]()
    view: Any = SimpleNamespace(
        show_line=lambda *line: shown.append(line), log_line=lambda *line: logged.append(line), show_end=lambda *_: None
    )
    unused: Any = None
    ending = _Launch(Stopped(), LaunchPlan("script.py", jobs={"worker": 1}), unused, view, unused)
    ending._take_coordinators_line("before")
    ending._coordinator.running = Ending(lambda: None)
    if not is_running:
        ending._coordinator.running.terminate()
    ending._workers[0].running = Ending(lambda: ending._take_coordinators_line("no worker takes part in it any more"))
    ending.end_early("")
    lines = [("coordinator", "before"), ("coordinator", "no worker takes part in it any more")]
    assert (shown, logged) == ((lines[:1], lines[1:]) if is_running else (lines, []))


def test_a_launch_says_once_which_tasks_it_waits_for_after_the_end_of_the_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unused: Any = None
    shown: list[str] = []
    view: Any = SimpleNamespace(show_event=shown.append)
    launched = _Launch(Stopped(), LaunchPlan("a.py", jobs={"worker": 2, "evaluator": 1}), unused, view, unused)
    monkeypatch.setattr(launcher, "LINGER_S", 0.0)
    for worker in launched._workers[:2]:
        launched._show_whom_it_waits_for()
        assert not shown
        worker.status = 0
    launched._show_whom_it_waits_for()
    launched._show_whom_it_waits_for()
    assert len(shown) == 1
    assert shown[0].startswith("all tasks of worker have ended, and the launch waits for evaluator:0; a loop over")


def test_the_end_of_a_process_that_was_started_again_is_the_one_that_the_launcher_saw() -> None:
    unused: Any = None
    shown: list[str] = []
    view: Any = SimpleNamespace(show_event=shown.append)
    plan = LaunchPlan("script.py", jobs={"worker": 2}, restarts={"worker": 3})
    launched = _Launch(Stopped(), plan, unused, view, unused)
    worker = launched._workers[0]
    before = TaskInfo(worker.task, "h:1", 1.0, life=0)
    other = TaskInfo(launched._workers[1].task, "h:2", 1.0, life=1)
    launched._status = Status(5.0, (before, other), (), (), 0, 0, (), (), {})
    assert launched._is_started_again(worker, -signal.SIGKILL)
    assert launched._is_started_again(worker, 1), "one that never joined, whose end is not that of the first"
    lost = "the other side closed the connection: its process has ended"
    left = replace(before, left_at_s=4.0, left=lost), replace(other, left_at_s=4.0, left=lost)
    found = _with_ends(replace(launched._status, tasks=(*left, replace(before, life=2))), launched._ended)
    assert found is not None
    assert [info.left for info in found.tasks] == ["killed by SIGKILL", lost, ""]


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (
            ["Traceback (most recent call last):", '  File "t.py", line 1, in <module>', "ValueError: no"],
            "ValueError: no",
        ),
        (
            [f"{VariableError.__module__}.VariableError: 'w' is gone", "  at t.py:1", "  make it"],
            "VariableError: 'w' is gone",
        ),
        ([f"{TaskLost.__module__}.TaskLost: ps:0 has left", "Note: see the log"], "TaskLost: ps:0 has left"),
        (["KeyboardInterrupt"], "KeyboardInterrupt"),
        (["  ValueError: within a text", "Loss: 3.2", "Done"], ""),
        (["RuntimeError: " + "x" * 200], f"RuntimeError: {'x' * (LONGEST_CAUSE - 17)}..."),
        ([], ""),
    ],
)
def test_the_cause_is_the_last_exception_of_the_output(lines: list[str], cause: str) -> None:
    assert cause_of(lines) == cause
