from typing import Any

from dflow.distributed.coordinator.coordinator_part import Received
from dflow.distributed.coordinator.decisions import Decisions
from dflow.distributed.coordinator.durable_records import DurableRecords, apply_changes
from dflow.distributed.coordinator.membership import ReleaseTask
from dflow.distributed.wire.messages.coordination import DecideOnce, ElectOnce

W0, W1 = "/job:worker/task:0", "/job:worker/task:1"


class Asked:
    """The decisions of a coordinator; `restart` makes those of its next process."""

    def __init__(self) -> None:
        self.records = DurableRecords()
        self.decisions = Decisions(self.records)

    def restart(self) -> None:
        rows: dict[str, bytes] = {}
        apply_changes(rows, self.records.take_changes())
        self.decisions = Decisions(DurableRecords(rows))

    def ask(self, message: DecideOnce | ElectOnce, life: int = 0) -> Any:
        unused: Any = None
        received = Received(0.0, 0, 0, life, unused)
        return self.decisions.requests.handlers[type(message)](self.decisions, message, received)

    def decide(self, what: str, value: str | None) -> str | None:
        return self.ask(DecideOnce(what, W0, value)).value  # type: ignore[no-any-return]

    def elect(self, what: str, task: str, life: int) -> bool:
        return self.ask(ElectOnce(what, task), life).elected  # type: ignore[no-any-return]


def test_the_first_value_counts_and_outlives_the_coordinator() -> None:
    asked = Asked()
    assert [asked.decide("end", value) for value in (None, "", "nan", None)] == [None, "", "", ""]
    assert asked.decide("another", "nan") == "nan"
    asked.restart()
    assert (asked.decide("end", "nan"), asked.decide("another", "")) == ("", "nan")


def test_the_first_to_ask_is_elected_until_it_fails() -> None:
    unused: Any = None
    for reason, is_free in (("finished", False), ("killed", True)):
        asked = Asked()
        assert [asked.elect("init", task, life) for task, life in ((W0, 1), (W1, 2), (W0, 1))] == [True, False, True]
        assert asked.elect("summary", W1, 2)
        asked.decisions.on_leave([ReleaseTask(W0, 1, reason)], 0.0, unused)
        asked.restart()
        assert asked.elect("init", W1, 2) == is_free
