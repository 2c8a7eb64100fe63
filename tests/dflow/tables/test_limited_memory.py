"""Tables with `max_memory`: the bits of a table in memory, on each way that reads and writes it, within the limit."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dflow
from dflow.distributed.snapshots.snapshot_messages import CaptureState, LoadState
from dflow.lowering.paging import paged_memory
from dflow.lowering.paging.paged_memory import PagedMemory
from dflow.lowering.state.store import Store
from dflow.testing import memory_cluster
from dflow.tracing.ir.types import ArrayType
from dflow.tracing.state.context import spreading
from tests.distributed.snapshots.test_task_snapshots import Task
from tests.distributed.waiting import until
from tests.effort import examples

pytestmark = [pytest.mark.once, pytest.mark.skipif(sys.platform != "linux", reason="pages of files are those of Linux")]

ROWS, LIMIT = 540_000, 48 << 20  # 35 MB of rows, and as many of slots
TYPE = ArrayType(np.dtype(np.float32), (ROWS, 16))
IDS = st.lists(st.integers(0, ROWS - 1), min_size=8, max_size=8).map(np.array)


@pytest.fixture(scope="module", autouse=True)
def on_a_disk() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", "/var/tmp")
        yield


class Trained:
    """A table that is trained by Adagrad, with a vocabulary or without."""

    def __init__(self, vocabulary: dflow.Vocabulary | None, max_memory: int | None) -> None:
        ones = jax.nn.initializers.ones
        self.table = dflow.Embedding(
            ROWS, 16, initializer=ones, vocabulary=vocabulary, max_memory=max_memory, name="table"
        )
        self.optimizer = dflow.Optimizer(optax.adagrad(0.1), [self.table], name="optimizer")
        self.variables = [*self.table.shards, *jax.tree.leaves(self.optimizer.slots, is_leaf=dflow.is_variable)]

        @dflow.jit
        def step(ids: Any) -> Any:
            found = self.table.find(ids) if vocabulary else ids
            value, gradients = dflow.value_and_grad(lambda: (self.table(found) ** 2).sum(), [self.table])()  # noqa: PLW0108
            self.optimizer.apply(gradients, **({"found": found} if vocabulary else {}))
            return value

        self.step = step

    def trim(self, limit: int) -> None:
        """Have at most `limit` bytes in memory. Each value is paged."""
        store = self.variables[0].home.store
        [memory] = {store.table.entry(one.key).pages for one in self.variables}
        for one in self.variables:
            [value] = store.table.section(lambda one=one: store.table.values([one.key]))
            assert memory.adopted(value) is value
        memory.most_bytes = limit
        memory.trim()
        assert memory.in_memory() <= max(limit, LIMIT)
        memory.most_bytes = LIMIT


WAYS = [None, dflow.Vocabulary(bucket=2)]


@pytest.fixture(scope="module", params=WAYS, ids=["rows", "vocabulary"])
def pair(request: Any) -> tuple[Trained, Trained]:
    with dflow.container("limited"):
        limited = Trained(request.param, LIMIT)
    with dflow.container("whole"):
        return limited, Trained(request.param, None)


@settings(max_examples=examples(5), deadline=None)
@given(st.lists(IDS | st.sampled_from(["write out", "hold"]), min_size=2, max_size=6))
def test_random_steps_do_as_a_table_in_memory(pair: tuple[Trained, Trained], do: list[Any]) -> None:
    limited, whole = pair
    held = []
    for one in do:
        if isinstance(one, str):
            limited.trim(0)
            [value] = limited.table.shards[0].home.read_together(limited.table.shards)
            held += [(value, np.array(value[:5000]))] if one == "hold" else []
        else:
            np.testing.assert_array_equal(limited.step(one), whole.step(one))
            np.testing.assert_array_equal(limited.table(one), whole.table(one))
    for value, expected in held:
        np.testing.assert_array_equal(value[:5000], expected)
    held.clear()
    limited.trim(LIMIT)


@pytest.mark.parametrize("pair", WAYS[:1], indirect=True)
def test_a_save_is_restored_within_the_limit(pair: tuple[Trained, Trained], tmp_path: Path) -> None:
    limited, whole = pair
    for made in pair:
        made.step(np.arange(8))
        made.step(np.arange(8))
    dflow.save(tmp_path / "saved", [limited.table, limited.optimizer])
    for made in pair:
        made.step(np.arange(4))
    for ours, theirs in zip(limited.variables, whole.variables, strict=True):
        np.testing.assert_array_equal(ours.read(), theirs.read())
    before = whole.table(np.arange(8))
    dflow.restore(tmp_path / "saved", [limited.table, limited.optimizer])
    dflow.restore(
        tmp_path / "saved", [whole.table, whole.optimizer], names=lambda name: name.replace("whole", "limited")
    )
    limited.trim(LIMIT)
    assert not np.array_equal(limited.table(np.arange(8)), before)
    np.testing.assert_array_equal(limited.step(np.arange(8)), whole.step(np.arange(8)))
    limited.table.assign(jnp.ones(limited.table.shape))
    limited.trim(LIMIT)
    assert limited.table(np.arange(8)).sum() == 128


def test_synchronous_steps_of_a_cluster_do_as_in_memory() -> None:
    ids, alone = np.random.default_rng(0).integers(0, ROWS, (3, 8)).astype(np.int32), Trained(None, None)
    with memory_cluster(ps=1, workers=1) as cluster, closing(cluster.worker()) as worker:
        with worker.parameter_servers():
            made = Trained(None, LIMIT)
        run = dflow.distributed.Sync(worker).run(made.step, iter(ids), steps=3, name="run")
        assert [*map(float, run)] == [float(alone.step(one)) for one in ids]
        np.testing.assert_array_equal(made.table(ids), alone.table(ids))


def test_a_snapshot_has_the_limits(tmp_path: Path) -> None:
    first, second, limit = Task(tmp_path), Task(tmp_path), ("table", LIMIT)
    memory = first.store.memory_for("table", limit)
    first.store.create("table", TYPE, lambda: np.ones(TYPE.shape, np.float32), memory=memory)
    for number in (1, 2):  # the second one has a link of the first, and the rows that changed
        first.store.update("table", "scatter_add", np.array([5, ROWS - 1]), np.ones((2, 16), np.float32))
        first.do(CaptureState(number, committed=number - 1))
    assert not second.failure(LoadState(2, 1, is_set=True))
    np.testing.assert_array_equal(second.store.read("table"), first.store.read("table"))
    assert second.store.memory_for("slot", limit) is second.store.table.entry("table").pages is not None
    with pytest.raises(dflow.VariableError, match=r"max_memory of 'table': expected 50331648 bytes.* got none"):
        second.store.memory_for("table", None)


def test_a_full_disk_is_an_error_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    store, memory = Store(), PagedMemory("table", LIMIT, nullcontext())
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", reserve := Mock(wraps=os.posix_fallocate))
        store.create("table", TYPE, lambda: jnp.ones(TYPE.shape), memory=memory)
    assert reserve.call_count == 1
    alias = store.read_together(["table"])

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    update = "table", "scatter_add", np.array([5]), np.ones((1, 16), np.float32)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        message = r"bytes of disk in /var/tmp .*: No space left on device\n(.|\n)*TMPDIR"
        with pytest.raises(dflow.VariableError, match=message):
            store.update(*update)
    store.update(*update)
    assert store.gather("table", np.array([5, 6])).sum() == 48
    assert alias["table"].sum() == ROWS * 16
    alias.clear()
    store.table.drop("table")
    until(lambda: not memory.forget_freed())


def test_variables_that_stay_in_memory_count_while_they_exist() -> None:
    store, type = Store(), ArrayType(np.dtype(np.float32), (7 << 20,))
    memory = store.memory_for("table", ("table", LIMIT))
    assert memory is not None
    assert not memory.takes(ArrayType(np.dtype(jnp.int4), (LIMIT,)))

    def create(key: str) -> None:
        store.create(key, type, lambda: jnp.zeros(type.shape), memory=memory)

    create("first")
    assert memory.in_memory() == type.size_bytes == 28 << 20
    with pytest.raises(dflow.VariableError, match=f"max_memory of 'table': expected at least {56 << 20} bytes"):
        create("second")
    store.table.drop("first")
    create("second")


def test_a_copy_has_what_a_running_program_writes() -> None:
    @partial(jax.jit, donate_argnums=0)
    def slow(value: Any, one: Any) -> Any:
        return value.at[5].add(jax.lax.fori_loop(0, 300_000, lambda _, number: jnp.sin(number) + 1e-9, one)[0])

    memory = PagedMemory("table", LIMIT, nullcontext())
    with ThreadPoolExecutor(1) as other:
        value = other.submit(slow, memory.filled(TYPE), jnp.ones(1000)).result()
        np.testing.assert_array_equal(memory.copy(value)[5], value[5])


def test_systems_without_a_hint_or_the_inodes_of_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    with monkeypatch.context() as patch:
        patch.setattr(paged_memory, "_call", refused)
        paged_memory.prefetched(np.zeros(1 << 20))
    monkeypatch.setattr(paged_memory, "_mapped_files", set)
    with pytest.raises(dflow.VariableError, match=r"expected a file with one inode .*\n(.|\n)*TMPDIR"):
        paged_memory._check_system.__wrapped__()


def test_limits_that_cannot_be_kept_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong, shards, least in ("1 GB", 1, 32 << 20), (25 << 20, 1, 32 << 20), (LIMIT, 4, 128 << 20):
        message = f"max_memory of 'refused': expected a number of bytes, at least {least}.*, got {wrong!r}"
        with pytest.raises(dflow.VariableError, match=message):
            dflow.Embedding(ROWS, 16, max_memory=wrong, shards=shards, name="refused")  # type: ignore[arg-type]
    message = "got a copy or a part in each worker"
    with spreading(lambda variable: None), pytest.raises(dflow.VariableError, match=message):
        dflow.Embedding(ROWS, 16, max_memory=LIMIT, name="spread")

    def step_of(limit: int | None) -> Any:
        table = dflow.Embedding(ROWS, 16, max_memory=limit, name="dense")
        momentum = dflow.Optimizer(optax.sgd(0.1, momentum=0.9), [table], name="momentum")
        return dflow.jit(lambda ids: momentum.apply(dflow.grad(lambda: table(ids).sum(), [table])()))

    step = step_of(LIMIT)
    with pytest.raises(dflow.VariableError, match=r"gradient of 'dense/0', which has max_memory: expected its rows"):
        step(jnp.arange(3))
    with pytest.warns(dflow.DenseGradientWarning):
        step_of(None)(jnp.arange(3))
    monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")
    with pytest.raises(dflow.VariableError, match=r"expected a folder on a disk .* got /dev/shm, which is of tmpfs"):
        dflow.Embedding(ROWS, 16, max_memory=LIMIT, name="in memory")
