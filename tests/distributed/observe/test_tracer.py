"""A trace over all tasks: complete steps, aligned clocks, arrows from sends to arrivals, in the declared format."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dflow
from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.observe.clock_alignment import Offset
from dflow.distributed.observe.spans import spans
from dflow.distributed.observe.task_observer import MOST_EVENTS
from dflow.distributed.observe.trace_file import first_steps, trace_of
from dflow.distributed.observe.tracer import Trace, Tracer
from dflow.distributed.wire.messages.observing import StartTrace
from dflow.lowering.steps.recorder import EVENTS_KEPT, Recorder
from dflow.lowering.steps.step_events import (
    ITEM_BEGAN,
    ITEM_ENDED,
    PART_BEGAN,
    PART_ENDED,
    RECEIVED,
    SENT,
    STEP_BEGAN,
    STEP_ENDED,
    Event,
)
from dflow.testing import MemoryCluster, memory_cluster
from dflow.tracing.errors import DeadlineExceeded, WireError
from tests.distributed.trace_format import faults_of

DEADLINE_S = 60.0


@contextmanager
def skewed(offsets_ns: dict[str, int]) -> Iterator[tuple[MemoryCluster, list[Cluster], dict[str, Recorder]]]:
    """Two ps and two workers; the clocks of their events are ahead of this process by `offsets_ns`."""
    with memory_cluster(ps=2, workers=2) as memory, closing(memory.worker(0)) as one, closing(memory.worker(1)) as two:
        servers = [task.server for task in memory.tasks.values()] + [one.server, two.server]
        recorders = {server.name: server.recorder for server in servers}
        for task, ahead_ns in offsets_ns.items():
            recorders[task].clock = _ahead(ahead_ns)
        yield memory, [one, two], recorders


def _ahead(by_ns: int) -> Callable[[], int]:
    return lambda: time.monotonic_ns() + by_ns


def make_step(worker: Cluster) -> Any:
    with worker.parameter_servers():
        a = dflow.Variable(lambda: jnp.zeros(64), name="a")
        b = dflow.Variable(lambda: jnp.zeros(64), name="b")

    @dflow.jit
    def step(x: Any) -> Any:
        total = (a.read() @ b.read()) * x
        a.assign_add(jnp.full(64, x))
        b.assign_add(jnp.full(64, x))
        return total

    return step


def observed(memory: MemoryCluster, workers: list[Cluster]) -> dict[str, Any]:
    servers = [task.server for task in memory.tasks.values()] + [worker.server for worker in workers]
    return {server.name: server.observer for server in servers}


def arrows(data: bytes) -> list[tuple[float, float]]:
    ends: dict[int, dict[str, float]] = {}
    for event in json.loads(data)["traceEvents"]:
        if event["ph"] in "sf":
            ends.setdefault(event["id"], {})[event["ph"]] = event["ts"]
    return [(both["s"], both["f"]) for both in ends.values()]


SKEW = {"/job:ps/task:0": 10**12, "/job:ps/task:1": -(10**11), "/job:worker/task:0": 0, "/job:worker/task:1": 7_777_777}


def test_each_send_is_before_its_arrival_though_the_clocks_are_far_apart() -> None:
    with skewed(SKEW) as (memory, workers, _):
        steps = [make_step(worker) for worker in workers]
        for step in steps:
            step(1.0)
        tracer = Tracer(observed(memory, workers))
        for _ in range(3):
            for step in steps:
                step(1.0)
        found = tracer.stop()
        data = found.json()
    assert faults_of(data) == []
    assert found.steps == 6
    assert len(arrows(data)) >= 4 * 6
    for sent, arrived in arrows(data):
        assert 0 <= sent < arrived
    for task, ahead_ns in SKEW.items():
        assert abs(found.offsets[task].offset_ns - ahead_ns) <= found.offsets[task].error_ns + 1
    length_us = max(event["ts"] for event in json.loads(data)["traceEvents"] if event["ph"] == "X")
    assert length_us < DEADLINE_S * 1e6
    assert not found.lost
    assert not found.missing


def test_the_trace_shows_what_was_computed_sent_and_waited_for_on_each_task(tmp_path: Path) -> None:
    with skewed({}) as (_, workers, recorders):
        step = make_step(workers[0])
        step(1.0)
        with workers[0].trace(tmp_path / "trace.json"):
            step(1.0)
        assert all(recorder.watched is None for recorder in recorders.values())
    data = (tmp_path / "trace.json").read_bytes()
    assert faults_of(data) == []
    events = json.loads(data)["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert list(processes.values()) == ["ps:0", "ps:1", "worker:0", "worker:1"]
    tracks = {(processes[event["pid"]], event["cat"]) for event in events if event["ph"] == "X"}
    for task in ("ps:0", "ps:1", "worker:0"):
        assert {(task, track) for track in ("parts of steps", "Python", "XLA", "messages", "waits")} <= tracks
    assert ("worker:0", "steps") in tracks
    assert any(Path(__file__).name in event.get("args", {}).get("line", "") for event in events)
    assert set(json.loads(data)["otherData"]["clocks"]) == set(processes.values())


def test_a_bundle_is_one_message_from_its_sending_to_its_arrival_with_its_values_and_bytes(tmp_path: Path) -> None:
    with memory_cluster(ps=1) as memory, closing(memory.worker()) as worker:
        with worker.parameter_servers():
            w = [dflow.Variable(lambda: jnp.zeros(64), name=f"w{number}") for number in range(3)]

        @dflow.jit
        def step() -> Any:
            return sum(each.read().sum() for each in w)

        step()
        with worker.trace(tmp_path / "trace.json"):
            step()
        (sent,) = memory.tasks["ps:0"].server.traffic()
        usage = memory.tasks["ps:0"].server.usage()
    data = (tmp_path / "trace.json").read_bytes()
    assert faults_of(data) == []
    events = json.loads(data)["traceEvents"]
    on_way, arrival = sorted(
        (event for event in events if event.get("cat") == "messages" and event["ph"] == "X"), key=at
    )
    assert (on_way["name"], arrival["name"]) == ("w0+2 to worker:0", "w0+2 from ps:0")
    for each in (on_way, arrival):
        assert {key: each["args"][key] for key in ("message", "values", "bytes")} == {
            "message": "w0+2",
            "values": 3,
            "bytes": 3 * 64 * 4,
        }
    assert on_way["dur"] >= on_way["args"]["sending us"]
    assert at(on_way) + on_way["dur"] >= at(arrival) - 0.001
    assert (sent.edge, sent.messages, sent.values, sent.size_bytes) == ("w0+2", 2, 6, 2 * 3 * 64 * 4)
    assert (usage.messages, usage.values, usage.size_bytes) == (2, 6, 2 * 3 * 64 * 4)


def at(event: dict[str, Any]) -> float:
    return float(event["ts"])


@pytest.mark.parametrize("turns", [1, 3])
def test_an_update_is_computed_when_the_new_values_of_its_variables_are_there(turns: int) -> None:
    with memory_cluster(ps=2) as memory, closing(memory.worker()) as worker:
        with worker.parameter_servers():
            a = dflow.Variable(lambda: jnp.zeros(7), name="a")
            b = dflow.Variable(lambda: jnp.zeros(7), name="b")

        def update(_: Any, carry: Any) -> Any:
            a.assign_add(b.read())
            b.assign_add(a.read())
            return carry

        # A loop over two tasks is run by items, not by one XLA call.
        step = dflow.jit(lambda: jax.lax.fori_loop(0, turns, update, 0) if turns > 1 else update(0, 0))
        step()
        shapes: list[tuple[int, ...]] = []
        for task in memory.tasks.values():
            recorder = task.server.recorder
            recorder.called = _noting(shapes, recorder.called)  # type: ignore[method-assign]
        step()
        assert shapes == [], "no trace is on"
        tracer = Tracer(observed(memory, [worker]))
        step()
        found = tracer.stop()
    assert shapes.count((7,)) >= 2 * turns
    for task in memory.tasks.values():
        calls = [span for span in spans(found.events[task.server.name]) if span.began.kind == "Call"]
        assert len(calls) >= turns
        assert all(span.computed is not None for span in calls)
    assert {row.task for row in found.step_times()} == {*found.events}


def _noting(shapes: list[tuple[int, ...]], called: Callable[..., None]) -> Callable[..., None]:
    def noted(results: Any, *call: Any) -> None:
        shapes.extend(result.shape for result in results)
        called(results, *call)

    return noted


def test_a_trace_of_steps_waits_until_the_workers_have_done_them() -> None:
    with skewed({}) as (memory, workers, _):
        step = make_step(workers[0])
        step(1.0)
        tracer = Tracer(observed(memory, workers))
        is_over = threading.Event()

        def work() -> None:
            while not is_over.is_set():
                step(1.0)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            tracer.wait_for_steps(3, DEADLINE_S)
            found = tracer.stop(3)
        finally:
            is_over.set()
            thread.join()
    assert found.steps == 3


def test_without_a_step_there_is_no_trace_and_it_says_so() -> None:
    with skewed({}) as (memory, workers, _):
        tracer = Tracer(observed(memory, workers))
        with pytest.raises(DeadlineExceeded, match=r"no step was ended within 0.01 s by any of ps:0, ps:1, worker:0"):
            tracer.wait_for_steps(1, 0.01)
        tracer.stop()


def test_a_task_that_does_not_answer_is_left_out_and_named() -> None:
    class Gone:
        def call(self, message: Any, *, timeout_s: float) -> Any:
            raise DeadlineExceeded("nobody answers")

    with skewed({}) as (memory, workers, _):
        step = make_step(workers[0])
        tracer = Tracer({**observed(memory, workers), "/job:ps/task:7": Gone()})
        step(1.0)
        found = tracer.stop()
    assert found.missing == {"/job:ps/task:7": "nobody answers"}
    assert faults_of(found.json()) == []


def test_a_trace_that_nobody_stops_ends_by_itself() -> None:
    with memory_cluster(ps=1) as memory:
        server = memory.tasks["ps:0"].server
        server.observer.answer(StartTrace(EVENTS_KEPT + 1, 0.05))
        assert server.recorder.watched is not None
        ended = threading.Event()
        for _ in range(int(DEADLINE_S / 0.01)):
            if server.recorder.watched is None:
                return
            ended.wait(0.01)
        raise AssertionError("the trace goes on")


@pytest.mark.parametrize(
    ("events", "longest_s"), [(MOST_EVENTS + 1, 1.0), (-1, 1.0), (1, 0.0), (1, 1e9), (1, float("nan"))]
)
def test_more_than_is_kept_for_anybody_is_refused(events: int, longest_s: float) -> None:
    with memory_cluster(ps=1) as memory, pytest.raises(WireError, match="at most 1000000 within 3600 s are kept"):
        memory.tasks["ps:0"].server.observer.answer(StartTrace(events, longest_s))


# The file.

TASK = "/job:worker/task:0"


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60), st.integers(0, 60)), max_size=40))
def test_slices_that_overlap_get_tracks_of_their_own(items: list[tuple[int, int, int]]) -> None:
    events = []
    for number, (kind, one_us, other_us) in enumerate(items):
        first, last = 1000 * min(one_us, other_us), 1000 * max(one_us, other_us)
        kinds = ("Call", "Send", "Recv", "Scan")
        at = {"origin": TASK, "step": 1, "kind": kinds[kind], "name": f"item {number}", "number": number}
        events += [Event(first, ITEM_BEGAN, **at), Event(last, ITEM_ENDED, **at)]
    events.sort(key=lambda event: (event.at_ns, event.what != ITEM_BEGAN))
    data = Trace({TASK: events}, {TASK: Offset(5, 1)}, (), {}).json()
    assert faults_of(data) == []
    slices = [event for event in json.loads(data)["traceEvents"] if event["ph"] == "X"]
    calls = [f"dispatch item {number}" for number, (kind, _, _) in enumerate(items) if kind == 0]
    assert sorted(event["name"] for event in slices) == sorted([*calls, *(f"item {n}" for n in range(len(items)))])


def test_what_has_not_ended_lasts_to_the_end_and_says_that_it_goes_on() -> None:
    events = {TASK: [Event(0, PART_BEGAN, TASK, 1), Event(2, PART_BEGAN, TASK, 2), Event(9000, PART_ENDED, TASK, 2)]}
    slices = [e for e in trace_of(events, {TASK: Offset(0, 0)})["traceEvents"] if e["ph"] == "X"]
    assert [(e["dur"], e["args"].get("goes on", False)) for e in slices] == [(9.0, True), (8.998, False)]


def test_steps_that_were_not_seen_whole_are_left_out() -> None:
    numbers = [(1, STEP_ENDED), (2, STEP_BEGAN), (2, STEP_ENDED), (3, STEP_BEGAN), (3, STEP_ENDED), (4, STEP_BEGAN)]
    events = {TASK: [Event(place, what, TASK, step) for place, (step, what) in enumerate(numbers)]}
    assert [event.step for event in first_steps(events, None)[TASK]] == [2, 2, 3, 3]
    assert [event.step for event in first_steps(events, 1)[TASK]] == [2, 2]


def test_an_arrow_begins_where_a_value_was_handed_over_though_its_send_had_ended() -> None:
    ps = "/job:ps/task:0"
    at = {"origin": TASK, "step": 1}
    own = [
        Event(0, STEP_BEGAN, **at),
        Event(1000, ITEM_BEGAN, **at, kind="Send", name="w", peer=ps),
        Event(2000, ITEM_ENDED, **at, kind="Send", name="w", peer=ps),
        Event(9000, SENT, **at, name="w", peer=ps, size_bytes=4, began_ns=8000),
    ]
    others = [Event(8500, RECEIVED, **at, name="w", peer=TASK, size_bytes=4)]
    data = Trace({TASK: own, ps: others}, {TASK: Offset(0, 1), ps: Offset(0, 1)}, (), {}).json()
    assert faults_of(data) == []
    assert arrows(data) == [(8.0, 8.5)]
