"""The functions that this process has compiled, for tools: their traces, and their graphs as JSON.

A graph is made from the jaxpr of a trace when a tool asks for it; calls of the functions do not wait for that.
"""

from __future__ import annotations

from typing import Any

import msgspec

from dflow.calls.shared_traces import TRACED, SharedTraces
from dflow.calls.trace_log import TraceRecord
from dflow.distributed.observe.task_observer import missing_function
from dflow.distributed.wire.messages.functions import FunctionRequest, ListFunctions, ListTraces, ReadGraph
from dflow.graphs.graph_json import graph_json
from dflow.tracing.errors import GraphNameError
from dflow.tracing.jax_frontend import closed_parts
from dflow.tracing.jaxprs.from_jaxpr import graph_of

#: Most functions and traces that are listed, and most arguments of a trace.
MOST_FUNCTIONS, MOST_TRACES, MOST_ARGUMENTS = 200, 100, 200
#: Most bytes of a graph as JSON.
MOST_GRAPH_BYTES = 16 << 20

Data = dict[str, Any]


def function_data(message: FunctionRequest) -> bytes:
    """Answer a request for the functions of this process, as JSON.

    Raises GraphNameError for a function or a graph that is not kept, or a graph that is too large.
    """
    match message:
        case ListFunctions():
            return msgspec.json.encode(functions())
        case ListTraces(number):
            return msgspec.json.encode(traces(number))
        case ReadGraph(number, trace):
            return msgspec.json.encode(graph(number, trace))


def functions() -> Data:
    """List the most recently traced functions."""
    # `valuerefs` copies the references in one step; an iteration of the dictionary fails if another thread traces.
    found = [shared for one in reversed(TRACED.valuerefs()) if (shared := one()) is not None]
    shown = [_info(shared) for shared in found[:MOST_FUNCTIONS] if len(shared.log)]
    return {"functions": shown, "left_out": max(len(found) - MOST_FUNCTIONS, 0)}


def traces(number: int) -> Data:
    """List the newest traces of a function. Raises GraphNameError for a function that is not kept."""
    shared = _found(number)
    records = list(shared.log.records)
    left_out = max(len(records) - MOST_TRACES, 0)
    told = [_told(record, _program(shared, record.number) is not None) for record in records[left_out:]]
    return {"name": shared.log.name, "records": told, "left_out": left_out}


def graph(number: int, trace: int) -> Data:
    """Return the graph of a trace. Raises GraphNameError if it is not kept, or is too large."""
    shared = _found(number)
    trace, name = trace or len(shared.log), shared.log.name
    closed = _program(shared, trace)
    if closed is None:
        raise GraphNameError(
            f"trace {trace} of {name}: expected one of 1 to {len(shared.log)} that JAX keeps, got one without a graph",
            "look at a newer trace",
        )
    jaxpr, consts = closed_parts(closed)
    names = [*shared.log[trace - 1].arguments]
    if len(names) != len(jaxpr.invars):  # some arguments are not in the graph
        names = [f"argument_{index}" for index in range(len(jaxpr.invars))]
    data = msgspec.json.encode(graph_json(graph_of(jaxpr, consts, names)[0], name))
    if len(data) > MOST_GRAPH_BYTES:
        raise GraphNameError(
            f"graph of {name}: expected at most {MOST_GRAPH_BYTES >> 20} MiB of JSON, got {len(data) >> 20} MiB",
            f"print dflow.graph({name}, ...) in the program",
        )
    return {"name": name, "trace": trace, "graph": msgspec.Raw(data)}


def _found(number: int) -> SharedTraces:
    shared = TRACED.get(number)
    if shared is None:
        raise missing_function(number)
    return shared


def _program(shared: SharedTraces, trace: int) -> Any:
    """Return the closed jaxpr of a trace, or None."""
    return shared.programs[trace - 1]() if 1 <= trace <= len(shared.programs) else None


def _info(shared: SharedTraces) -> Data:
    records, made = list(shared.log.records), shared.log.made
    return {
        "id": shared.id,
        "name": shared.log.name,
        "line": made.short if made else "",
        "traces": len(records),
        "last_changes": records[-1].changes,
        "total_ms": sum(record.trace_ms if record.total_ms is None else record.total_ms for record in records),
        "has_graph": _program(shared, len(records)) is not None,
    }


def _told(record: TraceRecord, has_graph: bool) -> Data:
    return {
        "number": record.number,
        "call": record.call.short if record.call else "",
        "changes": record.changes,
        "arguments": dict(list(record.arguments.items())[:MOST_ARGUMENTS]),
        "trace_ms": record.trace_ms,
        "total_ms": record.total_ms,
        "captured": record.captured,
        "has_graph": has_graph,
    }
