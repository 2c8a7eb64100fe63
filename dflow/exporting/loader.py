"""`dflow.load`: the functions of an export over variables of this process, without their Python code."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from dflow.calls.function import Function
from dflow.distributed.training.applying import refuse_own_training
from dflow.exporting.export_check import check_program
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
    Parameter,
    and_list,
    arguments_of,
    open_sizes_of,
    signature_text,
    wide_arrays,
)
from dflow.exporting.exported_call import compiled, python_signature, result_of
from dflow.exporting.open_sizes import text_as_given
from dflow.exporting.savable_functions import SavableFunctions
from dflow.lowering.files.atomic_directory import present
from dflow.lowering.files.mapped_chunks import LEAST_BYTES
from dflow.lowering.programs.foreign_program import RefusedCall, bytecode_reader, read_program
from dflow.lowering.programs.portable_tree import MismatchError, build, flatten, parts_of_type, plain, program_leaves_of
from dflow.lowering.values.devices import default_name
from dflow.lowering.values.first_value import Unshared
from dflow.tracing.errors import ExportError, SignatureError, WireError
from dflow.tracing.ir.types import DTYPES, array_type_of, dtype_name
from dflow.tracing.near_names import suggests_keywords
from dflow.tracing.number_range import check_number
from dflow.tracing.primitives.id_checks import after_id_check
from dflow.tracing.primitives.namesakes import use_beside_namesakes
from dflow.tracing.rows.slices import ArrayPart
from dflow.tracing.state.context import current_home
from dflow.tracing.state.initial_value import TypedInitial
from dflow.tracing.state.resources import Variable, is_variable


@dataclasses.dataclass(repr=False, eq=False)
class Loaded(SavableFunctions):
    """Exported functions and their variables. Made by `load`; its `str` lists both.

    Each function is an attribute under its name, and `loaded["name"]`; if there is only one, `loaded(...)` calls it.
    They are compiled functions, update `variables` in place, and are differentiable up to the `vjp_order` of the
    export. Calls raise SignatureError for arguments of other types, and ExportError on a platform not exported for.
    """

    def __post_init__(self) -> None:
        self._functions = {
            name: _function(name, signature, self._programs[name], dict(self.variables), self._constants)
            for name, signature in self._manifest.signatures.items()
        }

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
def load(path: Any, *, prefix: str = "", disabled_checks: Sequence[export.DisabledSafetyCheck] = ()) -> Loaded:
    """Load the functions that `dflow.export(...).save(path)` wrote, over new variables with the saved values.

    prefix           prepended to the variables' names, which are otherwise those of the export. Within
                     `cluster.parameter_servers()` a name is one variable of the cluster: the first load that creates
                     it gives its value, and later ones share it. Give each export another prefix there
    disabled_checks  as for `dflow.export`: custom-call targets that the programs may use. A call passes the program's
                     data to native code, so allow only targets that are registered here and check their input

    On Linux, arrays of 4 MiB or more are memory of their files, which must not be changed in place meanwhile; their
    sizes are checked, and their checksums are not.

    Only the programs run, no Python code. Raises ExportError if the directory is no export, is damaged or malformed,
    calls a target that is not allowed, needs 64-bit precision that is off here, or has an unreadable version.
    """
    location = present(path)
    manifest = read_manifest(location)
    _check_precision(location, manifest)
    contents = {name: read_content(location, name, signature) for name, signature in manifest.signatures.items()}
    allowed = {target for check in disabled_checks if (target := check.is_custom_call()) is not None}
    with bytecode_reader() as as_text:
        read = partial(read_program, allowed=allowed, as_text=as_text)
        programs = {name: _program(location, name, content, manifest, read) for name, content in contents.items()}
    parts = manifest.parts()
    whole = (name for name, entry in manifest.variables.items() if entry.part is None)
    values = read_values(location, VARIABLES, [*whole, *parts])
    for array, divided in parts.items():
        value = values.pop(array)
        if {tuple(part.shape) for part in divided.values()} != {value.shape}:
            raise damaged(location / VARIABLES, f"{array} has the shape {value.shape}, and another in the manifest")
        values |= {name: part.indices.of(value) for name, part in divided.items()}
    large = read_values(location, CONSTANTS, manifest.constants)
    # Not by `jnp.asarray`: it copies, where `device_put` uses the memory of an aligned array.
    constants = {name: jax.device_put(value) for name, value in large.items()}
    for name, entry in manifest.variables.items():
        if (held := str(array_type_of(values[name]))) != entry.type:
            raise damaged(location / VARIABLES, f"{name} is {held}, and {entry.type} in the manifest")
    # `pop` frees each host array as soon as it is copied, so that memory never holds all of them twice.
    variables = {
        name: Variable(_initial(values.pop(name)), name=prefix + name, trainable=entry.trainable)
        for name, entry in manifest.variables.items()
    }
    for divided in parts.values():
        for name, part in divided.items():
            variables[name].part = ArrayPart(tuple(part.shape), part.indices)
    use_beside_namesakes(variables.values())
    return Loaded(manifest, programs, contents, variables, constants)


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
    try:
        program = read(content)
        check_program(manifest, signature, program)
        return _with_order(name, signature.vjp_order, program)
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


def _function(
    name: str,
    signature: FunctionSignature,
    program: export.Exported,
    variables: Mapping[str, Variable],
    constants: Mapping[str, Any],
) -> Function[..., Any]:
    parameters = signature.parameters
    positional = [parameter for parameter in parameters if parameter.by != "name"]
    arguments = plain(arguments_of(parameters))
    python = python_signature(parameters)
    given = {key: constants[stored] for key, stored in signature.constants.items()}

    trained = [variables[key] for key in signature.writes if variables[key].trainable]

    def run(*args: Any, **kwargs: Any) -> Any:
        _check_platform(name, signature)
        refuse_own_training(run, name, trained)
        values = _bound(name, signature, python, args, kwargs)
        leaves = [leaf for parameter in parameters for leaf in _leaves(name, parameter, values[parameter.name])]
        plain_args, plain_kwargs = build(arguments, iter(leaves))
        state = {key: variables[key].read() for key in signature.variables}
        with _naming_sizes(name, positional):
            if signature.writes and signature.checks:
                # Before it writes anything: XLA computes no more of this call than the ids that it checks.
                _, _, *outside = program.call(state, given, *plain_args, **plain_kwargs)
                if leaves:
                    plain_args, plain_kwargs = _after_checks(signature, leaves, outside, (plain_args, plain_kwargs))
                else:
                    state = _after_checks(signature, leaves, outside, state)
            results, after, *outside = program.call(state, given, *plain_args, **plain_kwargs)
            if not signature.writes:
                results = _after_checks(signature, leaves, outside, results)
        for key in signature.writes:
            variables[key].assign(after[key])
        return result_of(signature, results, variables)

    return compiled(name, signature, run)


def _after_checks(
    signature: FunctionSignature, leaves: Sequence[Any], outside: Sequence[Mapping[str, Any]], values: Any
) -> Any:
    """Return a pytree of arrays as it is. Raises InputError, when it runs, for an id outside of its table."""
    sizes = open_sizes_of(signature.parameters)
    for name, check in signature.checks.items():
        size = check.rows
        if isinstance(size, str):
            number, dim = sizes[size]
            size = max(1, leaves[number].shape[dim])  # of no bags: the program says 0 also if all numbers are right
        values = after_id_check(outside[0][name], values, size=size, table=check.table, noun=check.noun)
    return values


@contextmanager
def _naming_sizes(name: str, positional: Sequence[Parameter]) -> Iterator[None]:
    """Replace JAX's errors about inconsistent sizes by SignatureError, with the parameters' names."""
    try:
        yield
    except ValueError as error:
        if small := re.search(r"Expected value >= 1 for dimension variable '(\w+)'", str(error)):
            raise SignatureError(
                f"{name} was called with the size 0 for {small[1]}, and an op of it needs 1 or more",
                "skip the call when that dimension is empty",
            ) from None
        found = re.search(r"Found inconsistency between (.*?)(?: Using the following|$)", str(error), re.DOTALL)
        if found is None:
            raise
        found_text = re.sub(r"args\[(\d+)\]", lambda index: positional[int(index[1]) - 2].name, text_as_given(found[1]))
        found_text = re.sub(r"kwargs\['(\w+)'\]", r"\1", found_text)
        raise SignatureError(
            f"{name} was called with inconsistent sizes: {found_text.rstrip('. ')}",
            "a letter in a shape is one size throughout",
        ) from None


def _check_platform(name: str, signature: FunctionSignature) -> None:
    platform = default_name().partition(":")[0]
    if platform == "gpu":  # exports distinguish "cuda" and "rocm"
        platform = export.default_export_platform()
    if platform not in signature.platforms:
        raise ExportError(
            f"{name} was exported for {and_list(signature.platforms)}, and this process runs on {platform}",
            f"export it with platforms={(*signature.platforms, platform)!r}",
        )


def _bound(
    name: str, signature: FunctionSignature, python: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the value of each parameter. Raises SignatureError if the arguments do not match."""
    try:
        return python.bind(*args, **kwargs).arguments
    except TypeError as error:
        fixed = ", ".join(word for word in kwargs if word in signature.fixed)
        remedy = f"leave out {fixed}, fixed when it was exported" if fixed else "give it these, and no others"
        raise SignatureError(f"{signature_text(name, signature)} was called otherwise: {error}", remedy) from None


