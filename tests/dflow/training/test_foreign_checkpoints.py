"""A checkpoint of unknown origin is restored, or raises a CheckpointError and leaves every variable unchanged."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import zlib
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dflow
from dflow.lowering.files.array_files import read_arrays
from dflow.lowering.files.array_manifest import MANIFEST
from tests.effort import examples
from tests.hostile_files import damage
from tests.lowering.files.written_arrays import write_arrays


def repaired(file: Path, document: Any) -> Any:
    """Return the manifest with the checksum of its content, as an attacker would."""
    if file.name == MANIFEST and isinstance(document, dict) and "content" in document:
        document["crc32"] = zlib.crc32(json.dumps(document["content"], sort_keys=True).encode())
    return document


def rewrite(file: Path, **changes: Any) -> None:
    """Change fields of a manifest's content, or of a `zarr.json`."""
    document = json.loads(file.read_text())
    (document["content"] if file.name == MANIFEST else document).update(changes)
    file.write_text(json.dumps(repaired(file, document)))


def entry(**changes: str) -> dict[str, Any]:
    """The arrays of a manifest with one array, `w`."""
    return {"w": {"path": "w", "type": "f32[6]", **changes}}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint of one array."""
    write_arrays(tmp_path / "c", {"w": np.arange(6, dtype=np.float32)})
    return tmp_path / "c"


def refused(path: Path, says: str) -> None:
    with pytest.raises(dflow.CheckpointError, match=says):
        read_arrays(path).read({"w": None})


@pytest.mark.parametrize("place", ["../secret", "/etc", "w/../../secret", "", "w//x", "./w", "w\0", "\ud800"])
def test_an_array_outside_of_the_folder_is_refused(path: Path, place: str) -> None:
    shutil.copytree(path / "w", path.parent / "secret")
    rewrite(path / MANIFEST, arrays=entry(path=place))
    refused(path, r"(?s)the manifest .* is damaged: array 'w' lies at .*, which is no path inside the folder.*take an")


@pytest.mark.parametrize("type", ["f32[?]", "token", "f32[1,,2]", "ref<" * 3000, f"f32[{'9' * 5000}]", "f32[6]\n"])
def test_a_type_that_is_none_of_an_array_is_refused(path: Path, type: str) -> None:
    rewrite(path / MANIFEST, arrays=entry(type=type))
    refused(path, "the manifest .* is damaged")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"arrays": []}, "Expected `object`, got `array`"),
        ({"arrays": {"w": {"path": "w"}}}, "Object missing required field `type`"),
        ({"id": 3}, "Expected `str`, got `int`"),
        ({"metadata": None}, "Expected `object`, got `null`"),
        ({"version": "1"}, "version: expected int, got '1'"),
    ],
)
def test_a_manifest_of_another_form_is_refused(path: Path, changes: dict[str, Any], says: str) -> None:
    rewrite(path / MANIFEST, **changes)
    refused(path, f"dflow.json is damaged: {says}")


def test_a_manifest_nested_without_end_is_refused(path: Path) -> None:
    (path / MANIFEST).write_text('{"crc32": 0, "content": ' + "[" * 100_000)
    refused(path, "dflow.json is damaged: maximum recursion depth")


@pytest.mark.parametrize("file", [MANIFEST, "w/zarr.json", "w/c.0"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_file_is_refused_and_not_waited_for(path: Path, file: str, kind: str) -> None:
    place = path / file
    place.unlink()
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "device":
        place.symlink_to("/dev/zero")
    else:
        place.mkdir()
    says = {"device": "got a link to /dev/zero"}.get(kind, "not a regular file")
    refused(path, "chunks instead of 1" if (file, kind) == ("w/c.0", "folder") else says)


def test_a_folder_of_chunks_behind_a_link_is_refused(path: Path) -> None:
    """A pipe in it would not be seen."""
    os.mkdir(path.parent / "elsewhere")
    (path / "w" / "c").symlink_to(path.parent / "elsewhere")
    refused(path, "got a link to")


def test_a_compressed_array_is_refused_by_its_codecs_before_a_chunk_is_read(path: Path) -> None:
    """2 MB of gzip may hold 2 GiB."""
    (path / "w" / "c.0").write_bytes(b"not gzip, which reading would report instead")
    codecs = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "gzip", "configuration": {"level": 9}}]
    rewrite(path / "w" / "zarr.json", codecs=codecs)
    refused(path, "(?s)array 'w' .* is damaged or missing: .*codec")


def test_a_chunk_larger_than_its_array_is_refused(path: Path) -> None:
    grid = {"name": "regular", "configuration": {"chunk_shape": [1 << 29]}}
    rewrite(path / "w" / "zarr.json", chunk_grid=grid)
    refused(path, r"it is stored in chunks of shape \[536870912\]")


def test_an_array_larger_than_its_files_is_refused_before_it_takes_memory(path: Path) -> None:
    rewrite(path / MANIFEST, arrays=entry(type=f"f32[{1 << 40}]"))
    rewrite(path / "w" / "zarr.json", shape=[1 << 40])
    refused(path, "it has 1 chunks instead of 183251937963")


def test_a_file_longer_than_its_chunk_is_refused_unread(path: Path) -> None:
    os.truncate(path / "w" / "c.0", 1 << 40)
    refused(path, "a chunk has 1099511627776 bytes instead of 28")


@pytest.fixture(scope="module")
def state() -> dict[str, Any]:
    """Variables of several kinds, and a generator."""
    w = dflow.Variable(jnp.arange(6.0), name="foreign/w")
    y = dflow.Variable(jnp.zeros((2, 2), "int8"), name="foreign/y")
    return {"w": w, "y": y, "noise": dflow.Generator(3, name="foreign/noise")}


@pytest.fixture(scope="module")
def saved(state: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("foreign") / "c"
    dflow.save(path, state)
    return path


@settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))
@given(rng=st.randoms(use_true_random=False))
def test_a_damaged_checkpoint_is_an_error_that_changes_no_variable(
    state: dict[str, Any], saved: Path, tmp_path_factory: pytest.TempPathFactory, rng: random.Random
) -> None:
    path = Path(shutil.copytree(saved, tmp_path_factory.mktemp("damaged") / "c"))
    file = damage(path, rng, repaired)
    before = {name: np.asarray(dflow.read(state[name])) for name in ("w", "y")}
    with contextlib.suppress(dflow.CheckpointError):
        dflow.restore(path, state)
    after = {name: np.asarray(dflow.read(state[name])) for name in ("w", "y")}
    for name, value in after.items():
        assert (value.dtype, value.tobytes()) == (before[name].dtype, before[name].tobytes()), file
