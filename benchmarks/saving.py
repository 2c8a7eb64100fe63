"""Measure saving and restoring the state of a program, and the delay of steps by a save.

A few large arrays and many small ones, by `dflow.save` and `dflow.restore`, by `numpy.save` and `numpy.load` (a file
per array, flushed to the disk, no checksum), by Orbax with its defaults, and raw: the same bytes into one file,
flushed, and from it into one buffer. Each save replaces the previous one. The alternatives run in random order in each
round. Then a thread trains on the same state while another saves it: the times of its steps with and without a save.
Last, a loop trains with a `dflow.CheckpointManager` that saves at an interval, and without: the steps done in the same
time, and the time of training that each save takes away.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint

import dflow
from benchmarks._paired import in_turn, median_ratio, options, publish

LARGE, SMALL = 4, 100


def main() -> None:
    given = options(__doc__, rounds=5, mib=256, interval=5, saves=2, only=("all", "manager"))
    side = int((given.mib * 2**20 / 4 / LARGE) ** 0.5)
    state = dflow.variables(
        {
            "large": [jax.random.normal(jax.random.key(number), (side, side)) for number in range(LARGE)],
            "small": [jnp.full(64, float(number)) for number in range(SMALL)],
        }
    )
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(dflow.read(state)))
    folder = Path(tempfile.mkdtemp())
    try:
        if given.only == "all":
            rows = [
                *row("save", saves(state, folder), given.rounds, size),
                *row("restore", restores(state, folder), given.rounds, size),
            ]
            publish("saving", rows, as_json=given.json)
            publish("saving_while_training", held_up(state, folder, given.rounds), as_json=given.json)
        found = managed(state, folder, given.rounds, interval_s=given.interval, count=given.saves)
        publish("saving_by_manager", found, as_json=given.json)
    finally:
        shutil.rmtree(folder)


def row(name: str, ways: dict[str, Callable[[], Any]], rounds: int, size: int) -> list[dict[str, Any]]:
    for way in ways.values():
        way()
    found = in_turn({way: lambda fn=fn: timed(fn) for way, fn in ways.items()}, rounds)
    made = []
    for way, taken in found.items():
        ratio, low, high = median_ratio([took for took, _ in found["dflow"]], [took for took, _ in taken])
        row = {"what": name, "by": way, "GB/s": size / statistics.median(took for took, _ in taken) / 1e9}
        row |= {"processor ms": statistics.median(own for _, own in taken) * 1e3}
        made.append(row | {"dflow's time / its": ratio, "p10": low, "p90": high})
    return made


def timed(fn: Callable[[], Any]) -> tuple[float, float]:
    """Return the wall time and the processor time of a call, in s."""
    started, own = time.perf_counter(), time.process_time()
    fn()
    return time.perf_counter() - started, time.process_time() - own


def saves(state: Any, folder: Path) -> dict[str, Callable[[], Any]]:
    checkpointer = orbax.checkpoint.PyTreeCheckpointer()

    def by_numpy() -> None:
        (folder / "numpy").mkdir(exist_ok=True)
        for number, leaf in enumerate(jax.tree.leaves(dflow.read(state))):
            with open(folder / "numpy" / f"{number}.npy", "wb") as file:
                np.save(file, leaf)
                file.flush()
                os.fsync(file.fileno())

    def raw() -> None:
        with open(folder / "raw", "wb", buffering=0) as file:
            for leaf in jax.tree.leaves(dflow.read(state)):
                file.write(np.asarray(leaf).reshape(-1).view(np.uint8).data)
            os.fsync(file.fileno())

    return {
        "dflow": lambda: dflow.save(folder / "dflow", state, overwrite=True),
        "raw": raw,
        "numpy": by_numpy,
        "orbax": lambda: checkpointer.save(folder / "orbax", dflow.read(state), force=True),
    }


def restores(state: Any, folder: Path) -> dict[str, Callable[[], Any]]:
    checkpointer = orbax.checkpoint.PyTreeCheckpointer()
    count = LARGE + SMALL
    firsts = dflow.jit(lambda: [leaf.read().ravel()[0] for leaf in state["large"]])

    def by_dflow() -> None:
        dflow.restore(folder / "dflow", state)
        jax.block_until_ready(firsts())

    def by_numpy() -> None:
        arrays = [jnp.array(np.load(folder / "numpy" / f"{number}.npy")) for number in range(count)]
        jax.block_until_ready(arrays)

    return {
        "dflow": by_dflow,
        "raw": lambda: np.fromfile(folder / "raw", np.uint8),
        "numpy": by_numpy,
        "orbax": lambda: jax.block_until_ready(checkpointer.restore(folder / "orbax")),
    }


def held_up(state: Any, folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Measure the steps of a thread, without a save and while another thread saves once."""
    step = updates(state)
    found: dict[str, list[float]] = {"alone": [], "while saved": []}
    longest: dict[str, list[float]] = {"alone": [], "while saved": []}
    for _ in range(rounds):
        for name, other in {"alone": lambda: time.sleep(1.0), "while saved": saves(state, folder)["dflow"]}.items():
            done, times = threading.Event(), list[float]()
            thread = threading.Thread(target=train, args=(step, done, times))
            thread.start()
            other()
            done.set()
            thread.join()
            found[name].append(statistics.median(times))
            longest[name].append(max(times))
    return [
        {
            "steps": name,
            "median ms": statistics.median(found[name]) * 1e3,
            "longest ms (median of rounds)": statistics.median(longest[name]) * 1e3,
            "median / alone": median_ratio(found[name], found["alone"])[0],
            "longest / alone": median_ratio(longest[name], longest["alone"])[0],
        }
        for name in found
    ]


