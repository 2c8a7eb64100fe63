"""Loaders of other libraries feed steps and queues, and other libraries read safetensors files that dflow writes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy

import dflow
from dflow.data import batches, numpy_batches
from dflow.testing import memory_cluster

pytestmark = [
    pytest.mark.once,
    pytest.mark.filterwarnings("ignore::dflow.tracing.primitives.namesakes.DuplicateNameWarning"),
]

ROWS, SIZE = 12, 3
ORDER = np.arange(ROWS).reshape(-1, SIZE).tolist()


def torch_dataset() -> Any:
    torch = pytest.importorskip("torch")
    return torch.utils.data.TensorDataset(torch.arange(ROWS, dtype=torch.int32), torch.arange(ROWS) / 2)


def grain_rows() -> Any:
    grain = pytest.importorskip("grain")
    return grain.MapDataset.source(np.arange(ROWS, dtype="i4")).map(lambda row: (row, np.float32(row / 2)))


def rows_of_datasets() -> Any:
    datasets = pytest.importorskip("datasets")
    columns = {"row": np.arange(ROWS, dtype="i4"), "half": np.arange(ROWS, dtype="f4") / 2}
    return datasets.Dataset.from_dict(columns).with_format("numpy")


def rows_of_tensorflow() -> Any:
    tensorflow = pytest.importorskip("tensorflow")
    return tensorflow.data.Dataset.from_tensor_slices((np.arange(ROWS, dtype="i4"), np.arange(ROWS, dtype="f4") / 2))


def loader_of_torch() -> Any:
    import torch

    return torch.utils.data.DataLoader(torch_dataset(), batch_size=SIZE)


LOADERS: dict[str, Callable[[], Any]] = {
    "torch": lambda: (torch_dataset(), loader_of_torch())[1],
    "grain": lambda: grain_rows().batch(SIZE),
    "grain iterator": lambda: grain_rows().batch(SIZE).to_iter_dataset(),
    "datasets": lambda: rows_of_datasets().batch(SIZE).with_format("numpy"),
    "datasets streamed": lambda: rows_of_datasets().to_iterable_dataset().with_format("numpy").batch(SIZE),
    "tensorflow": lambda: rows_of_tensorflow().batch(SIZE),
}


def first_column(batch: Any) -> list[int]:
    """Return the numbers of a batch's rows."""
    return np.asarray(batch["row"] if isinstance(batch, dict) else batch[0]).tolist()


@pytest.mark.parametrize("name", LOADERS)
def test_the_batches_of_a_loader_go_to_a_step_and_to_a_queue(name: str) -> None:
    loader = LOADERS[name]()
    made = list(numpy_batches(loader))
    assert [first_column(batch) for batch in made] == ORDER
    leaves = jax.tree.leaves(made)
    assert {type(leaf) for leaf in leaves} == {np.ndarray}
    assert {leaf.dtype.kind for leaf in leaves} == {"i", "f"}

    @dflow.jit
    def step(*batch: Any) -> Any:
        (given,) = batch if len(batch) == 1 else (batch,)
        return given["row"] if isinstance(given, dict) else given[0]

    strategy = dflow.distributed.Async(dflow.connect())
    # A second loop begins again.
    for _ in range(2):
        assert [rows.tolist() for rows in strategy.run(step, numpy_batches(loader), steps=len(ORDER))] == ORDER

    queue = dflow.FIFOQueue(
        2, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, np.dtype(leaf.dtype.kind + "4")), made[0])
    )
    with dflow.data.feed(loader, queue):  # which converts by itself
        assert [first_column(queue.dequeue()) for _ in ORDER] == ORDER


@pytest.mark.parametrize("make", [torch_dataset, grain_rows, rows_of_datasets])
def test_a_dataset_is_shuffled_and_shared_by_number(make: Callable[[], Any]) -> None:
    """Each row is used once in an epoch, whichever worker does the step."""
    data = batches(make(), SIZE, shuffle=True, seed=1, epochs=None)
    assert [first_column(data[number]) for number in range(8)] == [
        first_column(batch) for batch in itertools.islice(data, 8)
    ]
    assert sorted(itertools.chain(*(first_column(data[number]) for number in range(4)))) == list(range(ROWS))
    with memory_cluster(workers=2) as memory:
        workers = [memory.worker(index) for index in range(2)]

        def train(index: int) -> Any:
            with workers[index].parameter_servers():
                times_used = dflow.Variable(lambda: jnp.zeros(ROWS), name="times used")

            @dflow.jit
            def step(rows: Any) -> None:
                times_used.scatter_add(rows, jnp.ones(SIZE))

            strategy = dflow.distributed.Async(workers[index])
            for _ in strategy.run(step, lambda number: np.array(first_column(data[number])), steps=8, name="rows"):
                pass
            return times_used.read()

        with ThreadPoolExecutor(2) as pool:
            *_, used = pool.map(train, range(2))
        for worker in workers:
            worker.close()
    np.testing.assert_array_equal(used, np.full(ROWS, 2.0))


