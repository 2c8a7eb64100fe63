"""The record of applied steps: any attempts at steps, interleaved, make each change once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflow.lowering.state.applied_steps import AppliedSteps, StepAttempt, StepOfRun
from dflow.tracing.errors import StrategyError
from tests.effort import examples

#: The changes of each step, in the order of the program, each of the state under some keys.
CHANGES = (("a",), ("a", "b"), ("b",), ("a",))


class Attempt:
    """An attempt that makes one change with each call of `go_on`, and ends after the last one."""

    def __init__(self, applied: AppliedSteps, step: StepOfRun, made: Counter[tuple[StepOfRun, int]]) -> None:
        self.step, self.made, self.next = step, made, 0
        self.attempt: StepAttempt = applied.attempt(step)

    def go_on(self, fails: bool) -> bool:
        """Return whether the attempt is over: it failed or has ended."""
        change = (self.step, self.next)

        def make() -> Sequence[None]:
            if fails:
                raise ZeroDivisionError
            self.made[change] += 1
            return ()

        try:
            self.attempt.once(CHANGES[self.next], make, tuple)
        except ZeroDivisionError:
            return True
        self.next += 1
        if self.next == len(CHANGES):
            self.attempt.ended()
        return self.next == len(CHANGES)


@settings(max_examples=examples(200))
@given(st.data())
def test_each_change_of_a_step_is_made_once(data: st.DataObject) -> None:
    applied, made = AppliedSteps(), Counter[tuple[StepOfRun, int]]()
    steps = [StepOfRun("run", 0), StepOfRun("run", 1), StepOfRun("run", 0, 1), StepOfRun("other", 0)]
    open_attempts: list[Attempt] = []
    ended = set[StepOfRun]()
    for _ in range(data.draw(st.integers(0, 40))):
        what = data.draw(st.sampled_from(["begin", "go on", "fail", "abandon"]))
        if what == "begin":
            open_attempts.append(Attempt(applied, data.draw(st.sampled_from(steps)), made))
        elif open_attempts:
            attempt = data.draw(st.sampled_from(open_attempts))
            is_over = what == "abandon" or attempt.go_on(what == "fail")
            if is_over:
                open_attempts.remove(attempt)
            if attempt.next == len(CHANGES):
                ended.add(attempt.step)
    assert all(count == 1 for count in made.values())
    assert {(step, change) for step in ended for change in range(len(CHANGES))} <= {*made}


def test_a_change_of_variables_that_an_earlier_attempt_changed_in_part_is_refused() -> None:
    applied = AppliedSteps()
    applied.attempt(StepOfRun("run", 3)).once(["a"], tuple, tuple)
    with pytest.raises(StrategyError, match=r"step 3 of run 'run' .* updated \['a'\]") as raised:
        applied.attempt(StepOfRun("run", 3)).once(["a", "b"], tuple, tuple)
    assert "let all workers run the same function in a step" in str(raised.value)
