"""A function of an export as a model of ONNX, by the package jax2onnx, and run by ONNX Runtime."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from dflow.exporting.converting.numeric_function import NumericFunction
from dflow.exporting.converting.program_call import SCOPE, ProgramCall
from dflow.exporting.converting.stablehlo_rules import RULES, windowed
from dflow.tracing.errors import ConfigError, ExportError
from dflow.tracing.jax_frontend import inner_parts, make_jaxpr

#: Most dimensions of a window of ONNX Runtime.
_MOST_DIMENSIONS = 3
_PRIMITIVE = re.compile(r"primitive '(\w+)'")


def write_onnx(function: NumericFunction, path: Path, sizes: Mapping[str, int]) -> None:
    """Write a model, with these sizes in place of open ones.

    Raises ConfigError without jax2onnx; ExportError, which names the op, for one that the package does not convert.
    """
    try:
        from jax2onnx import to_onnx
    except ImportError as error:
        raise ConfigError(
            f"models of ONNX are made by jax2onnx, which is not installed: {error}",
            "it excludes dflow[orbax], so make an environment for it: python -m venv onnx; onnx/bin/pip install "
            "'dflow[onnx]'; onnx/bin/dflow convert ...",
        ) from error
    call = ProgramCall(function.program, {**RULES, "reduce_window": _window_of_three})

    def run(*arrays: Any) -> Any:
        # The barrier keeps what is computed of small weights alone out of the file.
        before = jax.lax.optimization_barrier(tuple(function.before))
        return tuple(call(*before, *arrays)[: len(function.outputs)])

    inputs = [
        jax.ShapeDtypeStruct(tuple(sizes.get(str(dim), dim) for dim in one.shape), one.dtype) for one in function.inputs
    ]
    names = [[one.name for one in each] for each in (function.inputs, function.outputs)]
    try:
        model = to_onnx(run, inputs, model_name=function.name, input_names=names[0], output_names=names[1])
    except ExportError as error:
        raise ExportError(f"{function.name} has no form in ONNX: {error}") from error
    except Exception as error:  # the library raises errors of many classes
        said, place = str(error).strip().partition("\n")[0][:300], _place(error, run, call, function, sizes)
        raise ExportError(
            f"jax2onnx cannot convert {function.name}: {said}{place}",
            "compute it otherwise, or in the program that calls the model, or give fixed sizes by --sizes",
        ) from error
    path.write_bytes(model.SerializeToString())


def _window_of_three(op: Any, given: Sequence[Any], region: Any) -> Any:
    """Return windows over an array of at most three dimensions, for ONNX Runtime has no more; the others are one."""
    array = given[0]
    size = [*map(int, op.operation.attributes["window_dimensions"])]
    over = [axis for axis, one in enumerate(size) if one > 1]
    if array.ndim <= _MOST_DIMENSIONS or len(over) >= _MOST_DIMENSIONS:
        return RULES["reduce_window"](op, given, region)
    others = [axis for axis in range(array.ndim) if axis not in over]
    turned = jax.lax.transpose(array, [*others, *over])
    flat = turned.reshape(-1, *turned.shape[len(others) :])
    found = windowed(op, given[1], flat, over)
    back = found.reshape(*turned.shape[: len(others)], *found.shape[1:])
    order = [*others, *over]
    return jax.lax.transpose(back, [order.index(axis) for axis in range(array.ndim)])


def onnx_runner(path: Path, function: NumericFunction) -> Callable[[Sequence[Any]], list[Any]]:
    """Return what runs a model on this machine. Raises ConfigError without ONNX Runtime."""
    try:
        import onnxruntime
    except ImportError as error:
        raise ConfigError(f"models of ONNX are run by onnxruntime: {error}", "pip install onnxruntime") from error
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [one.name for one in function.inputs]
    return lambda arrays: session.run(None, dict(zip(names, arrays, strict=True)))


def _place(
    error: Exception, run: Callable[..., Any], call: ProgramCall, function: NumericFunction, sizes: Mapping[str, int]
) -> str:
    """Return the op of the program, and the user's line, of the primitive that an error names; empty for none."""
    if (found := _PRIMITIVE.search(str(error))) is None:
        return ""
    known = dict.fromkeys(function.letters, 1) | dict(sizes)
    call.places.clear()
    jaxpr, _, _ = make_jaxpr(run, *(jax.ShapeDtypeStruct(one.fixed(known), one.dtype) for one in function.inputs))
    scopes = (scope for primitive, scope in _primitives(jaxpr) if primitive == found[1])
    numbers = (re.findall(rf"{SCOPE}(\d+)", scope) for scope in scopes)
    return next((f"; it is {call.places[int(found[-1])]}" for found in numbers if found), "")


def _primitives(jaxpr: Any) -> Iterator[tuple[str, str]]:
    """Yield the name and the scopes of each primitive of a program, also within loops."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name, str(equation.source_info.name_stack)
        for inner, _ in inner_parts(equation.params):
            yield from _primitives(inner)
