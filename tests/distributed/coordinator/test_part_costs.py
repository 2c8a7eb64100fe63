"""Costs of parts of steps: differences of a process's heartbeats, from the first one with a part."""

from __future__ import annotations

import jax.numpy as jnp

import dflow
from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.coordinator.part_costs import CostTotals
from dflow.distributed.wire.messages.roster import Heartbeat
from dflow.distributed.wire.messages.status import GetStatus, PartCosts
from tests.distributed.waiting import until

PS = "/job:ps/task:0"


def beat(steps: int, processor_s: float, wakeups: int) -> Heartbeat:
    return Heartbeat(PS, steps=steps, processor_s=processor_s, wakeups=wakeups)


def test_time_before_the_first_part_is_not_counted() -> None:
    costs = CostTotals()
    for heartbeat in (beat(0, 5.0, 900), beat(1, 7.0, 1000)):
        costs.report(1, heartbeat)
        assert costs.totals() == ()
    for heartbeat in (beat(1, 7.5, 1001), beat(101, 8.0, 1501)):
        costs.report(1, heartbeat)
    assert costs.totals() == (PartCosts(PS, 100, 1.0, 501),)


def test_a_new_process_of_the_task_replaces_the_last_one() -> None:
    costs = CostTotals()
    for heartbeat in (beat(1, 1.0, 10), beat(11, 2.0, 20)):
        costs.report(1, heartbeat)
    costs.report(2, beat(3, 0.5, 5))
    assert costs.totals() == ()
    costs.report(2, beat(5, 0.75, 7))
    assert costs.totals() == (PartCosts(PS, 2, 0.25, 2),)


def test_a_task_that_reports_no_time_has_no_costs() -> None:
    costs = CostTotals()
    for steps in range(3):
        costs.report(1, Heartbeat(PS, steps=steps))
    assert costs.totals() == ()


def test_the_tasks_of_a_cluster_report_their_costs(worker: Cluster) -> None:
    with worker.parameter_servers():
        w = dflow.Variable(lambda: jnp.zeros(3), name="w")
    step = dflow.jit(lambda: w.read().sum())
    found: dict[str, PartCosts] = {}

    def is_reported() -> bool:
        step()
        status = worker.coordinator.ask(GetStatus(), 60.0)
        found.update({cost.task: cost for cost in status.costs})
        return worker.task in found and len(found) > 1

    until(is_reported)
    for cost in found.values():
        assert cost.parts > 0
        assert cost.processor_s > 0
        assert cost.wakeups > 0
