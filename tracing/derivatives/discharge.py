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
from dflow.tracing.errors import DflowError
from dflow.tracing.ir.updates import KINDS, looked_up, updated
from dflow.tracing.jax_frontend import (
    Equation,
    Jaxpr,
    accesses,
    bind,
    closed_parts,
    host_resources,
    inner_parts,
    is_literal,
    line_bound,
    make_jaxpr,
    only_added,
    only_summed,
    origin_of,
    primitives_by_name,
    scan_counts,
    touches_state,
)
from dflow.tracing.primitives.host_primitives import host_p
from dflow.tracing.primitives.state_primitives import gather_p, read_p, update_p
from dflow.tracing.rows.lookups import BODIES, CALLS, BodyLookups, Found, Lookups, Site, Table, sites_inside, sites_of


class Border:
    """How the variables of a region of a program pass its border: a value in, and what it is left with out.

    With `adds`, a variable that the region only adds to comes in as zero, and what it is left with is added to it as
    one update: so nothing is lost that others add meanwhile.
    """

    def __init__(self, effects: Any, adds: Callable[[Any], bool]) -> None:
        reads, self.writes = accesses(effects)
        self.touched = sorted({*reads, *self.writes}, key=lambda variable: variable.serial)
        summed = only_summed(effects)
        self.added = frozenset(variable for variable in only_added(effects) if variable in summed or adds(variable))
        self._summed = self.added.intersection(summed)

    def values(self) -> list[Any]:
        """What each variable touched comes in as."""
        return [self.value(variable) for variable in self.touched]

    def value(self, variable: Any) -> Any:
        """What one variable comes in as."""
        return jnp.zeros(variable.shape, variable.dtype) if variable in self.added else variable.read()

    def write_back(self, after: Sequence[Any]) -> None:
        """Give the variables written what they are left with."""
        for variable, value in zip(self.writes, after, strict=True):
            if variable in self.added:
                variable.assign_add(value, reduce="sum" if variable in self._summed else None)
            else:
                variable.assign(value)


class State:
    """The values of variables at one point of a program, and which of them have been written."""

    def __init__(
        self, values: Mapping[Any, Any], lookups: Lookups | None = None, given: Mapping[int, Any] | None = None
    ) -> None:
        self._values = dict(values)
        #: Serves the variables that are only looked up in and have no value here.
        self.lookups = lookups
        #: Replacements for constants of the program and of programs inside it, by the identity of the constant.
        self.given = given or {}

    def __getitem__(self, variable: Any) -> Any:
        return self._values[variable]

    def read(self, variable: Any) -> Any:
        """The value, or what stands for it where the variable is only looked up in."""
        return Table(variable) if self.is_table(variable) else self._values[variable]

    def rows(self, variable: Any, indices: Any) -> Any:
        """The rows at `indices`."""
        if self.lookups is not None and variable in self.lookups.tables:
            return self.lookups.rows(variable, indices)
        return looked_up(self._values[variable], indices)

    def __setitem__(self, variable: Any, value: Any) -> None:
        self._values[variable] = value

    def of(self, variables: Iterable[Any]) -> list[Any]:
        """The values of these variables, in order."""
        return [self._values[variable] for variable in variables]

    def within(self, values: Mapping[Any, Any], lookups: Lookups | None = None) -> State:
        """The state of a body, of these variables."""
        return State(values, lookups, self.given)

    def copy(self) -> State:
        """The same values, which may be set without setting these."""
        return State(self._values, self.lookups, self.given)

    def is_table(self, variable: Any) -> bool:
        """Whether a variable is only looked up in, and has no value."""
        return self.lookups is not None and variable in self.lookups.tables

    def constants(self, consts: Iterable[Any]) -> list[Any]:
        """What stands for these constants."""
        return [self.given.get(id(const), const) for const in consts]

    def gives(self, equation: Equation) -> bool:
        """Whether something stands for a constant inside an equation."""
        return bool(self.given) and any(
            id(const) in self.given for part in _open_parts(equation) for const in constants_within(*part)
        )

    def update(self, variables: Iterable[Any], values: Iterable[Any]) -> None:
        """Set the values of these variables."""
        self._values.update(zip(variables, values, strict=True))


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
    return [] if rule is None or isinstance(rule, _Custom) else inner_parts(equation.params)


