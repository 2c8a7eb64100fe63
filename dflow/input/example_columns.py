"""Records of `tf.Example` as columns, read by NumPy for all records of a block together.

An Example is one message with a map: entries with a name and a Feature, which is a list of bytes, floats or integers.
Each step below reads the same field of all records: its tag, and the number of its bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from dflow.input.column_options import checked_fill
from dflow.input.file_blocks import Codes, ReadOptions, filled_lists
from dflow.tracing.wide_ids import wide_ids

#: Bytes that may be read after the end of the data.
_SLACK = bytes(16)
#: Most bytes of a Feature without values: the tag of a list, and that it has no bytes.
_EMPTY = 2
#: Tags of the fields of messages, which hold a number of bytes.
_FIRST, _SECOND = 0x0A, 0x12
#: Tags of the kinds of features, and tags of values that are not packed.
_KINDS = {0x0A: "bytes", 0x12: "float", 0x1A: "int64"}
_UNPACKED = {"float": 0x0D, "int64": 0x08}


class ExampleError(ValueError):
    """A record is no Example with the expected features.

    `row`         number of the record among those given
    `is_missing`  whether it only lacks a value, and `remedy` says how to state one
    """

    def __init__(self, row: int, fact: str, remedy: str = "", *, is_missing: bool = False) -> None:
        super().__init__(fact)
        self.row, self.fact, self.remedy, self.is_missing = row, fact, remedy, is_missing


def feature_kinds(data: bytes, records: Any) -> dict[str, str]:
    """Return the kind of each feature by name, sorted: `float` for one value, `float[3]` for 3, `float[]` for lists.

    data     bytes with records
    records  where each begins and ends, i64[records, 2]
    raises   ExampleError
    """
    parsed = _Parsed(data, records)
    return dict(sorted((name, _kind(*parsed.values(name))) for name in parsed.features))


def _kind(kind: str, values: Any, counts: Any) -> str:
    sizes = np.unique(counts[counts > 0])
    if len(sizes) > 1:
        return f"{kind}[]"
    return kind if not len(sizes) or sizes[0] == 1 else f"{kind}[{sizes[0]}]"


def example_columns(data: bytes, records: Any, types: Mapping[str, str], options: ReadOptions) -> dict[str, Any]:
    """Return the features of these kinds as arrays of NumPy or `Codes` by name.

    As for `feature_kinds`; raises ExampleError with the record for a feature of another kind or number of values.
    """
    parsed = _Parsed(data, records)
    return {name: _column(parsed, name, kind, options) for name, kind in types.items()}


def _column(parsed: _Parsed, name: str, wanted: str, options: ReadOptions) -> Any:
    kind, _, size = wanted.partition("[")
    _, flat, counts = parsed.values(name, kind)
    length = options.lengths.get(name)
    missing = _stated(options.missing.get(name), name, kind, is_id=name in options.ids)
    if name in options.ids:
        flat = _coded(flat)
    if length is not None:
        return _filled(flat, counts, length, missing, kind)
    if size == "]":
        raise ExampleError(
            0,
            f"feature {name!r}: expected one number of values in all records, got {sorted({*counts.tolist()})[:3]}",
            f"state the number of values, to cut or fill them: read(..., lengths={{{name!r}: ...}})",
            is_missing=True,
        )
    expected = int(size[:-1]) if size else 1
    is_wrong = (counts != expected) & (counts != 0)
    if is_wrong.any():
        row = int(np.argmax(is_wrong))
        raise ExampleError(row, f"feature {name!r}: expected {expected} values, got {counts[row]}")
    if not counts.all() and missing is None and kind != "float":
        raise ExampleError(
            int(np.argmin(counts)),
            f"feature {name!r}: expected a value, got none",
            f"state the value in its place, read(..., missing={{{name!r}: ...}}), or leave the feature out",
            is_missing=True,
        )
    if counts.all():
        rows = flat.codes if isinstance(flat, Codes) else flat
        rows = rows.reshape(len(counts), expected) if size else rows
        return Codes(rows, flat.values) if isinstance(flat, Codes) else rows
    rows = _filled(flat, counts, expected, np.nan if missing is None else missing, kind)
    if size:
        return rows
    return Codes(rows.codes[:, 0], rows.values) if isinstance(rows, Codes) else rows[:, 0]


def _stated(missing: Any, name: str, kind: str, *, is_id: bool) -> Any:
    """Return the stated value in place of missing ones, None for none. Raises ExampleError if it does not fit."""
    try:
        if missing is None or (kind == "bytes" and isinstance(missing, (bytes, str) if is_id else bytes)):
            return missing
        if kind == "bytes":
            raise TypeError(f"expected bytes, got {missing!r}")
        return checked_fill(missing, np.dtype(np.float32 if kind == "float" else np.int64))
    except TypeError as error:
        fact, remedy = f"missing: feature {name!r}: {error}", "give a value of its kind"
        raise ExampleError(0, fact, remedy, is_missing=True) from None


def _filled(flat: Any, counts: Any, length: int, missing: Any, kind: str) -> Any:
    """Return lists of `length` values, with the stated value or an empty one after shorter ones."""
    fill = missing if missing is not None else b"" if kind == "bytes" else 0
    if not isinstance(flat, Codes):
        return filled_lists(flat, counts, length, fill)
    values = np.concatenate([flat.values, _hashed([fill])])
    return Codes(filled_lists(flat.codes, counts, length, len(values) - 1), values)


def _coded(flat: Any) -> Codes:
    """Return strings as codes of their ids."""
    known: dict[Any, int] = {}
    codes = np.array([known.setdefault(value, len(known)) for value in flat.tolist()], np.int32)
    return Codes(codes, _hashed([*known]))


def _hashed(values: list[Any]) -> Any:
    texts = np.empty(len(values), object)
    texts[:] = values
    ids = wide_ids(texts)
    return (np.asarray(ids.high, np.uint64) << np.uint64(32)) | np.asarray(ids.low, np.uint64)


class _Parsed:
    """Records, and where the features of each are: `features` has by name i64[records, 2], equal ends for none."""

    def __init__(self, data: bytes, records: Any) -> None:
        self._data, self._bytes = data, np.frombuffer(data + _SLACK, np.uint8)
        self._count = len(records)
        self.features: dict[str, Any] = {}
        for name, rows, feature in self._entries(records):
            if name not in self.features:
                self.features[name] = np.zeros((len(records), 2), np.int64)
            self.features[name][rows] = feature

    def values(self, name: str, expected: str = "") -> tuple[str, Any, Any]:
        """Return the kind of a feature, its values in all records, one after another, and their number in each.

        expected  the kind; empty for that of the first record with the feature
        raises    ExampleError for a record with another kind
        """
        counts = np.zeros(self._count, np.int64)
        at = self.features.get(name, np.zeros((self._count, 2), np.int64))
        rows = np.flatnonzero(at[:, 1] - at[:, 0] > _EMPTY)
        if not len(rows):
            return expected or "float", self._flat(expected or "float", rows, at[rows], counts), counts
        tags = self._bytes[at[rows, 0]]
        expected = expected or _KINDS.get(int(tags[0]), "bytes")
        tag = next(tag for tag, kind in _KINDS.items() if kind == expected)
        if (tags != tag).any():
            position = int(np.argmax(tags != tag))
            found = _KINDS.get(int(tags[position]), "another one")
            raise ExampleError(int(rows[position]), f"feature {name!r}: expected the kind {expected}, got {found}")
        lists = self._field(rows, at[rows, 0], at[rows, 1], tag)
        is_full = lists[:, 0] < lists[:, 1]
        return expected, self._flat(expected, rows[is_full], lists[is_full], counts), counts

    def _entries(self, records: Any) -> Iterator[tuple[str, Any, Any]]:
        """Yield the name of a feature, the records that have it at one place of their maps, and where it is."""
        rows = np.flatnonzero(records[:, 0] < records[:, 1])
        features = self._field(rows, records[rows, 0], records[rows, 1], _FIRST)
        self._check(features[:, 1] == records[rows, 1], rows)
        at, stop = features[:, 0], features[:, 1]
        while True:
            is_more = at < stop
            rows, at, stop = rows[is_more], at[is_more], stop[is_more]
            if not len(rows):
                return
            entry = self._field(rows, at, stop, _FIRST)
            key = self._field(rows, entry[:, 0], entry[:, 1], _FIRST)
            feature = np.stack([key[:, 1], key[:, 1]], 1)
            has = np.flatnonzero(key[:, 1] < entry[:, 1])
            feature[has] = self._field(rows[has], key[has, 1], entry[has, 1], _SECOND)
            self._check(feature[:, 1] == entry[:, 1], rows)
            for name, members in self._by_name(key):
                yield name, rows[members], feature[members]
            at = entry[:, 1]

    def _by_name(self, keys: Any) -> Iterator[tuple[str, Any]]:
        """Yield each distinct name, and the positions of the keys that are it."""
        left = np.arange(len(keys))
        while len(left):
            start, stop = keys[left[0]].tolist()
            name = self._data[start:stop]
            is_it = keys[left, 1] - keys[left, 0] == len(name)
            alike = keys[left[is_it], 0][:, None] + np.arange(len(name))
            is_it[is_it] = (self._bytes[alike] == np.frombuffer(name, np.uint8)).all(1)
            yield name.decode(errors="replace"), left[is_it]
            left = left[~is_it]

    def _flat(self, kind: str, rows: Any, lists: Any, counts: Any) -> Any:
        """Return the values of lists that are not empty, one after another; write their numbers into `counts`."""
        if kind == "bytes":
            return self._texts(rows, lists, counts)
        dtype: Any = np.float32 if kind == "float" else np.int64
        if not len(rows):
            return np.empty(0, dtype)
        is_packed = self._bytes[lists[:, 0]] == _FIRST
        if not is_packed.all():
            self._check(~is_packed & (self._bytes[lists[:, 0]] == _UNPACKED[kind]), rows)
            return self._unpacked(kind, rows, lists, counts)
        packed = self._field(rows, lists[:, 0], lists[:, 1], _FIRST)
        self._check(packed[:, 1] == lists[:, 1], rows)
        joined = self._joined(packed)
        sizes = packed[:, 1] - packed[:, 0]
        if kind == "float":
            self._check(sizes % 4 == 0, rows)
            counts[rows] = sizes // 4
            return joined.view("<f4")
        ends = np.concatenate([[0], np.cumsum(joined < 128)])
        stops = np.cumsum(sizes)
        counts[rows] = ends[stops] - ends[stops - sizes]
        self._check((joined[stops - 1] < 128) | (sizes == 0), rows)
        return _varints(joined)

    def _unpacked(self, kind: str, rows: Any, lists: Any, counts: Any) -> Any:
        joined, sizes = self._joined(lists), lists[:, 1] - lists[:, 0]
        if kind == "float":
            self._check(sizes % 5 == 0, rows)
            counts[rows] = sizes // 5
            return np.ascontiguousarray(joined.reshape(-1, 5)[:, 1:]).view("<f4")[:, 0]
        ends = np.concatenate([[0], np.cumsum(joined < 128)])
        stops = np.cumsum(sizes)
        counts[rows] = (ends[stops] - ends[stops - sizes]) // 2
        return _varints(joined)[1::2]

    def _texts(self, rows: Any, lists: Any, counts: Any) -> Any:
        found: list[tuple[Any, Any]] = []
        at, stop, left = lists[:, 0], lists[:, 1], rows
        while len(left):
            text = self._field(left, at, stop, _FIRST)
            found.append((left, text))
            counts[left] += 1
            is_more = text[:, 1] < stop
            at, stop, left = text[is_more, 1], stop[is_more], left[is_more]
        values = np.empty(int(counts.sum()), object)
        if found:
            order = np.argsort(np.concatenate([one for one, _ in found]), kind="stable")
            ranges = np.concatenate([text for _, text in found])[order]
            values[:] = [self._data[start:stop] for start, stop in ranges.tolist()]
        return values

    def _joined(self, ranges: Any) -> Any:
        return np.frombuffer(b"".join([self._data[start:stop] for start, stop in ranges.tolist()]), np.uint8)

    def _field(self, rows: Any, at: Any, stop: Any, tag: int) -> Any:
        """Return where the contents of a field begin and end, i64[rows, 2], of a field that begins `at` each place.

        raises  ExampleError for the first of `rows` without a field of this tag, or whose field ends after `stop`
        """
        self._check((at < stop) & (self._bytes[np.minimum(at, len(self._data))] == tag), rows)
        byte = self._bytes[at + 1].astype(np.int64)
        size, after, shift, more = byte & 127, at + 2, 7, np.flatnonzero(byte > 127)
        while len(more):
            self._check(np.array([shift < 63]), rows)
            byte = self._bytes[np.minimum(after[more], len(self._data))].astype(np.int64)
            size[more] |= (byte & 127) << shift
            after[more] += 1
            more, shift = more[byte > 127], shift + 7
        self._check((size >= 0) & (size <= stop - after), rows)
        return np.stack([after, after + size], 1)

    @staticmethod
    def _check(is_right: Any, rows: Any) -> None:
        if not is_right.all():
            raise ExampleError(int(rows[int(np.argmin(is_right))]), "expected a tf.Example, got other bytes")


def _varints(joined: Any) -> Any:
    """Return the integers of varints: 7 bits a byte, the lowest first, and the last byte is below 128."""
    stops = np.flatnonzero(joined < 128) + 1
    starts = np.concatenate([[0], stops[:-1]])
    values, sizes = np.zeros(len(stops), np.uint64), stops - starts
    for byte in range(min(int(sizes.max(initial=0)), 10)):
        has = np.flatnonzero(sizes > byte)
        values[has] |= (joined[starts[has] + byte].astype(np.uint64) & np.uint64(127)) << np.uint64(7 * byte)
    return values.view(np.int64)
