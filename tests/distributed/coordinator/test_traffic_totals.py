from dflow.distributed.coordinator.traffic_totals import OTHERS, TrafficTotals, largest
from dflow.distributed.wire.messages.roster import EdgeTraffic


def sent(values: int) -> EdgeTraffic:
    return EdgeTraffic("w", "ps:0", "worker:0", values, 4 * values, messages=2 * values)


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


def test_the_largest_edges_are_told_and_the_others_in_sum() -> None:
    edges = [EdgeTraffic(f"e{n}", f"worker:{n % 2}", "ps:0", 1, n) for n in range(6)]
    assert largest(edges, 6) == tuple(edges)
    assert largest(edges, 2) == (
        edges[5],
        edges[4],
        EdgeTraffic(OTHERS, "worker:1", "ps:0", 2, 4),
        EdgeTraffic(OTHERS, "worker:0", "ps:0", 2, 2),
    )
