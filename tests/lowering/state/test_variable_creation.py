"""Creation in a store: the first caller creates, later callers get what exists."""

from __future__ import annotations

import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflow.lowering.state.store import Store
from dflow.lowering.values import first_value
from dflow.tracing.errors import DeadlineExceeded, VariableError
from dflow.tracing.ir.types import ArrayType
from tests.lowering.state.store_programs import ADD, F32, ONES, WAIT_S, new_store


def noted(made: list[float], value: float) -> jax.Array:
    """Return an initial value, and record that it was made."""
    made.append(value)
    return jnp.full(3, value, jnp.float32)


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


def test_nobody_waits_for_an_initialiser_but_who_creates_the_same() -> None:
    store, begun, go_on = new_store(v=2), threading.Event(), threading.Event()

    def slow() -> jax.Array:
        begun.set()
        assert go_on.wait(WAIT_S)
        store.create("inner", F32, lambda: store.read("v") * 3)
        return store.read("inner")

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
    # Aligned so that JAX could use the memory without a copy.
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
    store.table.drop("w")
    store.table.drop("w")
    with pytest.raises(VariableError, match=r"no variable 'w' is held here; there are \['v'\]"):
        store.read("w")
    store.table.drop("v")
    with pytest.raises(VariableError, match="no variable 'v' is held here; there are none"):
        store.call(ADD, ["v"], [], [ONES])
    assert store.create("w", F32, lambda: ONES)
