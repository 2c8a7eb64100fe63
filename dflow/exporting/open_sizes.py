"""Letters in the shapes of exported arguments, and sizes that begin at 0.

JAX takes a letter for a size from 1. So a function is traced with `b_plus_1 - 1` for the letter `b`: a size from 0. An
op that needs a row, such as a maximum, does not trace so, and then the function is exported for sizes from 1. The
manifest of an export and its errors say `b` in both cases.
"""

from __future__ import annotations

import math
import re
from functools import cache
from itertools import combinations
from typing import Any

import jax

from dflow.tracing.jax_frontend import letters_of, with_letters

#: Scope of all letters of `dflow.spec`: JAX does not allow two scopes in one function. It has no constraints.
LETTERS = jax.export.SymbolicScope()
#: Most letters in a product whose size is known to be at least 0.
_MOST_FACTORS = 3

_SUFFIX = "_plus_1"
#: Scopes of the letters that stand for a size and 1 more.
_FROM_ZERO: set[jax.export.SymbolicScope] = set()


def sizes_from_zero(arguments: Any) -> Any:
    """Return a pytree of arguments with letters that may be 0; None if it has none of `dflow.spec`, or others too."""
    leaves, tree = jax.tree_util.tree_flatten(arguments)
    open_ones = [dim for leaf in leaves for dim in getattr(leaf, "shape", ()) if not isinstance(dim, int)]
    if {getattr(dim, "scope", None) for dim in open_ones} != {LETTERS}:
        return None
    scope = _scope_of(tuple(sorted({letter for dim in open_ones for letter in letters_of(dim)})))

    def decreased(letter: str) -> Any:
        [increased] = jax.export.symbolic_shape(letter + _SUFFIX, scope=scope)
        return increased - 1

    def from_zero(leaf: Any) -> Any:
        shape = getattr(leaf, "shape", ())
        if all(isinstance(dim, int) for dim in shape):
            return leaf
        dims = [dim if isinstance(dim, int) else with_letters(dim, decreased) for dim in shape]
        return jax.ShapeDtypeStruct(dims, leaf.dtype)

    return jax.tree_util.tree_unflatten(tree, map(from_zero, leaves))


@cache
def _scope_of(letters: tuple[str, ...]) -> jax.export.SymbolicScope:
    """Return a scope that knows that products of the letters' sizes are at least 0, which JAX does not find."""
    free = jax.export.symbolic_shape(", ".join(letter + _SUFFIX for letter in letters))
    counts = range(2, min(len(letters), _MOST_FACTORS) + 1)
    products = [math.prod(one - 1 for one in several) for count in counts for several in combinations(free, count)]
    scope = jax.export.SymbolicScope([f"{product} >= 0" for product in products])
    _FROM_ZERO.add(scope)
    return scope


def as_given(dim: Any) -> Any:
    """Return a dimension of a traced function in the letters of its arguments."""
    return with_letters(dim, _increased) if getattr(dim, "scope", None) in _FROM_ZERO else dim


def _increased(letter: str) -> Any:
    [given] = jax.export.symbolic_shape(letter.removesuffix(_SUFFIX), scope=LETTERS)
    return given + 1


def text_as_given(text: str) -> str:
    """Return a text of JAX with the letters of the arguments."""
    return re.sub(rf"\b(\w+){_SUFFIX} - 1\b", r"\1", text)
