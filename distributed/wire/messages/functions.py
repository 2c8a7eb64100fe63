"""Compiled functions of a task's process, for tools: their traces, and their graphs. Answers are JSON, as in pages."""

from __future__ import annotations

from dflow.distributed.wire.messages.message import Message, Request


class FunctionData(Message, frozen=True):
    """The answer, which is a JSON object in the payload."""


class ListFunctions(Request[FunctionData], frozen=True):
    """List the functions that the process has traced.

    The answer has `functions`, the most recently traced first, and the number `left_out` of those not listed:
    `id`            number of the function, unique in the process; `name` is its name
    `line`          the user's line that compiled it, as `train.py:12`; empty if not known
    `traces`        number of its traces, and the `last_changes` that caused the newest one
    `total_ms`      time of all calls that traced it, in ms: traces, passes, compilation and first runs
    `has_graph`     whether the graph of its newest trace can be read
    """

    is_open = True


class ListTraces(Request[FunctionData], frozen=True):
    """List the traces of a function, and why each was made.

    The answer has its `name`, and its newest traces `records`, oldest first, with these fields of `TraceRecord`:
    `number`, `call` (the user's line, such as `train.py:12`), `changes`, `arguments`, `trace_ms`, `total_ms` and
    `captured`, and with `has_graph`; `left_out` earlier ones are not listed.
    """

    is_open = True

    id: int


class ReadGraph(Request[FunctionData], frozen=True):
    """Read the graph of the trace number `trace` of a function, or with 0 of the newest. It is made then.

    The answer has the function's `name`, the number `trace`, and the `graph`.
    """

    is_open = True

    id: int
    trace: int = 0


FunctionRequest = ListFunctions | ListTraces | ReadGraph
