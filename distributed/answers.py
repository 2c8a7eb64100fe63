"""The check that another process has answered with what was asked for."""

from __future__ import annotations

from typing import Any, TypeVar

from dflow.tracing.errors import WireError

_Answer = TypeVar("_Answer")


def expect(answer: Any, wanted: type[_Answer], who: str) -> _Answer:
    """The answer of `who`; raises WireError when it is none that was `wanted`, as one of another version may be."""
    if not isinstance(answer, wanted):
        raise WireError(
            f"{who} answered with {type(answer).__name__} where {wanted.__name__} was due; "
            "install the same dflow on both"
        )
    return answer
