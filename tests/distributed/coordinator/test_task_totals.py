from typing import Any

import jax.numpy as jnp

import dflow
from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.coordinator.coordinator_part import Received
from dflow.distributed.coordinator.membership import ReleaseTask
from dflow.distributed.coordinator.task_totals import OTHERS, TaskTotals, largest
from dflow.distributed.wire.messages.roster import EdgeTraffic, Heartbeat
from dflow.distributed.wire.messages.status import GetStatus, PartCosts
from tests.distributed.waiting import until

PS = "/job:ps/task:0"
UNUSED: Any = None


class Totals(TaskTotals):
    def hear(self, life: int, *heartbeats: Heartbeat) -> None:
        for heartbeat in heartbeats:
            self.on_heartbeat(heartbeat, Received(0.0, 0, 0, life, UNUSED))

    def told(self, what: str) -> Any:
        return self.status(UNUSED)[what]


def sent(values: int) -> Heartbeat:
    return Heartbeat(PS, (edge(values),) if values else ())


def edge(values: int) -> EdgeTraffic:
    return EdgeTraffic("w", "ps:0", "worker:0", values, 4 * values, messages=2 * values)


def test_traffic_of_a_task_that_left_is_added_to_that_of_its_successor() -> None:
    totals = Totals()
    totals.hear(1, sent(1), sent(3), sent(0))
    assert totals.told("traffic") == (edge(3),), "a newer report takes the place of the last"
    totals.on_leave([ReleaseTask(PS, 1, "killed")], 0.0, UNUSED)
    totals.hear(2, sent(4))
    for _ in range(2):
        assert totals.told("traffic") == (edge(7),)
        totals.on_leave([ReleaseTask(PS, 2, "killed")], 0.0, UNUSED)


def test_the_largest_edges_are_told_and_the_others_in_sum() -> None:
    edges = [EdgeTraffic(f"e{n}", f"worker:{n % 2}", "ps:0", 1, n) for n in range(6)]
    assert largest(edges, 6) == tuple(edges)
    assert largest(edges, 2) == (
        edges[5],
        edges[4],
        EdgeTraffic(OTHERS, "worker:1", "ps:0", 2, 4),
        EdgeTraffic(OTHERS, "worker:0", "ps:0", 2, 2),
    )


def beat(steps: int, processor_s: float, wakeups: int) -> Heartbeat:
    return Heartbeat(PS, steps=steps, processor_s=processor_s, wakeups=wakeups)


def test_costs_are_counted_from_the_first_part_of_each_process() -> None:
    totals = Totals()
    totals.hear(1, beat(0, 5.0, 900), beat(1, 7.0, 1000))
    assert totals.told("costs") == ()
    totals.hear(1, beat(1, 7.5, 1001), beat(101, 8.0, 1501))
    assert totals.told("costs") == (PartCosts(PS, 100, 1.0, 501),)
    totals.hear(2, beat(3, 0.5, 5))
    assert totals.told("costs") == ()
    totals.hear(2, beat(5, 0.75, 7))
    assert totals.told("costs") == (PartCosts(PS, 2, 0.25, 2),)


def test_the_tasks_of_a_cluster_report_their_costs(worker: Cluster) -> None:
    with worker.parameter_servers():
        w = dflow.Variable(lambda: jnp.zeros(3), name="w")
    step, found = dflow.jit(lambda: w.read().sum()), dict[str, PartCosts]()

    def is_reported() -> bool:
        step()
        found.update({cost.task: cost for cost in worker.coordinator.ask(GetStatus(), 60.0).costs})
        return worker.task in found and len(found) > 1

    until(is_reported)
    assert all(cost.parts > 0 and cost.processor_s > 0 and cost.wakeups > 0 for cost in found.values())


def test_a_task_that_reports_no_time_has_no_costs() -> None:
    totals = Totals()
    totals.hear(1, *(Heartbeat(PS, steps=steps) for steps in range(3)))
    assert totals.told("costs") == ()
