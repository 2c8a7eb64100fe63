"""A traced function with state as a pure program for several platforms, in the format of `jax.export`.

The program takes the values of the variables that it uses and the large arrays that it closes over, each as a dict by
name, then the arguments. It returns the results, and the same dict of variables with their new values. So state is
never a constant of the code, and the caller passes one dict from call to call. A program that checks ids, which would
take Python, has a third result: by check, an id that is outside of its table, or 0.

An op that has no meaning in another process (of a queue, or a Python callback) is refused, with its name and line,
before JAX sees it. If JAX then fails to lower the program for a platform, the op that fails is searched for one by one.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import export
from jax import jit as jax_jit

from dflow.lowering.programs.portable_tree import Tree, build, flatten, plain
from dflow.tracing.derivatives.discharge import State, evaluate
from dflow.tracing.derivatives.recorded_checks import IdCheck, id_checks
from dflow.tracing.devices.device import WITH_CALLER, WITH_STATE
from dflow.tracing.devices.device_name import is_on_task, short_device_name
from dflow.tracing.errors import DflowError, ExportError
from dflow.tracing.ir.types import ArrayType, array_type_of, dtype_name
from dflow.tracing.jax_frontend import (
    Equation,
    Jaxpr,
    accesses,
    bind,
    inner_parts,
    make_jaxpr,
    origin_of,
    strange_types,
)
from dflow.tracing.primitives.host_primitives import host_p
from dflow.tracing.primitives.id_checks import without_id_checks
from dflow.tracing.rows.lookups import CALLS, Lookups
from dflow.tracing.source import at
from dflow.tracing.state.resources import Variable


@dataclass(frozen=True)
class PureProgram:
    """A function with state as a pure function, with the names of its variables and constants."""

    name: str
    jaxpr: Jaxpr
    consts: Sequence[Any]
    #: The constants, of the jaxpr or inside it, that the caller passes by name.
    constants: Mapping[str, Any]
    variables: Sequence[Variable]
    written: Sequence[Variable]
    #: The structure of the arguments after variables and constants, positional and named, and the types of its leaves.
    arguments: Tree
    types: Sequence[ArrayType]
    result: Tree
    checks: Sequence[IdCheck]

    def __call__(self, variables: Mapping[str, Any], constants: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Return the results, and the new values of the variables, by name."""
        return self._run({}, variables, constants, args, kwargs)[:2]

    def checked(self, variables: Mapping[str, Any], constants: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As a call; the third result, if there are `checks`, is by name of each an id that is outside, or 0."""
        none = {check: jnp.zeros((), check.dtype) for check in self.checks}
        return self._run(none, variables, constants, args, kwargs)[: 3 if none else 2]

    def looking_up(
        self, lookups: Lookups, variables: Mapping[str, Any], constants: Mapping[str, Any], args: Any, kwargs: Any
    ) -> Any:
        """As `checked`, with rows of the tables of `lookups` from there, and no values of these in either dict."""
        none = {check: jnp.zeros((), check.dtype) for check in self.checks}
        return self._run(none, variables, constants, args, kwargs, lookups)[: 3 if none else 2]

    def _run(
        self,
        checks: Mapping[IdCheck, Any],
        variables: Any,
        constants: Any,
        args: Any,
        kwargs: Any,
        lookups: Lookups | None = None,
    ) -> Any:
        given = {id(value): constants[name] for name, value in self.constants.items()}
        held = [one for one in self.variables if lookups is None or one not in lookups.tables]
        entries: dict[Any, Any] = {**{variable: variables[variable.name] for variable in held}, **checks}
        state = State(entries, lookups, given=given)
        results = evaluate(self.jaxpr, self.consts, flatten(plain(self.arguments), (args, kwargs), "arguments"), state)
        after = {variable.name: state[variable] for variable in held}
        outside = {check.name: state[check] for check in checks}
        return build(plain(self.result), iter(results)), after, outside

    @property
    def structs(self) -> tuple[list[Any], dict[str, Any]]:
        """The types of its arguments, positional and named, as `jax.ShapeDtypeStruct`s."""
        state = {variable.name: variable.type.strong.struct for variable in self.variables}
        constants = {name: array_type_of(value).strong.struct for name, value in self.constants.items()}
        args, kwargs = build(plain(self.arguments), (type.strong.struct for type in self.types))
        return [state, constants, *args], kwargs

    def jitted(self) -> Any:
        """Return the function compiled by `jax.jit`, under its name."""

        def program(variables: Any, constants: Any, *args: Any, **kwargs: Any) -> Any:
            return self.checked(variables, constants, *args, **kwargs)

        program.__name__ = self.name
        return jax_jit(program, keep_unused=True)


def pure_program(
    name: str,
    jaxpr: Jaxpr,
    consts: Sequence[Any],
    constants: Mapping[str, Any],
    arguments: Tree,
    types: Sequence[ArrayType],
    result: Tree,
) -> PureProgram:
    """Return the pure form of a traced function. Raises ExportError for ops and types that no file can hold."""
    _refuse_types(name, jaxpr)
    reads, written = accesses(jaxpr.effects)
    variables = sorted({*reads, *written}, key=lambda variable: int(variable.serial))
    _refuse_ops(name, jaxpr, {variable.device for variable in variables if is_on_task(variable.device)})
    _refuse_variables(name, variables)
    checks = id_checks(jaxpr.eqns)
    return PureProgram(name, jaxpr, consts, constants, variables, written, arguments, types, result, checks)


def exported(
    program: PureProgram,
    platforms: Sequence[str],
    disabled_checks: Sequence[export.DisabledSafetyCheck],
    vjp_order: int,
) -> tuple[export.Exported, bytes]:
    """Return the program for these platforms, and the bytes that `jax.export.deserialize` takes.

    Raises ExportError if JAX cannot export it, with the op that fails and its line where one is found.
    """
    args, kwargs = program.structs
    try:
        with without_id_checks():
            made = export.export(program.jitted(), platforms=tuple(platforms), disabled_checks=disabled_checks)(
                *args, **kwargs
            )
    except (DflowError, Warning):
        raise
    except Exception as error:
        raise _blamed(program, platforms, disabled_checks, error) from error
    if made.nr_devices != 1:
        raise ExportError(
            f"{program.name} runs on {made.nr_devices} devices; an export runs on one",
            "export what runs on each of them",
        )
    try:
        return made, bytes(made.serialize(vjp_order=vjp_order))
    except KeyError as error:
        raise ExportError(_unknown_dtype(program, error)) from error
    except Exception as error:
        raise ExportError(
            f"{program.name} cannot be exported with vjp_order={vjp_order}: {_first_line(error)}",
            "export it with vjp_order=0, or write it so that it can be differentiated",
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _unknown_dtype(program: PureProgram, error: KeyError) -> str:
    [dtype] = error.args
    held = [variable.name for variable in program.variables if variable.dtype == dtype]
    where = f"variable {held[0]!r}" if held else "an argument or a result"
    return (
        f"{where} of {program.name} is of {dtype_name(dtype)}, which the files of JAX {jax.__version__} cannot hold\n"
        "  keep it as int8 or uint8, and convert it in the function"
    )


def _refuse_types(name: str, jaxpr: Jaxpr) -> None:
    if types := strange_types(jaxpr):
        raise ExportError(
            f"{name} takes, gives or closes over {types[0]}, which is no array and cannot be exported",
            "pass the array it holds (of a jax.Ref, ref[...]), or keep that in a dflow.Variable",
        )


def _refuse_variables(name: str, variables: Sequence[Variable]) -> None:
    named: dict[str, Variable] = {}
    for variable in variables:
        if (other := named.setdefault(variable.name, variable)) is not variable:
            raise ExportError(
                f"{name} uses two variables named {variable.name!r}; an export identifies variables by their names"
                f"{at(other.loc)}{at(variable.loc)}\n  give one of them another name"
            )


#: Why an op cannot be exported, and the remedy, by primitive.
_REFUSED: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("debug_callback", "debug_print"),
        ("prints or calls back while it runs", "leave it out of the function that is exported"),
    ),
    **dict.fromkeys(
        ("io_callback", "pure_callback"),
        (
            "calls a Python function, which an export does not hold",
            "write it in jax.numpy, or call it before or after what is exported",
        ),
    ),
}


def _refuse_ops(name: str, jaxpr: Jaxpr, tasks: Container[str | None]) -> None:
    """Raise ExportError for an op that no file can hold. An op beside variables on one of the `tasks` is none."""
    for equation in _ops_within(jaxpr):
        if found := _refusal(equation, tasks):
            fact, remedy = found
            raise ExportError(f"{name} cannot be exported: {fact}", remedy, at=origin_of(equation).loc)


def _refusal(equation: Equation, tasks: Container[str | None]) -> tuple[str, str] | None:
    primitive, params = equation.primitive.name, equation.params
    if equation.primitive is host_p:
        resource = params["handle"].variable
        return (
            f"it uses {resource.title} ({params['op'].method}), which is of this process",
            "export a function that takes what it would dequeue or take as arguments, and gives what it would put in",
        )
    if primitive in _REFUSED:
        what, remedy = _REFUSED[primitive]
        return f"{primitive} {what}", remedy
    device = origin_of(equation).device
    if device not in (None, WITH_STATE, WITH_CALLER) and device not in tasks:
        return (
            f"{primitive} is placed on {short_device_name(device)}, and an export is for one device",
            "export it without dflow.device",
        )
    sharding = params.get("sharding") or params.get("dst_sharding")
    mesh = params.get("mesh") if primitive == "shard_map" else getattr(sharding, "mesh", None)
    if mesh is not None and mesh.size > 1:
        axes = ", ".join(f"{axis}: {size}" for axis, size in mesh.shape.items())
        return (
            f"{primitive} spreads over {mesh.size} devices ({axes}), and an export is for one",
            "export what runs on each of them, or use a mesh of one device",
        )
    return None


def _ops_within(jaxpr: Jaxpr) -> Iterator[Equation]:
    """Yield every equation of a jaxpr and of those inside it, an outer one before its bodies."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in _bodies(equation):
            yield from _ops_within(inner)


#: The primitives whose bodies are searched: programs like the one around them, unlike the body of a kernel.
_HOLDING = frozenset(
    (*CALLS, "scan", "cond", "while", "remat2", "checkpoint", "shard_map", "custom_jvp_call", "custom_vjp_call")
)


def _bodies(equation: Equation) -> list[Jaxpr]:
    return [inner for inner, _ in inner_parts(equation.params)] if equation.primitive.name in _HOLDING else []


def _blamed(
    program: PureProgram, platforms: Sequence[str], disabled_checks: Sequence[Any], error: Exception
) -> ExportError:
    """Return the error for a failure of JAX: it names the first op that cannot be exported alone, and the platforms."""
    args, kwargs = program.structs
    leaves, tree = jax.tree_util.tree_flatten((args, kwargs))

    def flat(*values: Any) -> Any:
        given, named = jax.tree_util.tree_unflatten(tree, values)
        return program(*given, **named)

    said = _first_line(error)
    if "Invalid mixing of symbolic scopes" in said:
        return ExportError(
            f"{program.name} cannot be exported: the letters in its shapes are of two scopes",
            "make all of them with dflow.spec, or with one jax.export.SymbolicScope",
        )
    try:
        jaxpr, _, _ = make_jaxpr(flat, *leaves)
        culprit = _culprit(jaxpr, platforms, disabled_checks, set())
    except Exception:  # the function cannot even be traced
        culprit = None
    if culprit is None:
        return ExportError(f"{program.name} cannot be exported for {', '.join(platforms)}: {said}")
    failing = [platform for platform in platforms if not _exports(culprit, [platform], disabled_checks)]
    others = [platform for platform in platforms if platform not in failing]
    name = culprit.primitive.name
    if target := culprit.params.get("target_name"):
        name = f"{name} of {target!r}"
    remedy = "write it with other ops of jax.numpy"
    if others:
        remedy += f", or leave the platform out: platforms={tuple(others)!r}"
    if culprit.primitive.name == "ffi_call":
        remedy += (
            ", or, where the target is registered wherever the export runs, allow it: "
            f"disabled_checks=[jax.export.DisabledSafetyCheck.custom_call({target!r})]"
        )
    return ExportError(
        f"{program.name} cannot be exported for {', '.join(failing or platforms)}: {name} is in the way",
        f"JAX says: {said}\n  {remedy}",
        at=origin_of(culprit).loc,
    )


def _culprit(jaxpr: Jaxpr, platforms: Sequence[str], disabled_checks: Any, fine: set[Any]) -> Equation | None:
    for equation in jaxpr.eqns:
        key = (equation.primitive.name, str(equation.params), str([var.aval for var in equation.invars]))
        if key in fine:
            continue
        if _exports(equation, platforms, disabled_checks):
            fine.add(key)
            continue
        inner = (_culprit(body, platforms, disabled_checks, fine) for body in _bodies(equation))
        return next((found for found in inner if found is not None), equation)
    return None


def _exports(equation: Equation, platforms: Sequence[str], disabled_checks: Any) -> bool:
    """Whether an op can be exported alone."""

    def alone(*values: Any) -> Any:
        return bind(equation.primitive, equation.params, values, None)

    structs = [array_type_of(jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)).struct for var in equation.invars]
    try:
        export.export(jax_jit(alone), platforms=tuple(platforms), disabled_checks=disabled_checks)(*structs)
    except Exception:  # JAX's lowering rules raise exceptions of any class
        return False
    return True
