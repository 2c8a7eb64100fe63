"""Values of a trace that are still referenced after it has ended: their types, the lines that made them, their holders.

While a function is traced its values are tracers, without numbers. JAX raises an error when a leaked tracer is used,
which may be far away and much later. A trace that is still alive after its end shows the leak immediately.
"""

from __future__ import annotations

import gc
import itertools
import threading
import types
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from dflow.tracing.ir.types import ArrayType, array_type_of
from dflow.tracing.jax_frontend import is_of_program, line_of_tracer, living_traces, source_of_trace, tracers_of
from dflow.tracing.source import Loc, caller, warn_at


class LeakedTracerWarning(UserWarning):
    """A value of a traced function is referenced after the trace, where it is useless; the message names its holder."""


#: The threads that watch for leaks, and the names of the functions that they traced, by source line. Threads may trace
#: the same function, and the values of an unfinished trace are no leak. So the last watch to end looks for all leaks.
_watching: set[int] = set()
_names: dict[str, str] = {}
_lock = threading.Lock()
#: Most values of a trace that are named: what keeps each is searched for.
_MOST = 8
#: The traces already examined, so that a living trace is reported once.
_looked_at: weakref.WeakSet[Any] = weakref.WeakSet()
#: Most steps from a value to what keeps it; a longer way counts as the user's.
_FARTHEST = 24
_OURS = ("jax", "jaxlib", "dflow")
#: Objects that refer to a value while it is looked at: they do not keep it, or are not the user's.
_PASSING = (types.FrameType, map, *map(type, (iter([]), iter(()), iter({}))))


def note_trace(source: str, name: str) -> None:
    """Record that this thread traced the function `name` at `source`, if the thread watches for leaks."""
    if threading.get_ident() in _watching:
        _names[source] = name


@contextmanager
def watched_for_leaks() -> Iterator[None]:
    """Warn, after the block has ended without an error, of each value still referenced from a trace inside it."""
    if threading.get_ident() in _watching:
        yield  # a value of an inner trace may be of use until the outermost has ended
        return
    with _lock:
        _watching.add(threading.get_ident())
    try:
        yield
    except BaseException:
        _end_watch()
        # An error that is kept, as a notebook keeps the last one, keeps the values of its trace: these are no leak.
        _looked_at.update(filter(None, (trace() for trace in living_traces())))
        raise
    if names := _end_watch():
        for trace in living_traces():
            name = _name_of(trace(), names)
            if name is not None:
                _warn_of_leaks(name, trace)


def _end_watch() -> dict[str, str]:
    """Note that this thread stops watching; return the functions to look at now."""
    with _lock:
        _watching.discard(threading.get_ident())
        names = {} if _watching else dict(_names)
        if not _watching:
            _names.clear()
        return names


def _name_of(trace: Any, names: Mapping[str, str]) -> str | None:
    """The name of the function of a living trace; None if it was not noted or was examined before."""
    if trace is None or trace in _looked_at or (name := names.get(source_of_trace(trace))) is None:
        return None
    _looked_at.add(trace)
    return name


def _warn_of_leaks(name: str, trace: weakref.ref[Any]) -> None:
    for type, made, holders in leaks(trace):
        text = (
            f"a value of {name}, {type}, is kept after its trace: {holders}\n"
            f"  it stood for an array while {name} was traced and holds no numbers\n"
            f"  return it from {name}, or keep it in a dflow.Variable"
        )
        warn_at(made or caller(), text, LeakedTracerWarning)


def leaks(trace: weakref.ref[Any]) -> list[tuple[ArrayType, Loc | None, str]]:
    """The first values of an ended trace that something other than garbage and JAX's programs keeps.

    Each is given by its type, the user's line that made it, and what keeps it.
    """
    if not _has_values(trace):
        return []
    gc.collect()
    alive = trace()
    if alive is None:  # it was garbage that had not been collected yet
        return []
    kept = tracers_of(alive)
    found = [(tracer, *_holders(tracer, kept)) for tracer in kept]
    every = [holder for _, holders, _ in found for holder in holders]
    lists = {id(kept), id(every), *(id(holders) for _, holders, _ in found)}
    if not every or only_programs_keep(every, lists):  # one search for all, since each takes 0.1 s
        return []
    leaked = (
        (array_type_of(tracer), line_of_tracer(tracer), " and ".join(texts))
        for tracer, holders, texts in found
        if holders and not only_programs_keep(holders, lists)
    )
    return list(itertools.islice(leaked, _MOST))


