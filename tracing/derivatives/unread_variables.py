"""The warning about variables that are differentiated and that the function never reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflow.tracing.jax_frontend import accesses, only_added
from dflow.tracing.source import at, caller, warn_at


class UnreadVariableWarning(UserWarning):
    """Warns that a gradient is zero because the function does not read the variable."""


def warn_of_unread(function: str, variables: Sequence[Any], effects: Any) -> None:
    """Warn, at the user's line, if a function with these effects reads some of the variables nowhere."""
    read = set(accesses(effects)[0]).difference(only_added(effects))
    unread = [variable.name for variable in variables if variable not in read]
    if not unread:
        return
    names = ", ".join(map(repr, unread[:5])) + (", ..." if len(unread) > 5 else "")
    line = caller()
    text = (
        f"{function} differentiates by {len(unread)} variables that the function never reads, {names}: their gradients "
        f"are zero{at(line)}\n  read them in the function, or leave them out of the variables"
    )
    warn_at(line, text, UnreadVariableWarning)
