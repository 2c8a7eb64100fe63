"""A sorted table of keys and values, as LevelDB and TensorFlow write it, and the fields of protocol buffers in it.

    data blocks        entries in the order of their keys, each key without what it shares with the one before
    index block        for each data block its position and size
    footer, 48 bytes   the position and size of the index block, and a magic number

Each block has a checksum. Blocks that are compressed are refused: TensorFlow compresses none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

_MAGIC = 0xDB4775248B80FB57
_FOOTER = 48
#: Of a block: its compression and its checksum.
_TRAILER = 5


def read_table(content: bytes, crc32c: Callable[[bytes], int]) -> dict[bytes, bytes]:
    """Return the values by key. Raises ValueError for another content, or one whose checksum differs."""
    footer = content[-_FOOTER:]
    if len(footer) < _FOOTER or int.from_bytes(footer[40:], "little") != _MAGIC:
        raise ValueError("no table of checkpoints: its magic number is another one")
    _, at = _handle(footer, 0)
    index, _ = _handle(footer, at)
    return {
        key: value
        for _, handle in _entries(_block(content, *index, crc32c))
        for key, value in _entries(_block(content, *_handle(handle, 0)[0], crc32c))
    }


def unmasked(checksum: int) -> int:
    """Return a CRC-32C as it was before LevelDB's mask."""
    rotated = (checksum - 0xA282EAD8) & 0xFFFFFFFF
    return (rotated >> 17 | rotated << 15) & 0xFFFFFFFF


def fields(message: bytes) -> dict[int, list[Any]]:
    """Return the values of a protocol buffer by the number of their field: integers, or bytes.

    Raises ValueError if it is malformed.
    """
    found: dict[int, list[Any]] = {}
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == 0:
            value: Any
            value, at = _varint(message, at)
        else:
            size = {1: 8, 5: 4}.get(kind)
            if size is None:
                if kind != 2:
                    raise ValueError(f"a field of the unknown kind {kind}")
                size, at = _varint(message, at)
            if at + size > len(message):
                raise ValueError("a field that is cut off")
            value = message[at : at + size] if kind == 2 else int.from_bytes(message[at : at + size], "little")
            at += size
        found.setdefault(tag >> 3, []).append(value)
    return found


def _varint(content: bytes, at: int) -> tuple[int, int]:
    """Return an integer of seven bits a byte, of at most 64 bits, and the position after it."""
    value = 0
    for place in range(10):
        if at + place >= len(content):
            raise ValueError("an integer that is cut off")
        byte = content[at + place]
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at + place + 1
    raise ValueError("an integer of more than 64 bits")


def _handle(content: bytes, at: int) -> tuple[tuple[int, int], int]:
    start, at = _varint(content, at)
    size, at = _varint(content, at)
    return (start, size), at


def _block(content: bytes, start: int, size: int, crc32c: Callable[[bytes], int]) -> bytes:
    end = start + size
    if end + _TRAILER > len(content):
        raise ValueError("a block that is cut off")
    if unmasked(int.from_bytes(content[end + 1 : end + _TRAILER], "little")) != crc32c(content[start : end + 1]):
        raise ValueError(f"the checksum of the block at byte {start} is another one")
    if content[end] != 0:
        raise ValueError("a block that is compressed")
    return content[start:end]


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    end = len(block) - 4 - 4 * int.from_bytes(block[-4:], "little")
    if len(block) < 4 or end < 0:
        raise ValueError("a block without its restarts")
    at, key = 0, b""
    while at < end:
        shared, at = _varint(block, at)
        own, at = _varint(block, at)
        size, at = _varint(block, at)
        if shared > len(key) or at + own + size > end:
            raise ValueError("an entry that is cut off")
        key = key[:shared] + block[at : at + own]
        at += own + size
        yield key, block[at - size : at]
