"""`dflow.load`: the functions of an export over variables of this process, without their Python code."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import export

from dflow.calls.function import Function
from dflow.distributed.cluster.cluster import Cluster
from dflow.exporting.export_check import check_lookup_programs, check_program
from dflow.exporting.export_format import (
    CONSTANTS,
    PROGRAMS,
    VARIABLES,
    damaged,
    read_content,
    read_manifest,
    read_values,
)
from dflow.exporting.export_manifest import (
    ExportManifest,
    FunctionSignature,
    ProgramEntry,
    wide_arrays,
)
from dflow.exporting.loaded_function import LoadedFunction
from dflow.exporting.row_lookups import RowLookups
from dflow.exporting.savable_functions import SavableFunctions
from dflow.exporting.task_tables import array_type, at_tasks, beside_tables, no_tables, tables_of
from dflow.lowering.files.atomic_directory import present
from dflow.lowering.files.mapped_chunks import LEAST_BYTES
from dflow.lowering.programs.foreign_program import RefusedCall, bytecode_reader, read_program
from dflow.lowering.values.first_value import Unshared
from dflow.tracing.errors import ExportError, WireError
from dflow.tracing.ir.types import ArrayType, array_type_of
from dflow.tracing.near_names import suggests_keywords
from dflow.tracing.primitives.namesakes import use_beside_namesakes
from dflow.tracing.rows.slices import ArrayPart
from dflow.tracing.state.context import current_home
from dflow.tracing.state.initial_value import TypedInitial
from dflow.tracing.state.resources import Variable


@dataclasses.dataclass(repr=False, eq=False)
class Loaded(SavableFunctions):
    """Exported functions and their variables. Made by `load`; its `str` lists both.

    Each function is an attribute under its name, and `loaded["name"]`; if there is only one, `loaded(...)` calls it.
    They are compiled functions, update `variables` in place, and are differentiable up to the `vjp_order` of the
    export. Calls raise SignatureError for arguments of other types, and ExportError on a platform not exported for.
    """

    #: The programs around the lookups of functions whose tables are not in this process, by name.
    _lookups: Mapping[str, RowLookups]
    #: The types of variables of vocabularies whose tables are at a training job, by name.
    _unread: Mapping[str, ArrayType] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self._callers = {
            name: LoadedFunction(
                name,
                signature,
                self._programs[name],
                self._lookups.get(name),
                dict(self.variables),
                self._constants,
                self._unread,
            )
            for name, signature in self._manifest.signatures.items()
        }
        self._functions = {name: caller.compiled() for name, caller in self._callers.items()}

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the only function. Raises ExportError if there are several."""
        return self._functions[self._chosen(None)](*args, **kwargs)

    def __getitem__(self, name: str) -> Function[..., Any]:
        return self._functions[self._chosen(name)]

    def __getattr__(self, name: str) -> Function[..., Any]:
        functions = self.__dict__.get("_functions", {})
        if name not in functions:
            raise AttributeError(
                f"what was loaded has no function {name!r}; it has {', '.join(functions)}", name=name, obj=self
            )
        function: Function[..., Any] = functions[name]
        return function

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._functions]


@suggests_keywords
def load(
    path: Any,
    *,
    prefix: str = "",
    tables: Cluster | None = None,
    disabled_checks: Sequence[export.DisabledSafetyCheck] = (),
) -> Loaded:
    """Load the functions that `dflow.export(...).save(path)` wrote, over new variables with the saved values.

    prefix           prepended to the variables' names, which are otherwise those of the export. Within
                     `cluster.parameter_servers()` a name is one variable of the cluster: the first load that creates
                     it gives its value, and later ones share it. Give each export another prefix there
    tables           a cluster whose parameter tasks hold the tables: variables of two dimensions or more that no
                     function writes, or uses otherwise than by lookups of rows. Each task reads its own part of
                     `path`, which all of them see; other variables are in this process. A call fetches the rows that
                     it looks up, each once. A standalone cluster keeps all here
    disabled_checks  as for `dflow.export`: custom-call targets that the programs may use. A call passes the program's
                     data to native code, so allow only targets that are registered here and check their input

    On Linux, arrays of 4 MiB or more are memory of their files, which must not be changed in place meanwhile; their
    sizes are checked, and their checksums are not.

    Only the programs run, no Python code. Raises ExportError if the directory is no export, is damaged or malformed,
    calls a target that is not allowed, needs 64-bit precision that is off here, has an unreadable version, or has no
    table for `tables`; TaskLost and DeadlineExceeded, also in calls, for a task that does not answer.
    """
    location = present(path)
    manifest = read_manifest(location)
    away = _tables_for(tables, location, manifest)
    is_apart = (tables is not None and not tables.is_standalone) or current_home().shares_names
    loaded = _loaded(location, manifest, prefix, away, {}, is_apart=is_apart, disabled_checks=disabled_checks)
    if tables is not None and away:
        made = at_tasks(tables, location, manifest, away, prefix)
        loaded = dataclasses.replace(loaded, variables={**loaded.variables, **made})
    use_beside_namesakes(loaded.variables.values())
    return loaded


