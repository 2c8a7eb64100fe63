"""Run a plan without branches and loops in an order that was decided once.

The items of a plan are known when it is registered. Only receives, and ops on queues or accumulators, wait. The other
items form segments: a segment has all items that become ready by the same waits. It runs them on one thread, one after
the other. So a run counts waits and segments, not items, and the number of values costs it no calls. Plans with
branches, loops or copies that wait run by `execute.Execution`; the results are the same.

A run may begin ahead of the task that starts the step. Until that task releases it, it changes no state, so cancelling
it loses nothing: segments with items that may change state wait for the release. For this a segment without waits is
divided in two: items that may change state, with the items that need them, and all other items.

The part of the starting task itself may begin ahead too, with the arguments of a later call. Until the release it does
only what these determine: it sends values, such as the row numbers of lookups, and receives. A plan with such sends has
a further segment for that. State that it reads must be the one at the call.

Invariants: an item runs when all that it needs is done. The first error ends a run and cancels its pending operations;
later arrivals are ignored. A value is freed after the last item that takes it, or if segments share it, with the run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from enum import Enum
from functools import partial
from itertools import chain
from typing import Any

from dflow.lowering.queues.channel import Channel, NotConnected, StepId
from dflow.lowering.queues.pending_operations import Cancel
from dflow.lowering.state.applied_steps import StepAttempt
from dflow.lowering.state.held_value import StepState
from dflow.lowering.state.store import Store
from dflow.lowering.steps.executable import Executable, gives, takes
from dflow.lowering.steps.execute import Execution, Fetches, Submit, failure_of_arrival, note_failure
from dflow.lowering.steps.line_items import DoItem, Fill, compiled_item, ranges_of, taker
from dflow.lowering.steps.plan import Call, CheckIds, Copy, Item, Read, Recv, Send, UseResource
from dflow.lowering.steps.recorder import NOWHERE, Recorder
from dflow.lowering.steps.step_events import ITEM_BEGAN, ITEM_ENDED
from dflow.lowering.values.host_values import on_device
from dflow.lowering.values.outcome import Outcome, raise_interrupt
from dflow.tracing.errors import InternalError

#: Items that wait: their results come by a callback.
_WAITS = Recv | UseResource
#: Limit of the waits that need other items: the time to find segments grows with its square.
MOST_CHAINED = 256
#: Slots that are freed after an item: a range of them, and as many Nones.
_Freed = tuple[slice, Sequence[None]]
#: An item of a segment: its index, whether it waits, the function that runs it, and the slots that it takes last.
_SegmentItem = tuple[int, bool, DoItem, Sequence[_Freed]]


class StraightLine:
    """A plan as segments, for the variables and resources of `store`.

    segments   the items of each segment, with their indices, in order
    first      the segments that begin without waits and change no state
    early      the one of these that does what the feeds alone determine, if it sends something
    changing   the segments that may change state
    later      all segments but `early`: a run ahead of the starting task itself leaves them to the release
    at_start   the segments that a run which is not held back begins with
    released   the tokens of each segment: one for each wait and each segment that it comes after
    tokens     the same for a run that begins ahead: one more for the release if the segment may change state
    own_tokens the same for such a run of the starting task: one more for the release for the segments in `later`
    left       the tokens of the end: one for each segment and each wait
    after      segments that come after each wait, by the index of its item
    following  segments that come after each segment
    slots      the initial content of the slots
    fetched    returns the fetches, given the slots
    """

    def __init__(self, executable: Executable, store: Store) -> None:
        plan = executable.plan
        self.plan, self.executable, self.store = plan, executable, store
        before = _waits_before(executable)
        groups: dict[tuple[frozenset[int], _SegmentKind], list[int]] = {}
        for index in _in_order(executable):
            kind = _SegmentKind.OTHER if before[index] else _kind_of(index, executable)
            groups.setdefault((before[index], kind), []).append(index)
        number_of = {index: number for number, group in enumerate(groups.values()) for index in group}
        earlier = [
            {number_of[need] for index in group for need in executable.needs[index] if not _waits(plan.items[need])}
            - {number}
            for number, group in enumerate(groups.values())
        ]
        counts = [len(waits) + len(earlier[number]) for number, (waits, _) in enumerate(groups)]
        self.changing = [n for n, group in enumerate(groups.values()) if not executable.changing.isdisjoint(group)]
        self.first = [n for n, count in enumerate(counts) if not count and n not in self.changing]
        self.early = [number for number, (_, kind) in enumerate(groups) if kind is _SegmentKind.OF_FEEDS]
        self.later = [number for number in range(len(groups)) if number not in self.early]
        self.released = list(map(_tokens, counts))
        self.tokens = [_tokens(count + (number in self.changing)) for number, count in enumerate(counts)]
        self.own_tokens = [_tokens(count + (number in self.later)) for number, count in enumerate(counts)]
        self.at_start = [*self.first, *(number for number in self.changing if not counts[number])]
        self.after: dict[int, list[int]] = {}
        self.following: list[list[int]] = [[] for _ in groups]
        for number, (waits, _) in enumerate(groups):
            for wait in waits:
                self.after.setdefault(wait, []).append(number)
            for segment in earlier[number]:
                self.following[segment].append(number)
        self.fetched = taker(plan.fetches)
        self.slots: list[Any] = [None] * plan.slots
        for slot, value in executable.scalars:
            self.slots[slot] = value
        #: The variables of each call.
        self.states: list[StepState] = []
        self.segments = [self._compiled(group) for group in groups.values()]
        self.left = _tokens(len(groups) + sum(map(_waits, plan.items)))

    def is_busy(self) -> bool:
        """Whether a thread is dispatching a program that uses a variable of this plan's calls."""
        for state in self.states:
            if state.written is None or state.results is not None:
                return self.store.table.is_busy(self.executable.keys)
        return False

    def _compiled(self, group: Sequence[int]) -> list[_SegmentItem]:
        """Return the items of a segment."""
        done: list[_SegmentItem] = []
        own = set(group)
        last = {slot: index for index in group for slot in takes(self.plan.items[index])}
        for index in group:
            item = self.plan.items[index]
            freed = {
                slot for slot in takes(item) if last[slot] == index and own.issuperset(self.executable.takers[slot])
            }
            if not _waits(item):
                freed.update(slot for slot in gives(item) if slot not in self.executable.takers)
            do, state = compiled_item(item, index, self.executable, self.store)
            if state is not None:
                self.states.append(state)
            ranges = ranges_of(sorted(freed - self.executable.fetched))
            nothing = [(place, (None,) * (place.stop - place.start)) for place in ranges]
            done.append((index, _waits(item), do, nothing))
        return done


