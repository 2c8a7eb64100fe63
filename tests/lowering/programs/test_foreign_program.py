"""The limits of a program from another process, however its bytes were made."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import flatbuffers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import export
from jax._src.export import serialization_generated as tables

from dflow.lowering.programs.foreign_program import read_program, write_program
from dflow.lowering.programs.program import export_program, load_program
from dflow.tracing.errors import WireError
from dflow.tracing.ir.types import ArrayType
from tests.effort import examples

F32 = ArrayType(np.dtype("float32"), (3,))
ALLOWED: list[Callable[[jax.Array], Any]] = [
    lambda x: jnp.linalg.cholesky(jnp.diag(x)),
    lambda x: tuple(jnp.linalg.eigh(jnp.diag(x))),
    lambda x: jax.random.normal(jax.random.key(0), (3,)) + x,
    lambda x: jax.lax.top_k(x, 2),
    lambda x: jax.lax.fori_loop(0, 3, lambda _, y: y * 2, x),
]


@pytest.mark.parametrize("fn", ALLOWED)
def test_what_jax_exports_by_itself_is_read(fn: Callable[[jax.Array], Any]) -> None:
    blob = write_program(export.export(jax.jit(fn))(F32.struct))
    assert jax.tree.leaves(read_program(blob).call(jnp.ones(3)))


def export_unchecked(fn: Callable[..., Any], target: str) -> bytes:
    """Export as an attacker would: JAX's check at the sender is disabled."""
    allowed = [export.DisabledSafetyCheck.custom_call(target)]
    return write_program(export.export(jax.jit(fn), disabled_checks=allowed)(F32.struct))


def calling(target: str) -> Callable[[jax.Array], jax.Array]:
    def call(x: jax.Array) -> jax.Array:
        found: jax.Array = jax.ffi.ffi_call(target, F32.struct)(x)
        return found

    return call


@pytest.mark.parametrize("target", ["xla_ffi_python_cpu_callback", "xla_python_cpu_callback", "of_some_user"])
def test_a_call_of_what_jax_does_not_guarantee_is_refused(target: str) -> None:
    """Calls into Python receive a pointer that comes from the program itself."""
    blob = export_unchecked(calling(target), target)
    assert export.deserialize(bytearray(blob)).disabled_safety_checks
    with pytest.raises(WireError, match=f"program .* calls '{target}', which a program from another process may not"):
        load_program(blob, 0)


def test_a_call_inside_a_branch_or_a_loop_is_found() -> None:
    inner = calling("hidden")

    def call(x: jax.Array) -> jax.Array:
        looped: jax.Array = jax.lax.fori_loop(0, 2, lambda _, y: jax.lax.cond(y[0] > 0, inner, lambda z: z, y), x)
        return looped

    with pytest.raises(WireError, match="calls 'hidden'"):
        load_program(export_unchecked(call, "hidden"), 0)


@pytest.mark.parametrize("op", ["infeed", "outfeed"])
def test_a_program_that_waits_for_the_host_is_refused(op: str) -> None:
    text = {
        "infeed": '%t = stablehlo.create_token : !stablehlo.token\n %0:2 = "stablehlo.infeed"(%t) '
        '{infeed_config = ""} : (!stablehlo.token) -> (tensor<3xf32>, !stablehlo.token)\n return %0#0 : tensor<3xf32>',
        "outfeed": '%t = stablehlo.create_token : !stablehlo.token\n %0 = "stablehlo.outfeed"(%arg0, %t) '
        '{outfeed_config = ""} : (tensor<3xf32>, !stablehlo.token) -> !stablehlo.token\n return %arg0 : tensor<3xf32>',
    }[op]
    good = export.export(jax.jit(lambda x: x + 1))(F32.struct)
    main = f"func.func public @main(%arg0: tensor<3xf32>) -> tensor<3xf32> {{ {text} }}"
    with pytest.raises(WireError, match=f"does 'stablehlo.{op}', which a program from another process may not"):
        read_program(replace(good, mlir_module_serialized=main.encode()).serialize())


def test_bytecode_is_refused_unread() -> None:
    """Its reader crashes on some malformed bytes."""
    blob = export.export(jax.jit(lambda x: x + 1))(F32.struct).serialize()
    with pytest.raises(WireError, match="are no exported program: UnicodeDecodeError"):
        read_program(blob)


def test_a_tree_that_unfolds_without_end_is_refused() -> None:
    """Each node contains the node below twice, so 200 bytes stand for 2^60 leaves."""
    builder = flatbuffers.Builder()
    tables.PyTreeDefStart(builder)
    tables.PyTreeDefAddKind(builder, tables.PyTreeDefKind.leaf)
    node = tables.PyTreeDefEnd(builder)
    for _ in range(60):
        tables.PyTreeDefStartChildrenVector(builder, 2)
        builder.PrependUOffsetTRelative(node)
        builder.PrependUOffsetTRelative(node)
        children = builder.EndVector()
        tables.PyTreeDefStart(builder)
        tables.PyTreeDefAddKind(builder, tables.PyTreeDefKind.list)
        tables.PyTreeDefAddChildren(builder, children)
        node = tables.PyTreeDefEnd(builder)
    tables.ExportedStart(builder)
    tables.ExportedAddInTree(builder, node)
    tables.ExportedAddOutTree(builder, node)
    builder.Finish(tables.ExportedEnd(builder))
    with pytest.raises(WireError, match="trees of more than"):
        read_program(builder.Output())


GOOD = export_program(lambda x: [x * 2 + 1], [F32])


@settings(max_examples=examples(100), deadline=None)
@given(st.data())
def test_damaged_programs_are_refused_or_are_other_programs(data: st.DataObject) -> None:
    blob = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 3))):
        blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(WireError):
        read_program(blob)


@given(st.binary(max_size=200) | st.integers(0, len(GOOD) - 64).map(lambda size: GOOD[:size]))
def test_any_bytes_and_a_program_cut_short_are_refused(data: bytes) -> None:
    with pytest.raises(WireError, match=f"{len(data)} bytes are no exported program"):
        read_program(data)
