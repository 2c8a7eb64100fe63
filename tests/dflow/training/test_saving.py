"""Saving and restoring: all types, generators and optimizers; errors leave every variable as it was."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
import zarr

import dflow
from dflow.lowering.files.array_files import read_arrays
from dflow.state_backends import LOCAL
from dflow.testing import memory_cluster
from dflow.tracing.errors import CheckpointError, VariableError
from dflow.training import restoring
from tests.dflow.training.scaled_model import same, scaled_model

#: A second set of variables with the same names stands for those of a restarted program.
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


DTYPES = ["bool", "int8", "uint32", "float16", "complex64", "bfloat16", "int4", "uint4", "float8_e4m3fn"]


def test_variables_of_any_type_are_kept(tmp_path: Path) -> None:
    made = {
        f"{dtype}{shape}": dflow.Variable(jnp.ones(shape, dtype)) for dtype in DTYPES for shape in ((), (0, 2), (3,))
    }
    dflow.save(tmp_path / "c", made)
    for one in made.values():
        one.assign(jnp.zeros(one.shape, one.dtype))
    dflow.restore(tmp_path / "c", made)
    for one in made.values():
        np.testing.assert_array_equal(np.asarray(one.read()).astype(complex), np.ones(one.shape))


@FORMS
def test_variables_on_tasks_are_saved_and_restored(tmp_path: Path, name: str) -> None:
    with memory_cluster(ps=2) as memory:
        worker = memory.worker()
        with worker.parameter_servers():
            pair = [dflow.Variable(lambda: jnp.ones(3), name=each) for each in ("one", "two")]
        dflow.save(tmp_path / name, pair)
        for variable in pair:
            variable.assign(jnp.zeros(3))
        dflow.restore(tmp_path / name, pair)
        assert [float(variable.read().sum()) for variable in pair] == [3.0, 3.0]
        worker.close()


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


def test_zarr_and_orbax_read_a_checkpoint(tmp_path: Path) -> None:
    model = scaled_model(3)
    dflow.save(tmp_path / "c", model)
    np.testing.assert_array_equal(zarr.open_group(tmp_path / "c", mode="r")["dense/w"][...], np.full((2, 3), 3.0))
    plain = orbax.checkpoint.PyTreeCheckpointer().restore(tmp_path / "c")
    assert {name: value.shape for name, value in plain.items()} == {"dense/w": (2, 3), "dense/b": (3,), "step": ()}
    target = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in plain.items()}
    standard = orbax.checkpoint.StandardCheckpointer().restore(tmp_path / "c", target)
    np.testing.assert_array_equal(standard["dense/w"], np.full((2, 3), 3.0))


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


def test_a_folder_of_checkpoints_is_told_with_what_can_be_restored(tmp_path: Path) -> None:
    v = dflow.Variable(1.0, name="v")
    for step in (1, 2):
        dflow.save(tmp_path / "run" / f"step_{step}", v)
    (tmp_path / "run" / "logs").mkdir()
    wanted = r"run is no checkpoint .*\n.*\n  in it there are: step_1, step_2; give the path of one"
    with pytest.raises(dflow.NoCheckpoint, match=wanted):
        dflow.restore(tmp_path / "run", v)


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


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="this system has no /proc")
@pytest.mark.parametrize(
    ("path", "reason"), [("/proc/c", "/proc takes no new files"), ("/dev/null/c", "/dev/null is no folder")]
)
def test_a_place_where_nothing_can_be_written_is_named(path: str, reason: str) -> None:
    with pytest.raises(dflow.CheckpointError, match=f"^{path} cannot be written: {reason}\n"):
        dflow.save(path, dflow.Variable(1.0, name="v"))


def test_what_a_killed_save_left_is_not_listed_as_a_checkpoint(tmp_path: Path) -> None:
    v = dflow.Variable(1.0, name="v")
    dflow.save(tmp_path / "c", v)
    shutil.copytree(tmp_path / "c", tmp_path / f".d.{'0' * 16}.writing")
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(dflow.NoCheckpoint, match=r"there are: c(;|$)"):
            dflow.restore(path, v)


@pytest.mark.parametrize("is_ours", [False, True])
def test_a_restore_that_fails_on_one_process_of_a_group_changes_no_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_ours: bool
) -> None:
    w, events = dflow.Variable(1.0, name="w"), list[str]()
    dflow.save(tmp_path / "saved", [w])
    w.assign(2.0)

    class Group:
        names = ("worker:0", "worker:1")

        def exchange(self, what: str, text: str, **options: Any) -> list[str]:
            events.append(what.partition(" (")[2])
            return [text, "" if is_ours else '[2, "its disk is gone"]']

    monkeypatch.setattr(restoring, "group_of", lambda variables: Group())
    saved = tmp_path / ("other" if is_ours else "saved")
    with pytest.raises(dflow.CheckpointError, match="other" if is_ours else "worker:1: its disk is gone"):
        dflow.restore(saved, [w])
    assert (w.read(), events) == (2.0, ["values read)"])