def evaluate(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], state: State) -> list[Any]:
    """Run `jaxpr` on values, reading and writing `state`; every variable it touches must be in it."""
    env: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*state.constants(consts), *args), strict=True))

    def value(atom: Any) -> Any:
        return atom.val if is_literal(atom) else env[atom]

    for equation in jaxpr.eqns:
        operands = [value(atom) for atom in equation.invars]
        results = apply(equation, operands, state)
        env.update(zip(equation.outvars, results, strict=True))
    return [value(atom) for atom in jaxpr.outvars]


def apply(equation: Equation, operands: Sequence[Any], state: State) -> list[Any]:
    """Run one equation on values. Raises DflowError for a primitive that cannot hold state."""
    if state.lookups is not None and state.lookups.tables and equation.primitive.name in BODIES:
        sites = sites_inside(equation, operands, state.lookups.tables)
        if sites or any(isinstance(operand, Table) for operand in operands):
            return state.lookups.inside(sites, lambda state, found: run_bodies(equation, operands, state, found), state)
    if any(isinstance(operand, Table) for operand in operands):
        return _apply_to_table(equation, operands, state)
    rule = _RULES.get(equation.primitive.name)
    if not touches_state(equation.effects) and (rule is None or not state.gives(equation)):
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
        return rule(equation.params, list(operands), state)


def run_bodies(
    equation: Equation, operands: Sequence[Any], state: State, found: Sequence[Found] | None
) -> tuple[list[Any], list[Any]]:
    """Run an equation of `BODIES` as `RunBody` says."""
    with origin_of(equation).restored():
        return _LOOKING[equation.primitive.name](equation.params, list(operands), state, found)


def _apply_to_table(equation: Equation, operands: Sequence[Any], state: State) -> list[Any]:
    """Run a gather from a variable that is only looked up in, or a call of a function that contains one."""
    with origin_of(equation).restored():
        if equation.primitive.name in CALLS:
            return evaluate(*closed_parts(equation.params[CALLS[equation.primitive.name]]), operands, state)
        assert state.lookups is not None
        return [state.lookups.gather(equation, operands[0].variable, operands[1])]


def _read(params: Mapping[str, Any], operands: list[Any], state: State) -> list[Any]:
    return [state.read(params["handle"].variable)]


def _gather(params: Mapping[str, Any], operands: list[Any], state: State) -> list[Any]:
    return [state.rows(params["handle"].variable, operands[0])]


def _update(params: Mapping[str, Any], operands: list[Any], state: State) -> list[Any]:
    variable = params["handle"].variable
    # Of a variable that is only assigned there is no old value.
    old = state[variable] if KINDS[params["kind"]].reads else None
    state[variable] = operands[0] if old is None else updated(params["kind"], old, *operands)
    return []


def _use_resource(params: Mapping[str, Any], operands: list[Any], state: State) -> list[Any]:
    # An element that is taken out of a queue carries no gradient to the value that was put in.
    return list(host_p.bind(*map(jax.lax.stop_gradient, operands), **params))


def _call(key: str) -> Callable[[Mapping[str, Any], list[Any], State], list[Any]]:
    return lambda params, operands, state: evaluate(*closed_parts(params[key]), operands, state)


class _Body:
    """A body that touches variables, as a pure function of their values.

    `written` variables are passed in and out; the others are read from the state around it.
    """

    def __init__(self, closed: Any, state: State, written: list[Any]) -> None:
        self._jaxpr, self._consts = closed_parts(closed)
        reads, _ = accesses(self._jaxpr.effects)
        self._fixed = {v: state[v] for v in reads if v not in written and not state.is_table(v)}
        self._written = written
        self._within = state.within
        self._tables = state.lookups.tables if state.lookups is not None else ()

    def __call__(self, operands: Sequence[Any], values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        results, after, _ = self.looking(operands, values, ())
        return results, after

    def looking(
        self, operands: Sequence[Any], values: Sequence[Any], found: Sequence[Found] | None
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """The results, the values written, and the places of the lookups if what these `found` is None."""
        lookups = BodyLookups(self._tables, found)
        inner = self._within(self._fixed, lookups)
        inner.update(self._written, values)
        results = evaluate(self._jaxpr, self._consts, operands, inner)
        return results, inner.of(self._written), lookups.places

    def sites(self, operands: Sequence[Any]) -> list[Site]:
        """The lookups in tables."""
        return sites_of(self._jaxpr, operands, self._tables)


def _written(*closed: Any) -> list[Any]:
    effects = set().union(*(closed_parts(body)[0].effects for body in closed))
    return accesses(effects)[1]


def _without_tables(operands: Sequence[Any]) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]]]:
    """The operands that are arrays, and a function from these to all operands."""

    def all_of(arrays: Sequence[Any]) -> list[Any]:
        rest = iter(arrays)
        return [operand if isinstance(operand, Table) else next(rest) for operand in operands]

    return [operand for operand in operands if not isinstance(operand, Table)], all_of