def load_beside_job(path: Any, prefix: str) -> Loaded:
    """Load an export as `load` does, without its tables, which a training job has. Raises ExportError.

    Its functions are called by their `LoadedFunction`s, with the rows of the lookups.
    """
    location = present(path)
    manifest = read_manifest(location)
    away = tables_of(manifest)
    if not away:
        raise no_tables(location)
    unread = {name: array_type(location, manifest.variables[name].type) for name in beside_tables(location, manifest)}
    loaded = _loaded(location, manifest, prefix, away, unread, is_apart=True)
    use_beside_namesakes(loaded.variables.values())
    return loaded


def _loaded(
    location: Path,
    manifest: ExportManifest,
    prefix: str,
    away: Collection[str],
    unread: Mapping[str, ArrayType],
    *,
    is_apart: bool,
    disabled_checks: Sequence[export.DisabledSafetyCheck] = (),
) -> Loaded:
    """Return the functions of an export without its tables `away`, and without variables that none reads.

    is_apart  whether functions are called by the programs around their lookups
    """
    _check_precision(location, manifest)
    contents = _contents(location, manifest)
    allowed = {target for check in disabled_checks if (target := check.is_custom_call()) is not None}
    with bytecode_reader() as as_text:
        read = partial(read_program, allowed=allowed, as_text=as_text)
        programs = {name: _program(location, name, contents[name], manifest, read) for name in manifest.signatures}
        lookups = {
            name: _lookups(location, name, contents, manifest, read)
            for name, signature in manifest.signatures.items()
            if signature.lookups is not None and not signature.vjp_order and is_apart
        }
    here = {name: entry for name, entry in manifest.variables.items() if name not in away and name not in unread}
    parts = {array: divided for array, divided in manifest.parts().items() if here.keys() >= divided.keys()}
    whole = (name for name, entry in here.items() if entry.part is None)
    values = read_values(location, VARIABLES, [*whole, *parts])
    for array, divided in parts.items():
        value = values.pop(array)
        if {tuple(part.shape) for part in divided.values()} != {value.shape}:
            raise damaged(location / VARIABLES, f"{array} has the shape {value.shape}, and another in the manifest")
        values |= {name: part.indices.of(value) for name, part in divided.items()}
    large = read_values(location, CONSTANTS, manifest.constants)
    # Not by `jnp.asarray`: it copies, where `device_put` uses the memory of an aligned array.
    constants = {name: jax.device_put(value) for name, value in large.items()}
    for name, entry in here.items():
        if (held := str(array_type_of(values[name]))) != entry.type:
            raise damaged(location / VARIABLES, f"{name} is {held}, and {entry.type} in the manifest")
    # `pop` frees each host array as soon as it is copied, so that memory never holds all of them twice.
    variables = {
        name: Variable(_initial(values.pop(name)), name=prefix + name, trainable=entry.trainable)
        for name, entry in here.items()
    }
    for divided in parts.values():
        for name, part in divided.items():
            variables[name].part = ArrayPart(tuple(part.shape), part.indices)
    return Loaded(manifest, programs, contents, variables, constants, lookups, unread)


def _tables_for(cluster: Cluster | None, location: Path, manifest: ExportManifest) -> set[str]:
    """Return the variables that the tasks of a cluster are to hold. Raises ExportError if there are none."""
    if cluster is None or cluster.is_standalone:
        return set()
    if found := tables_of(manifest):
        return found
    raise no_tables(location)


class _InPlace(TypedInitial):
    """An initial value that uses the memory of an array if its device can: memory of a file is read as it is used."""

    def __init__(self, value: np.ndarray[Any, Any]) -> None:
        self.type, self._value = array_type_of(value), value

    def __call__(self) -> Any:
        return Unshared(jax.device_put(self._value))


