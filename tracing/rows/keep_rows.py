"""The pass over a traced program that keeps the gradients of lookups as rows where rows are enough.

It runs the program again, symbolically: a result of `rows_to_dense` is a `Rowwise` array, and stays one through every
op that computes each row from the same row of its operands. An update of a variable by a `Rowwise` array that leaves
all other rows as they are becomes an update of rows; a sum over one becomes a sum over its rows. Any other op takes the
dense form, as the program was written. So the pass changes the cost of a program, not its results (but see `row_values`
on `0 * x`).

The pass finds from the program which rows an update leaves as they are. All other rows of an Adagrad slot become
`stored + 0 * 0`, which is the stored value; all other rows of a momentum become `0.9 * stored`, which is not.

A gradient whose dense form is needed, though it has few of the rows of a large table, is reported by
`DenseGradientWarning`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import jax
import numpy as np

from dflow.tracing.ir.updates import KINDS, updated
from dflow.tracing.jax_frontend import (
    Equation,
    Jaxpr,
    accesses,
    bind,
    closed_parts,
    host_resources,
    inner_parts,
    is_array_type,
    is_literal,
    make_jaxpr,
    origin_of,
    retraced,
    scan_counts,
)
from dflow.tracing.primitives.first_rows import first_rows
from dflow.tracing.primitives.state_primitives import gather_p, name_p, read_p, update_p, wire_p
from dflow.tracing.rows.lookups import CALLS, RULED
from dflow.tracing.rows.random_rounding import round_at_random_p, with_rows_p
from dflow.tracing.rows.row_branches import branched
from dflow.tracing.rows.row_sums import carried_sums, of_rows, summed_over
from dflow.tracing.rows.row_values import (
    NUMBER,
    Fill,
    Index,
    NotOfRowsError,
    RowResult,
    Rowwise,
    Stored,
    computed_now,
    is_zero,
    operands_first,
    without_change,
)
from dflow.tracing.rows.row_wise import ELEMENTWISE, row_by_row
from dflow.tracing.rows.rows_to_dense import dense_to_rows_p, is_bound, note_p, rows_to_dense_p, warn_of_dense

#: Every call of a function, and which parameter holds it.
_FUNCTIONS = {**CALLS, **RULED}
#: Calls that are left as they are, since what is inside runs under another mesh.
_CLOSED = ("shard_map",)


def keep_rows(jaxpr: Jaxpr, consts: Sequence[Any]) -> tuple[Jaxpr, list[Any]]:
    """Return the program and its constants, rewritten to keep gradients of lookups as rows where only rows are used."""
    if (
        not is_bound.is_set()
        or not _counts(jaxpr)
        or not all(is_array_type(var.aval) for var in (*jaxpr.invars, *jaxpr.constvars))
    ):
        return jaxpr, list(consts)
    anew, captured, _ = make_jaxpr(lambda *args: _arrays(jaxpr, consts, args), *(var.aval for var in jaxpr.invars))
    return anew, captured


def noted_rows(jaxpr: Jaxpr, consts: Sequence[Any]) -> list[list[jax.ShapeDtypeStruct | None]]:
    """For each `note_gradients` in a program, the types of the rows of its arrays; None for an array without rows."""
    found: list[list[jax.ShapeDtypeStruct | None]] = []
    noting = _Pass(_counts(jaxpr), found.append)
    make_jaxpr(lambda *args: noting.outputs(jaxpr, consts, args), *(var.aval for var in jaxpr.invars))
    return found


def _arrays(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """The results of a program as arrays, from a run that starts here."""
    return _Pass(_counts(jaxpr)).outputs(jaxpr, consts, args)


class _Frame:
    """A program that is being run: its values, by its variables."""

    def __init__(self, jaxpr: Jaxpr, args: Sequence[Any]) -> None:
        self.env: dict[Any, Any] = {}
        #: Number of the equation that runs.
        self.position = 0
        #: Number of the last equation that takes each value.
        self._last_use = _last_uses(jaxpr)
        #: By variable of the user: names of values that are computed from its value.
        self.made_of: dict[Any, list[Any]] = {}
        self.set((*jaxpr.constvars, *jaxpr.invars), args)

    def set(self, names: Sequence[Any], values: Sequence[Any]) -> None:
        """Give names their values."""
        for name, value in zip(names, values, strict=True):
            self.env[name] = value
            for variable in value.variables if isinstance(value, Rowwise) else ():
                self.made_of.setdefault(variable, []).append(name)

    def value(self, atom: Any) -> Any:
        """The value of a name or of a literal."""
        return atom.val if is_literal(atom) else self.env[atom]

    def forget(self, variable: Any) -> list[tuple[Any, Rowwise]]:
        """Return, and stop tracking, the names and values that are made of a variable's value and are used later."""
        names = dict.fromkeys(self.made_of.pop(variable, ()))
        found = [(name, self.env[name]) for name in names if self._last_use.get(name, -1) > self.position]
        return [(name, value) for name, value in found if isinstance(value, Rowwise)]