class _SegmentKind(Enum):
    """A segment of items without waits: what the feeds alone determine, what changes state, and the rest."""

    OF_FEEDS = "of the feeds"
    CHANGING = "changing"
    OTHER = "other"


def _kind_of(index: int, executable: Executable) -> _SegmentKind:
    if index in executable.changing:
        return _SegmentKind.CHANGING
    if executable.sends_of_feeds and index not in executable.stateful:
        return _SegmentKind.OF_FEEDS
    return _SegmentKind.OTHER


def _tokens(count: int) -> tuple[bool, ...]:
    """Return the tokens of something that comes after `count` others: the last one to be popped is True."""
    return (True, *(False,) * (count - 1)) if count else ()


def is_straight(executable: Executable) -> bool:
    """Whether the plan can run as a straight line."""
    items = executable.plan.items
    return (
        not executable.awaited
        and chained_waits(items, executable.needs) <= MOST_CHAINED
        and all(is_line_item(item) or isinstance(item, Copy) for item in items)
    )


def is_line_item(item: Item) -> bool:
    """Whether an item may be in a straight line, whatever it needs."""
    return isinstance(item, Call | CheckIds | Read | Send | _WAITS)


def chained_waits(items: Sequence[Item], needed: Sequence[Set[int]]) -> int:
    """Return the number of waits that need other items."""
    return sum(_waits(item) and bool(before) for item, before in zip(items, needed, strict=True))


def _waits(item: Item) -> bool:
    return isinstance(item, _WAITS)


def _in_order(executable: Executable) -> list[int]:
    """Return the items, each after the items that it needs: receives early, and transfers before calls."""
    missing, order = list(executable.waiting), []
    ready = deque(executable.at_once)
    while ready:
        order.append(index := ready.popleft())
        for dependent in executable.dependents[index]:
            missing[dependent] -= 1
            if missing[dependent] == 0:
                ready.append(dependent)
    return order