def _initial(value: Any) -> Any:
    is_large = isinstance(value, np.ndarray) and value.nbytes >= LEAST_BYTES
    return _InPlace(value) if is_large and not current_home().shares_names else value


def _check_precision(location: Path, manifest: ExportManifest) -> None:
    """Raise ExportError if the export has 64-bit arrays, which JAX would silently make 32-bit ones here."""
    if jax.dtypes.canonicalize_dtype(np.float64) == np.float64:
        return
    for name, type in wide_arrays(manifest).items():
        raise ExportError(
            f"{location} was exported in 64-bit precision, and this process has it off: {name} is {type}",
            "call jax.config.update('jax_enable_x64', True) first",
        )


def _contents(location: Path, manifest: ExportManifest) -> dict[str, bytes]:
    """Return the programs of an export by the names of their files. Raises ExportError."""
    entries: dict[str, FunctionSignature | ProgramEntry] = {**manifest.signatures}
    for name, signature in manifest.signatures.items():
        if signature.lookups is not None:
            entries |= {name + end: entry for end, entry in signature.lookups.files.items()}
    return {name: read_content(location, name, entry) for name, entry in entries.items()}


def _program(
    location: Path, name: str, content: bytes, manifest: ExportManifest, read: Callable[[bytes], export.Exported]
) -> export.Exported:
    signature = manifest.signatures[name]
    version = signature.calling_convention_version
    oldest = export.minimum_supported_calling_convention_version
    newest = export.maximum_supported_calling_convention_version
    if not oldest <= version <= newest:
        raise ExportError(
            f"{location} was written by JAX {manifest.jax}, whose programs are called by convention {version}; JAX "
            f"{jax.__version__} knows {oldest} to {newest}",
            f"{'install a newer JAX' if version > newest else 'export again with a newer JAX'}",
        )
    with _naming_file(location, name, manifest):
        program = read(content)
        check_program(manifest, signature, program)
        return _with_order(name, signature.vjp_order, program)


def _lookups(
    location: Path,
    name: str,
    contents: Mapping[str, bytes],
    manifest: ExportManifest,
    read: Callable[[bytes], export.Exported],
) -> RowLookups:
    """Return the programs around the lookups of a function that has some. Raises ExportError."""
    signature = manifest.signatures[name]
    assert signature.lookups is not None
    entry, programs = signature.lookups, {}
    for end in entry.files:
        with _naming_file(location, name + end, manifest):
            programs[end] = read(contents[name + end])
    before, after, asked = programs[".numbers"], programs[".results"], programs.get(".asked")
    with _naming_file(location, name + ".results", manifest):
        check_lookup_programs(manifest, signature, entry.tables, before, after, asked)
    last = None if asked is None else _with_order(name, 0, asked)
    return RowLookups(entry.tables, _with_order(name, 0, before), _with_order(name, 0, after), last, entry.id_rows)


@contextmanager
def _naming_file(location: Path, name: str, manifest: ExportManifest) -> Iterator[None]:
    """Turn the errors of a program that is read into ExportErrors that name its file."""
    try:
        yield
    except RefusedCall as error:
        raise ExportError(
            f"the program {name!r} of {location} calls {error.target!r}, which is no library routine of JAX and could "
            f"be anything in this process",
            f"if you trust the export, allow the target: "
            f"disabled_checks=[jax.export.DisabledSafetyCheck.custom_call({error.target!r})]",
        ) from error
    except WireError as error:
        if error.__cause__ is None:
            raise damaged(location / PROGRAMS / name, str(error)) from error
        raise ExportError(
            f"JAX {jax.__version__} cannot read the program {name!r} of {location}, which JAX {manifest.jax} wrote",
            f"load it with JAX {manifest.jax}, or export it again; JAX says: {error.__cause__}",
        ) from error
    except ValueError as error:
        raise damaged(location / PROGRAMS / name, str(error)) from error


def _with_order(name: str, order: int, program: export.Exported) -> export.Exported:
    """Return the program, whose `vjp` raises a clear ExportError beyond the exported order."""
    often = "more often" if order else "once"
    fields = [field.name for field in dataclasses.fields(export.Exported)]

    class LoadedProgram(export.Exported):
        def vjp(self) -> export.Exported:
            if self.has_vjp():
                return made(super().vjp())
            raise ExportError(
                f"{name} was exported with vjp_order={order}, and is differentiated {often}",
                f"export it with vjp_order={order + 1}",
            )

    def made(one: export.Exported) -> export.Exported:
        return LoadedProgram(**{field: getattr(one, field) for field in fields})

    return made(program)
