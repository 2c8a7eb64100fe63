"""Run the compiled plan of one task in one step.

The items of a plan form segments: a segment has all items that become ready by the same waits. It runs them on one
thread, one after the other. So a run counts waits and segments, not items, and the number of values costs it no calls.

No thread waits for a value. A receive registers a callback with the channel; the thread that delivers the value submits
the segments that became ready to a worker thread. So do items that wait for a queue, for an accumulator or for a
device, and branches and loops, whose bodies are executions of their own (`loops.py`).

A run may begin ahead of the task that starts the step. Until that task releases it, it changes no state, so cancelling
it loses nothing (`Begins`).

Invariants: an item runs when all that it needs is done. The first error ends an execution and cancels its pending
operations; later arrivals are ignored. A value is freed when all items that take it have it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import jax

from dflow.lowering.queues.channel import Channel, NotConnected, StepId, frame_of_turn
from dflow.lowering.queues.pending_operations import Cancel
from dflow.lowering.state.applied_steps import StepAttempt
from dflow.lowering.state.held_value import StepState
from dflow.lowering.state.store import Store
from dflow.lowering.steps.executable import Executable, gives
from dflow.lowering.steps.recorder import NOWHERE, Recorder
from dflow.lowering.steps.step_events import ITEM_BEGAN, ITEM_ENDED, ITEM_FAILED
from dflow.lowering.values.host_values import on_device
from dflow.lowering.values.outcome import Outcome, raise_interrupt
from dflow.tracing.errors import InternalError, StepCancelled

#: Results of a plan.
Fetches = tuple[jax.Array, ...]
OnDone = Callable[[Outcome[Fetches]], None]
#: Submits a function to a thread that may block.
Submit = Callable[[Callable[[], None]], object]
#: Runs an item of an execution, or starts one that waits.
DoItem = Callable[["Execution"], None]
#: Fills registers with values.
Fill = Callable[[list[Any], Sequence[Any]], None]
#: Called with each item that is done and its results, each with its register.
OnItem = Callable[[int, Sequence[tuple[int, Any]]], None]
#: Tokens of something that comes after others: a list of these is popped once after each; the last one is True.
Tokens = tuple[bool, ...]
#: Stands for a feed that the previous iteration of a loop has not computed yet.
PENDING: Any = object()


class CompiledItem(NamedTuple):
    """An item of a segment.

    item    its index in the plan
    waits   whether its results come later, by `Execution.arrived`
    freed   registers that no item takes after it: ranges, and as many Nones
    """

    item: int
    waits: bool
    do: DoItem
    freed: Sequence[tuple[slice, Sequence[None]]]


class Begins(IntEnum):
    """When a run begins, and when it may change state: an index, since the hash of an enum is a call."""

    CALLED = 0  # by the call of the step: it may change state from the beginning
    AHEAD = 1  # before the call: after the first value of the task that starts the step, or after the release
    UNNUMBERED = 2  # before the call: after the release, which brings the number of the step
    OWN = 3  # before the call, as the part of the task that starts the step: after the release


class Beginning(NamedTuple):
    """The segments and tokens of a run that begins in one of these ways.

    first   the segments that it begins with
    held    the segments that wait for the release
    tokens  of each segment: one for each wait and each segment that it comes after, and one for the release if held
    """

    first: Sequence[int]
    held: Sequence[int]
    tokens: Sequence[Tokens]


@dataclass(eq=False)
class CompiledPlan:
    """A plan as segments, for the variables and resources of `store`; `compile_plan.py` makes it.

    segments       the items of each segment, in order
    following      the segments that come after each segment
    after_item     the segments that come after each item that waits, by its index
    after_feed     for the body of a loop: the segments that come after each carried value that it uses, by the value's
                   index in the feeds
    after_release  the same for each item that waits for some of the previous iteration: their number and the segments
    left           the tokens of the end: one for each segment and each wait
    uses           the tokens of each register that several segments take: one for each
    beginnings     by `Begins`, how a run begins: nothing waits for a release; or items that may change state, with the
                   items that need these; or, in the own part, all that needs more than the arguments of the call
    registers      the initial content of the registers
    fetched        returns the fetches, given the registers
    states         the variables of each call
    """

    executable: Executable
    store: Store
    segments: Sequence[Sequence[CompiledItem]]
    following: Sequence[Sequence[int]]
    after_item: Mapping[int, Sequence[int]]
    after_feed: Mapping[int, Sequence[int]]
    after_release: Mapping[int, tuple[int, Sequence[int]]]
    left: Tokens
    uses: Mapping[int, Tokens]
    beginnings: Sequence[Beginning]
    registers: Sequence[Any]
    fetched: Callable[[Sequence[Any]], Sequence[Any]]
    states: Sequence[StepState]

    def is_busy(self) -> bool:
        """Whether a thread is dispatching a program that uses a variable of this plan's calls."""
        for state in self.states:
            if state.written is None or state.results is not None:
                return self.store.table.is_busy(self.executable.keys)
        return False


