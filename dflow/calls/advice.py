"""Advice on mistakes that JAX reports: a note on JAX's own error, with the user's line and the remedy.

The errors keep JAX's class and message, so that a program that catches them also works under `dflow.jit`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from dflow.tracing.derivatives.loops import NOT_REVERSED, REVERSED
from dflow.tracing.near_names import near_keywords
from dflow.tracing.source import at, caller, raised_at

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

_NOT_HASHABLE = "  give it as something hashable, such as a tuple, a frozenset or a frozen dataclass"


_NOT_MAPPED = (
    "  what was loaded from an export is a program for one shape, or for some sizes: jax.vmap does not map it. Export\n"
    "  jax.vmap of the function, or call it for one after the other, by jax.lax.map"
)


_TABLE_SPREAD = (
    "  for a variable: variable.read().at[indices].get(out_sharding=sharding), with a sharding, or with a spec within\n"
    "  jax.set_mesh(mesh)"
)

_NOT_ON_MESH = (
    "  for a gradient: it is spread as its variable is; make a variable that all devices are to hold by\n"
    "  dflow.Variable(..., sharding=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))"
)


#: JAX's error for an argument that is neither an array nor static; group 1 is the argument's path.
_NO_ARGUMENT = re.compile(
    r"^Error interpreting argument to .* was passed to the function at path ([\w.\[\]']+)\.", re.DOTALL
)


def advise_on_trace(error: Exception) -> None:
    """Add a note to an error that JAX raised in traced code, if a remedy is known."""
    remedy = next((remedy for is_meant, remedy in _REMEDIES if is_meant(error)), None)
    if remedy is not None and not any(remedy in note for note in getattr(error, "__notes__", ())):
        error.add_note(f"{at(raised_at(error) or caller()).lstrip(chr(10))}\n{remedy}")


#: Tests for errors with the remedy of each; the first that matches counts.
_REMEDIES: tuple[tuple[Callable[[Exception], bool], str], ...] = (
    (lambda error: isinstance(error, _CONCRETE), _NOT_KNOWN),
    (lambda error: str(error).startswith("Shapes must be 1D sequences of concrete values"), _NOT_KNOWN),
    (lambda error: str(error).startswith(NOT_REVERSED), REVERSED),
    (lambda error: str(error).startswith("Use `.at[...].get(out_sharding=)`"), _TABLE_SPREAD),
    (lambda error: str(error).startswith("Contracting dimensions are sharded"), _NOT_ON_MESH),
)


@contextmanager
def advised_options(jit: Callable[..., Any], fn: Any, options: Any) -> Iterator[None]:
    """Add a note to an error about `fn` or the options that `jit` was called with."""
    try:
        yield
    except ValueError as error:
        if str(error).startswith("Jitted function has invalid argnames"):
            known = inspect.signature(fn).parameters
            error.add_note(f"{at(caller()).lstrip(chr(10))}\n  the parameters are {', '.join(known)}")
        raise
    except TypeError as error:
        remedy = near_keywords(jit, options) or "decorate a function: @dflow.jit, or dflow.jit(function, options)"
        error.add_note(f"{at(caller()).lstrip(chr(10))}\n  {remedy}")
        raise


def advise_on_arguments(error: TypeError | ValueError) -> None:
    """Add a note to an error about an argument that is not an array, or is static but not hashable."""
    if str(error).startswith("Non-hashable static arguments"):
        error.add_note(f"{at(caller()).lstrip(chr(10))}\n{_NOT_HASHABLE}")
    if (found := _NO_ARGUMENT.search(str(error))) is not None:
        name = found[1] if found[1].isidentifier() else "..."
        error.add_note(f"{at(caller()).lstrip(chr(10))}\n  name it static: dflow.jit(fn, static_argnames={name!r})")


def advise_on_mapping(error: NotImplementedError) -> None:
    """Add a note to an error about `jax.vmap` of a loaded function."""
    if "call_exported" in str(error):
        error.add_note(f"{at(caller()).lstrip(chr(10))}\n{_NOT_MAPPED}")
