"""The cause of a failed program, from the last lines that it printed."""

from __future__ import annotations

import builtins
import re
from collections.abc import Sequence

from dflow.tracing import errors

#: Longest cause in a table, in characters.
MOST = 100
#: The line of an exception in the report of Python: its class, perhaps with the module, and the first line of its text.
_RAISED = re.compile(r"(?:\w+\.)*([A-Z]\w*)(?:: (.*))?")


def cause_of(lines: Sequence[str]) -> str:
    """Return the class and the text of the exception that ended a program of Python; empty if it printed none."""
    for line in reversed(lines):
        found = _RAISED.fullmatch(line)
        if found is not None and _is_exception(found[1]):
            cause = found[1] if not found[2] else f"{found[1]}: {found[2]}"
            return cause if len(cause) <= MOST else f"{cause[: MOST - 3]}..."
    return ""


def _is_exception(name: str) -> bool:
    known = getattr(builtins, name, None) or getattr(errors, name, None)
    return name.endswith(("Error", "Exception")) or (isinstance(known, type) and issubclass(known, BaseException))
