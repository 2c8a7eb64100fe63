"""Steps that only read: their calls do not wait for each other, and each sees the values of one moment."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from dflow.lowering.programs.program import lower_program
from dflow.lowering.state import variable_table
from dflow.lowering.state.held_value import StepState
from dflow.lowering.state.store import Store
from dflow.tracing.errors import VariableError
from tests.lowering.flat_programs import run_flat
from tests.lowering.state.store_programs import ADD, F32, ONES, WAIT_S, new_store, pointer

THREADS = 4


def reads(written: Any, read: Any) -> Any:
    return written, [value.tolist()[0] for value in read]


def values(store: Store, step: StepState) -> list[float]:
    found: list[float] = store.table.run_reading(step, reads, ())
    return found


def add(store: Store, key: str) -> None:
    store.call(ADD, [key], [], [ONES])


class Reading:
    """A call of a step that only reads, which another thread dispatches until the test ends it."""

    def __init__(self, store: Store, step: StepState) -> None:
        self.begun, self.let_go, self.given = threading.Event(), threading.Event(), list[jax.Array]()

        def program(written: Any, read: Any) -> Any:
            self.given += read
            self.begun.set()
            assert self.let_go.wait(WAIT_S)
            return reads(written, read)

        self.pool = ThreadPoolExecutor(1)
        self.done: Future[list[float]] = self.pool.submit(store.table.run_reading, step, program, ())
        assert self.begun.wait(WAIT_S)

    def end(self) -> list[float]:
        self.let_go.set()
        found = self.done.result(WAIT_S)
        self.pool.shutdown()
        return found


@contextmanager
def waits(store: Store, key: str, work: Callable[[], Any]) -> Iterator[Future[Any]]:
    """Run `work` on a thread, and the block once that thread waits for the variable."""
    began, pause = threading.Event(), store.table._pause

    def noted(condition: threading.Condition, seconds: float) -> None:
        if store.table.entry(key).wanted:
            began.set()
        pause(condition, seconds)

    store.table._pause = noted  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        assert began.wait(WAIT_S)
        assert not future.done()
        yield future


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that overwrites a value waits for the calls that read it as long as they take."""
    monkeypatch.setattr(variable_table, "PATIENCE_S", 10 * WAIT_S)


@pytest.mark.parametrize("steps", [1, THREADS], ids=["one step", "a step each"])
def test_calls_that_read_a_variable_are_dispatched_concurrently(steps: int) -> None:
    store, everyone = new_store(w=1.0), threading.Barrier(THREADS)
    readers = [StepState([], ["w"], "infer") for _ in range(steps)]

    def program(written: Any, read: Any) -> Any:
        everyone.wait(WAIT_S)
        return reads(written, read)

    with ThreadPoolExecutor(THREADS) as pool:
        calls = [pool.submit(store.table.run_reading, readers[n % steps], program, ()) for n in range(THREADS)]
        assert [call.result(WAIT_S) for call in calls] == [[1.0]] * THREADS


def test_steps_that_write_their_own_variables_and_read_one_are_dispatched_concurrently() -> None:
    store, both = new_store(a=0.0, b=0.0, rate=2.0), threading.Barrier(2)

    def program(written: Any, read: Any) -> Any:
        both.wait(WAIT_S)
        return run_flat(ADD, 1, *written, *read), None

    with ThreadPoolExecutor(2) as pool:
        steps = [StepState([key], ["rate"], key) for key in "ab"]
        calls = [pool.submit(store.table.run, step, program, ()) for step in steps]
        for call in calls:
            call.result(WAIT_S)
    assert [store.read(key).tolist()[0] for key in "ab"] == [2.0, 2.0]


def test_a_step_that_overwrites_a_value_waits_for_a_call_that_reads_it() -> None:
    store, step = new_store(w=1.0, v=5.0), StepState([], ["w"], "infer")
    reading = Reading(store, step)
    assert store.table.is_busy(["v", "w"])
    assert not store.table.is_busy(["v", "another"])
    add(store, "v")  # no wait
    before = pointer(store.table.entry("w").value)
    taken: list[int] = []

    def program(written: Any, read: Any) -> Any:
        taken.append(pointer(written[0]))
        return run_flat(ADD, 1, *written, ONES), None

    with waits(store, "w", lambda: store.table.run(StepState(["w"], [], "train"), program, ())) as train:
        assert not reading.given[0].is_deleted()
        assert reading.end() == [1.0]
        train.result(WAIT_S)
    assert taken == [before], "the value was copied"
    assert reading.given[0].is_deleted()
    assert values(store, step) == [2.0]


def test_calls_that_read_let_a_step_that_waits_go_first() -> None:
    store, step = new_store(w=1.0), StepState([], ["w"], "infer")
    reading = Reading(store, step)
    with (
        waits(store, "w", lambda: add(store, "w")) as train,
        waits(store, "w", lambda: values(store, step)) as infer,
    ):
        assert reading.end() == [1.0]
        train.result(WAIT_S)
        assert infer.result(WAIT_S) == [2.0]


