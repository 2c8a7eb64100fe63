"""Errors in the user's program: their types, their messages, the user's frames in the traceback."""

from __future__ import annotations

import traceback
from typing import Any

from tests.dflow.jit_surface.comparison import Program, same_as_jax_jit


class OwnError(Exception):
    """An exception class of the user's."""


def raises(x: Any) -> Any:
    return raises_inside(x)


def raises_inside(x: Any) -> Any:
    raise OwnError("an error of mine", 3)


def chain(jit: Any, fn: Any) -> Any:
    try:
        jit(fn)(1.0)
    except Exception as error:
        behind, kinds = error, []
        while behind is not None:
            kinds.append(type(behind).__name__)
            behind = behind.__cause__ or (None if behind.__suppress_context__ else behind.__context__)
        return [kind for kind in kinds if kind != "SimplifiedTraceback"]


def last_frames(jit: Any) -> Any:
    """Return the names of the last frames, and whether any of them is a library's."""
    try:
        jit(raises)(1.0)
    except OwnError as error:
        return [frame.name for frame in traceback.extract_tb(error.__traceback__)][-2:]


def raises_once(jit: Any) -> Any:
    """Return a function whose first trace fails and whose second succeeds."""
    calls: list[int] = []

    def fn(x: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise OwnError("the first time")
        return x * 2

    f = jit(fn)
    outcomes = []
    for _ in range(3):
        try:
            outcomes.append(f(2.0))
        except OwnError as error:
            outcomes.append(str(error))
    return outcomes, len(calls)


def a_leaked_tracer_as_argument(jit: Any) -> Any:
    kept: list[Any] = []
    jit(lambda x: (kept.append(x), x)[1])(1.0)
    return jit(lambda x: x + 1)(kept[0])


def a_leaked_tracer_in_a_closure(jit: Any) -> Any:
    kept: list[Any] = []
    jit(lambda x: (kept.append(x), x)[1])(1.0)
    return jit(lambda x: x + kept[0])(1.0)


def exits(jit: Any, error: type[BaseException]) -> Any:
    """Exceptions that are not an `Exception` pass through."""

    def fn(x: Any) -> Any:
        raise error("stop")

    f = jit(fn)
    seen = []
    for _ in range(2):
        try:
            f(1.0)
        except BaseException as caught:
            seen.append((type(caught).__name__, str(caught)))
    return seen


PROGRAMS: dict[str, Program] = {
    "an error of one's own": lambda jit: jit(raises)(1.0),
    "an error has no context of the library": lambda jit: chain(jit, raises),
    "the last frames are the user's": last_frames,
    "an error the first time": raises_once,
    "an interrupt": lambda jit: exits(jit, KeyboardInterrupt),
    "a bool of a tracer": lambda jit: jit(lambda x: 1 if x > 0 else 2)(1.0),
    "a leaked tracer as an argument": a_leaked_tracer_as_argument,
    "a leaked tracer in a closure": a_leaked_tracer_in_a_closure,
    "no such option": lambda jit: jit(lambda x: x, static_arguments=1),
    "not callable": lambda jit: jit(3),
    "a backend that is none": lambda jit: jit(lambda x: x, backend="abacus")(1.0),
}


WITHOUT_STATE = ("a leaked tracer as an argument", "a leaked tracer in a closure")

test_the_same_as_jax_jit = same_as_jax_jit(PROGRAMS, only_without_state=WITHOUT_STATE)
