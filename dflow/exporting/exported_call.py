"""Calls of an exported function: from Python arguments to those of its program, and from its results back."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dflow.calls.function import Function, jit
from dflow.exporting.export_manifest import FunctionSignature, Parameter, arguments_of, signature_text
from dflow.lowering.programs.portable_tree import build, flatten, plain
from dflow.tracing.state.resources import Variable

_KINDS = {
    "position": inspect.Parameter.POSITIONAL_ONLY,
    "either": inspect.Parameter.POSITIONAL_OR_KEYWORD,
    "name": inspect.Parameter.KEYWORD_ONLY,
}


def python_signature(parameters: list[Parameter]) -> inspect.Signature:
    """Return the parameters as a Python signature. Raises ValueError if no function can have them."""
    return inspect.Signature([inspect.Parameter(one.name, _KINDS[one.by]) for one in parameters])


def program_arguments(signature: FunctionSignature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the arguments by position and by name that the program takes for those of a call, which fit."""
    given = python_signature(signature.parameters).bind(*args, **kwargs).arguments
    leaves = [leaf for each in signature.parameters for leaf in flatten(each.tree, given[each.name], each.name)]
    return build(plain(arguments_of(signature.parameters)), iter(leaves))


def result_leaves(signature: FunctionSignature, results: Any) -> list[Any]:
    """Return the arrays of what a program gives as its result, in order."""
    return flatten(plain(signature.result), results, "result")


def result_of(signature: FunctionSignature, results: Any, variables: Mapping[str, Variable]) -> Any:
    """Return the result of a call, of what its program gives and of the variables that the function returns."""
    return build(signature.result, iter(result_leaves(signature, results)), variables)


def compiled(name: str, signature: FunctionSignature, run: Callable[..., Any]) -> Function[..., Any]:
    """Compile `run` as the exported function, with its name, parameters and donations."""
    run.__name__ = run.__qualname__ = name
    run.__doc__ = signature_text(name, signature)
    run.__signature__ = python_signature(signature.parameters)  # type: ignore[attr-defined]
    positional = [one for one in signature.parameters if one.by != "name"]
    return jit(
        run,
        donate_argnums=[index for index, one in enumerate(positional) if one.donated],
        donate_argnames=[one.name for one in signature.parameters if one.by == "name" and one.donated],
    )
