"""Write the files of an export with the present values of its variables.

Under `AllReduce` one process writes the values that every process has whole, and the others wait for it. Of a value in
parts on several processes, each process writes its own parts (`group_saving`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflow.distributed.collectives.process_group import ProcessGroup
from dflow.exporting.export_format import MANIFEST, VARIABLES, begin, finish
from dflow.exporting.export_manifest import ExportManifest
from dflow.lowering.files.array_files import divided, write_parts
from dflow.lowering.files.atomic_directory import whole_folder
from dflow.lowering.files.object_path import Location, ObjectPath
from dflow.lowering.files.whole_arrays import whole_here
from dflow.state_backends import by_backend
from dflow.tracing.errors import ExportError
from dflow.tracing.ir.types import ArrayType
from dflow.tracing.moments import reach
from dflow.tracing.state.resources import Variable
from dflow.training.group_saving import channel_of, check_seen, group_of, is_divided, save_together, saved_once


@dataclass(frozen=True)
class ExportContent:
    """All that a directory of an export holds; `variables` and `constants` are by the names in the manifest."""

    manifest: ExportManifest
    programs: Mapping[str, bytes]
    variables: Mapping[str, Variable]
    constants: Mapping[str, Any]

    def save(self, location: Path, *, overwrite: bool, origins: Iterable[Variable] = ()) -> None:
        """Write the directory; `origins` are variables that others stand for, whose processes have them together."""
        group = group_of((*self.variables.values(), *origins))
        what = f"the export to {str(location)!r}"
        folder = whole_folder(location, marker=MANIFEST, overwrite=overwrite)
        if group is not None and any(map(is_divided, self.variables.values())):
            values = self._values(group)

            def write(path: Location, paths: Mapping[str, str]) -> None:
                write_parts(path / VARIABLES, values, paths)

            save_together(group, what, channel_of(what), folder, self._begin, write, self._finish)
        else:

            def write_alone() -> None:
                values = self._values(None)
                with folder as path:
                    paths = self._begin(path)
                    write_parts(path / VARIABLES, values, paths)
                    self._finish(path, paths)

            with saved_once(group, what) as save_by:
                save_by(write_alone)
        if group is not None:
            check_seen(location)

    def _begin(self, folder: Location) -> Mapping[str, str]:
        return begin(_local(folder), self.programs, self._types())

    def _finish(self, folder: Location, paths: Mapping[str, str]) -> None:
        reach("export")
        finish(_local(folder), self.manifest, self._types(), paths, self.constants)

    def _arrays(self) -> dict[str, list[str]]:
        """Return the names of the variables of each stored array."""
        divided_ones = {array: [*parts] for array, parts in self.manifest.parts().items()}
        parts = {name for names in divided_ones.values() for name in names}
        return {name: [name] for name in self.variables if name not in parts} | divided_ones

    def _types(self) -> dict[str, ArrayType]:
        types = {array: self.variables[names[0]].type.strong for array, names in self._arrays().items()}
        for array, parts in self.manifest.parts().items():
            types[array] = replace(types[array], shape=tuple(next(iter(parts.values())).shape))
        return types

    def _values(self, group: ProcessGroup | None) -> dict[str, Any]:
        """Return the arrays that this process writes, with the values of one moment."""
        parts, arrays = self.manifest.parts(), self._arrays()
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
