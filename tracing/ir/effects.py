"""What an op may do besides giving its results, and which two ops may swap places.

An effect is on one resource, so two variables never order each other. Order is kept between two effects on one
resource unless `COMMUTE` says that they commute. An op whose effects are not known orders with everything.
"""

from __future__ import annotations

from enum import Enum


class Effect(Enum):
    """A kind of effect on a resource."""

    READ = "read"
    WRITE = "write"
    SEND = "send"
    RECV = "recv"
    #: Any op on a queue or an accumulator. Each may find what another left, so no two of them commute.
    HOST = "host op"
    UNKNOWN = "unknown"


#: Pairs of effects on one resource whose order makes no difference. Each edge carries one value per step, so a send or
#: a receive is the only op on its resource and is in no pair.
COMMUTE: frozenset[frozenset[Effect]] = frozenset({frozenset({Effect.READ})})


def commute(one: Effect, other: Effect) -> bool:
    """Whether two ops with these effects on the same resource may swap places."""
    return frozenset({one, other}) in COMMUTE
