"""`dflow.data.batches` of columns, in the containers and libraries that people have: values, dtypes, rows, refusals."""

from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.data import batches, numpy_batches

pytestmark = pytest.mark.once

ROWS = 7
IDS = np.arange(ROWS) * 10
WEIGHTS = (np.arange(ROWS * 2) / 4).astype("f4").reshape(ROWS, 2)
NAMES = [f"user {row}" for row in range(ROWS)]
Pair = namedtuple("Pair", "ids weights")


def library(name: str) -> Any:
    return pytest.importorskip(name)


def pandas_frame(**kinds: str) -> Any:
    pd = library("pandas")
    frame = pd.DataFrame({"ids": IDS, "names": NAMES, "half": IDS / 2}, index=IDS[::-1])
    return frame.astype(kinds)


def arrow_table() -> Any:
    pa = library("pyarrow")
    lists = pa.FixedSizeListArray.from_arrays(pa.array(WEIGHTS.ravel()), 2)
    columns = {"ids": IDS, "names": NAMES, "codes": pa.array(NAMES).dictionary_encode(), "fixed": lists}
    table = pa.table(columns | {"lists": pa.array(WEIGHTS.tolist(), pa.list_(pa.float32()))})
    return pa.concat_tables([table[:3], table[3:]])


def hdf5_file(path: Path) -> Any:
    file = library("h5py").File(path / "data.h5", "w")
    file["ids"], file["more/weights"] = IDS, WEIGHTS
    file["names"] = [name.encode() for name in NAMES]
    return file


def npz_file(path: Path) -> Any:
    np.savez(path / "data.npz", ids=IDS, weights=WEIGHTS)
    return np.load(path / "data.npz")


def mapped_file(path: Path) -> Any:
    np.save(path / "ids.npy", IDS)
    return np.load(path / "ids.npy", mmap_mode="r")


def records() -> Any:
    made = np.zeros(ROWS, [("ids", "i8"), ("weights", "f4", (2,))])
    made["ids"], made["weights"] = IDS, WEIGHTS
    return made


def tensor(values: Any) -> Any:
    return library("torch").as_tensor(values)


def polars_frame() -> Any:
    pl = library("polars")
    return pl.DataFrame({"ids": IDS, "names": pl.Series(NAMES, dtype=pl.Categorical), "lists": WEIGHTS.tolist()})


