"""Processes of one host compile a program once: the others wait for the first one, and read what it compiled.

The workers of a job begin together, with the same programs, and so do its parameter tasks. JAX's persistent cache alone
does not help them, as each finds nothing there and compiles. So the process that compiles a program holds a lock beside
the cache. Where JAX keeps no cache on this host, or not of all programs, each process compiles as before.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from filelock import FileLock, Timeout

LOGGER = logging.getLogger("dflow")
#: Longest wait for another process, which may be paused, in s. Then this one compiles too.
WAIT_S = 60.0


def compile_once(stage: jax.stages.Lowered, options: dict[str, Any] | None = None) -> Any:
    """Return the executable of a lowered program, compiled here or by another process of this host."""
    folder = _locks()
    if folder is None:
        return stage.compile(options)
    with _held(folder, stage.as_text().encode()):
        return stage.compile(options)


def _locks() -> Path | None:
    """Return the folder of the locks, which is beside JAX's cache; None if JAX does not keep each program there.

    None also where JAX runs in several processes, which may need each other to compile.
    """
    config: Any = jax.config
    least = config.jax_persistent_cache_min_compile_time_secs, config.jax_persistent_cache_min_entry_size_bytes
    if not config.jax_enable_compilation_cache or max(least) > 0:
        return None
    if jax.process_count() > 1:
        return None
    cache = config.jax_compilation_cache_dir
    return None if not cache or "://" in cache else Path(cache) / "locks"


@contextmanager
def _held(folder: Path, program: bytes) -> Iterator[None]:
    """Hold the lock of a program, one of 256, or none after `WAIT_S` or where the file system has no locks."""
    lock = FileLock(folder / _name(program))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=WAIT_S)
    except (OSError, NotImplementedError) as error:  # `Timeout` is an OSError
        if isinstance(error, Timeout):
            LOGGER.info("another process has not compiled a program within %g s: compiling it too", WAIT_S)
    try:
        yield
    finally:
        lock.release()


def _name(program: bytes) -> str:
    return hashlib.sha256(program).hexdigest()[:2]
