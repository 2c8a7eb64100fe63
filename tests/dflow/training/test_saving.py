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
import pytest

import dflow
from dflow.lowering.files.array_files import read_arrays
from dflow.state_backends import LOCAL
from dflow.tracing.errors import CheckpointError, VariableError
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
