"""A compiled XLA computation over state, and its form as bytes for another process.

A program takes the list of the values of the variables that it writes, the list of values that it only reads, and its
operands. It returns the list of the new values of the written variables, and the list of its results. The buffers of
the written variables are donated, unless the program may fail while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from types import MappingProxyType
from typing import Any

import jax
from jax import export
from jax import jit as jax_jit
from jax.sharding import AbstractMesh, Mesh, Sharding, SingleDeviceSharding

from dflow.lowering.programs.compile_once import compile_once
from dflow.lowering.programs.foreign_program import read_program, write_program
from dflow.lowering.values.kept_shardings import beside, is_spread, kept_shardings
from dflow.lowering.values.wide_types import admit
from dflow.tracing.ir.explicit_sharding import meshes_of, on_devices
from dflow.tracing.ir.types import ArrayType
from dflow.tracing.jax_frontend import own_ir_context, uninterrupted, without_callers
from dflow.tracing.primitives.id_checks import raises_failed_checks
from dflow.tracing.state.variable_trees import handles


class Program:
    """A compiled computation.

    `compiled` takes arguments with the shardings of its compilation. Arguments elsewhere are moved to `device`, if that
    is given; otherwise `by_placement` is called, which compiles for their shardings. With `keeps` the program donates
    no variables, and a call waits until its results are computed.
    """

    def __init__(
        self,
        compiled: Any,
        by_placement: Callable[..., Any] | None = None,
        device: jax.Device | None = None,
        keeps: bool = False,
    ) -> None:
        #: The executable, for inspection of its text, cost and memory.
        self.compiled = compiled
        self.keeps = keeps
        elsewhere = by_placement if device is None else _moving(compiled, device)
        self._elsewhere = awaited(elsewhere) if keeps and elsewhere is not None else elsewhere
        self._call = awaited(compiled) if keeps else uninterrupted(compiled)

    def __call__(self, *operands: Any) -> Sequence[jax.Array]:
        """Return the results of a program that uses no variables."""
        results: Sequence[jax.Array] = self.run(_without_variables, operands, lambda: operands)
        return results

    def run(
        self,
        do: Callable[[Callable[..., Any], Sequence[Any]], Any],
        operands: Sequence[Any],
        values: Callable[[], Sequence[Any]],
    ) -> Any:
        """Return `do(call, operands)` for the compiled function; for another one if JAX refuses the shardings.

        `values` returns the arguments, flat; only their shardings are used.
        """
        try:
            return do(self._call, operands)
        except ValueError:
            if self._elsewhere in (None, self._call) or not lie_apart(values(), self.compiled):
                raise
        self._call = self._elsewhere
        return do(self._call, operands)


def _without_variables(call: Callable[..., Any], operands: Sequence[Any]) -> Any:
    return call([], [], *operands)[1]


def awaited(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiled function that waits until its results are computed, and raises the error of a failed run."""

    def run(*args: Any, **kwargs: Any) -> Any:
        results = call(*args, **kwargs)
        jax.block_until_ready(handles(results))
        return results

    return raises_failed_checks(run)


def _moving(compiled: Any, device: jax.Device) -> Callable[..., Any]:
    """Return the computation with its arguments moved to `device` first."""

    def here(arg: Any) -> Any:
        is_elsewhere = isinstance(arg, jax.Array) and arg.sharding.device_set != {device}
        return jax.device_put(arg, device) if is_elsewhere else arg

    return lambda *args: compiled(*jax.tree_util.tree_map(here, args))


def lie_apart(args: Sequence[Any], compiled: Any) -> bool:
    """Whether one of `args`, the last arguments of a computation, has another sharding than the computation takes."""
    wanted = jax.tree_util.tree_leaves(compiled.input_shardings)
    return any(
        isinstance(arg, jax.Array) and not arg.sharding.is_equivalent_to(sharding, arg.ndim)
        for arg, sharding in zip(args, wanted[len(wanted) - len(args) :], strict=True)
    )


@dataclass(frozen=True)
class LoweredProgram:
    """A computation lowered to StableHLO.

    With `keeps` it donates no variables, and a call waits for its results, since it may fail while it runs.
    """

    stage: jax.stages.Lowered
    jitted: Callable[..., Any]
    device: jax.Device | None = None
    keeps: bool = False

    def compile(self, compiler_options: dict[str, Any] | None = None) -> Program:
        """Compile the computation for this process."""
        return Program(compile_once(self.stage, compiler_options), self.jitted, self.device, self.keeps)


