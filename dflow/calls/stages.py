"""The stages of a function with state before a call: traced, lowered and compiled, with the methods of `jax.stages`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from dflow.lowering.state_backend import LoweredStep, Runner
from dflow.tracing.errors import PlainJitError
from dflow.tracing.ir.types import ArrayType, array_type_of
from dflow.tracing.number_range import check_numbers
from dflow.tracing.path_names import leaf_names
from dflow.tracing.primitives.id_checks import raises_failed_checks
from dflow.tracing.source import at, caller
from dflow.tracing.state.variable_trees import handles

_INFO = "args_info", "donate_argnums", "fun_name", "in_avals", "in_tree", "jaxpr", "out_avals", "out_info", "out_tree"


@dataclass(eq=False, repr=False)
class _Stage:
    """Properties of the arguments and results that are known since the trace."""

    _looked: Any

    def __getattr__(self, name: str) -> Any:
        if name not in _INFO:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._looked, name)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._looked.fun_name}>"


@dataclass(eq=False, repr=False)
class TracedFunction(_Stage):
    """Result of `fn.trace(...)` for a function with state: JAX's `Traced`, but lowered by dflow."""

    _lower: Callable[[tuple[str, ...] | None], LoweredStep]

    def lower(
        self, *, lowering_platforms: tuple[str, ...] | None = None, _private_parameters: Any = None
    ) -> LoweredFunction:
        """Lower the function to programs, for `lowering_platforms` if not None, else for this process's devices.

        Raises PlainJitError when `jax.export` calls it, which passes `_private_parameters`.
        """
        if _private_parameters is not None:
            raise PlainJitError(
                f"{self._looked.fun_name} has state, and jax.export does not know where it is",
                "export it by dflow.export(fn, *specs), which keeps the state beside the program",
            )
        return LoweredFunction(self._looked, self._lower(lowering_platforms))


@dataclass(eq=False, repr=False)
class LoweredFunction(_Stage):
    """Result of `fn.lower(...)` for a function with state.

    It is one program, or several if a queue op separates them or if its variables are on several tasks. The inputs of a
    program are the values of the variables that it writes, of those it only reads, and its operands. Its first outputs
    are the new values.
    """

    _step: LoweredStep

    def as_text(self, dialect: str | None = None, *, debug_info: bool = False) -> str:
        """Return the StableHLO of all programs, one after the other; on a cluster by task, each with its plan."""
        return "\n".join(program.as_text(dialect, debug_info=debug_info) for program in self._step.programs)

    def cost_analysis(self) -> Mapping[str, float]:
        """Return XLA's estimates before compilation, such as `flops`, summed over the programs."""
        return _sum(program.cost_analysis() for program in self._step.programs)

    def compile(self, compiler_options: dict[str, Any] | None = None) -> CompiledFunction:
        """Compile the programs, on their tasks. Calls of the result use the variables like calls of the function."""
        return CompiledFunction(self._looked, *self._step.compile(compiler_options))


@dataclass(eq=False, repr=False)
class CompiledFunction(_Stage):
    """A function with state, compiled for one set of argument types."""

    _run: Runner
    _compiled: Sequence[jax.stages.Compiled] | None

    @property
    def _programs(self) -> Sequence[jax.stages.Compiled]:
        if self._compiled is None:
            raise PlainJitError(
                f"{self._looked.fun_name} runs on several tasks, and each compiles its programs itself",
                "lower(...) gives the text and the cost of the programs before compilation",
            )
        return self._compiled

    @raises_failed_checks
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it with all arguments except the static ones. Raises TypeError for another type or structure."""
        leaves = self._checked(*handles((args, kwargs)))
        return jax.tree_util.tree_unflatten(self._looked.out_tree, self._run(leaves))

    def as_text(self) -> str:
        """Return XLA's text of all programs, one after the other."""
        return "\n".join(program.as_text() or "" for program in self._programs)

    def cost_analysis(self) -> Mapping[str, float]:
        """Return XLA's estimates, such as `flops` and `bytes accessed`, summed over the programs."""
        return _sum(program.cost_analysis() for program in self._programs)

    def memory_analysis(self) -> Any:
        """Return XLA's sizes in bytes, such as `temp_size_in_bytes`. Raises PlainJitError for several programs."""
        programs = self._programs
        if len(programs) != 1:
            raise PlainJitError(
                f"{self._looked.fun_name} is {len(programs)} programs, which are not all in memory at once",
                "lower its parts as functions of their own",
            )
        return programs[0].memory_analysis()

    def _checked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the leaves of the arguments. Raises TypeError if they were not compiled for."""
        name = self._looked.fun_name
        infos: Any
        expected: Any
        leaves, structure = jax.tree_util.tree_flatten((args, kwargs))
        infos, expected = jax.tree_util.tree_flatten(handles(self._looked.args_info))
        if expected != structure:
            raise TypeError(
                f"{name} was compiled for arguments of the structure {expected}, and called with {structure}"
                f"{at(caller())}\n  call the function itself, which compiles for each structure"
            )
        paths = leaf_names("args", args) + leaf_names("kwargs", kwargs)
        check_numbers(leaves, lambda: [f"{name}: argument {path!r}" for path in paths])
        for path, leaf, info in zip(paths, leaves, infos, strict=True):
            given, wanted = array_type_of(leaf).strong, ArrayType(info.dtype, tuple(info.shape))
            if given != wanted:
                raise TypeError(
                    f"{name} was compiled for {path}: {wanted}, and called with {given}"
                    f"{at(caller())}\n  call the function itself, which compiles for each type, or convert the argument"
                )
        return leaves


def _sum(analyses: Any) -> Mapping[str, float]:
    total: Counter[str] = Counter()
    for analysis in analyses:
        total.update(analysis or {})
    return dict(total)
