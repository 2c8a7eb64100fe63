"""The manifest of an export, and its text form."""

from __future__ import annotations

import keyword
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from dflow.lowering.programs.portable_tree import Dict, Tree, Tuple, leaves_of, parts_of_type, program_leaves_of, text
from dflow.tracing.rows.axis_slice import AxisSlice
from dflow.tracing.rows.id_rows import IdRows

_NAME = re.compile(r"[A-Za-z_]\w*")
#: Attributes of `Loaded`, which no function may have as its name.
_TAKEN = frozenset({"mlir_module", "save", "signature_of", "signatures", "variables"})


class Parameter(msgspec.Struct, frozen=True):
    """A parameter; `by` is how calls pass it: by position, by name, or either."""

    name: str
    by: Literal["position", "either", "name"]
    tree: Tree
    donated: bool = False


class CheckEntry(msgspec.Struct, frozen=True):
    """Checks of ids: those for `table` must be from 0 to `rows` - 1, and are of the type `type`, such as `i32[]`.

    `rows`  a number, or the text of an open size of an argument, such as `b`
    `noun`  what they are: ids, or the segments of bags
    """

    table: str
    rows: int | str
    type: str
    noun: Literal["ids", "segments"] = "ids"


class ProgramEntry(msgspec.Struct, frozen=True):
    """Size and SHA-256 digest of a program's file."""

    size_bytes: int
    sha256: str


class LookupsEntry(msgspec.Struct, frozen=True):
    """The programs around the lookups of a function, and the table of each lookup: a variable's name.

    `asked`    the one that gives ids in place of row numbers, for tables with a vocabulary; see `lookup_programs.py`
    `id_rows`  by the name of each variable that is a shard of such a table
    """

    tables: list[str]
    numbers: ProgramEntry
    results: ProgramEntry
    asked: ProgramEntry | None = None
    id_rows: dict[str, IdRows] = {}

    @property
    def files(self) -> dict[str, ProgramEntry]:
        """The entries by the end of their files' names, which begin with the signature's. No signature has a dot."""
        last = {} if self.asked is None else {".asked": self.asked}
        return {".numbers": self.numbers, ".results": self.results, **last}


class FunctionSignature(msgspec.Struct, frozen=True):
    """A function of an export."""

    parameters: list[Parameter]
    result: Tree
    #: Parameters that calls no longer pass, each with the text of its value: static values and variables.
    fixed: dict[str, str]
    #: The variables that are inputs and outputs of the program, and those among them that it changes.
    variables: list[str]
    writes: list[str]
    #: By the program's name for a constant: the name of its stored array.
    constants: dict[str, str]
    platforms: list[str]
    vjp_order: int
    calling_convention_version: int
    #: Of the program's file.
    size_bytes: int
    sha256: str
    #: By the program's name for it: each check whose outcome the program returns.
    checks: dict[str, CheckEntry] = {}
    #: None for a function that looks up in no table.
    lookups: LookupsEntry | None = None


class PartEntry(msgspec.Struct, frozen=True):
    """Where the value of a variable is: the indices `start`, `start + step`, ..., `size` of them, of a stored array.

    `array`, `shape`  name and shape of the array
    `axis`            the dimension that has the indices
    """

    array: str
    shape: list[int]
    axis: int
    start: int
    size: int
    step: int

    @property
    def indices(self) -> AxisSlice:
        return AxisSlice(self.axis, self.start, self.size, self.step)


class VariableEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """A variable's type, such as `f32[3]`, and whether it is trainable; `part` if no array of its name is stored."""

    type: str
    trainable: bool
    part: PartEntry | None = None


class ExportManifest(msgspec.Struct, frozen=True):
    """The contents of an export's `manifest.json`."""

    format: int
    dflow: str
    jax: str
    variables: dict[str, VariableEntry]
    #: The type of each large array that the functions close over, by name.
    constants: dict[str, str]
    signatures: dict[str, FunctionSignature]

    def parts(self) -> dict[str, dict[str, PartEntry]]:
        """Return the parts of each array that several variables divide, by array and variable."""
        found: dict[str, dict[str, PartEntry]] = defaultdict(dict)
        for name, entry in self.variables.items():
            if entry.part is not None:
                found[entry.part.array][name] = entry.part
        return found


def wide_arrays(manifest: ExportManifest) -> dict[str, str]:
    """Return the types of the variables and arguments that JAX holds in its 64-bit mode alone, by name."""
    types = {f"variable {name!r}": entry.type for name, entry in manifest.variables.items()}
    for signature in manifest.signatures.values():
        types |= {name: type for p in signature.parameters for name, type in leaves_of(p.tree, p.name)}
    return {name: type for name, type in types.items() if type.partition("[")[0] in ("f64", "i64", "u64", "c128")}


def arguments_of(parameters: Sequence[Parameter]) -> Tree:
    """Return the structure of the arguments that a program takes: those by position, and those by name."""
    positional = [parameter.tree for parameter in parameters if parameter.by != "name"]
    return Tuple([Tuple(positional), Dict([(one.name, one.tree) for one in parameters if one.by == "name"])])


def open_sizes_of(parameters: Sequence[Parameter]) -> dict[str, tuple[int, int]]:
    """Return, by the text of each open size, the number of a leaf of the arguments that has it, and the dimension."""
    leaves = [leaf for parameter in parameters for leaf in program_leaves_of(parameter.tree, parameter.name)]
    found: dict[str, tuple[int, int]] = {}
    for number, (_, type) in enumerate(leaves):
        for dim, size in enumerate(parts_of_type(type)[1]):
            if not size.isdecimal():
                found.setdefault(size, (number, dim))
    return found


def signature_refusal(name: object) -> str | None:
    """Return why a function cannot be exported under this name, or None."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None or keyword.iskeyword(name):
        return f"{name!r} is no name of a function"
    return f"{name!r} is what a loaded export has itself" if name in _TAKEN else None


def listing(manifest: ExportManifest) -> str:
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


def _lines_of(name: str, signature: FunctionSignature) -> list[str]:
    lines = [signature_text(name, signature)]
    reads = [variable for variable in signature.variables if variable not in signature.writes]
    for what, names in (("reads", reads), ("writes", signature.writes), ("constants", signature.constants.values())):
        if names:
            lines.append(f"  {what}: {', '.join(names)}")
    lines += [f"  fixed: {parameter} = {value}" for parameter, value in signature.fixed.items()]
    extra = f"; derivatives up to order {signature.vjp_order}" if signature.vjp_order else ""
    return [*lines, f"  for {and_list(signature.platforms)}{extra}"]


def signature_text(name: str, signature: FunctionSignature) -> str:
    """Return a signature like Python's, with types: `serve(images: f32[b,784], *, k: i32[]) -> f32[b,10]`."""
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
    """Join words as in `a, b and c`."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last
