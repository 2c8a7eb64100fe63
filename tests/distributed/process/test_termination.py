"""SIGTERM in a training loop: which step is the last, and what the loop reports."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from dflow.distributed.process.termination import REASON, STATUS, held_back_in_steps
from tests.distributed.training.test_async import Scripted, scripted, told

pytestmark = pytest.mark.usefixtures("default_termination")


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def run_to_the_end(source: Scripted, step: Any, batches: Any, seen: list[int]) -> None:
    with pytest.raises(SystemExit) as raised:
        seen.extend(scripted(source).run(step, batches, steps=1000))
    assert raised.value.code == STATUS == 143


def test_the_step_that_runs_is_done_and_reported() -> None:
    source, called, seen = Scripted(range(16)), list[int](), list[int]()

    def step(number: int) -> int:
        if number == 3:
            terminate()
        called.append(number)
        return number

    run_to_the_end(source, step, itertools.count(), seen)
    assert (called, seen) == ([0, 1, 2, 3], [0, 1, 2])
    assert (told(source), source.left) == ([(4, False)], [REASON])


def test_between_steps_the_loop_ends_at_once() -> None:
    def batches() -> Iterator[int]:
        yield from range(3)
        terminate()
        raise AssertionError("the loop goes on")

    source, seen = Scripted(range(16)), list[int]()
    run_to_the_end(source, lambda number: number, batches(), seen)
    assert seen == [0, 1, 2]
    assert (told(source), source.left) == ([(3, False)], [REASON])


def in_a_step(step: Callable[[], None]) -> None:
    """Call a step of a loop."""
    with held_back_in_steps() as guard, guard.step():
        step()


def test_a_second_signal_does_not_wait_for_the_step() -> None:
    seen = []

    def step() -> None:
        terminate()
        seen.append("the step goes on after the first")
        terminate()
        seen.append("the step goes on after the second")

    with pytest.raises(SystemExit):
        in_a_step(step)
    assert seen == ["the step goes on after the first"]


def test_a_loop_within_a_step_of_another_ends_with_that_step() -> None:
    after = []

    def step() -> None:
        in_a_step(terminate)
        after.append("the outer step")

    with pytest.raises(SystemExit):
        in_a_step(step)
    assert after == ["the outer step"]


def test_a_step_that_fails_raises_its_error() -> None:
    def step() -> None:
        terminate()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        in_a_step(step)


def test_a_handler_of_the_program_is_kept() -> None:
    came: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        came.append(number)

    signal.signal(signal.SIGTERM, handle)
    try:
        with held_back_in_steps() as guard, guard.step():
            terminate()
        assert came == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_on_another_thread_nothing_is_changed() -> None:
    handlers: list[Any] = []

    def loop() -> None:
        with held_back_in_steps():
            handlers.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()
    assert handlers == [signal.SIG_DFL]


def test_a_signal_that_a_loop_held_back_ends_the_program_when_the_loop_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[tuple[int, Any]] = []
    monkeypatch.setattr(signal, "raise_signal", lambda number: raised.append((number, signal.getsignal(number))))

    def loop() -> Iterator[int]:
        with held_back_in_steps() as guard, guard.step():
            yield from itertools.count()

    for number in loop():
        if number == 3:
            terminate()
        if number == 5:
            break
    assert raised == [(signal.SIGTERM, signal.SIG_DFL)]


def test_a_loop_that_the_signal_has_ended_is_not_ended_again(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[int] = []
    monkeypatch.setattr(signal, "raise_signal", raised.append)

    def loop() -> Iterator[int]:
        with held_back_in_steps():
            yield from itertools.count()

    run = loop()
    assert next(run) == 0
    with pytest.raises(SystemExit):
        terminate()
    run.close()  # type: ignore[attr-defined]
    assert raised == []