def _scan(
    params: Mapping[str, Any], operands: list[Any], state: State, found: Sequence[Found] | None
) -> tuple[list[Any], list[Any]]:
    consts_count, carry_count = scan_counts(params)
    consts, rest = operands[:consts_count], operands[consts_count:]
    init, xs = rest[:carry_count], rest[carry_count:]
    written = _written(params["jaxpr"])
    body = _Body(params["jaxpr"], state, written)

    def step(carry: Any, x: Any) -> Any:
        results, values, places = body.looking([*consts, *carry[0], *x[0]], carry[1], x[1])
        return (results[: len(init)], values), (results[len(init) :], places)

    kept = {key: params[key] for key in ("length", "reverse", "unroll", "_split_transpose") if key in params}
    (carry, values), (ys, places) = jax.lax.scan(step, (init, state.of(written)), (xs, found), **kept)
    state.update(written, values)
    return [*carry, *ys], places


def _cond(
    params: Mapping[str, Any], operands: list[Any], state: State, found: Sequence[Found] | None
) -> tuple[list[Any], list[Any]]:
    index, *rest = operands
    arrays, all_of = _without_tables(rest)
    branches, written = params["branches"], _written(*params["branches"])
    bodies = [_Body(branch, state, written) for branch in branches]
    before = state.of(written)
    by_branch = [body.sites(rest) for body in bodies]
    ends, sites = [0, *itertools.accumulate(map(len, by_branch))], [*itertools.chain(*by_branch)]

    def run(number: int) -> Callable[..., Any]:
        first, last = ends[number : number + 2]

        def branch(arrays: list[Any], values: list[Any], found: list[Found] | None) -> Any:
            own = None if found is None else found[first:last]
            results, after, places = bodies[number].looking(all_of(arrays), values, own)
            if found is None:
                # The rows of all branches are looked up, whichever runs, but only that one computes places: another's
                # computation may not end, or may call back. The first row stands in, and its gradient gets zeros.
                places = [*_first_places(sites[:first]), *places, *_first_places(sites[last:])]
            return results, after, places

        return branch

    results, values, places = jax.lax.switch(index, [*map(run, range(len(bodies)))], arrays, before, found)
    state.update(written, values)
    return list(results), places


def _first_places(sites: Iterable[Site]) -> list[Any]:
    """Places of the first row, of the types that lookups have."""
    return [jnp.zeros(site.places.shape, site.places.dtype) for site in sites]


def _remat(
    params: Mapping[str, Any], operands: list[Any], state: State, found: Sequence[Found] | None
) -> tuple[list[Any], list[Any]]:
    arrays, all_of = _without_tables(operands)
    written = _written(params["jaxpr"])
    body = _Body(params["jaxpr"], state, written)

    def run(arrays: list[Any], values: list[Any], found: list[Found] | None) -> Any:
        return body.looking(all_of(arrays), values, found)

    run = jax.checkpoint(run, prevent_cse=params["prevent_cse"], policy=params["policy"])
    results, values, places = run(arrays, state.of(written), found)
    state.update(written, values)
    return list(results), places


def _while(params: Mapping[str, Any], operands: list[Any], state: State) -> list[Any]:
    cond_end = params["cond_nconsts"]
    body_end = cond_end + params["body_nconsts"]
    cond_consts, body_consts, init = operands[:cond_end], operands[cond_end:body_end], operands[body_end:]
    written = _written(params["cond_jaxpr"], params["body_jaxpr"])
    test = _Body(params["cond_jaxpr"], state, written)
    body = _Body(params["body_jaxpr"], state, written)
    if _written(params["cond_jaxpr"]):
        names = ", ".join(variable.name for variable in _written(params["cond_jaxpr"]))
        raise DflowError(
            f"the condition of a while_loop writes variables ({names})",
            "write them in its body, which runs once for each time that the condition holds",
            at=line_bound(),
        )

    def live(carry: Any) -> Any:
        return test([*cond_consts, *carry[0]], carry[1])[0][0]

    def step(carry: Any) -> Any:
        after, values = body([*body_consts, *carry[0]], carry[1])
        return still_live(params["cond_jaxpr"], lambda: live(carry), after, carry[0]), values

    results, values = jax.lax.while_loop(lambda carry: live(carry).any(), step, (init, state.of(written)))
    state.update(written, values)
    return list(results)


