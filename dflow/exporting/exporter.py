"""`dflow.export`: prepare functions with their state to run without the user's code."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from dflow import __version__
from dflow.exporting.export_format import FORMAT
from dflow.exporting.export_manifest import (
    ExportManifest,
    FunctionSignature,
    PartEntry,
    VariableEntry,
    and_list,
    signature_refusal,
)
from dflow.exporting.export_trace import Trace, TracedExport, make
from dflow.exporting.open_sizes import LETTERS
from dflow.exporting.savable_functions import SavableFunctions
from dflow.exporting.small_weights import FORMS, WeightForm, WeightReport, report, with_small_weights
from dflow.lowering.programs.export import exported
from dflow.lowering.programs.portable_tree import is_ids, leaves_of
from dflow.tracing.devices.platforms import LOWERED_PLATFORMS
from dflow.tracing.errors import ExportError
from dflow.tracing.ir.types import array_type_of
from dflow.tracing.jax_frontend import is_tracing
from dflow.tracing.near_names import keywords_of, refuse_keywords
from dflow.tracing.rows.slices import ArrayPart, have_each_once
from dflow.tracing.source import at
from dflow.tracing.state.resources import Variable


class Exported(SavableFunctions):
    """Functions with their state, ready to be saved. Made by `export`; its `str` lists them."""

    def __init__(
        self,
        made: Mapping[str, TracedExport],
        before: Mapping[str, TracedExport] | None = None,
        form: WeightForm | None = None,
    ) -> None:
        self._made = made
        #: The functions before their weights were made smaller, and the form of the weights since.
        self._before, self._form = before, form
        variables: dict[str, Variable] = {}
        constants: dict[str, Any] = {}
        signatures: dict[str, FunctionSignature] = {}
        for name, one in made.items():
            _add_variables(variables, name, one)
            signatures[name] = msgspec.structs.replace(one.signature, constants=_add_constants(constants, name, one))
        parts = _parts(variables)
        entries = {
            name: VariableEntry(str(held.type.strong), held.trainable, parts.get(name))
            for name, held in variables.items()
        }
        types = {name: str(array_type_of(value).strong) for name, value in constants.items()}
        form_version = _format_of(signatures.values(), bool(parts))
        super().__init__(
            ExportManifest(form_version, __version__, jax.__version__, entries, types, signatures),
            {name: one.program for name, one in made.items()},
            {name + end: content for name, one in made.items() for end, content in one.contents.items()},
            variables,
            constants,
        )

    def accuracy(self, /, *args: Any, signature: str | None = None, **kwargs: Any) -> WeightReport:
        """Compare a function of an export made with `weights=` with the function as it was, for these arguments.

        The name of the function, `signature`, is needed if there are several. Nothing is written. Raises ExportError
        for an export without `weights`, or an unknown name.
        """
        if self._before is None or self._form is None:
            raise ExportError(
                "accuracy compares smaller weights, and none were asked for", "give weights to dflow.export"
            )
        return report(self._form, self._before, self._made, self._chosen(signature), args, kwargs)

    def _origins(self) -> Iterable[Variable]:
        return (held for one in (self._before or {}).values() for held in one.variables.values())

    def mlir_module(self, signature: str | None = None, *, platform: str | None = None) -> str:
        """Return the StableHLO text of a function, for all its platforms or for one of them.

        Raises ExportError for an unknown function or platform, or if there are several functions and none is named.
        """
        if platform is None:
            return super().mlir_module(signature)
        one = self._made[self._chosen(signature)]
        if platform not in one.signature.platforms:
            raise ExportError(
                f"{one.pure.name} was exported for {and_list(one.signature.platforms)}, not for {platform!r}",
                "name one of these, or give platforms to dflow.export",
            )
        alone, _ = exported(one.pure, [platform], one.program.disabled_safety_checks, 0)
        return str(alone.mlir_module())


def _add_variables(variables: dict[str, Variable], signature: str, one: TracedExport) -> None:
    for name, variable in one.variables.items():
        if (other := variables.setdefault(name, variable)) is not variable:
            raise ExportError(
                f"{signature} uses another variable called {name!r} than the functions before it"
                f"{at(other.loc)}{at(variable.loc)}\n  give one of them another name"
            )


def _parts(variables: Mapping[str, Variable]) -> dict[str, PartEntry]:
    """Return, by variable, the parts of arrays whose variables are all there and whose names are free."""
    found: dict[str, dict[str, ArrayPart]] = defaultdict(dict)
    for name, variable in variables.items():
        if variable.part is not None and variable.is_named:
            found[name.rpartition("/")[0]][name] = variable.part
    entries: dict[str, PartEntry] = {}
    for array, parts in found.items():
        first = next(iter(parts.values()))
        is_whole = have_each_once([part.indices for part in parts.values()], first.whole[first.indices.axis])
        if is_whole and array not in variables and {part.whole for part in parts.values()} == {first.whole}:
            entries |= {name: PartEntry(array, [*part.whole], *part.indices) for name, part in parts.items()}
    return entries


def _format_of(signatures: Collection[FunctionSignature], has_parts: bool) -> int:
    """Return the oldest version of the format that holds an export, so that an older dflow reads it if it can."""
    parameters = [parameter for one in signatures for parameter in one.parameters]
    if any(is_ids(type) for one in parameters for _, type in leaves_of(one.tree, one.name)):
        return FORMAT
    checks = [check for one in signatures for check in one.checks.values()]
    if any(isinstance(check.rows, str) for check in checks):
        return 4
    return 3 if checks else 2 if has_parts else 1


def _add_constants(constants: dict[str, Any], signature: str, one: TracedExport) -> dict[str, str]:
    """Return the stored name of each constant of a program. An array used by several functions is stored once."""
    stored = {}
    for name, value in one.pure.constants.items():
        known = next((kept for kept, other in constants.items() if other is value), None)
        stored[name] = known or (name if name not in constants else f"{signature}/{name}")
        constants[stored[name]] = value
    return stored


#: Dtypes of arguments that are ids.
_OF_IDS = (np.dtype(np.int64), np.dtype(np.uint64), np.dtype(np.str_))
_OPTIONS = ("platforms", "vjp_order", "disabled_checks", "weights")


def export(
    fn: Callable[..., Any] | Mapping[str, Any],
    /,
    *specs: Any,
    platforms: Sequence[str] = ("cpu", "cuda", "tpu"),
    vjp_order: int = 0,
    disabled_checks: Sequence[jax.export.DisabledSafetyCheck] = (),
    weights: WeightForm | None = None,
    **named_specs: Any,
) -> Exported:
    """Prepare a function, and the variables it uses, to run in a process without its Python code.

    fn         a function, decorated or not; or several by name, each as `fn`, `(fn, *specs)` or an `Exported`
    specs      arguments by position and, as `named_specs`, by name: pytrees of arrays or `jax.ShapeDtypeStruct`s, whose
               dimensions may be symbolic (`dflow.spec("b, 784", jnp.float32)`). Static arguments and variables are
               passed as they are, and become fixed parts of the export
    platforms  target platforms, of cpu, cuda, rocm and tpu; they need not be present here
    vjp_order  how many times the loaded function can be differentiated
    disabled_checks  as for `jax.export.export`; allows custom calls of named targets outside XLA

    weights    "int8" (with a scale for each channel, the last dimension, and for each row of a table) or "bfloat16":
               stores floating-point variables of at least 2 dimensions that no function writes in this form; the
               program converts them back. `Exported.accuracy` tells what it costs

    An argument of `fn` that has the name of one of these options must be passed by position. The values of the
    variables are read by `Exported.save`. Raises ExportError, naming the op and its line, for a function that has no
    meaning in another process or cannot be lowered for a platform.
    """
    if is_tracing():
        raise ExportError("export is called inside traced code", "call it outside of any function")
    is_list = isinstance(platforms, tuple | list) and len(platforms) > 0
    if not is_list or not all(platform in LOWERED_PLATFORMS for platform in platforms):
        raise ExportError(f"platforms={platforms!r}", f"give one or more of {', '.join(LOWERED_PLATFORMS)}, in a list")
    if weights is not None and weights not in FORMS:
        raise ExportError(
            f"weights: expected one of {', '.join(FORMS)}, got {weights!r}", "give one of these, or leave it out"
        )
    trace = partial(make, platforms=tuple(platforms), vjp_order=vjp_order, disabled_checks=tuple(disabled_checks))
    if not isinstance(fn, Mapping):
        if callable(fn):
            refuse_keywords("export", named_specs, [*_OPTIONS, *keywords_of(fn, named_specs)], _OPTIONS)
        return _exported({_name_of(fn): trace(_name_of(fn), fn, specs, named_specs)}, weights, trace)
    if specs or named_specs or not fn:
        what = "arguments are given beside them" if fn else "there is none"
        raise ExportError(
            f"functions are exported by name, and {what}", "give each its own: dflow.export({'serve': (fn, *specs)})"
        )
    return _exported({_checked_name(name): _given(name, given, trace) for name, given in fn.items()}, weights, trace)


def _exported(made: Mapping[str, TracedExport], weights: WeightForm | None, trace: Trace) -> Exported:
    return Exported(made) if weights is None else Exported(with_small_weights(made, weights, trace), made, weights)


def spec(shape: str | Sequence[int | str], dtype: Any) -> jax.ShapeDtypeStruct:
    """Return an argument type for `export`, such as `dflow.spec("b, 784", jnp.float32)`.

    shape  a string for `jax.export.symbolic_shape`, or a sequence; a letter is any size, the same one in every spec
    dtype  dtype of the array. `numpy.str_` is for strings, `numpy.int64` and `numpy.uint64` for integers that are ids
           for a table with a vocabulary; others are reduced to 32 bits unless JAX's 64-bit mode is on

    Raises ExportError if `shape` cannot be read.
    """
    given = shape if isinstance(shape, str) else ", ".join(map(str, shape))
    try:
        dims = jax.export.symbolic_shape(given, scope=LETTERS)
    except (TypeError, ValueError) as error:
        raise ExportError(
            f"{shape!r} is no shape: {str(error).splitlines()[0]}",
            "write the dimensions with commas between: dflow.spec('b, 784', jnp.float32)",
        ) from None
    is_kept = jnp.issubdtype(dtype, jax.dtypes.extended) or (dtype is not int and np.dtype(dtype) in _OF_IDS)
    return jax.ShapeDtypeStruct(dims, dtype if is_kept else jax.dtypes.canonicalize_dtype(dtype))


def _name_of(fn: Any) -> str:
    """Return the export name of a single function; `call` if its own cannot be used."""
    name = getattr(fn, "__name__", "call")
    return name if signature_refusal(name) is None else "call"


def _checked_name(name: Any) -> str:
    if refusal := signature_refusal(name):
        raise ExportError(refusal, "give it another name, of letters, digits and '_', for it becomes a function")
    return str(name)


def _given(name: str, given: Any, trace: Trace) -> TracedExport:
    if isinstance(given, Exported):
        return given._made[given._chosen(None)]
    fn, *specs = given if isinstance(given, tuple) and given else (given,)
    return trace(name, fn, tuple(specs), {})
