"""A use of state: a program around a kind's step, and the same program around its reference."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from tests.composition.kind import Batch, Held, Kind, batch, joined

_MAKING = threading.Lock()
#: Numbers of the batches of a run of three steps.
NUMBERS = (0, 1, 2)


@dataclass
class Pair:
    """A kind in a use: makes the state with names that no other pair has."""

    kind: Kind
    use: str

    def prefix(self, part: str = "") -> str:
        """Return what the names of the state begin with."""
        return f"{self.use}{part}/{self.kind.name}".replace(" ", "-").replace(",", "")

    def make(self, part: str = "", **division: int) -> Held:
        """Make the kind's state, in the scope that the caller opened; workers in threads make it one after another."""
        with _MAKING:
            return self.kind.make(self.prefix(part), **division)

    def batches(self, numbers: Sequence[int] = NUMBERS) -> list[Batch]:
        """Return the batches of these numbers, as the kind's step takes them."""
        return [self.kind.batch(batch(number)) for number in numbers]

    def joined(self, numbers: Sequence[int]) -> Batch:
        """Return one batch with the rows of several."""
        return self.kind.batch(joined([batch(number) for number in numbers]))


#: The outcome of a use: the results of its steps and the content at the end, each beside that of the reference.
Outcome = list[tuple[str, Any, Any]]
#: Opens what all pairs of a use share, such as a cluster.
Room = Callable[[], contextlib.AbstractContextManager[Any]]


@contextlib.contextmanager
def no_room() -> Iterator[None]:
    """Open nothing."""
    yield


@dataclass(frozen=True)
class Use:
    """A use by its name, with the heading under which the docs list it."""

    name: str
    heading: str
    run: Callable[..., Outcome]
    room: Room = no_room


def compare(outcome: Outcome) -> None:
    """Raise AssertionError unless each value equals that of the reference, and there is one."""
    assert outcome
    for what, got, wanted in outcome:
        leaves, expected = jax.tree.leaves(got), jax.tree.leaves(wanted)
        assert len(leaves) == len(expected), what
        for leaf, value in zip(leaves, expected, strict=True):
            one, other = (np.asarray(x).astype(np.complex64) for x in (leaf, value))
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6, err_msg=what)
