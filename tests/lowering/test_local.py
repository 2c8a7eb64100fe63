"""Functions over variables of this process: their results, and the lifetime of values."""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from dflow.lowering.local import LocalHome
from dflow.tracing.devices.device import device_scope
from dflow.tracing.errors import DeviceError, VariableError
from dflow.tracing.jaxprs.trace import trace
from dflow.tracing.state.context import home
from dflow.tracing.state.resources import Variable
from tests.effort import examples
from tests.lowering.meaning import assert_equal_values
from tests.programs.draw import programs
from tests.programs.machines import AtOnce, Traced
from tests.programs.made import ARGUMENTS, variables_of
from tests.programs.statements import Program


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


def test_an_output_that_is_a_closed_over_array_is_an_array_of_its_own(here: LocalHome) -> None:
    closed = np.ones(3, np.float32)
    run = lower(here, lambda: jnp.asarray(closed))
    for _ in range(2):
        result = run()
        assert isinstance(result, jax.Array)
        assert result.tolist() == [1.0] * 3


def test_outputs_that_are_one_value(here: LocalHome) -> None:
    w = Variable(jnp.ones(3), name="w")

    def step(x: jax.Array) -> Any:
        y = x + w.read()
        w.assign(y)
        return y, y, w.read(), x, 3, 3

    run = lower(here, step, jnp.ones(3))
    first = run(jnp.ones(3))
    second = run(jnp.ones(3))
    assert [value.tolist() for value in first] == [[2.0] * 3] * 3 + [[1.0] * 3, 3, 3]
    assert [value.tolist() for value in second] == [[3.0] * 3] * 3 + [[1.0] * 3, 3, 3]
    assert w.read().tolist() == [3.0] * 3


def test_closed_over_arrays_come_before_the_arguments(here: LocalHome) -> None:
    big, other = jnp.arange(3.0), np.full(3, 10, np.float32)
    w = Variable(0.0, name="w")

    def step(x: jax.Array, y: jax.Array) -> jax.Array:
        w.assign_add(x - y)
        return big * x + other + y

    run = lower(here, step, 1.0, 2.0)
    assert run(1.0, 2.0).tolist() == [12.0, 13.0, 14.0]
    assert run(3.0, 1.0).tolist() == [11.0, 14.0, 17.0]
    assert w.read().item() == 1.0


@settings(max_examples=examples(8))
@given(program=programs(most=4))
def test_a_program_does_the_same_at_once_and_lowered(program: Program) -> None:
    def variables(local: LocalHome) -> list[Variable]:
        with home(local):
            return variables_of(program)

    at_once, lowered = LocalHome(), LocalHome()
    eager, traced = AtOnce(variables(at_once)), Traced(variables(lowered))
    run = lower(lowered, lambda x, y: program(traced, x, y), *ARGUMENTS)
    for _ in range(2):
        assert_equal_values(run(*ARGUMENTS), program(eager, *map(jnp.asarray, ARGUMENTS)))
        assert_equal_values([v.read() for v in traced.variables], [v.read() for v in eager.variables])


def test_a_stated_device_is_refused_where_there_is_no_cluster(here: LocalHome) -> None:
    def step(x: jax.Array) -> jax.Array:
        with device_scope("/job:ps/task:0"):
            return x + 1

    with pytest.raises(DeviceError, match=r"no task offers it; the tasks are localhost:0\n  at .*test_local\.py:"):
        lower(here, step, 1.0)


def test_steps_on_many_threads_are_each_whole(here: LocalHome) -> None:
    a, b = Variable(jnp.zeros(3), name="a"), Variable(jnp.zeros(3), name="b")

    def step(x: jax.Array) -> Any:
        a.assign_add(x)
        b.assign_add(x)
        return a.read(), b.read(), x

    run = lower(here, step, jnp.ones(3))
    everyone = threading.Barrier(8)

    def work(_: int) -> list[Any]:
        everyone.wait()
        return [run(jnp.ones(3)) for _ in range(20)]

    with ThreadPoolExecutor(8) as pool:
        results = [result for some in pool.map(work, range(8)) for result in some]
    assert all(one.tolist() == other.tolist() for one, other, _ in results)
    assert sorted(one.tolist()[0] for one, _, _ in results) == list(range(1, 161))


# Variables in the store.


def plus_one(variable: Variable) -> jax.Array:
    return variable.read() + 1


def test_ops_outside_a_function_act_at_once(here: LocalHome) -> None:
    w = Variable(lambda: jnp.ones(3), name="w")
    read = w.read()
    w.assign_add(jnp.ones(3))
    w.assign_add(w.read())
    assert read.tolist() == [1.0] * 3
    assert w.read().tolist() == [4.0] * 3
    w.assign(read)
    w.assign_add(read)
    assert read.tolist() == [1.0] * 3
    assert w.device is None


def test_an_initial_array_stays_the_users(here: LocalHome) -> None:
    array, memory = jnp.ones(3), np.ones(3, np.float32)
    w, v = Variable(array, name="w"), Variable(memory, name="v")

    def step() -> None:
        w.assign_add(jnp.ones(3))
        v.assign_add(jnp.ones(3))

    run = lower(here, step)
    for _ in range(2):
        run()
    memory[:] = 9
    assert array.tolist() == [1.0] * 3
    assert v.read().tolist() == w.read().tolist() == [3.0] * 3


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


def test_a_name_is_free_again_when_its_variable_is_gone(here: LocalHome) -> None:
    Variable(jnp.ones(3), name="w")
    gc.collect()
    assert Variable(jnp.ones(2), name="w").shape == (2,)
