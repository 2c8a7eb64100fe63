"""Fewer garbage collections while a function is traced."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import jax.numpy as jnp
import pytest

import dflow
from dflow.tracing.rare_collections import YOUNG_OBJECTS, rare_collections

USUAL = (700, 10, 10)


@pytest.fixture(autouse=True)
def usual_thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(*USUAL)
    yield
    gc.set_threshold(*before)


def test_thresholds_are_put_back_by_the_last_to_leave_also_after_an_error() -> None:
    with rare_collections():
        with pytest.raises(ZeroDivisionError), rare_collections():
            assert gc.get_threshold()[0] / 0
        assert gc.get_threshold()[0] == YOUNG_OBJECTS
    assert gc.get_threshold() == USUAL


def test_threads_share_the_thresholds() -> None:
    with ExitStack() as here, ThreadPoolExecutor(1) as other:
        there = ExitStack()
        here.enter_context(rare_collections())
        other.submit(there.enter_context, rare_collections()).result()
        here.close()
        assert gc.get_threshold()[0] == YOUNG_OBJECTS
        other.submit(there.close).result()
        assert gc.get_threshold() == USUAL


@pytest.mark.parametrize("own", [(0, 10, 10), (2 * YOUNG_OBJECTS, 5, 5)])
def test_a_collector_that_is_off_or_rarer_stays_so(own: tuple[int, int, int]) -> None:
    gc.set_threshold(*own)
    with rare_collections():
        assert gc.get_threshold() == own
    assert gc.get_threshold() == own


def test_what_the_user_sets_inside_stays() -> None:
    with rare_collections():
        gc.set_threshold(50, 4, 3)
    assert gc.get_threshold() == (50, 4, 3)


def test_a_first_call_collects_rarely_and_later_calls_as_before() -> None:
    variable = dflow.Variable(1.0, name="scale")
    seen = []

    @dflow.jit
    def step(x: Any) -> Any:
        seen.append(gc.get_threshold()[0])
        return x * variable

    step(jnp.float32(2))
    assert seen[0] == YOUNG_OBJECTS
    assert gc.get_threshold() == USUAL
