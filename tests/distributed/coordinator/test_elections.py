from dflow.distributed.coordinator.durable_records import DurableRecords
from dflow.distributed.coordinator.elections import Elections


def test_the_first_to_ask_is_elected_and_stays_so() -> None:
    elections = Elections(DurableRecords())
    assert elections.elect("init", "a", 1)
    assert not elections.elect("init", "b", 2)
    assert elections.elect("init", "a", 1)
    assert elections.elect("summary", "b", 2)


def test_after_a_normal_end_nobody_else_is_elected() -> None:
    elections = Elections(DurableRecords())
    elections.elect("init", "a", 1)
    elections.leave(1, "finished")
    assert not elections.elect("init", "b", 2)
