"""Graphs with accumulators, written as text: the well-formed ones, and their results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dflow.tracing.errors import AccumulatorError, DeadlineExceeded, ParseError, VerifyError
from dflow.tracing.ir.accumulator_settings import AccumulatorSettings, Reduction
from dflow.tracing.ir.types import AccumulatorType, ArrayType, RowsType, parse_type
from dflow.tracing.syntax.text import parse, text
from dflow.tracing.syntax.verify import verify
from tests.reference.accumulator_model import AccumulatorModel
from tests.reference.interpret import interpret

TYPE = "accumulator<f32[], 2 rows of f32[5,1]>"

GRAPH = f"""graph(%g: {TYPE}, %x: f32[], %i: i32[3], %r: f32[3,1]) {{
 !%s: i32[] = accumulator.step(%g)
 !%fresh: bool[] = accumulator.apply(%g, %x, %i, %r, %s)
 !%stale: bool[] = accumulator.apply(%g, %x, %i, %r, -1:i32[])
 !%again: bool[] = accumulator.apply(%g, 3.0:f32[], %i, %r, 7:i32[])
 !%n: i32[] = accumulator.count(%g)
 !%1: f32[], %2: i32[2], %3: f32[2,1] = accumulator.take(%g) {{count=2}}
 !%d: i32[] = accumulator.dropped(%g)
 !%4: token = accumulator.set_step(%g, %n)
  return %fresh, %stale, %again, %1, %2, %3, %d
}}"""


def run(graph: str, indices: list[int]) -> tuple[list[Any], AccumulatorModel]:
    parsed = parse(graph)
    held: Any = parsed.refs[0].type
    model = AccumulatorModel(held, AccumulatorSettings(Reduction.MEAN))
    inputs = [np.float32(1), np.array(indices, np.int32), np.ones((3, 1), np.float32)]
    outputs, state = interpret(parsed, inputs, {"g": model})
    assert (model.step, model.dropped, model.gradients) == (0, 0, [])
    return [np.asarray(output).tolist() for output in outputs], state["g"]


def test_a_graph_is_read_back_and_means_what_its_ops_say() -> None:
    verify(parse(GRAPH))
    assert text(parse(GRAPH)) == GRAPH
    outputs, left = run(GRAPH, [4, 1, 4])
    assert outputs == [True, False, True, 2.0, [1, 4], [[1.0], [2.0]], 1]
    assert (left.step, left.dropped, left.gradients) == (2, 1, [])
    assert run(GRAPH, [3, 3, 3])[0][4:6] == [[3, 0], [[3.0], [0.0]]]


def test_an_interpreted_wait_and_too_many_rows_are_errors() -> None:
    with pytest.raises(
        DeadlineExceeded, match=r"node %1 \(accumulator\.take\): a take of 3 waits for ever: it holds 2"
    ):
        run(GRAPH.replace("count=2", "count=3"), [1, 1, 1])
    with pytest.raises(AccumulatorError, match="it would hold 3 different rows, but a take gives 2 rows of f32"):
        run(GRAPH, [1, 2, 3])


def test_an_accumulator_type_is_read_back() -> None:
    f32 = np.dtype("float32")
    type = AccumulatorType((ArrayType(f32, ()), RowsType(2, ArrayType(f32, (5, 1)))))
    assert str(type) == TYPE
    assert parse_type(TYPE) == type
    for wrong in ("accumulator<token>", "accumulator<x rows of f32[3]>", "accumulator<2 rows of token>"):
        with pytest.raises(ParseError, match="is not a"):
            parse_type(wrong)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("(%g, %x, %i, %r, %s)", "(%g, %x, %i, %r)", r"the step is f32\[3,1\], not i32\[\]"),
        ("(%g, %x, %i, %r, %s)", "(%g, %x, %i, %s)", r"the gradient is \(f32\[\], i32\[3\]\) but accumulator"),
        (
            "%r: f32[3,1]",
            "%r: f32[4,1]",
            r"the gradient is \(f32\[\], i32\[3\], f32\[4,1\]\) but accumulator<f32\[\], 2",
        ),
        ("accumulator.count(%g)", "accumulator.count(%s)", r"the first operand is i32\[\], not an accumulator"),
        ("accumulator.set_step(%g, %n)", "accumulator.set_step(%g, %x)", r"the step is f32\[\], not i32\[\]"),
        ("%2: i32[2]", "%2: i32[3]", r"its results are f32\[\], i32\[3\]"),
    ],
)
def test_a_malformed_graph_is_refused_with_the_reason(old: str, new: str, message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        verify(parse(GRAPH.replace(old, new)))


KEPT = f"""graph(%g: {TYPE}, %x: f32[], %i: i32[3], %r: f32[3,1], %o: f32[1], %t: i32[3]) {{
 !%1: i32[] = accumulator.keep(%g, %x, %i, %r, 4:i32[])
 !%2: i32[] = accumulator.keep(%g, 7.0:f32[], %i, %r, 4:i32[])
 !%3: i32[] = accumulator.keep(%g, 3.0:f32[], 1:i32[], %o, 4:i32[])
 !%4: i32[] = accumulator.keep(%g, %x, %i, %r, 3:i32[])
 !%5: f32[], %6: i32[2], %7: f32[2,1] = accumulator.take_kept(%g, %t)
 !%8: i32[] = accumulator.step(%g)
 !%9: i32[] = accumulator.dropped(%g)
  return %1, %2, %3, %4, %5, %6, %7, %8, %9
}}"""


def test_a_graph_with_kept_gradients_is_read_back_and_means_what_its_ops_say() -> None:
    verify(parse(KEPT))
    assert text(parse(KEPT)) == KEPT
    parsed = parse(KEPT)
    held: Any = parsed.refs[0].type
    inputs = [np.float32(1), np.array([4, 1, 4], np.int32), np.ones((3, 1), np.float32), np.ones(1, np.float32)]

    def run(*tickets: int) -> list[Any]:
        model = AccumulatorModel(held, AccumulatorSettings(Reduction.MEAN))
        outputs, _ = interpret(parsed, [*inputs, np.array(tickets, np.int32)], {"g": model})
        return [np.asarray(output).tolist() for output in outputs]

    assert run(1, 3, 0) == [1, 2, 3, 0, 2.0, [1, 4], [[1.0], [1.0]], 5, 2]
    for tickets in ((0, 0, 0), (1, 1, 0), (1, 4, 0), (0, 1, 3)):
        with pytest.raises(AccumulatorError, match=r"take_kept: expected distinct tickets of \[1, 2, 3\], got "):
            run(*tickets)
    for old, new, message in [
        ("%t: i32[3]", "%t: i32[]", r"accumulator.take_kept: the tickets are i32\[\], not one row of i32"),
        ("%t: i32[3]", "%t: f32[3]", r"the tickets are f32\[3\], not one row of i32"),
        ("(%g, %x, %i, %r, 3:i32[])", "(%g, %x, %i, %r, %x)", r"accumulator.keep: the step is f32\[\], not i32"),
    ]:
        with pytest.raises(VerifyError, match=message):
            verify(parse(KEPT.replace(old, new)))
