"""Marks of changed rows: the op in graphs, its meaning, and the buffers of a variable whose rows are marked."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.tables.changed_rows import track_changed_rows
from dflow.tracing.ir.row_marks import LIFE, PERIOD, fresh_marks, marked, marks_type
from dflow.tracing.jaxprs.trace import trace
from dflow.tracing.state.resources import Variable
from dflow.tracing.syntax.text import parse, text
from tests.reference.interpret import interpret

ROWS = 200


@pytest.fixture
def table() -> Variable:
    variable = dflow.Variable(jnp.zeros((ROWS, 2)), name="table")
    track_changed_rows(variable)
    return variable


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "uint32"])
def test_no_row_that_an_update_changes_is_missed(dtype: str) -> None:
    limits = np.iinfo(dtype)
    indices = np.array([0, 7, 7, 100, limits.max, limits.min, limits.max - 60], dtype)
    marks = jnp.zeros(ROWS + 2, jnp.int32).at[PERIOD].set(5)
    changed = np.asarray(jnp.zeros(ROWS, bool).at[indices].set(True))
    found = np.asarray(marked(marks, indices))
    assert (found[:ROWS][changed] == 5).all()
    assert dtype == "uint32" or not found[:ROWS][~changed].any()
    np.testing.assert_array_equal(found[PERIOD:], [5, 0])
    np.testing.assert_array_equal(marked(marks)[:PERIOD], np.full(ROWS, 5))
    np.testing.assert_array_equal(marked(marks)[PERIOD:], [5, 0])


def test_lives_differ() -> None:
    lives = {int(fresh_marks(marks_type(3))[LIFE]) for _ in range(4)}
    assert len(lives) > 1


@pytest.mark.parametrize("by_rows", [True, False])
def test_an_update_is_followed_by_its_mark(by_rows: bool, table: Variable) -> None:
    def step(ids: Any, rows: Any) -> None:
        if by_rows:
            table.scatter_add(ids, rows)
        else:
            table.assign_add(rows)

    ids, rows = np.array([3, -1, 400], np.int32), np.ones((3, 2) if by_rows else (ROWS, 2), np.float32)
    graph = trace(step, (ids, rows), {}).graph
    printed = text(graph, locs=False)
    assert [node.op.name for node in graph.nodes] == [f"var.{'scatter' if by_rows else 'assign'}_add", "var.mark"]
    assert text(parse(printed)) == printed
    before = {ref.name: variable.read() for ref, variable in zip(graph.refs, (table, table.marks), strict=True)}
    before[graph.refs[1].name] = before[graph.refs[1].name].at[PERIOD].set(2)
    table.marks.scatter_add(jnp.array([PERIOD]), jnp.array([1]))  # type: ignore[union-attr]
    _, after = interpret(graph, [ids, rows], before)
    dflow.jit(step)(ids, rows)
    for variable, value in zip((table, table.marks), after.values(), strict=True):
        np.testing.assert_array_equal(variable.read(), value)  # type: ignore[union-attr]
