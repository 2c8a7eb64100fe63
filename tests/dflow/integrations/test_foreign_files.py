"""Files of TensorFlow, PyTorch and Keras are restored by names and orders of dimensions, alone and on a cluster.

`checkpoints_of_tensorflow` has what TensorFlow 2.21 wrote, by the program `write.py` there.
"""

from __future__ import annotations

import contextlib
import random
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dflow
from dflow.lowering.files.locations import open_arrays
from dflow.testing import memory_cluster
from tests.effort import examples
from tests.hostile_files import changed_bytes

pytestmark = [
    pytest.mark.once,
    pytest.mark.filterwarnings("ignore::dflow.tracing.primitives.namesakes.DuplicateNameWarning"),
]
WRITTEN = Path(__file__).with_name("checkpoints_of_tensorflow")


def values(path: Path) -> dict[str, Any]:
    files = open_arrays(path)
    return dict(files.each(dict.fromkeys(files.types)))


def torch_file(path: Path) -> dict[str, Any]:
    """Write a file with a state dict of two layers; return its arrays by name."""
    torch = pytest.importorskip("torch")
    state = {
        "conv.weight": torch.arange(48.0).reshape(4, 3, 2, 2),
        "dense.weight": torch.arange(6.0, dtype=torch.bfloat16).reshape(2, 3),
        "dense.bias": torch.ones(2, dtype=torch.float16),
    }
    torch.save({"model": state, "epoch": 3, "optimizer": {"state": [torch.tensor([1, 2])]}}, path)
    return {name: value.float().numpy() for name, value in state.items()}


def model() -> Any:
    return dflow.variables(
        {
            "conv": {"kernel": jnp.zeros((2, 2, 3, 4))},
            "dense": {"kernel": jnp.zeros((3, 2)), "bias": jnp.zeros(2)},
        }
    )


PAIRS = [("/", "."), ("kernel$", "weight"), ("^", "model/")]
ORDERS = {"conv/kernel": (2, 3, 1, 0), ".*e/kernel": (1, 0)}


def test_a_file_of_pytorch_is_restored_by_pairs_of_names_orders_of_dimensions_and_a_cast(tmp_path: Path) -> None:
    expected, variables = torch_file(tmp_path / "m.pt"), model()
    assert [str(type) for type in open_arrays(tmp_path / "m.pt").types.values()] == [
        *("f32[4,3,2,2]", "bf16[2,3]", "f16[2]", "i64[2]"),
    ]
    report = dflow.restore(
        tmp_path / "m.pt", variables, names=PAIRS, transpose=ORDERS, cast=True, ignore=["unexpected"]
    )
    assert sorted(report.converted) == ["model/dense.bias", "model/dense.weight"]
    assert np.array_equal(variables["conv"]["kernel"].read(), expected["conv.weight"].transpose(2, 3, 1, 0))
    assert np.array_equal(variables["dense"]["kernel"].read(), expected["dense.weight"].T)
    assert np.array_equal(variables["dense"]["bias"].read(), np.ones(2))


def test_what_differs_is_listed_with_the_nearest_names_and_the_orders_that_fit(tmp_path: Path) -> None:
    torch_file(tmp_path / "m.pt")
    with pytest.raises(dflow.CheckpointError) as caught:
        dflow.restore(tmp_path / "m.pt", model(), names={"conv/kernel": "model/conv.weight"})
    text = str(caught.value)
    assert "give transpose={'conv/kernel': (2, 3, 1, 0)}" in text
    assert [line.split("│")[-2].strip() for line in text.splitlines() if line.startswith("│ missing")] == [
        *("model/dense.bias: f16[2]", "model/dense.weight: bf16[2,3]"),
    ]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"transpose": {"w": (0, 0)}}, r"'w': expected an order of the 2 dimensions of 'w', got \(0, 0\)"),
        ({"transpose": {"v": (1, 0)}}, r"got 'v', which none matches\n.*\n  the variables are w"),
        ({"transpose": {"(": (1, 0)}}, r"'\(' is no regular expression"),
        ({"names": [("w",)]}, r"names: expected pairs of a regular expression and a replacement, got \('w',\)"),
    ],
)
def test_orders_and_pairs_that_do_not_fit_are_refused(tmp_path: Path, options: Any, says: str) -> None:
    w = dflow.Variable(jnp.zeros((2, 3)), name="w")
    dflow.save(tmp_path / "c", w)
    with pytest.raises(dflow.CheckpointError, match=says):
        dflow.restore(tmp_path / "c", w, **options)


