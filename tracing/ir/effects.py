"""The effects of an op besides its results, and the ops that may be reordered.

An effect is on one resource, so two variables never order each other. Order is kept between two effects on one
resource unless they `commute`. An op whose effects are not known orders with everything.
"""

from __future__ import annotations

from enum import Enum


class Effect(Enum):
    """A kind of effect on a resource."""

    READ = "read"
    WRITE = "write"
    SEND = "send"
    RECV = "recv"
    #: An op on a queue or an accumulator that makes this program's earlier writes known to other programs.
    RELEASE = "release"
    #: An op on a queue or an accumulator that makes other programs' writes, before their releases, known to this one.
    ACQUIRE = "acquire"
    UNKNOWN = "unknown"


def commute(one: Effect, other: Effect) -> bool:
    """Whether two ops with these effects on the same resource may be reordered: two reads, and no others.

    An edge carries one value per step, so a send or receive is alone on its resource. An op on a queue or accumulator
    may find what another op left there.
    """
    return one is other is Effect.READ
