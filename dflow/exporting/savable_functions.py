"""Functions with their variables, and the directory that holds them: an export, or what was loaded from one.

The values are written as by `dflow.save`: a task writes those of its variables itself. Under `AllReduce` one process
writes the values that every process has whole, and the others wait for it. Of a value in parts on several processes,
each process writes its own parts (`group_saving`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from dflow.exporting.export_format import MANIFEST, VARIABLES, begin, finish
from dflow.exporting.export_manifest import ExportManifest, FunctionSignature, and_list, listing
from dflow.exporting.stand_ins import StandIns
from dflow.lowering.files.atomic_directory import whole_folder
from dflow.lowering.files.locations import location_of
from dflow.lowering.files.object_path import Location, ObjectPath
from dflow.lowering.state_backend import indices_of
from dflow.tracing.errors import ExportError
from dflow.tracing.ir.types import ArrayType
from dflow.tracing.moments import reach
from dflow.tracing.state.resources import Variable
from dflow.training.group_saving import channel_of, check_seen, group_of, is_divided, save_together, saved_once
from dflow.training.named_arrays import NamedArray
from dflow.training.saving import captured_values


@dataclass(repr=False, eq=False)
class SavableFunctions:
    """Functions and their variables, with all that a directory of them holds, by name."""

    _manifest: ExportManifest
    _programs: Mapping[str, jax.export.Exported]
    _contents: Mapping[str, bytes]
    #: The variables of all functions, by the names under which they are exported.
    variables: dict[str, Variable]
    _constants: Mapping[str, Any]

    @property
    def signatures(self) -> tuple[str, ...]:
        """The names of the functions."""
        return tuple(self._manifest.signatures)

    def signature_of(self, name: str) -> FunctionSignature:
        """Return the parameters, results and variables of a function. Raises ExportError for an unknown name."""
        return self._manifest.signatures[self._chosen(name)]

    def save(self, path: Any, *, overwrite: bool = False) -> Path:
        """Write a directory for `dflow.load`, with the current values of the variables; return its path.

        The directory appears complete or not at all. Variables are saved as by `dflow.save`: those on tasks by the
        tasks, which need a path that all of them see; of `AllReduce` by all workers, or by worker 0 alone if each has
        whole values. Raises CheckpointExists if `path` exists; but with `overwrite=True`, an existing export is
        replaced. Raises ExportError for a URL of an object store; CheckpointError if a task sees another folder.
        """
        location = location_of(os.fsdecode(path))
        if not isinstance(location, Path):
            raise ExportError(f"save: expected a local path, got {location}", "save it here, and copy the directory")
        group = group_of((*self.variables.values(), *self._origins()))
        what = f"the export to {str(location)!r}"
        folder = whole_folder(location, marker=MANIFEST, overwrite=overwrite)
        is_together = any(map(is_divided, self.variables.values()))
        named = self._named()
        with ExitStack() as stack:
            save_by = stack.enter_context(saved_once(None if is_together else group, what))
            write = stack.enter_context(captured_values(named, group))

            def write_values(path: Location, paths: Mapping[str, str]) -> None:
                write(path, {name: f"{VARIABLES}/{place}" for name, place in paths.items()})

            own = group if is_together else None
            save_by(lambda: save_together(own, what, channel_of(what), folder, self._begin, write_values, self._finish))
        if group is not None:
            check_seen(location)
        return location

    def _origins(self) -> Iterable[Variable]:
        """Return the variables that others stand for, whose processes have them together."""
        return ()

    def mlir_module(self, signature: str | None = None) -> str:
        """Return the StableHLO text of a function; its name is needed if there are several.

        Raises ExportError for an unknown or missing name.
        """
        return str(self._programs[self._chosen(signature)].mlir_module())

    def _without_state(self, name: str | None, format: str, verb: str) -> tuple[str, FunctionSignature]:
        """Return the name and signature of a function for a format without state, to which users `verb` it.

        Raises ExportError for a function that writes variables, or was not exported for the CPU.
        """
        name = self._chosen(name)
        signature = self.signature_of(name)
        if signature.writes:
            raise ExportError(
                f"{name} writes {and_list(signature.writes)}, and {format} has no state",
                f"{verb} a function that only reads variables",
            )
        if "cpu" not in signature.platforms:
            raise ExportError(f"{name} was exported for {and_list(signature.platforms)}", "export it for cpu too")
        return name, signature

    def _chosen(self, name: str | None) -> str:
        """Return `name`, or the only function's name. Raises ExportError, listing the functions, for any other name."""
        among = self.signatures
        if name is None and len(among) == 1:
            return among[0]
        if name is None or name not in among:
            wrong = f"there is no function {name!r}" if name is not None else f"there are {len(among)} functions"
            raise ExportError(wrong, f"name one of {', '.join(among)}")
        return name

    def __str__(self) -> str:
        return listing(self._manifest)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {', '.join(self.signatures)}>"

    def _begin(self, folder: Location) -> Mapping[str, str]:
        return begin(_local(folder), self._contents, self._types())

    def _finish(self, folder: Location, paths: Mapping[str, str]) -> None:
        reach("export")
        finish(_local(folder), self._manifest, self._types(), paths, self._constants)

    def _named(self) -> dict[str, NamedArray]:
        """Return the stored arrays, each with its variables."""
        divided_ones = {array: [*parts] for array, parts in self._manifest.parts().items()}
        parts = {name for names in divided_ones.values() for name in names}
        named = {name: _array_of(name, held) for name, held in self.variables.items() if name not in parts}
        for array, names in divided_ones.items():
            held = sorted((self.variables[name] for name in names), key=lambda one: indices_of(one).start)
            _refuse_divided(array, held)
            named[array] = NamedArray(tuple(held), array)
        return named

    def _types(self) -> dict[str, ArrayType]:
        parts = self._manifest.parts()  # a shard without the others is a whole array
        return {
            name: (entry.type if name in parts or entry.narrowing else entry.variables[0].type).strong
            for name, entry in self._named().items()
        }


def _array_of(name: str, held: Variable) -> NamedArray:
    """Return the stored array of a variable: of one that stands for another, the other in fewer bits."""
    if not isinstance(held.home, StandIns):
        return NamedArray((held,), name)
    stands_for = held.home.initials[held.key]
    return NamedArray((stands_for.variable,), name, narrowing=stands_for.narrowing)


def _refuse_divided(array: str, variables: Iterable[Variable]) -> None:
    """Raise ExportError for an array in shards that processes have parts of."""
    for variable in filter(is_divided, variables):
        raise ExportError(
            f"array {array!r}: expected shards that each process has whole, got parts of {variable.name!r}",
            "leave shards out, or make it a dflow.Variable: the mesh divides it",
        )


def _local(folder: Location) -> Path:
    assert not isinstance(folder, ObjectPath)  # `SavableFunctions.save` takes local paths
    return folder
