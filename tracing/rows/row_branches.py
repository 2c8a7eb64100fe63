"""Branches that compute with rows: each branch of a `cond` takes rows, and gives rows.

`optax.apply_if_finite` updates in one branch, and leaves everything as it is in the other. The pass runs over each
branch. A result stays rows if the other rows are the same in every branch. If they are not, or if a branch needs a
dense form, the `cond` takes dense arrays, as it was written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax

from dflow.tracing.jax_frontend import Equation, Jaxpr, closed_parts, make_jaxpr
from dflow.tracing.rows.row_sums import made_of
from dflow.tracing.rows.row_values import Index, NotOfRowsError, Rest, Rowwise, is_same, is_zero, remember_rows

#: Runs a branch on operands, some of them `Rowwise`, and raises NotOfRowsError where it needs a dense form.
Run = Callable[[Jaxpr, list[Any], list[Any]], list[Any]]


def branched(equation: Equation, operands: Sequence[Any], run: Run) -> list[Any] | None:
    """The results of a `cond` without effects, some of whose operands are `Rowwise`; None where rows are not enough."""
    which, *given = operands
    given = [each.unique if isinstance(each, Rowwise) and each.is_sparse else each for each in given]
    indices = list(dict.fromkeys(each.index for each in given if isinstance(each, Rowwise) and each.index is not None))
    if isinstance(which, Rowwise) or not indices or not all(index.is_unique for index in indices):
        return None
    try:
        return _Branches(equation, given, indices, run).results(which)
    except NotOfRowsError:
        return None


class _Branches:
    """The branches of one `cond`. In a branch each of `indices` has a counterpart: its positions are an argument."""

    def __init__(self, equation: Equation, given: list[Any], indices: list[Index], run: Run) -> None:
        self._equation, self._given, self._indices, self._run = equation, given, indices, run
        #: What crosses into a branch: arrays, rows of operands with an index, and of the others at every index.
        self._arrays = [
            [each.at(index) for index in self._indices_of(each)] if isinstance(each, Rowwise) else [each]
            for each in given
        ]

    def results(self, which: Any) -> list[Any]:
        """The results of the `cond` when it runs branch number `which`."""
        parts = [closed_parts(branch) for branch in self._equation.params["branches"]]
        found: list[list[tuple[Any, int | None]]] = []

        def tried(arrays: Any, positions: Any) -> list[Any]:
            for part in parts:
                results, inner = self._branch(part, arrays, positions)
                found.append([(each, _position(each, inner)) for each in results])
            return []

        positions = [index.positions for index in self._indices]
        make_jaxpr(tried, self._arrays, positions)
        kinds = [self._kind(number, results) for number, results in enumerate(zip(*found, strict=True))]

        def rows(part: Any, arrays: Any, positions: Any) -> list[Any]:
            results, inner = self._branch(part, arrays, positions)
            pairs = zip(results, kinds, strict=True)
            return [each if kind is None else each.at(inner[kind[1]]) for each, kind in pairs]

        arrays = jax.lax.switch(which, [partial(rows, part) for part in parts], self._arrays, positions)
        return [
            array if kind is None else self._result(number, *kind, array)
            for number, (kind, array) in enumerate(zip(kinds, arrays, strict=True))
        ]

    def _indices_of(self, value: Rowwise) -> list[Index]:
        if value.index is not None:
            return [value.index]
        return [index for index in self._indices if value.aval.shape[:1] == (index.count,)]

    def _branch(
        self, part: tuple[Jaxpr, list[Any]], arrays: list[list[Any]], positions: list[Any]
    ) -> tuple[list[Any], list[Index]]:
        """Return the results of a branch and its inner indices, one for each of `self._indices`.

        `Rowwise` results keep the rests of the operands outside the branch, so branches can be compared.
        """
        inner = [Index(position, index.count, True) for position, index in zip(positions, self._indices, strict=True)]
        operands = [self._inside(each, rows, inner) for each, rows in zip(self._given, arrays, strict=True)]
        return self._run(*part, operands), inner

    def _inside(self, value: Any, arrays: list[Any], inner: list[Index]) -> Any:
        if not isinstance(value, Rowwise):
            return arrays[0]
        own = [inner[self._indices.index(index)] for index in self._indices_of(value)]
        if value.index is not None:
            return Rowwise(value.equation, (), value.rest, own[0], arrays[0])
        for index, rows in zip(own, arrays, strict=True):
            remember_rows(value.rest, index, value.aval, rows)
        return Rowwise(value.equation, (), value.rest)

    def _kind(self, number: int, results: tuple[tuple[Any, int | None], ...]) -> tuple[Rest, int] | None:
        """The rest and the number of the index of result `number`; None if it is an array in every branch."""
        values, positions = zip(*results, strict=True)
        if not any(isinstance(value, Rowwise) for value in values):
            return None
        rest, used = getattr(values[0], "rest", None), {position for position in positions if position is not None}
        if not all(isinstance(value, Rowwise) and is_same(value.rest, rest) for value in values) or len(used) > 1:
            raise NotOfRowsError
        if rest is None or not (is_zero(rest) or self._base(number, rest) is not None):
            raise NotOfRowsError
        shape = self._equation.outvars[number].aval.shape
        used = used or {position for position, index in enumerate(self._indices) if shape[:1] == (index.count,)}
        if not used:
            raise NotOfRowsError
        return rest, min(used)

    def _base(self, number: int, rest: Rest) -> Rowwise | None:
        """An operand without an index whose rest is `rest`: the dense form of a result starts from it."""
        aval = self._equation.outvars[number].aval
        fits = (each for each in self._given if isinstance(each, Rowwise) and each.index is None)
        return next((each for each in fits if is_same(each.rest, rest) and each.aval.shape == aval.shape), None)

    def _result(self, number: int, rest: Rest, position: int, rows: Any) -> Rowwise:
        index = self._indices[position]
        if is_zero(rest):
            return made_of(self._equation, number, "a branch", index, rows, rest)
        base = self._base(number, rest)
        assert base is not None
        jaxpr, _, _ = make_jaxpr(_with_rows, base.aval, index.positions, rows)
        return Rowwise(jaxpr.eqns[0], [base, index.positions, rows], rest, index, rows)


def _position(value: Any, inner: list[Index]) -> int | None:
    """The position in `inner` of the index of a branch's result; None for a result without one."""
    if not isinstance(value, Rowwise) or value.index is None:
        return None
    if value.index not in inner:
        raise NotOfRowsError
    return inner.index(value.index)


@jax.jit
def _with_rows(dense: Any, positions: Any, rows: Any) -> Any:
    return dense.at[positions].set(rows, mode="drop")
