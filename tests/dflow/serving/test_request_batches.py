"""Requests gathered into batches: sizes, padding, limits, deadlines, errors, and the end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.serving.request_batches import RequestQueue, batch_sizes, outputs_of
from dflow.serving.request_members import RefusedRequest
from dflow.serving.signature_tensors import SignatureTensors
from dflow.tracing.errors import InputError, QueueClosed
from tests.distributed.waiting import until

pytestmark = pytest.mark.once

DEADLINE_S = 60.0
TENSORS = SignatureTensors("f", dflow.export(lambda x: x + 1, dflow.spec("b", jnp.float32)).signature_of("call"))


class Doubling:
    """A function whose calls wait for `go_on`; it fails for a negative number."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []
        self.began, self.go_on = threading.Semaphore(0), threading.Event()
        self.cleared = 0
        self.error: Exception = ArithmeticError("a negative number")

    def __call__(self, x: Any) -> Any:
        self.seen.append(x.tolist())
        self.began.release()
        assert self.go_on.wait(DEADLINE_S)
        if (x < 0).any():
            raise self.error
        return 2 * x

    def clear_cache(self) -> None:
        self.cleared += 1


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join(DEADLINE_S)
    loop.close()


class Bench:
    """A queue with its function, and requests from another thread's loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, most: int, capacity: int = 64) -> None:
        self.fn, self._loop = Doubling(), loop
        #: Of each batch, the numbers of rows and of requests.
        self.observed: list[tuple[int, int]] = []

        def observe(function: str, rows: int, took_s: float, waits_s: Sequence[float]) -> None:
            assert min(took_s, *waits_s) >= 0
            self.observed.append((rows, len(waits_s)))

        self.queue = RequestQueue(
            TENSORS, self.fn, most=most, delay_s=0.0, capacity=capacity, observe=observe, exclusive=nullcontext()
        )

    def ask(self, *rows: float, timeout_s: float = DEADLINE_S) -> Future[Any]:
        arrays = {"x": np.array(rows, np.float32)}
        asked: Coroutine[Any, Any, Any] = outputs_of(self.queue, arrays, timeout_s)
        return asyncio.run_coroutine_threadsafe(asked, self._loop)

    def ask_first(self, *rows: float) -> Future[Any]:
        """Send a request and return when it is computed, which goes on until `go_on`."""
        first = self.ask(*rows)
        assert self.fn.began.acquire(timeout=DEADLINE_S)
        return first

    def ask_more(self, *groups: Sequence[float]) -> list[Future[Any]]:
        """Send requests, and return when they wait in this order."""
        found = []
        for group in groups:
            before = self.queue.waiting
            found.append(self.ask(*group))
            until(lambda: self.queue.waiting == before + 1)  # noqa: B023
        return found


def values(asked: Future[Any]) -> list[float]:
    return list(asked.result(DEADLINE_S)[0].tolist())


def refusal(asked: Future[Any]) -> RefusedRequest:
    with pytest.raises(RefusedRequest) as refused:
        asked.result(DEADLINE_S)
    return refused.value


def test_sizes_are_powers_of_two_and_the_largest_batch() -> None:
    assert [batch_sizes(most) for most in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_requests_that_wait_are_computed_together_and_padded(loop: asyncio.AbstractEventLoop) -> None:
    bench = Bench(loop, most=4)
    first = bench.ask_first(1)
    more = bench.ask_more([2, 3], [4], [5, 6])
    bench.fn.go_on.set()
    assert [values(asked) for asked in (first, *more)] == [[2], [4, 6], [8], [10, 12]]
    # The last request would have made 5 rows, and is in the next batch.
    assert bench.fn.seen == [[1], [2, 3, 4, 0], [5, 6]]
    assert bench.observed == [(1, 1), (3, 2), (2, 1)]
    bench.queue.close()


def test_without_batches_each_request_is_computed_as_it_is(loop: asyncio.AbstractEventLoop) -> None:
    bench = Bench(loop, most=0)
    first = bench.ask_first(1, 2, 3)
    more = bench.ask_more([4], [5])
    bench.fn.go_on.set()
    assert [values(asked) for asked in (first, *more)] == [[2, 4, 6], [8], [10]]
    assert bench.fn.seen == [[1, 2, 3], [4], [5]]
    bench.queue.close()


def test_a_request_beyond_the_limits_is_refused(loop: asyncio.AbstractEventLoop) -> None:
    bench = Bench(loop, most=2, capacity=1)
    assert "f: expected at most 2 rows, got 3" in str(refusal(bench.ask(1, 2, 3)))
    first = bench.ask_first(1)
    (second,) = bench.ask_more([2])
    full = refusal(bench.ask(3))
    assert (full.status, full.headers) == (503, {"Retry-After": "1"})
    bench.fn.go_on.set()
    assert (values(first), values(second)) == ([2], [4])
    bench.queue.close()


def test_a_request_that_waited_past_its_deadline_is_not_computed(loop: asyncio.AbstractEventLoop) -> None:
    bench = Bench(loop, most=1)
    first = bench.ask_first(1)
    late = bench.ask(2, timeout_s=0.01)
    assert refusal(late).status == 504
    bench.fn.go_on.set()
    assert values(first) == [2]
    assert values(bench.ask(3)) == [6]
    assert bench.fn.seen == [[1], [3]]
    bench.queue.close()


def test_a_request_whose_computation_began_is_answered_after_its_deadline(loop: asyncio.AbstractEventLoop) -> None:
    bench = Bench(loop, most=1)
    asked = bench.ask(1, timeout_s=0.2)
    assert bench.fn.began.acquire(timeout=DEADLINE_S)
    late = bench.ask(2, timeout_s=0.3)
    assert refusal(late).status == 504  # so the deadline of the first has passed
    bench.fn.go_on.set()
    assert values(asked) == [2]
    bench.queue.close()


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (ArithmeticError("a negative number"), 500, "f failed: ArithmeticError: a negative number"),
        (InputError("ids: expected 0 to 9, got 10", "give others"), 400, "f: ids: expected 0 to 9, got 10"),
    ],
)
def test_an_error_answers_the_request_that_causes_it_and_no_other_of_its_batch(
    loop: asyncio.AbstractEventLoop, error: Exception, status: int, text: str
) -> None:
    bench = Bench(loop, most=4)
    bench.fn.error = error
    first = bench.ask_first(1)
    more = bench.ask_more([-1], [2], [3])
    bench.fn.go_on.set()
    assert [values(asked) for asked in (first, *more[1:])] == [[2], [4], [6]]
    failed = refusal(more[0])
    assert (failed.status, str(failed)) == (status, text)
    bench.queue.close()


def test_a_closed_queue_answers_what_waits_and_refuses_the_rest(loop: asyncio.AbstractEventLoop) -> None:
    bench = Bench(loop, most=1)
    first = bench.ask_first(1)
    more = bench.ask_more([2], [3])
    closing = threading.Thread(target=bench.queue.close)
    closing.start()
    until(lambda: bench.queue._held.with_machine(lambda machine: machine.is_closed, ""))
    with pytest.raises(QueueClosed):
        bench.ask(4).result(DEADLINE_S)
    bench.fn.go_on.set()
    closing.join(DEADLINE_S)
    assert [values(asked) for asked in (first, *more)] == [[2], [4], [6]]


def test_the_number_of_compiled_programs_is_bounded(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflow.serving.request_batches.MOST_SHAPES", 3)
    bench = Bench(loop, most=0)
    bench.fn.go_on.set()
    for count in (1, 2, 3, 1, 2):
        values(bench.ask(*range(count)))
    assert bench.fn.cleared == 0
    values(bench.ask(*range(4)))
    assert bench.fn.cleared == 1
    bench.queue.close()
