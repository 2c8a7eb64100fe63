"""From a function and its arguments to a bound graph.

A `Traced` is a graph together with what its inputs stand for in this process: variables, closed-over arrays, and
the leaves of the arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from dflow.tracing.from_jaxpr import graph_of
from dflow.tracing.graph import Graph
from dflow.tracing.jax_frontend import make_jaxpr
from dflow.tracing.resources import path_name
from dflow.tracing.types import array_type_of


@dataclass(frozen=True, eq=False)
class Traced:
    """A graph whose inputs are `variables`, then `constants`, then argument leaves; `out_tree` shapes its outputs."""

    graph: Graph
    variables: tuple[Any, ...]
    constants: tuple[Any, ...]
    out_tree: Any


def trace(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    """Trace `fn` for arguments of the types of `args` and `kwargs` (arrays, scalars, ShapeDtypeStructs in pytrees)."""
    leaves, in_tree = jax.tree_util.tree_flatten((args, kwargs))
    structs = [array_type_of(leaf).struct for leaf in leaves]
    out_tree: Any = None

    def flat(*values: Any) -> list[Any]:
        nonlocal out_tree
        inner_args, inner_kwargs = jax.tree_util.tree_unflatten(in_tree, values)
        outputs, out_tree = jax.tree_util.tree_flatten(fn(*inner_args, **inner_kwargs))
        return outputs

    jaxpr, consts, _ = make_jaxpr(flat, *structs)
    graph, variables, constants = graph_of(jaxpr, consts, argument_names(fn, args, kwargs))
    return Traced(graph, variables, constants, out_tree)


def argument_names(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[str]:
    """A name for each leaf of the arguments: the parameter's, and the path within it."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = {positional[i] if i < len(positional) else f"arg_{i}": value for i, value in enumerate(args)} | kwargs
    names: list[str] = []
    for parameter, value in named.items():
        flat, _ = jax.tree_util.tree_flatten_with_path(value)
        names += [f"{parameter}/{path_name(path)}" if path else parameter for path, _ in flat]
    return names
