"""`dflow.data.batches` of columns with missing values, of categories, and of mapped files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dflow
from dflow.data import batches

pytestmark = pytest.mark.once

AGES = [31, None, 44, None]
CITIES = ["Oslo", None, "Lima", "Oslo"]


def library(name: str) -> Any:
    return pytest.importorskip(name)


def pandas_frame() -> Any:
    pd = library("pandas")
    return pd.DataFrame(
        {
            "age": pd.array(AGES, "Int8"),
            "city": CITIES,
            "kind": pd.Categorical(CITIES, ["Lima", "Oslo"]),
            "half": [0.5, None, 1.5, 2.5],
            "at": pd.to_datetime(["2020-01-01 01:00", None, "2020-01-02 00:00", "2020-01-03 00:00"]).tz_localize(
                "Europe/Oslo"
            ),
            "flag": pd.array([True, None, False, True], "boolean"),
        }
    )


def arrow_table() -> Any:
    pa = library("pyarrow")
    table = pa.Table.from_pandas(pandas_frame())
    # In chunks with different dictionaries.
    parts = [table[:1], table[1:3].set_column(2, "kind", pa.array(CITIES[1:3]).dictionary_encode()), table[3:]]
    return pa.concat_tables([part.cast(table.schema.set(2, parts[1].schema.field("kind"))) for part in parts])


def polars_frame() -> Any:
    pl, frame = library("polars"), pandas_frame()
    columns = {name: frame[name].astype(object).where(frame[name].notna(), None).tolist() for name in ("age", "flag")}
    made = pl.DataFrame(
        {
            "age": pl.Series(columns["age"], dtype=pl.Int8),
            "city": CITIES,
            "kind": pl.Series(CITIES, dtype=pl.Enum(["Lima", "Oslo"])),
            "half": [0.5, None, 1.5, 2.5],
            "at": pl.Series(["2020-01-01 01:00", None, "2020-01-02 00:00", "2020-01-03 00:00"])
            .str.to_datetime("%Y-%m-%d %H:%M", time_unit="us")
            .dt.replace_time_zone("Europe/Oslo"),
            "flag": columns["flag"],
        }
    )
    return pl.concat([made[:1], made[1:]], rechunk=False)


FRAMES = {"pandas": pandas_frame, "Arrow": arrow_table, "polars": polars_frame}
STATED = {"age": -1, "city": "unknown", "kind": "none", "half": 0.0, "at": np.datetime64("1970-01-01"), "flag": False}


@pytest.mark.parametrize("name", FRAMES)
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2]])
def test_stated_values_stand_for_missing_ones(name: str, order: list[int]) -> None:
    made = batches(FRAMES[name](), 4, missing=STATED)
    batch = made._columns.rows(np.array(order))  # type: ignore[union-attr]
    dtypes = {name: column.dtype.kind + str(column.dtype.itemsize) for name, column in batch.items()}
    assert dtypes == {"age": "i1", "city": "O8", "kind": "i4", "half": "f8", "at": "M8", "flag": "b1"}
    assert batch["age"].tolist() == [[31, -1, 44, -1][row] for row in order]
    assert batch["city"].tolist() == [["Oslo", "unknown", "Lima", "Oslo"][row] for row in order]
    names = made.categories["kind"]
    assert set(names) == {"Lima", "Oslo", "none"}
    assert names[batch["kind"]].tolist() == [["Oslo", "none", "Lima", "Oslo"][row] for row in order]
    assert batch["half"].tolist() == [[0.5, 0.0, 1.5, 2.5][row] for row in order]
    # A time with a zone is in UTC.
    utc = np.array(["2020-01-01T00", "1970-01-01T00", "2020-01-01T23", "2020-01-02T23"], "M8[h]")
    assert (batch["at"] == utc[order]).all()
    assert batch["flag"].tolist() == [[True, False, False, True][row] for row in order]


@pytest.mark.parametrize("name", FRAMES)
@pytest.mark.parametrize("column", ["age", "city", "kind", "flag"])
def test_a_missing_value_without_a_stated_one_is_an_error(name: str, column: str) -> None:
    stated = {key: value for key, value in STATED.items() if key != column}
    says = f"column {column!r}: expected a value in each row; .* missing, the first in row 1(.|\n)*missing="
    with pytest.raises(dflow.InputError, match=says):
        batches(FRAMES[name](), 2, missing=stated)


@pytest.mark.parametrize("name", FRAMES)
def test_floats_and_times_have_their_own_missing_values(name: str) -> None:
    stated = {key: value for key, value in STATED.items() if key not in ("half", "at")}
    (batch,) = batches(FRAMES[name](), 4, missing=stated)
    assert np.isnan(batch["half"]).tolist() == np.isnat(batch["at"]).tolist() == [False, True, False, False]


@pytest.mark.parametrize("name", FRAMES)
def test_categories_are_names_or_codes_of_other_batches(name: str) -> None:
    frame = FRAMES[name]()
    (batch,) = batches(frame, 4, missing=STATED, categories="names")
    assert batch["kind"].tolist() == ["Oslo", "none", "Lima", "Oslo"]
    names = {"kind": ["none", "Oslo", "Lima"], "city": ["Lima", "other"]}
    (batch,) = batches(frame, 4, missing=STATED | {"city": "other"}, categories=names)
    assert batch["kind"].tolist() == [1, 0, 2, 1]
    assert batch["city"].tolist() == [1, 1, 0, 1]
    with pytest.raises(dflow.InputError, match=r"column 'city': .*expected one of its 2 categories, got 'unknown'"):
        batches(frame, 4, missing=STATED, categories=names)
    with pytest.raises(dflow.InputError, match=r"column 'kind': .* 3 values are missing"):
        batches(frame, 4, missing={"age": 0, "city": "", "flag": True}, categories={"kind": ["Lima"]})


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no column": ({"missing": {"agee": 1}}, "missing: expected names of columns, got 'agee'(.|\n)*did you mean age?"),
    "no dict": ({"missing": 0}, "missing: expected a dict of values by column, got 0"),
    "too large": ({"missing": STATED | {"age": 1000}}, "column 'age': missing: expected a value of int8, got 1000"),
    "a string": ({"missing": STATED | {"half": "x"}}, "column 'half': missing: expected a value of float64, got 'x'"),
    "a number": ({"missing": STATED | {"city": np.ones(2)}}, "column 'city': missing: expected a value of strings"),
    "no form": ({"categories": "code"}, "categories: expected 'codes', 'names' or a dict"),
    "twice": (
        {"missing": STATED, "categories": {"city": ["a", "a"]}},
        "column 'city': categories: expected each name once, got 'a'",
    ),
    "mask": ({"missing": STATED, "pad": "age"}, "column 'age': expected no column of this name"),
    "pad and drop": ({"missing": STATED, "pad": True, "drop_remainder": True}, "expected pad or drop_remainder"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_options_are_refused_by_name(name: str) -> None:
    options, says = WRONG[name]
    with pytest.raises(dflow.InputError, match=says):
        batches(pandas_frame(), 2, **options)


def test_data_that_is_one_column_has_one_value() -> None:
    assert next(iter(batches(pandas_frame()["age"], 4, missing=7))).tolist() == [31, 7, 44, 7]
    made = batches(pandas_frame()["kind"], 4, missing="none")
    assert made.categories[()][next(iter(made))].tolist() == ["Oslo", "none", "Lima", "Oslo"]
    nested = batches(
        ({"user": pandas_frame()}, [1, 2, 3, 4]), 4, missing={(0, "user", name): STATED[name] for name in STATED}
    )
    assert next(iter(nested))[0]["user"]["age"].tolist() == [31, -1, 44, -1]
    with pytest.raises(dflow.InputError, match=r"missing=\{\(0, 'user', 'age'\): value\}"):
        batches(({"user": pandas_frame()[["age"]]}, [1, 2, 3, 4]), 4)
    with pytest.raises(dflow.InputError, match="missing: expected data with columns, got elements"):
        batches([1, 2], 2, missing=0)


def test_a_dataset_of_arrow_is_a_table(tmp_path: Path) -> None:
    parquet, dataset = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow.dataset")
    parquet.write_table(arrow_table().drop(["kind", "at"]), tmp_path / "rows.parquet")
    stated = {"age": 0, "city": "?", "flag": False}
    (batch,) = batches(dataset.dataset(tmp_path), 4, missing=stated)
    assert (batch["age"].tolist(), batch["city"].tolist()) == ([31, 0, 44, 0], ["Oslo", "?", "Lima", "Oslo"])
    (batch,) = batches(
        {"x": pytest.importorskip("polars").Series([1, 2**60], dtype=pytest.importorskip("polars").Int128)}, 2
    )
    assert batch["x"].tolist() == [1, 2**60]


MAPPED = """
import sys, numpy as np, dflow, jax
path, kind = sys.argv[1:]
def resident():
    return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("RssAnon"))) * 1024
