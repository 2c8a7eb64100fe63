"""Metrics of tasks and the coordinator: steps, bytes, errors, and the time of processors."""

from __future__ import annotations

import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

import dflow
from dflow.distributed.cluster.joined_server import task_metrics
from dflow.distributed.coordinator_role import make_coordinator
from dflow.distributed.observe.metrics import MOST_NAMED, MetricsEndpoint, bounded, coordinator_metrics, metrics_address
from dflow.distributed.observe.processor_use import processor_time, processor_use, thread_time, time_of_others
from dflow.distributed.observe.step_counts import BOUNDS_S, StepCounts, error_class
from dflow.distributed.transport.sockets import SocketTransport
from dflow.testing import MemoryCluster, memory_cluster
from dflow.tracing.errors import ConfigError, DeadlineExceeded, TaskLost, VariableError
from tests.distributed.processes import Spawned
from tests.distributed.waiting import until


@pytest.fixture
def memory() -> Iterator[MemoryCluster]:
    with memory_cluster(ps=1) as cluster:
        yield cluster


def scrape(endpoint: MetricsEndpoint) -> dict[tuple[str, ...], float]:
    with urllib.request.urlopen(endpoint.address, timeout=30) as answer:
        text = answer.read().decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def make_step(worker: Any) -> Any:
    with worker.parameter_servers():
        w = dflow.Variable(lambda: jnp.zeros(8), name="w")

    @dflow.jit
    def step(x: Any) -> Any:
        w.assign_add(x)
        return w.read().sum()

    return step


def test_a_worker_and_a_ps_tell_their_steps_bytes_and_errors(memory: MemoryCluster) -> None:
    server = memory.tasks["ps:0"].server
    with (
        closing(memory.worker()) as worker,
        closing(MetricsEndpoint(partial(task_metrics, worker.server), 0)) as of_worker,
        closing(MetricsEndpoint(partial(task_metrics, server), 0)) as of_ps,
    ):
        assert of_ps.address.startswith("http://127.0.0.1:")
        step = make_step(worker)
        for _ in range(3):
            step(jnp.ones(8))
        server.store.table.forget("w", "it was dropped", "make it again")
        with pytest.raises(VariableError):
            step(jnp.ones(8))
        assert [event.text for event in server.recorder.events() if event.what == "item failed"] == ["VariableError"]
        assert worker.server.recorder.events()[-1].text.startswith("VariableError: ")
        own, ps = scrape(of_worker), scrape(of_ps)
    assert own["dflow_task_info", "worker:0"] == ps["dflow_task_info", "ps:0"] == 1
    assert own["dflow_steps_total", "ok"] == own["dflow_step_seconds_count",] == 3
    assert own["dflow_steps_total", "error"] == own["dflow_step_errors_total", "VariableError"] == 1
    assert own["dflow_step_seconds_bucket", "+Inf"] == 3
    assert own["dflow_step_seconds_sum",] > 0
    assert ps["dflow_parts_total", "ok"] == 3
    assert own["dflow_sent_bytes_total", "ps:0"] == ps["dflow_received_bytes_total", "worker:0"] == 4 * 32
    assert own["dflow_received_bytes_total", "ps:0"] == ps["dflow_sent_bytes_total", "worker:0"] >= 3 * 4
    assert own["dflow_connections",] == 1
    assert own["dflow_running_parts",] == own["dflow_values_waited_for",] == 0


def test_the_coordinator_tells_of_its_tasks(memory: MemoryCluster) -> None:
    with (
        closing(memory.worker()) as worker,
        closing(MetricsEndpoint(lambda: coordinator_metrics(memory.coordinator.status()), 0)) as endpoint,
    ):
        make_step(worker)
        found = scrape(endpoint)
    tasks = {key[1]: number for key, number in found.items() if key[0] == "dflow_tasks"}
    assert tasks == {"live": 2, "stalled": 0, "expected": 0}
    assert (found["dflow_variables",], found["dflow_variables_bytes",]) == (1, 32)


def test_labels_are_bounded_and_what_is_beyond_is_one_sum() -> None:
    values = {str(number): 1 for number in range(MOST_NAMED + 7)}
    found = bounded(values)
    assert len(found) == MOST_NAMED + 1
    assert found["others"] == 7
    assert bounded({"a": 2}) == {"a": 2}


@pytest.mark.parametrize(
    ("place", "found"),
    [
        (9100, ("127.0.0.1", 9100)),
        ("0", ("127.0.0.1", 0)),
        ("0.0.0.0:9100", ("0.0.0.0", 9100)),
        ("[::1]:1", ("::1", 1)),
    ],
)
def test_a_port_is_of_this_machine_alone_unless_a_host_is_said(place: str | int, found: tuple[str, int]) -> None:
    assert metrics_address(place) == found


@pytest.mark.parametrize("place", ["", "nine", "host:", "70000", "-1"])
def test_a_text_that_is_no_place_for_metrics_is_refused(place: str) -> None:
    with pytest.raises(ConfigError, match="give a port, or host:port, such as 9100"):
        metrics_address(place)


