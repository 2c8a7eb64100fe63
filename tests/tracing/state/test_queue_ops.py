"""Graphs with queues, branches and loops, written as text: the well-formed ones, and their results."""

from __future__ import annotations

import numpy as np
import pytest

from dflow.tracing.errors import ParseError, VerifyError
from dflow.tracing.ir.queue_settings import QueueKind, QueueSettings
from dflow.tracing.ir.types import ArrayType, QueueType, parse_type
from dflow.tracing.syntax.text import parse, text
from dflow.tracing.syntax.verify import verify
from tests.reference.interpret import interpret
from tests.reference.queue_model import QueueModel

LOOP = """graph(%q: queue<i32[]>, %n: i32[]) {
 !%sum: i32[] = ctrl.while(%q, %n, 0:i32[]) {carry=1} {
    graph(%q: queue<i32[]>, %n: i32[], %c: i32[]) {
      %1: bool[] = jax.lt(%c, %n)
      return %1
    }
    graph(%q: queue<i32[]>, %n: i32[], %c: i32[]) {
     !%1: i32[] = queue.dequeue(%q)
     !%2: token = queue.enqueue(%q, %c)
      %3: i32[] = jax.add(%c, %1)
      return %3
    }
  }
  return %sum
}"""

ROWS = """graph(%q: queue<i32[]>, %x: i32[3]) {
 !%last: i32[], %all: i32[3] = ctrl.scan(%q, 0:i32[], %x) {carry=1, length=3, reverse=True, rows=1} {
    graph(%q: queue<i32[]>, %c: i32[], %row: i32[]) {
     !%1: i32[] = queue.dequeue(%q)
      %2: i32[] = jax.mul(%row, %1)
      return %1, %2
    }
  }
  return %last, %all
}"""

BRANCH = """graph(%q: queue<i32[]>, %i: i32[]) {
 !%taken: i32[] = ctrl.cond(%i, %q) {
    graph(%q: queue<i32[]>) {
     !%1: i32[] = queue.size(%q)
      return %1
    }
    graph(%q: queue<i32[]>) {
     !%1: i32[] = queue.dequeue(%q)
      return %1
    }
  }
  return %taken
}"""


def run(graph: str, *inputs: object) -> tuple[list[object], list[int]]:
    """Run a graph over a queue of 1, 2, 3; return its results and the elements that remain."""
    queue = QueueModel(QueueSettings(QueueKind.FIFO, 8), [(np.int32(n),) for n in (1, 2, 3)])
    outputs, state = interpret(parse(graph), inputs, {"q": queue})
    assert [int(number) for (number,) in queue.elements] == [1, 2, 3]
    return [np.asarray(output).tolist() for output in outputs], [int(number) for (number,) in state["q"].elements]


@pytest.mark.parametrize("graph", [LOOP, ROWS, BRANCH])
def test_a_graph_with_bodies_is_read_back(graph: str) -> None:
    verify(parse(graph))
    assert text(parse(graph)) == graph


def test_bodies_run_turn_by_turn() -> None:
    assert run(LOOP, np.int32(5)) == ([6], [0, 1, 3])
    assert run(LOOP, np.int32(0)) == ([0], [1, 2, 3])
    assert run(ROWS, np.array([10, 20, 30], np.int32)) == ([3, [30, 40, 30]], [])
    assert run(BRANCH, np.int32(0)) == ([3], [1, 2, 3])
    assert run(BRANCH, np.int32(7)) == ([1], [2, 3])


def test_a_queue_type_is_read_back() -> None:
    type = QueueType((ArrayType(np.dtype("float32"), (3, None)), ArrayType(np.dtype("int32"), ())))
    assert str(type) == "queue<f32[3,?], i32[]>"
    assert parse_type(str(type)) == type
    with pytest.raises(ParseError, match="is not a type"):
        parse_type("queue<token>")


@pytest.mark.parametrize(
    ("graph", "old", "new", "message"),
    [
        (LOOP, "return %1\n", "return %c\n", r"the test gives \(i32\[\]\) where \(bool\[\]\) is wanted"),
        (LOOP, "return %3", "return %3, %1", r"the body gives \(i32\[\], i32\[\]\) where \(i32\[\]\) is wanted"),
        (LOOP, "%n: i32[]) {\n !", "%n: f32[]) {\n !", r"its body takes \(queue<i32\[\]>, i32\[\], i32\[\]\) and was"),
        (LOOP, "queue.enqueue(%q, %c)", "queue.enqueue(%q)", r"the element is \(\) but the queue holds \(i32\[\]\)"),
        (LOOP, "= queue.dequeue(%q)", "= queue.dequeue(%c)", r"the first operand is i32\[\], not a queue"),
        (LOOP, "queue.enqueue(%q, %c)", "queue.enqueue(%c, %c)", r"the first operand is i32\[\], not a queue"),
        (ROWS, "length=3", "length=4", r"a row of 4 is to be taken from i32\[3\]"),
        (ROWS, "%all: i32[3]", "%all: i32[4]", r"gives i32\[\], i32\[3\] but its results are i32\[\], i32\[4\]"),
        (BRANCH, "%i: i32[]", "%i: f32[]", r"the index gives \(f32\[\]\) where \(i32\[\]\) is wanted"),
        (BRANCH, "return %1\n    }\n  }", "return\n    }\n  }", r"a body gives \(\) where \(i32\[\]\) is wanted"),
        (
            BRANCH.replace("queue<i32[]>", "queue<i32[?]>"),
            "",
            "",
            r"queue<i32\[\?\]> have no one shape",
        ),
    ],
)
def test_a_malformed_graph_is_refused_with_the_reason(graph: str, old: str, new: str, message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        verify(parse(graph.replace(old, new)))
