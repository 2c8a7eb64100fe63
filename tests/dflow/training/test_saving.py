"""Saving and restoring: all types, of the values of one moment while others train, or an error without effect."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow
from dflow.distributed import Async
from dflow.distributed.cluster.cluster import Cluster
from dflow.lowering.files.array_files import read_arrays
from dflow.lowering.state.store import Store
from dflow.state_backends import LOCAL
from dflow.testing import MemoryCluster, memory_cluster
from dflow.tracing.errors import CheckpointError, VariableError, VariableShapeError
from dflow.tracing.ir.types import array_type_of
from tests.dflow.training.scaled_model import same, scaled_model
from tests.distributed.waiting import until

pytestmark = pytest.mark.filterwarnings("ignore::dflow.tracing.primitives.namesakes.DuplicateNameWarning")


#: Names of checkpoints, whose endings say in which form they are written.
FORMS = pytest.mark.parametrize("name", ["c", "c.orbax", "c.safetensors"])


@FORMS
def test_what_was_saved_is_restored(tmp_path: Path, name: str) -> None:
    saved = scaled_model(3)
    dflow.save(tmp_path / name, saved)
    restored = scaled_model(0)
    report = dflow.restore(tmp_path / name, restored)
    same(restored, saved)
    assert report.restored == ("dense/b", "dense/w", "step")
    assert str(report) == "3 arrays restored, and no others"
    dflow.jit(lambda: restored["dense"]["w"].assign_add(jnp.ones((2, 3))))()  # the values are the variables' own
    assert float(restored["dense"]["w"].sum()) == 24.0
    assert os.listdir(tmp_path) == [name]


def test_keys_are_kept_with_their_algorithm(tmp_path: Path) -> None:
    v = dflow.Variable(jax.random.split(jax.random.key(1, impl="rbg"), 3), name="keys")
    before = jax.random.key_data(v.read())
    dflow.save(tmp_path / "c", v)
    v.assign(jax.random.split(jax.random.key(2, impl="rbg"), 3))
    dflow.restore(tmp_path / "c", v)
    np.testing.assert_array_equal(jax.random.key_data(v.read()), before)
    other = dflow.Variable(jax.random.split(jax.random.key(1), 3), name="other")
    with pytest.raises(dflow.CheckpointError, match=r"changed .* keys .* key<rbg>\[3\] .* key<fry>\[3\]"):
        dflow.restore(tmp_path / "c", other, names={"other": "keys"})


def test_an_optimizer_goes_on_where_it_was(tmp_path: Path) -> None:
    def trained(model: Any, optimizer: dflow.Optimizer, steps: int) -> Any:
        def loss() -> jax.Array:
            total: jax.Array = (model["w"] ** 2).sum()
            return total

        @dflow.jit
        def step() -> None:
            optimizer.apply(dflow.grad(loss, model)())

        for _ in range(steps):
            step()
        return dflow.read(model)

    model = dflow.variables({"w": jnp.arange(3.0)})
    optimizer = dflow.Optimizer(optax.adam(0.1), model, name="adam")
    trained(model, optimizer, 3)
    dflow.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    expected = trained(model, optimizer, 3)
    assert set(read_arrays(tmp_path / "c").types) == {"w", "adam/0/count", "adam/0/mu/w", "adam/0/nu/w"}
    anew = dflow.variables({"w": jnp.zeros(3)})
    optimizer = dflow.Optimizer(optax.adam(0.1), anew, name="adam")
    dflow.restore(tmp_path / "c", [anew, optimizer])
    np.testing.assert_array_equal(trained(anew, optimizer, 3)["w"], expected["w"])


@FORMS
def test_a_generator_goes_on_where_it_was_and_keeps_its_algorithm(tmp_path: Path, name: str) -> None:
    generator = dflow.Generator(1, name="g", impl="rbg")
    generator.split()
    dflow.save(tmp_path / name, {"g": generator})
    expected = jax.random.key_data(generator.split())
    anew = dflow.Generator(2, name="g", impl="rbg")
    dflow.restore(tmp_path / name, {"g": anew})
    np.testing.assert_array_equal(jax.random.key_data(anew.split()), expected)
    with pytest.raises(dflow.CheckpointError, match=r"changed .* g .* u32\[4\] of rbg .* u32\[4\] of unsafe_rbg"):
        dflow.restore(tmp_path / name, dflow.Generator(1, name="g", impl="unsafe_rbg"))


@pytest.mark.parametrize(
    ("stranger", "says"),
    [
        (
            lambda: dflow.FIFOQueue(2, jax.ShapeDtypeStruct((), jnp.float32), name="q"),
            "queue 'q', and what is in queues and accumulators is not",
        ),
        (lambda: jnp.ones(3), r"among its variables\n.*test_saving.py"),
        (lambda: object, "a type among its variables"),
    ],
    ids=["queue", "array", "object"],
)
def test_what_is_no_variable_is_refused(tmp_path: Path, stranger: Any, says: str) -> None:
    with pytest.raises(dflow.CheckpointError, match=f"(?s){says}"):
        dflow.save(tmp_path / "c", [dflow.Variable(1.0, name="v"), stranger()])
    assert os.listdir(tmp_path) == []


def test_traced_code_cannot_save(tmp_path: Path) -> None:
    v = dflow.Variable(1.0, name="v")
    with pytest.raises(dflow.CheckpointError, match="save is called inside traced code"):
        dflow.jit(lambda: dflow.save(tmp_path / "c", v))()


@FORMS
def test_a_checkpoint_is_replaced_when_that_is_asked_for_alone(tmp_path: Path, name: str) -> None:
    v = dflow.Variable(1.0, name="v")
    dflow.save(tmp_path / name, v)
    v.assign(2.0)
    with pytest.raises(dflow.CheckpointExists, match="overwrite=True"):
        dflow.save(tmp_path / name, v)
    dflow.restore(tmp_path / name, v)
    assert float(v) == 1.0
    v.assign(3.0)
    dflow.save(tmp_path / name, v, overwrite=True)
    v.assign(0.0)
    dflow.restore(tmp_path / name, v)
    assert float(v) == 3.0


@pytest.mark.parametrize("name", ["c", "c.orbax"])
def test_a_damaged_array_changes_no_variable(tmp_path: Path, name: str) -> None:
    a, b = dflow.Variable(jnp.ones(3), name="a"), dflow.Variable(jnp.ones(3), name="b")
    dflow.save(tmp_path / name, [a, b])
    (chunk,) = (tmp_path / name / "b").glob("c*")
    chunk.write_bytes(b"?" + chunk.read_bytes()[1:])
    a.assign(jnp.zeros(3))
    with pytest.raises(dflow.DamagedCheckpoint, match=r"array 'b' \(f32\[3\]\) in .* is damaged"):
        dflow.restore(tmp_path / name, [a, b])
    assert float(a.sum()) == 0.0
    dflow.restore(tmp_path / name, [a], ignore=["unexpected"])
    assert float(a.sum()) == 3.0


def test_what_a_failed_step_lost_is_restored(tmp_path: Path) -> None:
    v = dflow.Variable(jnp.ones(3), name="v")
    dflow.save(tmp_path / "c", v)
    LOCAL.store.table.buffer(v.key).delete()
    with pytest.raises(VariableError, match="was lost"):
        dflow.save(tmp_path / "d", v)
    dflow.restore(tmp_path / "c", v)
    assert v.read().tolist() == [1.0] * 3


def test_nothing_to_save_and_names_of_nothing_are_refused(tmp_path: Path) -> None:
    w = dflow.Variable(jnp.ones(3), name="weight")
    with pytest.raises(CheckpointError, match=r"save was given no variables\n  at .*\n  give it some"):
        dflow.save(tmp_path / "c", {})
    with pytest.raises(
        CheckpointError, match=r"names has 'wieght', which no variable .* restore is called[\s\S]*'weight'"
    ):
        dflow.restore(tmp_path / "c", w, names={"wieght": "v"})
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("task", ["save", "restore"])
def test_variables_in_the_place_of_the_path_are_told_so(tmp_path: Path, task: str) -> None:
    v = dflow.Variable(1.0, name="v")
    wanted = rf"{task} was given a list as its path\n  at .*test_saving.*\n.*dflow\.{task}\(path, variables\)"
    with pytest.raises(CheckpointError, match=wanted):
        getattr(dflow, task)([v], tmp_path / "c")


def test_a_process_saves_overwrites_and_restores_as_it_ends(tmp_path: Path) -> None:
    script = """
