"""The asynchronous strategy's requests to a cluster, its batches and its results; without tasks and traces."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.distributed.asynchronous.async_ import Async
from dflow.distributed.asynchronous.staleness_bound import SharedStep
from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.standalone import NoCalls
from dflow.distributed.steps.retries import RecoveringState
from dflow.distributed.training.batch_supply import END, BatchSupply
from dflow.distributed.training.strategy import StrategyRun
from dflow.distributed.training.work_messages import Claimed, ClaimSteps, StepsDone
from dflow.distributed.wire.messages.message import Notice
from dflow.tracing.errors import RemoteError, StrategyError, TaskLost, TransportClosed


class ScriptedAsync(Async):
    """Trains on a `Scripted` cluster, whose steps have no context of tasks."""

    def _shared_steps(self, run: StrategyRun) -> AbstractContextManager[SharedStep]:
        cluster: Any = self.cluster
        return nullcontext(lambda steps, batches: cluster.step())


class Scripted(RecoveringState):
    """A source of steps that gives fixed claims, and records the arguments of each request."""

    task = identity = "/job:worker/task:0"
    is_standalone, clock = False, NoCalls()

    def __init__(self, *claims: range) -> None:
        self.coordinator = self.steps = self
        self.claims = list(claims)
        self.told: list[ClaimSteps] = []
        self.left: list[str] = []
        #: The notices, and the ends of steps, in order.
        self.notices: list[Notice | str] = []

    def part(self, kind: Any) -> Any:
        return kind(self)

    @contextmanager
    def step(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.notices.append("ended")

    def tell(self, notice: Notice) -> None:
        self.notices.append(notice)

    def await_recovery(self) -> None:
        raise TaskLost("no snapshots are made")

    def leave(self, reason: str) -> None:
        self.left.append(reason)

    def ask(self, claim: ClaimSteps, timeout_s: float) -> Claimed:
        self.told.append(claim)
        steps = self.claims.pop(0) if claim.more and self.claims else range(0)
        return Claimed(steps.start, len(steps))


class Lost(Scripted):
    def ask(self, claim: ClaimSteps, timeout_s: float) -> Claimed:
        if self.told:
            raise TransportClosed("the coordinator is lost")
        return super().ask(claim, timeout_s)


def scripted(source: Scripted) -> ScriptedAsync:
    return ScriptedAsync(cast(Cluster, source))


def told(source: Scripted) -> list[tuple[int, bool]]:
    return [(claim.done, claim.more) for claim in source.told[1:]]


def test_a_run_yields_what_each_call_returns_and_passes_tuples_as_arguments() -> None:
    source = Scripted(range(2), range(2, 3))
    batches = [(1, 2), (3, 4), (5, 6), (7, 8)]
    assert list(scripted(source).run(lambda a, b: (a, b), batches, steps=3)) == [(1, 2), (3, 4), (5, 6)]
    assert told(source) == [(2, True), (1, True)]
    assert list(Async(dflow.connect()).run(lambda batch: batch, [[1, 2], {"a": 3}], steps=2)) == [[1, 2], {"a": 3}]


def test_a_function_of_batches_is_given_the_numbers_of_the_claimed_steps() -> None:
    source = Scripted(range(4, 6), range(9, 10))
    assert list(scripted(source).run(lambda batch: batch, lambda step: 10 * step, steps=20)) == [40, 50, 90]


def test_no_batch_is_taken_that_no_step_uses() -> None:
    batches = iter(range(10))
    list(Async(dflow.connect()).run(lambda batch: batch, batches, steps=4))
    assert next(batches) == 4


@pytest.mark.parametrize(
    ("outcome", "metrics"),
    [
        (jnp.float32(1.5), {"loss": 1.5}),
        (2.5, {"loss": 2.5}),
        ({"loss": np.float32(0.5), "hits": jnp.int32(3)}, {"loss": 0.5, "hits": 3.0}),
        ({"key": jax.random.key(0), "rows": jnp.zeros(3), "name": "x", "z": 1j}, {}),
        ((jnp.float32(1.0), jnp.float32(2.0)), {}),
        (None, {}),
    ],
    ids=["scalar", "python number", "dict", "nothing real", "tuple", "none"],
)
def test_real_scalars_are_shown_as_progress(outcome: Any, metrics: dict[str, float]) -> None:
    source = Scripted(range(1))
    list(scripted(source).run(lambda _: outcome, [0], steps=1))
    assert source.told[-1].metrics == metrics


@pytest.mark.parametrize("count", [0, 3, 4])
def test_batches_that_end_early_end_the_run_here(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Scripted(*[range(4)] * 100)
    assert len(list(scripted(source).run(lambda batch: batch, range(count), steps=1000))) == count
    assert told(source)[-1] == (count % 4, False)
    done: list[int] = []
    with pytest.raises(StrategyError, match=f"expected batches for 1000 steps, got {count}, after which they have end"):
        done.extend(Async(dflow.connect()).run(lambda batch: batch, range(count), steps=1000))
    assert done == [*range(count)]
    monkeypatch.setenv("DFLOW_ACCEPT", "short")
    assert len(list(Async(dflow.connect()).run(lambda batch: batch, range(count), steps=1000))) == count


def test_leaving_the_loop_when_the_coordinator_is_lost_is_quiet() -> None:
    run = scripted(Lost(range(4))).run(lambda batch: batch, itertools.count(), steps=1000)
    assert isinstance(run, Iterator)
    assert next(run) == 0
    run.close()  # type: ignore[attr-defined]


def test_a_step_that_fails_gives_back_what_is_not_done() -> None:
    cluster = dflow.connect()
    told: list[tuple[int, bool]] = []
    ask = cluster.coordinator.ask

    def noted(claim: ClaimSteps, timeout_s: float) -> Claimed:
        told.append((claim.done, claim.more))
        return ask(claim, timeout_s)

    cluster.coordinator.ask = noted  # type: ignore[method-assign]

    def step(number: int) -> int:
        if number == 3:
            raise ValueError("bad batch")
        return number

    with pytest.raises(ValueError, match="bad batch"):
        list(Async(cluster).run(step, range(10), steps=10, name="failing"))
    assert sum(done for done, _ in told) == 3
    assert [more for _, more in told] == [True] * (len(told) - 1) + [False]


def test_a_named_run_goes_on_where_it_was_left_alone_too() -> None:
    alone = dflow.connect()
    for seen in Async(alone).run(lambda batch: batch, itertools.count(), steps=20, name="fit"):
        if seen == 6:
            break
    assert len(list(Async(alone).run(lambda batch: batch, itertools.count(), steps=20, name="fit"))) == 20 - 7
    assert list(Async(alone).run(lambda batch: batch, itertools.count(), steps=20, name="fit")) == []
    with pytest.raises(RemoteError, match=r"run 'fit': it has 20 steps and .* asks for 30; .*name another run"):
        list(Async(alone).run(lambda batch: batch, itertools.count(), steps=30, name="fit"))


def losses(values: list[float]) -> Iterator[Any]:
    return iter([{"loss": jnp.float32(value), "inverse": jnp.float32(np.inf)} for value in values])


def test_the_first_loss_that_is_not_finite_is_reported_with_its_step_though_a_later_one_is_finite() -> None:
    source = Scripted(range(4), range(4, 7))
    values = [1.0, 2.0, np.nan, 3.0, np.inf, np.nan, 1.0]
    list(scripted(source).run(lambda outcome: outcome, losses(values), steps=7))
    # The last step is reported before its result is given, so before the last claim.
    reports = [notice for notice in source.notices if isinstance(notice, StepsDone)]
    first, second = (message.not_finite for message in [source.told[1], *reports])
    assert source.told[2].not_finite is None
    assert (first.step, first.metric, str(first.value)) == (2, "loss", "nan")
    assert (second.step, second.metric, second.value) == (4, "loss", np.inf)


def test_a_loss_that_is_not_finite_is_reported_when_the_program_stops_at_it() -> None:
    source = Scripted(range(4))
    outcomes = scripted(source).run(lambda outcome: outcome, losses([1.0, np.nan]), steps=7)
    assert [next(outcomes)["loss"], next(outcomes)["loss"]] == [1.0, pytest.approx(np.nan, nan_ok=True)]
    outcomes.close()  # type: ignore[attr-defined]
    assert (source.told[-1].more, source.told[-1].not_finite.step) == (False, 1)


def test_a_process_by_itself_logs_both_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLOW_ACCEPT", "short")
    alone = dflow.connect()
    list(Async(alone).run(lambda outcome: outcome, losses([1.0, np.nan, np.nan]), steps=40, name="mine"))
    news = [record.getMessage() for record in caplog.records]
    loss, end = news
    assert loss == "loss is nan at step 1 of run 'mine' on localhost:0; later ones of this run are not announced"
    assert end == (
        "run 'mine' has 3 of 40 steps done, and no worker takes part in it any more: their batches have ended, "
        "their programs have left the loop, or they are lost"
    )


# The batches of a loop: in order and each once, whether they are taken early, given back, or fail.


def failing() -> Iterator[int]:
    yield 0
    raise ZeroDivisionError


def test_a_batch_taken_early_is_the_next_one() -> None:
    supply = BatchSupply(iter("abc"))
    assert [supply.take_early(0), supply.take_early(0), supply.take(0), supply.take(1)] == ["a", "a", "a", "b"]
    assert [supply.take_early(2), supply.take(2), supply.take_early(3), supply.take(3)] == ["c", "c", END, END]


def test_a_batch_given_back_comes_before_one_taken_early() -> None:
    supply = BatchSupply(iter("abc"))
    first = supply.take(0)
    supply.take_early(1)
    supply.put_back(first)
    assert [supply.take_early(0), *(supply.take(number) for number in range(4))] == ["a", "a", "b", "c", END]


def test_an_error_of_a_batch_taken_early_is_raised_when_it_is_taken() -> None:
    supply = BatchSupply(failing())
    assert [supply.take(0), supply.take_early(1)] == [0, END]
    with pytest.raises(ZeroDivisionError):
        supply.take(1)
    assert supply.take(2) is END


def test_a_function_is_asked_once_for_each_batch() -> None:
    asked: list[int] = []

    def batch(number: int) -> int:
        asked.append(number)
        return -number

    supply = BatchSupply(batch)
    assert [supply.take_early(3), supply.take(3), supply.take_early(4)] == [-3, -3, -4]
    assert [supply.take(7), supply.take(4), supply.take_early(9)] == [-7, -4, -9]  # of other claims
    assert asked == [3, 4, 7, 9]


def test_arrays_taken_early_are_copies() -> None:
    memory = np.zeros(2)
    given: Iterator[Any] = ({"x": memory, "n": number} for number in itertools.count())
    supply = BatchSupply(given)
    early = supply.take_early(0)
    memory[:] = 1
    assert supply.take(0) is early
    assert (early["x"].tolist(), early["n"]) == ([0.0, 0.0], 0)
    with pytest.raises(ValueError, match="read-only"):  # what a step changes would not be what was looked up early
        early["x"] += 1
