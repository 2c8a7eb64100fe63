"""Links inside a checkpoint or an export are not followed, or are errors that name the link."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import dflow
from dflow.testing import memory_cluster

pytestmark = pytest.mark.filterwarnings("ignore::dflow.tracing.primitives.namesakes.DuplicateNameWarning")


def state(value: float) -> dict[str, dflow.Variable]:
    return {"w": dflow.Variable(jnp.full(6, value), name="a/w"), "b": dflow.Variable(jnp.full(2, value), name="b")}


def by_orbax(folder: Path, value: float) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, {"a": {"w": jnp.full(6, value)}, "b": jnp.full(2, value)})


def by_zarr_of_orbax(folder: Path, value: float) -> None:
    with ocp.PyTreeCheckpointer(use_ocdbt=False) as checkpointer:
        checkpointer.save(folder, {"a": {"w": jnp.full(6, value)}, "b": jnp.full(2, value)})


def by_export(folder: Path, value: float) -> None:
    variables = state(value)
    large = np.full(30_000, value, np.float32)

    def step(x: Any) -> Any:
        return variables["w"].sum() + variables["b"].sum() + large.sum() + x

    dflow.export(step, jnp.float32(0)).save(folder)


def restored(folder: Path) -> set[float]:
    variables = state(0.0)
    dflow.restore(folder, variables)
    return {float(one) for variable in variables.values() for one in variable.read()}


def loaded(folder: Path) -> set[float]:
    found = dflow.load(folder)
    assert float(found(jnp.float32(0))) % 30_008 == 0  # all of one export
    return {float(one) for variable in found.variables.values() for one in variable.read()}


FORMS: dict[str, tuple[Callable[[Path, float], None], Callable[[Path], set[float]]]] = {
    "dflow": (lambda folder, value: dflow.save(folder, state(value)), restored),
    "dflow.orbax": (lambda folder, value: dflow.save(folder, state(value)), restored),
    "orbax": (by_orbax, restored),
    "zarr of orbax": (by_zarr_of_orbax, restored),
    "export": (by_export, loaded),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_link_is_refused_or_not_followed(form: str, tmp_path: Path) -> None:
    write, read = FORMS[form]
    write(tmp_path / "1" / form, 1.0)
    write(tmp_path / "2" / form, 2.0)
    assert read(tmp_path / "1" / form) == {1.0}
    places = [place.relative_to(tmp_path / "1") for place in (tmp_path / "1" / form).rglob("*")]
    places = [place for place in places if (tmp_path / "2" / place).exists()]  # Orbax's data has random names
    if form == "export":  # each load starts a process
        places = [place for place in places if {"a", "_METADATA", "dflow.json"}.isdisjoint(place.parts)]
    refusals = []
    for place in places:
        shutil.copytree(tmp_path / "1", tmp_path / "x")
        link = tmp_path / "x" / place
        shutil.rmtree(link) if link.is_dir() else link.unlink()
        link.symlink_to(tmp_path / "2" / place)
        try:
            assert read(tmp_path / "x" / form) == {1.0}, place
        except (dflow.CheckpointError, dflow.ExportError) as error:
            refusals.append(
                (f"{link}: expected a file or folder itself, got a link to {tmp_path / '2' / place}", error)
            )
        shutil.rmtree(tmp_path / "x")
    assert len(refusals) >= 3
    for says, error in refusals:
        assert says in str(error)
        assert "cp -rL" in str(error).splitlines()[-1]


def test_a_copy_by_the_remedy_is_restored(tmp_path: Path) -> None:
    dflow.save(tmp_path / "1", state(1.0))
    shutil.move(tmp_path / "1" / "b" / "c.0", tmp_path / "elsewhere")
    (tmp_path / "1" / "b" / "c.0").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(dflow.CheckpointError, match="copy it by cp -rL"):
        restored(tmp_path / "1")
    shutil.copytree(tmp_path / "1", tmp_path / "copy")  # it follows links
    assert restored(tmp_path / "copy") == {1.0}


def test_a_link_to_a_file_of_safetensors_is_refused_and_one_of_a_cache_is_read(tmp_path: Path) -> None:
    cache = tmp_path / "models--me--net"
    for folder in ("blobs", "snapshots/1f2e"):
        (cache / folder).mkdir(parents=True)
    dflow.save(tmp_path / "net.safetensors", state(1.0))
    shutil.copy(tmp_path / "net.safetensors", cache / "blobs" / "9a8b")
    (cache / "snapshots" / "1f2e" / "net.safetensors").symlink_to("../../blobs/9a8b")
    assert restored(cache / "snapshots" / "1f2e" / "net.safetensors") == {1.0}
    link = tmp_path / "other.safetensors"
    link.symlink_to(tmp_path / "net.safetensors")
    with pytest.raises(dflow.DamagedCheckpoint, match=f"{link}: expected a file.*got a link to {tmp_path}/net.safet"):
        restored(link)
    # A file of another model is none of this cache.
    (cache / "snapshots" / "1f2e" / "other.safetensors").symlink_to(tmp_path / "net.safetensors")
    with pytest.raises(dflow.DamagedCheckpoint, match="got a link to"):
        restored(cache / "snapshots" / "1f2e" / "other.safetensors")


def test_the_path_itself_may_be_a_link(tmp_path: Path) -> None:
    dflow.save(tmp_path / "1", state(1.0))
    by_export(tmp_path / "2", 1.0)
    (tmp_path / "latest").symlink_to("1")
    (tmp_path / "model").symlink_to("2")
    assert restored(tmp_path / "latest") == loaded(tmp_path / "model") == {1.0}


def test_tasks_refuse_links(tmp_path: Path) -> None:
    with memory_cluster(ps=2) as memory:
        cluster = memory.worker()
        with cluster.parameter_servers():
            variables = state(1.0)
        for number in (1, 2):
            dflow.save(tmp_path / str(number), variables)
            variables["b"].assign(jnp.full(2, 2.0))
        shutil.rmtree(tmp_path / "1" / "b")
        (tmp_path / "1" / "b").symlink_to(tmp_path / "2" / "b")
        variables["b"].assign(jnp.zeros(2))
        with pytest.raises(dflow.CheckpointError, match=f"{tmp_path}/1/b: expected .* itself, got a link"):
            dflow.restore(tmp_path / "1", variables)
        assert float(variables["b"].read().sum()) == 0
        cluster.close()


def test_a_manager_removes_a_link_and_not_what_it_leads_to(tmp_path: Path) -> None:
    with dflow.CheckpointManager(tmp_path / "other", state(1.0)) as manager:
        manager.save(0)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step_0").symlink_to(tmp_path / "other" / "step_0")
    variables = state(0.0)
    with dflow.CheckpointManager(tmp_path / "run", variables, keep=1) as manager:
        assert manager.resumed == 0
        for step in (1, 2):
            manager.save(step)
    assert sorted(entry.name for entry in (tmp_path / "run").glob("step_*")) == ["step_2"]
    assert restored(tmp_path / "other" / "step_0") == {1.0}
