"""`jax.debug_nans` and `jax.debug_infs` for functions with state.

JAX looks at the results of a program after it ran. By then the variables hold the new values, and what it raises has no
message yet; so the results are looked at here, and what the call wrote is undone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from dflow.tracing.jax_frontend import checked_numbers
from dflow.tracing.resources import Variable
from dflow.tracing.source import at, caller


def run_checked(
    name: str, run: Callable[[], Any], resources: Sequence[Any], writes: Collection[str], anew: Callable[[], Any]
) -> Any:
    """What `run` gives. Raises FloatingPointError when a result or a variable holds what JAX is told to look for.

    The variables whose keys are in `writes` then have the values from before; what another thread wrote to them between
    is lost with what the call wrote. The error is that of the op, where `anew` finds it: it does the same
    op by op, and is not tried for a function that uses queues, whose elements are gone.
    """
    names = checked_numbers()
    variables = [resource for resource in resources if isinstance(resource, Variable) and resource.key in writes]
    before = [variable.read() for variable in variables]
    with _unchecked():
        results = run()
        found = _found(names, [*jax.tree_util.tree_leaves(results), *(variable.read() for variable in variables)])
    if found is None:
        return results
    try:
        with _unchecked():
            _restore(variables, before)
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
    """The first of `nan` and `inf` that is in one of the values."""
    tests = {"nan": jnp.isnan, "inf": jnp.isinf}
    numbers = [value for value in values if jnp.issubdtype(value.dtype, jnp.inexact)]
    return next((name for name in names for value in numbers if bool(tests[name](value).any())), None)


@contextmanager
def _unchecked() -> Iterator[None]:
    with jax.debug_nans(False), jax.debug_infs(False):
        yield