def _waits_before(executable: Executable) -> list[frozenset[int]]:
    """Return, for each item, the waits that it needs, except waits that another one of them needs."""
    items = executable.plan.items
    everything: dict[int, frozenset[int]] = {}
    newest: list[frozenset[int]] = [frozenset()] * len(items)
    for index in _in_order(executable):
        needed = executable.needs[index]
        waits = {wait for need in needed for wait in ([need] if _waits(items[need]) else newest[need])}
        implied = frozenset[int]().union(*(everything[wait] for wait in waits))
        newest[index] = frozenset(waits - implied)
        everything[index] = frozenset(waits | implied)
    return newest


class StraightRun:
    """One run of a straight line, from `start` on; its arguments are those of `execute.Execution`.

    begins_ahead  whether state may change only after a call of `release`, or values of the task that starts the step;
                  the part of that task itself does all but `StraightLine.early` after the release
    attempt       the attempt at a step of a shared run that this is part of; None for other steps
    is_numbered   whether the attempt is known; if not, `release` brings it, and values do not release the run
    """

    def __init__(
        self,
        line: StraightLine,
        channel: Channel,
        step: StepId,
        feeds: Sequence[Any],
        on_done: Callable[[Outcome[Fetches]], None],
        submit: Submit,
        recorder: Recorder,
        begins_ahead: bool = False,
        attempt: StepAttempt | None = None,
        is_numbered: bool = True,
    ) -> None:
        plan = line.plan
        if len(feeds) != len(plan.feeds):
            raise InternalError(f"the plan of {plan.task} takes {len(plan.feeds)} feeds but was given {len(feeds)}")
        self.line, self.channel, self.step, self.recorder = line, channel, step, recorder
        self._on_done, self._submit = on_done, submit
        self.slots = list(line.slots)
        for slot, value in zip(plan.feeds, feeds, strict=True):
            self.slots[slot] = value
        is_own = begins_ahead and plan.task == step.origin
        #: The segments that the run begins with, and the segments that wait for the release.
        self._at_start = line.early if is_own else line.first if begins_ahead else line.at_start
        self._held_back = line.later if is_own else line.changing
        # `list.pop` is one operation of the interpreter, so exactly one thread takes the last token of a list, True.
        #: Tokens of the parts that each segment comes after.
        self._tokens = list(map(list, line.own_tokens if is_own else line.tokens if begins_ahead else line.released))
        self._is_numbered = is_numbered and not is_own
        self.attempt = attempt
        #: A token until the run may change state.
        self._unreleased = [True] if begins_ahead else []
        #: Tokens of the parts that the end comes after.
        self._left = list(line.left)
        #: A token until the run has ended.
        self._is_open = [True]
        self.error: BaseException | None = None
        self._cancels: list[Cancel] = []
        #: See `ItemsRun`.
        self.waiting_ops: set[int] = set()

    def start(self) -> None:
        """Run the items that need no wait, on this thread. Does nothing if the run was cancelled before."""
        if self.line.segments:
            self._run(list(self._at_start))
        else:
            self._complete()

    def release(self, attempt: StepAttempt | None = None) -> None:
        """Let a run that has begun ahead change state; `attempt` is given if it was not known before."""
        self.attempt = attempt or self.attempt
        ready = self._ready_by_release()
        if ready and self._is_open:
            self._submit(partial(self._run, ready))

    @property
    def is_ahead(self) -> bool:
        """Whether the run has begun ahead and is not released."""
        return bool(self._unreleased)

    @property
    def is_blocked(self) -> bool:
        """Whether it waits for a queue or an accumulator."""
        return bool(self.waiting_ops)

    def cancel(self, error: BaseException) -> None:
        """End with `error` unless it has ended."""
        self._end(error)

    def cancel_at_end(self, cancel: Cancel) -> None:
        """Call `cancel` if the run fails while the operation waits."""
        self._cancels.append(cancel)
        if self.error is not None:
            self._cancel_all(self.error)

    def _ready_by_release(self) -> list[int]:
        """Release the run, unless it is released; return the segments that are ready by that."""
        try:
            self._unreleased.pop()
        except IndexError:
            return []
        return [number for number in self._held_back if self._tokens[number].pop()]

    def _run(self, numbers: list[int], rest: Iterator[_SegmentItem] | None = None) -> None:
        """Run segments, or the `rest` of the first, and then the segments that become ready by them."""
        step, line = self.step, self.line
        plan, recorder, clock = line.plan, self.recorder, self.recorder.clock
        for number in numbers:  # which grows
            items, rest = rest or iter(line.segments[number]), None
            for index, waits, do, freed in items:
                if not self._is_open:
                    return
                recorder.append((clock(), ITEM_BEGAN, step, plan, index))
                try:
                    do(self)
                except NotConnected as needed:
                    left = numbers[numbers.index(number) :], chain([(index, waits, do, freed)], items)
                    needed.then(partial(self._connected, index, *left))
                    return
                except BaseException as error:
                    self._fail(index, error)
                    return
                for place, nothing in freed:
                    self.slots[place] = nothing
                if not waits:
                    recorder.append((clock(), ITEM_ENDED, step, plan, index))
            for later in line.following[number]:
                if self._tokens[later].pop():
                    numbers.append(later)
            if self._left.pop():
                try:
                    self._complete()
                except BaseException as error:
                    self._fail(line.segments[number][-1][0], error)

    def _connected(self, index: int, numbers: list[int], rest: Iterator[_SegmentItem], error: Exception | None) -> None:
        """Continue with a send whose destination had to be connected first."""
        try:
            if error is not None:
                raise error
            if self._is_open:
                self._submit(partial(self._run, numbers, rest))
        except Exception as failure:
            self._fail(index, failure)

    def arrived(self, index: int, fill: Fill, values: Outcome[Sequence[Any]]) -> None:
        """Continue after an item that waited, on the thread that delivers its results."""
        if isinstance(values, BaseException):
            self._fail(index, values)
            return
        try:
            self.waiting_ops.discard(index)
            fill(self.slots, values)
            self.recorder.append((self.recorder.clock(), ITEM_ENDED, self.step, self.line.plan, index))
            ready = []
            if self._unreleased and self._is_numbered and self._is_of_origin(index):
                ready += self._ready_by_release()
            for number in self.line.after.get(index, ()):
                if self._tokens[number].pop():
                    ready.append(number)
            if self._left.pop():
                self._complete()
            # After the end there may be no thread left to submit to.
            elif ready and self._is_open:
                self._submit(partial(self._run, ready))
        except BaseException as error:
            self._fail(index, failure_of_arrival(error))
            raise_interrupt(error)

    def _is_of_origin(self, index: int) -> bool:
        """Whether an item receives values of the task that starts the step."""
        return getattr(self.line.plan.items[index], "source", "") == self.step.origin

    def _fail(self, index: int, error: BaseException) -> None:
        """End with the error of an item, and add its name to it. Raise an interrupt that comes after the end."""
        if self._is_open:
            note_failure(self.recorder, self.step, self.line.plan, index, error)
        if not self._end(error):
            raise_interrupt(error)

    def _complete(self) -> None:
        self._end(on_device(self.line.fetched(self.slots)))

    def _end(self, outcome: Outcome[Fetches]) -> bool:
        """End the run, and return True; return False if it had ended."""
        try:
            self._is_open.pop()
        except IndexError:
            return False
        if isinstance(outcome, BaseException):
            self.error = outcome
            self._cancel_all(outcome)
        self._on_done(outcome)
        return True

    def _cancel_all(self, error: BaseException) -> None:
        while self._cancels:
            try:
                cancel = self._cancels.pop()
            except IndexError:  # another thread took it
                return
            cancel(error)


def run_of(
    executable: Executable,
    store: Store,
    channel: Channel,
    step: StepId,
    feeds: Sequence[Any],
    on_done: Callable[[Outcome[Fetches]], None],
    submit: Submit,
    recorder: Recorder = NOWHERE,
    begins_ahead: bool = False,
    attempt: StepAttempt | None = None,
    is_numbered: bool = True,
) -> Execution | StraightRun:
    """Return a run of a plan in `store`; see `execute.Execution` and `StraightRun`.

    raises  InternalError if a plan that is no straight line should begin ahead
    """
    line = executable.line
    if line is None or line.store is not store:
        if not is_straight(executable):
            if begins_ahead:
                raise InternalError(f"the plan of {executable.plan.task} cannot begin ahead; please report this")
            return Execution(
                executable, store, channel, step, feeds, on_done, submit, recorder=recorder, attempt=attempt
            )
        line = executable.line = StraightLine(executable, store)
    return StraightRun(line, channel, step, feeds, on_done, submit, recorder, begins_ahead, attempt, is_numbered)
