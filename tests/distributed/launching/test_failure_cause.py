"""The cause of a failed program, for the closing table."""

from __future__ import annotations

import pytest

from dflow.distributed.launching.failure_cause import MOST, cause_of
from dflow.tracing.errors import TaskLost, VariableError


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (
            ["Traceback (most recent call last):", '  File "t.py", line 1, in <module>', "ValueError: no"],
            "ValueError: no",
        ),
        (
            [f"{VariableError.__module__}.VariableError: 'w' is gone", "  at t.py:1", "  make it"],
            "VariableError: 'w' is gone",
        ),
        ([f"{TaskLost.__module__}.TaskLost: ps:0 has left", "Note: see the log"], "TaskLost: ps:0 has left"),
        (["KeyboardInterrupt"], "KeyboardInterrupt"),
        (["  ValueError: within a text", "Loss: 3.2", "Done"], ""),
        (["RuntimeError: " + "x" * 200], f"RuntimeError: {'x' * (MOST - 17)}..."),
        ([], ""),
    ],
)
def test_the_cause_is_the_last_exception_of_the_output(lines: list[str], cause: str) -> None:
    assert cause_of(lines) == cause
