"""Files of an export: a manifest in JSON, the programs as `jax.export` serialises them, and the arrays.

    manifest.json           the contents: signatures, names, types, versions
    programs/<signature>    one program for all its platforms; for a function that looks up in tables, also the
                            programs <signature>.numbers and <signature>.results of `lookup_programs.py`
    variables/              the values of the variables by name, in the format of `lowering/files/array_files.py`
    constants/              the large arrays that the functions close over, likewise

A directory appears complete or not at all. The manifest has the size and the SHA-256 digest of each program, so that a
damaged file is detected before it runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from dflow import __version__
from dflow.exporting.export_check import check_manifest
from dflow.exporting.export_manifest import ExportManifest, FunctionSignature, ProgramEntry
from dflow.lowering.files.array_files import fill_folder, make_paths, read_arrays, write_manifest
from dflow.lowering.files.array_manifest import MANIFEST as ARRAYS_MANIFEST
from dflow.lowering.files.atomic_directory import present
from dflow.lowering.files.regular_file import LinkError, read_regular, reading_remedy, refuse_links, remedy_of
from dflow.tracing.errors import CheckpointError, ExportError
from dflow.tracing.ir.types import ArrayType

#: The newest format version that this dflow reads, and writes for functions that take ids as they are. Version 4 checks
#: numbers against an open size, version 3 checks ids, version 2 has variables that divide an array, and version 1 none
#: of these.
FORMAT = 5

MANIFEST = "manifest.json"
PROGRAMS = "programs"
VARIABLES = "variables"
CONSTANTS = "constants"

#: Entries of a folder that an error names.
_SHOWN = 3
#: Most bytes of a manifest.
_MOST_BYTES = 64 << 20
_REMEDY = "copy the directory again, or export again"


class _Form(msgspec.Struct, frozen=True):
    """The fields that every format version has."""

    format: int
    dflow: str = "unknown"


def begin(folder: Path, programs: Mapping[str, bytes], variables: Iterable[str]) -> dict[str, str]:
    """Write the programs of an export; return the paths of its variables, for `write_parts`."""
    (folder / PROGRAMS).mkdir()
    for name, content in programs.items():
        (folder / PROGRAMS / name).write_bytes(content)
    (folder / VARIABLES).mkdir()
    return make_paths(folder / VARIABLES, variables)


def finish(
    folder: Path,
    manifest: ExportManifest,
    variables: Mapping[str, ArrayType],
    paths: Mapping[str, str],
    constants: Mapping[str, Any],
) -> None:
    """Write the rest of an export, after all its variables, whose types are given."""
    write_manifest(folder / VARIABLES, variables, paths, {})
    (folder / CONSTANTS).mkdir()
    fill_folder(folder / CONSTANTS, constants)
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))


def read_manifest(path: Path) -> ExportManifest:
    """Return the manifest of the export at `path`. Raises ExportError if there is none that this dflow can read."""
    path = present(path)
    try:
        content = read_regular(path / MANIFEST, _MOST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        if not path.is_dir():
            raise ExportError(f"there is no directory {path}", "dflow.export(fn, ...).save(path) makes one") from None
        raise _no_export(path) from None
    except OSError as error:
        raise _unreadable(path / MANIFEST, error) from error
    try:
        form = msgspec.json.decode(content, type=_Form)
        if form.format <= FORMAT:
            manifest = msgspec.json.decode(content, type=ExportManifest)
            check_manifest(manifest)
            return manifest
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise damaged(path / MANIFEST, str(error)) from None
    raise ExportError(
        f"{path} is of format {form.format}, written by dflow {form.dflow}; this is dflow {__version__}, which reads "
        f"formats up to {FORMAT}",
        f"install dflow {form.dflow} or newer",
    )


def _no_export(path: Path) -> ExportError:
    """Return the error for a folder that holds no export. It lists the exports in its subfolders."""
    names = sorted(entry.name for entry in path.iterdir())
    found = [name for name in names if (path / name / MANIFEST).is_file()]
    if found:
        shown = ", ".join(str(path / name) for name in found[-_SHOWN:])
        return ExportError(
            f"{path} holds no export itself, but {len(found)} in it", f"give one of them, such as {shown}"
        )
    if ARRAYS_MANIFEST in names:
        return ExportError(f"{path} is a checkpoint, and no export", "dflow.restore reads it")
    there = ", ".join(names[:_SHOWN]) or "nothing"
    if len(names) > _SHOWN:
        there += f" and {len(names) - _SHOWN} more"
    return ExportError(
        f"{path} holds no export: it has no {MANIFEST}, but {there}",
        "give the directory that dflow.export(...).save wrote",
    )


def read_content(path: Path, name: str, entry: FunctionSignature | ProgramEntry) -> bytes:
    """Return the program in the file of this name. Raises ExportError if it is missing or differs from its digest."""
    file = path / PROGRAMS / name
    try:
        refuse_links(path, PROGRAMS)
        content = read_regular(file, max(0, entry.size_bytes))
    except FileNotFoundError:
        raise damaged(file, "it is missing") from None
    except OSError as error:
        raise _unreadable(file, error) from error
    if len(content) != entry.size_bytes:
        raise damaged(file, f"expected {entry.size_bytes} bytes, got {len(content)}")
    if hashlib.sha256(content).hexdigest() != entry.sha256:
        raise damaged(file, "its digest is not the one in the manifest")
    return content


def read_values(path: Path, folder: str, names: Iterable[str]) -> dict[str, Any]:
    """Return the arrays of these names as NumPy arrays, or JAX arrays for PRNG keys. Raises ExportError.

    Large ones are memory of their files: read as they are used, and writing to them changes no file.
    """
    try:
        refuse_links(path, folder)
        files, names = read_arrays(path / folder), [*names]
        mapped = files.mapped(names)
        return mapped | files.read({name: None for name in names if name not in mapped})
    except CheckpointError as error:
        cause = error.__cause__ or error
        raise _unreadable(
            path / folder, cause if isinstance(cause, LinkError) or reading_remedy(cause) else error
        ) from error
    except OSError as error:
        raise _unreadable(path / folder, error) from error


def _unreadable(file: Path, error: BaseException) -> ExportError:
    """Return the error for a file that cannot be read, by a fault of the file or of this process."""
    what = getattr(error, "strerror", None) or str(error).partition("\n")[0]
    if isinstance(error, LinkError):
        return ExportError(str(error), remedy_of(error, _REMEDY))
    if remedy := reading_remedy(error):
        return ExportError(f"{file} cannot be read: {what}", remedy)
    return damaged(file, what)


def damaged(file: Path, what: str) -> ExportError:
    return ExportError(f"{file} is damaged: {what}", _REMEDY)
