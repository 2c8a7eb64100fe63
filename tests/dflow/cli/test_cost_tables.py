"""The costs of a step: their tables as text, and `dflow trace --summary` on a running cluster."""

from __future__ import annotations

import json
import threading
from contextlib import closing
from pathlib import Path

import jax.numpy as jnp
import pytest
from msgspec.structs import astuple, replace

import dflow
from dflow.cli.cost_tables import message_table, show_summary, step_tables, usage_table
from dflow.distributed.observe.step_times import Division, MessageTimes, StepTimes
from dflow.distributed.wire.messages.observing import TaskState, TaskUsage
from dflow.testing import memory_cluster
from tests.dflow.cli.printed import console, lines_of, printed

PS, WORKER = "/job:ps/task:0", "/job:worker/task:0"
USAGE = TaskUsage(python_s=10.0, other_s=5.0, wakeups=1000, messages=50, values=200, size_bytes=1_000_000)
STATE = TaskState(0, 0.0, 100, 0, 0, 0, usage=USAGE)


def later(
    parts: int, python_s: float, other_s: float, wakeups: int, messages: int, values: int, size_bytes: int
) -> TaskState:
    """Return the state of a task that has done and used this much since `STATE`."""
    used = python_s, other_s, wakeups, messages, values, size_bytes
    usage = TaskUsage(*(before + more for before, more in zip(astuple(USAGE), used, strict=False)))
    return replace(STATE, parts=STATE.parts + parts, usage=usage)


def test_what_a_part_costs_is_the_difference_of_two_states_by_its_parts() -> None:
    before = {PS: STATE, WORKER: STATE}
    now = {WORKER: later(100, 0.5, 1.5, 1440, 200, 800, 15_400_000), PS: later(400, 0.3, 0.05, 1900, 400, 1200, 53_200)}
    assert now[PS].usage is not None
    now[PS] = replace(now[PS], usage=replace(now[PS].usage, updates=200, missed=300))
    assert lines_of(printed(usage_table(before, now, 2.0, most=10))) == [
        "A part of a step now",
        " task       parts/s   processor    Python   XLA's threads   wake-ups   messages   values      bytes   missed",
        " ───────────────────────────────────────────────────────────────────────────────────────────────────────────",
        " ps:0         200.0        18 %    750 us          125 us        4.8        1.0      3.0      133 B      1.5",
        " worker:0      50.0       100 %   5000 us         15.0 ms       14.4        2.0      8.0   154.0 kB",
    ]


def test_a_task_that_has_ended_no_part_shows_only_its_share_of_a_processor() -> None:
    text = printed(usage_table({PS: STATE}, {PS: later(0, 0.5, 0.0, 3, 0, 0, 0)}, 1.0, most=10))
    assert lines_of(text)[-1].split() == ["ps:0", "0.0", "50", "%"]


def test_a_task_that_was_started_again_or_told_nothing_has_no_row() -> None:
    again = replace(STATE, parts=1)
    silent = replace(STATE, usage=None)
    for before, now in ((STATE, again), (silent, STATE), (STATE, silent)):
        assert usage_table({PS: before}, {PS: now}, 1.0, most=10).row_count == 0
    assert usage_table({}, {PS: STATE}, 1.0, most=10).row_count == 0


def test_more_tasks_than_fit_are_counted() -> None:
    states = {f"/job:ps/task:{number}": STATE for number in range(5)}
    lines = lines_of(printed(usage_table(states, states, 1.0, most=2)))
    assert [line.split()[0] for line in lines[3:]] == ["ps:0", "ps:1", "3"]


def test_the_time_of_a_step_is_divided_at_each_task() -> None:
    rows = [
        StepTimes(PS, "ps", 7, 90.0, Division(90.0), 0.0, 0.0, 0.0),
        StepTimes(PS, "worker", 200, 851.4, Division(92.0, 80.4, 20.0, 80.0, 579.0), 1.0, 2.0, 800.0),
        StepTimes(WORKER, "worker", 200, 1000.0, Division(140.0, 360.0, 30.0, 180.0, 290.0), 1.0, 1.0, 131_904.0),
    ]
    assert lines_of(printed(*step_tables(rows))) == [
        "A step of ps:*, in us",
        " task   steps   took   Python   XLA   sending   wire   waiting   messages   values   bytes",
        " ─────────────────────────────────────────────────────────────────────────────────────────",
        " ps:0       7     90       90     0         0      0         0        0.0      0.0     0 B",
        "A step of worker:*, in us",
        " task       steps   took   Python   XLA   sending   wire   waiting   messages   values      bytes",
        " ────────────────────────────────────────────────────────────────────────────────────────────────",
        " ps:0         200    851       92    80        20     80       579        1.0      2.0      800 B",
        " worker:0     200   1000      140   360        30    180       290        1.0      1.0   131.9 kB",
    ]


def test_messages_have_a_row_for_each_edge() -> None:
    rows = [
        MessageTimes("w+9", PS, WORKER, 1.0, 10.0, 131_904.0, 52.3, 230.0),
        MessageTimes("[g]", WORKER, PS, 2.5, 0.0, 68.0, 7.0, None),
        MessageTimes("x", WORKER, PS, 1.0, 1.0, 4.0, 7.0, 9.0),
    ]
    assert lines_of(printed(message_table(rows, most=2))) == [
        "Messages of a step, in us",
        " message   from -> to         messages   values each   bytes each   sending   arrived after",
        " ──────────────────────────────────────────────────────────────────────────────────────────",
        " w+9       ps:0 -> worker:0        1.0            10     131.9 kB        52             230",
        " [g]       worker:0 -> ps:0        2.5                       68 B         7",
        " 1 more",
    ]


@pytest.mark.parametrize("is_written", [False, True])
def test_the_steps_of_a_running_cluster_are_summed_up(tmp_path: Path, is_written: bool) -> None:
    made, file = console(160)
    path = tmp_path / "trace.json" if is_written else None
    with memory_cluster(ps=1) as memory, closing(memory.worker()) as worker:
        with worker.parameter_servers():
            w = [dflow.Variable(lambda: jnp.ones(4), name=f"w{number}") for number in range(3)]
        step = dflow.jit(lambda: sum(each.read().sum() for each in w))
        step()
        is_over = threading.Event()

        def work() -> None:
            while not is_over.is_set():
                step()

        thread = threading.Thread(target=work)
        thread.start()
        try:
            show_summary(
                memory.network,
                memory.coordinator.address,
                made,
                steps=3,
                timeout_s=60.0,
                path=path,
                wait=lambda seconds: step(),
            )
        finally:
            is_over.set()
            thread.join()
    lines = file.getvalue().splitlines()
    rows = [line.split() for line in lines]
    assert [row[:2] for row in rows if row[:1] in (["ps:0"], ["worker:0"])][:2] == [["ps:0", "3"], ["worker:0", "3"]]
    # Each value begins at a multiple of 64 bytes.
    assert [row[:7] for row in rows if row[:1] == ["w0+2"]] == [["w0+2", "ps:0", "->", "worker:0", "1.0", "3", "144"]]
    assert any(line.startswith("A part of a step now") for line in lines)
    assert lines[-1].startswith(f"{path}: 3 steps of 2 tasks" if is_written else "3 steps of 2 tasks")
    assert (tmp_path / "trace.json").exists() == is_written
    if path is not None:
        assert json.loads(path.read_bytes())["traceEvents"]
