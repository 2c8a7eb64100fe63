"""The directory of an export: a manifest in JSON, the programs as `jax.export` serialises them, and the arrays.

    manifest.json           what there is: signatures, names, types, versions
    programs/<signature>    one program for all its platforms
    variables/              the values of the variables by name, a folder such as `lowering/array_files.py` writes
    constants/              the large arrays that the functions close over, likewise

A directory appears under its name whole or not at all. The manifest holds the size and the digest of each program, so
that a damaged file is known before it runs.
"""

from __future__ import annotations

import hashlib
import keyword
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from dflow import __version__
from dflow.lowering.array_files import fill_folder, read_arrays
from dflow.lowering.portable_tree import Tree, text
from dflow.lowering.whole_folder import present, whole_folder, write_file
from dflow.tracing.errors import CheckpointError, ExportError
from dflow.tracing.source import at, caller

#: The form of directory that this dflow writes, and the newest that it reads.
FORMAT = 1

MANIFEST = "manifest.json"
PROGRAMS = "programs"
VARIABLES = "variables"
CONSTANTS = "constants"

_NAME = re.compile(r"[A-Za-z_]\w*")
#: What is an attribute of what `dflow.load` gives.
_TAKEN = frozenset({"mlir_module", "save", "signatures", "variables"})


class Parameter(msgspec.Struct, frozen=True):
    """A parameter: `by` says whether calls give it by position, by name, or either."""

    name: str
    by: Literal["position", "either", "name"]
    tree: Tree
    donated: bool = False


class Signature(msgspec.Struct, frozen=True):
    """A function of an export."""

    parameters: list[Parameter]
    result: Tree
    #: Parameters that are no arguments any more, each with what it was: static values, variables.
    fixed: dict[str, str]
    #: The variables that the program takes and gives, and those that it changes.
    variables: list[str]
    writes: list[str]
    #: By the program's name for it: the array that is given there.
    constants: dict[str, str]
    platforms: list[str]
    vjp_order: int
    calling_convention_version: int
    size_bytes: int = 0
    sha256: str = ""


class Entry(msgspec.Struct, frozen=True):
    """A variable."""

    type: str
    trainable: bool


class Manifest(msgspec.Struct, frozen=True):
    """All that an export says of itself."""

    format: int
    dflow: str
    jax: str
    variables: dict[str, Entry]
    #: The type of each large array that the functions close over.
    constants: dict[str, str]
    signatures: dict[str, Signature]


class _Form(msgspec.Struct, frozen=True):
    """What every format has."""

    format: int
    dflow: str = "unknown"


