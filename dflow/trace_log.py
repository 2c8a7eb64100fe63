"""Why a function was traced, each time: what changed, from which line it was called, and what it cost."""

from __future__ import annotations

import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import get_ident
from types import CodeType
from typing import Any

import jax

from dflow.tracing.attributes import repr_of
from dflow.tracing.captured import is_large
from dflow.tracing.jax_frontend import abstract, is_array_type, is_resource
from dflow.tracing.source import Loc
from dflow.tracing.trace import argument_names
from dflow.tracing.types import array_type_of, type_of_aval

#: A function traced this often for changing arguments is warned about, once.
WARN_AFTER = 6

#: One function compiled this often anew, from one line and for the same arguments, is warned about, once. Not sooner,
#: since the tests of a program do that for good reasons.
WARN_AFTER_REMAKING = 50

#: How often functions of one code, compiled from one line, were first traced, by the arguments.
_remade: weakref.WeakKeyDictionary[CodeType, Counter[Any]] = weakref.WeakKeyDictionary()


class RetraceWarning(UserWarning):
    """A function is traced again and again; the message says for what, and what to do."""


@dataclass(frozen=True)
class TraceRecord:
    """One trace.

    `arguments`   the type (or, of a static argument, the value) of each leaf of the arguments, by name
    `changes`     what differs from the most similar earlier trace: `x: f32[4] -> f32[5]`
    `call`        the user's line that called the function
    `trace_ms`    how long the function itself ran
    `total_ms`    the whole call: trace, passes, compilation and first run; None within another trace
    `captured`    the closed-over arrays of 64 KiB or more, as types
    """

    number: int
    arguments: Mapping[str, str]
    changes: tuple[str, ...]
    call: Loc | None
    trace_ms: float
    total_ms: float | None = None
    captured: tuple[str, ...] = ()

    def __str__(self) -> str:
        total = "within another trace" if self.total_ms is None else f"{self.total_ms:.1f} ms in all"
        lines = [f"trace {self.number} at {self.call or 'an unknown line'}: {self.trace_ms:.1f} ms, {total}"]
        lines += [f"  {change}" for change in self.changes]
        lines += [f"  closed over {captured}, which became an input" for captured in self.captured]
        return "\n".join(lines)


@dataclass
class TraceLog:
    """The traces of one function, oldest first; prints as a list of what changed."""

    name: str
    #: The code of the function, and the user's line that compiled it.
    code: CodeType | None = None
    made: Loc | None = None
    records: list[TraceRecord] = field(default_factory=list)
    #: Of each thread whose first call for some types is under way: the place of the trace, and when the call began.
    _calls: dict[int, tuple[int, float]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> TraceRecord:
        return self.records[index]

    def __str__(self) -> str:
        return "\n".join(map(str, self.records)) or f"{self.name} has not been traced"

    def begin(self, index: int, started: float, captured: tuple[str, ...]) -> None:
        """Say of the trace at `index` that a call on this thread, `started` then, made it, and what it closed over."""
        if len(self.records) > index:
            self.records[index] = replace(self.records[index], captured=captured)
            self._calls[get_ident()] = index, started

    def finish(self) -> None:
        """Note what the call cost that this thread began, if it began one."""
        if self._calls and (call := self._calls.pop(get_ident(), None)) is not None:
            index, started = call
            total_ms = (time.perf_counter() - started) * 1e3
            self.records[index] = replace(self.records[index], total_ms=total_ms)

    def add(self, arguments: Mapping[str, str], call: Loc | None, trace_ms: float) -> None:
        """Note a trace. Warns with RetraceWarning when the function is traced ever again for other types."""
        changes = _changes(arguments, [record.arguments for record in self.records])
        self.records.append(TraceRecord(len(self.records) + 1, arguments, changes, call, trace_ms))
        if changes != (_SAME,) and sum(record.changes != (_SAME,) for record in self.records) == WARN_AFTER:
            self._warn_of_changes()
        if len(self.records) == 1 and self.code is not None and self.made is not None:
            self._count_remaking(self.code, self.made)

    def _count_remaking(self, code: CodeType, made: Loc) -> None:
        counted = _remade.setdefault(code, Counter())
        key = made, tuple(self.records[0].arguments.items())
        counted[key] += 1
        if counted[key] == WARN_AFTER_REMAKING:
            _warn(
                f"{self.name} was compiled {counted[key]} times for the same arguments, because {made} makes a new "
                f"function of it each time\n  call dflow.jit once, outside of the loop or function that is run again, "
                "and keep what it gives",
                made,
            )

    def _warn_of_changes(self) -> None:
        newest = self.records[-1]
        _warn(
            f"{self.name} was traced {len(self.records)} times, the last time because of {'; '.join(newest.changes)}"
            f" (called at {newest.call}); each trace compiles anew\n"
            "  pad or bucket arguments to a few fixed shapes, pass Python numbers as arrays, and pass only what seldom "
            f"changes as static; {self.name}.trace_log() lists every trace and its cost",
            newest.call,
        )


def _warn(text: str, line: Loc | None) -> None:
    if line is None:
        warnings.warn(text, RetraceWarning, stacklevel=2)
    else:
        # At the user's line: between it and here stand JAX's frames, as many as JAX likes.
        warnings.warn_explicit(text, RetraceWarning, line.file, line.line)


_FIRST = "first trace"
_SAME = "no argument changed: a setting of JAX, a device scope, or a cleared cache"


def _changes(new: Mapping[str, str], earlier: Sequence[Mapping[str, str]]) -> tuple[str, ...]:
    """What differs from the earlier trace that differs least."""
    if not earlier:
        return (_FIRST,)
    differences = [_difference(old, new) for old in reversed(earlier)]
    return min(differences, key=len) or (_SAME,)


def _difference(old: Mapping[str, str], new: Mapping[str, str]) -> tuple[str, ...]:
    names = dict.fromkeys([*old, *new])
    return tuple(
        f"{name}: {old.get(name, 'absent')} -> {new.get(name, 'absent')}"
        for name in names
        if old.get(name) != new.get(name)
    )


def described(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], is_static: Callable[[int | str], bool]
) -> dict[str, str]:
    """Each argument leaf's type, or a static one's value, under its name. Variables and queues are leaves too."""
    arguments: list[tuple[int | str, Any]] = [*enumerate(args), *sorted(kwargs.items())]
    texts = [
        _described(leaf, is_static(place))
        for place, argument in arguments
        for leaf in jax.tree_util.tree_leaves(argument, is_leaf=is_resource)
    ]
    return dict(zip(argument_names(fn, args, kwargs, is_leaf=is_resource), texts, strict=True))


def _described(leaf: Any, is_static: bool) -> str:
    if not is_resource(leaf) and not is_static:
        aval = abstract(leaf)
        return str(type_of_aval(aval) if is_array_type(aval) else aval)
    text = repr_of(leaf.handle.variable if is_resource(leaf) else leaf)
    return text if len(text) <= 60 else text[:57] + "..."


def captured_types(constants: Sequence[Any]) -> tuple[str, ...]:
    """The types of the closed-over arrays that are large."""
    return tuple(str(array_type_of(constant)) for constant in constants if is_large(constant))
