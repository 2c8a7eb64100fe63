"""Repeated reads of the same variables see the same values as reads of the store, whatever happened in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflow.lowering.programs.program import lower_program
from dflow.lowering.state import repeated_views
from dflow.lowering.state.repeated_views import RepeatedViews
from dflow.lowering.state.store import Store, has_view
from dflow.tracing.errors import VariableError
from dflow.tracing.ir.types import ArrayType

F32 = ArrayType(np.dtype("float32"), (3,))
NAMES = ("a", "b", "c")
ADD = {count: lower_program(lambda *w: [v + 1 for v in w], [F32] * count, count).compile() for count in (1, 2, 3)}


def store_of(names: Sequence[str] = NAMES) -> Store:
    store = Store()
    for number, name in enumerate(names):
        store.create(name, F32, lambda number=number: jnp.full(3, number, jnp.float32))
    return store


def repeated_add(store: Store, keys: Sequence[str]) -> Callable[[], Any]:
    """Return a call that adds 1 to variables, and keeps them from call to call."""
    program = ADD[len(keys)]
    state = store.step_state(program, keys, ())
    return lambda: store.call(program, keys, (), (), state)


@given(
    keys=st.lists(st.sampled_from(NAMES), min_size=1, unique=True),
    actions=st.lists(st.sampled_from(["read", "add all", "add reversed", "add one", "write", "snapshot"]), max_size=20),
)
def test_they_equal_snapshots(keys: list[str], actions: list[str]) -> None:
    store = store_of()
    views = RepeatedViews(store, keys)
    do: dict[str, Callable[[], Any]] = {
        "add all": repeated_add(store, NAMES),
        "add reversed": repeated_add(store, NAMES[::-1]),
        "add one": repeated_add(store, NAMES[1:2]),
        "write": lambda: store.write("b", np.full(3, 100, np.float32)),
        "snapshot": lambda: store.snapshot(NAMES),
        "read": views,
    }
    for action in actions:
        do[action]()
        before = {key: np.array(value) for key, value in store.snapshot(keys).items()} if action == "read" else None
        read = views()
        expected = before or store.snapshot(keys)
        for key, value in zip(keys, read, strict=True):
            np.testing.assert_array_equal(value, expected[key])


def test_views_stay_valid_when_their_variables_are_overwritten() -> None:
    store = store_of()
    add, views = repeated_add(store, NAMES), RepeatedViews(store, NAMES)
    add()
    views()
    held = views()
    copies = [np.array(value) for value in held]
    add()
    np.testing.assert_array_equal(held, copies)
    np.testing.assert_array_equal(views(), [copy + 1 for copy in copies])


def test_a_value_overwritten_while_it_is_read_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of()
    add, views = repeated_add(store, NAMES), RepeatedViews(store, NAMES)
    add()
    views()
    taken = np.asarray

    def overwriting(value: Any) -> Any:
        monkeypatch.setattr(np, "asarray", taken)
        add()  # deletes `value`
        return taken(value)

    monkeypatch.setattr(np, "asarray", overwriting)
    assert [float(value[0]) for value in views()] == [2, 3, 4]


def test_a_variable_that_is_gone_is_named() -> None:
    store = store_of()
    add, views = repeated_add(store, NAMES), RepeatedViews(store, NAMES)
    add()
    views()
    store.table.forget("b", "b is gone", "make it again")
    with pytest.raises(VariableError, match="b is gone"):
        views()


def test_a_value_may_be_overwritten_right_after_it_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of()
    add, views, read = repeated_add(store, NAMES), RepeatedViews(store, NAMES), store.views
    add()

    def overwritten(value: Any) -> bool:
        add()  # deletes `value`
        return has_view(value)

    def overwriting(keys: Sequence[str]) -> Any:
        values = read(keys)
        add()  # keeps what these are views of
        monkeypatch.setattr(repeated_views, "has_view", overwritten)
        return values

    monkeypatch.setattr(store, "views", overwriting)
    assert [float(value[0]) for value in views()] == [1, 2, 3]