class _Pass:
    """One run over a program and the functions it calls; bodies of loops and branches have runs of their own.

    `counts`      the numbers of rows that gradients have; only values with as many are followed
    `rows_alone`  whether NotOfRowsError is raised where a value would have to be made dense
    """

    def __init__(
        self,
        counts: frozenset[int],
        note: Callable[[list[Any]], None] = lambda rows: None,
        rows_alone: bool = False,
    ) -> None:
        self._counts, self._note, self._rows_alone = counts, note, rows_alone
        self._frames: list[_Frame] = []
        self._writes: dict[Any, int] = {}
        #: Number of ops after which another program may have written any variable.
        self._foreign_writes = 0

    def outputs(self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """The results of a program, as arrays."""
        return [*map(self.dense, self.run(jaxpr, consts, args))]

    def run(self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """The results of a program, `Rowwise` ones as they are."""
        frame = _Frame(jaxpr, (*consts, *args))
        self._frames.append(frame)
        for number, equation in enumerate(jaxpr.eqns):
            frame.position = number
            frame.set(equation.outvars, self._apply(equation, [*map(frame.value, equation.invars)]))
        self._frames.pop()
        return [*map(frame.value, jaxpr.outvars)]

    def _apply(self, equation: Equation, operands: list[Any]) -> Sequence[Any]:
        primitive = equation.primitive
        if primitive.name in ELEMENTWISE and all(map(_is_known_number, operands)):
            return computed_now(equation, operands)
        rule = _RULES.get(primitive.name)
        found = rule(self, equation, operands) if rule is not None else None
        if found is None and primitive.name in _FUNCTIONS:
            found = self._call(equation, operands)
        if found is None and any(isinstance(operand, Rowwise) for operand in operands):
            with origin_of(equation).restored():
                result = row_by_row(equation, operands)
            found = None if result is None else [result]
        return found if found is not None else self._plainly(equation, operands)

    def _call(self, equation: Equation, operands: list[Any]) -> Sequence[Any] | None:
        """Run a function that the program calls, if it has to do with rows."""
        inner, consts = closed_parts(equation.params[_FUNCTIONS[equation.primitive.name]])
        takes_rows = any(isinstance(operand, Rowwise) for operand in operands)
        if not takes_rows and (equation.primitive.name in RULED or not (_counts(inner) or inner.effects)):
            return None
        with origin_of(equation).restored():
            return self.run(inner, consts, operands)

    def _plainly(self, equation: Equation, operands: list[Any]) -> Sequence[Any]:
        """Run an equation on dense operands. The bodies inside it get their own run of the pass."""
        written = accesses(equation.effects)[1]
        self._settle(written, everything=bool(host_resources(equation.effects)))
        arrays = [self.dense(operand, equation) for operand in operands]
        params = equation.params
        if equation.primitive.name not in (*RULED, *_CLOSED) and any(_counts(part) for part, _ in inner_parts(params)):
            params = {key: _passed_over(value) for key, value in params.items()}
        self._wrote(written)
        return bind(equation.primitive, params, arrays, origin_of(equation))

    def _source(self, equation: Equation, operands: list[Any]) -> Sequence[Any] | None:
        """A gradient of lookups, kept as rows if these are fewer than those of the dense form."""
        indices, rows = (self.dense(operand, equation) for operand in operands)
        count = equation.params["shape"][0]
        if rows.shape[0] >= count:
            return None
        zero = Fill(np.zeros((), rows.dtype)[()])
        once = equation.params["once"]
        index = Index(indices, count, is_unique=once, is_packed=once)
        return [Rowwise(equation, [indices, rows], zero, index, rows)]

    def _read(self, equation: Equation, operands: list[Any]) -> Sequence[Any] | None:
        variable = equation.params["handle"].variable
        if variable.shape[:1] and variable.shape[0] in self._counts:
            return [Rowwise(equation, (), self._stored(variable))]
        return None

    def _spread(self, equation: Equation, operands: list[Any]) -> Sequence[Any] | None:
        """A broadcast along the first dimension: all rows of the result are equal."""
        shape = equation.params["shape"]
        if len(operands) > 1 or isinstance(operands[0], Rowwise) or shape[:1] == () or shape[0] not in self._counts:
            return None
        if 0 in equation.params["broadcast_dimensions"]:
            return None
        rest = Fill(operands[0]) if np.shape(operands[0]) == () else RowResult(equation, (operands[0],))
        return [Rowwise(equation, operands, rest)]

    def _update(self, equation: Equation, operands: list[Any]) -> Sequence[Any] | None:
        variable, kind = equation.params["handle"].variable, equation.params["kind"]
        value, properties = operands[-1], KINDS[kind]
        if not isinstance(value, Rowwise):
            return None
        if value.index is None:
            return [] if properties.keeps_by_zero and is_zero(value.rest) else None
        if properties.by_rows:
            return None
        if properties.sign and value.is_sparse:
            update, index, rows = "scatter_add", value.index, value.rows if properties.sign > 0 else -value.rows
        elif properties.keeps_by_zero and value.is_sparse:
            # Each row is updated once, after the sum of all its updates.
            update, index = "scatter_update", value.index.unique
            old = gather_p.bind(index.positions, handle=variable.handle, once=False)
            rows = updated(kind, old, value.index.summed(value.rows))
        elif not properties.reads and value.rest == self._stored(variable):
            update, rows, index = "scatter_update", value.rows, value.index
        else:
            return None
        self._settle([variable])
        self._wrote([variable])
        params = {**equation.params, "kind": update}
        return bind(equation.primitive, params, [index.positions, rows], origin_of(equation))

    def _rounded(self, equation: Equation, operands: list[Any]) -> Sequence[Any] | None:
        """Rows rounded at random, by their numbers."""
        value, _, seed = operands
        if not isinstance(value, Rowwise) or value.index is None:
            return None
        rest = without_change(equation, value.rest)
        if rest is None:
            return None
        index, rows = value.unique.index, value.unique.rows
        assert index is not None
        if equation.params["result"] != NUMBER:
            # Each of the two parts is written after both are read: or XLA reads one again, and copies its variable.
            rows = jax.lax.optimization_barrier(rows)
        [rows] = bind(equation.primitive, equation.params, [rows, index.positions, seed], origin_of(equation))
        if isinstance(rest, Stored) and (whole := _holder(value, rest)) is not None:
            # In its dense form it depends on this variable alone, so it stays rows when the other part is written.
            made_by = equation.replace(primitive=with_rows_p, params={})
            return [Rowwise(made_by, [whole, index.positions, rows], rest, index, rows)]
        return [Rowwise(equation, operands, rest, index, rows)]

    def _cond(self, equation: Equation, operands: list[Any]) -> Sequence[Any] | None:
        """Branches without effects that compute with rows."""
        if equation.effects or not any(isinstance(operand, Rowwise) for operand in operands):
            return None
        with origin_of(equation).restored():
            return branched(equation, operands, lambda *branch: _Pass(self._counts, rows_alone=True).run(*branch))

    def _scan(self, equation: Equation, operands: list[Any]) -> Sequence[Any] | None:
        """A scan that sums gradients of lookups: each iteration returns the rows that it adds to a sum."""
        sums = carried_sums(equation, operands)
        if not sums:
            return None
        consts, _ = scan_counts(equation.params)
        self._settle(accesses(equation.effects)[1], everything=bool(host_resources(equation.effects)))
        arrays = [
            value if number - consts in sums else self.dense(value, equation) for number, value in enumerate(operands)
        ]
        with origin_of(equation).restored():
            results = summed_over(equation, arrays, sums, _run_body)
        if results is not None:
            self._wrote(accesses(equation.effects)[1])
        return results

    def _noted(self, equation: Equation, operands: list[Any]) -> Sequence[Any]:
        sparse = [operand if isinstance(operand, Rowwise) and operand.is_sparse else None for operand in operands]
        self._note(
            [None if each is None else jax.ShapeDtypeStruct(each.rows.shape, each.rows.dtype) for each in sparse]
        )
        return []

    def _to_rows(self, equation: Equation, operands: list[Any]) -> Sequence[Any] | None:
        (value,) = operands
        if not isinstance(value, Rowwise) or value.index is None or not value.is_sparse:
            return None
        index, rows = value.index, value.rows
        if index.is_packed:  # the entries left over are not sent
            number = index.is_there(1).sum(dtype=np.int32)
            return [first_rows(index.positions, number, fill=index.count), first_rows(rows, number)]
        return [index.positions, rows]

    def _named(self, equation: Equation, operands: list[Any]) -> Sequence[Any] | None:
        """An op that names a value or sets its codec: applied to the rows."""
        (value,) = operands
        if not isinstance(value, Rowwise):
            return None
        rows = value.rows
        if value.index is not None:
            [rows] = bind(equation.primitive, equation.params, [rows], origin_of(equation))
        return [Rowwise(equation, operands, value.rest, value.index, rows)]

    def _stored(self, variable: Any) -> Stored:
        """The value of a variable at this point of the program."""
        return Stored(variable, (self._foreign_writes, self._writes.get(variable, 0)))

    def _settle(self, variables: Sequence[Any], *, everything: bool = False) -> None:
        """Before variables are written, make values dense that depend on the old value and are needed later.

        `everything` is for an op that may let another program write them.
        """
        for frame in self._frames:
            for variable in [*frame.made_of] if everything else variables:
                for name, value in frame.forget(variable):
                    frame.env[name] = of_rows(value) if value.is_sparse else self.dense(value)
        if everything:
            self._foreign_writes += 1

    def _wrote(self, variables: Sequence[Any]) -> None:
        for variable in variables:
            self._writes[variable] = self._writes.get(variable, 0) + 1

    def dense(self, value: Any, taker: Equation | None = None) -> Any:
        """Return a value as an array. `taker` is the equation that uses it; None for a result of the program."""
        if not isinstance(value, Rowwise):
            return value
        if self._rows_alone:
            raise NotOfRowsError
        for part in operands_first(value, _not_dense):
            operands = [each.dense if isinstance(each, Rowwise) else each for each in part.operands]
            if part.equation.primitive is rows_to_dense_p:
                _warn_of_size(part, taker)
            [part.dense] = bind(part.equation.primitive, part.equation.params, operands, origin_of(part.equation))
        return value.dense


def _holder(value: Rowwise, rest: Stored) -> Rowwise | None:
    """Return the operand, of all that a value is computed from, that is what a variable has."""
    waiting, seen = [value], set[int]()
    while waiting:
        one = waiting.pop()
        if one.index is None and one.rest == rest:
            return one
        seen.add(id(one))
        waiting += [each for each in one.operands if isinstance(each, Rowwise) and id(each) not in seen]
    return None


def _not_dense(value: Rowwise) -> list[Rowwise] | None:
    """The `Rowwise` operands of a value that has no dense form yet; None for a value that has one."""
    if value.dense is not None:
        return None
    return [operand for operand in value.operands if isinstance(operand, Rowwise)]


def _is_known_number(value: Any) -> bool:
    return not isinstance(value, Rowwise | jax.core.Tracer) and np.shape(value) == ()


#: By jaxpr: the result of `_counts`.
_known_counts: WeakKeyDictionary[Jaxpr, frozenset[int]] = WeakKeyDictionary()


def _counts(jaxpr: Jaxpr) -> frozenset[int]:
    """The first dimensions of the tables whose gradients in this program have fewer rows than the table."""
    if (known := _known_counts.get(jaxpr)) is not None:
        return known
    found: set[int] = set()
    for equation in jaxpr.eqns:
        if equation.primitive is rows_to_dense_p:
            found.update(count for count in equation.params["shape"][:1] if equation.invars[1].aval.shape[0] < count)
        else:
            found.update(*(_counts(inner) for inner, _ in inner_parts(equation.params)))
    return _known_counts.setdefault(jaxpr, frozenset(found))


def _last_uses(jaxpr: Jaxpr) -> dict[Any, int]:
    uses = {atom: n for n, equation in enumerate(jaxpr.eqns) for atom in equation.invars if not is_literal(atom)}
    return uses | {atom: len(jaxpr.eqns) for atom in jaxpr.outvars if not is_literal(atom)}


def _run_body(jaxpr: Jaxpr, consts: list[Any], args: list[Any]) -> tuple[list[Any], Callable[[Any], Any]]:
    run = _Pass(_counts(jaxpr))
    return run.run(jaxpr, consts, args), run.dense


def _passed_over(param: Any) -> Any:
    """Return a parameter of an equation with every body rewritten by the pass."""
    if isinstance(param, tuple | list):
        return type(param)(map(_passed_over, param)) if not hasattr(param, "_fields") else param
    return retraced(param, _arrays, lambda inner: bool(_counts(inner)))


def _warn_of_size(gradient: Rowwise, taker: Equation | None) -> None:
    user = "the result of the function" if taker is None else taker.primitive.name
    loc = origin_of(gradient.equation if taker is None else taker).own_loc
    warn_of_dense(gradient.equation.params["table"], gradient.aval, gradient.operands[1], user, loc)


_RULES: Mapping[str, Callable[[_Pass, Equation, list[Any]], Sequence[Any] | None]] = {
    rows_to_dense_p.name: _Pass._source,
    read_p.name: _Pass._read,
    update_p.name: _Pass._update,
    "broadcast_in_dim": _Pass._spread,
    "cond": _Pass._cond,
    "scan": _Pass._scan,
    dense_to_rows_p.name: _Pass._to_rows,
    note_p.name: _Pass._noted,
    name_p.name: _Pass._named,
    wire_p.name: _Pass._named,
    round_at_random_p.name: _Pass._rounded,
}
