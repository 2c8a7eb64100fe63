"""Errors in the user's program: their types, their messages, the user's frames in the traceback."""

from __future__ import annotations

import traceback
from typing import Any

import jax
import jax.numpy as jnp

from tests.dflow.jit_surface.comparison import Program, same_as_jax_jit


class OwnError(Exception):
    """An exception class of the user's."""


def raises(x: Any) -> Any:
    return raises_inside(x)


def raises_inside(x: Any) -> Any:
    raise OwnError("an error of mine", 3)


def raises_with_a_note(x: Any) -> Any:
    error = OwnError("an error of mine")
    error.add_note("with a note")
    raise error


def raises_from(x: Any) -> Any:
    try:
        raise KeyError("the cause")
    except KeyError as cause:
        raise OwnError("an error of mine") from cause


def chain(jit: Any, fn: Any) -> Any:
    """Return the chain of causes of the error."""
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


def a_leaked_tracer(jit: Any) -> Any:
    kept: list[Any] = []
    jit(lambda x: (kept.append(x), x)[1])(1.0)
    return kept[0] + 1


def a_leaked_tracer_as_argument(jit: Any) -> Any:
    kept: list[Any] = []
    jit(lambda x: (kept.append(x), x)[1])(1.0)
    return jit(lambda x: x + 1)(kept[0])


def a_leaked_tracer_in_a_closure(jit: Any) -> Any:
    kept: list[Any] = []
    jit(lambda x: (kept.append(x), x)[1])(1.0)
    return jit(lambda x: x + kept[0])(1.0)


def a_leak_from_a_loop(jit: Any) -> Any:
    kept: list[Any] = []

    def body(_: Any, x: Any) -> Any:
        kept.append(x)
        return x + 1

    def fn(x: Any) -> Any:
        jax.lax.fori_loop(0, 2, body, x)
        return kept[0]

    return jit(fn)(1.0)


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
    "an error with a note": lambda jit: jit(raises_with_a_note)(1.0),
    "an error from another": lambda jit: chain(jit, raises_from),
    "an error has no context of the library": lambda jit: chain(jit, raises),
    "the last frames are the user's": last_frames,
    "an error from a nested jit": lambda jit: jit(lambda x: jit(raises)(x))(1.0),
    "an error under grad": lambda jit: jax.grad(jit(raises))(1.0),
    "an error the first time": raises_once,
    "an interrupt": lambda jit: exits(jit, KeyboardInterrupt),
    "a bool of a tracer": lambda jit: jit(lambda x: 1 if x > 0 else 2)(1.0),
    "float of a tracer": lambda jit: jit(float)(1.0),
    "an index of a tracer": lambda jit: jit(lambda i: [1, 2][i])(1),
    "hash of a tracer": lambda jit: jit(lambda x: hash(x))(1.0),
    "a boolean mask": lambda jit: jit(lambda x: x[x > 0])(jnp.ones(2)),
    "shapes that differ": lambda jit: jit(lambda x, y: x + y)(jnp.ones(3), jnp.ones(4)),
    "cond with branches that differ": lambda jit: jit(lambda x: jax.lax.cond(x > 0, lambda: 1, lambda: 1.0))(1.0),
    "a leaked tracer": a_leaked_tracer,
    "a leaked tracer as an argument": a_leaked_tracer_as_argument,
    "a leaked tracer in a closure": a_leaked_tracer_in_a_closure,
    "a leak from a loop": a_leak_from_a_loop,
    "a callback that raises": lambda jit: _callback_raises(jit),
    "no such option": lambda jit: jit(lambda x: x, static_arguments=1),
    "an option of None": lambda jit: jit(lambda x: x, static_argnums=None, donate_argnums=None, backend=None)(1.0),
    "a positional option": lambda jit: jit(lambda x: x, None),
    "not callable": lambda jit: jit(3),
    "None with options": lambda jit: jit(None, static_argnums=0)(lambda n: n)(3),
    "a backend that is none": lambda jit: jit(lambda x: x, backend="abacus")(1.0),
}


def _callback_raises(jit: Any) -> Any:
    def fails(x: Any) -> Any:
        raise OwnError("in a callback")

    try:
        f = jit(lambda x: jax.pure_callback(fails, jax.ShapeDtypeStruct((), "float32"), x))
        return jax.block_until_ready(f(1.0))
    except Exception as error:
        return type(error).__name__, "in a callback" in str(error)


WITHOUT_STATE = ("a leaked tracer as an argument", "a leaked tracer in a closure", "a leak from a loop")

test_the_same_as_jax_jit = same_as_jax_jit(PROGRAMS, only_without_state=WITHOUT_STATE)
