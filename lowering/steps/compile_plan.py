"""A plan compiled to segments when it is first run, in an order that is decided once.

Only some items wait: receives, ops on queues or accumulators, branches, loops, and copies that follow a computation. A
segment has all items that become ready by the same waits. In the body of a loop an item also waits for the values
carried from the previous iteration, and for items of that iteration which it must follow.

For runs that begin ahead, the segment without waits is divided in three: items that may change state, with the items
that need them; items that the feeds alone determine, if some of these send values, such as the row numbers of lookups;
and all other items.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from functools import partial
from itertools import chain
from typing import Any

from dflow.lowering.queues.channel import Channel, StepId
from dflow.lowering.state.applied_steps import StepAttempt
from dflow.lowering.state.store import Store
from dflow.lowering.steps.compile_items import ItemCompiler, ranges_of, taker
from dflow.lowering.steps.executable import Executable, gives, takes
from dflow.lowering.steps.execute import (
    Beginning,
    Begins,
    CompiledItem,
    CompiledPlan,
    DoItem,
    Execution,
    OnDone,
    Submit,
    Tokens,
)
from dflow.lowering.steps.plan import Call, Recv
from dflow.lowering.steps.recorder import NOWHERE, Recorder

#: A set of waits, as the bits of a number: bit i is the item at i. In the body of a loop, its feeds come after, by
#: index, and then the items that follow items of the previous iteration, by index.
_Waits = int

#: Kinds of segments without waits: what the feeds alone determine, the rest, and what changes state.
_OF_FEEDS, _OTHER, _CHANGING = range(3)


def run_of(
    executable: Executable,
    store: Store,
    channel: Channel,
    step: StepId,
    feeds: Sequence[Any],
    on_done: OnDone,
    submit: Submit,
    recorder: Recorder = NOWHERE,
    begins: Begins = Begins.CALLED,
    attempt: StepAttempt | None = None,
) -> Execution:
    """Return a run of a plan in `store`; see `Execution`."""
    compiled = executable.compiled
    if compiled is None or compiled.store is not store:
        compiled = executable.compiled = compiled_plan(executable, store)
    return Execution(compiled, channel, step, feeds, on_done, submit, recorder, begins, attempt)


def compiled_plan(
    executable: Executable,
    store: Store,
    carried: range = range(0),
    follows: Mapping[int, Set[int]] | None = None,
) -> CompiledPlan:
    """Compile a plan.

    carried  the indices of the feeds that the previous iteration of a loop may not have computed
    follows  for the body of a loop: the items of the previous iteration that an item runs after, by item
    """
    return _Compiler(executable, store, carried, follows).compiled()


class _Compiler:
    """See `compiled_plan`."""

    def __init__(
        self, executable: Executable, store: Store, carried: range, follows: Mapping[int, Set[int]] | None
    ) -> None:
        self._executable, self._plan, self._store = executable, executable.plan, store
        self._is_repeated, self._follows, feeds = follows is not None, follows or {}, self._plan.feeds
        self._carried = [
            position for position in carried if feeds[position] in {*executable.takers, *executable.fetched}
        ]
        self._order = _in_order(executable)
        before = self._waits_before()
        groups: dict[tuple[_Waits, int], list[int]] = {} if self._order else {(0, _OTHER): []}
        for index in self._order:
            kind = _OTHER if before[index] else _kind_of(index, executable)
            groups.setdefault((before[index], kind), []).append(index)
        # Changes of state last, so that what other tasks wait for leaves first.
        self._groups = dict(sorted(groups.items(), key=lambda group: group[0][1] == _CHANGING))
        #: The segments that take each register.
        self._takers: dict[int, set[int]] = {}
        for number, group in enumerate(self._groups.values()):
            for register in chain.from_iterable(map(self._taken, group)):
                self._takers.setdefault(register, set()).add(number)

    def _taken(self, index: int) -> set[int]:
        return {*takes(self._plan.items[index]), *self._executable.awaited.get(index, ())}

    def _waits_before(self) -> list[_Waits]:
        """Return, for each item, the waits that it needs, except waits that another one of them needs."""
        plan, waiting = self._plan, self._executable.waiting
        bits = {plan.feeds[position]: 1 << self._feed(position) for position in self._carried}
        newest: list[_Waits] = [0] * len(plan.items)
        #: The waits that each wait needs, if it needs some, and all these waits.
        needed: dict[int, _Waits] = {}
        chained: _Waits = 0
        for index in self._order:
            waits = 1 << self._release(index) if index in self._follows else 0
            for register in takes(plan.items[index]):
                waits |= bits.get(register, 0)
            for need in self._executable.needs[index]:
                waits |= 1 << need if need in waiting else newest[need]
            implied = 0
            for wait in _bits(waits & chained):
                implied |= needed[wait]
            newest[index] = waits & ~implied
            if waits and index in waiting:
                needed[index] = waits | implied
                chained |= 1 << index
        return newest

    def compiled(self) -> CompiledPlan:
        """Return the plan as segments."""
        executable, plan, groups = self._executable, self._plan, self._groups
        number_of = {index: number for number, group in enumerate(groups.values()) for index in group}
        following: list[list[int]] = [[] for _ in groups]
        after: dict[int, list[int]] = {}
        counts = [0] * len(groups)
        for number, ((waits, _), group) in enumerate(groups.items()):
            needed = {need for index in group for need in executable.needs[index] if need not in executable.waiting}
            earlier = {number_of[need] for need in needed} - {number}
            for segment in earlier:
                following[segment].append(number)
            for wait in _bits(waits):
                after.setdefault(wait, []).append(number)
            counts[number] = len(earlier) + sum(map(self._weight, _bits(waits)))
        every = [*executable.waiting, *map(self._feed, self._carried), *map(self._release, self._follows)]
        states = {
            index: self._store.step_state(executable.programs[item.program], item.writes, item.reads)
            for index, item in enumerate(plan.items)
            if isinstance(item, Call) and (item.writes or item.reads)
        }
        unused = {register for item in plan.items for register in gives(item)} - {*self._takers} - executable.fetched
        compiler = ItemCompiler(executable, self._store, states, unused, compiled_plan)
        registers: list[Any] = [None] * plan.registers
        for register, value in executable.scalars:
            registers[register] = value
        # Segments that wait for the release, in each of the ways of `Begins`.
        changing = {number for number, group in enumerate(groups.values()) if not executable.changing.isdisjoint(group)}
        later = {number for number, (_, kind) in enumerate(groups) if kind != _OF_FEEDS}
        return CompiledPlan(
            executable,
            self._store,
            segments=[self._items(group, compiler) for group in groups.values()],
            following=following,
            after_item=after,
            after_feed={position: after.get(self._feed(position), ()) for position in self._carried},
            after_release={
                item: (len(before), after.get(self._release(item), ())) for item, before in self._follows.items()
            },
            left=_tokens(len(groups) + sum(map(self._weight, every))),
            uses={register: _tokens(len(self._takers[register])) for register in self._shared()},
            beginnings=[_beginning(counts, held) for held in (set(), changing, changing, later)],
            registers=registers,
            fetched=taker(plan.fetches),
            states=list(states.values()),
        )

    def _items(self, group: Sequence[int], compiler: ItemCompiler) -> list[CompiledItem]:
        """Return the items of a segment."""
        last = {register: index for index in group for register in self._taken(index)}
        items, shared = [], self._shared()
        for index in group:
            ended = {register for register in self._taken(index) if last[register] == index} - self._executable.fetched
            freed = [(span, (None,) * (span.stop - span.start)) for span in ranges_of(sorted(ended - shared))]
            waits, do = index in self._executable.waiting, compiler.compiled(index)
            if ended & shared:
                do = partial(_do_and_free, do, sorted(ended & shared))
            if self._is_repeated and not waits:
                do = partial(_do_and_report, do, index)
            items.append(CompiledItem(index, waits, do, freed))
        return items

    def _shared(self) -> set[int]:
        """The registers to be freed that several segments take."""
        return {register for register, segments in self._takers.items() if len(segments) > 1} - self._executable.fetched

    def _feed(self, position: int) -> int:
        return len(self._plan.items) + position

    def _release(self, item: int) -> int:
        return len(self._plan.items) + len(self._plan.feeds) + item

    def _weight(self, wait: int) -> int:
        """Number of things that a wait is for: an item may follow several ones of the previous iteration."""
        item = wait - self._release(0)
        return 1 if item < 0 else len(self._follows[item])


def _do_and_free(do: DoItem, shared: Sequence[int], run: Execution) -> None:
    do(run)
    run.free(shared)


def _do_and_report(do: DoItem, index: int, run: Execution) -> None:
    do(run)
    run.report(index)


def _beginning(counts: Sequence[int], held: Set[int]) -> Beginning:
    counts = [count + (number in held) for number, count in enumerate(counts)]
    first = [number for number, count in enumerate(counts) if not count]
    return Beginning(first, sorted(held), list(map(_tokens, counts)))


def _tokens(count: int) -> Tokens:
    """Return the tokens of something that comes after `count` others: the last one to be popped is True."""
    return (True, *(False,) * (count - 1)) if count else ()


def _bits(number: int) -> Iterator[int]:
    """Yield the positions of the bits that are set, from the lowest on."""
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest


def _kind_of(index: int, executable: Executable) -> int:
    if index in executable.changing:
        return _CHANGING
    if executable.sends_of_feeds and index not in executable.stateful:
        return _OF_FEEDS
    return _OTHER


def _in_order(executable: Executable) -> list[int]:
    """Return the items, each after the items that it needs: receives early, and transfers before calls."""
    missing, items = list(map(len, executable.needs)), executable.plan.items
    free = [index for index, count in enumerate(missing) if not count]
    # Receives first, so that values which arrive find their receive.
    order = sorted(free, key=lambda index: not isinstance(items[index], Recv))
    for index in order:  # which grows
        for dependent in executable.dependents[index]:
            missing[dependent] -= 1
            if missing[dependent] == 0:
                order.append(dependent)
    return order
