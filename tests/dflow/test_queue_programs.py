"""Programs of variables, queues and an accumulator: compiled, run at once, and interpreted, they are one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import dflow
from dflow.homes import LOCAL
from dflow.lowering.passes.base import run_passes
from dflow.lowering.pipeline import pipeline
from dflow.tracing.accumulator_model import AccumulatorModel
from dflow.tracing.accumulators import ConditionalAccumulator
from dflow.tracing.host_resource import HostResource
from dflow.tracing.interpret import interpret
from dflow.tracing.queue_model import QueueModel
from dflow.tracing.queues import Queue
from dflow.tracing.text import parse, text
from dflow.tracing.trace import trace
from dflow.tracing.verify import verify
from tests.effort import examples
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


def contents(resources: list[Any]) -> list[Any]:
    """What queues of this process hold, first in first; of an accumulator the numbers that it knows."""
    return [
        [plain(element) for element in LOCAL.store.resource(resource.key).contents()]
        if isinstance(resource, Queue)
        else plain([resource.step, resource.count(), resource.dropped()])
        for resource in resources
    ]


def contents_of_model(model: QueueModel | AccumulatorModel) -> Any:
    """The same of a model."""
    if isinstance(model, QueueModel):
        return [plain(element) for element in model.elements]
    return [model.step, len(model.gradients), model.dropped]


def initial(resource: Any) -> Any:
    """What the interpreter begins with."""
    if isinstance(resource, Queue):
        return QueueModel(resource.settings, elements_at_start())
    if isinstance(resource, ConditionalAccumulator):
        return AccumulatorModel(resource.type, resource.settings)
    return resource.read()


@pytest.mark.filterwarnings("ignore::dflow.RetraceWarning")
@settings(max_examples=examples(60))
@given(program=queue_programs())
def test_compiled_eager_and_interpreted_are_one(program: QueueProgram) -> None:
    ours, eager = (variables_of(), queues_of(program)), (variables_of(), queues_of(program))
    compiled = dflow.jit(lambda x: program(*ours, x, TRACED))
    traced = trace(lambda x: program(*ours, x, TRACED), (X,), {})
    verify(traced.graph)
    state: dict[str, Any] = {
        ref.name: initial(resource) for ref, resource in zip(traced.graph.refs, traced.variables, strict=True)
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
            if isinstance(resource, HostResource):
                assert contents_of_model(after[ref.name]) == contents([resource])[0]
                assert contents_of_model(after_passes[ref.name]) == contents([resource])[0]
            else:
                assert plain([after[ref.name], after_passes[ref.name]]) == plain([resource.read()] * 2)
        state = after
