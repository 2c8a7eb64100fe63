"""The next steps of a training loop, begun on the other tasks before the loop calls them.

Why: a step's first round trip fetches values. Begun with the messages that end an earlier step, it costs no messages of
its own, and no waiting. Rows of tables are looked up by row numbers, which the next batch determines: a loop that knows
this batch begins the task's own part of the next step too, which sends them.

Invariants:

- A step is begun ahead only if the loop's iterations have one step each, the same as before. It changes no state
  before the loop calls it, so that it may be cancelled (`lowering.steps.begin_ahead`).
- The values of a step are read after each update of the loop's earlier steps, except the newest `prefetch` ones.
- A task's own part that begins ahead only computes and sends what its arguments determine (`execute.Beginning`). It is
  used by a call with the same arrays, and cancelled by another one.
- Steps begun ahead are cancelled when values they read may be outdated by this process itself: after another step, a
  write, an operation on a queue, a barrier, or a pause of the loop that takes longer than its steps do. The steps of
  another such loop in the process count as those of another worker.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NoReturn
from weakref import WeakSet, ref

import jax
import numpy as np

from dflow.distributed.steps.ahead_rules import AheadRules
from dflow.distributed.steps.step_identity import LoopSteps
from dflow.distributed.steps.step_starter import StepParts, StepStarter
from dflow.distributed.transport.base import Peer
from dflow.distributed.wire.messages.plans import Ahead, ReleaseStep
from dflow.lowering.queues.channel import StepId
from dflow.lowering.state.applied_steps import StepOfRun
from dflow.lowering.steps.execute import Fetches
from dflow.lowering.values.outcome import Outcome
from dflow.tracing.errors import StepCancelled, StrategyError, TransportClosed

#: A pause of the loop up to this long never cancels, in s: it is as long as a short step.
SHORT_S = 0.01
#: Why a task's own part does not begin ahead: the next call's arguments are not known from its batch.
OTHER_ARRAYS = "the function is called with other arrays than those of the batch"


@dataclass(eq=False)
class BegunStep:
    """A step whose parts on other tasks have begun.

    outcome  gets the outcome of the step, once it is over
    of       its identity in the run, if it is numbered; else the call gives it the number
    version  version of its values, if the run's staleness is bounded; see `staleness`
    leaves   the leaves of the arguments with which this task's own part has begun; None if it has not
    """

    step: StepId
    peers: Mapping[str, Peer]
    parts: StepParts
    outcome: SimpleQueue[Outcome[Fetches]]
    of: StepOfRun | None
    version: int | None = None
    leaves: Sequence[Any] | None = None


@dataclass(frozen=True, eq=False)
class RegisteredStep:
    """A step that is registered with its tasks.

    handles           the handle of each task's plan, by task
    released_at_call  the tasks to release when a step that began ahead is called; None if it cannot begin ahead
    feeds             returns the feeds of this task's part, given the leaves of the arguments
    why_not_own       why this task's own part cannot begin ahead; empty if it can
    name              name of the step's function
    signature         types of its arguments, as a text
    written           weak references to the variables that it writes
    """

    handles: Mapping[str, int]
    released_at_call: tuple[str, ...] | None
    feeds: Callable[[Sequence[Any]], Sequence[Any]] = list
    why_not_own: str = ""
    name: str = ""
    signature: str = ""
    written: Sequence[ref[Any]] = ()


class StepsAhead:
    """The steps begun ahead for one training loop, which one thread runs.

    identities  identities of the loop's steps
    rules       when the steps begin
    warn        called with a text, at most once for each option of the rules that has no effect
    on_new      called with each step that the loop calls, before its first call; may raise
    """

    def __init__(
        self,
        starter: StepStarter,
        identities: LoopSteps,
        rules: AheadRules,
        *,
        warn: Callable[[str], None] = lambda text: None,
        on_new: Callable[[RegisteredStep], None] = lambda called: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._starter, self._rules, self._clock = starter, rules, clock
        self.identities = identities
        #: The options whose lack of effect is not reported yet.
        self._warn, self._unwarned = warn, {"prefetch", "lookahead"}
        #: The steps that the loop has called.
        self._on_new, self._known = on_new, WeakSet[RegisteredStep]()
        #: The batches of the iteration and of the next one, if both are known.
        self._batches: tuple[Any, Any] | None = None
        # A signal handler may change state on a thread that holds the lock, which is never held while sending.
        self._lock = threading.RLock()
        self._begun: deque[BegunStep] = deque()
        #: Number of calls of `cancel`.
        self._cancels = 0
        #: The only step of the iteration before this one: steps begin ahead if this one calls it again. None if there
        #: was another number of steps, a change of state or a pause.
        self._last: RegisteredStep | None = None
        #: Numbers of the iteration's step and of the steps that follow it, as far as known; number of its calls.
        self._steps, self._calls = range(0), 0
        self._may_begin = False
        self._ended_s = self._took_s = 0.0
        #: Number of the run's steps that had ended when this iteration was admitted, if its staleness is bounded.
        self._version: int | None = None
        self._why_not = ""
        #: The newest step that the iteration called, and the newest one that failed, with the other tasks that have a
        #: part in it.
        self._called: tuple[StepId, Mapping[str, Peer]] | None = None
        self.failed: tuple[StepId, Mapping[str, Peer]] | None = None

    @property
    def held(self) -> int | None:
        """The version of the values that were fetched for the next step; None if there are none, or no versions."""
        with self._lock:
            return self._begun[0].version if self._begun else None

    def call_failed(self) -> None:
        """Set `failed` to the newest call, which has failed: tasks may still apply its step."""
        self.failed = self._called

    def admitted(self, version: int, workers: int) -> None:
        """Record that the next iteration was admitted, when `version` steps of the run had ended.

        workers  number of workers of the run, which decides whether steps may begin ahead; see `AheadRules.why_not`
        """
        self._version, self._why_not = version, self._rules.why_not(workers)

    @contextlib.contextmanager
    def iteration(self, steps: range, batches: tuple[Any, Any] | None = None) -> Iterator[None]:
        """Return the context of one iteration: the loop calls its step inside.

        Cancels the steps begun ahead if the loop paused before the iteration, or fails in it.
        steps    the number of that step in the run, and those of the next steps of this loop, as far as they are known
        batches  the batch of this iteration and that of the next one, if it is known and should begin ahead
        """
        began_s = self._clock()
        self._steps, self._calls, self._called, self._batches = steps, 0, None, batches
        if began_s - self._ended_s > max(self._took_s, SHORT_S):
            self._start_over("the loop paused")
        token = CURRENT.set(self)
        try:
            with self.identities.step(steps.start):
                yield
        except BaseException:
            self.cancel("the loop failed")
            self.call_failed()
            raise
        finally:
            CURRENT.reset(token)
        if self._calls != 1:
            self._last = None
        self._ended_s = self._clock()
        self._took_s = self._ended_s - began_s

    def take(self, called: RegisteredStep, leaves: Sequence[Any] = ()) -> BegunStep | None:
        """Count a call of a step; release and return the step that was begun ahead for it, or return None.

        Cancels the steps begun ahead if the loop calls another function, or passes other arrays than expected. Warns of
        options without effect. Raises what `on_new` raises.
        leaves  the leaves of the arguments
        """
        if called is not self._last and called not in self._known:
            self._on_new(called)
            self._known.add(called)
        self._calls += 1
        self.identities.called()
        is_same, self._last = called is self._last, called
        why_not = self._why_not
        if self._calls > 1:
            why_not = "an iteration calls several functions"
        elif called.released_at_call is None:
            why_not = "the function has branches or loops on other tasks"
        if why_not:
            self._has_no_effect("prefetch", why_not)
            self._has_no_effect("lookahead", why_not)
        self._may_begin = is_same and not why_not
        if self._calls > 1 or not is_same:
            self.cancel("the loop calls another function")
        elif self._begun_for_others(leaves):
            self._has_no_effect("lookahead", OTHER_ARRAYS)
            self.cancel("the function is called with other arrays")
        with self._lock:
            begun = self._begun.popleft() if self._begun else None
        if begun is not None:
            self._called = begun.step, begun.peers
            of, released = None, called.released_at_call or ()
            if begun.of is None:
                of, released = self.identities.current, tuple(begun.peers)
            if begun.parts.is_over:  # it has failed, for instance by a wrong row number, so nothing of it is applied
                released = ()
            try:
                for task in released:
                    with contextlib.suppress(TransportClosed):  # the step fails by that itself
                        begun.peers[task].notify(ReleaseStep(begun.step.origin, begun.step.number, of))
            except BaseException as error:
                self._starter.cancel(begun.step, begun.peers.values(), error)
                raise
        return begun

    def begin_more(
        self, step: StepId, peers: Mapping[str, Peer], called: RegisteredStep, leaves: Sequence[Any] = ()
    ) -> None:
        """Begin the loop's steps after `step` on other tasks, if the loop calls the same one as in the last iteration.

        The start messages are sent with the next message to each task. Also begins this task's own part of the next
        step if the next batch is known.
        leaves  the leaves of the arguments of the call
        """
        self._called = step, peers
        if not self._may_begin:
            return
        following_leaves = self._following(called, leaves)
        # Values that are sent before the call release nothing: the release at the call brings the number.
        numbers = self._steps if following_leaves is None else range(0)
        cancels = self._cancels
        while (begun_before := len(self._begun)) < self._rules.most_begun:
            following, outcome = self._starter.next_step(), SimpleQueue[Outcome[Fetches]]()
            of = self.identities.of(numbers[begun_before + 1]) if begun_before + 1 < len(numbers) else None
            ahead = self._rules.ahead(step.number, begun_before, is_numbered=of is not None)
            parts = self._starter.start(following, peers, called.handles, outcome.put, ahead=ahead, of=of)
            # Values that are read after the update of `step` include it too.
            version = None if self._version is None else self._version + (ahead.after != 0)
            begun = BegunStep(following, peers, parts, outcome, of, version)
            with self._lock:
                if cancels == self._cancels:
                    self._begun.append(begun)
                    continue
            self._cancel(begun, "state changed")
            return
        if following_leaves is not None:
            self._begin_own(called, following_leaves)

    def _following(self, called: RegisteredStep, leaves: Sequence[Any]) -> Sequence[Any] | None:
        """Return the leaves of the next call's arguments; None if they are unknown, or of other types.

        Warns if `lookahead` has no effect.
        """
        if self._batches is None:
            return None
        flat: list[tuple[list[Any], Any]] = [jax.tree_util.tree_flatten(batch) for batch in self._batches]
        (now, tree), (then, later_tree) = flat
        position_of = {id(leaf): position for position, leaf in enumerate(now)}
        why_not = called.why_not_own
        if not why_not and not all(id(leaf) in position_of for leaf in leaves):
            why_not = OTHER_ARRAYS
        if why_not:
            self._has_no_effect("lookahead", why_not)
        if why_not or tree != later_tree:
            return None
        found = [then[position_of[id(leaf)]] for leaf in leaves]
        return found if all(map(_are_alike, leaves, found)) else None

    def _begin_own(self, called: RegisteredStep, leaves: Sequence[Any]) -> None:
        """Begin this task's own part of the next step, with the arguments of its call.

        Does nothing if no step was begun ahead, or the next one has its number already.
        """
        with self._lock:
            begun = self._begun[0] if self._begun else None
            if begun is None or begun.of is not None:
                return
            begun.leaves = leaves
        self._starter.run_own(begun.step, called.handles, called.feeds(leaves), begun.parts, ahead=Ahead())
        begun.parts.raise_interrupt()

    def _begun_for_others(self, leaves: Sequence[Any]) -> bool:
        """Whether this task's own part of the next step has begun with other arrays than these."""
        with self._lock:
            known = self._begun[0].leaves if self._begun else None
        return known is not None and [*map(id, known)] != [*map(id, leaves)]

    def _has_no_effect(self, option: str, why: str) -> None:
        """Warn, once, that an option has no effect, if it should have one now."""
        is_used = self._rules.prefetch if option == "prefetch" else self._batches is not None
        if is_used and option in self._unwarned:
            self._unwarned.remove(option)
            self._warn(f"{option}={getattr(self._rules, option)} has no effect: {why}")

    def state_changed(self) -> None:
        """Cancel the steps begun ahead, since this process changed state, or waited for others that may have.

        None begins until two iterations in a row have the same step again.
        """
        # Where that happens in every iteration, none begins.
        self._start_over("this process changed state, or waited for other tasks")

    def _start_over(self, why: str) -> None:
        """Cancel the steps begun ahead; none begins until two iterations in a row have the same step again."""
        self.cancel(why)
        self._last = None

    def cancel(self, why: str) -> None:
        """Cancel the steps begun ahead, on all their tasks; `why` ends the text of their error."""
        with self._lock:
            self._cancels += 1
            cancelled = list(self._begun)
            self._begun.clear()
        for begun in cancelled:
            self._cancel(begun, why)

    def _cancel(self, begun: BegunStep, why: str) -> None:
        self._starter.cancel(begun.step, begun.peers.values(), StepCancelled(f"it was begun ahead, and {why}"))


class NoSteps(StepsAhead):
    """A stand-in for a loop where the thread may run no step with parts on other tasks: `take` raises StrategyError."""

    def __init__(self, why: str, remedy: str) -> None:
        self._error = why, remedy

    def take(self, called: RegisteredStep, leaves: Sequence[Any] = ()) -> NoReturn:
        """Raise StrategyError."""
        raise StrategyError(*self._error)


def _are_alike(one: Any, other: Any) -> bool:
    """Whether a plan for one of two arguments also fits the other."""
    if type(one) is not type(other):
        return False
    if isinstance(one, jax.Array):
        return bool(one.aval == other.aval and one.sharding == other.sharding)
    return np.shape(one) == np.shape(other) and getattr(one, "dtype", None) == getattr(other, "dtype", None)


#: The loop whose iteration this thread runs.
CURRENT: ContextVar[StepsAhead | None] = ContextVar("dflow_steps_ahead", default=None)


@contextlib.contextmanager
def refusing_steps(why: str, remedy: str) -> Iterator[None]:
    """Return a context where steps with parts on other tasks raise StrategyError with these two texts."""
    token = CURRENT.set(NoSteps(why, remedy))
    try:
        yield
    finally:
        CURRENT.reset(token)
