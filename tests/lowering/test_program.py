"""Programs: compiled here, or exported, sent and loaded; which arguments they overwrite and which they hand back."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflow.lowering.program import Program, export_program, load_program, lower_program
from dflow.tracing.types import ArrayType

F32 = ArrayType(np.dtype("float32"), (3,))
I32 = ArrayType(np.dtype("int32"), ())


def compiled(fn: Callable[..., list[jax.Array]], types: list[ArrayType], writes: int) -> Program:
    return lower_program(fn, types, writes).compile()


def exported(fn: Callable[..., list[jax.Array]], types: list[ArrayType], writes: int) -> Program:
    return load_program(export_program(fn, types), writes)


either = pytest.mark.parametrize("make", [compiled, exported])
Make = Callable[[Callable[..., list[jax.Array]], list[ArrayType], int], Program]


def values(count: int) -> list[jax.Array]:
    return [jnp.full(3, index, jnp.float32) for index in range(count)]


def scale(w: jax.Array, v: jax.Array, n: jax.Array) -> list[jax.Array]:
    return [w + v * n, v.sum()]


@either
def test_it_computes_what_its_function_does(make: Make) -> None:
    program = make(scale, [F32, F32, I32], 1)
    renewed, total = program(*values(2), jnp.int32(5))
    assert renewed.tolist() == [5.0] * 3
    assert total.item() == 3.0
    assert program.writes == 1


@either
def test_what_it_writes_is_overwritten_and_nothing_else(make: Make) -> None:
    program = make(lambda a, b, c: [a + c, b + c], [F32] * 3, 2)
    arguments = values(3)
    program(*arguments)
    assert [argument.is_deleted() for argument in arguments] == [True, True, False]


@either
def test_arguments_that_it_ignores_are_taken_all_the_same(make: Make) -> None:
    program = make(lambda w, ignored, x: [x * 2], [F32] * 3, 1)
    (result,) = program(*values(3))
    assert result.tolist() == [4.0] * 3


@either
def test_plain_numpy_arrays_are_taken_and_left_alone(make: Make) -> None:
    program = make(lambda w, x: [w + x], [F32] * 2, 1)
    arguments = [np.ones(3, np.float32), np.ones(3, np.float32)]
    assert program(*arguments)[0].tolist() == [2.0] * 3
    assert [argument.tolist() for argument in arguments] == [[1.0] * 3] * 2


def test_an_exported_program_is_bytes_for_this_platform_and_the_cpu() -> None:
    blob = export_program(scale, [F32, F32, I32], "train_step")
    assert isinstance(blob, bytes)
    read = jax.export.deserialize(bytearray(blob))
    assert read.fun_name == "train_step"
    assert set(read.platforms) == {"cpu", jax.default_backend()}
    for view in (bytearray(blob), memoryview(blob)):
        assert load_program(view, 1)(*values(2), jnp.int32(1))[1].item() == 3.0


@either
def test_results_have_buffers_of_their_own_or_are_known_to_have_not(make: Make) -> None:
    program = make(lambda w, v, x: [x, v, x, v * 2], [F32] * 3, 1)
    arguments = values(3)
    for _ in range(2):
        results = program(jnp.zeros(3, jnp.float32), *arguments[1:])
        handed_on = set(program.forwards or ())
        for number, result in enumerate(results):
            for place, argument in enumerate(arguments):
                if place and result.unsafe_buffer_pointer() == argument.unsafe_buffer_pointer():
                    assert (number, place) in handed_on
        assert [result.tolist()[0] for result in results] == [2, 1, 2, 2]


# What is handed on, for programs that hand on their arguments.


def picking(writes: int, *picks: int) -> Program:
    return Program(lambda *arguments: [arguments[index] for index in picks], writes)


def test_what_is_handed_on_is_not_known_before_the_first_call() -> None:
    assert picking(0, 0).forwards is None


def test_results_that_are_arguments_are_found() -> None:
    program = picking(1, 2, 1, 2)
    program(*values(3))
    assert program.forwards == ((0, 2), (1, 1), (2, 2))


def test_a_new_array_is_handed_on_from_nowhere() -> None:
    program = Program(lambda x: [x + 1], 0)
    program(*values(1))
    assert program.forwards == ()


def test_while_arguments_are_one_array_each_of_them_may_be_the_one_handed_on() -> None:
    program = picking(0, 0)
    one, other = values(2)
    program(one, one)
    assert program.forwards == ((0, 0), (0, 1))
    program(one, other)
    assert program.forwards == ((0, 0),)
    program(one, one)
    assert program.forwards == ((0, 0),)
