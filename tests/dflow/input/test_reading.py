"""`dflow.data.read`: the rows of files of each format, what is missing in them, and what is bad."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.data import batches, read
from tests.dflow.input.example_records import example, record, write_records

pa = pytest.importorskip("pyarrow")
pytest.importorskip("google_crc32c")
from pyarrow import csv, feather, parquet  # noqa: E402

pytestmark = pytest.mark.once

ROWS = 500
NUMBERS = np.arange(ROWS) * (-1) ** np.arange(ROWS)
NAMES = [f"user {number % 7}" for number in range(ROWS)]
HALVES = (np.arange(ROWS) / 2).astype("f4")
LISTS = [list(range(number % 4)) for number in range(ROWS)]


def table(**more: Any) -> Any:
    ages = pa.array([None if number % 5 == 0 else number for number in range(ROWS)], pa.int32())
    return pa.table({"number": NUMBERS, "name": NAMES, "half": HALVES, "age": ages} | more)


def as_parquet(folder: Path) -> Path:
    parquet.write_table(table(list=LISTS), folder / "a.parquet", row_group_size=70)
    return folder / "a.parquet"


def as_feather(folder: Path) -> Path:
    feather.write_feather(table(list=LISTS), str(folder / "a.feather"), chunksize=90)
    return folder / "a.feather"


def as_stream(folder: Path) -> Path:
    with pa.ipc.new_stream(str(folder / "a.arrow"), table(list=LISTS).schema) as writer:
        writer.write_table(table(list=LISTS), max_chunksize=300)
    return folder / "a.arrow"


def as_csv(folder: Path) -> Path:
    csv.write_csv(table(), folder / "a.csv")
    return folder / "a.csv"


def as_records(folder: Path, *, is_packed: bool = True) -> Path:
    def one(number: int) -> bytes:
        age = [] if number % 5 == 0 else [number]
        features = {"number": [int(NUMBERS[number])], "name": [NAMES[number].encode()], "half": [float(HALVES[number])]}
        features |= {"age": age, "list": LISTS[number]}
        return example(dict(sorted(features.items(), reverse=bool(number % 2))), is_packed=is_packed)

    return write_records(folder / "a.tfrecord", map(one, range(ROWS)))


def as_other_records(folder: Path) -> Path:
    return as_records(folder, is_packed=False)


FORMATS = [as_parquet, as_feather, as_stream, as_csv, as_records, as_other_records]


@pytest.mark.parametrize("write", FORMATS)
def test_each_format_gives_each_row_once_and_a_batch_by_its_number(
    write: Callable[[Path], Path], tmp_path: Path
) -> None:
    lengths = {} if write is as_csv else {"list": 2}
    rows = read(
        write(tmp_path), missing={"age": -1}, lengths=lengths, parts=2, types={"half": "f4"} if write is as_csv else {}
    )
    data = batches(rows, 32, shuffle=100, seed=3, epochs=2)
    found = list(data)
    assert len(found) == len(data) == 32
    columns = {name: np.concatenate([batch[name] for batch in found[:16]]) for name in found[0]}
    order = np.argsort(np.abs(columns["number"]), kind="stable")
    assert (np.diff(order) != 1).sum() > ROWS / 2
    np.testing.assert_array_equal(columns["number"][order], NUMBERS)
    names = columns["name"][order].tolist()
    assert [name.decode() if isinstance(name, bytes) else name for name in names] == NAMES
    np.testing.assert_array_equal(columns["half"][order], HALVES)
    assert columns["half"].dtype == np.float32
    np.testing.assert_array_equal(columns["age"][order], [-1 if n % 5 == 0 else n for n in range(ROWS)])
    if lengths:
        np.testing.assert_array_equal(columns["list"][order], [[0, 1 if n % 4 > 1 else 0] for n in range(ROWS)])
    again = batches(rows, 32, shuffle=100, seed=3, epochs=2)
    for number in (31, 0, 17):
        np.testing.assert_array_equal(again[number]["number"], found[number]["number"])


@pytest.mark.parametrize("write", [as_parquet, as_csv, as_records])
def test_ids_are_those_that_a_step_makes_of_the_strings(write: Callable[[Path], Path], tmp_path: Path) -> None:
    lists = {} if write is as_csv else {"list": 2}
    options: Any = {"columns": ["name", "number", *lists], "lengths": lists}
    texts = batches(read(write(tmp_path), **options), 50)[0]["name"]
    ids, expected = batches(read(write(tmp_path), ids=["name"], **options), 50)[0]["name"], dflow.wide_ids(texts)
    np.testing.assert_array_equal(ids.high, expected.high)
    np.testing.assert_array_equal(ids.low, expected.low)
    words = dflow.Embedding(16, 2, vocabulary=dflow.Vocabulary(), name=f"words {write.__name__}")
    assert dflow.jit(words)(ids).shape == (50, 2)


def test_missing_floats_are_nan_and_other_missing_values_name_the_place(tmp_path: Path) -> None:
    halves = pa.array([None if number % 3 == 0 else number for number in range(ROWS)], pa.float32())
    parquet.write_table(table(half=halves), tmp_path / "a.parquet", row_group_size=100)
    found = batches(read(tmp_path, columns=["half"]), 100)[0]["half"]
    assert np.isnan(found[::3]).all()
    with pytest.raises(dflow.InputError, match=r"a\.parquet, row group 1, row 0: column 'age': .* 20 of the block are"):
        batches(read(tmp_path), 100)[1]
    with pytest.raises(dflow.InputError, match=r"missing: column 'age': expected a value of int32, got 'none'"):
        batches(read(tmp_path, missing={"age": "none"}), 100)[0]
    path = write_records(tmp_path / "b.tfrecord", [example({"a": [1]}), example({})])
    with pytest.raises(dflow.InputError, match=r"missing: feature 'a': expected a value of int64, got 0\.5"):
        batches(read(path, missing={"a": 0.5}), 2)[0]
    with pytest.raises(dflow.InputError, match=r"record 1, from byte \d+ on: feature 'a': expected a value, got none"):
        batches(read(path), 2)[0]


def test_a_column_without_values_in_one_file_has_the_type_of_another(tmp_path: Path) -> None:
    empty = {"age": pa.nulls(ROWS), "name": pa.nulls(ROWS), "list": pa.array([[]] * ROWS)}
    parquet.write_table(
        table()
        .drop_columns(["age", "name"])
        .append_column("age", empty["age"])
        .append_column("name", empty["name"])
        .append_column("list", empty["list"]),
        tmp_path / "a.parquet",
    )
    parquet.write_table(table(list=LISTS), tmp_path / "b.parquet")
    rows = read(tmp_path, columns=["age", "name", "list"], missing={"age": -1, "name": "none"}, lengths={"list": 1})
    first, second = batches(rows, ROWS)
    assert (first["age"] == -1).all()
    assert {*first["name"]} == {"none"}
    assert second["name"].tolist() == NAMES
    assert first["list"].dtype == second["list"].dtype == np.int64


def test_a_csv_has_its_last_record_at_any_size_and_the_types_of_its_first_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.csv").write_text("number\n\n")
    (tmp_path / "b.csv").write_text("number\r\n\n" + "".join(f"{number}\n" for number in range(10, 42)))  # 96 bytes
    for chunk in (7, 32, 96, 100):
        monkeypatch.setattr("dflow.input.csv_blocks._CHUNK", chunk)
        [batch] = batches(read(tmp_path), 100)
        np.testing.assert_array_equal(batch["number"], np.arange(10, 42))


def test_a_csv_has_times_with_a_zone_and_names_once(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("at\n2020-01-01T00:00:00Z\n")
    [batch] = batches(read(tmp_path), 1)
    assert batch["at"].tolist() == np.array(["2020-01-01"], "M8[s]").tolist()
    for names, error in (("a,a\n1,2\n", "column 'a': expected one column of this name, got 2"), ("a\r1\r", "names of")):
        (tmp_path / "a.csv").write_bytes(names.encode())
        with pytest.raises(dflow.InputError, match=error):
            batches(read(tmp_path), 1)[0]


def test_lists_of_several_lengths_need_a_length(tmp_path: Path) -> None:
    with pytest.raises(dflow.InputError, match=r"column 'list': expected lists of one length, got 0 to 3 values"):
        batches(read(as_parquet(tmp_path), columns=["list"]), 10)[0]
    with pytest.raises(dflow.InputError, match=r"feature 'list': expected one number of values in all records"):
        batches(read(as_records(tmp_path), columns=["list"]), 10)[0]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def retyped(path: Path) -> None:
    parquet.write_table(table(half=NAMES), path)


def without_half(path: Path) -> None:
    parquet.write_table(table().drop_columns(["half"]), path)


def with_a_word(path: Path) -> None:
    lines = path.read_text().splitlines()
    lines[200], lines[300] = lines[200].replace(",", ",1,", 1), 'many,"a",1,2'
    path.write_text("\n".join(lines))


def with_others(path: Path) -> None:
    path.write_bytes(path.read_bytes() + record(b"hello") + record(example({"number": [1.5]})))


CASES: list[tuple[Any, Any, str, int]] = [
    (as_parquet, cut, r"b\.parquet: expected a file of Parquet", 0),
    (as_parquet, emptied, r"b\.parquet: expected a file of Parquet", 0),
    (as_parquet, retyped, r"b\.parquet: column 'half': expected float, got string; .*a\.parquet has it", 0),
    (as_parquet, without_half, r"b\.parquet: expected a column 'half', got .*; .*a\.parquet has it", 0),
    (as_feather, cut, r"b\.feather: expected a file of Arrow", 0),
    (as_stream, emptied, r"b\.arrow: expected a file of Arrow", 0),
    (as_csv, emptied, r"b\.csv: expected a first line with the names of the columns", 0),
    (as_csv, with_a_word, r"b\.csv, record 199, from byte \d+ on: .*Expected 4 columns, got 5", ROWS - 2),
    (as_records, cut, r"b\.tfrecord, record 499, from byte \d+ on: expected \d+ bytes, got \d+ to the end", ROWS - 1),
    (as_records, with_others, r"b\.tfrecord, record 500, from byte \d+ on: expected a tf.Example", ROWS),
]


@pytest.mark.parametrize(("write", "spoil", "error", "left"), CASES)
def test_bad_records_name_file_and_place_or_are_left_out_and_counted(
    write: Any, spoil: Any, error: str, left: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = write(tmp_path)
    bad = good.rename(tmp_path / f"b{good.suffix}")
    spoil(bad)
    write(tmp_path)
    columns: Any = {"columns": ["number", "half"]}
    with pytest.raises(dflow.InputError, match=error):
        list(batches(read(tmp_path, **columns), 64, shuffle=100))
    rows = read(tmp_path, bad_records="skip", **columns)
    with caplog.at_level(logging.WARNING):
        found = np.concatenate([batch["number"] for batch in batches(rows, 64, shuffle=100)])
    assert len(found) == len(rows) == ROWS + left
    assert {record.path for record in rows.bad_records} == {str(bad)}
    assert f"{len(rows.bad_records)} bad records are left out" in caplog.text


def test_a_damaged_block_is_named_and_left_out_as_a_whole(tmp_path: Path) -> None:
    parquet.write_table(table(), tmp_path / "a.parquet", row_group_size=100, write_page_checksum=True, compression=None)
    metadata = parquet.read_metadata(tmp_path / "a.parquet").row_group(2).column(0)
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    start = metadata.dictionary_page_offset or metadata.data_page_offset
    data[start : start + 8] = b"\xff" * 8  # a header of a page
    (tmp_path / "a.parquet").write_bytes(data)
    with pytest.raises(dflow.InputError, match=r"a\.parquet, row group 2: "):
        list(batches(read(tmp_path, columns=["number"]), 64))
    rows = read(tmp_path, columns=["number"], bad_records="skip")
    assert len(rows) == ROWS - 100
    assert [(record.place, record.rows) for record in rows.bad_records] == [("row group 2", 100)]


def test_empty_files_of_records_have_no_rows_and_a_large_record_is_read(tmp_path: Path) -> None:
    emptied(tmp_path / "a.tfrecord")
    with pytest.raises(dflow.InputError, match=r"expected a file with columns, got .*a\.tfrecord"):
        len(read(tmp_path))
    large = bytes(1 << 25)
    write_records(tmp_path / "b.tfrecord", [example({"image": [b"small"]}), example({"image": [large]})])
    assert batches(read(tmp_path), 2)[0]["image"].tolist() == [b"small", large]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"paths": "nowhere/*.csv"}, "expected a file or folder with files, got 'nowhere"),
        ({"format": "xml"}, "expected a file of one of .* got 'xml'"),
        ({"bad_records": "ignore"}, "bad_records: expected"),
        ({"parts": 0}, "parts: expected an integer of at least 1, got 0"),
        ({"columns": "number"}, "columns: expected names, got 'number'"),
        ({"columns": ["nmber"]}, "columns: expected columns of .*, got 'nmber'"),
        ({"missing": {"nmber": 1}}, "missing: expected columns of .*, got 'nmber'"),
        ({"ids": ["number"]}, "ids: expected columns of strings, got 'number' of int64"),
        ({"columns": ["number"], "lengths": {"number": 3}}, "column 'number': expected lists for lengths="),
        ({"lengths": {"list": 0}}, "lengths: 'list': expected an integer of at least 1, got 0"),
        ({"missing": 0}, "missing: expected a dict by column, got 0"),
        ({"types": {"half": "f8"}}, "types: expected files of CSV, got .*a.parquet of Parquet"),
        (
            {"columns": ["list"], "lengths": {"list": 3}, "missing": {"list": 0.5}},
            "missing: column 'list': expected a value of int64, got 0.5",
        ),
    ],
)
def test_wrong_options_are_refused(options: Any, error: str, tmp_path: Path) -> None:
    given = {"paths": as_parquet(tmp_path), **options}
    with pytest.raises(dflow.InputError, match=error):
        batches(read(**given), 10)[0]


def test_a_dataset_of_hugging_face_is_read_by_its_columns(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"number": NUMBERS, "name": NAMES, "list": LISTS}).select(range(10, ROWS))
    found = list(batches(read(dataset, lengths={"list": 2}), 64, shuffle=100))
    order = np.argsort(np.abs(np.concatenate([batch["number"] for batch in found])), kind="stable")
    np.testing.assert_array_equal(np.concatenate([batch["number"] for batch in found])[order], NUMBERS[10:])
    assert np.concatenate([batch["name"] for batch in found])[order].tolist() == NAMES[10:]
    with pytest.raises(dflow.InputError, match="expected paths or a dataset of Hugging Face, got a DatasetDict"):
        read(datasets.DatasetDict(train=dataset))


def test_files_need_a_window_and_a_trainer_goes_on_by_number(tmp_path: Path) -> None:
    rows = read(as_parquet(tmp_path), columns=["number"])
    with pytest.raises(dflow.InputError, match="give the number of rows that are permuted together"):
        batches(rows, 10, shuffle=True)
    used = dflow.Variable(jnp.zeros(ROWS), name="used rows")
    step = dflow.jit(lambda batch: used.scatter_add(jnp.abs(batch["number"]), jnp.ones(len(batch["number"]))))
    data = batches(rows, 50, shuffle=100, epochs=2)
    for steps in (7, 20):
        with dflow.CheckpointManager(tmp_path / "run", {"used": used}) as manager:
            dflow.Trainer(step, dflow.distributed.Async(dflow.connect()), checkpoints=manager).run(data, steps=steps)
    np.testing.assert_array_equal(used.read(), np.full(ROWS, 2.0))