def still_live(cond: Any, live: Callable[[], Any], after: Sequence[Any], before: Sequence[Any]) -> list[Any]:
    """Return the carry after an iteration: under `vmap` an element whose condition is false keeps its value."""
    if closed_parts(cond)[0].outvars[0].aval.shape == ():
        return list(after)
    turned = live()
    return [
        jnp.where(turned.reshape(turned.shape + (1,) * (old.ndim - turned.ndim)), new, old)
        for new, old in zip(after, before, strict=True)
    ]


def _shard_map(params: Mapping[str, Any], operands: list[Any], state: State) -> list[Any]:
    """The variables go in whole to each shard; what is written must be the same in all."""
    jaxpr, consts = closed_parts(params["jaxpr"])
    reads, written = accesses(jaxpr.effects)
    touched = [*dict.fromkeys([*reads, *written])]
    if written and not params["check_vma"]:
        raise DflowError(
            f"variable {written[0].name!r} is written in a shard_map with check_vma=False, where JAX does not tell "
            f"whether all shards write the same",
            "leave check_vma on, or return the value from the shard_map and write it outside",
            at=line_bound(),
        )

    def body(values: list[Any], operands: list[Any]) -> tuple[list[Any], list[Any]]:
        inner = state.within(dict(zip(touched, values, strict=True)))
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
    state.update(written, values)
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


class _Custom:
    """A call of a function with a custom derivative rule."""

    def __init__(self, primitive: str, method: Callable[[CustomCall, list[Any], list[Any]], Any]) -> None:
        self._primitive = primitive
        self._method = method

    def __call__(self, params: Mapping[str, Any], operands: list[Any], state: State) -> list[Any]:
        closed = params["call_jaxpr"]
        reads, writes = accesses(closed_parts(closed)[0].effects)
        touched = [*dict.fromkeys([*reads, *writes])]

        def body(values: list[Any], operands: list[Any]) -> tuple[list[Any], list[Any]]:
            inner = State(dict(zip(touched, values, strict=True)))
            return evaluate(*closed_parts(closed), operands, inner), inner.of(writes)

        def original(operands: list[Any]) -> list[Any]:
            return bind(primitives_by_name()[self._primitive], params, operands, None)

        def run(fn: Callable[..., list[Any]], operands: list[Any], values: list[Any]) -> list[Any]:
            jaxpr, consts, _ = make_jaxpr(fn, *operands)
            _refuse_others(jaxpr, touched, writes)
            return evaluate(jaxpr, consts, operands, State(dict(zip(touched, values, strict=True))))

        call = CustomCall([variable.name for variable in touched], body, original, run)
        results, values = self._method(call, state.of(touched), operands)
        state.update(writes, values)
        return list(results)


def _refuse_others(jaxpr: Jaxpr, touched: list[Any], written: list[Any]) -> None:
    """Raise when a derivative rule touches variables in a way that its function does not."""
    reads, writes = accesses(jaxpr.effects)
    strange = [variable.name for variable in reads if variable not in touched]
    strange += [variable.name for variable in writes if variable not in written and variable.name not in strange]
    if strange:
        raise DflowError(
            f"a derivative rule uses variables ({', '.join(strange)}) that its function does not use so",
            "use them in the function too, or pass what the rule needs as an argument",
            at=line_bound(),
        )


#: Rules of equations whose lookups are done before them, as `RunBody` says.
_LOOKING: Mapping[
    str, Callable[[Mapping[str, Any], list[Any], State, Sequence[Found] | None], tuple[list[Any], list[Any]]]
] = {
    "scan": _scan,
    "cond": _cond,
    "remat2": _remat,
    "checkpoint": _remat,
}


def _without_lookups(name: str) -> Callable[[Mapping[str, Any], list[Any], State], list[Any]]:
    return lambda params, operands, state: list(_LOOKING[name](params, operands, state, ())[0])


_RULES: Mapping[str, Callable[[Mapping[str, Any], list[Any], State], list[Any]]] = {
    read_p.name: _read,
    gather_p.name: _gather,
    update_p.name: _update,
    host_p.name: _use_resource,
    **{name: _call(key) for name, key in CALLS.items()},
    **{name: _without_lookups(name) for name in _LOOKING},
    "shard_map": _shard_map,
    "while": _while,
    "custom_jvp_call": _Custom("custom_jvp_call", CustomCall.with_jvp),
    "custom_vjp_call": _Custom("custom_vjp_call", CustomCall.with_vjp),
}