def test_a_port_that_is_taken_is_told() -> None:
    with closing(MetricsEndpoint(list, 0)) as first:
        port = int(first.address.rsplit(":", 1)[1].split("/")[0])
        with pytest.raises(OSError, match=rf"cannot be served at 127.0.0.1:{port}: .*; 0 is any free port"):
            MetricsEndpoint(list, port)


def test_without_the_package_the_remedy_is_said(memory: MemoryCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"pip install 'dflow\[metrics\]'"):
        MetricsEndpoint(lambda: coordinator_metrics(memory.coordinator.status()), 0)


def test_the_commands_serve_them_where_they_are_told_to(tmp_path: Path) -> None:
    words = ("-m", "dflow", "coordinator", "--job", "ps=1", "--metrics-port", "0")
    with Spawned(*words, cwd=tmp_path) as coordinator:
        (listening,) = coordinator.read_until("listening on")
        (line,) = coordinator.read_until("metrics are served at")
        address = listening.split()[-1]
        environment = {"JAX_PLATFORMS": "cpu", "DFLOW_METRICS_PORT": "0"}
        task_words = ("-m", "dflow", "task", "--index", "0", "--coordinator", address)
        with Spawned(*task_words, cwd=tmp_path, **environment) as task:
            (of_task,) = task.read_until("metrics are served at")
            for said, name in ((line, b"dflow_tasks{"), (of_task, b'dflow_task_info{task="ps:0"} 1.0')):
                with urllib.request.urlopen(said.split()[-1], timeout=30) as answer:
                    assert name in answer.read()


def test_a_script_says_where_it_serves_them(capsys: pytest.CaptureFixture[str]) -> None:
    coordinator = make_coordinator(SocketTransport(), "127.0.0.1:0", {"worker": 1})
    with closing(coordinator), closing(dflow.connect(coordinator.address, index=0, metrics_port=0)):
        said = capsys.readouterr().err
        assert said.startswith("dflow task worker:0: metrics are served at http://127.0.0.1:")
        with urllib.request.urlopen(said.split()[-1], timeout=30) as answer:
            assert b'dflow_task_info{task="worker:0"} 1.0' in answer.read()


# Counts of steps by their outcome and duration.


@given(st.lists(st.floats(0, 1000)))
def test_each_time_is_in_the_first_bucket_whose_bound_is_no_less(times_s: list[float]) -> None:
    counts = StepCounts()
    for time_s in times_s:
        counts.ended(time_s, None)
    totals = counts.totals()
    bounds = (*BOUNDS_S, float("inf"))
    for place, bound in enumerate(bounds):
        assert sum(totals.buckets[: place + 1]) == sum(time_s <= bound for time_s in times_s)
    assert totals.done == len(times_s)
    assert totals.total_s == pytest.approx(sum(times_s))
    assert totals.mean_s == 0 if not times_s else min(times_s) - 1e-6 <= totals.mean_s <= max(times_s) + 1e-6


def test_errors_are_counted_by_class_and_their_times_are_left_out() -> None:
    counts = StepCounts()
    for error in (TaskLost("gone"), TaskLost("gone"), DeadlineExceeded("late"), ValueError("odd")):
        counts.ended(1.0, error)
    totals = counts.totals()
    assert totals.errors == {"TaskLost": 2, "DeadlineExceeded": 1, "other": 1}
    assert (totals.done, totals.total_s) == (0, 0.0)


def test_an_errors_class_is_one_that_dflow_knows() -> None:
    class MyLoss(TaskLost):
        pass

    class Own(Exception):
        pass

    assert [error_class(error) for error in (MyLoss(""), Own(""), KeyboardInterrupt())] == [
        "TaskLost",
        "other",
        "other",
    ]


# The use of the processor by this process and by kind of thread.


def test_the_time_of_other_threads_is_theirs_alone_without_those_that_have_ended() -> None:
    times_s = {11: 1.0, 12: 2.0, 14: 4.0}

    def time_of(thread: int) -> float:
        if thread not in times_s:
            raise OSError("there is no such thread")
        return times_s[thread]

    assert time_of_others([11, 12, 13, 14], {11}, time_of) == 6.0


def test_the_kinds_of_threads_add_up_to_the_time_of_the_process() -> None:
    before_s, _ = processor_time()
    python_s, other_s, _ = processor_use()
    after_s, _ = processor_time()
    assert before_s <= python_s + other_s <= after_s
    assert other_s >= 0


def test_the_time_of_a_thread_is_that_of_its_own_clock() -> None:
    before_s = time.thread_time()
    found_s = thread_time(threading.get_native_id())
    assert before_s <= found_s <= time.thread_time()


def test_a_thread_that_has_ended_has_no_time() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    native_id = thread.native_id
    assert native_id is not None
    # The system's thread ends a moment after Python's.
    until(lambda: not Path(f"/proc/self/task/{native_id}").exists())
    with pytest.raises(OSError, match="Invalid argument"):
        thread_time(native_id)


def test_each_wait_for_another_thread_is_a_wake_up() -> None:
    _, before = processor_time()
    for _ in range(100):
        begun = threading.Event()
        thread = threading.Thread(target=begun.wait)
        thread.start()
        begun.set()
        thread.join()
    _, after = processor_time()
    assert after > before
