"""The record of a task's last events when something is stuck: its text, its files, and the tasks that write one."""

from __future__ import annotations

import os
import signal
import stat
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import msgspec
import pytest

import dflow
from dflow.distributed.cluster.cluster import ClusterSettings
from dflow.distributed.observe.flight_recorder import MOST_DUMPS, PAUSE_S, FlightRecorder, flight_text
from dflow.distributed.process.dump_signal import dump_on_signal
from dflow.distributed.process.run_folder import run_folder
from dflow.distributed.transport.base import Handler
from dflow.distributed.wire.messages.observing import Dumped, DumpEvents
from dflow.lowering.queues.channel import StepId
from dflow.lowering.steps.plan import Call, Plan, Recv
from dflow.lowering.steps.recorder import Recorder
from dflow.lowering.steps.step_events import (
    CONNECTED,
    ITEM_BEGAN,
    ITEM_ENDED,
    PART_BEGAN,
    PART_ENDED,
    RECEIVED,
    SENT,
    STEP_BEGAN,
    WAIT_EXPIRED,
    Event,
)
from dflow.testing import MemoryCluster, memory_cluster
from dflow.tracing.errors import DeadlineExceeded
from tests.distributed.waiting import until

DEADLINE_S = 60.0
PS, WORKER = "/job:ps/task:0", "/job:worker/task:0"
PLAN = Plan(
    PS,
    2,
    (Recv("x", WORKER, (0,), (("f32", ()),)), Call(0, (), (), (0,), (1,))),
    names=("%x (net.recv)\n  at model.py:12", "%y (xla.call)\n  at model.py:13"),
)


class Clock:
    now: Any = 0

    def __call__(self) -> Any:
        return self.now


def a_stalled_task() -> tuple[Recorder, Clock]:
    """A ps task that ended step 1 and waits for x in step 2."""
    clock = Clock()
    recorder = Recorder(clock=clock)

    def at(ms: int, *event: Any) -> None:
        clock.now = ms * 1_000_000
        recorder.note(*event)

    one, two = StepId(WORKER, 1), StepId(WORKER, 2)
    at(0, CONNECTED, None, WORKER, "10.0.0.2:7001")
    at(1, PART_BEGAN, one)
    at(1, ITEM_BEGAN, one, PLAN, 0)
    at(2, RECEIVED, one, "x", WORKER, 4)
    at(2, ITEM_ENDED, one, PLAN, 0)
    at(2, ITEM_BEGAN, one, PLAN, 1)
    at(3, ITEM_ENDED, one, PLAN, 1)
    at(4, SENT, one, "y", WORKER, 8, 3_500_000)
    at(4, PART_ENDED, one)
    at(5, PART_BEGAN, two)
    at(5, ITEM_BEGAN, two, PLAN, 0)
    at(9005, WAIT_EXPIRED, two, "x", WORKER)
    clock.now = 9_006_000_000
    return recorder, clock


TEXT = """\
under way:
  step 2 of worker:0, for 9.001 s
    wait for worker:0: x at model.py:12, for 9.001 s

events:
   -9.006000  connected worker:0: 10.0.0.2:7001
   -9.005000  step 1 of worker:0: its part here began
   -9.005000  step 1 of worker:0: began wait for worker:0: x at model.py:12
   -9.004000  step 1 of worker:0: received x from worker:0, 4 B
   -9.004000  step 1 of worker:0: ended wait for worker:0: x at model.py:12
   -9.004000  step 1 of worker:0: began Call: %y (xla.call) at model.py:13
   -9.003000  step 1 of worker:0: ended Call: %y (xla.call) at model.py:13
   -9.002000  step 1 of worker:0: sent y to worker:0, 8 B, 0.500 ms
   -9.002000  step 1 of worker:0: its part here ended
   -9.001000  step 2 of worker:0: its part here began
   -9.001000  step 2 of worker:0: began wait for worker:0: x at model.py:12
   -0.001000  step 2 of worker:0: gave up waiting for x from worker:0
"""


def test_the_text_says_what_is_under_way_and_since_when_and_what_came_before() -> None:
    recorder, clock = a_stalled_task()
    assert flight_text(recorder.events(), clock.now) == TEXT


def test_what_another_task_calls_its_values_cannot_pass_for_a_line_of_ours() -> None:
    forged = Event(0, RECEIVED, WORKER, 1, name="x\nevents:\n\x1b[2J", peer="/job:worker\n/task:0")
    text = flight_text([forged, Event(0, STEP_BEGAN, WORKER, 1, text="a\nb")], 0)
    assert len(text.splitlines()) == len(flight_text([], 0).splitlines()) + 2
    assert "\x1b" not in text


def test_only_the_first_steps_and_items_under_way_are_told_and_the_rest_counted() -> None:
    events = [Event(0, PART_BEGAN, WORKER, step) for step in range(50)]
    events += [Event(0, ITEM_BEGAN, WORKER, 0, "Recv", number=number) for number in range(30)]
    text = flight_text(events, 0).partition("events:")[0]
    assert "    and 10 more\n" in text
    assert "  and 30 more steps\n" in text


