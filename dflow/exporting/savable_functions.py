"""Functions with their variables, and the directory that holds them: an export, or what was loaded from one.

Under `AllReduce` one process writes the values that every process has whole, and the others wait for it. Of a value in
parts on several processes, each process writes its own parts (`group_saving`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from dflow.distributed.collectives.process_group import ProcessGroup
from dflow.exporting.export_format import MANIFEST, VARIABLES, begin, finish
from dflow.exporting.export_manifest import ExportManifest, FunctionSignature, listing
from dflow.lowering.files.array_files import divided, write_parts
from dflow.lowering.files.atomic_directory import whole_folder
from dflow.lowering.files.locations import location_of
from dflow.lowering.files.object_path import Location, ObjectPath
from dflow.lowering.files.whole_arrays import whole_here
from dflow.state_backends import by_backend
from dflow.tracing.errors import ExportError
from dflow.tracing.ir.types import ArrayType
from dflow.tracing.moments import reach
from dflow.tracing.state.resources import Variable
from dflow.training.group_saving import channel_of, check_seen, group_of, is_divided, save_together, saved_once


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

        The directory appears complete or not at all. Variables of `AllReduce` are saved as by `dflow.save`: by all
        workers, or by worker 0 alone if each has whole values. Raises CheckpointExists if `path` exists; but with
        `overwrite=True`, an existing export is replaced. Raises ExportError for a URL of an object store.
        """
        location = location_of(os.fsdecode(path))
        if not isinstance(location, Path):
            raise ExportError(f"save: expected a local path, got {location}", "save it here, and copy the directory")
        group = group_of((*self.variables.values(), *self._origins()))
        what = f"the export to {str(location)!r}"
        folder = whole_folder(location, marker=MANIFEST, overwrite=overwrite)
        is_together = any(map(is_divided, self.variables.values()))

        def write() -> None:
            own = group if is_together else None
            values = self._values(own)

            def write_values(path: Location, paths: Mapping[str, str]) -> None:
                write_parts(path / VARIABLES, values, paths)

            save_together(own, what, channel_of(what), folder, self._begin, write_values, self._finish)

        with saved_once(None if is_together else group, what) as save_by:
            save_by(write)
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

    def _arrays(self) -> dict[str, list[str]]:
        """Return the names of the variables of each stored array."""
        divided_ones = {array: [*parts] for array, parts in self._manifest.parts().items()}
        parts = {name for names in divided_ones.values() for name in names}
        return {name: [name] for name in self.variables if name not in parts} | divided_ones

    def _types(self) -> dict[str, ArrayType]:
        types = {array: self.variables[names[0]].type.strong for array, names in self._arrays().items()}
        for array, parts in self._manifest.parts().items():
            types[array] = replace(types[array], shape=tuple(next(iter(parts.values())).shape))
        return types

    def _values(self, group: ProcessGroup | None) -> dict[str, Any]:
        """Return the arrays that this process writes, with the values of one moment."""
        parts, arrays = self._manifest.parts(), self._arrays()
        for array in parts:
            _refuse_divided(array, [self.variables[name] for name in arrays[array]])
        if group is not None and group.rank > 0:
            arrays = {array: names for array, names in arrays.items() if is_divided(self.variables[names[0]])}
        names = [name for held in arrays.values() for name in held]
        values: dict[str, Any] = {}
        for backend, here in by_backend({name: self.variables[name] for name in names}).items():
            values.update(zip(here, backend.read_together([*here.values()]), strict=True))
        return {
            array: values[array]
            if array not in parts
            else divided(
                self._types()[array],
                [part.indices for part in parts[array].values()],
                [whole_here(values[name]) for name in parts[array]],
            )
            for array in arrays
        }


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
