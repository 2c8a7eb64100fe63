"""The programs that train while faults come, and what must hold when each has ended."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

import dflow
from dflow.lowering.files.array_files import read_arrays
from dflow.tracing.moments import ROLES
from tests.chaos.programs.integer_model import states
from tests.chaos.schedule import COORDINATOR, GROUP_KINDS, MOST_ENDS, Hazards

ROOT = Path(__file__).parents[3]
#: Time that a batch takes to come, in s: training is long enough for faults, and leaves processor time to recovery.
BATCH_S = 0.01
WEIGHTS = "weights.npz"
#: Number of steps between two checkpoints of a group.
CHECKPOINT_EVERY = 20
#: Number of steps of worker 0 between two checkpoints of `saving.py`.
SAVE_EVERY = 30
#: Bound of the staleness: with three workers, one waits for the others again and again.
MAX_STALENESS = 2


#: Sources of elements and numbers that each go into one step of `elements.py`.
USED_ONCE = ("fifo", "shuffle", "priority", "padding", "numbers")


@dataclass(frozen=True)
class Program:
    """A script, its number of steps, its arguments, the check of its results, and the faults that may come.

    servers   number of parameter tasks; with a drawn schedule 2, or 0 without faults of "ps"
    is_group  whether the workers compute together and go on from checkpoints, all of them after the end of one
    """

    script: Path
    steps: int
    arguments: Callable[[int, Path], tuple[str, ...]]
    check: Callable[[int, Mapping[str, float], Path], Iterator[str]]
    hazards: Hazards = field(default_factory=Hazards)
    servers: int = 2
    is_group: bool = False


def _counters(steps: int, results: Mapping[str, float], folder: Path) -> Iterator[str]:
    if results != {"count 0": steps, "count 1": steps}:
        yield f"counters: expected {steps} on each task, got {results}"


def _bounded(steps: int, results: Mapping[str, float], folder: Path) -> Iterator[str]:
    missed = {name: value for name, value in results.items() if name.startswith("missed by ")}
    yield from _counters(steps, {name: value for name, value in results.items() if name not in missed}, folder)
    if not missed or max(missed.values()) > MAX_STALENESS:
        yield f"staleness: expected at most {MAX_STALENESS}, got {missed}"


def _elements(steps: int, results: Mapping[str, float], folder: Path) -> Iterator[str]:
    expected = dict.fromkeys([*(f"{name} once" for name in USED_ONCE), "gradients", "keys", "updates"], steps)
    expected |= {f"{name} more often": 0 for name in USED_ONCE}
    if results != expected:
        yield f"elements: expected {expected}, got {results}"


def _elements_of_rounds(steps: int, results: Mapping[str, float], folder: Path) -> Iterator[str]:
    # A worker that dies takes the element of its step along, which may have brought its number.
    twice = {results.get(f"{name} more often") for name in USED_ONCE}
    used = [results.get(name, 0) for name in (*(f"{name} once" for name in USED_ONCE), "keys")]
    is_exact = twice == {0} and results.get("updates") == steps
    if not is_exact or min(used) < steps or max(used) - min(used) > 3 * MOST_ENDS:
        yield f"elements: expected none twice in {steps} updates, got {results}"


def _model(steps: int, results: Mapping[str, float], folder: Path) -> Iterator[str]:
    if results != {"updates": steps}:
        yield f"updates: expected {steps}, got {results}"
    if not (folder / WEIGHTS).exists():
        yield "the weights were not written"
        return
    expected = _undisturbed(steps)
    with np.load(folder / WEIGHTS) as found:
        for name, value in found.items():
            if not np.array_equal(value, expected[name]):
                most = np.abs(value - expected[name]).max()
                yield f"weights {name!r}: expected those of an undisturbed run, got a difference of up to {most:.3g}"


@functools.cache
def _undisturbed(steps: int) -> Mapping[str, np.ndarray]:
    """Return the weights after training on a cluster of the same parameter tasks without faults."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["launch", "--ps", "2", "--workers", "2", str(MODEL.script), str(steps), "0", f"{folder}/{WEIGHTS}"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("DFLOW_")}
        done = subprocess.run(
            [sys.executable, "-m", "dflow", *words], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        with np.load(f"{folder}/{WEIGHTS}") as found:
            return dict(found.items())


def _digits(steps: int, results: Mapping[str, float], folder: Path) -> Iterator[str]:
    if not results.get("test accuracy", 0.0) > 0.9:
        yield f"test accuracy: expected more than 0.9, got {results}"


def _saving(steps: int, results: Mapping[str, float], folder: Path) -> Iterator[str]:
    """Read all checkpoints and exports: each has the counters of one moment."""
    yield from _counters(steps, results, folder)
    checkpoints = [place for place in folder.glob("checkpoints/step_*") if place.suffix == ""]
    for place in checkpoints:
        values = read_arrays(place).read({"count 0": None, "count 1": None})
        if len(found := {*np.unique([*values.values()]).tolist()}) != 1:
            yield f"{place.name}: expected one number in both counters, got {found}"
    yield from (f"{place} was found damaged" for place in folder.glob("checkpoints/*.damaged*"))
    yield from (f"{place} is left over" for place in folder.glob("checkpoints/.step_*"))
    exports = {int(place.name): place for place in folder.glob("exports/[0-9]*")}
    if not checkpoints or steps not in exports:
        yield f"expected checkpoints and the export {steps}, got {checkpoints} and {sorted(exports)}"
    for number, place in exports.items():
        found_there = dflow.load(place, prefix=f"{place}/")(np.zeros(1 + number, np.int32))
        if not all(0 <= count <= steps for count in found_there):
            yield f"export {number}: expected at most {steps} steps, got {found_there}"


def _group_arguments(strategy: str, steps: int, folder: Path) -> tuple[str, ...]:
    return strategy, str(steps), str(BATCH_S), str(CHECKPOINT_EVERY), str(folder / "checkpoints")


def _checkpoints(steps: int, results: Mapping[str, float], folder: Path) -> Iterator[str]:
    """Compare all checkpoints with the only right state after their steps."""
    found = {int(place.name.removeprefix("step_")): place for place in folder.glob("checkpoints/step_*")}
    if max(found, default=-1) != steps - 1:
        yield f"checkpoints: expected one of step {steps - 1}, got those of {sorted(found)}"
    for step, expected in zip(range(-1, steps), states(), strict=False):
        if step in found:
            values = read_arrays(found[step]).read(dict.fromkeys(expected))
            if wrong := [name for name, value in expected.items() if not np.array_equal(values[name], value)]:
                yield f"the checkpoint of step {step} has other values of {wrong} than an undisturbed run"


COUNTERS = Program(
    ROOT / "tests/chaos/programs/counters.py", 2500, lambda steps, _: (str(steps), str(BATCH_S)), _counters
)
BOUNDED = replace(COUNTERS, arguments=lambda steps, _: (str(steps), str(BATCH_S), str(MAX_STALENESS)), check=_bounded)
MODEL = Program(
    ROOT / "tests/chaos/programs/model.py",
    500,
    lambda steps, folder: (str(steps), str(BATCH_S), str(folder / WEIGHTS)),
    _model,
)
ELEMENTS = Program(
    ROOT / "tests/chaos/programs/elements.py", 1500, lambda steps, _: ("Async", str(steps), str(BATCH_S)), _elements
)
ELEMENTS_IN_LOOPS = replace(ELEMENTS, steps=800, arguments=lambda steps, _: ("Async", str(steps), str(BATCH_S), "loop"))
ELEMENTS_OF_ROUNDS = replace(
    ELEMENTS, steps=400, arguments=lambda steps, _: ("Sync", str(steps), str(BATCH_S)), check=_elements_of_rounds
)
DIGITS = Program(ROOT / "examples/digits.py", 800, lambda steps, _: ("--steps", str(steps)), _digits)

#: Its processes reach every moment.
SAVING = Program(
    ROOT / "tests/chaos/programs/saving.py",
    1000,
    lambda steps, folder: (str(steps), str(BATCH_S), str(SAVE_EVERY), str(folder)),
    _saving,
    Hazards(named=(*ROLES,)),
)

HYBRID = Program(
    ROOT / "tests/chaos/programs/group.py",
    400,
    functools.partial(_group_arguments, "Hybrid"),
    _checkpoints,
    Hazards(GROUP_KINDS, moments=(2, 3), at_once=(1, 1, 2)),
    is_group=True,
)
ALL_REDUCE = replace(
    HYBRID,
    arguments=functools.partial(_group_arguments, "AllReduce"),
    hazards=replace(HYBRID.hazards, kinds={role: GROUP_KINDS[role] for role in ("worker", COORDINATOR)}),
    servers=0,
)

PROGRAMS = {
    "counters": COUNTERS,
    "bounded": BOUNDED,
    "model": MODEL,
    "elements": ELEMENTS,
    "elements-in-loops": ELEMENTS_IN_LOOPS,
    "elements-of-rounds": ELEMENTS_OF_ROUNDS,
    "digits": DIGITS,
    "saving": SAVING,
    "all-reduce": ALL_REDUCE,
    "hybrid": HYBRID,
}
