"""Values of variables: read, written, aliased and donated, with as few copies as possible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflow.lowering.programs.program import Program, lower_program
from dflow.lowering.state.store import Store
from dflow.tracing.errors import VariableError
from dflow.tracing.ir.types import ArrayType
from tests.effort import examples
from tests.lowering.state.store_programs import ADD, F32, ONES, new_store, pointer


def in_store(store: Store, key: str) -> jax.Array:
    """Return the array in the store, without handing it out."""
    return store.table.buffer(key)


ASSIGN = lower_program(lambda w, x: [x], [F32, F32], 1).compile()
ADD_AND_GIVE = lower_program(lambda w, x: [w + x, w + x], [F32, F32], 1).compile()
READ = lower_program(lambda w: [w], [F32], 0, 1).compile()
COPY = lower_program(lambda w, v: [v], [F32, F32], 1, 1).compile()


def test_a_python_number_is_held_as_its_type_and_not_weak() -> None:
    store = Store()
    store.create("k", ArrayType(np.dtype("float32"), ()), lambda: 1.0)
    assert not store.read("k").weak_type


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
