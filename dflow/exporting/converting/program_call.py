"""A program of an export as calls of `jax.lax`, one for each op of its StableHLO.

Why: packages that convert functions of JAX trace them, and find one opaque call in an exported program. Here they
trace the primitives of JAX that the program was lowered from, at the sizes of the arguments, which may be open.
Invariant: the results are those of the program.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dflow.exporting.converting.known_sizes import Sizes, as_array, divided_sizes, sizes_of_op
from dflow.exporting.converting.stablehlo_attributes import attribute, dtype_of
from dflow.exporting.converting.stablehlo_rules import RULES, Rule
from dflow.tracing.errors import ExportError
from dflow.tracing.jax_frontend import parsed_module
from dflow.tracing.source import is_user_file

_PLACE = re.compile(r'"([^"]+\.py)":(\d+)')
#: The prefix of the names of scopes that tell the op of each primitive.
SCOPE = "stablehlo_op_"
#: Calls that compute nothing: checks of sizes, and annotations.
_NOTHING = frozenset(("shape_assertion", "Sharding", "xla.sdy.FuncResultSharding"))

Values = Sequence[Any]


class ProgramCall:
    """A program that is called as `jax.lax` ops, with its flat arguments; it gives its flat results.

    `places` has a description and the user's line of each op that was called. An op's primitives are traced in a scope
    whose name ends with the op's number in this list.
    """

    def __init__(self, program: jax.export.Exported, rules: Mapping[str, Rule] = RULES) -> None:
        self._rules = rules
        self._program, self.places = program, list[str]()
        #: The user's line of the call that is computed, for ops without one.
        self._caller = ""
        self._module = parsed_module(program)
        self._functions = {
            str(attribute(one, "sym_name")): one
            for one in self._module.body.operations
            if one.operation.name == "func.func"
        }

    def __call__(self, *arguments: Any) -> list[Any]:
        kept = [arguments[index] for index in self._program.module_kept_var_idx]
        if len(self._program.platforms) > 1:
            kept.insert(0, Sizes(np.array(self._program.platforms.index("cpu"), object), np.dtype(np.int32)))
        return [*map(as_array, self._called("main", kept))]

    def _called(self, function: str, arguments: Values) -> list[Any]:
        [region] = self._functions[function].operation.regions
        return self._run(region, arguments, {})

    def _run(self, region: Any, arguments: Values, outer: Mapping[Any, Any]) -> list[Any]:
        """Return what a block gives; `outer` has the values of the code around it."""
        [block] = region.blocks
        values: dict[Any, Any] = {**outer, **dict(zip(block.arguments, arguments, strict=True))}
        for op in block.operations:
            operation = op.operation
            given = [values[operand] for operand in operation.operands]
            if operation.name in ("func.return", "stablehlo.return"):
                return given
            values |= zip(operation.results, self._results(operation, given, values), strict=True)
        return []

    def _results(self, op: Any, given: Values, values: Mapping[Any, Any]) -> Values:
        name = op.name.removeprefix("stablehlo.").removeprefix("chlo.")
        if name == "func.call" and (divided := divided_sizes(_callee(op), given)) is not None:
            return divided
        if name in ("func.call", "composite"):
            outer, self._caller = self._caller, self._place(op)
            try:
                return self._called(_callee(op), given)
            finally:
                self._caller = outer
        if name == "custom_call" and attribute(op, "call_target_name") in _NOTHING:
            return given[: len(op.results)]
        if (found := sizes_of_op(name, op, given)) is not None:
            return [found]

        def region(number: int) -> Callable[..., list[Any]]:
            return lambda *arguments: [*map(as_array, self._run(op.regions[number], arguments, values))]

        if name == "case" and isinstance(given[0], Sizes):  # the branch of a platform
            return self._run(op.regions[int(given[0].values)], [], values)
        if name not in self._rules:
            what = f"custom_call of {attribute(op, 'call_target_name')!r}" if name == "custom_call" else op.name
            raise ExportError(
                f"expected ops that another format has, got {what}{self._place(op)}",
                "compute it otherwise, or in the program that calls the model",
            )
        self.places.append(f"{op.name}{self._place(op)}")
        with jax.named_scope(f"{SCOPE}{len(self.places) - 1}"):
            results = self._rules[name](op, given, region)
        return [self._typed(op, result, value) for result, value in zip(op.results, _listed(results), strict=True)]

    def _typed(self, op: Any, result: Any, value: Any) -> Any:
        expected = dtype_of(result.type)
        if value.dtype != expected:
            raise AssertionError(f"{op.name} gave {value.dtype} for {result.type}{self._place(op)}")
        return value

    def _place(self, op: Any) -> str:
        """Return the user's line of an op, in the form of errors; empty if the export does not have it."""
        places = _PLACE.findall(str(op.location))
        found = next((place for place in places if is_user_file(place[0])), None)
        return self._caller if found is None else f"\n  at {found[0]}:{found[1]}"


def _callee(op: Any) -> str:
    name = "decomposition" if op.name == "stablehlo.composite" else "callee"
    return str(attribute(op, name))


def _listed(results: Any) -> Values:
    return results if isinstance(results, tuple | list) else [results]
