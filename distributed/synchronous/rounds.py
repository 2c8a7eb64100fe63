"""State of one run of synchronous training: the open round, its workers and its number of gradients; no I/O.

A round is one synchronous step: each worker gives a gradient, the first `wanted` of them are averaged and applied, and
the next round opens. This file decides which round a worker may begin, how many gradients the round still waits for,
and what each request waits for.

Invariants:
- one round is open at a time; the next opens when the update of this one has ended. Each opening has its own number,
  greater than earlier ones, which tags its gradients: a round whose update failed is opened again under the next
  number;
- each request of a worker gets one answer: an opening later than the one that the worker has completed, or an error;
- a round waits for `wanted` gradients, or for all that can come if they are fewer, and for at least one. Gradients can
  come from workers that have not left, from workers that left after giving theirs, and, until all others have given
  theirs, from workers that died and may have given one. So a dead worker's gradient never displaces a live worker's.
  A run that is not elastic waits for the gradient of a worker that died from its next process;
- after a failed update each worker that took part gets the error once, and the run resumes when it is opened again;
- after the last round every request is answered immediately;
- the run holds nothing but numbers from each FreeRun to the next `began`; a FreeRun comes as soon as no worker takes
  part and no gradient is left to apply.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dflow.distributed.coordinator.coordinator_events import SendReply
from dflow.distributed.synchronous.round_messages import RoundOpen
from dflow.distributed.wire.messages.basic import Failure


@dataclass(frozen=True)
class OpenRound:
    """Apply the average of the first gradients with this number, as soon as there are enough."""

    number: int


@dataclass(frozen=True)
class SetEnough:
    """Set the number of gradients that end the open round."""

    count: int


@dataclass(frozen=True)
class FreeRun:
    """Free all that the run holds but its numbers, and cancel its waiting accumulator take."""


RoundCommand = OpenRound | SetEnough | SendReply | FreeRun


@dataclass
class Rounds:
    """The rounds of one run, called `name` in errors."""

    name: str
    #: Number of the newest opening, and count of the openings whose update failed.
    number: int = 0
    failed: int = 0
    rounds: int | None = None
    wanted: int = 0
    #: Whether rounds go on without workers that died.
    is_elastic: bool = True
    is_open: bool = False
    is_updating: bool = False
    #: Whether the last update failed, so that perhaps some tasks have applied the next round already.
    is_half_done: bool = False
    #: Whether a FreeRun would free anything.
    is_held: bool = False
    #: Workers that may still give gradients.
    workers: set[str] = field(default_factory=set)
    #: Workers that have begun and have not left.
    taking_part: set[str] = field(default_factory=set)
    #: Workers that gave a gradient for the opening, and wait for the next or have left.
    given: set[str] = field(default_factory=set)
    #: Workers that died since the opening, and may have given a gradient for it.
    lost: set[str] = field(default_factory=set)
    #: Workers that left voluntarily, or died before the run was first opened, and have not come back.
    left: set[str] = field(default_factory=set)
    #: Those of `left` that died: a run that is not elastic waits for their next processes.
    died: set[str] = field(default_factory=set)
    #: Workers that have yet to get the error of the failed update.
    untold: set[str] = field(default_factory=set)
    #: By worker: its waiting request.
    requests: dict[str, int] = field(default_factory=dict)
    #: The error of the last failed update, and the name of its class in `dflow.tracing.errors`.
    failure: str = ""
    failure_kind: str = "RemoteError"
    #: The count of the last SetEnough.
    enough: int = 0

    @property
    def done(self) -> int:
        """Number of rounds done."""
        return self.number - self.failed

    @property
    def is_over(self) -> bool:
        """Whether all rounds are done."""
        return self.rounds is not None and self.done >= self.rounds

    def return_to(self, done: int, rounds: int | None, wanted: int, *, is_half_done: bool) -> Rounds:
        """Return a new, closed state of the run after `done` rounds; its openings have greater numbers than before."""
        number, failed = self.number + 1, self.number + 1 - done
        # Whether it is elastic is set when it is opened.
        return Rounds(self.name, number, failed, rounds=rounds, wanted=wanted, is_half_done=is_half_done)

    def began(self, worker: str) -> list[RoundCommand]:
        """Add a worker that takes part until it leaves, unless all rounds are done; it is about to open the run."""
        if not self.is_over:
            self.taking_part.add(worker)
            self.is_held = True
        self.untold.discard(worker)
        return []

    def open(self, rounds: int, wanted: int, workers: Sequence[str], *, is_elastic: bool = True) -> list[RoundCommand]:
        """Open the next round for these workers, except any that left before, unless it is open or the run is over.

        The first call fixes the number of `rounds`, and of gradients `wanted` in each.
        """
        if self.rounds is None:
            self.rounds, self.wanted = rounds, wanted
        if self.is_open or self.is_over:
            return []
        self.is_open = self.is_held = True
        self.is_elastic = is_elastic
        self.workers |= {*workers} - (self.left if is_elastic else self.left - self.died)
        return [OpenRound(self.number), *self._enough()]

    def ready(self, request: int, worker: str, done: int) -> list[RoundCommand]:
        """Answer the request of a worker for an opening later than `done` (-1: any), now or when the round has ended.

        The request is refused if the run is not open, or the worker has yet to get the error of a failed update.
        A worker that left, or lost its connection, after it had given a gradient for the open round, waits as if it had
        not left: a second gradient would take the place of another worker's.
        """
        before: list[RoundCommand] = []
        if worker in self.requests:
            text = f"a later request of {worker} has taken the place of this one"
            before = [SendReply(self.requests.pop(worker), Failure("RemoteError", text))]
        if self.is_over:
            return [*before, self._opening(request)]
        if worker in self.untold or not self.is_open:
            self.untold.discard(worker)
            return [*before, self._refusal(request)]
        self.workers.add(worker)
        self.taking_part.add(worker)
        self.left.discard(worker)
        self.died.discard(worker)
        if done < self.number and worker not in self.given:
            return [*before, self._opening(request), *self._enough()]
        self.requests[worker] = request
        self.given.add(worker)
        return [*before, *self._enough()]

    def _opening(self, request: int) -> SendReply:
        return SendReply(request, RoundOpen(self.number, self.done))

    def _refusal(self, request: int) -> SendReply:
        text = self.failure or f"{self.name!r} is not open; run it again"
        return SendReply(request, Failure(self.failure_kind, text))

    def timed_out(self, request: int) -> list[RoundCommand]:
        """Refuse a request with DeadlineExceeded, naming the workers that gave no gradient, unless it was answered."""
        worker = next((worker for worker, waiting in self.requests.items() if waiting == request), None)
        if worker is None:
            return []
        del self.requests[worker]
        missing = ", ".join(sorted(self.workers - self.given)) or "none"
        text = (
            f"round {self.done} of {self.name!r} has not ended: {self.enough} gradients are enough for it, "
            f"{', '.join(sorted(self.given)) or 'nobody'} gave one and {missing} did not"
        )
        return [SendReply(request, Failure("DeadlineExceeded", text))]

    def leave(self, worker: str, done: int | None = None) -> list[RoundCommand]:
        """Remove a worker, and refuse its request; the round waits for fewer gradients, and an unused run is freed.

        done  newest opening for which the worker gave a gradient; None if it died
        """
        self.taking_part.discard(worker)
        self.untold.discard(worker)
        is_waited_for = done is None and not self.is_elastic
        if self.is_open and done is None and self.is_elastic:
            self.lost |= {worker} & self.workers
        elif self.is_open and done is not None and done >= self.number:
            self.given.add(worker)
        if done is not None:
            self.died.discard(worker)
        elif self.rounds is None and worker not in self.left:
            self.died.add(worker)
        if self.rounds is None or (self.is_open and done is not None):
            # A worker that leaves because an update failed is expected back, so it is not added then.
            self.left.add(worker)
        if not is_waited_for:
            self.workers.discard(worker)
        request = self.requests.pop(worker, None)
        gone = Failure("RemoteError", f"{worker} has left {self.name!r}")
        told = [] if request is None else [SendReply(request, gone)]
        return [*told, *self._enough(), *self._rest()]

    def mean_taken(self) -> list[RoundCommand]:
        """Record that the accumulator returned the average of enough gradients, which will be applied next."""
        self.is_updating = True
        return []

    def updated(self, error: str = "", kind: str = "RemoteError") -> list[RoundCommand]:
        """End the open round after its update: open the next one, and answer the workers that wait.

        If the update failed, with an `error` of the class `kind`, close the run and refuse them in place of that.
        """
        self.is_updating, self.is_half_done = False, bool(error)
        requests, self.requests = self.requests, {}
        self.number += 1
        self.given.clear()
        self.lost.clear()
        self.enough = 0
        if error:
            return [*self._fail(error, kind, requests), *self._rest()]
        told: list[RoundCommand] = [*map(self._opening, requests.values())]
        self.is_open = not self.is_over
        # Open the round before any worker is notified of it.
        begun = [] if self.is_over else [OpenRound(self.number), *self._enough()]
        return [*begun, *told, *self._rest()]

    def _fail(self, error: str, kind: str, requests: Mapping[str, int]) -> list[RoundCommand]:
        self.failed += 1
        self.failure = (
            f"the update of round {self.done} of {self.name!r} failed: {error}\n"
            "  run it again under this name, and it goes on with this round"
        )
        self.failure_kind = kind
        self.is_open = False
        self.untold = self.taking_part - {*requests}
        return [*map(self._refusal, requests.values())]

    def _rest(self) -> list[RoundCommand]:
        if self.taking_part or self.is_updating or self.given or not self.is_held:
            return []
        self.is_open = self.is_held = False
        self.lost.clear()
        self.enough = 0
        if self.is_over:
            self.workers.clear()
            self.left.clear()
        return [FreeRun()]

    def _enough(self) -> list[RoundCommand]:
        if self.is_over or not self.is_open:
            return []
        # Once every live worker has given a gradient, those of dead workers are no longer waited for.
        all_gave = self.workers <= self.given
        can_come = self.given if all_gave else self.workers | self.given | self.lost
        enough = max(1, min(self.wanted, len(can_come)))
        if enough == self.enough:
            return []
        self.enough = enough
        return [SetEnough(enough)]
