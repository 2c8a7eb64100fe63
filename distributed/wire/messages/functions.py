"""Compiled functions of a task's process, for tools: their traces, and their graphs."""

from __future__ import annotations

import msgspec

from dflow.distributed.wire.messages.message import Message, Request


class FunctionInfo(msgspec.Struct, frozen=True):
    """A function of the user that the process has traced.

    `id`         number of the function, unique in the process
    `line`       the user's line that compiled it, as `train.py:12`; empty if not known
    `traces`     number of its traces, and the `last_changes` that caused the newest one
    `total_ms`   time of all calls that traced it, in ms: traces, passes, compilation and first runs
    `has_graph`  whether the graph of its newest trace can be read
    """

    id: int
    name: str
    line: str
    traces: int
    last_changes: tuple[str, ...]
    total_ms: float
    has_graph: bool


class Functions(Message, frozen=True):
    """Functions of the process, the most recently traced first; `left_out` of them are not listed."""

    functions: tuple[FunctionInfo, ...] = ()
    left_out: int = 0


class ListFunctions(Request[Functions], frozen=True):
    """List the functions that the process has traced."""

    is_open = True


class TraceTelling(msgspec.Struct, frozen=True):
    """A trace of a function; see `TraceRecord`. `call` is the line of the user's call, such as `train.py:12`."""

    number: int
    call: str
    changes: tuple[str, ...]
    arguments: dict[str, str]
    trace_ms: float
    total_ms: float | None
    captured: tuple[str, ...]
    has_graph: bool


class FunctionTraces(Message, frozen=True):
    """The newest traces of a function, oldest first; `left_out` earlier ones are not listed."""

    name: str
    records: tuple[TraceTelling, ...]
    left_out: int = 0


class ListTraces(Request[FunctionTraces], frozen=True):
    """List the traces of a function, and why each was made."""

    is_open = True

    id: int


class FunctionGraph(Message, frozen=True):
    """The graph of a trace, as JSON in the payload."""

    name: str
    trace: int


class ReadGraph(Request[FunctionGraph], frozen=True):
    """Read the graph of the trace number `trace` of a function, or with 0 of the newest. The answer is made then."""

    is_open = True

    id: int
    trace: int = 0
