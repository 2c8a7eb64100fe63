"""Measure calls per second of a function with state that 1, 2 and 8 threads of one process call.

All threads call a network of small dense layers, whose weights are one variable or ten; each thread increments its own
variable; all threads increment one. Beside each: `jax.jit` of the same function. There the values that are read are
arguments, and the value that is written is a donated argument, kept in a list: one list for each thread, or one list
under a lock. `us` is the processor time of a call.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import dflow
from benchmarks._paired import in_turn, median_ratio, options, publish

THREADS = (1, 2, 8)
#: Calls per round, of all threads together.
CALLS = 8000
#: Longest time of a round, in s.
DEADLINE_S = 300.0
#: Rows of the input, and its columns.
ROWS, WIDTH = 8, 64

#: Returns the function that each of this number of threads calls.
Way = Callable[[int], Sequence[Callable[[], Any]]]


def main() -> None:
    given = options(__doc__, rounds=9)
    cases = {
        "read 1 variable": (read_by_dflow(1), read_by_jax(1)),
        "read 10 variables": (read_by_dflow(10), read_by_jax(10)),
        "write own variable": (write_own_by_dflow, write_own_by_jax),
        "write one variable": (write_one_by_dflow, write_one_by_jax),
    }
    rows = [row(name, *ways, threads, given.rounds) for name, ways in cases.items() for threads in THREADS]
    publish("threads", rows, as_json=given.json)


def row(name: str, by_dflow: Way, by_jax: Way, threads: int, rounds: int) -> dict[str, Any]:
    ways = {"dflow": by_dflow(threads), "jax": by_jax(threads)}
    for calls in ways.values():
        timed(calls, 50 * threads)
    found = in_turn({way: partial(timed, calls, CALLS) for way, calls in ways.items()}, rounds)
    walls, processor = ({way: [each[part] for each in found[way]] for way in ways} for part in (0, 1))
    ratio, low, high = median_ratio(walls["jax"], walls["dflow"])
    rates = {f"{way} calls/s": 1 / statistics.median(times) for way, times in walls.items()}
    costs = {f"{way} us": statistics.median(times) * 1e6 for way, times in processor.items()}
    return {"step": name, "threads": threads, **rates, "dflow / jax": ratio, "p10": low, "p90": high, **costs}


def timed(calls: Sequence[Callable[[], Any]], count: int) -> tuple[float, float]:
    """Return the wall time and the processor time of one of `count` calls, which one thread for each function makes."""
    begin = threading.Barrier(len(calls) + 1)
    each = count // len(calls)

    def work(call: Callable[[], Any]) -> None:
        begin.wait(DEADLINE_S)
        for _ in range(each):
            call()

    threads = [threading.Thread(target=work, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    begin.wait(DEADLINE_S)
    wall, processor = time.perf_counter(), time.process_time()
    for thread in threads:
        thread.join(DEADLINE_S)
    done = each * len(calls)
    return (time.perf_counter() - wall) / done, (time.process_time() - processor) / done


def network(weights: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return x


def read_by_dflow(size: int) -> Way:
    variables = [dflow.Variable(jnp.full((WIDTH, WIDTH), 0.1)) for _ in range(size)]
    step = dflow.jit(lambda x: network([variable.read() for variable in variables], x))
    x = jnp.ones((ROWS, WIDTH))
    return lambda threads: [lambda: step(x)] * threads


def read_by_jax(size: int) -> Way:
    values = [jnp.full((WIDTH, WIDTH), 0.1) for _ in range(size)]
    step = jax.jit(network)
    x = jnp.ones((ROWS, WIDTH))
    return lambda threads: [lambda: step(values, x)] * threads


def write_own_by_dflow(threads: int) -> Sequence[Callable[[], Any]]:
    return [write_one_by_dflow(1)[0] for _ in range(threads)]


def write_own_by_jax(threads: int) -> Sequence[Callable[[], Any]]:
    step = jax.jit(lambda value, x: value + x, donate_argnums=0)
    x = jnp.ones(4)

    def of_one_thread() -> Callable[[], Any]:
        held = [jnp.zeros(4)]

        def call() -> None:
            held[0] = step(held[0], x)

        return call

    return [of_one_thread() for _ in range(threads)]


def write_one_by_dflow(threads: int) -> Sequence[Callable[[], Any]]:
    variable, x = dflow.Variable(jnp.zeros(4)), jnp.ones(4)
    step = dflow.jit(variable.assign_add)
    return [lambda: step(x)] * threads


def write_one_by_jax(threads: int) -> Sequence[Callable[[], Any]]:
    (call,), lock = write_own_by_jax(1), threading.Lock()

    def locked() -> None:
        with lock:
            call()

    return [locked] * threads


if __name__ == "__main__":
    main()
