"""From a jaxpr with state to values: evaluate it with the variables' values held in a `State`.

Evaluated under a JAX trace this gives the pure function of the same program: each variable's value goes in,
is passed along in the carries of loops and through both arms of branches, and comes out. Autodiff and every
control-flow op that touches state go this way, so a write inside a differentiated or repeated body is never lost.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dflow.tracing.derivatives.custom_derivatives import CustomCall
from dflow.tracing.derivatives.recorded_checks import IdCheck, id_checks
from dflow.tracing.errors import DflowError
from dflow.tracing.ir.row_marks import marked
from dflow.tracing.ir.updates import KINDS, looked_up, updated
from dflow.tracing.jax_frontend import (
    Equation,
    Jaxpr,
    accesses,
    bind,
    closed_parts,
    evaluated,
    host_resources,
    inner_parts,
    line_bound,
    make_jaxpr,
    origin_of,
    scan_counts,
    touches_state,
)
from dflow.tracing.primitives.host_primitives import host_p
from dflow.tracing.primitives.id_checks import check_ids_p
from dflow.tracing.primitives.state_primitives import gather_p, read_p, update_p
from dflow.tracing.rows.lookups import (
    BODIES,
    CALLS,
    RULED,
    BodyLookups,
    Found,
    Lookups,
    Site,
    Table,
    sites_in,
)
from dflow.tracing.rows.scaled_rows import ScaledRows, as_array


class State(dict[Any, Any]):
    """The values at one point of a program, by variable."""

    def __init__(
        self,
        values: Mapping[Any, Any] | Iterable[tuple[Any, Any]] = (),
        lookups: Lookups | None = None,
        given: Mapping[int, Any] | None = None,
    ) -> None:
        super().__init__(values)
        #: Serves the variables that are only looked up in and have no value here.
        self.lookups = lookups or BodyLookups((), ())
        #: Replacements for constants of the program and of programs inside it, by the identity of the constant.
        self.given = given or {}
        #: The checks of ids whose outcome is recorded here.
        self._checks = frozenset(key for key in self if isinstance(key, IdCheck))

    def read(self, variable: Any) -> Any:
        """The value, or what stands for it where the variable is only looked up in."""
        return Table(variable) if variable in self.lookups.tables else as_array(self[variable])

    def rows(self, variable: Any, indices: Any, once: bool) -> Any:
        """The rows at `indices`; with `once`, none is looked up twice."""
        if variable in self.lookups.tables:
            return self.lookups.rows(variable, indices, once)
        value = self[variable]
        return value.rows(indices) if isinstance(value, ScaledRows) else looked_up(value, indices)

    def mark(self, variables: Iterable[Any], *indices: Any) -> None:
        """Mark the rows of these variables at `indices`, or all of them, as changed, if their marks are here."""
        for variable in variables:
            if variable.marks in self:
                self[variable.marks] = marked(self[variable.marks], *indices)

    def written(self, equation: Equation) -> list[Any]:
        """The variables that an equation writes, the marks of their rows if these are here, and its `recorded`."""
        written = accesses(equation.effects)[1]
        marks = (variable.marks for variable in written if variable.marks in self)
        return [*written, *marks, *self.recorded(equation)]

    def recorded(self, equation: Equation) -> list[IdCheck]:
        """The checks of ids inside an equation that are recorded here."""
        if not self._checks or equation.primitive.name not in _RULES or equation.primitive.name == "shard_map":
            return []
        return [check for check in id_checks([equation]) if check in self._checks]

    def of(self, variables: Iterable[Any]) -> list[Any]:
        """The values of these variables, in order."""
        return [as_array(self[variable]) for variable in variables]

    def within(self, values: Mapping[Any, Any] | Iterable[tuple[Any, Any]], lookups: Lookups | None = None) -> State:
        """A state for a body inside this program: these values, and the same replacements for constants."""
        return State(values, lookups, self.given)

    def copy(self) -> State:
        """A copy, whose values may be set independently."""
        return State(self, self.lookups, self.given)

    def constants(self, consts: Iterable[Any]) -> list[Any]:
        """These constants, or their replacements."""
        return [self.given.get(id(const), const) for const in consts]

    def gives(self, equation: Equation) -> bool:
        """Whether `given` replaces a constant inside an equation."""
        return bool(self.given) and any(
            id(const) in self.given for part in _open_parts(equation) for const in constants_within(*part)
        )


#: Runs an equation on operands, and changes the state.
_Rule = Callable[[Equation, list[Any], State], list[Any]]


def constants_within(jaxpr: Jaxpr, consts: Sequence[Any]) -> list[Any]:
    """Return the constants of a program and of programs inside it, each once; `State.given` may replace them."""
    inner = [part for equation in jaxpr.eqns for part in _open_parts(equation)]
    found = [*consts, *(const for part in inner for const in constants_within(*part))]
    return list({id(const): const for const in found}.values())


def _open_parts(equation: Equation) -> list[tuple[Jaxpr, list[Any]]]:
    """Return the programs inside an equation whose constants may be replaced, with these constants.

    The constants of a kernel stay, and those of a function with a custom derivative rule: the rule does not give the
    derivative along a constant.
    """
    rule = _RULES.get(equation.primitive.name)
    return [] if rule is None or equation.primitive.name in RULED else inner_parts(equation.params)


def evaluate(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], state: State) -> list[Any]:
    """Run `jaxpr` on values, reading and writing `state`; every variable it touches must be in it."""
    return evaluated(jaxpr, state.constants(consts), args, lambda equation, operands: apply(equation, operands, state))


def apply(equation: Equation, operands: Sequence[Any], state: State) -> list[Any]:
    """Run one equation on values. Raises DflowError for a primitive that cannot hold state."""
    has_table = any(isinstance(operand, Table) for operand in operands)
    if state.lookups.tables and equation.primitive.name in BODIES:
        sites = sites_in(equation, operands, state.lookups.tables)
        if sites or has_table:
            return state.lookups.inside(sites, lambda state, found: run_bodies(equation, operands, state, found), state)
    if has_table and equation.primitive.name not in CALLS:
        with origin_of(equation).restored():
            return [state.lookups.gather(equation, operands[0].variable, operands[1])]
    rule = _RULES.get(equation.primitive.name)
    is_pure = not touches_state(equation.effects) and not state.recorded(equation)
    if not has_table and is_pure and (rule is None or not state.gives(equation)):
        return bind(equation.primitive, equation.params, operands, origin_of(equation))
    if rule is None:
        reads, writes = accesses(equation.effects)
        names = ", ".join(sorted({resource.name for resource in (*reads, *writes, *host_resources(equation.effects))}))
        what = "queues and accumulators" if host_resources(equation.effects) else "variables"
        raise DflowError(
            f"{what} ({names}) are used inside {equation.primitive.name}, which cannot hold state yet; "
            f"read before it and write after it",
            at=origin_of(equation).loc,
        )
    with origin_of(equation).restored():
        results = rule(equation, list(operands), state)
    if equation.primitive.name not in _MARKING:
        state.mark(accesses(equation.effects)[1])
    return results


def run_bodies(
    equation: Equation, operands: Sequence[Any], state: State, found: Sequence[Found] | None
) -> tuple[list[Any], list[Any]]:
    """Run an equation of `BODIES` as `RunBody` says."""
    written = state.written(equation)
    with origin_of(equation).restored():
        run = _LOOKING[equation.primitive.name]
        results, values, positions = run(equation.params, list(operands), state, written, found)
    state.update(zip(written, values, strict=True))
    return list(results), positions


def _update(equation: Equation, operands: list[Any], state: State) -> list[Any]:
    variable, kind = equation.params["handle"].variable, equation.params["kind"]
    # Of a variable that is only assigned there is no old value.
    state[variable] = updated(kind, state[variable], *operands) if KINDS[kind].reads else operands[0]
    state.mark([variable], *(operands[:1] if KINDS[kind].by_rows else ()))
    return []


def _check_ids(equation: Equation, operands: list[Any], state: State) -> list[Any]:
    check = IdCheck.of(equation)
    state[check] = check.worst(operands[0], state[check])
    return operands


def _call(key: str) -> _Rule:
    return lambda equation, operands, state: evaluate(*closed_parts(equation.params[key]), operands, state)


#: The rows of lookups that were done before a body; None where the body computes their positions.
_Given = Sequence[Found] | None
#: Results, values of the variables written, and positions of the lookups.
_Looked = tuple[list[Any], list[Any], list[Any]]


def _body(closed: Any, state: State, written: list[Any]) -> Callable[..., _Looked]:
    """A body that touches variables, as a pure function of the values of those that are `written`.

    The others are read from the state around it.
    """
    jaxpr, consts = closed_parts(closed)
    tables = state.lookups.tables
    passed = {*written, *tables}
    fixed = {variable: state[variable] for variable in accesses(jaxpr.effects)[0] if variable not in passed}

    def run(operands: Sequence[Any], values: Sequence[Any], found: _Given = ()) -> _Looked:
        lookups = BodyLookups(tables, found)
        inner = state.within({**fixed, **dict(zip(written, values, strict=True))}, lookups)
        results = evaluate(jaxpr, consts, operands, inner)
        return results, inner.of(written), lookups.positions

    return run


def without_tables(operands: Sequence[Any]) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]]]:
    """The operands that are not tables, and a function that puts the tables back between new values of these."""

    def all_of(arrays: Sequence[Any]) -> list[Any]:
        rest = iter(arrays)
        return [operand if isinstance(operand, Table) else next(rest) for operand in operands]

    return [operand for operand in operands if not isinstance(operand, Table)], all_of


def _scan(params: Mapping[str, Any], operands: list[Any], state: State, written: list[Any], found: _Given) -> _Looked:
    consts_count, carry_count = scan_counts(params)
    consts, rest = operands[:consts_count], operands[consts_count:]
    init, xs = rest[:carry_count], rest[carry_count:]
    body = _body(params["jaxpr"], state, written)

    def step(carry: Any, x: Any) -> Any:
        results, values, positions = body([*consts, *carry[0], *x[0]], carry[1], x[1])
        return (results[: len(init)], values), (results[len(init) :], positions)

    kept = {key: params[key] for key in ("length", "reverse", "unroll", "_split_transpose") if key in params}
    (carry, values), (ys, positions) = jax.lax.scan(step, (init, state.of(written)), (xs, found), **kept)
    return [*carry, *ys], values, positions


def _cond(params: Mapping[str, Any], operands: list[Any], state: State, written: list[Any], found: _Given) -> _Looked:
    index, *rest = operands
    arrays, all_of = without_tables(rest)
    bodies = [_body(branch, state, written) for branch in params["branches"]]
    by_branch = [sites_in(closed_parts(branch)[0], rest, state.lookups.tables) for branch in params["branches"]]
    ends, sites = [0, *itertools.accumulate(map(len, by_branch))], [*itertools.chain(*by_branch)]

    def run(number: int) -> Callable[..., Any]:
        first, last = ends[number : number + 2]

        def branch(arrays: list[Any], values: list[Any], found: list[Found] | None) -> Any:
            own = None if found is None else found[first:last]
            results, after, positions = bodies[number](all_of(arrays), values, own)
            if found is None:
                # The rows of all branches are looked up, whichever runs, but only the branch that runs computes
                # positions: another's computation may not end, or may call back. The first row stands in, and its
                # gradient gets zeros.
                positions = [*_first_positions(sites[:first]), *positions, *_first_positions(sites[last:])]
            return results, after, positions

        return branch

    looked: _Looked = jax.lax.switch(index, [*map(run, range(len(bodies)))], arrays, state.of(written), found)
    return looked


def _first_positions(sites: Iterable[Site]) -> list[Any]:
    """Zeros as the positions of lookups in branches that do not run: the first row stands in."""
    return [jnp.zeros(site.positions.shape, site.positions.dtype) for site in sites]


def _remat(params: Mapping[str, Any], operands: list[Any], state: State, written: list[Any], found: _Given) -> _Looked:
    arrays, all_of = without_tables(operands)
    body = _body(params["jaxpr"], state, written)

    def run(arrays: list[Any], values: list[Any], found: list[Found] | None) -> Any:
        return body(all_of(arrays), values, found)

    checkpointed = jax.checkpoint(run, prevent_cse=params["prevent_cse"], policy=params["policy"])
    looked: _Looked = checkpointed(arrays, state.of(written), found)
    return looked


def _while(equation: Equation, operands: list[Any], state: State) -> list[Any]:
    params, written = equation.params, state.written(equation)
    cond_end = params["cond_nconsts"]
    body_end = cond_end + params["body_nconsts"]
    cond_consts, body_consts, init = operands[:cond_end], operands[cond_end:body_end], operands[body_end:]
    refuse_writes(accesses(closed_parts(params["cond_jaxpr"])[0].effects)[1])
    test = _body(params["cond_jaxpr"], state, written)
    body = _body(params["body_jaxpr"], state, written)

    def live(carry: Any) -> Any:
        return test([*cond_consts, *carry[0]], carry[1])[0][0]

    def tested(carry: Any) -> Any:
        """The values after the condition, which writes no variable, but may check ids."""
        return test([*cond_consts, *carry[0]], carry[1])[1] if state.recorded(equation) else carry[1]

    def step(carry: Any) -> Any:
        after, values, _ = body([*body_consts, *carry[0]], tested(carry))
        return still_live(params["cond_jaxpr"], lambda: live(carry), after, carry[0]), values

    results, values = jax.lax.while_loop(lambda carry: live(carry).any(), step, (init, state.of(written)))
    values = tested((results, values))
    state.update(zip(written, values, strict=True))
    return list(results)


def refuse_writes(written: Sequence[Any]) -> None:
    """Raise DflowError if the condition of a `while_loop` writes variables."""
    if written:
        raise DflowError(
            f"the condition of a while_loop writes variables ({', '.join(variable.name for variable in written)})",
            "write them in its body, which runs once for each time that the condition holds",
            at=line_bound(),
        )


def still_live(cond: Any, live: Callable[[], Any], after: Sequence[Any], before: Sequence[Any]) -> list[Any]:
    """Return the carry after an iteration: under `vmap` an element whose condition is false keeps its value."""
    if closed_parts(cond)[0].outvars[0].aval.shape == ():
        return list(after)
    turned = live()
    return [
        jnp.where(turned.reshape(turned.shape + (1,) * (old.ndim - turned.ndim)), new, old)
        for new, old in zip(after, before, strict=True)
    ]


def _shard_map(equation: Equation, operands: list[Any], state: State) -> list[Any]:
    """The variables go in whole to each shard; what is written must be the same in all."""
    params = equation.params
    jaxpr, consts = closed_parts(params["jaxpr"])
    reads, written = accesses(equation.effects)
    touched = [*dict.fromkeys([*reads, *written])]
    if written and not params["check_vma"]:
        raise DflowError(
            f"variable {written[0].name!r} is written in a shard_map with check_vma=False, where JAX does not tell "
            f"whether all shards write the same",
            "leave check_vma on, or return the value from the shard_map and write it outside",
            at=line_bound(),
        )

    def body(values: list[Any], operands: list[Any]) -> tuple[list[Any], list[Any]]:
        inner = state.within(zip(touched, values, strict=True))
        results = evaluate(jaxpr, consts, operands, inner)
        _refuse_unlike_shards(written, inner)
        return results, inner.of(written)

    whole = jax.sharding.PartitionSpec()
    mapped = jax.shard_map(
        body,
        mesh=params["mesh"],
        in_specs=([whole] * len(touched), list(params["in_specs"])),
        out_specs=(list(params["out_specs"]), [whole] * len(written)),
        axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )
    results, values = mapped(state.of(touched), operands)
    state.update(zip(written, values, strict=True))
    return list(results)


def _refuse_unlike_shards(written: list[Any], state: State) -> None:
    for variable in written:
        if axes := sorted(jax.typeof(state[variable]).manual_axis_type.varying):
            names = ", ".join(map(repr, axes))
            raise DflowError(
                f"variable {variable.name!r} is written in a shard_map a value that differs along {names}",
                f"write what is the same in all shards, such as jax.lax.psum(value, {names})",
                at=line_bound(),
            )


def _custom(method: Callable[[CustomCall, list[Any], list[Any]], Any]) -> _Rule:
    """The rule of a call of a function with a custom derivative rule."""

    def rule(equation: Equation, operands: list[Any], state: State) -> list[Any]:
        closed = closed_parts(equation.params["call_jaxpr"])
        reads, writes = accesses(equation.effects)
        writes = [*writes, *state.recorded(equation)]
        touched = [*dict.fromkeys([*reads, *writes])]

        def body(values: list[Any], operands: list[Any]) -> tuple[list[Any], list[Any]]:
            inner = State(zip(touched, values, strict=True))
            return evaluate(*closed, operands, inner), inner.of(writes)

        def original(operands: list[Any]) -> list[Any]:
            return bind(equation.primitive, equation.params, operands, None)

        def run(fn: Callable[..., list[Any]], operands: list[Any], values: list[Any]) -> list[Any]:
            jaxpr, consts, _ = make_jaxpr(fn, *operands)
            _refuse_others(jaxpr, {*touched}, {*writes})
            return evaluate(jaxpr, consts, operands, State(zip(touched, values, strict=True)))

        names, queues = [variable.name for variable in touched], host_resources(equation.effects)
        call = CustomCall(names, body, original, run, queues)
        results, values = method(call, state.of(touched), operands)
        state.update(zip(writes, values, strict=True))
        return list(results)

    return rule


def _refuse_others(jaxpr: Jaxpr, touched: set[Any], written: set[Any]) -> None:
    """Raise DflowError if a derivative rule reads or writes a variable that its function does not."""
    reads, writes = accesses(jaxpr.effects)
    strange = [variable.name for variable in reads if variable not in touched]
    strange += [variable.name for variable in writes if variable not in written and variable.name not in strange]
    if strange:
        raise DflowError(
            f"a derivative rule uses variables ({', '.join(strange)}) that its function does not use so",
            "use them in the function too, or pass what the rule needs as an argument",
            at=line_bound(),
        )


#: Rules of equations whose lookups are done before them. They leave writing the variables `written` to the caller.
_LOOKING: Mapping[str, Callable[[Mapping[str, Any], list[Any], State, list[Any], _Given], _Looked]] = {
    "scan": _scan,
    "cond": _cond,
    "remat2": _remat,
    "checkpoint": _remat,
}
_RULES: Mapping[str, _Rule] = {
    read_p.name: lambda equation, _, state: [state.read(equation.params["handle"].variable)],
    gather_p.name: lambda equation, operands, state: [
        state.rows(equation.params["handle"].variable, operands[0], equation.params["once"])
    ],
    update_p.name: _update,
    # An element that is taken out of a queue carries no gradient to the value that was put in.
    host_p.name: lambda equation, operands, _: list(
        host_p.bind(*map(jax.lax.stop_gradient, operands), **equation.params)
    ),
    check_ids_p.name: _check_ids,
    **{name: _call(key) for name, key in CALLS.items()},
    **dict.fromkeys(_LOOKING, lambda equation, operands, state: run_bodies(equation, operands, state, ())[0]),
    "shard_map": _shard_map,
    "while": _while,
    "custom_jvp_call": _custom(CustomCall.with_jvp),
    "custom_vjp_call": _custom(CustomCall.with_vjp),
}
#: Equations whose rules mark the rows that they change; after another one that writes a variable all rows are marked.
_MARKING = frozenset((update_p.name, check_ids_p.name, *CALLS, *_LOOKING, "while"))
