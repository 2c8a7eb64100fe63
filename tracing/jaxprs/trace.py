"""From a function and its arguments to a bound graph.

A `Traced` is a graph together with what its inputs stand for in this process: variables, closed-over arrays, and
the leaves of the arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from dflow.tracing.ir.effects import Effect
from dflow.tracing.ir.explicit_sharding import meshes_of
from dflow.tracing.ir.graph import Graph
from dflow.tracing.ir.types import array_type_of
from dflow.tracing.jax_frontend import closed_parts, donates, make_jaxpr
from dflow.tracing.jaxprs.captured import captured
from dflow.tracing.jaxprs.from_jaxpr import graph_of
from dflow.tracing.path_names import leaf_names
from dflow.tracing.primitives.namesakes import warn_of_namesakes
from dflow.tracing.source import at, caller
from dflow.tracing.state.variable_trees import handles


@dataclass(frozen=True, eq=False)
class Traced:
    """A graph whose inputs are `variables`, then `constants`, then argument leaves; `out_tree` shapes its outputs.

    The argument leaves numbered in `donated` may be overwritten. `name` is the function's; `compiler_options` are for
    XLA.
    """

    graph: Graph
    variables: tuple[Any, ...]
    constants: tuple[Any, ...]
    out_tree: Any
    donated: tuple[int, ...] = ()
    name: str = "step"
    compiler_options: dict[str, Any] | None = None
    #: The meshes with explicit axes that the arguments and constants are spread over, by their abstract forms.
    meshes: Mapping[AbstractMesh, Mesh] = field(default_factory=dict)
    #: The static arguments, as a text; empty if there are none.
    static: str = ""

    @property
    def signature(self) -> str:
        """The types of the arguments, and the static ones, as a text."""
        first = len(self.variables) + len(self.constants)
        return f"({', '.join(str(value.type) for value in self.graph.inputs[first:])}){self.static}"


def trace(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    """Trace `fn` for arguments of the types of `args` and `kwargs` (arrays, scalars, ShapeDtypeStructs in pytrees)."""
    args, kwargs = handles((args, kwargs))
    leaves, in_tree = jax.tree_util.tree_flatten((args, kwargs))
    structs = [array_type_of(leaf).struct for leaf in leaves]
    out_tree: Any = None

    def flat(*values: Any) -> list[Any]:
        nonlocal out_tree
        inner_args, inner_kwargs = jax.tree_util.tree_unflatten(in_tree, values)
        outputs, out_tree = jax.tree_util.tree_flatten(handles(fn(*inner_args, **inner_kwargs)))
        return outputs

    jaxpr, consts, _ = make_jaxpr(flat, *structs)
    graph, variables, constants = graph_of(jaxpr, consts, argument_names(fn, args, kwargs))
    return Traced(graph, variables, constants, out_tree)


def traced_from(
    looked: Any, names: Sequence[str], compiler_options: dict[str, Any] | None = None, leaves: Sequence[Any] = ()
) -> Traced:
    """Return the graph of a `jax.stages.Traced` whose arguments have these `leaves` and `names`."""
    jaxpr, consts = closed_parts(looked.jaxpr)
    if len(jaxpr.invars) > len(names):
        error = jax.errors.UnexpectedTracerError(
            "Encountered an unexpected tracer: the function uses a value that another traced function made, whose "
            "trace has ended"
        )
        error.add_note(
            f"{at(caller()).lstrip(chr(10))}\n"
            "  return the value from the function that made it, and pass it as an argument"
        )
        raise error
    graph, variables, constants = graph_of(jaxpr, consts, names)
    warn_of_namesakes(variables)
    constants = tuple(map(captured, constants))
    # JAX builds the user's classes again to say which arguments are donated, and some check what they are given.
    infos = jax.tree_util.tree_leaves(handles(looked.args_info)) if donates(looked) else ()
    donated = tuple(index for index, info in enumerate(infos) if info.donated)
    meshes = meshes_of(getattr(value, "sharding", None) for value in (*constants, *leaves))
    return Traced(graph, variables, constants, looked.out_tree, donated, looked.fun_name, compiler_options, meshes)


def written_keys(traced: Traced) -> frozenset[str]:
    """The keys of the variables that a trace writes."""
    written = {ref for node in traced.graph.nodes for effect, ref in node.effects if effect is Effect.WRITE}
    pairs = zip(traced.graph.refs, traced.variables, strict=True)
    return frozenset(variable.key for ref, variable in pairs if ref in written)


def argument_names(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_left_out: Callable[[int | str], bool] = lambda parameter: False,
    is_leaf: Callable[[Any], bool] | None = None,
) -> list[str]:
    """A name for each leaf of the arguments: the parameter's, and the path within it.

    `is_left_out` selects parameters, by position or name, to leave out; `is_leaf` selects values to treat as leaves.
    """
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = [
        (positional[index] if index < len(positional) else f"arg_{index}", value)
        for index, value in enumerate(args)
        if not is_left_out(index)
    ]
    named += [(name, kwargs[name]) for name in sorted(kwargs) if not is_left_out(name)]
    return [name for parameter, value in named for name in leaf_names(parameter, value, is_leaf)]
