"""Names of arrays in a checkpoint, and the differences between a checkpoint and the variables."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow
from dflow.lowering.files.array_files import read_arrays
from dflow.tracing.errors import CheckpointError
from tests.dflow.training.scaled_model import same, scaled_model

#: A second set of variables with the same names stands for those of a restarted program.
pytestmark = pytest.mark.filterwarnings("ignore::dflow.tracing.primitives.namesakes.DuplicateNameWarning")


def test_all_of_a_container_is_saved_by_its_name(tmp_path: Path) -> None:
    with dflow.container("run1"):
        model = scaled_model(2)
        with dflow.container("inner"):
            dflow.Generator(0, name="unkept")
            count = dflow.Variable(5, name="count")
    dflow.save(tmp_path / "c", "run1")
    names = ["run1/dense/b", "run1/dense/w", "run1/inner/count", "run1/step"]
    assert sorted(read_arrays(tmp_path / "c").types) == names
    count.assign(0)
    dflow.restore(tmp_path / "c", "run1")
    assert int(count) == 5
    with dflow.container("run2"):
        other = scaled_model(0)
    dflow.restore(tmp_path / "c", other, names=lambda name: name.replace("run2", "run1", 1), ignore=["unexpected"])
    same(other, model)
    dflow.reset_container("run1")
    with pytest.raises(dflow.VariableError, match="container 'run1' was reset"):
        dflow.save(tmp_path / "d", model)
    assert os.listdir(tmp_path) == ["c"]


def test_differences_are_a_table_and_nothing_is_restored(tmp_path: Path) -> None:
    dflow.save(tmp_path / "c", scaled_model(3))
    model = dflow.variables({"dense": {"w": jnp.zeros((3, 2)), "bias": jnp.zeros(3)}, "step": jnp.int32(1)})
    before = dflow.read(model)
    with pytest.raises(dflow.CheckpointError) as caught:
        dflow.restore(tmp_path / "c", model)
    text = str(caught.value)
    assert re.search(r"and the variables differ, and nothing is restored\n  at .*test_saved_names.py:\d+", text)
    for row in (
        r"missing +│ dense/bias +│ - +│ f32\[3\]",
        r"unexpected +│ dense/b +│ f32\[3\] +│ -",
        r"changed +│ dense/w +│ f32\[2,3\] +│ f32\[3,2\]",
        r"1 arrays fit",
        r"call dflow.restore with ignore=\['missing', 'unexpected', 'changed'\]; where names differ alone, give names=",
    ):
        assert re.search(row, text), text
    jax.tree.map(np.testing.assert_array_equal, dflow.read(model), before)


def test_what_fits_is_restored_when_that_is_asked_for(tmp_path: Path) -> None:
    dflow.save(tmp_path / "c", scaled_model(3))
    model = dflow.variables({"dense": {"w": jnp.zeros((3, 2)), "bias": jnp.zeros(3)}, "step": jnp.int32(1)})
    report = dflow.restore(tmp_path / "c", model, strict=False)
    assert (int(model["step"]), float(model["dense"]["w"].sum())) == (3, 0.0)
    assert report.restored == ("step",)
    assert report.missing == {"dense/bias": "f32[3]"}
    assert report.unexpected == {"dense/b": "f32[3]"}
    assert report.changed == {"dense/w": ("f32[2,3]", "f32[3,2]")}
    model["step"].assign(0)
    with pytest.raises(dflow.CheckpointError, match=r"call dflow.restore with ignore=\['missing', 'changed'\]"):
        dflow.restore(tmp_path / "c", model, ignore=["unexpected"])
    assert int(model["step"]) == 0
    with pytest.raises(dflow.CheckpointError, match=r"(?s)ignore='missing'.*\n.*give it some of \['missing'"):
        dflow.restore(tmp_path / "c", model, ignore="missing")


def test_names_map_variables_to_arrays(tmp_path: Path) -> None:
    v = dflow.Variable(jnp.arange(3), name="v")
    dflow.save(tmp_path / "c", v, names=lambda name: f"old/{name}")
    w = dflow.Variable(jnp.zeros(3, int), name="w")
    dflow.restore(tmp_path / "c", w, names={"w": "old/v"})
    assert w.read().tolist() == [0, 1, 2]
    with pytest.raises(dflow.CheckpointError, match=r"names gives 3 for variable 'w', a int"):
        dflow.save(tmp_path / "d", w, names=lambda _: 3)  # type: ignore[arg-type, return-value]


def test_what_has_no_name_goes_by_its_path_whatever_was_made_before_it(tmp_path: Path) -> None:
    def state(order: list[str]) -> dict[str, Any]:
        made = {name: dflow.Variable(jnp.full(3, float(ord(name)))) for name in order}
        optimizer = dflow.Optimizer(optax.adam(0.1), {"a": made["a"], "c": made["c"]})
        return {"norm": {"a": made["a"], "b": [made["b"]]}, "c": made["c"], "opt": optimizer, "key": dflow.Generator(1)}

    saved = state(["a", "b", "c"])
    dflow.save(tmp_path / "c", saved)
    slots = {"opt/0/count", "opt/0/mu/a", "opt/0/mu/c", "opt/0/nu/a", "opt/0/nu/c"}
    assert set(read_arrays(tmp_path / "c").types) == {"norm/a", "norm/b/0", "c", "key", *slots}
    restored = state(["c", "b", "a"])
    for leaf in jax.tree.leaves((restored["norm"], restored["c"]), is_leaf=dflow.is_variable):
        leaf.assign(jnp.zeros(3))
    report = dflow.restore(tmp_path / "c", restored)
    assert set(report.restored) == set(read_arrays(tmp_path / "c").types)
    same((restored["norm"], restored["c"]), (saved["norm"], saved["c"]))
    dflow.restore(tmp_path / "c", {"other": restored["c"]}, names={"other": "norm/a"}, ignore=["unexpected"])
    assert restored["c"].read().tolist() == [float(ord("a"))] * 3


def test_the_slots_of_variables_without_names_go_by_their_paths(tmp_path: Path) -> None:
    named, unnamed = dflow.Variable(1.0, name="w"), dflow.Variable(2.0)
    optimizer = dflow.Optimizer(optax.sgd(0.1, momentum=0.9), {"x": named, "y": unnamed}, name="sgd")
    dflow.save(tmp_path / "c", {"model": {"y": unnamed, "twice": unnamed, "x": named}, "optimizer": optimizer})
    assert set(read_arrays(tmp_path / "c").types) == {"w", "model/twice", "sgd/0/trace/w", "sgd/0/trace/y"}


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        (lambda: dflow.Variable(1.0), "variable"),
        (lambda: [{"w": dflow.Variable(1.0, name="w")}, dflow.Variable(1.0)], "variable"),
        (lambda: dflow.Generator(0), "generator"),
        (lambda: [dflow.Optimizer(optax.adam(0.1), [dflow.Variable(1.0, name="w")])], "optimizer"),
    ],
)
@pytest.mark.parametrize("task", ["save", "restore"])
def test_what_has_neither_a_name_nor_a_key_is_refused(tmp_path: Path, made: Any, kind: str, task: str) -> None:
    with pytest.raises(CheckpointError, match=rf"(?s){task} was given {kind} '\w+_\w+', whose name is made up.*'name'"):
        getattr(dflow, task)(tmp_path / "c", made())
    with dflow.container("made_up"):
        kept = made()
    with pytest.raises(CheckpointError, match="whose name is made up"):
        getattr(dflow, task)(tmp_path / "c", "made_up")
    assert kept
    dflow.reset_container("made_up")


def test_two_variables_of_one_name_are_refused(tmp_path: Path) -> None:
    one, two = dflow.Variable(1.0, name="same"), dflow.Variable(2.0, name="same")
    dflow.save(tmp_path / "c", [one, {"again": one}])
    with pytest.raises(dflow.CheckpointError, match=r"(?s)two variables would be the array 'same': .* at .* and <Var"):
        dflow.save(tmp_path / "d", [one, two])
    other = dflow.Variable(2.0, name="other")
    with pytest.raises(dflow.CheckpointError, match="two variables would be the array 'same'"):
        dflow.restore(tmp_path / "c", [one, other], names={"other": "same"})
    assert os.listdir(tmp_path) == ["c"]
