"""Measure saving and restoring the state of a program, and the delay of steps by a save.

A few large arrays and many small ones, by `dflow.save` and `dflow.restore`, by `numpy.save` and `numpy.load` (a file
per array, flushed to the disk, no checksum), by Orbax with its defaults, and raw: the same bytes into one file,
flushed, and from it into one buffer. Each save replaces the previous one. The alternatives run in random order in each
round. Then a thread trains on the same state while another saves it: the times of its steps with and without a save.
Last, a loop trains in windows of some seconds, with a `dflow.CheckpointManager` that saves once, and without: the time
of training that a save takes away. The slowdown at an interval is this time divided by the interval. `--only cluster`
saves from a cluster of 2 ps tasks and restores onto 2, 1 and 3 ps tasks, each a process of this machine.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
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
from benchmarks._cluster import running_tasks
from benchmarks._launched import ROOT
from benchmarks._paired import in_turn, median_ratio, options, publish
from benchmarks.null_step import found_in

LARGE, SMALL = 4, 100
#: The actions on a cluster, each with its number of ps tasks; the first one saves.
CLUSTERS = (("save", 2), ("restore", 2), ("restore", 1), ("restore", 3))
RUN_S = 900.0
#: Most cores that other processes may use in a window that counts.
OTHERS = 0.15


def main() -> None:
    given = options(__doc__, rounds=5, mib=256, seconds=3, only=("all", "manager", "cluster"))
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
            publish("checkpoint", rows, as_json=given.json)
            publish("checkpoint_while_training", held_up(state, folder, given.rounds), as_json=given.json)
        if given.only in ("all", "manager"):
            publish("checkpoint_by_manager", managed(state, folder, given.rounds, given.seconds), as_json=given.json)
        if given.only in ("all", "cluster"):
            publish("checkpoint_on_a_cluster", on_clusters(folder, given.mib, given.rounds), as_json=given.json)
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


def managed(state: Any, folder: Path, rounds: int, window_s: float) -> list[dict[str, Any]]:
    """Measure the training time that a save by a manager takes: steps done in windows with one save and without.

    A window in which other processes use the cores does not count.
    """
    step = updates(state)

    def window(saves: bool) -> tuple[list[float], float, bool]:
        """Return the times of the steps, that of the save, and whether the machine was quiet."""
        place, times = Path(tempfile.mkdtemp(dir=folder)), list[float]()
        with dflow.CheckpointManager(place, state, every=timedelta(seconds=window_s / 3), keep=1) as manager:
            busy_s, own_s, ends_s = processor_s(), time.process_time(), time.perf_counter() + window_s
            has_begun = False
            while (started := time.perf_counter()) < ends_s:
                jax.block_until_ready(step())
                has_begun = has_begun or (saves and manager.step(0))
                times.append(time.perf_counter() - started)
            manager.wait()
            others_s = processor_s() - busy_s - (time.process_time() - own_s)
            took_s = manager._record.save_s[-1] if has_begun else 0.0
        shutil.rmtree(place)
        return times, took_s, others_s < OTHERS * window_s

    ways = {"alone": lambda: window(False), "with a save": lambda: window(True)}
    found = {name: [one for one in all if one[2]] for name, all in in_turn(ways, rounds).items()}
    if not all(found.values()):
        return [{"steps": "none: other processes use the machine"}]
    rate = statistics.median(len(times) / window_s for times, *_ in found["alone"])
    made = []
    for name, windows in found.items():
        lost = sorted(window_s - len(times) / rate for times, *_ in windows)
        row: dict[str, Any] = {"steps": name, "quiet windows": len(windows)}
        row["median ms"] = statistics.median(statistics.median(times) for times, *_ in windows) * 1e3
        row["longest ms (median)"] = statistics.median(max(times) for times, *_ in windows) * 1e3
        row |= {"lost s": statistics.median(lost), "p10": lost[len(lost) // 10], "p90": lost[-1 - len(lost) // 10]}
        made.append(row | {"a save takes s": statistics.median(took for _, took, _ in windows)})
    return made


def on_clusters(folder: Path, mib: int, rounds: int) -> list[dict[str, Any]]:
    """Save the state of a cluster, and restore it onto clusters of as many, fewer and more ps tasks."""
    rows = []
    for what, ps in CLUSTERS:
        words = ["--what", what, "--path", str(folder / "cluster"), "--mib", str(mib), "--rounds", str(rounds)]
        script = [sys.executable, str(ROOT / "benchmarks" / "_checkpoint_worker.py"), *words]
        with running_tasks(ps, 1) as tasks:
            ran = subprocess.run(
                script, env=tasks.worker(0), capture_output=True, text=True, timeout=RUN_S, check=False
            )
        rates = sorted(mib / 1e3 * 1.048576 / took for took in found_in(ran.stdout, "times ", ran.stdout + ran.stderr))
        row: dict[str, Any] = {"what": what, "ps tasks": ps, "GB/s": statistics.median(rates)}
        rows.append(row | {"p10": rates[len(rates) // 10], "p90": rates[-1 - len(rates) // 10]})
    return rows


def processor_s() -> float:
    """Return the time that all processes of the machine have used its cores, in s."""
    used = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(used) - used[3] - used[4]) / os.sysconf("SC_CLK_TCK")


def train(step: Callable[[], Any], done: threading.Event, times: list[float]) -> None:
    while not done.is_set():
        times.append(timed(lambda: jax.block_until_ready(step()))[0])


if __name__ == "__main__":
    main()
