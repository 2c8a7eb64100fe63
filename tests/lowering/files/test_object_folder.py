"""Folders in an object store: a process that ends, or two that write, at any request to the store."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflow.lowering.files.array_files import fill_folder, read_arrays
from dflow.lowering.files.array_manifest import MANIFEST
from dflow.lowering.files.object_folder import remove_whole_objects, set_objects_aside, tidy, whole_objects
from dflow.lowering.files.object_path import ObjectPath
from dflow.tracing.errors import CheckpointError, CheckpointExists, NoCheckpoint
from tests.effort import examples


class Died(BaseException):
    """The process of the test is taken for ended."""


@pytest.fixture
def place() -> ObjectPath:
    return ObjectPath(f"memory://{secrets.token_hex(4)}/c")


def write(place: ObjectPath, value: float, *, overwrite: bool = True) -> None:
    with whole_objects(place, overwrite=overwrite) as folder:
        fill_folder(folder, {"a/v": np.full(3, value)})


def value_at(place: ObjectPath) -> float | None:
    """Return the value that `write` wrote; None if there is no checkpoint."""
    try:
        files = read_arrays(place)
    except NoCheckpoint:
        return None
    (value,) = set(files.read({"a/v": None})["a/v"].tolist())
    return float(value)


def folders_at(place: ObjectPath) -> set[str]:
    """Return the names of the attempts that have files."""
    return {name.partition("/")[0] for name in place.names() if name.startswith("~")}


@contextmanager
def dying(monkeypatch: pytest.MonkeyPatch, number: int, method: str) -> Iterator[list[int]]:
    """End the process at a request to the store, before it is sent or after it is answered; yield their count."""
    original: Callable[..., Any] = getattr(ObjectPath, method)
    count = [0]

    def counted(self: ObjectPath, *args: Any) -> Any:
        count[0] += 1
        if count[0] > number or (count[0] == number and method == "_store"):
            raise Died
        result = original(self, *args)
        if count[0] == number:
            raise Died
        return result

    with monkeypatch.context() as patched:
        patched.setattr(ObjectPath, method, counted)
        yield count


@pytest.mark.parametrize("method", ["_store", "_answer"])
@pytest.mark.parametrize("older", [None, 1.0])
def test_a_process_that_ends_at_any_request_leaves_the_old_or_the_new(
    place: ObjectPath, monkeypatch: pytest.MonkeyPatch, older: float | None, method: str
) -> None:
    ends, found = range(1, 100), []
    for number in ends:
        here = place / str(number)
        if older is not None:
            write(here, older)
        with dying(monkeypatch, number, method), suppress(Died):
            write(here, 2.0)
            break
        found.append(value_at(here))
        write(here, 3.0)
        assert value_at(here) == 3.0
        left = folders_at(here) - folders_of(here)
        assert len(left) <= 1  # an attempt whose manifest may still be on the way
        assert all((here / name / ".attempt").read().content == b"committing" for name in left)
    assert found.index(2.0) > 5
    assert set(found[: found.index(2.0)]) == {older}
    assert set(found[found.index(2.0) :]) == {2.0}


def folders_of(place: ObjectPath) -> set[str]:
    """Return the names of the attempts that the manifest names."""
    return {path.partition("/")[0] for path in read_arrays(place).paths.values()}


@pytest.mark.parametrize("method", ["_store", "_answer"])
def test_a_process_that_ends_while_it_removes_leaves_nothing_to_restore(
    place: ObjectPath, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    for number in range(1, 100):
        here = place / str(number)
        write(here, 1.0)
        with dying(monkeypatch, number, method), suppress(Died):
            remove_whole_objects(here)
            break
        assert value_at(here) in (None, 1.0)
        remove_whole_objects(here)
        tidy(here)
        assert here.names() == []
    assert number > 3


def write_and(place: ObjectPath, then: Callable[[ObjectPath], Any]) -> None:
    """Write arrays, and call `then` with their folder before they are put in place."""
    with whole_objects(place) as folder:
        fill_folder(folder, {"a/v": np.full(3, 1.0)})
        then(folder)


class Turns:
    """Lets several threads make requests to a store one at a time, in an order that a seed determines."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._changed = threading.Condition()
        self._own = threading.local()
        self._live: set[int] = set()
        self._waiting: set[int] = set()

    def wait(self) -> None:
        """Wait until this thread is the one to go on; threads that `run` did not start go on immediately."""
        me = getattr(self._own, "number", None)
        if me is not None:
            with self._changed:
                self._waiting.add(me)
                self._changed.notify_all()
                assert self._changed.wait_for(lambda: me not in self._waiting, 60)

    def run(self, *programs: Callable[[], Any]) -> None:
        """Run the programs to their ends."""
        self._live = {*range(len(programs))}
        with ThreadPoolExecutor(len(programs)) as pool:
            ended = [pool.submit(self._run, number, program) for number, program in enumerate(programs)]
            chosen = 0
            with self._changed:
                while self._changed.wait_for(lambda: self._waiting == self._live, 60) and self._live:
                    # Often the same one: some faults need many requests of one thread between two of another.
                    if chosen not in self._live or self._random.random() < 0.2:
                        chosen = self._random.choice(sorted(self._live))
                    self._waiting.discard(chosen)
                    self._changed.notify_all()
        for one in ended:
            one.result()

    def _run(self, number: int, program: Callable[[], Any]) -> None:
        self._own.number = number
        try:
            with suppress(CheckpointError):
                program()
        finally:
            with self._changed:
                self._live.discard(number)
                self._changed.notify_all()


