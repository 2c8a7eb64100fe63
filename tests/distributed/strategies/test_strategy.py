"""What every strategy shares: the checks of `run` and the names of runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import dflow
from dflow.distributed.process.termination import TerminationGuard
from dflow.distributed.strategies.batch_supply import BatchSupply
from dflow.distributed.strategies.strategy import Strategy, arguments_of
from dflow.tracing.errors import StrategyError


class Twice(Strategy):
    """Runs each step twice, and keeps the names of its runs."""

    run_prefix = "twice"

    def __init__(self) -> None:
        self.runs: list[str] = []

    def _results(
        self, run: str, step: Callable[..., Any], batches: BatchSupply, steps: int, guard: TerminationGuard
    ) -> Iterator[Any]:
        self.runs.append(run)
        for batch in map(batches.take, range(steps)):
            yield step(*arguments_of(batch)), step(*arguments_of(batch))


def test_a_strategy_is_one_class_with_the_arguments_of_all() -> None:
    strategy = Twice()
    assert list(strategy.run(lambda a, b: a + b, [(1, 2), (3, 4), (5, 6)], steps=2)) == [(3, 3), (7, 7)]
    assert list(strategy.run(lambda a: a, [[1]], steps=1, name="mine")) == [([1], [1])]


def test_runs_without_a_name_are_numbered_for_each_strategy() -> None:
    class Again(Twice):
        """Numbers its runs apart from those of `Twice`."""

        run_prefix = "again"

    one, other = Twice(), Again()
    for strategy in (one, one, other):
        list(strategy.run(lambda a: a, [1], steps=1))
    first, second = (int(run.removeprefix("twice_")) for run in one.runs)
    assert second == first + 1
    assert other.runs == ["again_0"]


def test_a_function_gives_the_batch_of_each_number() -> None:
    assert list(Twice().run(lambda a, b: a + b, lambda number: (number, 10), steps=3)) == [(10, 10), (11, 11), (12, 12)]


def test_other_batches_are_refused_at_the_users_line() -> None:
    with pytest.raises(StrategyError, match=r"batches: expected an iterable or a function of .*, got 5"):
        list(Twice().run(lambda a: a, 5, steps=1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "strategy", [dflow.distributed.Async(dflow.connect()), dflow.distributed.Sync(dflow.connect()), Twice()]
)
def test_a_negative_number_of_steps_is_refused_at_the_users_line(strategy: Strategy) -> None:
    with pytest.raises(StrategyError, match=r"steps=-1 of a run is negative(.|\n)*test_strategy.py"):
        list(strategy.run(lambda a: a, [1], steps=-1))
