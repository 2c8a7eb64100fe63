"""Smaller weights in an export: int8 with scales, or bfloat16, converted back inside the program.

A scale is that of a channel (the last dimension) of a dense weight, and that of a row of a table, whose lookups convert
the rows that they take. Only floating-point variables of at least 2 dimensions that no exported function writes are
made smaller; a report names the others. Invariant: the program reads the new variables, so the files shrink with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from dflow.exporting.export_manifest import arguments_of
from dflow.exporting.export_trace import Trace, TracedExport
from dflow.exporting.exported_call import compiled, program_arguments, result_leaves, result_of
from dflow.exporting.stand_ins import FewerBits, StandIns
from dflow.lowering.files.narrowing import Narrowing
from dflow.lowering.programs.portable_tree import Held, Tree, build, leaves_of, parts_of
from dflow.tracing.errors import ExportError
from dflow.tracing.rows.scaled_rows import ScaledRows
from dflow.tracing.state.container import outside_containers
from dflow.tracing.state.context import home
from dflow.tracing.state.resources import Variable
from dflow.training.group_saving import is_divided

WeightForm = Literal["int8", "bfloat16"]
FORMS: tuple[WeightForm, ...] = ("int8", "bfloat16")


@dataclass(frozen=True)
class SmallWeight:
    """The variables that stand for one, and its dtype. `scale` is that of each channel, or of each row of a table."""

    small: Variable
    scale: Variable | None
    dtype: Any
    is_table: bool

    def read(self) -> Any:
        """Return the weights in their own dtype; a table as `ScaledRows`."""
        if self.is_table:
            return ScaledRows(self.small.read(), None if self.scale is None else self.scale.read(), self.dtype)
        if self.scale is None:
            return self.small.read().astype(self.dtype)
        return (self.small.read().astype(jnp.float32) * self.scale.read()).astype(self.dtype)


def with_small_weights(made: Mapping[str, TracedExport], form: WeightForm, trace: Trace) -> dict[str, TracedExport]:
    """Return the functions over smaller variables, which stand for these at any time. Raises ExportError."""
    taken = {name for one in made.values() for name in one.variables}
    with home(StandIns()), outside_containers():
        kept = kept_as_they_are(made.values(), form)
        read = dict.fromkeys(variable for one in made.values() for variable in one.pure.variables)
        smaller = {one: _made_smaller(one, form, taken) for one in read if one.name not in kept}
    if not smaller:
        raise ExportError(
            f"weights={form!r}: expected a floating-point variable of two dimensions or more that no function writes, "
            f"got {_by_reason(kept) or 'none'}",
            "leave weights out, or export the functions that write variables separately",
        )
    return {name: _over(name, one, smaller, trace) for name, one in made.items()}


def kept_as_they_are(functions: Iterable[TracedExport], form: WeightForm) -> dict[str, str]:
    """Return why each variable that is not made smaller stays as it is, by name."""
    every = list(functions)
    written = {variable: name for one in every for variable in one.pure.written for name in [one.pure.name]}
    returned = {one.variables[name] for one in every for name in _returned(one.signature.result)}
    small_bytes = 1 if form == "int8" else 2
    found: dict[str, str] = {}
    for variable in (variable for one in every for variable in one.pure.variables):
        if variable in written:
            found[variable.name] = f"{written[variable]} writes it"
        elif variable in returned:
            found[variable.name] = "it is returned"
        elif len(variable.type.shape) < 2:
            found[variable.name] = "it has fewer than two dimensions"
        elif not jnp.issubdtype(variable.dtype, jnp.floating):
            found[variable.name] = "it is not floating-point"
        elif np.dtype(variable.dtype).itemsize <= small_bytes:
            found[variable.name] = "it is as small"
    return found


def _returned(tree: Tree) -> list[str]:
    """Return the names of the variables that a function returns as such."""
    if isinstance(tree, Held):
        return [tree.name]
    return [name for _, child in parts_of(tree) for name in _returned(child)]


def _made_smaller(variable: Variable, form: WeightForm, taken: set[str]) -> SmallWeight:
    """Return the variables that stand for one. Their names avoid those in `taken`, and are added to it."""

    def held(narrowing: Narrowing, suffix: str) -> Variable:
        name = f"{variable.name}/{suffix}"
        while name in taken:
            name += "_"
        taken.add(name)
        return Variable(FewerBits(variable, narrowing), name=name, trainable=False)

    if is_divided(variable):
        raise ExportError(
            f"weights={form!r}: variable {variable.name!r}: expected its whole value in this process, got parts on "
            f"several processes",
            "save a checkpoint, restore it in one process, and export there",
        )
    is_table = variable.part is not None
    if form == "bfloat16":
        return SmallWeight(held(form, form), None, variable.dtype, is_table)
    if is_table:
        return SmallWeight(held("int8 by row", form), held("scale by row", "scale"), variable.dtype, is_table)
    return SmallWeight(held("int8 by channel", form), held("scale by channel", "scale"), variable.dtype, is_table)


def _over(name: str, one: TracedExport, smaller: Mapping[Variable, SmallWeight], trace: Trace) -> TracedExport:
    """Return the function, traced again over the smaller variables."""
    signature, pure = one.signature, one.pure
    readers = {variable.name: smaller.get(variable, variable) for variable in pure.variables}

    def run(*args: Any, **kwargs: Any) -> Any:
        plain_args, plain_kwargs = program_arguments(signature, args, kwargs)
        values = {key: held.read() for key, held in readers.items()}
        results, after = pure(values, pure.constants, *plain_args, **plain_kwargs)
        for variable in pure.written:
            variable.assign(after[variable.name])
        return result_of(signature, results, one.variables)

    args, named = build(arguments_of(signature.parameters), (type.strong.struct for type in pure.types))
    again = trace(name, compiled(name, signature, run), args, named, pure.constants)
    return replace(again, signature=msgspec.structs.replace(again.signature, fixed=signature.fixed))


@dataclass(frozen=True)
class WeightReport:
    """What smaller weights cost and save; its `str` is a table.

    form          `int8` or `bfloat16`
    before_bytes  size of the values of all variables as they were; `after_bytes` as they are exported
    errors        by output: the largest and the mean absolute difference, and the largest absolute value, of the
                  results for the given arguments
    kept          by name of a variable that stays as it is: why
    """

    form: WeightForm
    before_bytes: int
    after_bytes: int
    errors: Mapping[str, tuple[float, float, float]]
    kept: Mapping[str, str]

    def __str__(self) -> str:
        share = self.after_bytes / max(1, self.before_bytes)
        lines = [f"variables: {self.before_bytes:,} bytes before, {self.after_bytes:,} in {self.form} ({share:.0%})"]
        for name, (largest, mean, scale) in self.errors.items():
            lines.append(f"{name}: differs by at most {largest:.3g}, on average {mean:.3g}; values up to {scale:.3g}")
        if self.kept:
            lines.append(f"as before: {_by_reason(self.kept)}")
        return "\n".join(lines)


def _by_reason(kept: Mapping[str, str]) -> str:
    """Return the names of variables, each reason once after its names."""
    return "; ".join(
        f"{', '.join(name for name, other in kept.items() if other == why)} ({why})"
        for why in dict.fromkeys(kept.values())
    )


def report(
    form: WeightForm,
    before: Mapping[str, TracedExport],
    after: Mapping[str, TracedExport],
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> WeightReport:
    """Compare the function `name` of an export with weights of this form with the function as it was."""
    errors = {}
    outputs = [path for path, _ in leaves_of(after[name].signature.result, "result")]
    results = (_results_of(made[name], args, kwargs) for made in (before, after))
    for output, *pair in zip(outputs, *results, strict=True):
        old, new = (np.asarray(each).astype(np.float64) for each in pair)
        apart = np.abs(old - new)
        errors[output] = (float(apart.max(initial=0)), float(apart.mean()), float(np.abs(old).max(initial=0)))
    kept = kept_as_they_are(before.values(), form)
    return WeightReport(form, _size_bytes(before.values()), _size_bytes(after.values()), errors, kept)


def _size_bytes(functions: Iterable[TracedExport]) -> int:
    variables = {variable for one in functions for variable in one.variables.values()}
    return sum(variable.type.size_bytes for variable in variables)


def _results_of(one: TracedExport, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arrays that a function gives for these arguments, without changing its variables."""
    plain_args, plain_kwargs = jax.tree_util.tree_map(jnp.asarray, program_arguments(one.signature, args, kwargs))
    values = {variable.name: variable.read() for variable in one.pure.variables}
    results, *_ = jax.jit(one.program.call)(values, dict(one.pure.constants), *plain_args, **plain_kwargs)
    return result_leaves(one.signature, results)