@settings(max_examples=examples(150))
@given(seed=st.integers(0, 1 << 32), tidies=st.booleans())
def test_in_any_order_of_their_requests_writers_leave_a_whole_checkpoint(seed: int, tidies: bool) -> None:
    place, turns, original = ObjectPath(f"memory://{secrets.token_hex(4)}/c"), Turns(seed), ObjectPath._store

    def in_turn(path: ObjectPath) -> Any:
        turns.wait()
        return original(path)

    others: list[Callable[[], Any]] = [lambda: tidy(place)] if tidies else []
    write(place, 0.0)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ObjectPath, "_store", in_turn)
        turns.run(lambda: write(place, 1.0), lambda: write(place, 2.0), *others)
    assert value_at(place) in {0.0, 1.0, 2.0}
    tidy(place)
    assert folders_at(place) == folders_of(place)


def test_a_checkpoint_made_meanwhile_is_not_replaced(place: ObjectPath) -> None:
    with pytest.raises(CheckpointExists, match="was made while this was written"):
        write_and(place, lambda _: (place / MANIFEST).write(b"that of another process"))
    assert [(name, (place / name).read().content) for name in place.names()] == [(MANIFEST, b"that of another process")]


def test_a_checkpoint_made_in_the_last_moment_is_not_replaced(
    place: ObjectPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = ObjectPath.replace

    def late(path: ObjectPath, *args: Any) -> Any:
        if path == place / MANIFEST:
            path.write(b"that of another process")
        return replace(path, *args)

    monkeypatch.setattr(ObjectPath, "replace", late)
    with pytest.raises(CheckpointExists, match="was made while this was written"):
        write(place, 1.0, overwrite=False)
    assert place.names() == [MANIFEST]


def test_what_a_process_left_after_its_manifest_is_finished(place: ObjectPath) -> None:
    write(place, 1.0)
    (folder,) = folders_at(place)
    (place / folder / ".attempt").write(b"committing")
    tidy(place)
    assert ".attempt" not in " ".join(place.names())
    assert value_at(place) == 1.0


def test_a_folder_without_its_manifest_is_not_put_in_place(place: ObjectPath) -> None:
    with pytest.raises(CheckpointError, match="was removed before it was complete"):
        write_and(place, lambda folder: folder.remove([MANIFEST]))
    assert place.names() == []


def test_what_is_set_aside_is_never_removed(place: ObjectPath) -> None:
    write(place, 1.0)
    aside = set_objects_aside(place)
    assert value_at(place) is None
    for value in (2.0, 3.0):
        write(place, value)
    remove_whole_objects(place)
    tidy(place)
    assert (value_at(place), value_at(aside)) == (None, 1.0)


def test_no_attempt_of_a_damaged_manifest_is_removed(place: ObjectPath) -> None:
    write(place, 1.0)
    names = place.names()
    (place / MANIFEST).write(b"damaged")
    tidy(place)
    assert place.names() == names
