"""Whether only JAX's programs keep a value of an ended trace.

A function with a derivative rule (`jax.custom_jvp`, `jax.custom_vjp`) is part of the program that calls it, with what
the function and its rules close over. A value that is kept in this way alone is out of the user's reach.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from dflow.tracing.jax_frontend import is_of_program

#: Most steps from a value to what keeps it; a longer way counts as the user's.
_FARTHEST = 24
_OURS = ("jax", "jaxlib", "dflow")


def only_programs_keep(holders: Sequence[Any], ignored: Collection[int]) -> bool:
    """Whether all chains of references to the holders of a value begin in a program of JAX.

    ignored  the `id` of each list that the caller looks with

    Each step looks through all objects of the process once. An object that nothing refers to is a running function's.
    """
    level, seen, lists = list(holders), {*map(id, holders)}, {id(holders), *ignored}
    for _ in range(_FARTHEST):
        found = _referrers(level, lists)
        referred = {id(one) for holder in found for one in gc.get_referents(holder)}
        if any(map(_is_of_user, found)) or not referred.issuperset(map(id, level)):
            return False
        level = [one for one in found if id(one) not in seen and not _is_end(one)]
        del found  # which would be among the referrers
        seen.update(map(id, level))
        if not level:
            return True
    return False


def _referrers(level: list[Any], ignored: Collection[int]) -> list[Any]:
    """The objects that refer to those of `level`, without frames, whose values are still in use or not the user's."""
    passing = (types.FrameType, *_ITERATORS)
    return [
        one
        for one in gc.get_referrers(*level)
        if one is not level and id(one) not in ignored and not isinstance(one, passing)
    ]


def _is_of_user(holder: Any) -> bool:
    return isinstance(holder, (types.ModuleType, type)) and not _is_ours(holder)


def _is_end(holder: Any) -> bool:
    if isinstance(holder, (types.ModuleType, type)):
        return True
    return is_of_program(holder) or (isinstance(holder, types.FunctionType) and _is_ours(holder))


def _is_ours(holder: Any) -> bool:
    name = holder.__name__ if isinstance(holder, types.ModuleType) else holder.__module__
    return str(name).split(".")[0] in _OURS


def _kinds(*iterators: Iterable[Any]) -> tuple[type, ...]:
    return tuple(map(type, iterators))


_ITERATORS = _kinds(iter([]), iter(()), iter({}), map(id, []))
