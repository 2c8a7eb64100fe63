"""The check that another process answered with the expected type."""

from __future__ import annotations

from typing import Any, TypeVar

from dflow.tracing.errors import WireError

_Answer = TypeVar("_Answer")


def expect(answer: Any, wanted: type[_Answer], who: str) -> _Answer:
    """Return the answer of `who`; raises WireError unless it is a `wanted`, which another version may not send."""
    if not isinstance(answer, wanted):
        raise WireError(
            f"{who} answered with {type(answer).__name__} where {wanted.__name__} was due; "
            "install the same dflow on both"
        )
    return answer
