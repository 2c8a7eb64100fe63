"""Values of variables: created once, never torn, never taken from who has read them, copied no more than needed."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflow.lowering.programs.program import Program, lower_program
from dflow.lowering.state import variable_table
from dflow.lowering.state.held_value import StepState
from dflow.lowering.state.store import Store
from dflow.lowering.values import first_value
from dflow.tracing.errors import DeadlineExceeded, VariableError, VariableShapeError
from dflow.tracing.ir.types import ArrayType
from tests.effort import examples
from tests.lowering.flat_programs import flat_program, run_flat

F32 = ArrayType(np.dtype("float32"), (3,))
WAIT_S = 60.0
ONES = jnp.ones(3, jnp.float32)


def pointer(array: jax.Array) -> int:
    """Where the array's elements are in memory."""
    return int(array.unsafe_buffer_pointer())


def new_store(**values: Any) -> Store:
    store = Store()
    for key, value in values.items():
        store.create(key, F32, functools.partial(jnp.full, 3, value, jnp.float32))
    return store


def in_store(store: Store, key: str) -> jax.Array:
    """The array that the store holds, which no one has been handed."""
    return store.buffer(key)


ADD = lower_program(lambda w, x: [w + x], [F32, F32], 1).compile()
ASSIGN = lower_program(lambda w, x: [x], [F32, F32], 1).compile()
ADD_AND_GIVE = lower_program(lambda w, x: [w + x, w + x], [F32, F32], 1).compile()
READ = lower_program(lambda w: [w], [F32], 0, 1).compile()
COPY = lower_program(lambda w, v: [v], [F32, F32], 1, 1).compile()


# Creation.


def noted(made: list[float], value: float) -> jax.Array:
    """An initial value, and a note that it was made."""
    made.append(value)
    return jnp.full(3, value, jnp.float32)


def test_the_first_to_ask_creates_and_the_others_get_what_there_is() -> None:
    store, made = Store(), list[float]()
    assert store.create("w", F32, functools.partial(noted, made, 1.0))
    assert not store.create("w", F32, functools.partial(noted, made, 2.0))
    assert made == [1.0]
    assert store.read("w").tolist() == [1.0] * 3
    assert "w" in store
    assert store.types() == {"w": F32}


def test_many_who_ask_at_once_make_one() -> None:
    store, made = Store(), list[float]()
    everyone = threading.Barrier(8)

    def ask(value: int) -> bool:
        everyone.wait()
        return store.create("w", F32, functools.partial(noted, made, value))

    with ThreadPoolExecutor(8) as pool:
        created = list(pool.map(ask, range(8)))
    assert created.count(True) == 1
    assert made == [created.index(True)]
    assert store.read("w").tolist() == made * 3


def test_an_initialiser_may_use_the_store_and_create_in_it() -> None:
    store = new_store(v=2)

    def make() -> jax.Array:
        store.create("inner", F32, lambda: store.read("v") * 3)
        return store.read("inner") + 1

    assert store.create("outer", F32, make)
    assert (store.read("outer").tolist(), store.read("inner").tolist()) == ([7.0] * 3, [6.0] * 3)


def test_nobody_waits_for_an_initialiser_but_who_creates_the_same() -> None:
    store, begun, go_on = new_store(v=2), threading.Event(), threading.Event()

    def slow() -> jax.Array:
        begun.set()
        assert go_on.wait(WAIT_S)
        return ONES

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(store.create, "w", F32, slow)
        assert begun.wait(WAIT_S)
        second = pool.submit(store.create, "w", F32, lambda: pytest.fail("made twice"))
        assert store.read("v").tolist() == [2.0] * 3
        store.write("v", ONES)
        assert store.create("other", F32, lambda: ONES)
        assert "w" not in store
        go_on.set()
        assert (first.result(WAIT_S), second.result(WAIT_S)) == (True, False)


def test_after_an_initialiser_that_fails_who_waits_makes_its_own() -> None:
    store, begun, go_on = Store(), threading.Event(), threading.Event()

    def fails() -> jax.Array:
        begun.set()
        assert go_on.wait(WAIT_S)
        raise ValueError("no such file")

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(store.create, "w", F32, fails)
        assert begun.wait(WAIT_S)
        second = pool.submit(store.create, "w", F32, lambda: ONES * 5)
        go_on.set()
        with pytest.raises(ValueError, match="no such file"):
            first.result(WAIT_S)
        assert second.result(WAIT_S)
    assert store.read("w").tolist() == [5.0] * 3


