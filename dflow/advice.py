"""What to do about a mistake that JAX reports: a note on JAX's own error, with the user's line and the remedy.

The errors stay JAX's, in class and words, so that a program which catches them does so under `dflow.jit` too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from dflow.tracing.near_names import near_keywords
from dflow.tracing.source import at, caller, raised_at

_CONCRETE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
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


@contextmanager
def advised_trace() -> Iterator[None]:
    """Add to an error about a value that Python asked for while it was traced."""
    try:
        yield
    except _CONCRETE as error:
        if not any(_NOT_KNOWN in note for note in getattr(error, "__notes__", ())):
            error.add_note(f"{at(raised_at(error) or caller()).lstrip(chr(10))}\n{_NOT_KNOWN}")
        raise


@contextmanager
def advised_options(jit: Callable[..., Any], options: Any) -> Iterator[None]:
    """Add to an error about what `jit` was called with."""
    try:
        yield
    except TypeError as error:
        remedy = near_keywords(jit, options) or "decorate a function: @dflow.jit, or dflow.jit(function, options)"
        error.add_note(f"{at(caller()).lstrip(chr(10))}\n  {remedy}")
        raise


def advise_on_static(error: ValueError) -> None:
    """Add to an error about a static argument; another error is left as it is."""
    if str(error).startswith("Non-hashable static arguments"):
        error.add_note(f"{at(caller()).lstrip(chr(10))}\n{_NOT_HASHABLE}")


def advise_on_mapping(error: NotImplementedError) -> None:
    """Add to an error about a loaded function that was mapped; another error is left as it is."""
    if "call_exported" in str(error):
        error.add_note(f"{at(caller()).lstrip(chr(10))}\n{_NOT_MAPPED}")
