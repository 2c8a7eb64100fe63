"""Compare a program under `jax.jit` and `dflow.jit`: results, errors, warnings and the user's frames must be equal.

A program takes the `jit` to use. It runs twice with the same compiled functions, since a first and a second call take
different paths. With `dflow.jit` it runs again with a variable read added to each function: the results must not
change.
"""

from __future__ import annotations

import functools
import re
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import dflow

Program = Callable[[Any], Any]

#: Placeholders for parts that always differ between two runs: addresses, and lines of files.
_ACCIDENTS = ((r"0x[0-9a-f]+", "0x"), (r"[\w./<>-]+\.py:\d+(:\d+)?", "FILE"), (r"\bline \d+", "line"))


STATE = dflow.Variable(1.0, name="state")


@dataclass(frozen=True)
class Seen:
    """Observations of one run. The values of results are separate, since they are compared up to rounding."""

    outcome: Any
    values: tuple[Any, ...]
    warned: tuple[Any, ...]


def with_state(fn: Any = None, **options: Any) -> Any:
    """`dflow.jit` of the function with a variable read added."""
    if fn is None:
        return lambda function: with_state(function, **options)
    if not callable(fn):
        return dflow.jit(fn, **options)

    @functools.wraps(fn)
    def reads_too(*args: Any, **kwargs: Any) -> Any:
        STATE.read()
        return fn(*args, **kwargs)

    return dflow.jit(reads_too, **options)


WAYS = {"without state": dflow.jit, "with state": with_state}


def same_as_jax_jit(programs: dict[str, Program], *, only_without_state: tuple[str, ...] = ()) -> Any:
    """Make a test of each program, with and without state."""
    pairs = [(name, way) for name in programs for way in WAYS if name not in only_without_state or way != "with state"]

    @pytest.mark.parametrize(("name", "way"), pairs, ids=[f"{name}, {way}" for name, way in pairs])
    def test(name: str, way: str) -> None:
        expected = seen_twice(programs[name], jax.jit)
        actual = seen_twice(programs[name], WAYS[way])
        for call, by_jax, by_dflow in zip(("first", "second"), expected, actual, strict=True):
            assert (call, by_dflow.outcome) == (call, by_jax.outcome)
            assert (call, *dict.fromkeys(by_dflow.warned)) == (call, *dict.fromkeys(by_jax.warned))
            for left, right in zip(by_dflow.values, by_jax.values, strict=True):
                np.testing.assert_allclose(left, right, rtol=1e-5, err_msg=f"{call} run")

    return test


def seen_twice(program: Program, jit: Any) -> tuple[Seen, Seen]:
    """Return the observations of a first run, and of a second with the same compiled functions."""
    made: list[Any] = []
    return seen(program, _making(jit, made, 0)), seen(program, _making(jit, made, 1))


def _making(jit: Any, made: list[Any], run: int) -> Any:
    numbers = iter(range(1_000_000))

    def make(fn: Any = None, **options: Any) -> Any:
        if fn is None:
            return lambda function: make(function, **options)
        number = next(numbers)
        if run == 0 or number >= len(made):
            made.append(jit(fn, **options))
            if hasattr(made[-1], "clear_cache"):
                made[-1].clear_cache()  # of the other `jit`: both share the traces and programs of one function
            return made[-1]
        return made[number]

    return make


def seen(program: Program, jit: Any) -> Seen:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            leaves, tree = jax.tree_util.tree_flatten(program(jit))
            values = tuple(_value(leaf) for leaf in leaves)
            outcome: Any = (_plain(str(tree)), tuple(_kind(leaf) for leaf in leaves))
        except Exception as error:
            values, outcome = (), _described(error)
    # JAX does not report a kept value before it is used; tests/dflow/calls/test_memory.py tests dflow's report.
    said = [warning for warning in caught if warning.category is not dflow.LeakedTracerWarning]
    return Seen(outcome, values, tuple((warning.category.__name__, _plain(str(warning.message))) for warning in said))


def _kind(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        is_array = isinstance(leaf, (np.ndarray, np.generic))
        return (type(leaf).__name__, leaf.dtype.name, leaf.shape) if is_array else _plain(repr(leaf))
    if leaf.is_deleted():
        return "deleted"
    return str(leaf.aval), leaf.weak_type, leaf.committed, str(leaf.sharding)


def _value(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        if leaf.is_deleted():
            return 0
        return np.asarray(jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)
    return leaf if isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype != jax.dtypes.float0 else 0


def _described(error: BaseException) -> Any:
    here, own = str(Path(__file__).parent), __file__
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(here)]
    # Without duplicates: an error that JAX raises again from a cache has the frames of each raise.
    users = tuple(dict.fromkeys(frame.name for frame in frames if frame.filename != own))
    # dflow adds notes to JAX's, which begin with the user's line and have the remedy.
    notes = [
        note
        for note in getattr(error, "__notes__", ())
        if "JAX_TRACEBACK_FILTERING" not in note and not note.startswith("  at ")
    ]
    return type(error).__name__, _plain(str(error)), users, tuple(map(_plain, notes))


def _plain(words: str) -> str:
    for accident, instead in _ACCIDENTS:
        words = re.sub(accident, instead, words)
    return words
