"""Writes files of TFRecord with records of `tf.Example`, as TensorFlow does."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import google_crc32c


def varint(number: int) -> bytes:
    number %= 2**64
    parts = bytearray()
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes([*parts, number])


def field(tag: int, data: bytes) -> bytes:
    return bytes([tag]) + varint(len(data)) + data


def feature(values: Any, *, is_packed: bool = True) -> bytes:
    """A Feature of a list of bytes, floats or integers."""
    if all(isinstance(value, bytes) for value in values):
        return field(0x0A, b"".join(field(0x0A, value) for value in values))
    if any(isinstance(value, float) for value in values):
        floats = [struct.pack("<f", value) for value in values]
        return field(0x12, field(0x0A, b"".join(floats)) if is_packed else b"".join(b"\x0d" + one for one in floats))
    numbers = [varint(value) for value in values]
    return field(0x1A, field(0x0A, b"".join(numbers)) if is_packed else b"".join(b"\x08" + one for one in numbers))


def example(features: Mapping[str, Any], *, is_packed: bool = True) -> bytes:
    entries = (
        field(0x0A, name.encode()) + field(0x12, feature(values, is_packed=is_packed))
        for name, values in features.items()
    )
    return field(0x0A, b"".join(field(0x0A, entry) for entry in entries))


def masked(data: bytes) -> int:
    checksum = google_crc32c.value(data)
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) % 2**32


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked(length)) + data + struct.pack("<I", masked(data))


def write_records(path: Path, records: Iterable[bytes]) -> Path:
    path.write_bytes(b"".join(map(record, records)))
    return path