def test_an_initialiser_that_creates_its_own_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()

    def make() -> jax.Array:
        store.create("w", F32, make)
        return ONES

    with pytest.raises(VariableError, match="the initialiser of variable 'w' creates variable 'w' itself"):
        store.create("w", F32, make)
    monkeypatch.setattr(first_value, "MAKING_S", 0.0)

    def from_another_thread() -> jax.Array:
        with ThreadPoolExecutor(1) as pool, pytest.raises(DeadlineExceeded, match="'w', on another thread, has not"):
            pool.submit(store.create, "w", F32, lambda: ONES).result(WAIT_S)
        return ONES

    assert store.create("w", F32, from_another_thread)


def test_another_type_is_refused() -> None:
    store = new_store(w=1)
    message = r"'w' exists and holds f32\[3\], but is created again with i32\[3\]; give one of them another name"
    with pytest.raises(VariableError, match=message):
        store.create("w", ArrayType(np.dtype("int32"), (3,)), lambda: pytest.fail("made though it is there"))


def test_an_initial_value_of_another_type_is_refused_and_nothing_is_held() -> None:
    store = Store()
    with pytest.raises(VariableError, match=r"initial value of variable 'w' is f32\[2\], but it is to hold f32\[3\]"):
        store.create("w", F32, lambda: jnp.ones(2, jnp.float32))
    assert "w" not in store


def test_an_initial_value_is_copied() -> None:
    # Aligned so that JAX would take the memory as it is.
    memory = np.empty(3 * 4 + 64, np.uint8)
    start = -memory.ctypes.data % 64
    initial = memory[start : start + 12].view(np.float32)
    initial[:] = 1
    given = jax.device_put(initial)
    store = Store()
    store.create("w", F32, lambda: initial)
    store.create("v", F32, lambda: given)
    for key in ("w", "v"):
        store.call(ADD, [key], [], [ONES])
    assert initial.tolist() == given.tolist() == [1.0] * 3
    initial[:] = 7
    assert store.read("w").tolist() == store.read("v").tolist() == [2.0] * 3


def test_what_was_dropped_is_no_longer_there() -> None:
    store = new_store(w=1, v=2)
    store.drop("w")
    store.drop("w")
    with pytest.raises(VariableError, match=r"no variable 'w' is held here; there are \['v'\]"):
        store.read("w")
    store.drop("v")
    with pytest.raises(VariableError, match="no variable 'v' is held here; there are none"):
        store.call(ADD, ["v"], [], [ONES])
    assert store.create("w", F32, lambda: ONES)


# Single reads and writes.


def test_a_python_number_is_held_as_its_type_and_not_weak() -> None:
    store = Store()
    store.create("k", ArrayType(np.dtype("float32"), ()), lambda: 1.0)
    assert not store.read("k").weak_type


def test_writes_and_adds() -> None:
    store = new_store(w=1)
    store.write("w", np.array([1, 2, 3], np.float32))
    store.update("w", "assign_add", ONES)
    assert store.read("w").tolist() == [2.0, 3.0, 4.0]


@pytest.mark.parametrize("kind", ["assign", "assign_add"])
def test_a_value_of_another_type_is_refused(kind: str) -> None:
    store = new_store(w=1)
    for wrong, name in ((jnp.ones(2, jnp.float32), "f32[2]"), (np.ones(3, np.int32), "i32[3]")):
        with pytest.raises(VariableShapeError) as caught:
            store.update("w", kind, wrong)
        assert str(caught.value) == f"variable 'w' holds f32[3] but was given {name}"
    assert store.read("w").tolist() == [1.0] * 3


def test_what_was_written_stays_the_writers() -> None:
    store = new_store(w=0)
    value = jnp.arange(3, dtype=jnp.float32)
    store.write("w", value)
    store.call(ADD, ["w"], [], [ONES])
    assert value.tolist() == [0.0, 1.0, 2.0]
    memory = np.zeros(3, np.float32)
    store.write("w", memory)
    memory[:] = 5
    assert store.read("w").tolist() == [0.0] * 3


# Lending and donating.


def test_a_buffer_that_nobody_has_is_donated() -> None:
    store = new_store(w=1)
    for _ in range(3):
        old = in_store(store, "w")
        store.call(ADD, ["w"], [], [ONES])
        assert old.is_deleted()
    assert store.read("w").tolist() == [4.0] * 3


def test_a_value_that_was_waited_for_is_still_the_store_s_alone() -> None:
    store = new_store(v=1.0)
    store.wait(["v"])
    before = pointer(in_store(store, "v"))
    store.call(ADD, ["v"], [], [ONES])
    store.wait(["v"])
    assert in_store(store, "v").is_ready()
    assert pointer(in_store(store, "v")) == before
    with pytest.raises(VariableError, match="no variable 'w' is held here"):
        store.wait(["w"])