def signature_refusal(name: object) -> str | None:
    """Why a signature cannot be called so; None where it can."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None or keyword.iskeyword(name):
        return f"{name!r} is no name of a function"
    return f"{name!r} is what a loaded export has itself" if name in _TAKEN else None


def write(
    path: Path,
    manifest: Manifest,
    programs: Mapping[str, bytes],
    variables: Mapping[str, Any],
    constants: Mapping[str, Any],
    *,
    overwrite: bool,
) -> None:
    """Write an export to `path`, which holds it whole when this returns, and what it held before until then.

    Raises CheckpointExists where something is there that may not be replaced.
    """
    signatures = {
        name: msgspec.structs.replace(
            signature, size_bytes=len(programs[name]), sha256=hashlib.sha256(programs[name]).hexdigest()
        )
        for name, signature in manifest.signatures.items()
    }
    whole = msgspec.structs.replace(manifest, signatures=signatures)
    with whole_folder(path, marker=MANIFEST, overwrite=overwrite) as folder:
        (folder / PROGRAMS).mkdir()
        for name, content in programs.items():
            (folder / PROGRAMS / name).write_bytes(content)
        for name, arrays in ((VARIABLES, variables), (CONSTANTS, constants)):
            (folder / name).mkdir()
            fill_folder(folder / name, arrays)
        write_file(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(whole), indent=1).decode())


def read_manifest(path: Path) -> Manifest:
    """The manifest of the export at `path`. Raises ExportError where there is none that this dflow can read."""
    path = present(path)
    if not path.is_dir():
        raise ExportError(f"there is no directory {path}{at(caller())}\n  dflow.export(fn, ...).save(path) makes one")
    try:
        content = (path / MANIFEST).read_bytes()
    except FileNotFoundError:
        there = ", ".join(sorted(entry.name for entry in path.iterdir())) or "nothing"
        raise ExportError(
            f"{path} holds no export: it has no {MANIFEST}, but {there}{at(caller())}\n"
            "  give the directory that dflow.export(...).save wrote"
        ) from None
    try:
        form = msgspec.json.decode(content, type=_Form)
        manifest = msgspec.json.decode(content, type=Manifest) if form.format <= FORMAT else None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise damaged(path / MANIFEST, str(error)) from None
    if manifest is not None:
        if contradiction := _contradiction(manifest):
            raise damaged(path / MANIFEST, contradiction)
        return manifest
    raise ExportError(
        f"{path} is of format {form.format}, written by dflow {form.dflow}; this is dflow {__version__}, which reads "
        f"formats up to {FORMAT}{at(caller())}\n  install dflow {form.dflow} or newer"
    )


def _contradiction(manifest: Manifest) -> str | None:
    """What one part of a manifest says against another."""
    for name, signature in manifest.signatures.items():
        if refusal := signature_refusal(name):
            return refusal
        known = {*manifest.variables, *manifest.constants}
        named = {*signature.variables, *signature.constants.values()}
        if unknown := sorted(named - known) or sorted({*signature.writes} - {*signature.variables}):
            return f"{name} uses {unknown[0]!r}, of which nothing else is said"
    return None


def read_program(path: Path, name: str, signature: Signature) -> bytes:
    """The program of a signature. Raises ExportError where it is not the one that was written."""
    file = path / PROGRAMS / name
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        raise damaged(file, "it is missing") from None
    if len(content) != signature.size_bytes:
        raise damaged(file, f"it has {len(content)} bytes in the place of {signature.size_bytes}")
    if hashlib.sha256(content).hexdigest() != signature.sha256:
        raise damaged(file, "its digest is not the one in the manifest")
    return content


def read_values(path: Path, folder: str, names: Iterable[str]) -> dict[str, Any]:
    """The arrays of these names, as NumPy has them; PRNG keys as JAX has. Raises ExportError."""
    try:
        return read_arrays(path / folder).read(dict.fromkeys(names))
    except CheckpointError as error:
        raise damaged(path / folder, str(error).partition("\n")[0]) from error


def damaged(file: Path, what: str) -> ExportError:
    """The error that says what is wrong with a part of an export."""
    return ExportError(f"{file} is damaged: {what}{at(caller())}\n  copy the directory again, or export again")


def listing(manifest: Manifest) -> str:
    """What an export holds, for people."""
    lines = [f"exported by dflow {manifest.dflow} with JAX {manifest.jax}"]
    for name, signature in manifest.signatures.items():
        lines += ["", *_lines_of(name, signature)]
    if manifest.variables:
        lines += ["", "variables"]
        lines += [f"  {name}: {entry.type}" for name, entry in manifest.variables.items()]
    if manifest.constants:
        lines += ["", "constants"]
        lines += [f"  {name}: {type}" for name, type in manifest.constants.items()]
    return "\n".join(lines)


def _lines_of(name: str, signature: Signature) -> list[str]:
    lines = [signature_text(name, signature)]
    reads = [variable for variable in signature.variables if variable not in signature.writes]
    for what, names in (("reads", reads), ("writes", signature.writes), ("constants", signature.constants.values())):
        if names:
            lines.append(f"  {what}: {', '.join(names)}")
    lines += [f"  fixed: {parameter} = {value}" for parameter, value in signature.fixed.items()]
    extra = f"; derivatives up to order {signature.vjp_order}" if signature.vjp_order else ""
    return [*lines, f"  for {and_list(signature.platforms)}{extra}"]


def signature_text(name: str, signature: Signature) -> str:
    """A signature as Python writes it, with types: `serve(images: f32[b,784], *, k: i32[]) -> f32[b,10]`."""
    return f"{name}({', '.join(_parameters_text(signature.parameters))}) -> {text(signature.result)}"


def _parameters_text(parameters: Sequence[Parameter]) -> list[str]:
    words: list[str] = []
    for index, parameter in enumerate(parameters):
        before = parameters[index - 1].by if index else None
        if before == "position" and parameter.by != "position":
            words.append("/")
        if parameter.by == "name" and before != "name":
            words.append("*")
        words.append(f"{parameter.name}: {text(parameter.tree)}")
    return words


def and_list(words: Iterable[str]) -> str:
    """`a, b and c`."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last
