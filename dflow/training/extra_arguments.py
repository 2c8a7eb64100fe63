"""The extra arguments of `Optimizer.apply`, which a transformation takes beside the gradients.

optax passes every extra argument to every part of a chain, and a part ignores what it does not use: a misspelt argument
changes nothing. Here an argument that no part uses is an error, found by tracing the update once.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from dflow.tracing.errors import GraphTypeError, StrategyError
from dflow.tracing.ir.types import array_type_of
from dflow.tracing.jax_frontend import make_jaxpr
from dflow.tracing.near_names import keywords_of

#: How errors of optax and Python describe a missing argument, or one that no function takes.
_REFUSAL = re.compile(r"missing \d+ required|must be provided|[Uu]nexpected keyword")


def check_extra(update: Callable[..., Any], extra: Mapping[str, Any], structs: tuple[Any, Any, Any]) -> None:
    """Raise GraphTypeError unless `update` takes and uses each extra argument, and needs no other.

    update   the function of an optax transformation
    structs  the types of its gradients, state and parameters

    An argument that is neither made of arrays and numbers nor a function, such as a string, counts as used.
    """
    taken = keywords_of(update, extra)
    unused = [name for name in extra if name not in taken]
    if not unused:
        with naming_extra(extra) as given:
            used = _used(update, given, structs)
        unused = [name for name in extra if name not in used]
    if unused:
        raise GraphTypeError(
            f"apply: expected extra arguments that the transformation uses, got {unused[0]!r}",
            "leave it out, or correct its name: nothing in the transformation uses it",
        )


def _used(update: Callable[..., Any], extra: Mapping[str, Any], structs: tuple[Any, Any, Any]) -> set[str]:
    """Return the names of the arguments that one update uses: it computes with their arrays or calls them."""
    flat = [(name, leaf) for name, value in extra.items() for leaf in jax.tree_util.tree_leaves(value)]
    used = {name for name, value in extra.items() if not jax.tree_util.tree_leaves(value)}
    used.update(name for name, leaf in flat if not _is_array(leaf) and not callable(leaf))
    arrays = [(name, leaf) for name, leaf in flat if _is_array(leaf)]

    def traced(gradients: Any, state: Any, parameters: Any, *given: Any) -> Any:
        left = iter(given)
        stands_in = {
            name: jax.tree_util.tree_map(lambda leaf, name=name: _watched(leaf, name, left, used), value)
            for name, value in extra.items()
        }
        return update(gradients, state, parameters, **stands_in)

    jaxpr, _, _ = make_jaxpr(traced, *structs, *(array_type_of(leaf).struct for _, leaf in arrays))
    atoms = [atom for equation in jaxpr.eqns for atom in equation.invars] + list(jaxpr.outvars)
    found = {id(atom) for atom in atoms}
    given = jaxpr.invars[len(jaxpr.invars) - len(arrays) :]
    used.update(name for (name, _), var in zip(arrays, given, strict=True) if id(var) in found)
    return used


def _watched(leaf: Any, name: str, arrays: Iterator[Any], used: set[str]) -> Any:
    """Replace a leaf of an extra argument by the next array, or by a function that records that it was called."""
    if _is_array(leaf):
        return next(arrays)
    if not callable(leaf):
        return leaf

    @functools.wraps(leaf)
    def called(*args: Any, **kwargs: Any) -> Any:
        used.add(name)
        return leaf(*args, **kwargs)

    return called


def _is_array(leaf: Any) -> bool:
    return (isinstance(leaf, int | float | complex) and not isinstance(leaf, bool)) or hasattr(leaf, "dtype")


@contextmanager
def naming_extra(extra: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Raise GraphTypeError, in place of the update's own error, if an extra argument is missing or unexpected.

    Yields the extra arguments to pass. Their functions record the errors that they raise, which are not replaced.
    """
    own: list[Exception] = []
    try:
        yield {name: jax.tree_util.tree_map(lambda leaf: _noting(leaf, own), value) for name, value in extra.items()}
    except (TypeError, ValueError) as error:
        is_own = any(error is one for one in own)
        if is_own or isinstance(error, GraphTypeError) or not _REFUSAL.search(str(error)):
            raise
        raise GraphTypeError(
            f"apply: expected the extra arguments that the transformation needs, got "
            f"{', '.join(extra) or 'none'}: {error}",
            "give them by name: optimizer.apply(gradients, value=...)",
        ) from error


def _noting(leaf: Any, errors: list[Exception]) -> Any:
    """Replace a function by one that records the errors that it raises."""
    if _is_array(leaf) or not callable(leaf):
        return leaf

    @functools.wraps(leaf)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return leaf(*args, **kwargs)
        except Exception as error:
            errors.append(error)
            raise

    return called


def as_averaged(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the extra arguments of one worker's step as arrays. A synchronous step averages them over the workers.

    Raises StrategyError for an argument that has no mean, such as a function.
    """
    for name, value in extra.items():
        for leaf in jax.tree_util.tree_leaves(value):
            if not (isinstance(leaf, float) or (hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact))):
                raise StrategyError(
                    f"apply: expected extra arguments of floating arrays, whose mean over the workers a synchronous "
                    f"step takes, got {name!r} with a {type(leaf).__name__}",
                    "train by dflow.distributed.Async, or by a transformation that needs no such argument",
                )
    return {name: jax.tree_util.tree_map(jnp.asarray, value) for name, value in extra.items()}


def refuse_examples(gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Raise StrategyError for gradients of single examples: the workers' mean would mix different examples."""
    for gradient, variable in zip(gradients, variables, strict=True):
        shape: tuple[int, ...] = getattr(gradient, "shape", ())
        if shape != variable.shape:
            raise StrategyError(
                f"apply: expected one gradient of variable {variable.name!r} in a synchronous step, got "
                f"{shape[0]}, one for each example",
                "train by dflow.distributed.Async, or by a transformation that takes the mean gradient",
            )
