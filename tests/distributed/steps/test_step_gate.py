"""The gate of shared steps: which steps wait, and when it is idle."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from dflow.distributed.steps.step_gate import StepGate, begins_parts, prepared, preparing, uses_tasks
from dflow.tracing.errors import DeadlineExceeded
from tests.distributed.waiting import until

WORKER = "/job:worker/task:0"


def test_a_closed_gate_is_idle_when_the_last_running_step_ends() -> None:
    gate, idle = StepGate(WORKER), list[int]()
    assert gate.enter(lambda: None)
    assert gate.enter(lambda: None)
    gate.close(lambda: idle.append(1))
    gate.leave()
    assert not idle
    gate.leave()
    assert idle == [1]


def test_a_step_that_comes_while_it_is_closed_is_called_when_it_opens() -> None:
    gate, idle, begun = StepGate(WORKER), list[int](), list[int]()
    gate.close(lambda: idle.append(1))
    assert idle == [1]

    def begin() -> None:
        assert gate.enter(begin)
        begun.append(1)

    assert not gate.enter(begin)
    gate.open()
    assert (begun, idle) == ([1], [1])
    gate.leave()
    assert idle == [1]


def test_a_step_that_finds_it_closed_again_waits_on() -> None:
    gate, closed = StepGate(WORKER), threading.Event()
    gate.close(closed.set)

    def step() -> bool:
        with gate.step(60):
            return closed.is_set()

    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(step)
        until(lambda: bool(gate._waiting))
        waiting, gate._waiting = gate._waiting, []
        waiting[0]()  # as if the gate had been opened, and closed before the thread woke
        until(lambda: bool(gate._waiting))
        assert not ended.done()
        gate.open()
        assert ended.result(60)
    gate.close(closed.set)
    assert gate._running == 0


def test_a_step_waits_until_its_deadline_and_says_why() -> None:
    gate = StepGate(WORKER)
    gate.close(lambda: None)
    refused = pytest.raises(DeadlineExceeded, match=r"worker:0 has held back its next step for 0.01 s, while the state")
    with refused, gate.step(0.01):
        pass
    gate.open()
    with gate.step(0.01):
        assert gate._running == 1
    assert gate._running == 0


def test_a_step_that_is_compiled_is_no_running_step() -> None:
    gate, idle = StepGate(WORKER), threading.Event()
    refused = pytest.raises(DeadlineExceeded, match=r"has held back its next step for 0\.01 s")
    with refused, gate.step(0.01), preparing("f"), preparing("what f calls"):
        uses_tasks()  # to register the plan
        assert (gate._running, prepared()) == (0, "tracing and compiling f")
        gate.close(idle.set)
        assert idle.is_set()
    assert (gate._running, prepared()) == (0, "")
    gate.open()
    with gate.step(0.01):
        with preparing("f"):
            pass
        assert gate._running == 1
    assert gate._running == 0


@pytest.mark.parametrize("use", [uses_tasks, begins_parts])
def test_a_step_that_goes_on_after_a_failed_trace_enters_the_gate_before_it_uses_a_task(
    use: Callable[[], None],
) -> None:
    gate = StepGate(WORKER)
    with gate.step(0.01):
        with suppress(ZeroDivisionError), preparing("f"):
            raise ZeroDivisionError
        use()
        assert gate._running == 1
        with preparing("g"):
            assert gate._running == 1
    assert gate._running == 0


@pytest.mark.parametrize("use", [uses_tasks, begins_parts])
def test_a_step_that_has_used_a_task_runs_while_it_compiles(use: Callable[[], None]) -> None:
    gate = StepGate(WORKER)
    with gate.step(1):
        use()
        with preparing("f"):
            assert gate._running == 1
    assert gate._running == 0


def test_a_part_that_begins_in_a_trace_waits_for_the_end_of_a_pause() -> None:
    gate = StepGate(WORKER)
    with gate.step(0.01), preparing("f"):
        begins_parts()
        assert gate._running == 1
    refused = pytest.raises(DeadlineExceeded)
    with refused, gate.step(0.01), preparing("f"):
        gate.close(lambda: None)
        begins_parts()
    gate.open()
    assert gate._running == 0


def test_a_trace_that_fails_waits_for_no_pause() -> None:
    gate = StepGate(WORKER)
    failed = pytest.raises(ZeroDivisionError)
    with failed, gate.step(60), preparing("f"):
        gate.close(lambda: None)
        raise ZeroDivisionError
    assert (gate._running, prepared()) == (0, "")