class Execution:
    """One run of a plan, from `start` on.

    on_done       called once, from any thread, with the fetches or with the first error
    feeds         the plan's inputs; inputs that an iteration of a loop still lacks are PENDING and come by `feed`
    recorder      records when items begin and end
    attempt       the attempt at a step of a shared run that this is part of; None for other steps
    frame         suffix of edges: the iteration numbers of the loops around, see `channel.frame_of_turn`
    held          for an iteration of a loop: number of calls of `release_item` that an item waits for, by item
    on_item       called with each item of an iteration that is done, and its results
    """

    def __init__(
        self,
        compiled: CompiledPlan,
        channel: Channel,
        step: StepId,
        feeds: Sequence[Any],
        on_done: OnDone,
        submit: Submit,
        recorder: Recorder = NOWHERE,
        begins: Begins = Begins.CALLED,
        attempt: StepAttempt | None = None,
        frame: str = "",
        held: Mapping[int, int] | None = None,
        on_item: OnItem | None = None,
    ) -> None:
        self.plan = plan = compiled.executable.plan
        if len(feeds) != len(plan.feeds):
            raise InternalError(f"the plan of {plan.task} takes {len(plan.feeds)} feeds but was given {len(feeds)}")
        self.compiled, self.channel, self.step, self.submit, self.recorder = compiled, channel, step, submit, recorder
        self.attempt, self.frame = attempt, frame
        self._on_done, self._on_item, self._begins = on_done, on_item, begins
        self.registers = list(compiled.registers)
        for register, value in zip(plan.feeds, feeds, strict=True):
            self.registers[register] = value
        self._beginning = compiled.beginnings[begins]
        self._first = list(self._beginning.first)
        # `list.pop` is one operation of the interpreter, so exactly one thread takes the last token of a list, True.
        self._tokens = list(map(list, self._beginning.tokens))
        self._left = list(compiled.left)
        self._uses = {register: list(tokens) for register, tokens in compiled.uses.items()} if compiled.uses else {}
        #: A token until the run may change state.
        self._unreleased = [True] if begins is not Begins.CALLED else []
        #: A token until the run has ended.
        self.is_open = [True]
        self.error: BaseException | None = None
        self._cancels: list[Cancel] = []
        #: The ops on queues and accumulators that wait, and the branches and loops, which may have such ops, by item.
        self.waiting_ops: set[int] = set()
        if held is not None:
            self._begin_iteration(feeds, held)

    def _begin_iteration(self, feeds: Sequence[Any], held: Mapping[int, int]) -> None:
        """Take the tokens of what an iteration of a loop need not wait for."""
        for position, segments in self.compiled.after_feed.items():
            if feeds[position] is not PENDING:
                self._first += self._ready_after(segments)
                self._left.pop()
        for item, (count, segments) in self.compiled.after_release.items():
            for _ in range(count - held.get(item, 0)):
                self._first += self._ready_after(segments)
                self._left.pop()

    def start(self) -> None:
        """Run the items that need no wait, on this thread. Does nothing if it was cancelled before."""
        self._run(self._first)

    def feed(self, position: int, value: Any) -> None:
        """Supply the value of the feed at index `position`, which was PENDING."""
        self.registers[self.plan.feeds[position]] = value
        if (segments := self.compiled.after_feed.get(position)) is not None:
            self._go_on(segments)

    def release_item(self, item: int) -> None:
        """Notify that one of the items that `item` is held for is done."""
        self._go_on(self.compiled.after_release[item][1])

    def release(self, attempt: StepAttempt | None = None) -> None:
        """Let a run that has begun ahead change state; `attempt` is given if it was not known before."""
        self.attempt = attempt or self.attempt
        try:
            self._unreleased.pop()
        except IndexError:
            return
        ready = self._ready_after(self._beginning.held)
        if ready and self.is_open:
            self.submit(partial(self._run, ready))

    @property
    def is_ahead(self) -> bool:
        """Whether the run has begun ahead and is not released."""
        return bool(self._unreleased)

    @property
    def is_blocked(self) -> bool:
        """Whether it may wait for a queue or an accumulator."""
        return bool(self.waiting_ops)

    def cancel(self, error: BaseException) -> None:
        """End with `error` unless it has ended."""
        self._end(error)

    def cancel_at_end(self, cancel: Cancel) -> None:
        """Call `cancel` if the run fails while the operation waits."""
        self._cancels.append(cancel)
        # The thread that failed the run calls each registered function, but perhaps before this one was registered.
        if self.error is not None:
            self._cancel_all(self.error)

    def body(
        self,
        body: CompiledPlan,
        feeds: Sequence[Any],
        on_done: OnDone,
        turn: int | None = None,
        held: Mapping[int, int] | None = None,
        on_item: OnItem | None = None,
    ) -> Execution:
        """Return a run of the body of a branch, or of iteration number `turn` of a loop, without starting it."""
        frame = self.frame if turn is None else frame_of_turn(self.frame, turn)
        return Execution(
            body,
            self.channel,
            self.step,
            feeds,
            on_done,
            self.submit,
            self.recorder,
            attempt=self.attempt,
            frame=frame,
            held=held,
            on_item=on_item,
        )

    def _run(self, numbers: list[int], rest: Iterator[CompiledItem] | None = None) -> None:
        """Run segments, or the `rest` of the first, and then the segments that become ready by them."""
        step, compiled, plan, registers = self.step, self.compiled, self.plan, self.registers
        recorder, clock = self.recorder, self.recorder.clock
        for number in numbers:  # which grows
            items, rest = rest or iter(compiled.segments[number]), None
            index = -1
            for item in items:
                index, waits, do, freed = item
                if not self.is_open:
                    return
                recorder.append((clock(), ITEM_BEGAN, step, plan, index))
                try:
                    do(self)
                except NotConnected as needed:
                    left = numbers[numbers.index(number) :], chain([item], items)
                    needed.then(partial(self._connected, index, *left))
                    return
                except BaseException as error:
                    self._fail(index, error)
                    return
                for span, nothing in freed:
                    registers[span] = nothing
                if not waits:
                    recorder.append((clock(), ITEM_ENDED, step, plan, index))
            for later in compiled.following[number]:
                if self._tokens[later].pop():
                    numbers.append(later)
            if self._left.pop():
                try:
                    self._complete()
                except BaseException as error:
                    self._fail(index, error)

    def free(self, shared: Sequence[int]) -> None:
        """Free each of these registers, of `CompiledPlan.uses`, if this segment is the last one to take it."""
        for register in shared:
            if self._uses[register].pop():
                self.registers[register] = None

    def report(self, index: int) -> None:
        """Call `on_item`, if there is one, with an item that is done."""
        if self._on_item is not None:
            self._on_item(index, [(register, self.registers[register]) for register in gives(self.plan.items[index])])

    def _connected(self, index: int, numbers: list[int], rest: Iterator[CompiledItem], error: Exception | None) -> None:
        """Continue with a send whose destination had to be connected first."""
        try:
            if error is not None:
                raise error
            if self.is_open:
                self.submit(partial(self._run, numbers, rest))
        except Exception as failure:
            self._fail(index, failure)

    def arrived(self, index: int, fill: Fill, values: Outcome[Sequence[Any]]) -> None:
        """Continue after an item that waited, on the thread that delivers its results."""
        if isinstance(values, BaseException):
            self._fail(index, values)
            return
        try:
            self.waiting_ops.discard(index)
            fill(self.registers, values)
            self.recorder.append((self.recorder.clock(), ITEM_ENDED, self.step, self.plan, index))
            if self._on_item is not None:
                self.report(index)  # before the end of the run
            if self._unreleased and self._begins is Begins.AHEAD and self._is_of_origin(index):
                self.release()
            self._go_on(self.compiled.after_item.get(index, ()))
        except Exception as error:
            self._fail(index, error)
        except BaseException:  # an interrupt, which is for this thread; but without an error the step would hang
            text = "the thread that brought what this step waited for was interrupted"
            self._fail(index, StepCancelled(text))
            raise

    def _go_on(self, segments: Sequence[int]) -> None:
        """Continue after one wait that these segments come after."""
        ready = []
        for number in segments:  # not `_ready_after`: a call for each value that arrives
            if self._tokens[number].pop():
                ready.append(number)
        if self._left.pop():
            self._complete()
        # After the end there may be no thread left to submit to.
        elif ready and self.is_open:
            self.submit(partial(self._run, ready))

    def _ready_after(self, segments: Sequence[int]) -> list[int]:
        """Take a token of each of these segments; return those that are ready by that."""
        return [number for number in segments if self._tokens[number].pop()]

    def _is_of_origin(self, index: int) -> bool:
        """Whether an item receives values of the task that starts the step."""
        return getattr(self.plan.items[index], "source", "") == self.step.origin

    def _fail(self, index: int, error: BaseException) -> None:
        """End with the error of an item, and add its name to it; a body's item is named before the branch or loop.

        An interrupt that comes after the end is raised.
        """
        if self.is_open and index >= 0:  # not of a plan without items
            self.recorder.note(ITEM_FAILED, self.step, self.plan, (index, type(error).__name__))
            if isinstance(error, Exception) and self.plan.names:
                error.add_note(f"in {self.plan.names[index]}")
        if not self._end(error):
            raise_interrupt(error)

    def _complete(self) -> None:
        self._end(on_device(self.compiled.fetched(self.registers)))

    def _end(self, outcome: Outcome[Fetches]) -> bool:
        """End the run, and return True; return False if it had ended."""
        try:
            self.is_open.pop()
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
