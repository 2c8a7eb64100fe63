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
  theirs, from workers that died and may have given one. So a dead worker's gradient never displaces a live worker's;
- after a failed update each worker that took part gets the error once, and the run resumes when it is opened again;
- after the last round every request is answered immediately;
- the run holds nothing but numbers from each FreeRun to the next Began; a FreeRun comes as soon as no worker takes
  part and no gradient is left to apply.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Began:
    """A worker takes part until it leaves; it is about to open the run, unless that is open."""

    worker: str


@dataclass(frozen=True)
class RunOpened:
    """A run of `rounds` rounds of `wanted` gradients is open; `workers` take part, except any that left before."""

    rounds: int
    wanted: int
    workers: tuple[str, ...]


@dataclass(frozen=True)
class Ready:
    """A worker is done with the opening `done` (-1: none yet), and requests the next one."""

    request: int
    worker: str
    done: int


@dataclass(frozen=True)
class TimedOut:
    """The request has timed out."""

    request: int


@dataclass(frozen=True)
class WorkerLeft:
    """A worker stops taking part. It gave its gradients for the openings up to `done`; None: unknown, since it died."""

    worker: str
    done: int | None = None


@dataclass(frozen=True)
class MeanTaken:
    """The accumulator returned the average of enough gradients, which will be applied next."""


@dataclass(frozen=True)
class Updated:
    """The update of the open round has ended, and failed if there is an `error`, of the class `kind`."""

    error: str = ""
    kind: str = "RemoteError"


RoundEvent = Began | RunOpened | Ready | TimedOut | WorkerLeft | MeanTaken | Updated


@dataclass(frozen=True)
class OpenRound:
    """Apply the average of the first gradients with this number, as soon as there are enough."""

    number: int


@dataclass(frozen=True)
class SetEnough:
    """Set the number of gradients that end the open round."""

    count: int


@dataclass(frozen=True)
class Announce:
    """Answer the request: opening `number`, after `done` rounds. If all rounds are done, the run is over."""

    request: int
    number: int
    done: int


@dataclass(frozen=True)
class Refuse:
    """Answer the request with an error."""

    request: int
    text: str
    #: Name of the error's class in `dflow.tracing.errors`.
    kind: str = "RemoteError"


@dataclass(frozen=True)
class FreeRun:
    """Free all that the run holds but its numbers, and cancel its waiting accumulator take."""


RoundCommand = OpenRound | SetEnough | Announce | Refuse | FreeRun


