"""Checkpoints of Orbax: dflow restores the library's, and the library reads dflow's."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dflow
from dflow.lowering.files.locations import open_arrays
from dflow.testing import memory_cluster
from tests.effort import examples
from tests.hostile_files import changed_bytes

pytestmark = pytest.mark.filterwarnings("ignore::dflow.tracing.primitives.namesakes.DuplicateNameWarning")

DTYPES = ["bool", "uint8", "int8", "uint32", "int32", "int64", "float16", "float32", "bfloat16"]
DTYPES += ["float64", "complex64", "float8_e4m3fn", "float8_e5m2", "int4"]


def write(path: Path, tree: Any) -> None:
    """Write a checkpoint by the library."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
        checkpointer.wait_until_finished()


def read(path: Path, target: Any = None) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, target)


def bits(value: Any) -> tuple[Any, Any, bytes]:
    array = np.asarray(value)
    return array.dtype, array.shape, array.tobytes()


def example() -> Any:
    """A tree of nested dicts and lists, with scalars and empty containers."""
    return {
        "params": {
            "dense": {"kernel": jnp.arange(6.0).reshape(2, 3).astype(jnp.bfloat16), "bias": jnp.ones(3)},
            "layers": [jnp.full(2, 2.0), {"w": jnp.full((1, 2), 3, "int4")}, (jnp.float32(4.0),)],
            "empty": {},
        },
        "opt": [{}, [], None],
        "step": jnp.int32(7),
        "epoch": 5,
        "rate": 0.1,
        "done": True,
    }


def zeros() -> Any:
    """Variables for all arrays of `example`."""
    params = {
        "dense": {"kernel": jnp.zeros((2, 3), jnp.bfloat16), "bias": jnp.zeros(3)},
        "layers": [jnp.zeros(2), {"w": jnp.zeros((1, 2), "int4")}, (jnp.float32(0.0),)],
    }
    rest = {"step": jnp.int32(0), "epoch": 0, "rate": 0.0, "done": False}
    return dflow.variables({"params": params, **rest})


NAMES = (
    *("done", "epoch", "params/dense/bias", "params/dense/kernel", "params/layers/0", "params/layers/1/w"),
    *("params/layers/2/0", "rate", "step"),
)


def test_a_checkpoint_of_the_library_is_restored_by_its_keys(tmp_path: Path) -> None:
    write(tmp_path / "c", example())
    state = zeros()
    assert dflow.restore(tmp_path / "c", state).restored == NAMES
    params, found = example()["params"], dflow.read(state)
    assert bits(found["params"]["dense"]["kernel"]) == bits(params["dense"]["kernel"])
    assert bits(found["params"]["layers"][1]["w"]) == bits(params["layers"][1]["w"])
    assert float(found["params"]["layers"][2][0]) == 4.0
    assert [int(found["step"]), int(found["epoch"]), bool(found["done"])] == [7, 5, True]
    assert bits(found["rate"]) == bits(np.float32(0.1))
    dflow.jit(lambda: state["step"].assign_add(1))()  # the restored values are the variables' own
    assert int(state["step"].read()) == 8


