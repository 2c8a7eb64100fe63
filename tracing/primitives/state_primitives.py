"""The JAX primitives that record state: reads, lookups and updates of variables, and the names of values.

Outside of a trace, each is run by the variable's home. Its rules say what JAX may do to it: compiling it without dflow
is refused, since the state would be lost, and so is an update that depends on a value differentiated by plain
`jax.grad`, since JAX would drop the update.

Under `vmap` a read is shared and a lookup is batched. An update by a value that is the same for the whole batch
happens once. An update by values that differ is refused, unless its `reduce` sums them. An update in a branch is
refused if the elements of the batch take different branches: JAX runs both branches then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex
from jax.extend.core import primitives as jax_primitives
from jax.interpreters import ad, batching, mlir

from dflow.tracing.errors import LostWriteError, PlainJitError, VariableError
from dflow.tracing.ir.explicit_sharding import axes_split_over, manual_axes, sharding_here
from dflow.tracing.ir.types import ArrayType, type_of_aval
from dflow.tracing.ir.updates import KINDS, lookup_sharding, lookup_type
from dflow.tracing.jax_frontend import (
    Access,
    Handle,
    ResourceEffect,
    accesses,
    closed_parts,
    line_bound,
    line_of_program,
    wrap_differentiation,
)
from dflow.tracing.primitives.host_primitives import BATCHED, WatchedPrimitive
from dflow.tracing.primitives.namesakes import warn_of_namesakes
from dflow.tracing.source import as_code


def _aval(type: ArrayType) -> Any:
    return jax.core.ShapedArray(type.shape, type.dtype, sharding=type.sharding)


def _type_here(handle: Handle) -> ArrayType:
    """The type of a variable's value in the trace that runs now."""
    _refuse_whole_in_shards(handle)
    held: ArrayType = handle.type
    return replace(held, sharding=sharding_here(held.sharding, held.shape))


def _refuse_whole_in_shards(handle: Handle) -> None:
    """Raise VariableError where a variable that is divided along an axis is used inside a `shard_map` over it."""
    if handle.type.sharding is None or not (axes := axes_split_over(handle.type.sharding) & manual_axes()):
        return
    names = ", ".join(sorted(map(repr, axes)))
    raise VariableError(
        f"variable {handle.name!r} holds {handle.type} and is used inside a shard_map over {names}, where each shard "
        f"would need the whole of it",
        f"pass its value to the shard_map, {as_code(handle.name)}.read() with its own spec in in_specs, and write "
        "what it returns",
    )


def _refuse_plain_jit(*_: Any, handle: Handle, **__: Any) -> Any:
    raise PlainJitError(
        f"variable {handle.name!r} is used in a function that JAX compiles without dflow",
        "decorate the outermost function with @dflow.jit, or pass it the variable as an argument, to read it alone",
        at=line_of_program(),
    )


def _state_primitive(name: str, abstract: Callable[..., Any], run: Callable[..., Any]) -> Any:
    """A primitive on a variable. Outside of a trace it is run by `run(variable, *operands, **params)`."""

    def run_now(*operands: Any, handle: Handle, **params: Any) -> Any:
        variable = handle.variable
        warn_of_namesakes((variable,))
        return run(variable, *operands, **params)

    primitive = jex.Primitive(name)
    primitive.def_effectful_abstract_eval(abstract)
    primitive.def_impl(run_now)
    mlir.register_lowering(primitive, _refuse_plain_jit)
    return primitive


def _update_now(variable: Any, *operands: Any, kind: str, reduce: str | None) -> list[Any]:
    variable.home.update(variable, kind, *operands)
    return []


def _read_type(*, handle: Handle) -> Any:
    return _aval(_type_here(handle)), {ResourceEffect(Access.READ, handle)}


def value_type(handle: Handle) -> Any:
    """The type of a variable's value, as JAX has it."""
    return _read_type(handle=handle)[0]


def _gather_type(indices: Any, *, handle: Handle, once: bool) -> Any:
    held, positions = _type_here(handle), type_of_aval(indices)
    rows = replace(lookup_type(held, positions), sharding=lookup_sharding(held, positions))
    return _aval(rows), {ResourceEffect(Access.READ, handle)}


def _update_type(*_: Any, handle: Handle, kind: str, reduce: str | None) -> Any:
    _refuse_whole_in_shards(handle)
    touches: tuple[Access, ...]
    if KINDS[kind].sign:
        touches = (Access.SUM if reduce == "sum" else Access.ADD,)
    else:
        touches = (Access.READ, Access.WRITE) if KINDS[kind].reads else (Access.WRITE,)
    return [], {ResourceEffect(access, handle) for access in touches}


#: The value of a variable.
read_p = _state_primitive("var_read", _read_type, lambda variable: variable.home.read(variable))
#: Rows of a variable. With `once` no row is looked up twice: indices are equal only past the end, and these come last.
gather_p = _state_primitive(
    "var_gather", _gather_type, lambda variable, indices, once: variable.home.gather(variable, indices)
)
#: An update; `kind` is a key of `updates.KINDS`, `reduce` is "sum" or None.
update_p = _state_primitive("var_update", _update_type, _update_now)
update_p.multiple_results = True


def record_update(variable: Any, kind: str, *operands: Any) -> None:
    """Update a variable: `kind` is a key of `updates.KINDS`, and the operands fit it."""
    update_p.bind(*operands, handle=variable.handle, kind=kind, reduce=None)


