from dflow.distributed.messages import EdgeTraffic
from dflow.distributed.traffic_totals import TrafficTotals


def sent(values: int) -> EdgeTraffic:
    return EdgeTraffic("w", "ps:0", "worker:0", values, 4 * values)


def test_a_newer_report_takes_the_place_of_the_last() -> None:
    traffic = TrafficTotals()
    traffic.report(1, (sent(1),))
    traffic.report(1, (sent(3),))
    traffic.report(1, ())
    assert traffic.totals() == (sent(3),)


def test_what_a_task_sent_before_it_left_is_kept_and_its_successor_adds_to_it() -> None:
    traffic = TrafficTotals()
    traffic.report(1, (sent(3),))
    traffic.leave(1)
    traffic.report(2, (sent(4),))
    assert traffic.totals() == (sent(7),)
    traffic.leave(2)
    traffic.leave(2)
    assert traffic.totals() == (sent(7),)