def updates(state: Any) -> Callable[[], jax.Array]:
    """Return a compiled step that writes all large variables."""

    @dflow.jit
    def step() -> jax.Array:
        for variable in state["large"]:
            variable.assign(variable * 0.999)
        first: jax.Array = state["large"][0][0, 0]
        return first

    jax.block_until_ready(step())
    return step


def managed(state: Any, folder: Path, rounds: int, *, interval_s: float, count: int) -> list[dict[str, Any]]:
    """Measure a loop of steps with a manager that saves `count` times, once per `interval_s`, and without one."""
    step, long_s = updates(state), interval_s * (count + 0.5)

    def steps(manager: dflow.CheckpointManager | None) -> list[float]:
        times: list[float] = []
        ends_s, number = time.perf_counter() + long_s, 0
        while time.perf_counter() < ends_s:
            started = time.perf_counter()
            jax.block_until_ready(step())
            if manager is not None:
                manager.step(number)
            times.append(time.perf_counter() - started)
            number += 1
        return times

    def with_manager() -> list[float]:
        place = Path(tempfile.mkdtemp(dir=folder))
        with dflow.CheckpointManager(place, state, every=timedelta(seconds=interval_s), keep=1) as manager:
            times = steps(manager)
            manager.wait()
            assert len(manager.checkpoints) == 1
            saved.extend(manager._record.save_s)
        shutil.rmtree(place)
        return times

    saved: list[float] = []
    found = in_turn({"alone": lambda: steps(None), "with a manager": with_manager}, rounds)
    alone = [len(times) for times in found["alone"]]
    made = []
    for name, all_times in found.items():
        ratio, low, high = median_ratio(alone, [len(times) for times in all_times])
        made.append(
            {
                "steps": name,
                "median ms": statistics.median(statistics.median(times) for times in all_times) * 1e3,
                "longest ms (median of rounds)": statistics.median(map(max, all_times)) * 1e3,
                "time per step / alone": ratio,
                "p10": low,
                "p90": high,
                "a save, s": statistics.median(saved) if name != "alone" else 0.0,
                "lost per save, s": (1 - 1 / ratio) * long_s / count,
                "every, s": float(interval_s),
            }
        )
    return made


def train(step: Callable[[], Any], done: threading.Event, times: list[float]) -> None:
    while not done.is_set():
        times.append(timed(lambda: jax.block_until_ready(step()))[0])


if __name__ == "__main__":
    main()