@dataclass
class Rounds:
    """The rounds of one run, called `name` in errors."""

    name: str
    #: Number of the newest opening, and count of the openings whose update failed.
    number: int = 0
    failed: int = 0
    rounds: int | None = None
    wanted: int = 0
    is_open: bool = False
    is_updating: bool = False
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
    #: Workers that left voluntarily, and have not come back.
    left: set[str] = field(default_factory=set)
    #: Workers that have yet to get the error of the failed update.
    untold: set[str] = field(default_factory=set)
    #: By worker: its waiting request.
    requests: dict[str, int] = field(default_factory=dict)
    #: The last failed update.
    failure: Updated = Updated()
    #: The count of the last SetEnough.
    enough: int = 0

    def handle(self, event: RoundEvent) -> list[RoundCommand]:
        """Apply the event and return the commands, in order."""
        match event:
            case Began(worker):
                return self._began(worker)
            case RunOpened():
                return self._open(event)
            case Ready(request, worker, done):
                return self._came(request, worker, done)
            case TimedOut(request):
                return self._give_up(request)
            case WorkerLeft(worker, done):
                return [*self._left(worker, done), *self._rest()]
            case MeanTaken():
                self.is_updating = True
                return []
            case Updated():
                return [*self._updated(event), *self._rest()]

    @property
    def done(self) -> int:
        """Number of rounds done."""
        return self.number - self.failed

    @property
    def is_over(self) -> bool:
        """Whether all rounds are done."""
        return self.rounds is not None and self.done >= self.rounds

    def missing(self) -> Sequence[str]:
        """Workers not known to have given a gradient for the opening."""
        return sorted(self.workers - self.given)

    def _began(self, worker: str) -> list[RoundCommand]:
        if not self.is_over:
            self.taking_part.add(worker)
            self.is_held = True
        self.untold.discard(worker)
        return []

    def _open(self, event: RunOpened) -> list[RoundCommand]:
        if self.rounds is None:
            self.rounds, self.wanted = event.rounds, event.wanted
        if self.is_open or self.is_over:
            return []
        self.is_open = self.is_held = True
        self.workers |= {*event.workers} - self.left
        return [OpenRound(self.number), *self._enough()]

    def _came(self, request: int, worker: str, done: int) -> list[RoundCommand]:
        before: list[RoundCommand] = []
        if worker in self.requests:
            before = [Refuse(self.requests.pop(worker), f"a later request of {worker} has taken the place of this one")]
        if self.is_over:
            return [*before, Announce(request, self.number, self.done)]
        if worker in self.untold or not self.is_open:
            self.untold.discard(worker)
            return [*before, self._refusal(request)]
        self.workers.add(worker)
        self.taking_part.add(worker)
        self.left.discard(worker)
        if done < self.number:
            # A worker that is new here, or was declared dead, has given nothing for this opening.
            self.given.discard(worker)
            return [*before, Announce(request, self.number, self.done), *self._enough()]
        self.requests[worker] = request
        self.given.add(worker)
        return [*before, *self._enough()]

    def _refusal(self, request: int) -> Refuse:
        error = self.failure.error or f"{self.name!r} is not open; run it again"
        return Refuse(request, error, self.failure.kind)

    def _give_up(self, request: int) -> list[RoundCommand]:
        worker = next((worker for worker, waiting in self.requests.items() if waiting == request), None)
        if worker is None:
            return []
        del self.requests[worker]
        missing = ", ".join(self.missing()) or "none"
        return [
            Refuse(
                request,
                f"round {self.done} of {self.name!r} has not ended: {self.enough} gradients are enough for it, "
                f"{', '.join(sorted(self.given)) or 'nobody'} gave one and {missing} did not",
                "DeadlineExceeded",
            )
        ]

    def _left(self, worker: str, done: int | None) -> list[RoundCommand]:
        self.taking_part.discard(worker)
        self.untold.discard(worker)
        if self.is_open and done is None:
            self.lost |= {worker} & self.workers
        elif self.is_open and done is not None and done >= self.number:
            self.given.add(worker)
        if self.rounds is None or (self.is_open and done is not None):
            # A worker that leaves because an update failed is expected back, so it is not added then.
            self.left.add(worker)
        self.workers.discard(worker)
        request = self.requests.pop(worker, None)
        told = [] if request is None else [Refuse(request, f"{worker} has left {self.name!r}")]
        return [*told, *self._enough()]

    def _updated(self, event: Updated) -> list[RoundCommand]:
        self.is_updating = False
        requests, self.requests = self.requests, {}
        self.number += 1
        self.given.clear()
        self.lost.clear()
        self.enough = 0
        if event.error:
            return self._fail(event, requests)
        told: list[RoundCommand] = [Announce(request, self.number, self.done) for request in requests.values()]
        self.is_open = not self.is_over
        # Open the round before any worker is notified of it.
        return told if self.is_over else [OpenRound(self.number), *self._enough(), *told]

    def _fail(self, event: Updated, requests: Mapping[str, int]) -> list[RoundCommand]:
        self.failed += 1
        error = (
            f"the update of round {self.done} of {self.name!r} failed: {event.error}\n"
            "  run it again under this name, and it goes on with this round"
        )
        self.failure = Updated(error, event.kind)
        self.is_open = False
        self.untold = self.taking_part - {*requests}
        return [self._refusal(request) for request in requests.values()]

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