def grain_at(state: Any) -> Any:
    iterator = iter(LOADERS["grain iterator"]())
    iterator.set_state(state)
    return iterator


def datasets_at(state: Any) -> Any:
    dataset = LOADERS["datasets streamed"]()
    dataset.load_state_dict(state)
    return dataset


@pytest.mark.parametrize(
    ("make", "position", "at"),
    [
        (lambda: iter(LOADERS["grain iterator"]()), lambda one: one.get_state(), grain_at),
        (LOADERS["datasets streamed"], lambda one: one.state_dict(), datasets_at),
    ],
    ids=["grain", "datasets"],
)
def test_a_stream_goes_on_after_the_last_step_that_was_done(
    make: Callable[[], Any], position: Callable[[Any], Any], at: Callable[[Any], Any]
) -> None:
    """A loop takes no batch before the step that uses it, so the position of the stream is that of the run."""
    stream = make()
    strategy = dflow.distributed.Async(dflow.connect())
    state = None
    for _ in strategy.run(lambda batch: batch, ((batch,) for batch in stream), steps=2):
        state = position(stream)
    assert first_column(next(iter(at(state)))) == ORDER[2]


def test_tensors_of_pytorch_keep_their_memory_and_bits() -> None:
    torch = pytest.importorskip("torch")
    numbers = torch.tensor([[1.5, -2.0], [0.25, 3.0]])
    kinds = [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bool]
    given = {str(kind): numbers.to(kind) for kind in kinds} | {
        "strided": numbers.T,
        "trained": torch.ones(2, requires_grad=True),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "text": ["one", "three"],
        "nested": [numbers, (numbers, 3)],
    }
    [made] = numpy_batches([given])
    for kind in kinds:
        array = made[str(kind)]
        assert array.dtype == jnp.dtype(str(kind).removeprefix("torch."))
        np.testing.assert_array_equal(array.astype("f4"), given[str(kind)].float().numpy())
    assert made["torch.bfloat16"].ctypes.data == given["torch.bfloat16"].data_ptr()
    assert made["strided"].ctypes.data == numbers.data_ptr()
    np.testing.assert_array_equal(made["strided"], numbers.numpy().T)
    np.testing.assert_array_equal(made["conjugate"], [1 - 2j])
    assert made["text"].tolist() == ["one", "three"]
    assert isinstance(made["nested"], tuple)
    assert isinstance(made["nested"][1], tuple)
    assert made["nested"][1][1] == 3
    with pytest.raises(dflow.InputError, match=r"expected dense tensors, got a Tensor\n.*\n  make it dense first"):
        list(numpy_batches([numbers.to_sparse()]))


def of_torch() -> Any:
    return pytest.importorskip("torch").ones(2)


def of_pandas() -> Any:
    return pytest.importorskip("pandas").DataFrame({"x": [1]})


def of_scipy() -> Any:
    return pytest.importorskip("scipy.sparse").eye_array(3)


@pytest.mark.parametrize(
    ("given", "got", "remedy"),
    [
        (of_torch, "Tensor of torch", r"tensor.numpy\(\), .* dflow.data.numpy_batches\(loader\)"),
        (of_pandas, "DataFrame of pandas", r"dflow.data.batches\(table, size\)"),
        (of_scipy, "dia_array of scipy", r"matrix.toarray\(\)"),
    ],
)
def test_an_argument_of_another_library_is_named_with_the_remedy(given: Any, got: str, remedy: str) -> None:
    step, value = dflow.jit(lambda y, batch: batch), given()
    message = rf"^argument 'batch/x': expected an array, got a {got}\n  at .*test_loaders.py:\d+\n  .*{remedy}"
    for call in (step, dflow.jit(step)):
        with pytest.raises(TypeError, match=message) as raised:
            call(1.0, {"x": value})
        assert isinstance(raised.value, dflow.DflowError)
        assert raised.value.__suppress_context__, "JAX's error would be printed before it"


