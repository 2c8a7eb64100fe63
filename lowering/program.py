"""A compiled XLA computation over state: its form, and how it travels.

A program takes the values of the variables it writes, then of those it only reads, then its operands; it gives the
new values of the written ones, then its results. The written ones' buffers are donated, unless it may fail as it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Any

import jax
from jax import export
from jax import jit as jax_jit
from jax.sharding import AbstractMesh, Mesh, Sharding, SingleDeviceSharding

from dflow.lowering.foreign_program import read_program, write_program
from dflow.lowering.kept_places import is_spread, kept_places
from dflow.tracing.explicit_sharding import meshes_of, on_devices
from dflow.tracing.jax_frontend import passes_handles, uninterrupted, without_callers
from dflow.tracing.types import ArrayType
from dflow.tracing.variable_trees import handles


class Program:
    """A compiled computation. The written arguments come first, and back renewed ahead of its results.

    `compiled` is for arguments where its compilation expects them. Those that lie elsewhere are moved to its `device`,
    if it has one; else, and for those on several devices, `by_placement` compiles as often as needed.
    """

    def __init__(
        self,
        compiled: Any,
        by_placement: Callable[..., Any] | None = None,
        device: jax.Device | None = None,
        keeps: bool = False,
    ) -> None:
        #: As it was compiled ahead of calls, to be asked for its text, cost and memory.
        self.compiled = compiled
        self.keeps = keeps
        elsewhere = by_placement if device is None else _moving(compiled, device)
        self._elsewhere = awaited(elsewhere) if keeps and elsewhere is not None else elsewhere
        self._call = awaited(compiled) if keeps else uninterrupted(compiled)

    def __call__(self, *args: Any) -> Sequence[jax.Array]:
        given: list[Sequence[jax.Array]] = []
        self.run_into(given, args)
        return given[0]

    def run_into(self, given: list[Sequence[jax.Array]], args: Sequence[Any]) -> None:
        """Run it and append its results to `given`, where they are whatever is raised after the run: an interrupt."""
        singles, call, elsewhere = list(zip(args, strict=True)), self._call, self._elsewhere
        try:
            given.extend(map(call, *singles) if singles else [call()])
        except ValueError:
            if given or elsewhere is None or call is elsewhere or not lie_apart(args, self.compiled):
                raise
            self._call = elsewhere
            given.extend(map(elsewhere, *singles))


def awaited(call: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled function whose results are there when it returns; else it raises what it failed by."""

    @passes_handles
    def run(*args: Any, **kwargs: Any) -> Any:
        results = call(*args, **kwargs)
        jax.block_until_ready(handles(results))
        return results

    return run


def _moving(compiled: Any, device: jax.Device) -> Callable[..., Any]:
    """The computation on arguments from anywhere."""
    here = {device}

    def run(*args: Any) -> Any:
        moved = [
            jax.device_put(arg, device) if isinstance(arg, jax.Array) and arg.sharding.device_set != here else arg
            for arg in args
        ]
        return compiled(*moved)

    return run


def lie_apart(args: Sequence[Any], compiled: Any) -> bool:
    """Whether one of the last arguments of a computation lies elsewhere than where the computation takes it."""
    wanted = jax.tree_util.tree_leaves(compiled.input_shardings)
    return any(
        isinstance(arg, jax.Array) and not arg.sharding.is_equivalent_to(sharding, arg.ndim)
        for arg, sharding in zip(args, wanted[len(wanted) - len(args) :], strict=True)
    )


@dataclass(frozen=True)
class LoweredProgram:
    """A computation of which the StableHLO is known.

    One that `keeps` overwrites none of its arguments, and is waited for: it may fail as it runs.
    """

    stage: jax.stages.Lowered
    jitted: Callable[..., Any]
    device: jax.Device | None = None
    keeps: bool = False

    def compile(self, compiler_options: dict[str, Any] | None = None) -> Program:
        """Compile it for this process."""
        return Program(self.stage.compile(compiler_options), self.jitted, self.device, self.keeps)


def lower_program(
    fn: Callable[..., Any],
    types: Sequence[ArrayType],
    writes: int,
    given_up: Sequence[int] = (),
    name: str = "step",
    compiler_options: dict[str, Any] | None = None,
    device: jax.Device | None = None,
    platforms: tuple[str, ...] | None = None,
    keeps: bool = False,
    places: Mapping[str, Sharding | None] = MappingProxyType({}),
    meshes: Mapping[AbstractMesh, Mesh] = MappingProxyType({}),
) -> LoweredProgram:
    """Lower `fn` for this process, or for `platforms`.

    The written arguments are donated, unless it `keeps` them, and so are those numbered in `given_up`. On a `device` it
    runs there, wherever its arguments lie; given none, where they lie. Of the first arguments, which are variables,
    `places` says where they are; those over several devices are left there. `meshes` are the meshes of devices that the
    abstract meshes in `types` stand for.
    """
    fn = kept_places(fn, dict(islice(places.items(), writes)))
    fn.__name__ = name
    donated = (*(() if keeps else range(writes)), *given_up)
    options: dict[str, Any] = {"compiler_options": compiler_options}
    if device is not None:
        options["in_shardings" if types else "out_shardings"] = SingleDeviceSharding(device)
    jitted = jax_jit(fn, donate_argnums=donated, keep_unused=True, **options)
    known = {**meshes_of(places.values()), **meshes}
    structs = [on_devices(type.struct, known) for type in types]
    for number, place in enumerate(places.values()):
        if is_spread(place):
            structs[number] = jax.ShapeDtypeStruct(structs[number].shape, structs[number].dtype, sharding=place)
    stage = jitted.trace(*structs).lower(lowering_platforms=platforms)
    return LoweredProgram(stage, jitted, device, keeps)


def export_program(fn: Callable[..., Any], types: Sequence[ArrayType], name: str = "program") -> bytes:
    """The StableHLO of `fn`, for CPU tasks and for tasks like this process, as bytes that `load_program` takes."""
    fn.__name__ = name
    platforms = tuple(dict.fromkeys(["cpu", jax.default_backend()]))
    with without_callers():
        exported = export.export(jax_jit(fn), platforms=platforms)(*(type.struct for type in types))
    return write_program(exported)


def load_program(blob: bytes | bytearray | memoryview, writes: int) -> Program:
    """Compile an exported program for this process; the first `writes` arguments are donated.

    raises  WireError when it is none, or may not be run here; what compiling it raises
    """
    exported = read_program(blob)
    jitted = jax_jit(exported.call, donate_argnums=tuple(range(writes)), keep_unused=True)
    structs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in exported.in_avals]
    return Program(jitted.lower(*structs).compile())