@settings(max_examples=examples(20), deadline=None)
@given(
    arrays=st.dictionaries(
        st.sampled_from(["a", "b", "c"]),
        st.builds(
            lambda dtype, shape: np.arange(int(np.prod(shape))).reshape(shape).astype(jnp.dtype(dtype)),
            st.sampled_from(DTYPES),
            st.lists(st.integers(1, 3), max_size=3).map(tuple),
        ),
        min_size=1,
    )
)
def test_arrays_of_the_library_keep_their_bits(
    arrays: dict[str, np.ndarray[Any, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("orbax") / "c"
    write(path, {"t": [arrays]})
    files = open_arrays(path)
    found = dict(files.each(dict.fromkeys(files.types)))
    assert {name: bits(value) for name, value in found.items()} == {
        f"t/0/{name}": bits(value) for name, value in arrays.items()
    }


def test_a_checkpoint_of_dflow_is_read_by_the_library_as_nested_dicts(tmp_path: Path) -> None:
    path, state = tmp_path / "c.orbax", zeros()
    write(tmp_path / "c", example())
    dflow.restore(tmp_path / "c", state)
    dflow.save(path, state)
    expected = dflow.read(state)
    found = read(path)
    assert bits(found["params"]["dense"]["kernel"]) == bits(expected["params"]["dense"]["kernel"])
    assert {key: bits(value) for key, value in found["params"]["layers"]["1"].items()} == {
        "w": bits(expected["params"]["layers"][1]["w"])
    }
    assert [bits(found[key]) for key in ("step", "rate", "done")] == [
        bits(expected[key]) for key in ("step", "rate", "done")
    ]
    target = jax.tree.map(lambda value: jax.ShapeDtypeStruct(value.shape, value.dtype), found)
    assert bits(read(path, target)["params"]["dense"]["bias"]) == bits(np.ones(3, "f4"))


def test_the_library_reads_each_dtype_of_dflow(tmp_path: Path) -> None:
    values = {name: jnp.arange(5).astype(name) for name in DTYPES if not name.endswith("t64")}
    values["empty"] = jnp.zeros((0, 2))
    dflow.save(tmp_path / "c.orbax", {"a": dflow.variables(values)})
    found = read(tmp_path / "c.orbax")
    assert {name: bits(value) for name, value in found.get("a", found).items()} == {
        name: bits(value) for name, value in values.items()
    }


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    w = dflow.Variable(jnp.ones(3), name="w")
    (tmp_path / "run" / "notes").mkdir(parents=True)
    with pytest.raises(dflow.NoCheckpoint, match=r"run is no checkpoint of dflow: it holds no dflow\.json\n"):
        dflow.restore(tmp_path / "run", w)
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(3, args=ocp.args.StandardSave({"w": jnp.full(3, 2.0)}))
    with pytest.raises(dflow.NoCheckpoint, match=r"in it there are: default; give the path of one of them"):
        dflow.restore(tmp_path / "run" / "3", w)
    dflow.restore(tmp_path / "run" / "3" / "default", w)
    assert float(w.sum()) == 6.0
    (tmp_path / "run" / "3" / "default" / "_METADATA").write_text("{")
    with pytest.raises(
        dflow.DamagedCheckpoint, match=r"default: expected a checkpoint of Orbax, got: .*\n.*\n  take an"
    ):
        dflow.restore(tmp_path / "run" / "3" / "default", w)


def test_a_checkpoint_of_dflow_that_lost_its_manifest_is_none_of_orbax(tmp_path: Path) -> None:
    """Orbax would read it, without what the manifest says of generators and keys."""
    w = dflow.Variable(jnp.ones(3), name="w")
    for name in ("c", "c.orbax"):
        dflow.save(tmp_path / name, w)
        (tmp_path / name / "dflow.json").unlink()
        with pytest.raises(dflow.NoCheckpoint, match="is no checkpoint of dflow"):
            dflow.restore(tmp_path / name, w)


def test_without_the_library_a_checkpoint_of_it_is_an_error_that_says_how_to_install_it(tmp_path: Path) -> None:
    write(tmp_path / "c", {"w": jnp.ones(3)})
    script = """
import sys
sys.modules["orbax.checkpoint"] = None  # as if it were not installed
import dflow, jax.numpy as jnp
w = dflow.Variable(jnp.zeros(3), name="w")
dflow.save(sys.argv[1] + "/own.orbax", w)
dflow.restore(sys.argv[1] + "/own.orbax", w)
try:
    dflow.restore(sys.argv[1] + "/c", w)
except dflow.CheckpointError as error:
    print(error)
"""
    ran = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert "c is a checkpoint of Orbax: expected the package orbax-checkpoint, got: " in ran.stdout, ran.stderr
    assert ran.stdout.endswith("  pip install 'dflow[orbax]'\n")


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"a": jnp.ones(1), "s": "text"}, "expected arrays and numbers, got a StringMetadata at 's'"),
        ({"a": {"b": jnp.ones(1)}, "a/b": jnp.ones(1)}, "expected one array of the name 'a/b', got 2"),
        ({"a": 2**40}, r"array 'a' in .*: expected a number that i32\[\] holds, got 1099511627776"),
        ({"a": 1e300}, r"array 'a' in .*: expected a number that f32\[\] holds, got 1e\+300"),
    ],
    ids=["text", "one name", "integer", "float"],
)
def test_what_no_variable_can_hold_is_refused(tmp_path: Path, tree: Any, says: str) -> None:
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "c", tree)
    a = dflow.Variable(tree["a"] - tree["a"] if not isinstance(tree["a"], dict) else 0, name="a")
    with pytest.raises(dflow.CheckpointError, match=says):
        dflow.restore(tmp_path / "c", a, strict=False)
    assert np.asarray(a.read()).sum() == 0


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["a.b", "a/b"], "arrays 'a.b' and 'a/b': expected names that differ by more than dots, slashes and case"),
        (["../x"], "array '../x': expected keys of letters, digits"),
        (["a//b"], "array 'a//b': expected keys"),
        (["_METADATA"], "array '_METADATA': expected keys"),
        (["x" * 256], "array 'x+': expected keys .*, of 255 characters"),
    ],
    ids=["a dot", "outside", "no key", "reserved", "long"],
)
def test_names_that_are_no_keys_of_orbax_are_refused(tmp_path: Path, names: list[str], says: str) -> None:
    state = [dflow.Variable(jnp.ones(1), name=name) for name in names]
    with pytest.raises(dflow.CheckpointError, match=rf"{says}.*\n.*\n  give (one of them|it) another name by names="):
        dflow.save(tmp_path / "c.orbax", state)
    assert os.listdir(tmp_path) == []
    dflow.save(tmp_path / "c", state)