if kind == "npy":
    data = {"x": np.load(path, mmap_mode="r")}
else:
    import pyarrow as pa
    data = pa.ipc.open_file(pa.memory_map(path)).read_all()
    list(dflow.data.batches(pa.concat_tables([data[:9], data[9:12]]), 4, shuffle=True))  # what Arrow imports
list(dflow.data.batches({"x": np.arange(4.0)}, 2, missing={"x": 0.0}))
before = resident()
made = dflow.data.batches(data, 100, shuffle=True, missing={"x": 0.0})
total = sum(float(made[number]["x"].sum()) for number in range(50))
print(total > 0, resident() - before)
"""


@pytest.mark.parametrize("kind", ["npy", "Arrow"])
def test_a_mapped_file_is_not_copied(kind: str, tmp_path: Path) -> None:
    values = np.ones(4 << 20)  # 32 MiB, twice in the table
    if kind == "npy":
        np.save(tmp_path / "x", values)
        path = tmp_path / "x.npy"
    else:
        pa = library("pyarrow")
        path = tmp_path / "x.arrow"
        table = pa.table({"x": values, "text": pa.array(["some text"] * len(values))})
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=1 << 20)
    ran = subprocess.run(
        [sys.executable, "-c", MAPPED, str(path), kind], check=False, capture_output=True, text=True, timeout=120
    )
    is_read, size = ran.stdout.split()
    # The order of the rows takes 8 bytes for each.
    assert (is_read, int(size) < values.nbytes + (8 << 20)) == ("True", True), ran.stderr + ran.stdout
