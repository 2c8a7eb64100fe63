"""A store used by several threads: no torn reads, no lost updates, and waits that name the step."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from dflow.lowering.programs.program import lower_program
from dflow.lowering.state import variable_table
from dflow.lowering.state.held_value import StepState
from dflow.lowering.state.repeated_views import repeated_views
from dflow.lowering.state.store import Store
from dflow.tracing.errors import DeadlineExceeded, VariableError
from dflow.tracing.ir.types import ArrayType
from tests.lowering.flat_programs import flat_program, run_flat
from tests.lowering.state.store_programs import ADD, F32, ONES, WAIT_S, new_store, pointer

ADD_TO_BOTH = lower_program(lambda a, b: [a + 1, b + 1], [F32] * 2, 2).compile()
LOOK = lower_program(lambda a, b: [a, b], [F32] * 2, 0, 2).compile()
READS: dict[str, Callable[[Store], Iterable[Any]]] = {
    "by a step": lambda store: store.call(LOOK, [], ["a", "b"], []),
    "by another step": lambda store: reversed(store.call(LOOK, [], ["b", "a"], [])),
    "by views": lambda store: store.views(["a", "b"]),
    "together": lambda store: store.read_together(["a", "b"]).values(),
}


@pytest.mark.parametrize("read_once", READS.values(), ids=READS)
def test_variables_written_together_are_never_seen_apart(read_once: Callable[[Store], Iterable[Any]]) -> None:
    store, everyone = new_store(a=0, b=0), threading.Barrier(8)

    def write(_: int) -> None:
        everyone.wait()
        for _ in range(50):
            store.call(ADD_TO_BOTH, ["a", "b"], [], [])

    def read(_: int) -> list[tuple[float, float]]:
        everyone.wait()
        return [(a.tolist()[0], b.tolist()[0]) for a, b in (read_once(store) for _ in range(50))]

    with ThreadPoolExecutor(8) as pool:
        writers = [pool.submit(write, index) for index in range(4)]
        for reader in [pool.submit(read, index) for index in range(4)]:
            seen = reader.result()
            assert all(a == b for a, b in seen)
            assert seen == sorted(seen), "an older value after a newer one"
        for writer in writers:
            writer.result()
    assert store.read("a").tolist() == store.read("b").tolist() == [200.0] * 3


def test_a_program_that_fails_leaves_the_values() -> None:
    store = new_store(w=1)

    def fail(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        store.call(flat_program(fail), ["w"], [], [ONES])
    with pytest.raises(VariableError, match="no variable 'v' is held here"):
        store.call(ADD, ["w"], ["v"], [ONES])
    assert store.read("w").tolist() == [1.0] * 3


def test_a_program_that_fails_as_it_runs_is_named_as_the_reason_why_a_value_is_lost() -> None:
    def fails(w: jax.Array) -> list[jax.Array]:
        w.delete()
        raise RuntimeError("out of memory")

    store = new_store(w=1.0, v=2.0)
    with pytest.raises(RuntimeError, match="out of memory"):
        store.call(flat_program(fails), ["w"], [], [])
    for use in (lambda: store.read("w"), lambda: store.update("w", "assign_add", ONES)):
        with pytest.raises(
            VariableError, match=r"value of variable 'w' was lost, since a step .* failed[\s\S]*assign it"
        ):
            use()
    assert store.read("v").tolist() == [2.0] * 3
    store.write("w", ONES)
    assert store.read("w").tolist() == [1.0] * 3


class Held:
    """A program over one variable that runs on a thread until the test releases it."""

    def __init__(self, store: Store, key: str) -> None:
        self.begun, self.let_go = threading.Event(), threading.Event()

        def run(value: jax.Array) -> list[jax.Array]:
            self.begun.set()
            assert self.let_go.wait(WAIT_S)
            return [value + 1]

        self.pool = ThreadPoolExecutor(1)
        self.done = self.pool.submit(store.call, flat_program(run, 1), [key], [], [])
        assert self.begun.wait(WAIT_S)

    def end(self) -> None:
        self.let_go.set()
        self.done.result(WAIT_S)
        self.pool.shutdown()


def test_a_thread_that_others_overtake_gets_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variable_table, "FAIR_S", 0.0)
    monkeypatch.setattr(variable_table, "PATIENCE_S", WAIT_S)
    store, calls, done = new_store(w=0), list[str](), threading.Event()

    def run(value: jax.Array) -> list[jax.Array]:
        calls.append(threading.current_thread().name)
        begun.set()
        while not (done.is_set() or state.callers):
            done.wait(0.001)
        return [value + 1]

    program, begun = flat_program(run, 1), threading.Event()
    state = store.step_state(program, ["w"], [])

    def work() -> None:
        while not done.is_set():
            store.call(program, ["w"], [], [], state)

    def once() -> None:
        assert begun.wait(WAIT_S)
        store.call(program, ["w"], [], [], state)

    threads = [threading.Thread(target=work, name="again"), threading.Thread(target=once, name="once")]
    for thread in threads:
        thread.start()
    threads[1].join(WAIT_S)
    done.set()
    threads[0].join(WAIT_S)
    assert calls[:2] == ["again", "once"]


def test_two_threads_do_not_keep_out_a_third() -> None:
    store, calls = new_store(w=0), list[str]()

    def run(value: jax.Array) -> list[jax.Array]:
        calls.append(threading.current_thread().name)
        # Until the other two wait for the call, or yield.
        threading.Event().wait(0.002)
        return [value + 1]

    program = flat_program(run, 1)
    state = store.step_state(program, ["w"], [])

    def work() -> None:
        while len(calls) < 60:
            store.call(program, ["w"], [], [], state)

    threads = [threading.Thread(target=work, name=str(number)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert min(calls.count(thread.name) for thread in threads) >= 6


def test_calls_of_a_program_on_the_same_variables_share_their_values() -> None:
    store = new_store(w=1.0, v=2.0)
    state = store.step_state(ADD, ["w"], [])
    assert store.step_state(ADD, ["w"], []) is state
    assert store.step_state(ADD, ["v"], []) is not state
    assert Store().step_state(ADD, ["w"], []) is not state
    gone = weakref.ref(state)
    del state
    gc.collect()
    assert gone() is None


def test_nobody_waits_for_a_step_but_who_asks_for_its_variables() -> None:
    store = new_store(w=1.0, v=2.0, u=3.0)
    held = Held(store, "w")
    assert store.read("v").tolist() == [2.0] * 3
    store.call(ADD, ["v"], [], [ONES])
    store.update("u", "assign_add", ONES)
    assert store.read_together(["u", "v"])["v"].tolist() == [3.0] * 3
    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(store.read, "w"), pool.submit(store.read_together, ["v", "w"])]
        held.end()
        read, snapshot = (future.result(WAIT_S) for future in asking)
    assert read.tolist() == snapshot["w"].tolist() == [2.0] * 3


def test_who_waits_for_a_step_too_long_is_told_which(monkeypatch: pytest.MonkeyPatch) -> None:
    store = new_store(w=1.0)
    state = StepState(["w"], [], "train")
    held, busy = Held(store, "w"), threading.Barrier(2)

    def program(written: Any, read: Any) -> Any:
        busy.wait(WAIT_S)
        busy.wait(WAIT_S)
        return written, None

    def call() -> None:
        store.table.run(state, program, ())

    monkeypatch.setattr(variable_table, "STEP_S", 0.0)
    with pytest.raises(DeadlineExceeded, match=r"'w' is asked for, but a call of part of a function, .* within 0 s"):
        store.read("w")
    held.end()
    assert store.read("w").tolist() == [2.0] * 3
    with ThreadPoolExecutor(1) as pool:
        called = pool.submit(call)
        busy.wait(WAIT_S)
        for use in (lambda: store.read("w"), lambda: store.read_together(["w"]), lambda: store.write("w", ONES)):
            with pytest.raises(
                DeadlineExceeded, match=r"'w' .* a call of train, [\s\S]*does a callback of that call wait"
            ):
                use()
        with pytest.raises(DeadlineExceeded, match=r"train has been in a call on another thread for 0 s"):
            call()
        busy.wait(WAIT_S)
        called.result(WAIT_S)


@pytest.mark.parametrize("keeps", [True, False], ids=["kept between calls", "taken for each call"])
def test_who_wants_many_variables_gets_them_between_steps_that_never_rest(keeps: bool) -> None:
    store, stop = new_store(w=0.0, v=0.0), threading.Event()

    def renewed(written: Any, read: Any) -> Any:
        return run_flat(ADD, 1, *written, ONES), None

    def train(key: str) -> int:
        state, calls = StepState([key], [], "train"), 0
        while not stop.is_set():
            if keeps:
                store.table.run(state, renewed, ())
            else:
                store.call(ADD, [key], [], [ONES])
            calls += 1
        return calls

    with ThreadPoolExecutor(2) as pool:
        training = [pool.submit(train, key) for key in ("w", "v")]
        try:
            seen = [store.read_together(["w", "v"]) for _ in range(20)]
        finally:
            stop.set()
        calls = [future.result(WAIT_S) for future in training]
    assert [store.read(key).tolist() for key in ("w", "v")] == [[float(count)] * 3 for count in calls]
    assert all(len(set(snapshot[key].tolist())) == 1 for snapshot in seen for key in ("w", "v"))


def test_steps_that_take_each_others_variables_all_come_to_their_end() -> None:
    store = new_store(a=0.0, b=0.0, c=0.0)
    both = lower_program(lambda one, two: [one + 1, two + 1], [F32] * 2, 2).compile()
    pairs = [("a", "b"), ("b", "c"), ("c", "a"), ("b", "a")]

    def work(keys: tuple[str, str]) -> None:
        for _ in range(50):
            store.call(both, keys, [], [])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, pairs))
    assert [store.read(key).tolist()[0] for key in "abc"] == [150.0, 150.0, 100.0]


def test_what_is_dropped_while_a_step_has_it_goes_after_the_step() -> None:
    store = new_store(w=1.0, v=2.0)
    held = Held(store, "w")
    store.table.drop("w")
    assert "w" in store
    held.end()
    store.read("v")
    assert "w" not in store


def test_a_step_takes_a_copy_of_what_has_been_handed_out() -> None:
    store = new_store(w=1.0)
    given, taken = store.read_together(["w"])["w"], list[jax.Array]()

    def program(written: Any, read: Any) -> Any:
        taken.extend(written)
        return written, None

    store.table.run(StepState(["w"], [], "step"), program, ())
    assert pointer(taken[0]) != pointer(given)
    assert store.read("w").tolist() == [1.0] * 3


class TakenOver(StepState):
    """A step whose variables another thread takes after the last of `reads` reads of `written` without the lock."""

    reads = 0

    def between(self) -> None:
        """Run by another thread."""

    @property
    def written(self) -> Any:
        found = self._written
        if self.reads:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(self.between).result(WAIT_S)
        return found

    @written.setter
    def written(self, values: Any) -> None:
        self._written = values


@pytest.mark.parametrize(
    ("reads", "look"),
    [(2, lambda store: store.table.buffer("b")), (1, lambda store: repeated_views(store, ["b"])()[0])],
    ids=["buffer", "views"],
)
def test_a_variable_that_another_step_takes_is_found_where_it_is(reads: int, look: Callable[[Store], Any]) -> None:
    store, few = Store(), TakenOver(["b"], (), "few")
    store.create("a", ArrayType(F32.dtype, (2,)), lambda: jnp.zeros(2))
    store.create("b", F32, lambda: jnp.zeros(3))
    both = store.step_state(ADD_TO_BOTH, ["a", "b"], ())
    store.table.run(few, lambda written, read: (written, None), ())

    def between() -> None:
        if store.table.lock.acquire(blocking=False):
            few.reads -= 1
            if not few.reads:
                store.table.run(both, lambda written, read: (written, None), ())
            store.table.lock.release()

    few.between, few.reads = between, reads  # type: ignore[method-assign]
    assert look(store).shape == (3,)
