"""Interrupts (Ctrl-C) and signal handlers, at every instruction of the store's code where Python may run them."""

from __future__ import annotations

import dis
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.state_backends import LOCAL
from dflow.tracing.errors import VariableError
from tests.effort import factor

# Each case compiles its functions again.
pytestmark = pytest.mark.filterwarnings("ignore::dflow.RetraceWarning")

FILES = (
    "store.py",
    "variable_table.py",
    "held_value.py",
    "uninterrupted.py",
    "first_value.py",
    "program.py",
    "single_executable.py",
)

DEADLINE_S = 20.0

#: `make test` calls the handler at every third check, `make nightly` at each.
APART = 1 if factor() > 1 else 3

#: After these instructions CPython checks for signals.
LOOKING = ("CALL", "CALL_FUNCTION_EX", "RESUME", "JUMP_BACKWARD")


def test_the_files_are_those_of_the_sources() -> None:
    root = Path(__file__).parents[3]
    assert all(
        list((root / "dflow").glob(f"*/{file}")) or list((root / "lowering").glob(f"*/{file}")) for file in FILES
    )


@cache
def instructions(code: CodeType) -> dict[int, str]:
    return {instruction.offset: instruction.opname for instruction in dis.get_instructions(code)}


def signalled(work: Callable[[], Any], place: int, handler: Callable[[], Any]) -> bool:
    """Run `work` and call `handler` at the check for signals number `place`. Return whether there is such a check."""
    count, last = 0, dict[FrameType, str]()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.endswith(FILES):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            if last.get(frame) in LOOKING:
                count += 1
                if count == place:
                    sys.settrace(None)
                    handler()
            last[frame] = instructions(frame.f_code)[frame.f_lasti]
        return trace

    gc.disable()  # finalizers would add checks
    sys._getframe().f_trace_opcodes = True  # Python 3.12 traces opcodes only if an earlier frame asked for them
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(None)
        gc.enable()
    return count >= place


@contextmanager
def suppress_refusal() -> Iterator[None]:
    try:
        yield
    except VariableError as error:
        if "handler of a signal" not in str(error):
            raise


def interrupt() -> None:
    raise KeyboardInterrupt


class Model:
    """Two variables whose elements are all equal, and steps over them."""

    def __init__(self) -> None:
        self.one, self.two = (dflow.Variable(jnp.zeros(3), name=name) for name in ("one", "two"))
        self.queue = dflow.FIFOQueue(1, jax.ShapeDtypeStruct((), jnp.float32))
        self.both = dflow.jit(self._both)
        self.other = dflow.jit(lambda: (self.two.assign_add(jnp.ones(3)), self.one.assign_add(jnp.ones(3)))[0])
        self.parts = dflow.jit(self._parts)
        self.look = dflow.jit(lambda: (self.one.read(), self.two.read()))
        for step in (self.other, self.parts, self.look, self.both, self.both):
            step()

    def _both(self) -> None:
        self.one.assign_add(jnp.ones(3))
        self.two.assign_add(jnp.ones(3))

    def _parts(self) -> None:
        self.queue.enqueue(1.0)
        self.one.assign_add(jnp.full(3, self.queue.dequeue()))
        self.two.assign_add(jnp.ones(3))

    def values(self) -> tuple[float, float]:
        read = dflow.read((self.one, self.two))
        assert all(len(set(np.asarray(value).tolist())) == 1 for value in read)
        return float(read[0][0]), float(read[1][0])

    def looked(self) -> tuple[float, float]:
        one, two = self.look()
        return float(one[0]), float(two[0])

    def replace(self) -> None:
        fifty = {variable.key: jnp.full(3, 50.0) for variable in (self.one, self.two)}
        LOCAL.store.replace(fifty)

    def works(self) -> None:
        """Assert that reads and steps work as before, from other threads too."""
        before = self.values()
        assert not LOCAL.store.table.is_busy([self.one.key, self.two.key])
        seen: list[tuple[float, float]] = []
        other = threading.Thread(target=lambda: seen.append(self.values()), daemon=True)
        other.start()
        other.join(DEADLINE_S)
        assert seen == [before], "the store is still locked"
        for number, step in enumerate((self.both, self.other, self.both, self.parts), 1):
            while int(self.queue.size()):
                self.queue.dequeue()
            step()
            assert self.values() == self.looked() == (before[0] + number, before[1] + number)
        self.one.assign(jnp.full(3, 100.0))
        self.both()
        assert self.values() == (101, before[1] + 5)


WORKS: dict[str, tuple[Callable[[Model], Any], tuple[float, float]]] = {
    "a step": (lambda model: model.both(), (1, 1)),
    "a step that takes the values from another": (lambda model: model.other(), (1, 1)),
    "a step of parts": (lambda model: model.parts(), (1, 1)),
    "a step that reads": (lambda model: model.look(), (0, 0)),
    "a step that reads again": (lambda model: (model.look(), model.look()), (0, 0)),
    "a read": (lambda model: model.one.read(), (0, 0)),
    "an update": (lambda model: model.one.assign_add(jnp.ones(3)), (1, 0)),
    "a restore": (lambda model: model.replace(), (0, 0)),
}


def places(model: Model, name: str, handler: Callable[[], Any]) -> Iterator[tuple[tuple[float, float], bool]]:
    """Call `handler` at each check for signals; yield the values before it, and whether it interrupted the work."""
    work, _ = WORKS[name]
    place = len(name) % APART
    while True:
        place += APART
        model.both()
        before, was_interrupted = model.values(), False
        try:
            if not signalled(lambda: work(model), place, handler):
                assert place > 5
                return
        except KeyboardInterrupt:
            was_interrupted = True
        yield before, was_interrupted


@pytest.mark.parametrize("name", WORKS)
def test_an_interrupt_leaves_every_variable_whole_and_every_step_working(name: str) -> None:
    model, (_, change) = Model(), WORKS[name]
    for before, was_interrupted in places(model, name, interrupt):
        assert was_interrupted
        one, two = model.values()
        done = one - before[0], two - before[1]
        if name == "a restore":
            assert done == (0, 0) or (one, two) == (50, 50)
        elif name == "a step of parts":
            assert set(done) <= {0, 1}
        else:
            assert done in [(0, 0), change]
        model.works()


@pytest.mark.parametrize("name", WORKS)
def test_a_handler_of_a_signal_reads_what_is_there_or_is_refused(name: str) -> None:
    model, seen = Model(), list[tuple[float, float]]()

    def handler() -> None:
        with suppress_refusal():
            seen.append(model.values())

    for before, was_interrupted in places(model, name, handler):
        assert not was_interrupted
        for one, two in seen:
            assert (one, two) == (50, 50) or {one - before[0], two - before[1]} <= {0, 1}
        seen.clear()
        model.works()


@pytest.mark.parametrize("name", WORKS)
def test_a_handler_of_a_signal_that_writes_does_so_wholly_or_is_refused(name: str) -> None:
    model = Model()

    def handler() -> None:
        with suppress_refusal():
            model.one.assign(jnp.full(3, 7.0))
            model.both()

    for _ in places(model, name, handler):
        model.works()
