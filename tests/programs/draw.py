"""Hypothesis strategies of programs that end and that every way to run them must accept.

The statements that are allowed depend on their surroundings: under a batch, in a derivative or in a function with a
custom rule some are errors. A program of one thread must not wait for ever, so its queue ops stay within the queue's
elements: the number of elements in each queue is tracked, and a body leaves each queue as full as before. The same
holds for the gradients of an accumulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st

from dflow.tracing.ir.queue_settings import QueueKind
from dflow.tracing.ir.updates import KINDS as UPDATES
from tests.choice import choice
from tests.programs.machines import KINDS, MOST_TURNS
from tests.programs.statements import (
    Apply,
    Ask,
    Batch,
    Call,
    Cond,
    Derive,
    Gather,
    Log,
    Loop,
    On,
    Op,
    Program,
    Put,
    Read,
    Size,
    Statement,
    Take,
    TakeSum,
    Write,
)

#: The updates that a variable has a method for.
_METHODS = [name for name in UPDATES if name != "assign_add_rounded"]

CAPACITY = 4
#: Number of elements in each queue when a program starts, and minimum that a shuffling queue keeps.
FULL, HELD_BACK = 2, 1

TYPES: Sequence[tuple[str, tuple[int, ...]]] = [
    ("float32", (3,)),
    ("float32", (4, 3)),
    ("float32", ()),
    ("int32", (3,)),
    ("int32", (2, 3)),
    ("bfloat16", (3,)),
    ("uint8", (3,)),
    ("bool", (3,)),
]

#: Updates through which JAX has no derivative.
_WITHOUT_DERIVATIVE = ("scatter_mul", "scatter_max", "scatter_min")


@dataclass(frozen=True)
class Place:
    """The surroundings of a statement, which determine the allowed kinds."""

    depth: int = 2
    devices: tuple[str, ...] = ()
    queues: tuple[QueueKind, ...] = ()
    #: Number of elements in each queue at this point of the program, and last the number of gradients in the
    #: accumulator.
    held: list[int] = field(default_factory=lambda: [0])
    accumulates: bool = False
    #: Whether most statements use queues and the accumulator.
    mostly_host_state: bool = False
    logs: bool = False
    writes: bool = True
    batched: bool = False
    derived: bool = False
    forward: bool = False

    def can_take(self, queue: int) -> int:
        """Number of elements that a program may dequeue."""
        return max(0, self.held[queue] - (HELD_BACK if self.queues[queue] is QueueKind.SHUFFLE else 0))

    def kinds(self) -> list[str]:
        """The kinds of statements, with the likelier ones repeated."""
        of_queues = ["put", "take", "size"] * bool(self.queues)
        of_accumulator = ["apply", "take sum", "ask"] * self.accumulates
        if self.mostly_host_state and (of_queues or of_accumulator):
            nested = ["loop", "loop", "cond", "call", "derive"] * (self.depth > 0)
            return ["op", "read", "write", *of_queues * 3, *of_accumulator * 3, *nested * 2]
        nested = ["loop", "cond", "call", "derive"] + ["batch"] * 2 * (not self.batched)
        if self.devices:  # Often within loops, which only two of the ops divide.
            nested += ["on"] * (1 if self.depth > 1 else 6)
        return [
            *["op", "op", "read", "gather"],
            *["write"] * 4 * self.writes,
            *["log"] * self.logs,
            *of_queues,
            *of_accumulator,
            *nested * 2 * (self.depth > 0),
        ]


_SOME_TYPES = st.lists(st.sampled_from(TYPES), min_size=1, max_size=3)
_index = st.integers(0, 7)
_WATCHED = st.none() | _index
_OTHERS = st.lists(_index, max_size=2)
_OPS = sorted(KINDS)


@st.composite
def _statement(draw: st.DrawFn, place: Place) -> Statement:
    kind = choice(draw, place.kinds())
    match kind:
        case "op":
            return Op(choice(draw, _OPS), draw(_index), draw(_index))
        case "read":
            return Read(draw(_index))
        case "gather":
            return Gather(draw(_index), draw(_index))
        case "write":
            if place.batched and draw(st.booleans()):
                return Write(draw(_index), draw(_index), choice(draw, ("assign_add", "scatter_add")), True)
            updates = [name for name in _METHODS if not (place.derived and name in _WITHOUT_DERIVATIVE)]
            return Write(draw(_index), draw(_index), choice(draw, updates), draw(st.booleans()))
        case "log":
            return Log(draw(_index))
        case "put" | "take" | "size":
            return draw(_queue_statement(kind, place))
        case "apply":
            count, age = draw(st.integers(0, 2)), draw(st.integers(-1, 1))
            place.held[-1] += count if age <= 0 else 0
            return Apply(draw(_index), count, age)
        case "take sum" if place.held[-1]:
            wanted = draw(st.integers(1, place.held[-1]))
            place.held[-1] = 0
            return TakeSum(wanted)
        case "take sum" | "ask":
            return Ask(choice(draw, ("step", "count", "dropped", "set_step")))
        case "on":
            return On(choice(draw, place.devices), draw(_statements(replace(place, depth=place.depth - 1))))
    return draw(_nested(kind, replace(place, depth=place.depth - 1)))


@st.composite
def _queue_statement(draw: st.DrawFn, kind: str, place: Place) -> Statement:
    queue = draw(st.integers(0, len(place.queues) - 1))
    if kind == "put":
        count = draw(st.integers(0, min(2, CAPACITY - place.held[queue])))
        place.held[queue] += count
        return Put(queue, draw(_index), count, draw(st.booleans()))
    if kind == "take":
        count = draw(st.integers(0, min(2, place.can_take(queue))))
        place.held[queue] -= count
        return Take(queue, count, choice(draw, ("one by one", "at once", "up to")))
    return Size(queue)


@st.composite
def _nested(draw: st.DrawFn, kind: str, place: Place) -> Statement:
    alone = replace(place, logs=False, queues=(), accumulates=False)
    # A differentiated function may use a queue or an accumulator, but not in a loop or a branch.
    place = alone if place.derived else place
    match kind:
        case "loop":
            # A while loop has no backward pass, and may not write under a batch.
            hows = ["scan", "map", "fori", "bounded"] + ["while"] * (not place.derived)
            how = choice(draw, hows)
            if how in ("while", "bounded"):
                inside = replace(place, writes=place.writes and not place.batched)
            else:
                inside = place
            body = draw(_body(inside))
            watched = draw(_WATCHED)
            return Loop(how, draw(_index), draw(st.integers(1, MOST_TURNS)), body, draw(st.booleans()), watched)
        case "cond":
            divided = place.batched and draw(st.booleans())
            inside = replace(place, writes=False) if divided else place
            count = draw(st.integers(2, 3))
            return Cond(draw(_index), tuple(draw(_body(inside)) for _ in range(count)), divided)
        case "call":
            # JAX has no forward derivative of a function with a backward rule.
            hows = ["jit", "dflow.jit", "checkpoint", "custom_jvp"] + ["custom_vjp"] * (not place.forward)
            how = choice(draw, hows)
            inside = place if how.endswith("jit") else alone
            if how.startswith("custom"):
                inside = replace(alone, writes=place.writes and not place.batched)
            return Call(how, draw(_index), draw(_body(inside)))
        case "batch":
            return Batch(draw(_index), draw(st.integers(1, 3)), draw(_body(replace(alone, batched=True))))
    how = choice(draw, ("grad", "value_and_grad", "jvp", "vjp", "hvp"))
    inside = replace(
        place,
        logs=False,
        derived=True,
        forward=place.forward or how in ("jvp", "hvp"),
        writes=place.writes and not place.batched,
    )
    return Derive(how, draw(_index), tuple(draw(_OTHERS)), draw(_body(inside)))


@st.composite
def _statements(draw: st.DrawFn, place: Place, most: int = 2) -> tuple[Statement, ...]:
    return tuple(draw(_statement(place)) for _ in range(draw(st.integers(1, most))))


@st.composite
def _body(draw: st.DrawFn, place: Place, most: int = 2) -> tuple[Statement, ...]:
    """Statements that leave every queue as full as before, and the accumulator with as many gradients."""
    before = list(place.held)
    statements = list(draw(_statements(place, most)))
    *_, gradients = place.held
    if gradients > before[-1]:
        statements.append(TakeSum(gradients))
        gradients = 0
    if gradients < before[-1]:
        statements.append(Apply(0, before[-1] - gradients, 0))
    for queue, (now, then) in enumerate(zip(place.held[:-1], before[:-1], strict=True)):
        if now > then:
            statements.append(Take(queue, now - then, "one by one"))
        elif now < then:
            statements.append(Put(queue, queue, then - now, True))
    place.held[:] = before
    return tuple(statements)


@st.composite
def programs(
    draw: st.DrawFn,
    devices: Sequence[str] = (),
    most: int = 5,
    *,
    host_state: str = "none",
    logs: bool = False,
) -> Program:
    """Programs over one to three variables that may run any number of times; parts of them are in scopes of `devices`.

    With `host_state`, "some" or "mostly", they use up to two queues and possibly an accumulator; with `logs`, some
    print values.
    """
    types = tuple(draw(_SOME_TYPES))
    mostly = host_state == "mostly"
    kinds: tuple[QueueKind, ...] = ()
    if host_state != "none":
        kinds = tuple(draw(st.lists(st.sampled_from(QueueKind), min_size=int(mostly), max_size=2)))
    accumulates = mostly or (host_state == "some" and draw(st.booleans()))
    place = Place(
        devices=tuple(devices),
        queues=kinds,
        held=[*[FULL] * len(kinds), 0],
        accumulates=accumulates,
        mostly_host_state=mostly,
        logs=logs,
    )
    return Program(types, draw(_body(place, most)), kinds, accumulates)