@pytest.mark.parametrize("value", [jnp.ones(3, "uint4"), jax.random.key(1)], ids=["uint4", "key"])
def test_a_dtype_that_orbax_has_not_is_refused(tmp_path: Path, value: jax.Array) -> None:
    with pytest.raises(dflow.CheckpointError, match=r"array 'v': expected a dtype that Orbax reads, got "):
        dflow.save(tmp_path / "v.orbax", dflow.Variable(value, name="v"))
    assert os.listdir(tmp_path) == []


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("theirs") / "c"
    write(path, example())
    return path


# The library leaves tasks of asyncio behind when it fails.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@settings(max_examples=examples(40), deadline=None)
@given(rng=st.randoms(use_true_random=False))
def test_a_damaged_checkpoint_is_restored_in_all_or_an_error_that_changes_nothing(
    theirs: Path, tmp_path_factory: pytest.TempPathFactory, rng: random.Random
) -> None:
    path, state = Path(shutil.copytree(theirs, tmp_path_factory.mktemp("damaged") / "c")), zeros()
    file = rng.choice(sorted(path for path in path.rglob("*") if path.is_file()))
    file.unlink() if rng.random() < 0.2 else file.write_bytes(changed_bytes(file.read_bytes(), rng))
    before = jax.tree.map(bits, dflow.read(state))
    try:
        dflow.restore(path, state)
    except dflow.CheckpointError:
        assert jax.tree.map(bits, dflow.read(state)) == before, file


def test_a_damaged_array_is_named_and_the_others_can_be_read(tmp_path: Path) -> None:
    with ocp.PyTreeCheckpointer(use_ocdbt=False) as checkpointer:
        checkpointer.save(tmp_path / "c", {name: jnp.full(3, 2.0) for name in ("a", "b", "c")})
    (tmp_path / "c" / "b" / "0").write_bytes(b"x")
    state = dflow.variables({name: jnp.zeros(3) for name in ("a", "b", "c")})
    with pytest.raises(dflow.DamagedCheckpoint, match=r"array 'b' \(f32\[3\]\) in .*c is damaged or missing: .*"):
        dflow.restore(tmp_path / "c", state)
    assert [float(variable.sum()) for variable in state.values()] == [0.0] * 3
    del state["b"]
    dflow.restore(tmp_path / "c", state, ignore=["unexpected"])
    assert [float(variable.sum()) for variable in state.values()] == [6.0] * 2


SHARDED = """
import sys, jax, jax.numpy as jnp, orbax.checkpoint as ocp
mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
rows = jax.NamedSharding(mesh, jax.P("x"))
with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(sys.argv[1], {"w": jax.device_put(jnp.arange(8.0), rows)})
"""


@pytest.mark.once
def test_an_array_on_four_devices_is_restored_on_one(tmp_path: Path) -> None:
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    command = [sys.executable, "-c", SHARDED, str(tmp_path / "c")]
    subprocess.run(command, env=environment, timeout=60, check=True)
    w = dflow.Variable(jnp.zeros(8), name="w")
    dflow.restore(tmp_path / "c", w)
    assert w.read().tolist() == [*map(float, range(8))]


@pytest.fixture
def pair() -> Iterator[list[dflow.Variable]]:
    """Two variables on two tasks of a cluster."""
    with memory_cluster(ps=2) as memory:
        worker = memory.worker()
        with worker.parameter_servers():
            yield [dflow.Variable(lambda: jnp.zeros(3), name=name) for name in ("net/one", "net/two")]
        worker.close()


def test_tasks_of_a_cluster_read_and_write_checkpoints_of_orbax(tmp_path: Path, pair: list[dflow.Variable]) -> None:
    write(tmp_path / "c", {"net": {"one": jnp.full(3, 1.0), "two": jnp.full(3, 2.0)}})
    dflow.restore(tmp_path / "c", pair)
    assert [float(variable.read().sum()) for variable in pair] == [3.0, 6.0]
    dflow.save(tmp_path / "c.orbax", pair)
    assert {key: float(value.sum()) for key, value in read(tmp_path / "c.orbax")["net"].items()} == {
        "one": 3.0,
        "two": 6.0,
    }
