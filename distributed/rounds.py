"""Which round of synchronous training is open, who takes part in it, and how many gradients end it; no I/O.

In a round each worker gives a gradient, the first `wanted` of them are averaged and applied, and the next round opens.
Here it is decided who may begin which round, how many gradients are still to be waited for, and what each waits for.

Invariants:
- one round is open at a time; the next opens when the update of this one has ended;
- a worker is told of a round after that of the one it is done with, and once for each time it asks;
- as many gradients are waited for as are wanted, or as can come: from the workers that have not left, from those that
  left after they had given theirs, and, until all others have given theirs, from those that died and may have; so none
  of a worker that lives is left out for one of a worker that died; but one at least;
- after the last round, or once an update has failed, every ask is answered at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Opened:
    """The run of `rounds` rounds is known, of `wanted` gradients each; `workers` take part unless they left before."""

    rounds: int
    wanted: int
    workers: tuple[str, ...]


@dataclass(frozen=True)
class Came:
    """A worker is done with the round `done` (-1: with none yet), and asks for the next."""

    ask: int
    worker: str
    done: int


@dataclass(frozen=True)
class GaveUp:
    """The ask is no longer waited for: its time is over."""

    ask: int


@dataclass(frozen=True)
class Left:
    """A worker takes part no more: it gave its gradients of the rounds to `done`. None: it has died and cannot say."""

    worker: str
    done: int | None = None


@dataclass(frozen=True)
class Updated:
    """The update of the open round has ended, and failed if there is an `error`."""

    error: str = ""


Event = Opened | Came | GaveUp | Left | Updated


@dataclass(frozen=True)
class OpenRound:
    """Apply the average of the first gradients of this round, as soon as there are enough."""

    number: int


@dataclass(frozen=True)
class SetEnough:
    """So many gradients are enough for the open round."""

    count: int


@dataclass(frozen=True)
class Tell:
    """Answer the ask: the round `number` is open. The run's number of rounds says that it is over."""

    ask: int
    number: int


@dataclass(frozen=True)
class Refuse:
    """Answer the ask by an error."""

    ask: int
    text: str
    #: The class of the error, of `dflow.tracing.errors`.
    kind: str = "RemoteError"


Command = OpenRound | SetEnough | Tell | Refuse


@dataclass
class Rounds:
    """The rounds of one run, called `name` in errors."""

    name: str
    number: int = -1
    rounds: int | None = None
    wanted: int = 0
    #: Who may still give gradients.
    workers: set[str] = field(default_factory=set)
    #: Who has given one in the open round, and waits for the next or has left.
    given: set[str] = field(default_factory=set)
    #: Who died in the open round, and may have given one.
    lost: set[str] = field(default_factory=set)
    #: Who left before the run was opened here.
    left_early: set[str] = field(default_factory=set)
    #: By worker: the ask that waits.
    asks: dict[str, int] = field(default_factory=dict)
    error: str = ""
    #: What was last commanded.
    enough: int = 0

    def handle(self, event: Event) -> list[Command]:
        """Take note of the event, and say what to do, in order."""
        match event:
            case Opened():
                return self._open(event)
            case Came(ask, worker, done):
                return self._came(ask, worker, done)
            case GaveUp(ask):
                return self._give_up(ask)
            case Left(worker, done):
                return self._left(worker, done)
            case Updated(error):
                return self._updated(error)

    @property
    def is_over(self) -> bool:
        """Whether all rounds are done."""
        return self.rounds is not None and self.number >= self.rounds

    def missing(self) -> Sequence[str]:
        """Who has not given a gradient in the open round, as far as is known here."""
        return sorted(self.workers - self.given)

    def _open(self, event: Opened) -> list[Command]:
        if self.rounds is not None:
            return []
        self.rounds, self.wanted, self.number = event.rounds, event.wanted, 0
        self.workers |= {*event.workers} - self.left_early
        return [] if self.is_over else [OpenRound(0), *self._enough()]

    def _came(self, ask: int, worker: str, done: int) -> list[Command]:
        before: list[Command] = []
        if worker in self.asks:
            before = [Refuse(self.asks.pop(worker), f"a later ask of {worker} has taken the place of this one")]
        if self.error:
            return [*before, Refuse(ask, self.error)]
        self.workers.add(worker)
        if done < self.number or self.is_over:
            # One that is new here, or was given up for dead, has given nothing in this round.
            self.given.discard(worker)
            return [*before, Tell(ask, self.number), *self._enough()]
        self.asks[worker] = ask
        self.given.add(worker)
        return [*before, *self._enough()]

    def _give_up(self, ask: int) -> list[Command]:
        worker = next((worker for worker, waiting in self.asks.items() if waiting == ask), None)
        if worker is None:
            return []
        del self.asks[worker]
        missing = ", ".join(self.missing()) or "none"
        return [
            Refuse(
                ask,
                f"round {self.number} of {self.name!r} has not ended: {self.enough} gradients are enough for it, "
                f"{', '.join(sorted(self.given)) or 'nobody'} gave one and {missing} did not",
                "DeadlineExceeded",
            )
        ]

    def _left(self, worker: str, done: int | None) -> list[Command]:
        if self.rounds is None:
            self.left_early.add(worker)
            return []
        ask = self.asks.pop(worker, None)
        if done is None:
            self.lost |= {worker} & self.workers
        elif done >= self.number:
            self.given.add(worker)
        self.workers.discard(worker)
        told = [] if ask is None else [Refuse(ask, f"{worker} has left {self.name!r}")]
        return [*told, *self._enough()]

    def _updated(self, error: str) -> list[Command]:
        asks, self.asks = self.asks, {}
        if error:
            self.error = f"the update of round {self.number} of {self.name!r} failed: {error}"
            return [Refuse(ask, self.error) for ask in asks.values()]
        self.number += 1
        self.given.clear()
        self.lost.clear()
        self.enough = 0
        told: list[Command] = [Tell(ask, self.number) for ask in asks.values()]
        # The round is open before anyone hears of it.
        return told if self.is_over else [OpenRound(self.number), *self._enough(), *told]

    def _enough(self) -> list[Command]:
        if self.is_over or self.error:
            return []
        all_gave = self.workers <= self.given
        can_come = self.given if all_gave else self.workers | self.given | self.lost
        enough = max(1, min(self.wanted, len(can_come)))
        if enough == self.enough:
            return []
        self.enough = enough
        return [SetEnough(enough)]