def _leaves(name: str, parameter: Parameter, value: Any) -> Iterator[Any]:
    try:
        leaves = flatten(parameter.tree, value, parameter.name)
    except MismatchError as error:
        raise SignatureError(
            f"{name} was called with another structure: {error}", "give it the structure it was exported for"
        ) from None
    for (path, wanted), leaf in zip(program_leaves_of(parameter.tree, parameter.name), leaves, strict=True):
        yield _fitting(name, path, wanted, leaf)


def _fitting(name: str, path: str, wanted: str, leaf: Any) -> Any:
    """Return the leaf as an array of the expected type. Python numbers take its dtype; others raise SignatureError."""
    check_number(leaf, f"{name}: argument {path!r}")
    array = leaf.read() if is_variable(leaf) else jnp.asarray(leaf)
    dtype, dims = parts_of_type(wanted)
    given = array_type_of(array)
    if given.weak and dtype in DTYPES and jnp.result_type(DTYPES[dtype], array) == DTYPES[dtype]:
        array = array.astype(DTYPES[dtype])
    shape = [str(dim) for dim in array.shape]
    fits = len(shape) == len(dims) and all(
        due == size for due, size in zip(dims, shape, strict=True) if due.isdecimal()
    )
    if dtype_name(array.dtype) != dtype or not fits:
        remedy = "give it the shape it was exported for" if dtype_name(array.dtype) == dtype else "convert it"
        raise SignatureError(
            f"{name} was exported for {path}: {wanted}, and called with {given.strong}",
            f"{remedy}, or export it for that too",
        )
    return array
