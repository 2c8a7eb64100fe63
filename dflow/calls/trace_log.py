"""Log of a function's traces: what changed, the line of the call, and the cost."""

from __future__ import annotations

import logging
import re
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import get_ident
from types import CodeType
from typing import Any

import jax

from dflow.distributed.training.run_steps import is_in_later_step
from dflow.tracing.ir.types import type_of_aval
from dflow.tracing.jax_frontend import abstract, is_array_type, is_resource
from dflow.tracing.jaxprs.attributes import repr_of
from dflow.tracing.jaxprs.trace import argument_names
from dflow.tracing.source import Loc, warn_at
from dflow.tracing.wide_ids import IntegerIds, StringIds

#: Number of traces with changed arguments after which a function is warned about, once.
WARN_AFTER = 6

#: Number of functions compiled from the same code, line and argument types after which a warning is given, once. It is
#: large because a program's tests have good reasons to compile a function again.
WARN_AFTER_REMAKING = 50

#: By code: how often a new function was first traced, by the line that compiled it and its arguments.
_remade: weakref.WeakKeyDictionary[CodeType, Counter[Any]] = weakref.WeakKeyDictionary()


#: The type of an array: its dtype, the rows, and the other axes.
_ROWS = re.compile(r"(~?\w+\[)([0-9]+)((?:,[0-9,]*)?\])")
#: A change of the type of an array.
_OF_ARRAY = re.compile(r".*: ~?\w+\[[0-9,]*\] -> ~?\w+\[[0-9,]*\]")
#: The end of a change to an array of two axes or more: its first two sizes.
_NEW_SIZES = re.compile(r"-> ~?\w+\[([0-9]+),([0-9]+)[^ ]*$")
#: The first two sizes of arrays in batches of sequences that are padded to a few lengths: no warning is given for them.
_expected: set[tuple[int, int]] = set()
LOGGER = logging.getLogger("dflow")


class RetraceWarning(UserWarning):
    """Warning that a function is traced again and again; the message has the cause and the remedy."""


def expect_sizes(rows: int, lengths: Sequence[int]) -> None:
    """Suppress warnings for traces whose changed arguments are arrays of `rows` rows and one of these lengths.

    The rows of several workers together, as in `AllReduce`, are expected too.
    """
    _expected.update((rows, int(length)) for length in lengths)


@dataclass(frozen=True)
class TraceRecord:
    """One trace of a function.

    `number`      of the trace in its log, from 1
    `arguments`   the type of each leaf of the arguments (for a static one, its value), by name
    `changes`     differences from the most similar earlier trace, such as `x: f32[4] -> f32[5]`
    `call`        the user's line that called the function
    `trace_ms`    time that JAX took to trace the function, in ms
    `total_ms`    time of the whole call: trace, passes, compilation and first run; None inside another trace
    `captured`    types of the closed-over arrays of 64 KiB or more, which became inputs
    `is_within`   whether it was made within another trace
    `is_look`     whether a strategy made it to see the gradients that a step gives: nothing is compiled of it
    `taker`       of the gradients of its steps, if a strategy takes them: a name that is unique in the process
    """

    number: int
    arguments: Mapping[str, str]
    changes: tuple[str, ...]
    call: Loc | None
    trace_ms: float
    total_ms: float | None = None
    captured: tuple[str, ...] = ()
    is_within: bool = False
    is_look: bool = False
    taker: str = ""

    def __str__(self) -> str:
        without = "by a strategy that looks at its gradients" if self.is_look else "within another trace"
        total = without if self.total_ms is None else f"{self.total_ms:.1f} ms in all"
        lines = [f"trace {self.number} at {self.call or 'an unknown line'}: {self.trace_ms:.1f} ms, {total}"]
        lines += [f"  {change}" for change in self.changes]
        lines += [f"  closed over {captured}, which became an input" for captured in self.captured]
        return "\n".join(lines)


