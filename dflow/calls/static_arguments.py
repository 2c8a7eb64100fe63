"""Static and traced arguments of a call, separated as by `jax.jit`, and the key of what a trace depends on.

A parameter may be declared static by its position or by its name, and passed either way.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from dflow.tracing.jax_frontend import abstract, jit_options, trace_context


@dataclass(frozen=True)
class StaticArguments:
    """The static positions and names of a function."""

    positions: frozenset[int] = frozenset()
    names: frozenset[str] = frozenset()

    def test_of(self, args: tuple[Any, ...]) -> Callable[[int | str], bool]:
        """Return a test whether a parameter, by position or name, is static in a call with these arguments."""
        static: set[int | str] = {*self.among(args), *self.names}
        return lambda parameter: parameter in static

    def among(self, args: tuple[Any, ...]) -> set[int]:
        """Return the positions of the static ones of these arguments; negative positions count from the end."""
        return {position % len(args) for position in self.positions if -len(args) <= position < len(args)}

    def mapped(self, change: Callable[[Any], Any], args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with `change(argument)` in place of each that is not static."""
        is_static = self.test_of(args)
        positional = tuple(arg if is_static(position) else change(arg) for position, arg in enumerate(args))
        return positional, {name: arg if is_static(name) else change(arg) for name, arg in kwargs.items()}

    def leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the leaves of the traced arguments."""
        return jax.tree_util.tree_leaves(self.split(args, kwargs)[:2])

    def split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """Return the traced arguments, the traced keyword arguments, and a hashable key of the static ones."""
        if not self.positions and not self.names:
            return args, kwargs, ()
        positions = self.among(args)
        traced = tuple(arg for index, arg in enumerate(args) if index not in positions)
        traced_kwargs = {name: value for name, value in kwargs.items() if name not in self.names}
        static = [(index, args[index], type(args[index])) for index in sorted(positions)]
        static_kwargs = [(name, kwargs[name], type(kwargs[name])) for name in sorted(self.names & kwargs.keys())]
        return traced, traced_kwargs, (*static, *static_kwargs)

    def key_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Hashable, list[Any]]:
        """Return what a trace depends on (types, static arguments, JAX's settings), and the traced leaves."""
        *traced, static = self.split(args, kwargs)
        leaves, in_tree = jax.tree_util.tree_flatten(traced)
        return (in_tree, tuple(map(_type_key, leaves)), static, trace_context()), leaves

    def joined(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]:
        """Return a function that inserts the static ones of these arguments into traced ones: `split` inverted."""
        fixed = {position: args[position] for position in self.among(args)}
        fixed_kwargs = {name: kwargs[name] for name in self.names & kwargs.keys()}
        count = len(args)

        def join(traced: tuple[Any, ...], traced_kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            rest = iter(traced)
            return tuple(fixed[i] if i in fixed else next(rest) for i in range(count)), traced_kwargs | fixed_kwargs

        return join


def _type_key(leaf: Any) -> Any:
    aval = getattr(leaf, "aval", None)
    if aval is not None:
        return aval
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.dtype, leaf.shape
    return abstract(leaf) if isinstance(leaf, jax.ShapeDtypeStruct) else type(leaf)


def static_arguments(jitted: Any) -> StaticArguments:
    """Return the static arguments of a `jax.jit` function."""
    options = jit_options(jitted)
    return StaticArguments(frozenset(options["static_argnums"]), frozenset(options["static_argnames"]))
