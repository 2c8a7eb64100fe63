"""Measure the host's part of queues and loops: a pair of eager queue ops, and an iteration of a loop that waits.

Each is compared with the same by hand: Python's `queue.Queue` for the queue, a Python `for` for the loop, and a
function compiled by `jax.jit` for the arithmetic and the copy of an element. An element is one number, so that only the
host's work is measured. *Carried* is a loop whose iterations need the previous result, *apart* one whose iterations do
not. Times are processor times of all threads.
"""

from __future__ import annotations

import queue as by_hand
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

import dflow
from benchmarks._paired import in_turn, median_ratio, options, publish

ONE = jnp.float32(1)


def main() -> None:
    given = options(__doc__, rounds=15, turns=500)
    rows = []
    for name, dflows, hands in (
        ("eager enqueue and dequeue", pairs_by_dflow(), pairs_by_hand()),
        ("a turn, carried", loop_by_dflow(carried=True), loop_by_hand()),
        ("a turn, apart", loop_by_dflow(carried=False), loop_by_hand()),
    ):
        for way in (dflows, hands):
            way(given.turns)
        found = in_turn(
            {"dflow": partial(timed, dflows, given.turns), "hand": partial(timed, hands, given.turns)}, given.rounds
        )
        ratio, low, high = median_ratio(found["dflow"], found["hand"])
        figures = {f"{way} us": 1e6 * median(found[way]) for way in found}
        rows.append({"what": name, **figures, "ratio": ratio, "p10": low, "p90": high})
    publish("host_loop", rows, as_json=given.json)


def timed(way: Callable[[int], Any], turns: int) -> float:
    """Return the processor time of an iteration, in s."""
    started = time.process_time()
    jax.block_until_ready(way(turns))
    return (time.process_time() - started) / turns


def pairs_by_dflow() -> Callable[[int], Any]:
    queue = dflow.FIFOQueue(4, ONE)

    def run(turns: int) -> Any:
        taken = ONE
        for _ in range(turns):
            queue.enqueue(taken)
            taken = queue.dequeue()
        return taken

    return run


def pairs_by_hand() -> Callable[[int], Any]:
    queue: by_hand.Queue[Any] = by_hand.Queue(4)
    copy = jax.jit(jnp.copy)

    def run(turns: int) -> Any:
        taken = ONE
        for _ in range(turns):
            queue.put(copy(taken), timeout=60)
            taken = queue.get(timeout=60)
        return taken

    return run


def loop_by_dflow(*, carried: bool) -> Callable[[int], Any]:
    queue = dflow.FIFOQueue(4, ONE)

    def turn(total: Any, _: None) -> Any:
        queue.enqueue(total if carried else ONE)
        return queue.dequeue() + 1, None

    loops: dict[int, Any] = {}

    def run(turns: int) -> Any:
        if turns not in loops:
            loops[turns] = dflow.jit(lambda: jax.lax.scan(turn, ONE, None, length=turns)[0])
        return loops[turns]()

    return run


def loop_by_hand() -> Callable[[int], Any]:
    queue: by_hand.Queue[Any] = by_hand.Queue(4)
    copy, add = jax.jit(jnp.copy), jax.jit(lambda x: x + 1)

    def run(turns: int) -> Any:
        total = ONE
        for _ in range(turns):
            queue.put(copy(total), timeout=60)
            total = add(queue.get(timeout=60))
        return total

    return run


if __name__ == "__main__":
    main()
