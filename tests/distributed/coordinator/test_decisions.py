from dflow.distributed.coordinator.decisions import Decisions
from dflow.distributed.coordinator.durable_records import DurableRecords


def test_the_first_value_counts_and_outlives_the_coordinator() -> None:
    records = DurableRecords()
    decisions = Decisions(records)
    assert decisions.decide("end", None) is None
    assert decisions.decide("end", "") == ""
    assert decisions.decide("end", "nan") == ""
    assert decisions.decide("end", None) == ""
    assert decisions.decide("another", "nan") == "nan"
    rows = {change.key: change.value for change in records.take_changes()}
    again = Decisions(DurableRecords({key: value for key, value in rows.items() if value is not None}))
    assert (again.decide("end", "nan"), again.decide("another", "")) == ("", "nan")