def _holders(tracer: Any, kept: list[Any]) -> tuple[list[Any], list[str]]:
    """The objects that hold a value and that a user may know, and the descriptions of them."""
    holders = [holder for holder in gc.get_referrers(tracer) if holder is not kept]
    texts = list(map(_described, holders, itertools.repeat(tracer), itertools.repeat(holders)))
    return list(itertools.compress(holders, texts)), list(dict.fromkeys(filter(None, texts)))


def _has_values(trace: weakref.ref[Any]) -> bool:
    """Whether a value of the trace is alive, perhaps as garbage.

    The trace alone may be alive without a leak: a jaxpr with a custom rule references it.
    """
    alive = trace()
    return alive is not None and bool(tracers_of(alive))


def _described(holder: Any, value: Any, holders: list[Any]) -> str | None:
    """A description of `holder`, one of `holders`, for the user; None when it belongs to JAX or dflow."""
    if isinstance(holder, types.FrameType) or _is_of(holder, "jax", "jaxlib", "dflow"):
        return None
    if isinstance(holder, dict):
        return _dictionary(holder, value)
    if isinstance(holder, list | tuple):
        return _sequence(holder, value, holders)
    if isinstance(holder, types.CellType):
        return "by a function that closes over it"
    held = [name for name, each in getattr(holder, "__dict__", {}).items() if each is value]
    return f"as attribute {held[0]!r} of a {type(holder).__name__}" if held else f"by a {type(holder).__name__}"


def _is_of(holder: Any, *packages: str) -> bool:
    return type(holder).__module__.split(".")[0] in packages


def _dictionary(holder: dict[Any, Any], value: Any) -> str | None:
    keys = [key for key, each in holder.items() if each is value]
    if not keys:
        return None
    for owner in gc.get_referrers(holder):
        if getattr(owner, "__dict__", None) is holder:
            if isinstance(owner, types.ModuleType):
                return f"as global {keys[0]!r} of module {owner.__name__}"
            return f"as attribute {keys[0]!r} of a {type(owner).__name__}"
    return f"under {keys[0]!r} in a dict"


def _sequence(holder: list[Any] | tuple[Any, ...], value: Any, holders: list[Any]) -> str | None:
    owners = [
        owner for owner in gc.get_referrers(holder) if owner is not holders and not isinstance(owner, types.FrameType)
    ]
    # JAX's own records hold lists of values too; and an object that only a frame holds is not finished yet.
    if not owners or any(_is_of(owner, "jax", "jaxlib") for owner in owners):
        return None
    positions = [position for position, each in enumerate(holder) if each is value]
    return f"as element {positions[0]} of a {type(holder).__name__}" if positions else None


def only_programs_keep(holders: Sequence[Any], ignored: Collection[int]) -> bool:
    """Whether all chains of references to the holders of a value begin in a program of JAX.

    A function with a derivative rule (`jax.custom_jvp`, `jax.custom_vjp`) is part of the program that calls it, with
    what the function and its rules close over. A value that is kept in this way alone is out of the user's reach.

    ignored  the `id` of each list that the caller looks with

    Each step looks through all objects of the process once. An object that nothing refers to is a running function's.
    """
    level, seen, lists = list(holders), {*map(id, holders)}, {id(holders), *ignored}
    for _ in range(_FARTHEST):
        found = [
            one
            for one in gc.get_referrers(*level)
            if one is not level and id(one) not in lists and not isinstance(one, _PASSING)
        ]
        referred = {id(one) for holder in found for one in gc.get_referents(holder)}
        is_of_user = any(isinstance(one, (types.ModuleType, type)) and not _is_ours(one) for one in found)
        if is_of_user or not referred.issuperset(map(id, level)):
            return False
        level = [one for one in found if id(one) not in seen and not _is_end(one)]
        del found  # which would be among the referrers
        seen.update(map(id, level))
        if not level:
            return True
    return False


def _is_end(holder: Any) -> bool:
    if isinstance(holder, (types.ModuleType, type)):
        return True
    return is_of_program(holder) or (isinstance(holder, types.FunctionType) and _is_ours(holder))


def _is_ours(holder: Any) -> bool:
    name = holder.__name__ if isinstance(holder, types.ModuleType) else holder.__module__
    return str(name).split(".")[0] in _OURS
