"""Exports: a directory complete or absent, of older versions, of random programs, and written by tasks."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import itertools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import dflow
from dflow.__main__ import main
from dflow.distributed.cluster.cluster_home import ClusterHome
from dflow.exporting.export_format import FORMAT
from dflow.testing import memory_cluster
from tests.dflow.test_programs import TIMES, Outcome, meaning
from tests.effort import examples
from tests.programs.draw import programs
from tests.programs.machines import Traced
from tests.programs.made import ARGUMENTS, plain, variables_of
from tests.programs.statements import Program

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


FOLDER = Path(__file__).parent / "exports"
MADE = sorted(path.name for path in FOLDER.glob("jax*"))


def steps() -> Any:
    """Arguments of the calls of each export when it was written."""
    spec = importlib.util.spec_from_file_location("make_exports", FOLDER / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.STEPS


@pytest.mark.device
@pytest.mark.parametrize("made", MADE)
def test_an_export_of_an_older_version_gives_what_it_gave_when_it_was_made(made: str) -> None:
    there = dflow.load(FOLDER / made, prefix=f"{made}/")
    expected = json.loads((FOLDER / made / "expected.json").read_text())
    got = [jax.tree.map(lambda array: np.asarray(array).tolist(), there.step(given)) for given in steps()]
    assert got == expected
    assert not there.variables["count"].trainable


@pytest.mark.parametrize("form", [2, 3, 4, 5])
def test_an_export_of_each_format_answers_as_when_it_was_made(form: int, tmp_path: Path) -> None:
    shutil.unpack_archive(FOLDER / f"format{form}.zip", tmp_path)
    there = dflow.load(tmp_path, prefix=f"format{form}/")
    for name, arguments, expected in json.loads((tmp_path / "expected.json").read_text()):
        given = (np.array(values, dtype) for values, dtype in arguments)
        np.testing.assert_allclose(there[name](*given), expected, rtol=1e-6, err_msg=name)
    model = dflow.load(there.save(tmp_path / "again"), prefix=f"again{form}/")
    assert all((held.read() == there.variables[name].read()).all() for name, held in model.variables.items())


_numbers = itertools.count()


def by_export(program: Program) -> list[Outcome]:
    """Return the results of each run of the loaded program, and the variables after it."""
    machine = Traced(variables_of(program), [])
    exported = dflow.export({"run": (lambda x, y: program(machine, x, y), *ARGUMENTS)})
    with tempfile.TemporaryDirectory() as folder:
        there = dflow.load(exported.save(Path(folder) / "made"), prefix=f"export_{next(_numbers)}/")
    # Variables that the program does not use are not part of its export.
    variables = [there.variables.get(variable.name, variable) for variable in machine.variables]
    outcomes = []
    for _ in range(TIMES):
        outputs: Any = there.run(*map(jnp.array, ARGUMENTS))
        outcomes.append((plain(outputs), [], plain(variable.read() for variable in variables), []))
    return outcomes


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:.*makes a new function of it each time")
@settings(max_examples=examples(8))
@given(program=programs())
def test_an_exported_program_does_what_jax_alone_would_do(program: Program) -> None:
    wanted = meaning(program)
    assert by_export(program) == wanted


ROWS = 30


@pytest.fixture(scope="module")
def worker() -> Iterator[Any]:
    with memory_cluster(ps=2, workers=1) as cluster, closing(cluster.worker()) as worker:
        yield worker


def refused(*_: Any) -> Any:
    raise AssertionError("the worker reads variables")


@pytest.mark.parametrize("form", [None, "int8", "bfloat16"])
def test_the_tasks_write_the_tables_of_an_export(
    form: Any, worker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with worker.parameter_servers():
        tables = [
            dflow.Embedding(ROWS, 2, name="blocks", shards=3),
            dflow.Embedding(ROWS, 2, name="modulo", shards=2, by="modulo"),
        ]
        layer = dflow.Variable(jnp.ones((2, 4)), name="layer")
    local = dflow.Variable(jnp.float32(3), name="local")

    def serve(ids: Any) -> Any:
        return sum(table(ids) for table in tables) @ layer * local

    with monkeypatch.context() as patch:
        patch.setattr(ClusterHome, "read_together", refused)
        exported = dflow.export(serve, dflow.spec("b", jnp.int32), platforms=["cpu"], weights=form)
        exported.save(tmp_path / "m")
    ids = np.arange(ROWS, dtype=np.int32)
    expected = sum(np.asarray(table.read()) for table in tables) @ np.ones((2, 4), np.float32) * 3
    found = dflow.load(tmp_path / "m", prefix=f"{form}/")(ids)
    np.testing.assert_allclose(found, expected, **({"rtol": 1e-6} if form is None else {"atol": 0.05}))
    if form is not None:
        return
    # The folder of the values is a checkpoint.
    blocks = dflow.ShardedVariable(jnp.zeros((ROWS, 2)), name="blocks")
    dflow.restore(tmp_path / "m" / "variables", blocks, ignore=["unexpected"])
    np.testing.assert_array_equal(blocks.read(), tables[0].read())