import atexit, sys, jax.numpy as jnp, dflow
small, large = dflow.Variable(jnp.zeros(3), name="small"), dflow.Variable(jnp.zeros((512, 1024)), name="large")

@atexit.register
def last():
    for number in (1.0, 2.0):
        for variable in (small, large):
            variable.assign(variable.read() * 0 + number)
        dflow.save(sys.argv[1], [small, large], overwrite=True)
    small.assign(jnp.zeros(3))
    dflow.restore(sys.argv[1], [small, large])
    print(small.read())
"""
    place = tmp_path / "saved"
    ran = subprocess.run(
        [sys.executable, "-c", script, str(place)], capture_output=True, text=True, timeout=60.0, check=False
    )
    assert (ran.stdout, ran.stderr) == ("[2. 2. 2.]\n", "")
    small, large = dflow.Variable(jnp.zeros(3), name="small"), dflow.Variable(jnp.zeros((512, 1024)), name="large")
    dflow.restore(place, [small, large])
    np.testing.assert_array_equal(large.read(), np.full((512, 1024), 2.0, np.float32))
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]


def test_what_a_killed_save_left_is_not_listed_as_a_checkpoint(tmp_path: Path) -> None:
    v = dflow.Variable(1.0, name="v")
    dflow.save(tmp_path / "c", v)
    shutil.copytree(tmp_path / "c", tmp_path / f".d.{'0' * 16}.writing")
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(dflow.NoCheckpoint, match=r"there are: c(;|$)"):
            dflow.restore(path, v)


SAVES = 12


@pytest.fixture
def memory() -> Iterator[MemoryCluster]:
    with memory_cluster(ps=2, workers=3) as cluster:
        yield cluster


@pytest.fixture
def workers(memory: MemoryCluster) -> Iterator[list[Cluster]]:
    with ThreadPoolExecutor(3) as pool:
        joined = list(pool.map(memory.worker, range(3)))
    yield joined
    for one in joined:
        one.close()


def pair(cluster: Cluster) -> dict[str, dflow.Variable]:
    """A variable on each parameter task."""
    with cluster.parameter_servers():
        found = {}
        for index in range(2):
            with dflow.device(f"ps:{index}"):
                found[f"v{index}"] = dflow.Variable(lambda: jnp.zeros(()), name=f"v{index}")
    return found


def saved(folder: Path) -> list[tuple[float, float]]:
    """The two values in each checkpoint."""
    found = []
    for number in range(SAVES):
        values = read_arrays(folder / str(number)).read({"v0": None, "v1": None})
        found.append((float(values["v0"]), float(values["v1"])))
    return found


def test_a_save_while_workers_train_asynchronously(workers: list[Cluster], tmp_path: Path) -> None:
    enough = threading.Event()

    def train(cluster: Cluster) -> int:
        model = pair(cluster)

        @dflow.jit
        def step(x: Any) -> None:
            # The second update comes some milliseconds after the first.
            model["v0"].assign_add(x[0, 0])
            product = jax.lax.fori_loop(0, 300, lambda _, y: y @ x, x)
            model["v1"].assign_add(product[0, 0])

        batches = itertools.takewhile(lambda _: not enough.is_set(), itertools.repeat(jnp.eye(96)))
        return sum(1 for _ in Async(cluster).run(step, batches, steps=10**6, name="run"))

    with ThreadPoolExecutor(2) as pool:
        trained = pool.map(train, workers[:2])
        try:
            model = pair(workers[2])
            for number in range(SAVES):
                seen = float(model["v0"].read())
                until(lambda seen=seen: float(model["v0"].read()) > seen)  # type: ignore[misc]
                dflow.save(tmp_path / str(number), model)
        finally:
            enough.set()
        steps = sum(trained)
    counts = saved(tmp_path)
    assert all(first == second for first, second in counts), counts
    assert counts == sorted(counts)
    assert float(model["v0"].read()) == float(model["v1"].read()) == steps


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
