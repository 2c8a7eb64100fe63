"""Programs of variables and queues: compiled, run at once, and interpreted, they give and leave the same."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings

import dflow
from dflow.function import LOCAL
from dflow.lowering.passes.base import run_passes
from dflow.lowering.pipeline import pipeline
from dflow.tracing.interpret import interpret
from dflow.tracing.queue_model import QueueModel
from dflow.tracing.queues import Queue
from dflow.tracing.text import parse, text
from dflow.tracing.trace import trace
from dflow.tracing.verify import verify
from tests.queue_programs_ import (
    EAGER,
    TRACED,
    QueueProgram,
    elements_at_start,
    queue_programs,
    queues_of,
    variables_of,
)

X = np.int32(3)


def plain(values: Any) -> list[Any]:
    """Numbers that can be compared."""
    return [np.asarray(value).tolist() for value in values]


def contents(queues: list[Queue]) -> list[Any]:
    """What queues of this process hold, first in first."""
    return [[plain(element) for element in LOCAL.store.resource(queue.key).contents()] for queue in queues]


@settings(max_examples=60)
@given(program=queue_programs())
def test_compiled_eager_and_interpreted_are_one(program: QueueProgram) -> None:
    ours, eager = (variables_of(), queues_of(program)), (variables_of(), queues_of(program))
    compiled = dflow.jit(lambda x: program(*ours, x, TRACED))
    traced = trace(lambda x: program(*ours, x, TRACED), (X,), {})
    verify(traced.graph)
    state: dict[str, Any] = {
        ref.name: QueueModel(resource.settings, elements_at_start()) if isinstance(resource, Queue) else resource.read()
        for ref, resource in zip(traced.graph.refs, traced.variables, strict=True)
    }
    lowered = run_passes(traced.graph, pipeline(), check=True)
    for graph in (traced.graph, lowered):
        assert text(parse(text(graph))) == text(graph)
    for _ in range(program.times):
        wanted, after = interpret(traced.graph, [*traced.constants, X], state)
        again, after_passes = interpret(lowered, [*traced.constants, X], state)
        assert plain(wanted) == plain(again)
        assert plain(compiled(X)) == plain(wanted)
        assert plain(program(*eager, X, EAGER)) == plain(wanted)
        assert contents(ours[1]) == contents(eager[1])
        assert plain(v.read() for v in ours[0]) == plain(v.read() for v in eager[0])
        for ref, resource in zip(traced.graph.refs, traced.variables, strict=True):
            if isinstance(resource, Queue):
                assert [plain(element) for element in after[ref.name].elements] == contents([resource])[0]
                assert [plain(element) for element in after_passes[ref.name].elements] == contents([resource])[0]
            else:
                assert plain([after[ref.name], after_passes[ref.name]]) == plain([resource.read()] * 2)
        state = after