def lower_program(
    fn: Callable[..., Any],
    types: Sequence[ArrayType],
    writes: int,
    reads: int = 0,
    donated: Sequence[int] = (),
    name: str = "step",
    compiler_options: dict[str, Any] | None = None,
    device: jax.Device | None = None,
    platforms: tuple[str, ...] | None = None,
    keeps: bool = False,
    shardings: Mapping[str, Sharding | None] = MappingProxyType({}),
    meshes: Mapping[AbstractMesh, Mesh] = MappingProxyType({}),
) -> LoweredProgram:
    """Lower `fn` for this process, or for `platforms`.

    types    of the arguments of `fn`: the written variables, those only read, and the operands
    writes   number of written variables; they are donated, unless `keeps` is true
    reads    number of variables only read
    donated  indices of operands to donate
    device   where the program runs; without one it runs where its arguments are
    shardings  of the variables; written ones keep theirs
    meshes   the device meshes for the abstract meshes in `types`
    """
    stepped = _in_lists(kept_shardings(fn, dict(islice(shardings.items(), writes))), writes, name)
    # Before the operands a program has two arguments, the lists of the values written and of those read.
    donated = (*(() if keeps else (0,)), *(2 + index for index in donated))
    options: dict[str, Any] = {"compiler_options": compiler_options}
    if device is not None:
        options["in_shardings" if types else "out_shardings"] = SingleDeviceSharding(device)
    jitted = jax_jit(stepped, donate_argnums=donated, keep_unused=True, **options)
    known = {**meshes_of(shardings.values()), **meshes}
    structs = [on_devices(type.struct, known) for type in types]
    for number, sharding in enumerate(shardings.values()):
        if is_spread(sharding):
            structs[number] = jax.ShapeDtypeStruct(structs[number].shape, structs[number].dtype, sharding=sharding)
    operands = structs[writes + reads :]
    stage = jitted.trace(structs[:writes], structs[writes : writes + reads], *operands)
    with own_ir_context():  # another thread may compile it
        lowered = stage.lower(lowering_platforms=platforms)
    return LoweredProgram(lowered, jitted, device, keeps)


def _in_lists(fn: Callable[..., Any], writes: int, name: str) -> Callable[..., Any]:
    """Return a flat function as a function of the lists that a program takes and returns."""

    def stepped(written: Sequence[Any], read: Sequence[Any], *operands: Any) -> tuple[list[Any], list[Any]]:
        results = list(fn(*written, *read, *operands))
        return results[:writes], results[writes:]

    stepped.__name__ = name
    return stepped


def export_program(fn: Callable[..., Any], types: Sequence[ArrayType], name: str = "program") -> bytes:
    """Return the StableHLO of `fn`, for CPU tasks and for tasks like this process, as bytes for `load_program`."""
    fn.__name__ = name
    platforms = tuple(dict.fromkeys(["cpu", jax.default_backend()]))
    with without_callers():
        exported = export.export(jax_jit(fn), platforms=platforms)(*(type.struct for type in types))
    return write_program(exported)


def load_program(blob: bytes | bytearray | memoryview, writes: int, reads: int = 0) -> Program:
    """Compile an exported program, over this number of variables, for this process.

    Raises WireError if the bytes are no program, or one that may not run here, and the errors of the compilation.
    """
    exported = read_program(blob)
    admit(aval.dtype for aval in (*exported.in_avals, *exported.out_avals))
    types = [ArrayType(aval.dtype, aval.shape) for aval in exported.in_avals]

    @cache
    def lowered(shardings: tuple[Sharding | None, ...]) -> LoweredProgram:
        by_number = {str(number): sharding for number, sharding in enumerate(shardings)}
        return lower_program(exported.call, types, writes, reads, name=exported.fun_name, shardings=by_number)

    def by_placement(written: Sequence[jax.Array], read: Sequence[jax.Array], *operands: Any) -> Any:
        shardings = tuple(value.sharding if value.committed else None for value in written)
        # An operand may be the result of another program of the plan, which used no variable on several devices.
        spread = next((value for value in (*written, *read) if is_spread(value.sharding)), None)
        moved = operands if spread is None else [beside(operand, spread) for operand in operands]
        return lowered(shardings).jitted(written, read, *moved)

    return Program(compile_once(lowered((None,) * writes).stage), by_placement)