def _update_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, handle: Handle, **params: Any) -> Any:
    if all(type(tangent) is ad.Zero for tangent in tangents):
        return update_p.bind(*primals, handle=handle, **params), []
    raise LostWriteError(
        f"variable {handle.name!r} is written a value that depends on what jax.grad differentiates, and JAX "
        f"would drop that write",
        "use dflow.grad or dflow.value_and_grad instead of jax.grad: they carry the state through; "
        "or write jax.lax.stop_gradient(value)",
        at=line_bound(),
    )


def _gather_batched(args: Sequence[Any], dims: Sequence[Any], *, handle: Handle, once: bool) -> Any:
    return gather_p.bind(_batch_first(args[0], dims[0]), handle=handle, once=False), 0


def _update_batched(
    args: Sequence[Any], dims: Sequence[Any], *, handle: Handle, kind: str, reduce: str | None
) -> tuple[list[Any], list[Any]]:
    if reduce is None:
        raise VariableError(
            f"variable {handle.name!r} is written under vmap with a value that differs along the batch; which of the "
            f"values should it hold?",
            "reduce over the batch first, write outside the vmap, or sum over the batch with assign_add or"
            '\n  scatter_add and reduce="sum"',
            at=line_bound(),
        )
    whole = [_batch_first(arg, dim) for arg, dim in zip(args, dims, strict=True)]
    if not KINDS[kind].by_rows:
        operands = [whole[0].sum(0, dtype=whole[0].dtype)]
    else:
        size = next(arg.shape[dim] for arg, dim in zip(args, dims, strict=True) if dim is not None)
        operands = [
            jnp.broadcast_to(arg, (size, *arg.shape)) if dim is None else arg
            for arg, dim in zip(whole, dims, strict=True)
        ]
    return update_p.bind(*operands, handle=handle, kind=kind, reduce=reduce), []


def _batch_first(value: Any, dim: Any) -> Any:
    return value if dim is None else jnp.moveaxis(value, dim, 0)


ad.primitive_jvps[update_p] = _update_jvp
ad.defjvp(gather_p, None)
batching.primitive_batchers[gather_p] = _gather_batched
batching.primitive_batchers[update_p] = _update_batched


def _written_names(bodies: Sequence[Any]) -> str:
    """The names of the variables that jaxprs write."""
    effects = set().union(*(closed_parts(body)[0].effects for body in bodies))
    return ", ".join(variable.name for variable in accesses(effects)[1])


def _refuse_divided_writes(
    primitive: Any, bodies_of: Callable[..., list[Any]], is_divided: Callable[..., bool]
) -> None:
    """Make `vmap` of a control-flow primitive raise VariableError where the elements may disagree about updates.

    JAX would run an update for every element, also for those whose condition excludes it.
    """
    batch = batching.fancy_primitive_batchers[primitive]

    def checked(axis_data: Any, args: Any, dims: Any, **params: Any) -> Any:
        names = _written_names(bodies_of(**params))
        if names and is_divided(dims):
            raise VariableError(
                f"variables ({names}) are written under vmap inside a {primitive.name} that may go another way for "
                f"each element of the batch",
                "write outside the vmap, or choose the value with jnp.where and write that",
                at=line_bound(),
            )
        return batch(axis_data, args, dims, **params)

    batching.fancy_primitive_batchers[primitive] = checked


_refuse_divided_writes(
    jax_primitives.cond_p,
    lambda *, branches, **_: list(branches),
    lambda dims: dims[0] is not None,
)
# Whether the batch agrees on the condition is known only after JAX's fixed point; without a batch it is not asked.
_refuse_divided_writes(
    jax_primitives.while_p, lambda *, cond_jaxpr, body_jaxpr, **_: [cond_jaxpr, body_jaxpr], lambda dims: True
)


def _refuse_lost_writes(rule: Callable[..., Any]) -> Callable[..., Any]:
    """JAX's rule for the derivative of a scan, which raises LostWriteError where the scan writes to variables.

    JAX would take what does not depend on the differentiated input out of the scan, and run it once or never.
    """

    def checked(*args: Any, **params: Any) -> Any:
        if names := _written_names([params["jaxpr"]]):
            raise LostWriteError(
                f"variables ({names}) are written in a scan, map or fori_loop that plain jax.grad differentiates, and "
                f"JAX would run those writes once or never",
                "use dflow.grad or dflow.value_and_grad instead of jax.grad: they carry the state through",
                at=line_bound(),
            )
        return rule(*args, **params)

    return checked


wrap_differentiation(jax_primitives.scan_p, _refuse_lost_writes)


def _identity(primitive: Any) -> Any:
    """Register a primitive that returns its operand unchanged; its parameters only appear in the graph."""
    primitive.def_impl(lambda value, **_: value)
    primitive.def_abstract_eval(lambda value, **_: value)
    ad.primitive_jvps[primitive] = lambda primals, tangents, **params: (primitive.bind(*primals, **params), tangents[0])
    mlir.register_lowering(primitive, lambda ctx, value, **_: [value])
    return primitive


#: A value with its name in the graph.
name_p = _identity(jex.Primitive("name"))
batching.defvectorized(name_p)

#: A value with the codec for its way to another task; `gradient` is the codec for the way of its gradient.
wire_p = _identity(jex.Primitive("wire"))
ad.deflinear2(wire_p, lambda given, _, *, codec, gradient: [wire_p.bind(given, codec=gradient, gradient=codec)])
batching.defvectorized(wire_p)


def _refuse_batched(trace: str, params: Any) -> None:
    if trace == BATCHED:
        raise VariableError(
            f"generator {params['generator']!r} is split under vmap, where all of the batch would get the same key",
            "split before, keys = generator.split(n), and map over the keys too",
            at=line_bound(),
        )


#: The state of a generator as it is split, which happens once and not for each element of a batch.
split_p = _identity(WatchedPrimitive("generator_split", _refuse_batched))
