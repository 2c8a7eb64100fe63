"""Of several processes that compile one program, one does, and the others read it from JAX's cache."""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import pytest
from filelock import FileLock

from dflow.lowering.programs import compile_once as compiling
from dflow.lowering.programs.compile_once import compile_once


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FileLock:
    """The only lock, of this test alone."""
    monkeypatch.setattr(compiling, "_locks", lambda: tmp_path)
    monkeypatch.setattr(compiling, "_name", lambda program: "lock")
    return FileLock(tmp_path / "lock")


def lowered() -> Any:
    """A program that no other test compiles."""
    number = secrets.randbits(30)
    return [jax.jit(lambda value: value + number).lower(1) for _ in range(2)]


def test_one_of_two_compiles(held: FileLock) -> None:
    events: Counter[str] = Counter()
    note: Callable[..., None] = lambda name, **_: events.update([name.rpartition("/")[2]])  # noqa: E731
    jax.monitoring.register_event_listener(note)
    begun = threading.Barrier(3)

    def compile(stage: Any) -> int:
        begun.wait(60)
        return int(compile_once(stage)(1))

    with ThreadPoolExecutor(2) as threads:
        with held:
            found = [threads.submit(compile, stage) for stage in lowered()]
            begun.wait(60)
        assert len({each.result(60) for each in found}) == 1
    jax.monitoring.unregister_event_listener(note)
    assert (events["compile_requests_use_cache"], events["cache_hits"]) == (2, 1)


def test_a_process_that_does_not_end_is_not_waited_for(held: FileLock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "WAIT_S", 0.0)
    with held, ThreadPoolExecutor(1) as threads:
        assert threads.submit(lambda: compile_once(lowered()[0])(1)).result(60) > 0


def test_without_a_cache_there_is_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    before = jax.config.jax_compilation_cache_dir
    try:
        for folder, is_kept in ((None, False), ("gs://bucket/folder", False), ("/folder", True)):
            jax.config.update("jax_compilation_cache_dir", folder)
            assert (compiling._locks() is not None) == is_kept
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 1)
        assert compiling._locks() is None
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        assert compiling._locks() is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