BOTH = {"ids": IDS, "weights": WEIGHTS}
FRAME = {"ids": IDS, "names": NAMES, "half": IDS / 2}
#: By name: data of `ROWS` rows, and its columns as NumPy has them.
DATA: dict[str, tuple[Callable[[Path], Any], Any]] = {
    "array": (lambda _: IDS, IDS),
    "JAX": (lambda _: (jnp.asarray(WEIGHTS), jnp.ones(ROWS, jnp.bfloat16)), (WEIGHTS, np.ones(ROWS, jnp.bfloat16))),
    "tensor": (lambda _: tensor(IDS), IDS),
    "tuple of tensors": (lambda _: (tensor(IDS), tensor(WEIGHTS)), (IDS, WEIGHTS)),
    "dict of tensors": (lambda _: {"ids": tensor(IDS), "weights": tensor(WEIGHTS).bfloat16()}, BOTH),
    "namedtuple": (lambda _: Pair(tensor(IDS), WEIGHTS), Pair(IDS, WEIGHTS)),
    "nested": (lambda _: ({"a": tensor(IDS), "b": (WEIGHTS,)}, [IDS, IDS]), ({"a": IDS, "b": (WEIGHTS,)}, [IDS, IDS])),
    "ordered": (lambda _: OrderedDict(z=IDS, a=tensor(IDS)), OrderedDict(z=IDS, a=IDS)),
    "lists": (lambda _: {"ids": IDS.tolist(), "names": NAMES}, {"ids": IDS, "names": NAMES}),
    "tuple of lists": (lambda _: (NAMES, [float(id) for id in IDS]), (NAMES, IDS.astype(float))),
    "list of rows": (lambda _: {"rows": WEIGHTS.tolist(), "y": range(ROWS)}, {"rows": WEIGHTS, "y": np.arange(ROWS)}),
    "list of tensors": (
        lambda _: {"rows": list(tensor(np.tile(IDS, (ROWS, 9)))), "y": IDS},
        {"rows": np.tile(IDS, (ROWS, 9)), "y": IDS},
    ),
    "frame": (lambda _: pandas_frame(), FRAME),
    "frame of objects": (lambda _: pandas_frame(names="object"), FRAME),
    "frame, nullable": (lambda _: pandas_frame(ids="Int64", names="string", half="Float64"), FRAME),
    "frame of Arrow": (
        lambda _: pandas_frame(ids="int64[pyarrow]", names="string[pyarrow]", half="double[pyarrow]"),
        FRAME,
    ),
    "categories": (
        lambda _: pandas_frame(ids="category", names="category"),
        {"ids": np.arange(ROWS), "names": np.arange(ROWS), "half": IDS / 2},
    ),
    "Series": (lambda _: pandas_frame()["ids"], IDS),
    "dict of Series": (lambda _: {"a": pandas_frame()["ids"], "b": pandas_frame().index}, {"a": IDS, "b": IDS[::-1]}),
    "Arrow": (lambda _: library("pyarrow").array(NAMES), NAMES),
    "Arrow chunks": (lambda _: (arrow_table()["ids"], arrow_table()["fixed"]), (IDS, WEIGHTS)),
    "Arrow table": (
        lambda _: arrow_table(),
        {"ids": IDS, "names": NAMES, "codes": np.arange(ROWS), "fixed": WEIGHTS, "lists": WEIGHTS},
    ),
    "polars": (lambda _: polars_frame(), {"ids": IDS, "names": np.arange(ROWS), "lists": WEIGHTS.astype("f8")}),
    "HDF5": (hdf5_file, {"ids": IDS, "more": {"weights": WEIGHTS}, "names": [name.encode() for name in NAMES]}),
    "HDF5 dataset": (lambda path: hdf5_file(path)["more/weights"], WEIGHTS),
    "npz": (npz_file, BOTH),
    "mapped": (mapped_file, IDS),
    "records": (lambda _: records(), BOTH),
    "records in a dict": (lambda _: {"r": records()}, {"r": BOTH}),
    "masked": (lambda _: np.ma.masked_array(IDS, np.zeros(ROWS, bool)), IDS),
}


def expected(columns: Any, rows: Any) -> Any:
    if isinstance(columns, dict):
        return {name: expected(column, rows) for name, column in columns.items()}
    if isinstance(columns, tuple) or (isinstance(columns, list) and isinstance(columns[0], np.ndarray)):
        return [expected(column, rows) for column in columns]
    return np.asarray(columns, object if isinstance(columns, list) else None)[rows].tolist()


