"""Programs, compiled here or exported, sent and loaded: the arguments that they overwrite or return."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflow.lowering.programs.program import export_program, load_program, lower_program
from dflow.tracing.ir.types import ArrayType
from tests.lowering.flat_programs import run_flat

F32 = ArrayType(np.dtype("float32"), (3,))
Flat = Callable[..., list[Any]]
I32 = ArrayType(np.dtype("int32"), ())


def compiled(fn: Callable[..., list[jax.Array]], types: list[ArrayType], writes: int) -> Flat:
    return partial(run_flat, lower_program(fn, types, writes).compile(), writes)


def exported(fn: Callable[..., list[jax.Array]], types: list[ArrayType], writes: int) -> Flat:
    return partial(run_flat, load_program(export_program(fn, types), writes), writes)


either = pytest.mark.parametrize("make", [compiled, exported])
Make = Callable[[Callable[..., list[jax.Array]], list[ArrayType], int], Flat]


def values(count: int) -> list[jax.Array]:
    return [jnp.full(3, index, jnp.float32) for index in range(count)]


def scale(w: jax.Array, v: jax.Array, n: jax.Array) -> list[jax.Array]:
    return [w + v * n, v.sum()]


@either
def test_what_it_writes_is_overwritten_and_nothing_else(make: Make) -> None:
    program = make(lambda a, b, c: [a + c, b + c], [F32] * 3, 2)
    arguments = values(3)
    program(*arguments)
    assert [argument.is_deleted() for argument in arguments] == [True, True, False]


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
        assert run_flat(load_program(view, 1), 1, *values(2), jnp.int32(1))[1].item() == 3.0


@either
def test_results_have_buffers_of_their_own(make: Make) -> None:
    program = make(lambda w, v, x: [x, v, x, v * 2], [F32] * 3, 1)
    arguments = values(3)
    for _ in range(3):
        results = program(jnp.zeros(3, jnp.float32), *arguments[1:])
        places = [array.unsafe_buffer_pointer() for array in (*results, *arguments[1:])]
        assert len(set(places)) == len(places)
        assert [result.tolist()[0] for result in results] == [2, 1, 2, 2]
