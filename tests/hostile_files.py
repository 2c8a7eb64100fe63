"""Damaged and hostile files, for tests of readers that may raise only one error class.

A file is drawn from a valid one: values of a JSON document are replaced, bytes are changed, or the file is replaced by
something else. A test passes `repair` to correct the checksums of a changed document.
"""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Values that may replace a value of a document.
VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 3, 7, 2**31, 2**53, 2**63, 2**70, -(2**40), 0.5, 1e308, float("nan")),
    *("", ".", "..", "../x", "/etc/passwd", "a/../../x", "a//x", "\0", "\ud800", "a\nb", "x" * 5000, "~", "zarr.json"),
    *("f32[6]", "f32[]", "f32[1,,2]", "f32[99999999999]", f"f32[{'9' * 5000}]"),
    *("f32[?]", "f32[-1]", "~i8[2,2]", "c128[3]", "key<fry>[3]", "key<rbg>[]", "token", "ref<" * 3000, "i4[6]"),
    *("gzip", "zstd", "blosc", "crc32c", "bytes", "sharding_indexed", "transpose", "int8", "float32", "big", "/"),
    *([], [[]], [0], [-1], [2**40], [1, 1], [6], ["x"], {}, {"": {}}, {"name": "gzip", "configuration": {"level": 9}}),
    json.loads("[" * 100 + "]" * 100),
)


def changed_document(document: Any, rng: random.Random) -> Any:
    """A copy of a JSON document with one to three changes."""
    holder = {"": copy.deepcopy(document)}
    for _ in range(rng.randint(1, 3)):
        where, key = rng.choice(_places(holder))
        value = copy.deepcopy(rng.choice(VALUES) if rng.random() < 0.7 else rng.choice(_places(holder))[0])
        if isinstance(where, dict) and key and rng.random() < 0.2:
            del where[key]
        elif isinstance(where, dict) and rng.random() < 0.1:
            where[rng.choice(("", "..", "x", "\ud800"))] = value
        else:
            where[key] = value
    return holder[""]


def _places(node: Any) -> list[tuple[Any, Any]]:
    """Return every container in a document with each of its keys or indices."""
    keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    found = [(node, key) for key in keys]
    for key in keys:
        found += _places(node[key])
    return found


def changed_bytes(content: bytes, rng: random.Random) -> bytes:
    """A copy of some bytes, with a few changed, removed or added."""
    changed = bytearray(content)
    match rng.randrange(4):
        case 0:
            return bytes(changed[: rng.randint(0, len(changed))])
        case 1:
            return bytes(changed) + rng.randbytes(rng.choice((1, 4, 1000)))
        case 2:
            return rng.randbytes(len(changed))
    for _ in range(rng.randint(1, 3)):
        if changed:
            changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def put_no_file(path: Path, rng: random.Random) -> None:
    """Replace a file by a path that is not a file, or by a file without end."""
    path.unlink()
    match rng.randrange(5):
        case 0:
            os.mkfifo(path)
        case 1:
            path.symlink_to("/dev/zero")
        case 2:
            path.symlink_to(path.name)
        case 3:
            path.mkdir()


def damage(folder: Path, rng: random.Random, repair: Callable[[Path, Any], Any] = lambda _, document: document) -> Path:
    """Change one of the files in a folder; return its path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    file = rng.choice(files)
    content = file.read_bytes()
    how = rng.random()
    if how < 0.15:
        put_no_file(file, rng)
    elif how < 0.4 or not content.startswith(b"{"):
        file.write_bytes(changed_bytes(content, rng))
    else:
        document = repair(file, changed_document(json.loads(content), rng))
        file.write_text(json.dumps(document), encoding="utf-8")
    return file
