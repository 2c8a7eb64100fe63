"""Small exports for tests of serving, and a function whose calls a test can hold."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import dflow
from dflow.distributed.transport.addresses import TcpAddress
from dflow.distributed.transport.security.policy import SameMachine
from dflow.serving.model_server import ModelServer
from dflow.serving.request_batches import RequestQueue
from dflow.serving.served_version import ServingSettings
from tests.dflow.serving.inference_client import infer, json_request

DEADLINE_S = 60.0
ONE_ROW = json_request(x=np.ones((1, 2), np.float32))
ROWS = dflow.spec("b, 2", jnp.float32)


def scale(path: Path, factor: float) -> Path:
    """Write a function of rows, times a variable."""
    held = dflow.Variable(jnp.float32(factor), name="factor")

    def times(x: Any) -> Any:
        return x * held

    return dflow.export(times, ROWS).save(path)


def learner(path: Path) -> Path:
    """Write `add`, which adds to a variable, and `total`, which reads it."""
    held = dflow.Variable(jnp.float32(0), name="total")

    def add(x: Any) -> Any:
        held.assign_add(x)
        return held.read()

    number = dflow.spec("", jnp.float32)
    return dflow.export({"add": (add, number), "total": held.read}).save(path)


#: The settings of `dflow serve` without options.
USUAL = ServingSettings()


@contextmanager
def served(folder: Path, settings: ServingSettings = USUAL, **options: Any) -> Iterator[ModelServer]:
    """Serve a folder on a free port; the lines for the user are in `server.lines`."""
    lines: list[str] = []
    options = {"poll_s": 0.0, "report": lines.append, **options}
    with ModelServer(folder, TcpAddress("127.0.0.1", 0), settings, SameMachine(), **options) as server:
        server.lines = lines  # type: ignore[attr-defined]
        yield server


class HeldCalls:
    """Calls of the function of a served model `scale`, asked from threads; each waits for `release`."""

    def __init__(self, server: ModelServer) -> None:
        version = server.models["scale"].current
        assert version is not None
        queue: RequestQueue = version.queues["times"]
        self._began, self._go_on = threading.Semaphore(0), threading.Event()
        self._call: Callable[..., Any] = queue.tensors.call
        queue.tensors.call = self  # type: ignore[method-assign, assignment]
        self._url, self._pool = server.url, ThreadPoolExecutor(8)

    def __call__(self, fn: Any, arrays: Any) -> Any:
        """Wait in the thread that computes."""
        self._began.release()
        assert self._go_on.wait(DEADLINE_S)
        return self._call(fn, arrays)

    def ask(self, body: bytes = ONE_ROW) -> Future[tuple[int, Any, dict[str, str]]]:
        """Send a request, whose answer comes after `release`."""
        return self._pool.submit(infer, self._url, "scale", body)

    def ask_first(self, body: bytes = ONE_ROW) -> Future[tuple[int, Any, dict[str, str]]]:
        """Send a request, and return when its computation has begun."""
        asked = self.ask(body)
        self.await_call()
        return asked

    def await_call(self) -> None:
        """Wait until another computation has begun."""
        assert self._began.acquire(timeout=DEADLINE_S)

    def later(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        return self._pool.submit(call, *arguments)

    def release(self) -> None:
        """Let all calls go on."""
        self._go_on.set()
        self._pool.shutdown(wait=False)