@dataclass
class TraceLog:
    """The traces of one function, oldest first; its `str` lists what changed."""

    name: str
    #: The function's code (None if not known), and the user's line that compiled it.
    code: CodeType | None = None
    made: Loc | None = None
    records: list[TraceRecord] = field(default_factory=list)
    #: By thread, while its first call for some types runs: the trace's index, and the start time (`perf_counter`).
    _calls: dict[int, tuple[int, float]] = field(default_factory=dict)
    _has_told_short: bool = False

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> TraceRecord:
        return self.records[index]

    def __str__(self) -> str:
        return "\n".join(map(str, self.records)) or f"{self.name} has not been traced"

    def begin(self, index: int, started: float, captured: tuple[str, ...]) -> None:
        """Record that a call of this thread, begun at `started`, made trace `index`, and the arrays it closed over."""
        if len(self.records) > index:
            self.records[index] = replace(self.records[index], captured=captured)
            self._calls[get_ident()] = index, started

    def finish(self) -> None:
        """Record the total time of the call that this thread began, if any."""
        if self._calls and (call := self._calls.pop(get_ident(), None)) is not None:
            index, started = call
            total_ms = (time.perf_counter() - started) * 1e3
            self.records[index] = replace(self.records[index], total_ms=total_ms)

    def add(self, arguments: Mapping[str, str], call: Loc | None, trace_ms: float, **kind: Any) -> None:
        """Append a trace. Warns with RetraceWarning when traces for new types or new functions become too many.

        See `TraceRecord` for the arguments; `kind` is `is_within`, `is_look` and `taker`. A trace is compared with
        those that are within another one as it is, and looks as it is: a program is compiled for each kind.
        """
        record = TraceRecord(len(self.records) + 1, arguments, (), call, trace_ms, **kind)
        is_within, is_look = record.is_within, record.is_look
        earlier = [one for one in self.records if (one.is_within, one.is_look) == (is_within, is_look)]
        record = replace(record, changes=_changes(record, earlier))
        self.records.append(record)
        if (
            not _needs_no_warning(record)
            and sum(not _needs_no_warning(one) for one in [*earlier, record]) == WARN_AFTER
        ):
            self._warn_of_changes()
        # A call of no user's line is of dflow itself: a server compiles a program for each size of its batches.
        elif earlier and call is not None and not (is_within or is_look or self._has_told_short):
            if is_in_later_step():
                self._warn_in_run(record)
            else:
                self._tell_if_short(earlier, record, call)
        if len(self.records) == 1 and self.code is not None and self.made is not None:
            self._count_remaking(self.code, self.made)

    def expect_short_batches(self) -> None:
        """Give no warning of a trace for a batch of another number of rows, since the caller knows of it."""
        self._has_told_short = True

    def _warn_in_run(self, record: TraceRecord) -> None:
        """Warn of a trace that delays a run, once, unless no argument caused it or its lengths are expected."""
        if _needs_no_warning(record):
            return
        self._has_told_short = True
        first, more = record.changes[0], len(record.changes) - 1
        warn_at(
            record.call,
            f"{self.name} is traced and compiled again during a run, because of {first}"
            f"{f' and {more} more' if more else ''} (called at {record.call})\n  {_remedy(record.changes)}",
            RetraceWarning,
        )

    def _tell_if_short(self, earlier: Sequence[TraceRecord], newest: TraceRecord, call: Loc) -> None:
        """Log a warning if the trace is of a batch that has fewer rows than those before, as the last of an epoch."""
        for record in earlier:
            if (rows := _rows_lost(record.arguments, newest.arguments)) is not None:
                self._has_told_short = True
                LOGGER.warning(
                    "%s is traced and compiled again for a batch of %d rows in place of %d (called at %s)\n"
                    "  pad short batches or leave them out: dflow.data.batches(..., pad=True or drop_remainder=True)",
                    *(self.name, *rows, call),
                )
                return

    def _count_remaking(self, code: CodeType, made: Loc) -> None:
        counted = _remade.setdefault(code, Counter())
        key = made, tuple(self.records[0].arguments.items())
        counted[key] += 1
        if counted[key] == WARN_AFTER_REMAKING:
            warn_at(
                made,
                f"{self.name} was compiled {counted[key]} times for the same arguments, because {made} makes a new "
                f"function of it each time\n  call dflow.jit once, outside of the loop or function that is run again, "
                "and keep what it gives",
                RetraceWarning,
            )

    def _warn_of_changes(self) -> None:
        newest = self.records[-1]
        warn_at(
            newest.call,
            f"{self.name} was traced {len(self.records)} times, the last time because of {'; '.join(newest.changes)}"
            f" (called at {newest.call}); each trace compiles anew\n"
            "  pad or bucket arguments to a few fixed shapes, pass Python numbers as arrays, and pass only what seldom "
            f"changes as static; {self.name}.trace_log() lists every trace and its cost",
            RetraceWarning,
        )


_SAME = "no argument changed: a setting of JAX, a device scope, or a cleared cache"
_STRATEGY = "no argument changed: it runs under another strategy or optimizer than before, or under none"
_LOOK = "a strategy looks at the gradients that it gives, before a trace that runs"


