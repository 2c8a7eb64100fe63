"""A function of an export as a module of IREE, which small devices run without Python: compiled code and weights.

IREE's compiler and runtime are the packages of the extra `iree`; the first compiles for any target, the second runs a
module on this machine, for a comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflow.exporting.export_manifest import and_list, arguments_of
from dflow.exporting.exported_call import result_leaves
from dflow.exporting.loader import Loaded
from dflow.lowering.programs.portable_tree import build, is_ids, leaves_of, parts_of_type, plain
from dflow.tracing.errors import ConfigError, ExportError
from dflow.tracing.ir.types import ArrayType, array_type_of, parse_dtype

#: Otherwise IREE computes with the weights when it compiles, and int8 becomes float32 again.
_KEEPS_SMALL = "--iree-opt-const-expr-max-size-increase-threshold=0"

#: Random integers of a comparison are below this number.
_IDS = 100


@dataclass(frozen=True)
class IreeModule:
    """A compiled module, whose function `main` takes `inputs` and gives `outputs`: names and types, in order.

    content   of the file that IREE's runtime loads
    expected  calls dflow's function with the arrays that `main` takes, and returns the arrays that it gives
    """

    content: bytes
    inputs: Sequence[tuple[str, ArrayType]]
    outputs: Sequence[tuple[str, ArrayType]]
    expected: Any

    def __str__(self) -> str:
        given, gives = (", ".join(f"{name}: {type}" for name, type in each) for each in (self.inputs, self.outputs))
        return f"main({given}) -> {gives}"

    def difference(self) -> float:
        """Run the module on this machine with random numbers, and return the largest difference from dflow's results.

        Integers are small and not negative, as ids are. NaN at the same position in both results is no difference; in
        one of them alone it makes the result NaN.

        Raises ConfigError without IREE's runtime.
        """
        try:
            from iree import runtime
        except ImportError as error:
            raise _missing("run by iree.runtime") from error
        random = np.random.default_rng(0)
        arrays = [_drawn(random, type) for _, type in self.inputs]
        config = runtime.Config("local-task")
        module = runtime.load_vm_module(runtime.VmModule.copy_buffer(config.vm_instance, self.content), config)
        found = module.main(*arrays)
        results = found if isinstance(found, tuple | list) else [found]
        pairs = zip(results, self.expected(*arrays), strict=True)
        return float(np.max([_apart(np.asarray(a), np.asarray(b)) for a, b in pairs], initial=0.0))


def compile_module(
    model: Loaded, function: str | None = None, *, triple: str | None = None, cpu: str = "generic"
) -> IreeModule:
    """Compile a function with the present values of its variables, for a CPU.

    function  its name, needed if there are several
    triple    LLVM's name of the target, such as aarch64-linux-android34; None for this machine
    cpu       LLVM's name of the processor

    Raises ConfigError without IREE's compiler; ExportError for a function that writes variables, is not exported for
    the CPU, or has arguments of any size, and for a program that IREE cannot compile.
    """
    try:
        from iree import compiler
    except ImportError as error:
        raise _missing("compiled by iree.compiler") from error
    name, signature = model._without_state(function, "a module of IREE", "compile")
    positional = [one for one in signature.parameters if one.by != "name"]
    named = [one for one in signature.parameters if one.by == "name"]
    leaves = [leaf for one in (*positional, *named) for leaf in leaves_of(one.tree, one.name)]
    if ids := [path for path, type in leaves if is_ids(type)]:
        raise ExportError(
            f"{name}: {and_list(ids)}: expected arrays of numbers, got ids, which IREE lacks",
            "export a function of their two parts: lambda high, low: fn(dflow.WideIds(high, low))",
        )
    inputs = [(path, _fixed(path, type)) for path, type in leaves]
    program = model._programs[name]
    state = {key: model.variables[key].read() for key in signature.variables}
    constants = {key: model._constants[stored] for key, stored in signature.constants.items()}

    def run(*arrays: Any) -> list[Any]:
        args, kwargs = build(plain(arguments_of(signature.parameters)), iter(arrays))
        results, *_ = program.call(state, constants, *args, **kwargs)
        return result_leaves(signature, results)

    jitted = jax.jit(run)
    made = jax.export.export(jitted, platforms=["cpu"])(*(type.struct for _, type in inputs))
    flags = [
        _KEEPS_SMALL,
        f"--iree-llvmcpu-target-cpu={cpu}",
        *([f"--iree-llvmcpu-target-triple={triple}"] if triple else []),
    ]
    try:
        content = compiler.compile_str(
            made.mlir_module_serialized, input_type="stablehlo", target_backends=["llvm-cpu"], extra_args=flags
        )
    except compiler.CompilerToolError as error:
        first = next((line for line in str(error).splitlines() if "error:" in line), str(error))
        where = triple or "this machine"
        raise ExportError(f"IREE cannot compile {name} for {where}: {first.partition('error: ')[2][:300]}") from error
    results = [path for path, _ in leaves_of(signature.result, "result")]
    types = [array_type_of(jax.ShapeDtypeStruct(aval.shape, aval.dtype)) for aval in made.out_avals]
    return IreeModule(content, inputs, list(zip(results, types, strict=True)), jitted)


def _drawn(random: np.random.Generator, type: ArrayType) -> Any:
    if jnp.issubdtype(type.dtype, jnp.inexact):
        return np.asarray(random.standard_normal(type.shape)).astype(type.dtype)
    most: Any = 1 if type.dtype == np.bool_ else jnp.iinfo(type.dtype).max  # type: ignore[no-untyped-call]
    below = min(_IDS, int(most) + 1)
    return np.asarray(random.integers(below, size=type.shape)).astype(type.dtype)


def _apart(a: Any, b: Any) -> float:
    """Return the largest difference of two arrays, NaN if one alone has a NaN somewhere."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore"):  # infinity less infinity
        apart = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    return float(np.max(apart, initial=0.0))


def _missing(what: str) -> ConfigError:
    return ConfigError(f"modules are {what}, which is not installed", "pip install 'dflow[iree]'")


def _fixed(path: str, type: str) -> ArrayType:
    dtype, dims = parts_of_type(type)
    if letters := [dim for dim in dims if not dim.isdecimal()]:
        raise ExportError(
            f"{path} is {type}, and IREE takes no program for any {letters[0]}",
            "export the function for one size, the one that the device uses",
        )
    return ArrayType(parse_dtype(dtype), tuple(map(int, dims)))
