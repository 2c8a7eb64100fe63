"""A save or a restore while other threads train takes the values of one moment."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.lowering.files.array_files import read_arrays
from dflow.lowering.state.store import Store
from dflow.tracing.errors import VariableShapeError
from dflow.tracing.ir.types import array_type_of

#: A second set of variables with the same names stands for those of a restarted program.
pytestmark = pytest.mark.filterwarnings("ignore::dflow.tracing.primitives.namesakes.DuplicateNameWarning")

WAIT_S = 60.0


def test_a_save_while_four_threads_train_holds_one_moment(tmp_path: Path) -> None:
    one, two = dflow.Variable(jnp.zeros(1000), name="one"), dflow.Variable(jnp.zeros(1000), name="two")
    done = threading.Event()

    @dflow.jit
    def both() -> None:
        one.assign_add(jnp.ones(1000))
        two.assign_add(jnp.ones(1000))

    @dflow.jit
    def swapped() -> None:
        mean = (one + two) / 2
        two.assign(mean + 1)
        one.assign(mean + 1)

    def train(step: Any) -> int:
        steps = 0
        while not done.is_set():
            step()
            steps += 1
        return steps

    with ThreadPoolExecutor(4) as pool:
        training = [pool.submit(train, step) for step in (both, swapped, both, swapped)]
        try:
            seen = []
            for number in range(8):
                dflow.save(tmp_path / str(number), [one, two])
                files = read_arrays(tmp_path / str(number)).read({"one": None, "two": None})
                np.testing.assert_array_equal(files["one"], files["two"])
                assert len(np.unique(files["one"])) == 1
                seen.append(float(files["one"][0]))
        finally:
            done.set()
        assert all(future.result(WAIT_S) for future in training)
    assert seen == sorted(seen)
    assert len(set(seen)) > 1


def test_a_restore_while_others_train_sets_all_in_one_moment(tmp_path: Path) -> None:
    one, two = dflow.Variable(jnp.zeros(10), name="one"), dflow.Variable(jnp.zeros(10), name="two")
    dflow.save(tmp_path / "c", [one, two])
    done = threading.Event()

    @dflow.jit
    def step() -> jax.Array:
        one.assign_add(jnp.ones(10))
        two.assign_add(jnp.ones(10))
        return abs(one - two).max()

    def train() -> float:
        return max(float(step()) for _ in iter(done.is_set, True))

    with ThreadPoolExecutor(2) as pool:
        training = [pool.submit(train) for _ in range(2)]
        try:
            for _ in range(20):
                dflow.restore(tmp_path / "c", [one, two])
        finally:
            done.set()
        assert [future.result(WAIT_S) for future in training] == [0.0, 0.0]


def test_a_restore_reads_one_checkpoint_though_it_is_replaced_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = dflow.Variable(1.0, name="one"), dflow.Variable(1.0, name="two")
    dflow.save(tmp_path / "c", [one, two])
    one.assign(2.0)
    two.assign(2.0)
    read, left = Store.read_saved, [3]

    def read_late(*args: Any) -> Any:
        values = read(*args)
        if left[0]:
            left[0] -= 1
            dflow.save(tmp_path / "c", [one, two], overwrite=True)
        return values

    monkeypatch.setattr(Store, "read_saved", read_late)
    dflow.restore(tmp_path / "c", [one, two])
    assert (float(one), float(two), left) == (2.0, 2.0, [0])
    left[0] = 100
    with pytest.raises(dflow.CheckpointError, match="was replaced 5 times while it was read"):
        dflow.restore(tmp_path / "c", [one, two])


def test_values_are_replaced_together_or_not_at_all() -> None:
    store = Store()
    for key in ("v", "w"):
        store.create(key, array_type_of(jnp.ones(3)).strong, lambda: jnp.ones(3))
    with pytest.raises(VariableShapeError, match=r"variable 'w' holds f32\[3\] but was given f32\[2\]"):
        store.replace({"v": jnp.zeros(3), "w": jnp.zeros(2)})
    assert store.read("v").tolist() == [1.0] * 3
    store.replace({"v": jnp.zeros(3), "w": jnp.zeros(3)})
    assert store.read("v").tolist() == store.read("w").tolist() == [0.0] * 3