def _is_same(record: TraceRecord) -> bool:
    """Whether no argument has caused the trace."""
    return record.changes in {(_SAME,), (_STRATEGY,), (_LOOK,)}


def _needs_no_warning(record: TraceRecord) -> bool:
    """Whether no argument has caused the trace, or one that is padded to one of a few lengths."""
    return _is_same(record) or all(map(_is_expected, record.changes))


def _is_expected(change: str) -> bool:
    found = _NEW_SIZES.search(change)
    return found is not None and any(
        int(found[2]) == length and int(found[1]) % rows == 0 for rows, length in _expected.copy()
    )


def _remedy(changes: Sequence[str]) -> str:
    """Return the remedy for a trace during a run."""
    if all(map(_is_of_rows, changes)):
        return "give all batches one number of rows: dflow.data.batches(..., pad=True or drop_remainder=True)"
    if all(map(_OF_ARRAY.fullmatch, changes)):
        return "give all batches one type, and pad sequences to a few lengths: dflow.data.bucket_by_sequence_length"
    return "pass what changes during a run as an array, and in all steps the same arguments"


def _is_of_rows(change: str) -> bool:
    """Whether a change is that of the number of rows of an array alone."""
    before, _, now = change.partition(": ")[2].partition(" -> ")
    one, other = _ROWS.fullmatch(before), _ROWS.fullmatch(now)
    return one is not None and other is not None and (one[1], one[3]) == (other[1], other[3])


def _changes(new: TraceRecord, earlier: Sequence[TraceRecord]) -> tuple[str, ...]:
    """Return the differences from the most similar earlier trace of the same kind."""
    if not earlier:
        return (_LOOK,) if new.is_look else ("first trace",)
    found = min((_differences(old.arguments, new.arguments) for old in reversed(earlier)), key=len)
    if found or new.is_look:
        return found or (_LOOK,)
    takers = {old.taker for old in earlier if old.arguments == new.arguments}
    return (_SAME,) if new.taker in takers else (_STRATEGY,)


def _differences(old: Mapping[str, str], new: Mapping[str, str]) -> tuple[str, ...]:
    pairs = {name: (old.get(name, "absent"), new.get(name, "absent")) for name in [*old, *new]}
    return tuple(f"{name}: {before} -> {now}" for name, (before, now) in pairs.items() if before != now)


def _rows_lost(old: Mapping[str, str], new: Mapping[str, str]) -> tuple[int, int] | None:
    """Return the rows of a batch and those of an earlier one, if it differs in nothing but that it has fewer."""
    pairs = [(before, new.get(name, "")) for name, before in old.items() if before != new.get(name)]
    found = [(_ROWS.fullmatch(before), _ROWS.fullmatch(now)) for before, now in pairs]
    both = [(one, other) for one, other in found if one is not None and other is not None]
    is_other = len(old) != len(new) or len(both) < len(pairs)
    if is_other or any((one[1], one[3]) != (other[1], other[3]) for one, other in both):
        return None
    rows = {(int(other[2]), int(one[2])) for one, other in both}
    return next(iter(rows)) if len(rows) == 1 and all(now < before for now, before in rows) else None


def described(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], is_static: Callable[[int | str], bool]
) -> dict[str, str]:
    """Return the type of each argument leaf (or a static one's value) by name. Variables and queues are leaves too."""
    arguments: list[tuple[int | str, Any]] = [*enumerate(args), *sorted(kwargs.items())]
    texts = [
        _described(leaf, is_static(position))
        for position, argument in arguments
        for leaf in jax.tree_util.tree_leaves(argument, is_leaf=_is_leaf)
    ]
    return dict(zip(argument_names(fn, args, kwargs, is_leaf=_is_leaf), texts, strict=True))


def _is_leaf(value: Any) -> bool:
    return is_resource(value) or isinstance(value, StringIds | IntegerIds)


def _described(leaf: Any, is_static: bool) -> str:
    if isinstance(leaf, StringIds | IntegerIds):
        return f"{'strings' if isinstance(leaf, StringIds) else 'i64'}[{','.join(map(str, leaf.shape))}]"
    if not is_resource(leaf) and not is_static:
        aval = abstract(leaf)
        return str(type_of_aval(aval) if is_array_type(aval) else aval)
    text = repr_of(leaf.handle.variable if is_resource(leaf) else leaf)
    return text if len(text) <= 60 else text[:57] + "..."
