"""Work that a thread does itself: in order, never nested, complete."""

from __future__ import annotations

import sys

import pytest

from dflow.distributed.steps.plan_runs import run_soon


def test_work_is_done_on_return_and_what_it_brings_after_it() -> None:
    done: list[str] = []

    def outer() -> None:
        run_soon(lambda: done.append("inner"))
        done.append("outer")

    run_soon(outer)
    assert done == ["outer", "inner"]


def test_a_long_chain_takes_no_stack() -> None:
    left = 10 * sys.getrecursionlimit()

    def link() -> None:
        nonlocal left
        left -= 1
        if left:
            run_soon(link)

    run_soon(link)
    assert left == 0


def test_an_error_of_one_call_does_not_keep_the_others_from_being_done() -> None:
    done: list[str] = []

    def fail() -> None:
        run_soon(lambda: done.append("after"))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_soon(fail)
    run_soon(lambda: done.append("later"))
    assert done == ["after", "later"]
