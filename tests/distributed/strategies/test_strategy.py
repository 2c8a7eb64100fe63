"""What every strategy shares: the checks of `run` and the names of runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import dflow
from dflow.distributed.strategies.strategy import Strategy
from dflow.tracing.errors import StrategyError


class Counting(Strategy):
    """Yields each result with the number of its step, and keeps the names of its runs."""

    run_prefix = "counting"

    def __init__(self) -> None:
        self.runs: list[str] = []

    def results(self, run: dflow.distributed.StrategyRun) -> Iterator[Any]:
        self.runs.append(run.name)
        for number, outcome in enumerate(run.calls(range(run.steps))):
            yield outcome, number


def test_a_strategy_is_one_class_with_the_arguments_of_all() -> None:
    strategy = Counting()
    assert list(strategy.run(lambda a, b: a + b, [(1, 2), (3, 4), (5, 6)], steps=2)) == [(3, 0), (7, 1)]
    assert list(strategy.run(lambda a: a, [[1]], steps=1, name="mine")) == [([1], 0)]


def test_runs_without_a_name_are_numbered_for_each_strategy() -> None:
    class Again(Counting):
        """Numbers its runs apart from those of `Counting`."""

        run_prefix = "again"

    one, other = Counting(), Again()
    for strategy in (one, one, other):
        list(strategy.run(lambda a: a, [1], steps=1))
    first, second = (int(run.removeprefix("counting_")) for run in one.runs)
    assert second == first + 1
    assert other.runs == ["again_0"]


def test_a_function_gives_the_batch_of_each_number() -> None:
    assert list(Counting().run(lambda a, b: a + b, lambda number: (number, 10), steps=3)) == [(10, 0), (11, 1), (12, 2)]


def test_the_batches_may_end_before_the_steps() -> None:
    assert list(Counting().run(lambda a: a, [5, 6], steps=9)) == [(5, 0), (6, 1)]


def test_a_strategy_without_results_is_refused() -> None:
    with pytest.raises(StrategyError, match="Strategy: expected a method results, got none"):
        list(Strategy(dflow.connect()).run(lambda a: a, [1], steps=1))


def test_other_batches_are_refused_at_the_users_line() -> None:
    with pytest.raises(StrategyError, match=r"batches: expected an iterable or a function of .*, got 5"):
        list(Counting().run(lambda a: a, 5, steps=1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "strategy", [dflow.distributed.Async(dflow.connect()), dflow.distributed.Sync(dflow.connect()), Counting()]
)
def test_a_negative_number_of_steps_is_refused_at_the_users_line(strategy: Strategy) -> None:
    with pytest.raises(StrategyError, match=r"steps=-1 of a run is negative(.|\n)*test_strategy.py"):
        list(strategy.run(lambda a: a, [1], steps=-1))
