"""A kind of state: how a user makes one, a step that reads and writes it, and the same in plain JAX and NumPy.

A step takes a batch and returns a number that depends on the state before it. All numbers are small whole ones or
binary fractions, so that sums are exact in any order and dtype. What several workers do at the same time commutes.
A use is a program around a kind's step, and the same program around its reference.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

import dflow

#: Rows of a batch, rows of a table, and the first value of each row of a table.
ROWS, TABLE = 4, 6
FIRST = np.arange(TABLE * 2, dtype=np.float32).reshape(TABLE, 2) / 4

Batch = dict[str, Any]


def batch(number: int) -> Batch:
    """Batch `number`: x f32[4], ids i32[4] below 6 with repetitions, round i32[4], each row the same number."""
    return {
        "x": np.array([1, 2, 0, 1], np.float32) + number % 2,
        "ids": np.array([number, 5, number, 2], np.int32) % TABLE,
        "round": np.full(ROWS, number, np.int32),
    }


def whole(value: Any) -> Any:
    """Return a value as a NumPy array, also one that is divided over the devices of several processes."""
    value = value.read() if dflow.is_variable(value) or isinstance(value, dflow.ShardedVariable) else value
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        from jax.experimental.multihost_utils import process_allgather

        value = process_allgather(value, tiled=True)
    return np.asarray(value)


def joined(batches: Sequence[Batch]) -> Batch:
    """Return the batch with the rows of several."""
    return jax.tree.map(lambda *parts: np.concatenate(parts), *batches)


def stacked(batches: Sequence[Batch]) -> Batch:
    """Return batches along a new first axis, as a `scan` takes them."""
    return jax.tree.map(lambda *parts: np.stack(parts), *batches)


@dataclass
class Held:
    """State that a program holds, and what it does with it."""

    #: Uses and writes the state once; returns f32[], in traced code or outside.
    step: Callable[[Batch], jax.Array]
    #: The content, as NumPy arrays; called once, at the end, since it may empty a queue.
    state: Callable[[], Any]
    #: What `dflow.save` is given.
    items: Any
    #: Reads the state, and writes nothing; None for state that can't be read without a change.
    look: Callable[[Batch], jax.Array] | None = None
    #: The gradients of a step and what else its update takes, and the update, for state that is trained.
    gradients: Callable[[Batch], tuple[Any, Any]] | None = None
    apply: Callable[[Any, Any], None] | None = None


class Reference:
    """The same state in plain JAX and NumPy. In a step of several workers each writes, and their gradient is one."""

    def write(self, given: Batch) -> float | None:
        """Do what a step does without an optimizer; return its result."""
        return None

    def train(self, given: Batch) -> float | None:
        """Do what a step does with its optimizer, with the rows of all workers; return its result."""
        return None

    def step(self, given: Batch) -> float:
        """Do a whole step of one process; return its result."""
        written, trained = self.write(given), self.train(given)
        return written if written is not None else trained  # type: ignore[return-value]

    def state(self) -> Any:
        """Return the content, structured as that of `Held.state`."""
        raise AssertionError("a reference has a state")


class Folded(Reference):
    """A value that each step replaces: `write` takes it and a batch, and returns the next one and the step's result."""

    def __init__(self, value: Any, write: Callable[[Any, Batch], tuple[Any, float]], shown: Any = np.asarray) -> None:
        self.value, self._write, self._shown = value, write, shown

    def write(self, given: Batch) -> float:
        self.value, result = self._write(self.value, given)
        return result

    def state(self) -> Any:
        return self._shown(self.value)


class Kind:
    """A kind of state. `name` is what a user calls it; kinds of one `family` share a column of the docs."""

    name: str
    family: str
    #: The library that it needs, where that may be absent.
    library: str | None = None
    #: Whether an optimizer changes it, as synchronous strategies want.
    trains = False
    #: Options of `make` that give another division into shards, where there are shards.
    divided_otherwise: ClassVar[dict[str, int]] = {}

    def make(self, prefix: str, **division: int) -> Held:
        """Make the state, with names that begin with `prefix`, in the scope that the caller opened."""
        raise AssertionError("a kind can be made")

    def reference(self) -> Reference:
        """Return new state of plain JAX and NumPy."""
        raise AssertionError("a kind has a reference")

    def batch(self, given: Batch) -> Batch:
        """Return what this kind's step takes for a batch."""
        return given

    def plain(self, given: Batch) -> Batch:
        """Return a batch in containers and arrays alone, as an export takes it; `rebuilt` is the way back."""
        return given

    def rebuilt(self, plain: Batch) -> Batch:
        """Return the batch of a plain one."""
        return plain

    def __repr__(self) -> str:
        return self.name


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