DATASET = """
class Numbers:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return 1 // (3 - index)
"""


def test_an_error_in_a_process_of_a_loader_reaches_the_user_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    (tmp_path / "numbers_of_loader.py").write_text(DATASET)
    monkeypatch.syspath_prepend(tmp_path)
    import numbers_of_loader

    loader = torch.utils.data.DataLoader(
        numbers_of_loader.Numbers(), batch_size=3, num_workers=1, multiprocessing_context="spawn"
    )
    queue = dflow.FIFOQueue(4, jax.ShapeDtypeStruct((3,), jnp.int32), name="numbers")
    with dflow.data.feed(loader, queue, map=lambda numbers: numbers.int()):
        assert queue.dequeue().tolist() == [0, 0, 1]
        with pytest.raises(dflow.FeedError, match=r"ZeroDivisionError: (.|\n)*numbers_of_loader.py\", line 7"):
            queue.dequeue()


def test_what_is_no_loader_is_refused() -> None:
    with pytest.raises(dflow.InputError, match="numpy_batches: expected an iterable, got a int"):
        numpy_batches(3)  # type: ignore[arg-type]
    with pytest.raises(dflow.InputError, match=r"expected an indexed loader, got a generator(.|\n)*dflow.data.batches"):
        numpy_batches(each for each in [1])[0]
    with pytest.raises(TypeError, match="len"):
        len(numpy_batches(each for each in [1]))


DTYPES = ["bool", "uint8", "float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "float32", "int32"]


def test_pytorch_reads_every_dtype_and_writes_it_back(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    read = pytest.importorskip("safetensors.torch")
    # Three elements each, so that most arrays begin at an odd byte.
    weights = dflow.variables({dtype: jnp.array([0, 1, 3]).astype(dtype) for dtype in DTYPES})
    path = tmp_path / "weights.safetensors"
    dflow.save(path, weights)
    tensors = read.load_file(path)
    for dtype, variable in weights.items():
        assert str(tensors[dtype].dtype) == f"torch.{dtype}"
        np.testing.assert_array_equal(tensors[dtype].float().numpy(), variable.read().astype("f4"))
    changed = {name: (tensor.float() * 0 + 1).to(tensor.dtype) for name, tensor in tensors.items()}
    assert isinstance(changed["bool"], torch.Tensor)
    read.save_file(changed, tmp_path / "changed.safetensors", {"format": "pt"})
    assert len(dflow.restore(tmp_path / "changed.safetensors", weights).restored) == len(DTYPES)
    assert all((variable.read() == 1).all() for variable in weights.values())


def test_a_table_in_shards_on_tasks_is_one_array_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "table.safetensors"
    whole = np.arange(14.0, dtype="f4").reshape(7, 2)
    with memory_cluster(ps=2) as memory:
        cluster = memory.worker()
        with cluster.parameter_servers():
            table = dflow.ShardedVariable(jnp.asarray(whole), by="modulo", name="table")
        dflow.save(path, table, metadata={"format": "pt", "epoch": "3"})
        np.testing.assert_array_equal(safetensors.numpy.load_file(path)["table"], whole)
        safetensors.numpy.save_file({"table": whole + 1}, path)
        assert dflow.restore(path, table).restored == ("table",)
        np.testing.assert_array_equal(table.read(), whole + 1)
        safetensors.numpy.save_file({"table": whole[:5]}, path)
        with pytest.raises(dflow.CheckpointError, match=r"changed .*table .*f32\[5,2\] .*f32\[7,2\]"):
            dflow.restore(path, table)
        cluster.close()


def test_the_metadata_is_that_of_the_format(tmp_path: Path) -> None:
    path, state = tmp_path / "weights.safetensors", {"g": dflow.Generator(1, name="g")}
    dflow.save(path, state, metadata={"format": "pt", "epoch": "3"})
    with safetensors.safe_open(path, "np") as file:
        assert file.metadata().items() >= {"format": "pt", "epoch": "3"}.items()
    assert dflow.restore(path, state).restored == ("g",)
    with pytest.raises(dflow.CheckpointError, match=r"expected None for a path without .safetensors, got {'a': 'b'}"):
        dflow.save(tmp_path / "folder", state, metadata={"a": "b"})
    with pytest.raises(dflow.CheckpointError, match=r"expected a dict of texts by names .* got {'epoch': 3}"):
        dflow.save(path, state, metadata={"epoch": 3}, overwrite=True)  # type: ignore[dict-item]
