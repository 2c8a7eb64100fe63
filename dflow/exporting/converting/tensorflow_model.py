"""A function of an export as a SavedModel of TensorFlow or a model of LiteRT, by TensorFlow, and run by either.

A SavedModel holds the program itself, which TensorFlow compiles by XLA. LiteRT has other ops: its converter makes them
of the program at fixed sizes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from dflow.exporting.converting.numeric_function import NamedType, NumericFunction, refused
from dflow.exporting.converting.program_call import ProgramCall
from dflow.exporting.exporter import spec
from dflow.tracing.errors import ConfigError, ExportError
from dflow.tracing.jax_frontend import module_of_version

_SIGNATURE = "serving_default"
#: The version of StableHLO that TensorFlow reads: newer ones have ops that TensorFlow 2.20 does not know.
_VERSION = "1.8.0"


def write_saved_model(function: NumericFunction, path: Path, sizes: Mapping[str, int]) -> None:
    """Write a SavedModel with the signature `serving_default`, whose open sizes stay open but for those in `sizes`.

    Raises ConfigError without TensorFlow; ExportError for a program that it cannot read.
    """
    tf = _tensorflow()
    shapes = [tuple(sizes.get(str(dim), dim) for dim in one.shape) for one in function.inputs]
    try:
        _save(tf, path, function, _program(function, shapes), function.before, shapes)
    except Exception as error:  # the library raises errors of many classes
        raise refused("TensorFlow cannot convert", function, error) from error


def write_litert(function: NumericFunction, path: Path, sizes: Mapping[str, int]) -> None:
    """Write a model of LiteRT, with these sizes in place of open ones, and the weights inside.

    Raises as `write_saved_model` does, and for an op that LiteRT does not have.
    """
    tf = _tensorflow()
    call = ProgramCall(function.program)

    def run(*arrays: Any) -> Any:
        return tuple(call(*function.before, *arrays)[: len(function.outputs)])

    shapes = [one.fixed(sizes) for one in function.inputs]
    structs = [jax.ShapeDtypeStruct(shape, one.dtype) for shape, one in zip(shapes, function.inputs, strict=True)]
    try:
        program = jax.export.export(jax.jit(run, keep_unused=True), platforms=["cpu"])(*structs)
        with tempfile.TemporaryDirectory() as folder:
            _save(tf, Path(folder), function, program, (), shapes)
            converter = tf.lite.TFLiteConverter.from_saved_model(folder, signature_keys=[_SIGNATURE])
            content = converter.convert()
    except ExportError:
        raise
    except Exception as error:  # the library raises errors of many classes
        raise refused("LiteRT cannot convert", function, error) from error
    path.write_bytes(content)


def saved_model_runner(path: Path, function: NumericFunction) -> Callable[[Sequence[Any]], list[Any]]:
    """Return what runs a SavedModel on this machine."""
    tf = _tensorflow()
    model = tf.saved_model.load(str(path))

    def run(arrays: Sequence[Any]) -> list[Any]:
        names = [one.name for one in function.inputs]
        given = {name: tf.constant(array) for name, array in zip(names, arrays, strict=True)}
        found = model.signatures[_SIGNATURE](**given)
        return [found[one.name].numpy() for one in function.outputs]

    return run


def litert_runner(path: Path, function: NumericFunction) -> Callable[[Sequence[Any]], list[Any]]:
    """Return what runs a model of LiteRT on this machine. Raises ConfigError without its interpreter."""
    try:
        from ai_edge_litert.interpreter import Interpreter
    except ImportError as error:
        raise ConfigError(
            f"models of LiteRT are run by ai-edge-litert: {error}", "pip install ai-edge-litert"
        ) from error
    runner = Interpreter(str(path)).get_signature_runner(_SIGNATURE)

    def run(arrays: Sequence[Any]) -> list[Any]:
        found = runner(**{one.name: array for one, array in zip(function.inputs, arrays, strict=True)})
        return [found[one.name] for one in function.outputs]

    return run


def _tensorflow() -> Any:
    try:
        import tensorflow as tf
    except ImportError as error:
        raise ConfigError(
            f"SavedModels and models of LiteRT are made by TensorFlow, which is not installed: {error}",
            "it is large, so make an environment for it: python -m venv tf; tf/bin/pip install 'dflow[litert]'; "
            "tf/bin/dflow convert ...",
        ) from error
    return tf


def _program(function: NumericFunction, shapes: Sequence[tuple[Any, ...]]) -> jax.export.Exported:
    """Return the program, without functions that TensorFlow calls at open sizes alone: it then refuses the program."""
    if not function.letters or "stablehlo.composite" not in function.program.mlir_module():
        return function.program
    call = ProgramCall(function.program)

    def run(*arrays: Any) -> Any:
        return tuple(call(*arrays)[: len(function.outputs)])

    structs = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in function.before]
    structs += [spec(shape, one.dtype) for shape, one in zip(shapes, function.inputs, strict=True)]
    return jax.export.export(jax.jit(run, keep_unused=True), platforms=["cpu"])(*structs)


def _save(
    tf: Any,
    path: Path,
    function: NumericFunction,
    program: jax.export.Exported,
    before: Sequence[Any],
    shapes: Sequence[tuple[Any, ...]],
) -> None:
    """Write a SavedModel of a program, whose arrays `before` the inputs are variables of it."""
    from tensorflow.compiler.tf2xla.python.xla import call_module

    model = tf.Module()
    model.weights = [tf.Variable(value, trainable=False) for value in before]

    def specs(of: Sequence[NamedType], shapes: Sequence[Any]) -> list[Any]:
        open_shapes = [[None if isinstance(dim, str) else dim for dim in shape] for shape in shapes]
        return [tf.TensorSpec(shape, one.dtype, name=one.name) for one, shape in zip(of, open_shapes, strict=True)]

    @tf.function(autograph=False, input_signature=specs(function.inputs, shapes))  # type: ignore[untyped-decorator]
    def serve(*inputs: Any) -> Any:
        arguments = [*(one.read_value() for one in model.weights), *inputs]
        results = call_module(
            [arguments[index] for index in program.module_kept_var_idx],
            version=program.calling_convention_version,
            module=module_of_version(program, _VERSION),
            Tout=[aval.dtype for aval in program.out_avals],
            Sout=[[dim if isinstance(dim, int) else None for dim in aval.shape] for aval in program.out_avals],
            platforms=[platform.upper() for platform in program.platforms],
        )
        return {one.name: result for one, result in zip(function.outputs, results, strict=False)}

    model.serve = serve
    tf.saved_model.save(model, str(path), signatures={_SIGNATURE: serve})
