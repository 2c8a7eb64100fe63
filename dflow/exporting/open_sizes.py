"""Letters in the shapes of exported arguments, and sizes that begin at 0.

JAX takes a letter for a size from 1. So a function is traced with `b_plus_1 - 1` for the letter `b`: a size from 0. An
op that needs a row, such as a maximum, does not trace so, and then the letters that it needs are sizes from 1. The
manifest of an export and its errors say `b` in both cases.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
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


def open_letters(arguments: Any) -> tuple[str, ...]:
    """Return the letters of `dflow.spec` in a pytree of arguments; none if it has open sizes of other origin."""
    dims = _open_sizes(arguments)
    if {getattr(dim, "scope", None) for dim in dims} != {LETTERS}:
        return ()
    return tuple(sorted({letter for dim in dims for letter in letters_of(dim)}))


def sizes_from_zero(arguments: Any, free: Collection[str]) -> Any:
    """Return a pytree of arguments whose open sizes are all `open_letters`; those in `free` may be 0."""
    scope = _scope_of(open_letters(arguments), frozenset(free))

    def replaced(letter: str) -> Any:
        [size] = jax.export.symbolic_shape(letter + _SUFFIX if letter in free else letter, scope=scope)
        return size - 1 if letter in free else size

    def from_zero(leaf: Any) -> Any:
        shape = getattr(leaf, "shape", ())
        if all(isinstance(dim, int) for dim in shape):
            return leaf
        dims = [dim if isinstance(dim, int) else with_letters(dim, replaced) for dim in shape]
        return jax.ShapeDtypeStruct(dims, leaf.dtype)

    leaves, tree = jax.tree_util.tree_flatten(arguments)
    return jax.tree_util.tree_unflatten(tree, map(from_zero, leaves))


def _open_sizes(arguments: Any) -> list[Any]:
    leaves = jax.tree_util.tree_leaves(arguments)
    return [dim for leaf in leaves for dim in getattr(leaf, "shape", ()) if not isinstance(dim, int)]


@cache
def _scope_of(letters: tuple[str, ...], free: frozenset[str]) -> jax.export.SymbolicScope:
    """Return a scope that knows that products of the letters' sizes are at least 0, which JAX does not find."""
    names = [letter + _SUFFIX if letter in free else letter for letter in letters]
    dims = zip(letters, jax.export.symbolic_shape(", ".join(names)), strict=True)
    sizes = [dim - 1 if letter in free else dim for letter, dim in dims]
    counts = range(2, min(len(letters), _MOST_FACTORS) + 1)
    products = [math.prod(several) for count in counts for several in combinations(sizes, count)]
    scope = jax.export.SymbolicScope([f"{product} >= 0" for product in products])
    _FROM_ZERO.add(scope)
    return scope


def as_given(dim: Any) -> Any:
    """Return a dimension of a traced function in the letters of its arguments."""
    return with_letters(dim, _increased) if getattr(dim, "scope", None) in _FROM_ZERO else dim


def _increased(letter: str) -> Any:
    [given] = jax.export.symbolic_shape(letter.removesuffix(_SUFFIX), scope=LETTERS)
    return given + 1 if letter.endswith(_SUFFIX) else given


def text_as_given(text: str) -> str:
    """Return a text of JAX with the letters of the arguments."""
    return re.sub(rf"\b(\w+){_SUFFIX} - 1\b", r"\1", text)