# Files.


def test_a_dump_is_a_text_and_lines_of_json_named_by_the_task(tmp_path: Path) -> None:
    recorder, _ = a_stalled_task()
    path = Path(FlightRecorder(PS, recorder, tmp_path / "run").dump("x did not come\nin time"))
    assert path == tmp_path / "run" / "ps-0.events-1.txt"
    who, why, rest = path.read_text().split("\n", 2)
    assert who.startswith("ps:0 at ")
    assert who.endswith(f"process {os.getpid()}")
    assert why == "x did not come\\nin time"
    assert rest == "\n" + TEXT
    about, *lines = path.with_suffix(".jsonl").read_bytes().splitlines()
    assert msgspec.json.decode(about)["why"] == "x did not come\nin time"
    assert [msgspec.json.decode(line, type=Event) for line in lines] == recorder.events()


def test_the_oldest_give_way_to_the_newest(tmp_path: Path) -> None:
    recorder, clock = Recorder(), Clock()
    flights = FlightRecorder(PS, recorder, tmp_path, clock=clock)
    for number in range(MOST_DUMPS + 3):
        clock.now += PAUSE_S
        os.utime(flights.dump(f"dump {number}"), ns=(number, number))
    texts = sorted(tmp_path.glob("*.txt"))
    assert {path.read_text().splitlines()[1] for path in texts} == {f"dump {n}" for n in range(3, MOST_DUMPS + 3)}
    assert len(list(tmp_path.iterdir())) == 2 * MOST_DUMPS


def test_a_dump_soon_after_another_is_the_same_file(tmp_path: Path) -> None:
    clock = Clock()
    flights = FlightRecorder(PS, Recorder(), tmp_path, clock=clock)
    first = flights.dump("one")
    clock.now = PAUSE_S - 0.1
    assert flights.dump("two") == first
    assert "two" not in Path(first).read_text()
    clock.now = PAUSE_S
    assert flights.dump("three") != first


def test_without_a_run_folder_they_go_to_one_that_is_this_users_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = run_folder({})
    path = Path(FlightRecorder(PS, Recorder(), folder).dump("why"))
    assert path.parent == folder == tmp_path / f"dflow-{os.geteuid()}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_link_in_the_place_of_that_folder_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "temporary").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    folder = run_folder({})
    folder.symlink_to(tmp_path / "elsewhere")
    assert FlightRecorder(PS, Recorder(), folder).dump("why") == ""
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert "set DFLOW_RUN_DIR" in caplog.text


def test_sigusr2_has_them_written_down() -> None:
    was, whys = signal.getsignal(signal.SIGUSR2), list[str]()
    try:
        dump_on_signal(whys.append)
        signal.raise_signal(signal.SIGUSR2)
        assert whys == ["SIGUSR2"]
    finally:
        signal.signal(signal.SIGUSR2, was)


def test_a_users_own_handler_of_sigusr2_is_left_alone() -> None:
    def own(*_: object) -> None:
        pass

    was = signal.signal(signal.SIGUSR2, own)
    try:
        dump_on_signal(lambda why: None)
        assert signal.getsignal(signal.SIGUSR2) is own
    finally:
        signal.signal(signal.SIGUSR2, was)


# A cluster.


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DFLOW_RUN_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def memory(run_dir: Path) -> Iterator[MemoryCluster]:
    with memory_cluster(ps=2) as cluster:
        yield cluster


def test_a_value_that_does_not_come_has_every_task_write_down_and_the_error_names_the_file(
    memory: MemoryCluster, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ClusterSettings(step_timeout_s=0.5)
    with closing(memory.worker(settings=settings)) as worker:
        with worker.parameter_servers():
            v = dflow.Variable(lambda: jnp.ones(()), name="v")
        step = dflow.jit(lambda: v.read() + 1)
        server = memory.tasks[f"ps:{v.device[-1]}" if v.device else "ps:0"].server
        silent = server.channel.of_parts._replace(send=lambda *_: None)
        monkeypatch.setattr(server.channel, "of_parts", silent)
        with pytest.raises(DeadlineExceeded, match="the last events of worker:0 are in") as raised:
            step()
        path = Path(str(raised.value).rsplit(" are in ", 1)[1])
        until(lambda: {p.name.split(".")[0] for p in run_dir.glob("*.jsonl")} == {"worker-0", "ps-0", "ps-1"})
    assert path.parent == run_dir
    assert "wait for ps:" in path.read_text()


def test_a_task_writes_down_when_it_is_asked_and_says_where(memory: MemoryCluster, run_dir: Path) -> None:
    server = memory.tasks["ps:1"].server
    peer = memory.network.connect(server.address, name="status", handler=Handler(), who="ps:1", timeout_s=DEADLINE_S)
    answer, _ = peer.call(DumpEvents("asked"), timeout_s=DEADLINE_S)
    assert answer == Dumped(str(run_dir / "ps-1.events-1.txt"))
    peer.close()
