"""Decisions of a trainer while the coordinator is away."""

from __future__ import annotations

from typing import Any, cast

import pytest

from dflow.distributed.client.coordinator_client import AGREE_S, CoordinatorClient
from dflow.distributed.wire.messages.coordination import DecideOnce, ElectOnce
from dflow.tracing.errors import DeadlineExceeded
from dflow.trainer.shared_decisions import KNOWN_S, SharedDecisions


class Away:
    """A cluster whose coordinator is away for longer than any request waits; it keeps the timeouts."""

    is_standalone = False

    def __init__(self) -> None:
        self.timeouts_s: list[float | None] = []

    def decide(self, what: str, value: str | None, timeout_s: float | None = None) -> str | None:
        self.timeouts_s.append(timeout_s)
        raise DeadlineExceeded("the coordinator did not answer")


def test_an_optional_look_finds_nothing_while_the_coordinator_is_away() -> None:
    cluster = Away()
    decisions = SharedDecisions(cast(Any, cluster), "run", is_together=False)
    assert decisions.known_reason("after step 5") == ""
    with pytest.raises(DeadlineExceeded):
        decisions.reason("after step 5", "nan")
    assert cluster.timeouts_s == [KNOWN_S, None]


@pytest.mark.parametrize("message", [DecideOnce("end", "", "nan"), ElectOnce("saver", "")])
def test_a_question_that_a_worker_cannot_go_on_without_waits_through_a_restart(message: Any) -> None:
    class Session:
        def ask(self, message: Any, timeout_s: float) -> float:
            return timeout_s

    client = CoordinatorClient.__new__(CoordinatorClient)
    client.task, client.session = "/job:worker/task:0", cast(Any, Session())
    assert client.ask(message) == AGREE_S