@pytest.mark.parametrize("name", ["m.keras", "m.weights.h5"])
def test_files_of_keras_are_restored_by_the_paths_of_their_datasets(tmp_path: Path, name: str) -> None:
    keras = pytest.importorskip("keras")
    layers = [keras.Input((3,)), keras.layers.Dense(2, name="a"), keras.layers.Dense(4, name="b", dtype="bfloat16")]
    written = keras.Sequential(layers)
    written.save(tmp_path / name) if name == "m.keras" else written.save_weights(tmp_path / name)
    a, b = (
        dflow.variables({"kernel": jnp.zeros(shape), "bias": jnp.zeros(shape[1])}, prefix=f"{layer}/")
        for layer, shape in (("a", (3, 2)), ("b", (2, 4)))
    )
    pairs = [("^a", "layers/dense/vars"), ("^b", "layers/dense_1/vars"), ("kernel", "0"), ("bias", "1")]
    dflow.restore(tmp_path / name, [a, b], names=pairs, ignore=["unexpected"], cast=True)
    for variables, layer in ((a, written.layers[0]), (b, written.layers[1])):
        assert np.array_equal(variables["kernel"].read(), np.asarray(layer.kernel, "f4"))


def test_a_file_of_hdf5_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["w"] = np.ones(3)
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["w"] = h5py.ExternalLink("a.h5", "w")
    with pytest.raises(dflow.DamagedCheckpoint, match=r"b.h5: expected an HDF5 file, got: a link at 'w'"):
        dflow.restore(tmp_path / "b.h5", dflow.Variable(jnp.zeros(3), name="w"))


def test_checkpoints_of_tensorflow_have_the_names_of_variables_and_of_objects() -> None:
    first = values(WRITTEN / "first")
    assert {name: (value.dtype.name, value.shape) for name, value in first.items()} == {
        "table": ("float32", (10, 3)),  # in 3 parts
        "half": ("bfloat16", (2,)),
        "global_step": ("int64", ()),
    }
    assert np.array_equal(first["table"], np.arange(30.0).reshape(10, 3))
    assert first["global_step"] == 7
    for path in (WRITTEN / "second", WRITTEN / "second" / "ckpt-1", WRITTEN / "second" / "ckpt-1.index"):
        second = values(path)
        assert np.array_equal(second["net/kernel"], np.arange(6.0).reshape(2, 3)), path
        assert second["save_counter"] == 1


@settings(max_examples=examples(60), deadline=None)
@given(rng=st.randoms(use_true_random=False))
def test_a_damaged_checkpoint_of_tensorflow_is_an_error_or_has_the_same_values(
    tmp_path_factory: pytest.TempPathFactory, rng: random.Random
) -> None:
    folder = shutil.copytree(WRITTEN, tmp_path_factory.mktemp("tensorflow") / "c")
    file = rng.choice([*folder.glob("first*")])
    file.write_bytes(changed_bytes(file.read_bytes(), rng))
    with contextlib.suppress(dflow.CheckpointError):
        for name, value in values(folder / "first").items():
            assert np.array_equal(value, values(WRITTEN / "first")[name])


def test_tasks_read_their_parts_of_the_files_of_other_libraries(tmp_path: Path) -> None:
    expected = torch_file(tmp_path / "m.pt")
    with memory_cluster(ps=2) as memory:
        cluster = memory.worker()
        with cluster.parameter_servers():
            table = dflow.ShardedVariable(lambda: jnp.zeros((10, 3)), name="foreign_table")
            kernel = dflow.ShardedVariable(lambda: jnp.zeros((3, 2)), name="foreign_kernel")
            conv = dflow.Variable(lambda: jnp.zeros((2, 2, 3, 4)), name="foreign_conv")
        dflow.restore(WRITTEN / "first", table, names={"foreign_table": "table"}, ignore=["unexpected"])
        dflow.restore(
            tmp_path / "m.pt",
            [kernel, conv],
            names={"foreign_kernel": "model/dense.weight", "foreign_conv": "model/conv.weight"},
            transpose={"foreign_kernel": (1, 0), "foreign_conv": (2, 3, 1, 0)},
            cast=True,
            ignore=["unexpected"],
        )
        assert np.array_equal(table.read(), np.arange(30.0).reshape(10, 3))
        assert np.array_equal(kernel.read(), expected["dense.weight"].T)
        assert np.array_equal(conv.read(), expected["conv.weight"].transpose(2, 3, 1, 0))
        cluster.close()
