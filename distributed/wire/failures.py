"""Conversion of an exception to a `Failure` message, and of a `Failure` to an exception for the caller.

Why: a caller should catch the same class whether the work failed in its own process or on another task. Invariant:
only classes of `dflow.tracing.errors` are made from a name that a peer sent; any other name becomes a `RemoteError`
with the name as text.
"""

from __future__ import annotations

from dflow.distributed.wire.messages.basic import Failure
from dflow.tracing import errors
from dflow.tracing.errors import DflowError, RemoteError

#: Longer texts are truncated to this many characters, so that a failure always fits a frame.
MAX_TEXT = 16_384

_KINDS = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, DflowError)}


def failure_of(error: BaseException) -> Failure:
    """Return the answer for `error`: its class, its text and its notes."""
    notes: list[str] = getattr(error, "__notes__", [])
    text = "\n".join([str(error), *notes])
    if len(text) > MAX_TEXT:
        text = text[:MAX_TEXT] + f" ... ({len(text) - MAX_TEXT} more characters)"
    return Failure(kind=type(error).__name__, text=text)


def error_of(failure: Failure, peer: str = "") -> DflowError:
    """Return the exception for a failure, with the name of the `peer` that failed unless the text already names it."""
    kind = _KINDS.get(failure.kind)
    if kind is None:
        text = f"{failure.kind}: {failure.text}"
        return RemoteError(f"{peer} failed: {text}" if peer else text)
    return kind(f"{peer}: {failure.text}" if peer else failure.text)