def test_a_view_costs_a_copy_only_while_it_is_held() -> None:
    store = new_store(w=1)
    [view] = store.views(["w"])
    before = pointer(in_store(store, "w"))
    assert view.__array_interface__["data"][0] == before
    store.call(ADD, ["w"], [], [ONES])
    assert view.tolist() == [1.0] * 3
    after = pointer(in_store(store, "w"))
    assert after != before
    store.wait(["w"])
    [view] = store.views(["w"])
    del view
    store.call(ADD, ["w"], [], [ONES])
    assert pointer(in_store(store, "w")) == after
    assert store.read("w").tolist() == [3.0] * 3


def test_views_are_of_one_moment() -> None:
    store, both = new_store(v=0, w=0), lower_program(lambda v, w, x: [v + x, w + x], [F32] * 3, 2).compile()
    stop = threading.Event()

    def add() -> None:
        while not stop.is_set():
            store.call(both, ["v", "w"], [], [ONES])

    with ThreadPoolExecutor(1) as pool:
        adding = pool.submit(add)
        seen = [[view.tolist()[0] for view in store.views(["v", "w"])] for _ in range(200)]
        stop.set()
        adding.result(WAIT_S)
    assert all(v == w for v, w in seen)
    assert sorted(seen) == seen


def test_an_array_that_was_read_stays_valid() -> None:
    store = new_store(w=0)
    arrays = []
    for count in range(4):
        arrays.append(store.read("w"))
        arrays.append(store.read("w"))
        for _ in range(count):
            store.call(ADD, ["w"], [], [ONES])
    assert [array.tolist()[0] for array in arrays] == [0, 0, 0, 0, 1, 1, 3, 3]


def test_what_was_read_is_a_copy_and_the_variables_own_buffer_is_still_donated() -> None:
    store = new_store(w=0)
    copy = store.read("w")
    assert in_store(store, "w") is not copy
    for _ in range(2):
        old = in_store(store, "w")
        store.call(ADD, ["w"], [], [ONES])
        assert old.is_deleted()
    assert not copy.is_deleted()
    store.write("w", copy)
    copy.delete()
    assert not in_store(store, "w").is_deleted()


def test_operands_and_variables_that_are_only_read_keep_their_buffers() -> None:
    store = new_store(w=1, v=2)
    program = lower_program(lambda w, v, x: [w + v + x], [F32] * 3, 1, 1).compile()
    operand, read = jnp.full(3, 4, jnp.float32), in_store(store, "v")
    for _ in range(2):
        store.call(program, ["w"], ["v"], [operand])
    assert store.read("w").tolist() == [13.0] * 3
    assert not read.is_deleted()
    assert operand.tolist() == [4.0] * 3


def test_an_assigned_operand_stays_valid() -> None:
    store = new_store(w=0)
    operand = jnp.full(3, 4, jnp.float32)
    for _ in range(2):
        store.call(ASSIGN, ["w"], [], [operand])
        store.call(ADD, ["w"], [], [ONES])
        store.call(ADD, ["w"], [], [ONES])
    assert operand.tolist() == [4.0] * 3
    assert store.read("w").tolist() == [6.0] * 3


def test_an_array_given_by_a_program_stays_valid() -> None:
    store = new_store(w=0)
    (first,) = store.call(ADD_AND_GIVE, ["w"], [], [ONES])
    (second,) = store.call(READ, [], ["w"], [])
    store.call(ADD, ["w"], [], [ONES])
    store.call(ADD, ["w"], [], [ONES])
    assert first.tolist() == second.tolist() == [1.0] * 3


def test_variables_that_got_one_value_have_a_buffer_each() -> None:
    store = new_store(w=0, v=0, u=5)
    spread = lower_program(lambda w, v, u: [u, u, u], [F32] * 3, 2, 1).compile()
    (given,) = store.call(spread, ["w", "v"], ["u"], [])
    for count, key in enumerate(("w", "v", "u")):
        store.call(ADD, [key], [], [jnp.full(3, count, jnp.float32)])
    assert [store.read(key).tolist()[0] for key in ("w", "v", "u")] == [5, 6, 7]
    assert given.tolist() == [5.0] * 3


def test_two_variables_change_places() -> None:
    store = new_store(w=1, v=2)
    swap = lower_program(lambda w, v: [v, w], [F32] * 2, 2).compile()
    for _ in range(3):
        store.call(swap, ["w", "v"], [], [])
    assert store.read("w").tolist() == [2.0] * 3
    assert store.read("v").tolist() == [1.0] * 3


