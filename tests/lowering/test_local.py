"""Functions over variables of this process: their results, and the lifetime of values."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflow.lowering.local import LocalHome
from dflow.tracing.errors import VariableError
from dflow.tracing.jaxprs.trace import trace
from dflow.tracing.state.context import home
from dflow.tracing.state.resources import Variable


@pytest.fixture
def here() -> Iterator[LocalHome]:
    """A new state backend for the variables of a test."""
    local = LocalHome()
    with home(local):
        yield local


def lower(local: LocalHome, fn: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """Return the function lowered for this process and arguments of these types."""
    traced = trace(fn, args, {})
    runner = local.runner(traced, check=True, observe=None)
    return lambda *args: jax.tree_util.tree_unflatten(traced.out_tree, runner(jax.tree_util.tree_leaves(args)))


def call(local: LocalHome, fn: Callable[..., Any], *args: Any) -> Any:
    """Lower and run once."""
    return lower(local, fn, *args)(*args)


# Results of functions.


def test_an_output_that_is_an_argument_is_an_array_of_its_own(here: LocalHome) -> None:
    given = np.ones(3, np.float32)
    same, number, doubled = call(here, lambda x, n: (x, n, x * 2), given, 7)
    given[:] = 5
    assert isinstance(same, jax.Array)
    assert same.tolist() == [1.0] * 3
    assert isinstance(number, jax.Array)
    assert (number.item(), number.dtype) == (7, jnp.int32)
    assert doubled.tolist() == [2.0] * 3


# Variables in the store.


def plus_one(variable: Variable) -> jax.Array:
    return variable.read() + 1


def test_the_value_goes_with_the_variable(here: LocalHome) -> None:
    w, v = Variable(jnp.ones(3), name="w"), Variable(jnp.ones(3), name="v")
    run = lower(here, functools.partial(plus_one, w))
    assert len(here.store.table.entries) == 2
    del v
    gc.collect()
    assert list(here.store.table.entries) == [w.key]
    # Variables that a function keeps alive.
    key = w.key
    del w
    gc.collect()
    assert list(here.store.table.entries) == [key]
    assert run().tolist() == [2.0] * 3
    del run
    gc.collect()
    assert not here.store.table.entries


@pytest.mark.filterwarnings("ignore::dflow.DuplicateNameWarning")
def test_a_name_taken_over_with_the_same_type_is_another_variable(here: LocalHome) -> None:
    old = Variable(jnp.ones(3), name="w")
    read_old = lower(here, old.read)
    new = Variable(jnp.zeros(3), name="w")
    old.assign_add(jnp.ones(3))
    assert new.read().tolist() == [0.0] * 3
    assert read_old().tolist() == old.read().tolist() == [2.0] * 3
    del old, read_old
    gc.collect()
    assert new.read().tolist() == [0.0] * 3
    with pytest.raises(VariableError, match="holds f32"):
        Variable(jnp.zeros(4), name="w")


def test_a_name_taken_with_another_type_is_refused_with_both_lines(here: LocalHome) -> None:
    first = Variable(jnp.ones(3), name="w")
    message = (
        r"variable 'w' holds f32\[3\], but is created again with i32\[2\]\n"
        r"  at .*test_local.py:\d+\n"
        rf"  it was first made\n  at {first.loc}\n"
        r"  give one of them another name"
    )
    with pytest.raises(VariableError, match=message):
        Variable(jnp.ones(2, jnp.int32), name="w")
    assert first.read().tolist() == [1.0] * 3
    assert list(here.store.table.entries) == [first.key]
    first.loc = None  # made by a command, say
    with pytest.raises(VariableError, match=r"i32\[2\]\n  at .*:\d+\n  give one of them another name or `prefix=`"):
        Variable(jnp.ones(2, jnp.int32), name="w")


def test_an_interactive_session_is_told_what_else_keeps_a_variable(
    here: LocalHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Variable(jnp.ones(3), name="w")
    monkeypatch.setattr("sys.ps1", ">>> ", raising=False)
    with pytest.raises(VariableError, match=r"that use it\n  the last error may keep it too: .*%xdel"):
        Variable(jnp.ones(2), name="w")
    assert first.read().tolist() == [1.0] * 3
