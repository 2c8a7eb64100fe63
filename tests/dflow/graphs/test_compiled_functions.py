"""The functions that a process has compiled, as tools see them."""

from __future__ import annotations

import gc
import json
import sys
import threading
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest

import dflow
from dflow.calls.shared_traces import TRACED, SharedTraces
from dflow.calls.trace_log import TraceLog
from dflow.distributed.observe.task_observer import no_functions
from dflow.distributed.wire.messages.functions import ListFunctions, ListTraces
from dflow.graphs import compiled_functions
from dflow.graphs.compiled_functions import function_data, functions, graph, traces
from dflow.tracing.errors import GraphNameError


def info_of(name: str) -> SimpleNamespace:
    return SimpleNamespace(**next(one for one in functions()["functions"] if one["name"] == name))


def graph_of(name: str, trace: int = 0) -> Any:
    return json.loads(bytes(graph(info_of(name).id, trace)["graph"]))


def test_functions_are_listed_the_newest_trace_first() -> None:
    @dflow.jit
    def earlier(x: Any) -> Any:
        return x + 1

    @dflow.jit
    def later(x: Any) -> Any:
        return x * 2

    earlier(jnp.ones(2))
    later(jnp.ones(3))
    names = [one["name"] for one in functions()["functions"]]
    assert names.index("later") < names.index("earlier")
    earlier(jnp.ones(4))
    assert functions()["functions"][0]["name"] == "earlier"
    info = info_of("earlier")
    assert (info.traces, info.last_changes, info.has_graph) == (2, ("x: f32[2] -> f32[4]",), True)
    assert info.line.startswith("test_compiled_functions.py:")
    assert info.total_ms > 0


def test_the_graph_of_each_trace_can_be_read() -> None:
    w = dflow.Variable(lambda: jnp.ones(3), name="w")

    @dflow.jit
    def update(x: Any) -> Any:
        w.assign_add(x.sum() * jnp.ones(3))
        return x * 2

    update(jnp.ones(2))
    update(jnp.ones(5))
    told = traces(info_of("update").id)["records"]
    assert [record["arguments"] for record in told] == [{"x": "f32[2]"}, {"x": "f32[5]"}]
    assert [record["has_graph"] for record in told] == [True, True]
    assert "var.assign_add" in {node.get("op") for node in graph_of("update")["nodes"]}
    assert graph_of("update", 2) == graph_of("update") != graph_of("update", 1)


def test_arguments_that_are_static_or_variables_do_not_hide_the_graph() -> None:
    w = dflow.Variable(lambda: jnp.ones(3), name="w")

    @dflow.jit(static_argnames="times")
    def scaled(v: Any, x: Any, times: int) -> Any:
        return v * x * times

    scaled(w, jnp.ones(3), times=2)
    assert graph_of("scaled")["ops"] >= 2


def test_a_function_without_a_graph_is_an_error_with_a_remedy() -> None:
    @dflow.jit
    def dropped(x: Any) -> Any:
        return x - 1

    dropped(jnp.ones(2))
    info = info_of("dropped")
    with pytest.raises(GraphNameError, match=r"trace 3 of dropped: expected one of 1 to 1 that JAX keeps"):
        graph(info.id, 3)
    jax.clear_caches()
    gc.collect()
    assert not info_of("dropped").has_graph
    with pytest.raises(GraphNameError, match=r"trace 1 of dropped(.|\n)*look at a newer trace"):
        graph(info.id, 0)
    del dropped
    gc.collect()
    assert info.id not in TRACED
    for answer in (function_data, no_functions):
        with pytest.raises(GraphNameError, match=f"function {info.id}: expected one that this process keeps"):
            answer(ListTraces(info.id))
        assert json.loads(answer(ListFunctions())).keys() == {"functions", "left_out"}


def test_lists_and_graphs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_functions, "MOST_FUNCTIONS", 1)
    monkeypatch.setattr(compiled_functions, "MOST_TRACES", 2)
    monkeypatch.setattr(compiled_functions, "MOST_GRAPH_BYTES", 10)

    @dflow.jit
    def often(x: Any) -> Any:
        return x

    kept = dflow.jit(lambda x: x + 1)
    kept(1.0)
    for size in (1, 2, 3):
        often(jnp.ones(size))
    listed = functions()
    [one] = listed["functions"]
    assert (one["name"], listed["left_out"] >= 1) == ("often", True)
    told = traces(one["id"])
    assert ([record["number"] for record in told["records"]], told["left_out"]) == ([2, 3], 1)
    with pytest.raises(GraphNameError, match="graph of often: expected at most 0 MiB of JSON"):
        graph(one["id"], 0)


def test_functions_are_listed_while_another_thread_traces() -> None:
    log = TraceLog("f")

    def trace() -> None:
        for _ in range(20):
            made = [SharedTraces(cast(Any, None), log) for _ in range(400)]
            for shared in made:
                shared.traced(log)

    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=trace)
    try:
        thread.start()
        while thread.is_alive():
            functions()
    finally:
        thread.join()
        sys.setswitchinterval(before_s)
