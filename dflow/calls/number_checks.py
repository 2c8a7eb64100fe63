"""`jax.debug_nans` and `jax.debug_infs` for functions with state.

JAX checks the results of a program after it has run. By then the variables have the new values, and JAX's error has no
message yet. So dflow checks the results here, and restores the variables that the call wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from dflow.tracing.jax_frontend import checked_numbers
from dflow.tracing.source import at, caller
from dflow.tracing.state.resources import Variable


def run_checked(
    name: str, run: Callable[[], Any], resources: Sequence[Any], writes: Collection[str], anew: Callable[[], Any]
) -> Any:
    """Call `run` and return its result. Raises FloatingPointError if a result or written variable has a NaN or inf.

    JAX's settings choose which of the two to look for. On failure, the variables with keys in `writes` get their
    earlier values back; concurrent writes of other threads to them are lost too. Before the error, `anew` repeats the
    call op by op, and raises the failing op's own error. It is skipped if queues are used, whose elements are gone.
    """
    names = checked_numbers()
    variables = [resource for resource in resources if isinstance(resource, Variable) and resource.key in writes]
    before = [variable.read() for variable in variables]
    with _unchecked():
        results = run()
        found = _found(names, [*jax.tree_util.tree_leaves(results), *(variable.read() for variable in variables)])
        if found is None:
            return results
        _restore(variables, before)
    try:
        if all(isinstance(resource, Variable) for resource in resources):
            anew()
    finally:
        with _unchecked():
            _restore(variables, before)
    raise FloatingPointError(f"invalid value ({found}) encountered in {name}{at(caller())}")


def _restore(variables: Sequence[Variable], values: Sequence[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _found(names: Sequence[str], values: Sequence[Any]) -> str | None:
    """Return the first of `names` (`nan`, `inf`) that occurs in a value, or None."""
    tests = {"nan": jnp.isnan, "inf": jnp.isinf}
    numbers = [value for value in values if jnp.issubdtype(value.dtype, jnp.inexact)]
    return next((name for name in names for value in numbers if bool(tests[name](value).any())), None)


@contextmanager
def _unchecked() -> Iterator[None]:
    with jax.debug_nans(False), jax.debug_infs(False):
        yield
