"""Name scopes of the ops that dflow makes itself, such as a lookup in a table and an optimizer's update.

A reader of a graph recognises these ops by the call that made them. A drawing shows each scope as a group that is
folded at first.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import jax

#: Begins the name of each such scope.
PREFIX = "dflow:"
#: Characters that have a meaning in the text of nested scopes, or would make a name too long to read.
_PLAIN, _LONGEST = str.maketrans("/()", "..."), 40


def own_scope(what: str, name: str) -> AbstractContextManager[None]:
    """Return the scope of dflow's ops that do `what`, such as `lookup`, for a table or an optimizer of this name."""
    shown = name if len(name) <= _LONGEST else f"{name[: _LONGEST - 3]}..."
    scope: AbstractContextManager[None] = jax.named_scope(f"{PREFIX}{what} {shown.translate(_PLAIN)}")
    return scope