def test_a_long_call_that_reads_delays_no_write_and_keeps_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variable_table, "PATIENCE_S", 0.0)
    store, step = new_store(a=1.0, b=1.0), StepState([], ["a", "b"], "infer")
    reading, copies = Reading(store, step), set[int]()

    def program(written: Any, read: Any) -> Any:
        copies.add(pointer(written[0]))
        return written, None

    for _ in range(3):
        for key in "ab":
            add(store, key)
        assert values(store, step) == [store.read("a").tolist()[0], store.read("b").tolist()[0]]
        # Only the first write copies the value that the long call uses.
        store.table.run(StepState(["a"], [], "train"), program, ())
    assert len(copies) == 1
    assert reading.end() == [1.0, 1.0]
    assert values(store, step) == [4.0, 4.0]


def test_a_callback_of_a_call_that_reads_may_call_the_step_and_write_its_variables() -> None:
    store, step = new_store(w=1.0), StepState([], ["w"], "infer")
    seen: list[Any] = []

    def program(written: Any, read: Any) -> Any:
        seen.append(values(store, step))
        add(store, "w")
        seen.append(values(store, step))
        store.write("w", 7 * ONES)
        seen.append(values(store, step))
        return reads(written, read)

    assert store.table.run_reading(step, program, ()) == [1.0]
    assert seen == [[1.0], [2.0], [7.0]]
    assert store.read("w").tolist() == [7.0] * 3


def test_a_callback_of_a_step_that_writes_cannot_write_what_the_step_reads() -> None:
    store = new_store(w=1.0, v=2.0)

    def program(written: Any, read: Any) -> Any:
        assert store.read_together(["v"])["v"].tolist() == [2.0] * 3
        with pytest.raises(VariableError, match="within the very step that uses it"):
            add(store, "v")
        return written, None

    store.table.run(StepState(["w"], ["v"], "train"), program, ())
    add(store, "v")
    assert store.read("v").tolist() == [3.0] * 3


class Calls(dict[object, int]):
    """The calls of a step, with an action at each moment when they change or are looked at."""

    def __init__(self, added: Callable[[], Any], looked_at: Callable[[], Any]) -> None:
        super().__init__()
        self.added, self.looked_at = added, looked_at

    def __setitem__(self, call: object, thread: int) -> None:
        self.added()
        super().__setitem__(call, thread)

    def __len__(self) -> int:
        self.looked_at()
        return super().__len__()


def test_a_call_that_reads_is_known_before_it_takes_values_which_are_taken_away_before_calls_are_looked_for() -> None:
    store, step, had_values = new_store(w=1.0), StepState([], ["w"], "infer"), list[bool]()
    assert values(store, step) == [1.0]
    to_write = ["w"]

    def write() -> None:
        while to_write:
            add(store, to_write.pop())

    step.calls = Calls(write, lambda: had_values.append(step.read is not None))
    assert values(store, step) == [2.0]
    add(store, "w")
    assert values(store, step) == [3.0]
    assert had_values
    assert not any(had_values)


def test_a_failed_call_that_reads_leaves_the_values_and_is_over() -> None:
    store, step = new_store(w=1.0), StepState([], ["w"], "infer")

    def fails(written: Any, read: Any) -> Any:
        raise RuntimeError("out of memory")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            store.table.run_reading(step, fails, ())
        assert not store.table.is_busy(["w"])
        assert values(store, step) == [1.0]
    add(store, "w")
    assert values(store, step) == [2.0]


@pytest.mark.parametrize("change", ["replace", "drop", "forget"])
def test_a_step_that_reads_keeps_no_value_that_is_gone(change: str) -> None:
    store, step = new_store(w=1.0, v=2.0), StepState([], ["w", "v"], "infer")
    assert values(store, step) == [1.0, 2.0]
    value = weakref.ref(store.table.entry("w").value)
    if change == "replace":
        store.replace({"w": jnp.full(3, 9.0)})
    elif change == "drop":
        store.table.drop("w")
    else:
        store.table.forget("w", "gone", "come back")
    gc.collect()
    assert value() is None
    if change == "replace":
        assert values(store, step) == [9.0, 2.0]
    else:
        with pytest.raises(VariableError, match=r"'w' is held here|gone"):
            values(store, step)
    assert store.read("v").tolist() == [2.0] * 3


def test_a_variable_forgets_steps_that_are_collected() -> None:
    store = new_store(w=1.0)
    look = lower_program(lambda w: [w], [F32], 0, 1).compile()
    for _ in range(3):
        store.call(look, [], ["w"], [])
        values(store, StepState([], ["w"], "infer"))
    gc.collect()
    assert not store.table.entry("w").readers