def plain(batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return {name: plain(column) for name, column in batch.items()}
    return [*map(plain, batch)] if isinstance(batch, tuple | list) else batch.tolist()


@pytest.mark.parametrize("name", DATA)
def test_data_is_taken_by_its_rows(name: str, tmp_path: Path) -> None:
    make, columns = DATA[name]
    data = make(tmp_path)
    made = list(batches(data, 3))
    assert [plain(batch) for batch in made] == [expected(columns, rows) for rows in np.split(np.arange(ROWS), [3, 6])]
    assert type(made[0]) is (type(columns) if isinstance(columns, tuple | dict) else np.ndarray)
    leaves = jax.tree.leaves(made[0])
    assert all(type(leaf) is np.ndarray and leaf.dtype.kind in "iuOVf" for leaf in leaves)
    # Every way to take rows takes those of the same numbers.
    orders = batches(np.arange(ROWS), 2, shuffle=True, epochs=2, drop_remainder=True, seed=3)
    shuffled = batches(data, 2, shuffle=True, epochs=2, drop_remainder=True, seed=3)
    assert [plain(batch) for batch in shuffled] == [expected(columns, rows) for rows in orders]
    assert len(shuffled) == 6
    assert plain(shuffled[4]) == expected(columns, orders[4])
    drawn = zip(batches(data, 2, shuffle=4), batches(np.arange(ROWS), 2, shuffle=4), strict=True)
    assert all(plain(batch) == expected(columns, rows) for batch, rows in drawn)


def test_dtypes_are_those_of_the_columns() -> None:
    pd, pa = library("pandas"), library("pyarrow")
    frame = pd.DataFrame(
        {
            "i1": pd.array([1, 2], "Int8"),
            "f4": pd.array([1, None], "Float32"),
            "f8": pd.array([1.5, None], pd.ArrowDtype(pa.float64())),
            "b1": pd.array([True, False], "boolean"),
            "i4": pd.Categorical(np.array([7, 3], "u2")),
            "O": ["a", "b"],
            "M8[us]": pd.to_datetime(["2020-01-01", None]).astype("M8[us]"),
        }
    )
    (batch,) = batches(frame, 2)
    assert {name: column.dtype for name, column in batch.items()} == {name: np.dtype(name) for name in frame}
    assert batch["i4"].tolist() == [1, 0]
    assert np.isnan(batch["f4"]).tolist() == np.isnan(batch["f8"]).tolist() == [False, True]
    (batch,) = batches({"half": pa.array([1.0, None], pa.float32()), "flag": pa.array([True, False])}, 2)
    assert batch["half"].dtype == np.float32
    assert np.isnan(batch["half"]).tolist() == [False, True]
    assert batch["flag"].tolist() == [True, False]


def missing(name: str, row: int) -> str:
    return f"batches: column {name!r}: expected a value in each row; .* missing, the first in row {row}"


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "lengths": (lambda: {"x": IDS, "y": IDS.tolist()[:3]}, "one number of rows, got column 'x': 7, column 'y': 3"),
    "scalar in a dict": (lambda: {"x": IDS, "y": 3}, "column 'y': expected a column, got a int"),
    "scalar in a tuple": (lambda: (IDS, 3), "column 1: expected a column, got a int"),
    "dict of scalars": (lambda: {"x": 1, "y": 2}, "column 'x': expected a column, got a int"),
    "string": (lambda: {"x": IDS, "kind": "train"}, "column 'kind': expected a column, got a str"),
    "no columns": (dict, "expected columns, got a dict without any"),
    "empty frame": (lambda: library("pandas").DataFrame(), "expected columns, got a DataFrame without any"),
    "no rows": (lambda: {"x": np.float32(1)[()], "y": IDS}, "column 'x': expected a column, got a float32"),
    "no axis": (lambda: {"x": np.array(1.0)}, "column 'x': expected rows, got one value"),
    "None": (lambda: {"x": ["a", None]}, missing("x", 1)),
    "None in an array": (lambda: {"x": np.array(["a", "b", None], object)}, missing("x", 2)),
    "None for a number": (lambda: ([1, None, 2], IDS[:3]), r"column 0: .* the first in row 1"),
    "NaN for a string": (lambda: {"x": ["a", "b", float("nan")]}, missing("x", 2)),
    "NA": (lambda: library("pandas").DataFrame({"x": library("pandas").array([1, None], "Int64")}), missing("x", 1)),
    "NA, boolean": (lambda: {"x": library("pandas").array([None, True], "boolean")}, missing("x", 0)),
    "str without": (lambda: library("pandas").DataFrame({"x": ["a", None]}), missing("x", 1)),
    "category without": (lambda: {"x": library("pandas").Categorical(["a", None])}, missing("x", 1)),
    "Arrow null": (lambda: library("pyarrow").table({"x": [1, None]}), missing("x", 1)),
    "Arrow null in a list": (lambda: library("pyarrow").table({"x": [[1], [None]]}), missing("x", 1)),
    "polars null": (lambda: library("polars").DataFrame({"x": [1, None]}), missing("x", 1)),
    "masked": (lambda: {"x": np.ma.masked_array(IDS, IDS == 20)}, missing("x", 2)),
    "mixed": (lambda: {"x": ["a", 1]}, "column 'x': expected numbers, or only strings, .* got int, str"),
    "objects": (lambda: {"x": [object()]}, "column 'x': .* got object"),
    "dicts": (lambda: library("pyarrow").table({"x": [{"a": 1}]}), "column 'x': .* got dict"),
    "decimals": (lambda: {"x": [__import__("decimal").Decimal(1)]}, "column 'x': .* got Decimal"),
    "wide": (lambda: {"x": [2**70]}, "column 'x': expected integers of at most 64 bits"),
    "ragged": (lambda: {"x": [[1, 2], [3]]}, r"column 'x': expected rows of one shape, got lengths from 1 to 2"),
    "ragged in Arrow": (
        lambda: library("pyarrow").table({"x": [[1, 2], [3]]}),
        "column 'x': .* got lengths from 1 to 2",
    ),
    "two of a name": (lambda: pandas_frame().rename(columns={"half": "ids"}), "column 'ids': .* got two"),
    "names of two types": (lambda: {"a": IDS, 1: IDS}, r"names of columns of one type, got \['a', 1\]"),
    "lazy": (lambda: library("polars").LazyFrame({"x": [1]}), r"frame\.collect\(\)"),
    "SciPy": (lambda: {"x": library("scipy.sparse").eye_array(3).tocsr()}, r"column 'x': .*dense(.|\n)*toarray\(\)"),
    "SciPy alone": (lambda: library("scipy.sparse").coo_array((3, 3)), r"the data: .*dense(.|\n)*toarray\(\)"),
    "sparse tensor": (lambda: {"x": tensor(WEIGHTS).to_sparse()}, r"column 'x': .*sparse(.|\n)*to_dense\(\)"),
    "list of tensors": (
        lambda: [tensor(IDS), tensor(IDS)],
        r"got 2 of type Tensor, each with 7 rows(.|\n)*tuple\(colu",
    ),
    "list of arrays": (lambda: [WEIGHTS], r"got 1 of type ndarray(.|\n)*numpy\.stack\(elements\)"),
    "list of lists": (lambda: [[1, 2, 3], [4, 5, 6]], "got 2 of type list, each with 3 rows"),
    "list of Series": (lambda: [pandas_frame()["ids"]] * 9, "got 9 of type Series"),
    "list of frames": (lambda: [pandas_frame()] * 9, "got 9 of type DataFrame(.|\n)*tables as one"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_columns_are_refused_by_name(name: str) -> None:
    make, says = REFUSED[name]
    with pytest.raises(dflow.InputError, match=says) as raised:
        batches(make(), 2)
    assert "test_columns.py" in str(raised.value)


def test_the_remedies_for_what_is_refused_work(tmp_path: Path) -> None:
    matrix = library("scipy.sparse").eye_array(5).tocsr()
    rows = (matrix[rows].toarray() for rows in batches(range(matrix.shape[0]), 2))
    assert [batch.shape for batch in rows] == [(2, 5), (2, 5), (1, 5)]
    assert [len(batch) for batch in batches(np.stack([WEIGHTS[0], WEIGHTS[1]]), 2)] == [2]
    assert plain(next(iter(batches((tensor(IDS), tensor(IDS)), 2)))) == [[0, 10], [0, 10]]
    frame = library("pandas").DataFrame({"x": library("pandas").array([1, None], "Int64"), "y": ["a", None]})
    assert plain(next(iter(batches(frame.fillna({"x": 0, "y": "?"}), 2)))) == {"x": [1, 0], "y": ["a", "?"]}
    assert plain(next(iter(batches(frame.dropna(), 2)))) == {"x": [1], "y": ["a"]}
    with library("h5py").File(tmp_path / "records.h5", "w") as file:
        file["r"] = records()
        with pytest.raises(dflow.InputError, match=r"read it: dataset\[:\]"):
            batches(file["r"], 2)
        assert plain(next(iter(batches(file["r"][:], 2)))) == expected(BOTH, [0, 1])


def test_other_pytrees_are_containers() -> None:
    ids = dflow.wide_ids(NAMES)
    for data in (ids, {"user": ids, "y": IDS.tolist()}, (ids, tensor(IDS))):
        (batch,) = batches(data, ROWS)
        (found,) = list(jax.tree.leaves(batch, is_leaf=lambda one: isinstance(one, dflow.WideIds)))[:1]
        assert isinstance(found, dflow.WideIds)
        assert plain((found.high, found.low)) == plain((ids.high, ids.low))
    with pytest.raises(dflow.InputError, match=r"column 'user'\['low'\]: 3"):
        batches({"user": dflow.WideIds(ids.high, ids.low[:3])}, 2)


def test_a_frame_without_rows_has_no_batches() -> None:
    assert list(batches(pandas_frame()[:0], 2, epochs=None)) == []
    assert len(batches(arrow_table()[:0], 2)) == 0


def test_a_list_is_one_of_elements() -> None:
    assert [plain(batch) for batch in batches([np.arange(2)] * 3, 2)] == [[[0, 1]] * 2, [[0, 1]]]
    assert plain(next(iter(batches([{"x": np.arange(9)}], 2)))) == {"x": [[*range(9)]]}
    assert plain(next(iter(batches(((1, 2), (3, 4)), 2)))) == [[1, 3], [2, 4]]


#: Every other function that takes batches one after another.
DOORS: dict[str, Callable[[Any], Any]] = {
    "feed": lambda data: dflow.data.feed(data, dflow.FIFOQueue(2, jax.ShapeDtypeStruct((), jnp.float32))),
    "evaluate": lambda data: dflow.evaluate(jnp.mean, data),
    "run": lambda data: list(dflow.distributed.Async(dflow.connect()).run(lambda x: x, data, steps=1)),
    "Trainer": lambda data: dflow.Trainer(lambda x: x, dflow.distributed.Async(dflow.connect())).run(data, steps=1),
    "numpy_batches": numpy_batches,
}
TABLES: dict[str, Callable[[Path], Any]] = {
    "dict": lambda _: {"x": IDS},
    "frame": lambda _: pandas_frame(),
    "Arrow": lambda _: arrow_table(),
    "polars": lambda _: polars_frame(),
    "HDF5": hdf5_file,
    "npz": npz_file,
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("table", TABLES)
def test_every_door_refuses_a_table_with_the_remedy(door: str, table: str, tmp_path: Path) -> None:
    with pytest.raises(dflow.DflowError, match=r"got a \w+, whose entries are columns(.|\n)*dflow\.data\.batches\("):
        DOORS[door](TABLES[table](tmp_path))


def test_batches_that_are_tables_become_arrays() -> None:
    made = numpy_batches(arrow_table().to_batches())
    assert [plain(batch)["ids"] for batch in made] == [[0, 10, 20], [30, 40, 50, 60]]
    assert plain(made[1])["fixed"] == WEIGHTS[3:].tolist()
    assert plain(next(iter(numpy_batches([pandas_frame()])))) == expected(FRAME, range(ROWS))
    (batch,) = numpy_batches([(pandas_frame()["ids"], [1, 2])])
    assert (plain(batch[0]), batch[1]) == (IDS.tolist(), (1, 2))
    with pytest.raises(dflow.InputError, match=missing("x", 1)):
        list(numpy_batches([{"x": library("pyarrow").array([1, None])}]))


def test_no_library_is_imported() -> None:
    code = """
import sys, numpy, dflow
list(dflow.data.batches({"x": numpy.arange(3), "y": [1, 2, 3]}, 2)), list(dflow.data.numpy_batches([[1]]))
print(sorted({"torch", "pandas", "pyarrow", "polars", "h5py", "scipy.sparse"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr
