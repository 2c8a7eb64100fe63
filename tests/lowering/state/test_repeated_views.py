"""Repeated reads of the same variables see the same values as reads of the store, whatever happened in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflow.lowering.programs.program import Program, lower_program
from dflow.lowering.state import repeated_views
from dflow.lowering.state.store import Store, has_view
from dflow.tracing.errors import VariableError
from dflow.tracing.ir.types import ArrayType

F32 = ArrayType(np.dtype("float32"), (3,))
NAMES = ("a", "b", "c")
ADD = {count: lower_program(lambda *w: [v + 1 for v in w], [F32] * count, count).compile() for count in (1, 2, 3)}
#: It leaves the earlier values valid, so reading these raises no error.
ADD_AND_KEEP = lower_program(lambda *w: [v + 1 for v in w], [F32] * 3, 3, keeps=True).compile()


def store_of(names: Sequence[str] = NAMES) -> Store:
    store = Store()
    for number, name in enumerate(names):
        store.create(name, F32, lambda number=number: jnp.full(3, number, jnp.float32))
    return store


def repeated_add(store: Store, keys: Sequence[str], program: Program | None = None) -> Callable[[], Any]:
    """Return a call that adds 1 to variables, and keeps them from call to call."""
    program = program or ADD[len(keys)]
    state = store.step_state(program, keys, ())
    return lambda: store.call(program, keys, (), (), state)


@given(
    keys=st.lists(st.sampled_from(NAMES), min_size=1, unique=True),
    actions=st.lists(st.sampled_from(["read", "add all", "add reversed", "add one", "write", "snapshot"]), max_size=20),
)
def test_repeated_views_equal_snapshots(keys: list[str], actions: list[str]) -> None:
    store = store_of()
    views = repeated_views.repeated_views(store, keys)
    do: dict[str, Callable[[], Any]] = {
        "add all": repeated_add(store, NAMES),
        "add reversed": repeated_add(store, NAMES[::-1]),
        "add one": repeated_add(store, NAMES[1:2]),
        "write": lambda: store.write("b", np.full(3, 100, np.float32)),
        "snapshot": lambda: store.read_together(NAMES),
        "read": views,
    }
    for action in actions:
        do[action]()
        before = (
            {key: np.array(value) for key, value in store.read_together(keys).items()} if action == "read" else None
        )
        read = views()
        expected = before or store.read_together(keys)
        for key, value in zip(keys, read, strict=True):
            np.testing.assert_array_equal(value, expected[key])


def test_views_stay_valid_when_their_variables_are_overwritten() -> None:
    store = store_of()
    add, views = repeated_add(store, NAMES), repeated_views.repeated_views(store, NAMES)
    add()
    views()
    held = views()
    copies = [np.array(value) for value in held]
    add()
    np.testing.assert_array_equal(held, copies)
    np.testing.assert_array_equal(views(), [copy + 1 for copy in copies])


@pytest.mark.parametrize("is_in_step", [False, True])
def test_unchanged_values_are_read_without_the_store(monkeypatch: pytest.MonkeyPatch, is_in_step: bool) -> None:
    store = store_of()
    add, views = repeated_add(store, NAMES), repeated_views.repeated_views(store, NAMES)
    if is_in_step:
        add()
    before = views()
    monkeypatch.delattr(Store, "views")
    np.testing.assert_array_equal(views(), before)


@pytest.mark.parametrize("then", ["the step keeps them", "the table has them", "one is replaced"])
def test_values_in_the_table_are_of_one_moment(monkeypatch: pytest.MonkeyPatch, then: str) -> None:
    store = store_of()
    views, value_of = repeated_views.repeated_views(store, NAMES), attrgetter("value")
    add = repeated_add(store, NAMES, ADD_AND_KEEP)
    views()

    def changing(entry: Any) -> Any:
        """All variables change after the value of the first is read."""
        value = value_of(entry)
        if entry is store.table.entry(NAMES[0]):
            monkeypatch.setattr(repeated_views, "_VALUE", value_of)
            add()
            if then == "the table has them":
                store.table.section(lambda: store.table._released(NAMES))
            elif then == "one is replaced":
                store.write(NAMES[0], np.full(3, 1, np.float32))
                store.table.section(lambda: store.table._released(NAMES))
        return value

    monkeypatch.setattr(repeated_views, "_VALUE", changing)
    assert [float(value[0]) for value in views()] == [1, 2, 3]


def test_a_value_overwritten_while_it_is_read_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of()
    add, views = repeated_add(store, NAMES), repeated_views.repeated_views(store, NAMES)
    add()
    views()
    taken = np.asarray

    def overwriting(value: Any) -> Any:
        monkeypatch.setattr(np, "asarray", taken)
        add()  # deletes `value`
        return taken(value)

    monkeypatch.setattr(np, "asarray", overwriting)
    assert [float(value[0]) for value in views()] == [2, 3, 4]


@pytest.mark.parametrize("is_in_step", [False, True])
def test_a_variable_that_is_gone_is_named(is_in_step: bool) -> None:
    store = store_of()
    add, views = repeated_add(store, NAMES), repeated_views.repeated_views(store, NAMES)
    if is_in_step:
        add()
    views()
    store.table.forget("b", "b is gone", "make it again")
    with pytest.raises(VariableError, match="b is gone"):
        views()


def test_a_value_may_be_overwritten_right_after_it_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of()
    add, views, read = repeated_add(store, NAMES), repeated_views.repeated_views(store, NAMES), store.views
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
