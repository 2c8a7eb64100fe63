"""The JAX primitives that record state: reads and writes of variables, and the names of values.

Each has a rule for what runs at once, by the variable's home, and rules for what JAX may do to it: under plain
`jax.grad` a write that depends on what is differentiated is refused, for JAX would drop it; so is one under `vmap`
whose value differs along the batch. Compiled by JAX alone they are refused, for then nobody keeps the state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

from dflow.tracing.errors import DflowError, LostWriteError, PlainJitError
from dflow.tracing.jax_frontend import Access, Handle, ResourceEffect, line_bound
from dflow.tracing.source import at, caller
from dflow.tracing.types import ArrayType


def _aval(type: ArrayType) -> Any:
    return jax.core.ShapedArray(type.shape, type.dtype)


def _refuse_batched_write(args: Sequence[Any], dims: Sequence[Any], *, handle: Handle) -> Any:
    raise DflowError(
        f"variable {handle.name!r} is written under vmap with a value that differs along the batch; which of the "
        f"values should it hold? Reduce over the batch first, or write outside the vmap{at(line_bound())}"
    )


def _refuse_lost_write(primals: Sequence[Any], tangents: Sequence[Any], *, handle: Handle, bind: Any) -> Any:
    if all(type(tangent) is ad.Zero for tangent in tangents):
        return bind.bind(*primals, handle=handle), []
    raise LostWriteError(
        f"variable {handle.name!r} is written a value that depends on what jax.grad differentiates, and JAX "
        f"would drop that write{at(line_bound())}\n"
        "  use dflow.grad or dflow.value_and_grad in the place of jax.grad: they carry the state through; "
        "or write jax.lax.stop_gradient(value)"
    )


def _refuse_plain_jit(*_: Any, handle: Handle, **__: Any) -> Any:
    raise PlainJitError(
        f"variable {handle.name!r} is used in a function that JAX compiles by itself{at(caller())}\n"
        f"  decorate the outermost function with @dflow.jit, or pass it the value, {handle.name}.read()"
    )


def _state_primitive(name: str, accesses: tuple[Access, ...], *, gives: bool) -> Any:
    primitive = jex.Primitive(name)
    primitive.multiple_results = not gives

    def abstract(*_: Any, handle: Handle) -> Any:
        effects = {ResourceEffect(access, handle) for access in accesses}
        return (_aval(handle.type) if gives else []), effects

    primitive.def_effectful_abstract_eval(abstract)
    mlir.register_lowering(primitive, _refuse_plain_jit)
    return primitive


read_p = _state_primitive("var_read", (Access.READ,), gives=True)
assign_p = _state_primitive("var_assign", (Access.WRITE,), gives=False)
assign_add_p = _state_primitive("var_assign_add", (Access.READ, Access.WRITE), gives=False)
WRITES = (assign_p, assign_add_p)

read_p.def_impl(lambda *, handle: handle.variable.home.read(handle.variable))


def _assign_now(value: jax.Array, *, handle: Handle) -> list[Any]:
    handle.variable.home.write(handle.variable, value)
    return []


def _assign_add_now(delta: jax.Array, *, handle: Handle) -> list[Any]:
    handle.variable.home.add(handle.variable, delta)
    return []


assign_p.def_impl(_assign_now)
assign_add_p.def_impl(_assign_add_now)


def _register_write_rules(primitive: Any) -> None:
    def jvp(primals: Sequence[Any], tangents: Sequence[Any], *, handle: Handle) -> Any:
        return _refuse_lost_write(primals, tangents, handle=handle, bind=primitive)

    ad.primitive_jvps[primitive] = jvp
    batching.primitive_batchers[primitive] = _refuse_batched_write


for _primitive in WRITES:
    _register_write_rules(_primitive)

name_p = jex.Primitive("name")
name_p.def_impl(lambda value, *, name: value)
name_p.def_abstract_eval(lambda value, *, name: value)
ad.primitive_jvps[name_p] = lambda primals, tangents, *, name: (name_p.bind(*primals, name=name), tangents[0])
batching.defvectorized(name_p)
mlir.register_lowering(name_p, lambda ctx, value, *, name: [value])
