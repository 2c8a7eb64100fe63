"""A location in an object store, named by a URL: an object, or the folder that a prefix of keys is taken for.

TensorStore reads and writes it. Invariants: no call waits without a deadline; a write that returns is durable; a
conditional write takes place only if the object is as it was seen. Keys are the text of the URL, as in the tools of
the stores: nothing in it is unquoted.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import tensorstore

from dflow.tracing.errors import CheckpointError

#: Attempts of a request to a store, and the waits between them; TensorStore's own default goes on for some 15 minutes.
_RETRIES = {"max_retries": 6, "initial_delay": "500ms", "max_delay": "8s"}

#: A single context for all stores and arrays: each context has its own threads and its own `memory://`.
CONTEXT = tensorstore.Context(
    {"file_io_concurrency": {"limit": 4}, "s3_request_retries": _RETRIES, "gcs_request_retries": _RETRIES}
)

#: Longest wait for the answer to a request on a small object, in s.
ANSWER_S = 30.0
#: Longest wait for a list of keys, or for one part of an array, in s.
LONGEST_S = 300.0

#: Number of objects that are removed concurrently.
_REMOVALS = 256

#: The drivers of the schemes.
DRIVERS = {"gs": "gcs", "s3": "s3", "memory": "memory"}

#: Codes of errors that say nothing about the objects: the store does not answer, or not to this user.
_NO_ANSWER = re.compile(
    r"(ABORTED|CANCELLED|DEADLINE_EXCEEDED|INTERNAL|PERMISSION_DENIED|RESOURCE_EXHAUSTED|UNAUTHENTICATED|UNAVAILABLE"
    r"|UNKNOWN)\b"
)


class StoredObject(NamedTuple):
    """An object as it was read: its content, None if there is none, and the store's name of that state."""

    content: bytes | None
    generation: bytes


@dataclass(frozen=True)
class ObjectPath:
    """The location `url`: scheme, bucket and key without a slash at the end. Its methods raise CheckpointError."""

    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, path: str | PurePosixPath) -> ObjectPath:
        inner = PurePosixPath(path).as_posix()
        return self if inner == "." else ObjectPath(f"{self.url}/{inner}")

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> ObjectPath:
        """The folder that the location is in."""
        return ObjectPath(self.url.rpartition("/")[0])

    def kvstore(self) -> dict[str, Any]:
        """Return TensorStore's spec of the key-value store with the keys in this folder, by paths within it."""
        scheme, _, rest = self.url.partition("://")
        if scheme == "memory":
            return {"driver": "memory", "path": f"{rest}/"}
        bucket, _, key = rest.partition("/")
        return {
            "driver": DRIVERS[scheme],
            "bucket": bucket,
            "path": f"{key}/",
            **(_endpoint() if scheme == "s3" else {}),
        }

    def read(self) -> StoredObject:
        """Return the object."""
        found = self._answer(self.parent._store().read(self.name))
        return StoredObject(found.value if found.state == "value" else None, found.stamp.generation)

    def read_bytes(self, most_bytes: int) -> bytes:
        """Return the content. Raises FileNotFoundError if there is none, OSError for one of more than `most_bytes`."""
        content = self.read().content
        if content is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.url)
        if len(content) > most_bytes:
            raise OSError(errno.EFBIG, f"more than {most_bytes} bytes", self.url)
        return content

    def write(self, content: bytes) -> StoredObject:
        """Replace the object, or make it; return it."""
        return StoredObject(content, self._answer(self.parent._store().write(self.name, content)).generation)

    def replace(self, seen: StoredObject, content: bytes, *, answer_s: float | None = None) -> StoredObject | None:
        """Write the object if it still is as it was seen; return it, or None if it was changed meanwhile.

        No other process may write the same content.
        """
        writing = self.parent._store().write(self.name, content, if_equal=seen.generation)
        if generation := self._answer(writing, answer_s).generation:
            return StoredObject(content, generation)
        # A write that took place, but whose answer was lost, is tried again, and then finds its own object.
        found = self.read()
        if found.content is None and seen.content is None:
            self.parent.names()  # raises the reason if there is no bucket, which a conditional write does not tell
        return found if found.content == content else None

    def names(self) -> list[str]:
        """Return the paths of all objects in this folder and in those within it, sorted."""
        return sorted(os.fsdecode(key) for key in self._answer(self._store().list(), LONGEST_S))

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects of this folder, by their paths within it."""
        store, left = self._store(), [*names]
        while left:
            for removing in [store.write(os.fsencode(name), None) for name in left[:_REMOVALS]]:
                self._answer(removing)
            del left[:_REMOVALS]

    def _store(self) -> Any:
        # Sorted: equal specs have equal texts.
        try:
            return _opened(json.dumps(self.kvstore(), sort_keys=True))
        except (ValueError, OSError) as error:
            raise no_answer(self, error) from error

    def _answer(self, future: Any, answer_s: float | None = None) -> Any:
        try:
            return future.result(timeout=ANSWER_S if answer_s is None else answer_s)
        except (ValueError, OSError) as error:
            raise no_answer(self, error) from error


#: Where files are: in a local folder, or in an object store.
Location = Path | ObjectPath


def says_nothing(error: Exception) -> bool:
    """Return whether an error of TensorStore leaves open what a store has."""
    return isinstance(error, TimeoutError) or _NO_ANSWER.match(str(error)) is not None


def no_answer(location: ObjectPath, error: Exception) -> CheckpointError:
    """Return the error for a location whose store refuses a request or does not answer."""
    reason = first_line(error)
    remedy = "see whether this machine reaches the store, and try again"
    if re.match("PERMISSION_DENIED|UNAUTHENTICATED", reason):
        remedy = "give this process credentials that may read, write and list there"
    elif "NOT_FOUND" in reason or "bucket name" in reason:
        remedy = "make the bucket, or correct the URL"
    return CheckpointError(f"{location}: expected an object store that carries out a request, got: {reason}", remedy)


def first_line(error: Exception) -> str:
    """Return what an error of TensorStore says, without the details that it appends."""
    line = re.split(r" \[(?:tensorstore_spec|source locations|http_|x-amzn)|\n", str(error))[0]
    if isinstance(error, TimeoutError):
        line = line or "no answer in time"
    # The reason stands at the end, after paths of any length.
    return line if len(line) <= 300 else f"{line[:80]} ... {line[-200:]}"


@functools.lru_cache(maxsize=64)
def _opened(spec: str) -> Any:
    return tensorstore.KvStore.open(json.loads(spec), context=CONTEXT).result(timeout=ANSWER_S)


def _endpoint() -> dict[str, str]:
    """Return where S3 is, as the environment has it for every program; nothing for that of Amazon."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    # Amazon's own stores tell the region of a bucket.
    return ({"endpoint": endpoint} | ({"aws_region": region} if region else {})) if endpoint else {}
