"""The directory of an export: complete or absent, and refused if it is damaged, newer, or not an export."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import dflow
from dflow.exporting.export_format import FORMAT

HERE = Path(__file__).name
TABLE = jnp.arange(40_000.0).reshape(200, 200)
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of a function with a variable and a large constant."""
    w = dflow.Variable(jnp.ones(200), name="layer/w")

    def serve(x: Any) -> Any:
        w.assign_add(x)
        return TABLE @ w

    exported = dflow.export(serve, jax.ShapeDtypeStruct((200,), jnp.float32))
    return exported.save(tmp_path_factory.mktemp("export") / "made")


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """Copy the directory, to damage the copy."""
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def changed(name: str, change: Callable[[Any], None]) -> Callable[[Path], None]:
    """Damage the manifest by changing fields."""

    def damage(path: Path) -> None:
        content = json.loads((path / name).read_text())
        change(content)
        (path / name).write_text(json.dumps(content))

    return damage


def cut(name: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        file = next(path.glob(name))
        file.write_bytes(file.read_bytes()[:-1])

    return damage


def flipped(name: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        file = next(path.glob(name))
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)

    return damage


def removed(name: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        found = next(path.glob(name))
        shutil.rmtree(found) if found.is_dir() else found.unlink()

    return damage


def of_convention(version: int) -> Callable[[Path], None]:
    return changed("manifest.json", lambda m: m["signatures"]["serve"].update(calling_convention_version=version))


def put(path: Path, content: bytes) -> None:
    """Replace the program by these bytes, with matching size and digest in the manifest."""
    (path / "programs" / "serve").write_bytes(content)
    facts = {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    changed("manifest.json", lambda m: m["signatures"]["serve"].update(facts))(path)


def of_a_newer_jax(path: Path) -> None:
    """A program whose StableHLO version this JAX does not know."""
    program = jax.export.deserialize(bytearray((path / "programs" / "serve").read_bytes()))
    put(path, bytes(dataclasses.replace(program, mlir_module_serialized=b"ML\xefR of tomorrow").serialize()))
    changed("manifest.json", lambda m: m.update(jax="99.1"))(path)


COPY_AGAIN = "copy the directory again, or export again"

#: A kind of damage, the fact in the message, and the remedy.
DAMAGES: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "no directory": (shutil.rmtree, "there is no directory", "dflow.export(fn, ...).save(path)"),
    "no manifest": (
        removed("manifest.json"),
        "holds no export: it has no manifest.json, but constants, programs, variables",
        "give the directory that dflow.export(...).save wrote",
    ),
    "a manifest that is cut": (cut("manifest.json"), "manifest.json is damaged: ", COPY_AGAIN),
    "a manifest that is no manifest": (
        changed("manifest.json", dict.clear),
        "manifest.json is damaged: Object missing required field `format`",
        COPY_AGAIN,
    ),
    "a manifest without a part": (
        changed("manifest.json", lambda m: m["signatures"]["serve"].pop("result")),
        "manifest.json is damaged: Object missing required field `result`",
        COPY_AGAIN,
    ),
    "a name that leads elsewhere": (
        changed("manifest.json", lambda m: m["signatures"].update({"../serve": m["signatures"].pop("serve")})),
        "manifest.json is damaged: '../serve' is no name of a function",
        COPY_AGAIN,
    ),
    "a function of variables that are not there": (
        changed("manifest.json", lambda m: m["variables"].clear()),
        "manifest.json is damaged: serve uses 'layer/w', and says nothing else of it",
        COPY_AGAIN,
    ),
    "a newer format": (
        changed("manifest.json", lambda m: m.update(format=FORMAT + 1, dflow="9.1", signatures=[])),
        f"is of format {FORMAT + 1}, written by dflow 9.1; this is dflow {dflow.__version__}, which reads formats up",
        "install dflow 9.1 or newer",
    ),
    "a newer convention of calls": (
        of_convention(1000),
        f"was written by JAX {jax.__version__}, whose programs are called by convention 1000; JAX {jax.__version__}",
        "install a newer JAX",
    ),
    "an older convention of calls": (of_convention(1), "called by convention 1;", "export again with a newer JAX"),
    "a program that is missing": (removed("programs/serve"), "programs/serve is damaged: it is missing", COPY_AGAIN),
    "a program that is cut": (cut("programs/serve"), "in the place of", COPY_AGAIN),
    "a program with a wrong bit": (
        flipped("programs/serve"),
        "programs/serve is damaged: its digest is not the one in the manifest",
        COPY_AGAIN,
    ),
    "a program that is none": (
        lambda path: put(path, b"nothing"),
        f"JAX {jax.__version__} cannot read the program 'serve'",
        f"load it with JAX {jax.__version__}, or export it again",
    ),
    "a program of a newer JAX": (
        of_a_newer_jax,
        f"JAX {jax.__version__} cannot read the program 'serve'",
        "load it with JAX 99.1, or export it again; JAX says:",
    ),
    "an array that is missing": (removed("variables/layer/w/c.0"), "'layer/w'", COPY_AGAIN),
    "an array with a wrong bit": (flipped("constants/TABLE/c.0.0"), "'TABLE'", COPY_AGAIN),
    "a variable that is not there": (
        changed("manifest.json", lambda m: m["variables"].update(v={"type": "f32[]", "trainable": True})),
        "there is no array 'v'",
        COPY_AGAIN,
    ),
    "a variable of another type": (
        changed("manifest.json", lambda m: m["variables"]["layer/w"].update(type="f32[3]")),
        "layer/w is f32[200], and f32[3] in the manifest",
        COPY_AGAIN,
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_directory_that_cannot_be_loaded_says_why_and_what_to_do(damage: str, copy: Path) -> None:
    do, fact, remedy = DAMAGES[damage]
    do(copy)
    with pytest.raises(dflow.ExportError) as caught:
        dflow.load(copy)
    text = str(caught.value)
    assert fact in text
    assert remedy in text
    assert HERE in text
    assert str(copy) in text


def test_a_whole_one_loads_also_by_a_relative_path(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(whole.parent)
    there = dflow.load(whole.name, prefix="relative/")
    assert float(there(jnp.zeros(200))[0]) == float(TABLE[0].sum())


def exported() -> dflow.Exported:
    w = dflow.Variable(7.0, name="seven")
    return dflow.export({"read": (w.read,)})


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_there_and_no_export_is_never_replaced(overwrite: bool, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("...")
    with pytest.raises(dflow.DflowError, match="exists"):
        exported().save(tmp_path / "mine", overwrite=overwrite)
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "..."
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine"]


def test_an_export_is_replaced_only_when_asked_and_nothing_is_left_beside_it(whole: Path, copy: Path) -> None:
    with pytest.raises(FileExistsError, match="exists"):
        exported().save(copy)
    assert dflow.load(copy, prefix="old/").signatures == ("serve",)
    assert exported().save(copy, overwrite=True) == copy
    assert dflow.load(copy, prefix="new/").signatures == ("read",)
    assert [entry.name for entry in copy.parent.iterdir()] == ["copy"]


def test_a_save_that_fails_leaves_what_was_there(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("dflow.exporting.export_format.fill_folder", full)
    with pytest.raises(dflow.CheckpointError, match="cannot be written: the disk is full"):
        exported().save(copy, overwrite=True)
    assert dflow.load(copy, prefix="kept/").signatures == ("serve",)
    assert [entry.name for entry in copy.parent.iterdir()] == ["copy"]


def test_state_of_64_bits_is_not_cut_to_32_in_silence(tmp_path: Path) -> None:
    with jax.enable_x64(True):
        w = dflow.Variable(jnp.ones(2, "float64"), name="wide")
        path = dflow.export({"twice": (lambda: w * 2,)}).save(tmp_path / "wide")
    with pytest.raises(
        dflow.ExportError, match=r"64-bit precision, and this process has it off: variable 'wide' is f64\[2\]"
    ):
        dflow.load(path)
    with jax.enable_x64(True):
        assert dflow.load(path, prefix="there/").twice().dtype == "float64"


def test_variables_of_names_that_are_in_use_say_so_unless_a_prefix_tells_them_apart(whole: Path) -> None:
    mine = dflow.Variable(jnp.zeros(3), name="layer/w")
    with pytest.raises(dflow.VariableError, match="'layer/w' holds f32"):
        dflow.load(whole)
    assert dflow.load(whole, prefix="theirs/").variables["layer/w"].name == "theirs/layer/w"
    assert mine.shape == (3,)


def test_the_command_line_lists_an_export(whole: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "dflow", "show", str(whole)],
        capture_output=True, text=True, timeout=DEADLINE_S, check=False, env={**os.environ},
    )  # fmt: skip
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "serve(x: f32[200]) -> f32[200]\n  writes: layer/w\n  constants: TABLE\n" in ran.stdout
    missing = subprocess.run(
        [sys.executable, "-m", "dflow", "show", str(whole / "programs")],
        capture_output=True, text=True, timeout=DEADLINE_S, check=False, env={**os.environ},
    )  # fmt: skip
    assert missing.returncode == 1
    assert missing.stderr.startswith("dflow show: ")
    assert "holds no export: it has no manifest.json, but serve" in missing.stderr
