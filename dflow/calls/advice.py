"""Advice on mistakes that JAX reports: a note on JAX's own error, with the user's line and the remedy.

The errors keep JAX's class and message, so that a program that catches them also works under `dflow.jit`. Only for an
argument of another library, such as a tensor, dflow's own error takes the place of JAX's; it is a TypeError too.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from dflow.tracing.column_tables import library_of
from dflow.tracing.derivatives.loops import NOT_REVERSED, REVERSED
from dflow.tracing.errors import GraphTypeError
from dflow.tracing.near_names import near_keywords
from dflow.tracing.source import Loc, at, caller, raised_at
from dflow.tracing.state.operand_notes import note_operands

_CONCRETE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)

_NOT_KNOWN = (
    "  the values of variables and arguments are not known while a function is traced: choose by jax.lax.cond or\n"
    "  jnp.where, loop by jax.lax.fori_loop, name what Python needs in static_argnames, or look at real values in\n"
    "  `with dflow.eager():`"
)

_TOO_LARGE = (
    "  JAX keeps 32 bits of an integer: write a float, such as 2.0**40, or set\n"
    "  jax.config.update('jax_enable_x64', True)"
)

#: Remedies by the beginning of JAX's error.
_REMEDIES = {
    "Shapes must be 1D sequences of concrete values": _NOT_KNOWN,
    NOT_REVERSED: REVERSED,
    "Use `.at[...].get(out_sharding=)`": (
        "  for a variable: variable.read().at[indices].get(out_sharding=sharding), with a sharding, or with a spec "
        "within\n  jax.set_mesh(mesh)"
    ),
    "Contracting dimensions are sharded": (
        "  for a gradient: it is spread as its variable is; make a variable that all devices are to hold by\n"
        "  dflow.Variable(..., sharding=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))"
    ),
    "Non-hashable static arguments": (
        "  give it as something hashable, such as a tuple, a frozenset or a frozen dataclass"
    ),
    **dict.fromkeys(("Python int ", "Python integer ", "An overflow was encountered while parsing"), _TOO_LARGE),
    "Batching rule for 'call_exported'": (
        "  what was loaded from an export is a program for one shape, or for some sizes: jax.vmap does not map it. "
        "Export\n  jax.vmap of the function, or call it for one after the other, by jax.lax.map"
    ),
}

#: JAX's error for an argument that is neither an array nor static; the groups are its library and its path.
_NO_ARGUMENT = re.compile(
    r"^Error interpreting argument to .* is of type <class '(\w+)[\w.]*'> and was passed to the function at path "
    r"([\w.\[\]']+)\.",
    re.DOTALL,
)

#: Remedy for a leaf of an argument that is no array; {0} is the parameter.
_PARTS = (
    "  pass the arrays of {0} alone, and close over its other leaves. For a module of Equinox: arrays, rest =\n"
    "  equinox.partition({0}, equinox.is_array), pass arrays, and write {0} = equinox.combine(arrays, rest) inside"
)

#: JAX's error for an array of another library; the group is that.
_NO_TYPE = re.compile(r"^Argument .* of type '?<class '(\w+)[\w.]*'>'? is not a valid JAX type", re.DOTALL)

#: Remedies for arguments of other libraries.
_TENSORS = (
    "  give the function NumPy arrays: tensor.numpy(), or for all batches of a loader dflow.data.numpy_batches(loader)"
)
_TABLES = (
    "  give the step NumPy arrays: dflow.data.batches(table, size) makes batches of a table's rows, and\n"
    "  dflow.data.numpy_batches([table]) arrays of all"
)
_OF_LIBRARIES = {
    "torch": _TENSORS,
    "tensorflow": _TENSORS,
    **dict.fromkeys(("pandas", "pyarrow", "polars", "h5py"), _TABLES),
    "scipy": "  make it dense: step(matrix.toarray())",
    "numpy": (
        "  give the step arrays of numbers, or of strings for a table with a vocabulary: for instance times as one of\n"
        "  its integers, times.astype(numpy.int64)"
    ),
}


def refused_argument(error: Exception, leaves: Sequence[Any], names: Callable[[], Sequence[str]]) -> Exception | None:
    """Return the error in place of JAX's, for the first argument that is an object of a library of arrays or tables.

    None for other errors. `names` are those of the leaves.
    """
    if not (_NO_ARGUMENT.search(str(error)) or _NO_TYPE.search(str(error))):
        return None
    for leaf, name in zip(leaves, names(), strict=False):
        library = library_of(type(leaf))
        if library in _OF_LIBRARIES and library != "numpy":
            fact = f"{name}: expected an array, got a {type(leaf).__name__} of {library}"
            return GraphTypeError(fact, _OF_LIBRARIES[library].lstrip(), at=caller())
    return None


def advise(error: Exception) -> None:
    """Add a note with the remedy to an error that JAX raised for traced code or its arguments, if one is known."""
    note_operands(error)
    remedy = _remedy(error)
    if remedy is not None and not any(remedy in note for note in getattr(error, "__notes__", ())):
        _note(error, raised_at(error) or caller(), remedy)


def _remedy(error: Exception) -> str | None:
    if isinstance(error, _CONCRETE):
        return _NOT_KNOWN
    text = str(error)
    if (found := _NO_ARGUMENT.search(text) or _NO_TYPE.search(text)) is not None:
        if found[1] in _OF_LIBRARIES:
            return _OF_LIBRARIES[found[1]]
        if found.re is _NO_TYPE:
            return None
        if found[2].isidentifier():
            is_text = found[1] in ("str", "bytes")
            other = f"; or where it is an id, give an array or list of ids: [{found[2]}]" if is_text else ""
            return f"  name it static: dflow.jit(fn, static_argnames={found[2]!r}){other}"
        return _PARTS.format(found[2].split(".")[0].split("[")[0])
    return next((remedy for start, remedy in _REMEDIES.items() if text.startswith(start)), None)


def _note(error: Exception, loc: Loc | None, remedy: str) -> None:
    error.add_note(f"{at(loc).lstrip(chr(10))}\n{remedy}")


@contextmanager
def advised_options(jit: Callable[..., Any], fn: Any, options: Any) -> Iterator[None]:
    """Add a note to an error about `fn` or the options that `jit` was called with."""
    try:
        yield
    except ValueError as error:
        if str(error).startswith("Jitted function has invalid argnames"):
            _note(error, caller(), f"  the parameters are {', '.join(inspect.signature(fn).parameters)}")
        raise
    except TypeError as error:
        remedy = near_keywords(jit, options) or "decorate a function: @dflow.jit, or dflow.jit(function, options)"
        _note(error, caller(), f"  {remedy}")
        raise
