"""A task whose snapshots have changed rows only: it always returns to the committed values, whatever happened since."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflow.distributed.snapshots.snapshot_messages import (
    CaptureState,
    LoadState,
    SnapshotCommitted,
    StateLoaded,
    StateWritten,
)
from dflow.lowering.files import changed_rows
from dflow.tracing.ir.types import array_type_of
from tests.disk_faults import FAULTS
from tests.distributed.snapshots.test_task_snapshots import PS, Task
from tests.effort import examples

#: The variables of the task. The last one is written whole.
TABLES = {
    "f32": ((64, 8), np.dtype("float32")),
    "bf16/narrow": ((300,), np.dtype(ml_dtypes.bfloat16)),
    "i8": ((40, 2, 3), np.dtype("int8")),
    "bool": ((50, 5), np.dtype("bool")),
    "one": ((), np.dtype("float32")),
}
PART = "ps-0"


def bits(draws: np.random.Generator, dtype: np.dtype[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Return values of any bits; many zeros of both signs."""
    size = int(np.prod(shape)) * dtype.itemsize
    data = draws.choice(np.array([0, 0, 0, 1, 0x80, 0x7F, 0xFF], np.uint8), size)
    return (data % 2 if dtype == np.bool_ else data).view(dtype).reshape(shape)


class Cluster:
    """The task, its processes one after the other, and what the coordinator knows of its snapshots."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.draws = folder, np.random.default_rng(seed)
        self.number = self.epoch = self.committed = 0
        #: The bytes of all variables in the committed snapshot.
        self.saved: dict[str, bytes] = {}
        self.task = Task(folder)
        for name, (shape, dtype) in TABLES.items():
            value = jnp.array(bits(self.draws, dtype, shape))
            self.task.store.create(name, array_type_of(value).strong, lambda value=value: value)

    def values(self) -> dict[str, bytes]:
        return {name: np.asarray(self.task.store.read(name)).tobytes() for name in TABLES}

    def scatter(self) -> None:
        name = str(self.draws.choice([name for name, (shape, _) in TABLES.items() if shape]))
        shape, dtype = TABLES[name]
        indices = self.draws.choice(shape[0], self.draws.integers(1, 4), replace=False)
        rows = bits(self.draws, dtype, (len(indices), *shape[1:]))
        self.task.store.update(name, "scatter_update", jnp.array(indices, jnp.int32), jnp.array(rows))

    def assign(self) -> None:
        name = str(self.draws.choice(list(TABLES)))
        self.task.store.write(name, jnp.array(bits(self.draws, TABLES[name][1], TABLES[name][0])))

    def snapshot(self, *, is_committed: bool) -> StateWritten:
        self.number += 1
        captured = self.values()
        *_, report = self.task.do(CaptureState(self.number, self.committed))
        assert isinstance(report, StateWritten)
        if is_committed and not report.failure:
            self.committed, self.saved = self.number, captured
            self.task.do(SnapshotCommitted(self.number))
        return report

    def snapshot_with_fault(self, first: int, count: int) -> None:
        """Write a part while the disk refuses operations; from a count on as if the process ended."""
        with FAULTS.within(self.folder / PART, first, count):
            self.snapshot(is_committed=False)

    def come_back(self, *, is_restarted: bool) -> None:
        if is_restarted:
            self.task = Task(self.folder)
        self.epoch += 1
        for is_set in (False, True):
            message = LoadState(self.committed, self.epoch, is_set)
            assert self.task.do(message) == [StateLoaded(PS, self.epoch, is_set)]
        assert self.values() == self.saved


@pytest.fixture(autouse=True, scope="module")
def small_sizes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(changed_rows, "LEAST_BYTES", 200)
        yield


EVENTS = ["scatter", "scatter", "scatter", "assign", "commit", "commit", "abandon", "fault", "restart", "return"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@settings(max_examples=examples(40), deadline=None)
@given(
    events=st.lists(st.sampled_from(EVENTS), min_size=4, max_size=16),
    seed=st.integers(0, 2**32),
    first=st.integers(1, 120),
    count=st.sampled_from([1, 2, 10_000]),
)
def test_a_task_returns_to_the_bits_of_the_committed_snapshot(
    events: list[str], seed: int, first: int, count: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cluster = Cluster(tmp_path_factory.mktemp("task"), seed)
    cluster.snapshot(is_committed=True)
    for event in events:
        match event:
            case "scatter":
                cluster.scatter()
            case "assign":
                cluster.assign()
            case "commit" | "abandon":
                assert not cluster.snapshot(is_committed=event == "commit").failure
            case "fault":
                cluster.snapshot_with_fault(first, count)
            case "restart" | "return":
                cluster.come_back(is_restarted=event == "restart")
    cluster.come_back(is_restarted=True)


def test_a_restarted_process_goes_on_with_changed_rows(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, seed=0)
    report = cluster.snapshot(is_committed=True)
    assert report.written_bytes == report.full_bytes == sum(map(len, cluster.values().values()))
    for is_restarted in (False, True):
        cluster.come_back(is_restarted=is_restarted)
        cluster.scatter()
        report = cluster.snapshot(is_committed=True)
        assert 4 < report.written_bytes < report.full_bytes / 4
