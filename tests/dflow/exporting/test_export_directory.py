"""The directory of an export: complete or absent, and refused if it is damaged, newer, or not an export."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

import dflow
from dflow.__main__ import main
from dflow.exporting.export_format import FORMAT

HERE = Path(__file__).name
TABLE = jnp.arange(40_000.0).reshape(200, 200)


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


class Damaged(NamedTuple):
    """A kind of damage, and the remedy in the message."""

    damage: Callable[[Path], None]
    remedy: str


#: By the fact in the message.
DAMAGES: dict[str, Damaged] = {
    "there is no directory": Damaged(shutil.rmtree, "dflow.export(fn, ...).save(path)"),
    "holds no export: it has no manifest.json, but constants, programs, variables": Damaged(
        removed("manifest.json"), "give the directory that dflow.export(...).save wrote"
    ),
    "manifest.json is damaged: Object missing required field `format`": Damaged(
        changed("manifest.json", dict.clear), COPY_AGAIN
    ),
    "manifest.json is damaged: '../serve' is no name of a function": Damaged(
        changed("manifest.json", lambda m: m["signatures"].update({"../serve": m["signatures"].pop("serve")})),
        COPY_AGAIN,
    ),
    "manifest.json is damaged: serve uses 'layer/w', and says nothing else of it": Damaged(
        changed("manifest.json", lambda m: m["variables"].clear()), COPY_AGAIN
    ),
    f"is of format {FORMAT + 1}, written by dflow 9.1; this is dflow {dflow.__version__}, which reads": Damaged(
        changed("manifest.json", lambda m: m.update(format=FORMAT + 1, dflow="9.1", signatures=[])),
        "install dflow 9.1 or newer",
    ),
    f"was written by JAX {jax.__version__}, whose programs are called by convention 1000; JAX": Damaged(
        of_convention(1000), "install a newer JAX"
    ),
    "called by convention 1;": Damaged(of_convention(1), "export again with a newer JAX"),
    "programs/serve is damaged: it is missing": Damaged(removed("programs/serve"), COPY_AGAIN),
    "expected ": Damaged(cut("programs/serve"), COPY_AGAIN),
    "programs/serve is damaged: its digest is not the one in the manifest": Damaged(
        flipped("programs/serve"), COPY_AGAIN
    ),
    f"JAX {jax.__version__} cannot read the program 'serve'": Damaged(
        lambda path: put(path, b"nothing"), f"load it with JAX {jax.__version__}, or export it again"
    ),
    "cannot read the program 'serve'": Damaged(of_a_newer_jax, "load it with JAX 99.1, or export it again; JAX says:"),
    "'layer/w'": Damaged(removed("variables/layer/w/c.0"), COPY_AGAIN),
    "'TABLE'": Damaged(flipped("constants/TABLE/c.0.0"), COPY_AGAIN),
    "there is no array 'v'": Damaged(
        changed("manifest.json", lambda m: m["variables"].update(v={"type": "f32[]", "trainable": True})), COPY_AGAIN
    ),
    "layer/w is f32[200], and f32[3] in the manifest": Damaged(
        changed("manifest.json", lambda m: m["variables"]["layer/w"].update(type="f32[3]")), COPY_AGAIN
    ),
}


@pytest.mark.parametrize("fact", DAMAGES)
def test_a_directory_that_cannot_be_loaded_says_why_and_what_to_do(fact: str, copy: Path) -> None:
    damage, remedy = DAMAGES[fact]
    damage(copy)
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


def test_the_command_line_lists_an_export(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(whole)]) == 0
    assert "serve(x: f32[200]) -> f32[200]\n  writes: layer/w\n  constants: TABLE\n" in capsys.readouterr().out
    assert main(["show", str(whole / "programs")]) == 1
    missing = capsys.readouterr().err
    assert missing.startswith("dflow show: ")
    assert "holds no export: it has no manifest.json, but serve" in missing


@pytest.mark.once
def test_large_tables_are_memory_of_their_files_and_stay_as_they_were_saved(tmp_path: Path) -> None:
    held = dflow.Embedding(300_000, 16, name="held", shards=2)

    def step(ids: Any) -> Any:
        held.scatter_add(ids, jnp.ones((*ids.shape, 16)))
        return held(ids)

    ids = jnp.array([0, 150_000, 299_999], jnp.int32)
    dflow.export({"look": (held, ids), "step": (step, ids)}, platforms=["cpu"]).save(tmp_path / "m")
    for again in range(2):
        model = dflow.load(tmp_path / "m", prefix=f"{again}/")
        assert f"{tmp_path}/m/variables/held/c.0.0" in Path("/proc/self/maps").read_text()
        assert (model.look(ids) == held(ids)).all()
        assert (model.step(ids) == held(ids) + 1).all()