PROGRAMS: Mapping[str, Program] = {
    "ADD": ADD,
    "ASSIGN": ASSIGN,
    "GIVE": ADD_AND_GIVE,
    "READ": READ,
    "COPY": COPY,
}
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["read", "view", "write", "add"]), st.integers(0, 1), st.integers(0, 9)),
        st.tuples(st.sampled_from(sorted(PROGRAMS)), st.integers(0, 1), st.integers(0, 9)),
    ),
    max_size=12,
)


@settings(max_examples=examples(60))
@given(steps=_STEPS)
def test_no_array_that_anyone_holds_ever_changes(steps: Sequence[tuple[str, int, int]]) -> None:
    store, values = new_store(a=0, b=1), {"a": 0.0, "b": 1.0}
    held: list[tuple[Any, float]] = [(ONES, 1.0)]
    for kind, which, number in steps:
        key, other = ("a", "b") if which == 0 else ("b", "a")
        operand, amount = held[number % len(held)]
        match kind:
            case "read":
                held.append((store.read(key), values[key]))
            case "view":
                held.append((store.views([key])[0], values[key]))
            case "write":
                store.write(key, operand)
                values[key] = amount
            case "add":
                store.update(key, "assign_add", operand)
                values[key] += amount
            case "READ":
                held.append((store.call(PROGRAMS[kind], [], [key], [])[0], values[key]))
            case "COPY":
                store.call(PROGRAMS[kind], [key], [other], [])
                values[key] = values[other]
            case _:
                given = store.call(PROGRAMS[kind], [key], [], [operand])
                values[key] = amount if kind == "ASSIGN" else values[key] + amount
                held += [(array, values[key]) for array in given]
    assert [array.tolist() for array, _ in held] == [[value] * 3 for _, value in held]
    assert {key: store.read(key).tolist() for key in values} == {key: [value] * 3 for key, value in values.items()}


# Many threads.


def test_variables_written_together_are_never_seen_apart() -> None:
    store = new_store(a=0, b=0)
    both = lower_program(lambda a, b: [a + 1, b + 1], [F32] * 2, 2).compile()
    look = lower_program(lambda a, b: [a, b], [F32] * 2, 0, 2).compile()
    everyone = threading.Barrier(8)

    def write(_: int) -> None:
        everyone.wait()
        for _ in range(50):
            store.call(both, ["a", "b"], [], [])

    def read(_: int) -> list[tuple[float, float]]:
        everyone.wait()
        pairs = [store.call(look, [], ["a", "b"], []) for _ in range(50)]
        return [(a.tolist()[0], b.tolist()[0]) for a, b in pairs]

    with ThreadPoolExecutor(8) as pool:
        writers = [pool.submit(write, index) for index in range(4)]
        readers = [pool.submit(read, index) for index in range(4)]
        seen = [pair for reader in readers for pair in reader.result()]
        for writer in writers:
            writer.result()
    assert all(a == b for a, b in seen)
    assert store.read("a").tolist() == store.read("b").tolist() == [200.0] * 3


def test_adds_from_many_threads_all_count() -> None:
    store = new_store(w=0)
    everyone = threading.Barrier(8)

    def work(index: int) -> None:
        everyone.wait()
        for _ in range(25):
            if index % 2:
                store.call(ADD, ["w"], [], [ONES])
            else:
                store.update("w", "assign_add", ONES)
            assert store.read("w").tolist()[0] >= 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert store.read("w").tolist() == [200.0] * 3


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
    """A program over one variable that is being run on a thread until it is let go."""

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


def test_nobody_waits_for_a_step_but_who_asks_for_its_variables() -> None:
    store = new_store(w=1.0, v=2.0, u=3.0)
    held = Held(store, "w")
    assert store.read("v").tolist() == [2.0] * 3
    store.call(ADD, ["v"], [], [ONES])
    store.update("u", "assign_add", ONES)
    assert store.snapshot(["u", "v"])["v"].tolist() == [3.0] * 3
    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(store.read, "w"), pool.submit(store.snapshot, ["v", "w"])]
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
        for use in (lambda: store.read("w"), lambda: store.snapshot(["w"]), lambda: store.write("w", ONES)):
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
            seen = [store.snapshot(["w", "v"]) for _ in range(20)]
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
    store.drop("w")
    assert "w" in store
    held.end()
    store.read("v")
    assert "w" not in store


def test_a_step_takes_a_copy_of_what_has_been_handed_out() -> None:
    store = new_store(w=1.0)
    given, taken = store.snapshot(["w"])["w"], list[jax.Array]()

    def program(written: Any, read: Any) -> Any:
        taken.extend(written)
        return written, None

    store.table.run(StepState(["w"], [], "step"), program, ())
    assert pointer(taken[0]) != pointer(given)
    assert store.read("w").tolist() == [1.0] * 3
