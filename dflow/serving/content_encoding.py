"""Compressed bodies of HTTP: requests in gzip or deflate, and answers in gzip.

Invariant: no body is longer than its limit, also when it is decompressed.
"""

from __future__ import annotations

import gzip
import zlib

from dflow.serving.request_members import RefusedRequest

ENCODINGS = ("gzip", "x-gzip", "deflate")
#: Answers of fewer bytes are not worth compressing.
LEAST_COMPRESSED = 1024
#: Fast: an answer must not take longer to compress than to compute.
_LEVEL = 1
#: For `zlib`: a header of gzip or of zlib.
_ANY_HEADER = 32 + zlib.MAX_WBITS
#: Bytes decompressed in one call, which copies what follows a member in them: many small members take linear time.
_PIECE = 4096


def encoding_of(header: str | None) -> str | None:
    """Return the encoding of a body, None if it is plain. Raises RefusedRequest for one that is not offered."""
    name = (header or "identity").strip().lower()
    if name == "identity":
        return None
    if name not in ENCODINGS:
        raise RefusedRequest(
            415,
            f"Content-Encoding: expected gzip, deflate or identity, got {header!r:.100}",
            {"Accept-Encoding": "gzip"},
        )
    return name


def decompressed(body: bytes, most: int) -> bytes:
    """Return a body in gzip or deflate as it was. Raises RefusedRequest, also if it has more than `most` bytes."""
    parts: list[bytes] = []
    size, start = 0, 0
    try:
        while start < len(body):  # a file of gzip may have several members
            stream = zlib.decompressobj(_ANY_HEADER)
            while not stream.eof:
                if not (piece := body[start : start + _PIECE]):
                    raise RefusedRequest(400, "the request's compressed body: expected its end, got less")
                parts.append(stream.decompress(piece, most + 1 - size))
                size += len(parts[-1])
                if size > most:
                    raise RefusedRequest(
                        413, f"the request: expected at most {most} bytes decompressed, as --max-bytes says"
                    )
                start += len(piece) - len(stream.unused_data)
    except zlib.error as error:
        raise RefusedRequest(400, f"the request's compressed body: {error}") from None
    return b"".join(parts)


def takes_gzip(header: str | None) -> bool:
    """Return whether a client that sends this `Accept-Encoding` takes gzip."""
    weights: dict[str, float] = {}
    for one in (header or "").lower().split(","):
        name, _, rest = one.partition(";")
        try:
            weights[name.strip()] = float(rest.partition("q=")[2] or 1)
        except ValueError:
            weights[name.strip()] = 0.0
    return weights.get("gzip", weights.get("x-gzip", weights.get("*", 0.0))) > 0


def compressed(body: bytes) -> bytes:
    return gzip.compress(body, _LEVEL, mtime=0)
