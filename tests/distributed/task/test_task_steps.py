"""A task's parts of steps, in memory and over sockets."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from dflow.distributed.task.task_server import TaskServer, TaskSettings
from dflow.distributed.wire.codec import encode_array
from dflow.distributed.wire.messages.basic import Ok
from dflow.distributed.wire.messages.plans import CancelStep, Registered, RegisterPlan, RunPlan
from dflow.distributed.wire.messages.roster import Roster, TaskInfo
from dflow.distributed.wire.messages.status import GetStatus
from dflow.distributed.wire.messages.transfers import Values
from dflow.distributed.wire.messages.variables import ReadVariables
from dflow.lowering.programs.program import export_program
from dflow.lowering.queues.channel import StepId
from dflow.lowering.steps.plan import Call, Item, Plan, Recv, Send
from dflow.tracing import errors
from dflow.tracing.ir.types import ArrayType
from tests.distributed.task.served_tasks import CLIENT, ONES, PS, WORKER, Cluster, MakeCluster, create, read, roster
from tests.distributed.transports import DEADLINE_S
from tests.distributed.waiting import until
from tests.lowering.flat_programs import flat_program

F32 = ArrayType(np.dtype("float32"), (3,))
STEPS = itertools.count(1)


def add_in_place(state: jax.Array, delta: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A program that adds an operand to a variable, and returns the new value too."""
    return state + delta, state + delta


def register(
    cluster: Cluster, *items: Item, registers: int = 4, programs: tuple[bytes, ...] = (), task: str = PS, **fields: Any
) -> int:
    plan = msgspec.msgpack.encode(Plan(task, registers, items, **fields))
    sizes = tuple(len(program) for program in programs)
    reply = cluster.ask(RegisterPlan(plan, sizes), b"".join(programs)).message
    assert isinstance(reply, Registered)
    return reply.handle


def accumulate() -> bytes:
    return export_program(add_in_place, (F32, F32))


def serve_gradients(cluster: Cluster) -> int:
    """The plan of a parameter server: receive a gradient, add it, send the new value back."""
    return register(
        cluster,
        Recv("grad", WORKER, (0,), (("f32", (3,)),)),
        Call(0, writes=("w",), reads=(), takes=(0,), gives=(1,), asynchronous=True),
        Send("value", WORKER, (1,)),
        programs=(accumulate(),),
    )


def start(server: TaskServer, handle: int, step: StepId, *feeds: Any) -> Future[tuple[jax.Array, ...]]:
    """Run a plan of the task itself; the future has its fetches or its error."""
    done: Future[tuple[jax.Array, ...]] = Future()

    def on_done(outcome: tuple[jax.Array, ...] | BaseException) -> None:
        done.set_exception(outcome) if isinstance(outcome, BaseException) else done.set_result(outcome)

    server.runs.run(server.plans.get(handle), step, feeds, on_done)
    return done


def next_step(origin: str = CLIENT) -> StepId:
    return StepId(origin, next(STEPS))


def run_plan(step: StepId, handle: int) -> RunPlan:
    return RunPlan(handle, step.origin, step.number)


def send_and_receive(cluster: Cluster) -> int:
    """The plan of a worker: send a gradient, wait for the new value."""
    plan = Plan(
        WORKER, 2, (Send("grad", PS, (0,)), Recv("value", PS, (1,), (("f32", (3,)),))), feeds=(0,), fetches=(1,)
    )
    return cluster.worker.plans.add(plan, ())


def test_a_step_over_two_tasks(cluster: Cluster) -> None:
    create(cluster)
    remote, local = serve_gradients(cluster), send_and_receive(cluster)
    for count in range(1, 6):
        step = next_step(WORKER)
        pending = cluster.worker.peer(PS).start(run_plan(step, remote))
        (value,) = start(cluster.worker, local, step, jnp.ones(3)).result(DEADLINE_S)
        assert pending.wait(DEADLINE_S).message == Ok()
        assert value.tolist() == [1.0 + count] * 3
    assert read(cluster) == [6, 6, 6]
    (sent,) = cluster.worker.traffic()
    assert (sent.edge, sent.source, sent.destination, sent.values, sent.size_bytes) == ("grad", WORKER, PS, 5, 60)
    assert cluster.ps.traffic()[0].destination == WORKER
    statistics = cluster.ps.statistics()
    assert (statistics.plans, statistics.running) == (1, 0)
    assert (statistics.rendezvous.open_steps, statistics.rendezvous.delivered) == (0, 5)


def test_a_task_may_send_to_itself(cluster: Cluster) -> None:
    plan = Plan(PS, 2, (Send("e", PS, (0,)), Recv("e", PS, (1,), (("f32", (3,)),))), feeds=(0,), fetches=(1,))
    handle = cluster.ps.plans.add(plan, ())
    (value,) = start(cluster.ps, handle, next_step(PS), jnp.ones(3)).result(DEADLINE_S)
    assert value.tolist() == [1, 1, 1]
    assert cluster.ps.traffic() == ()


def test_a_cancelled_step_ends_at_once_and_does_not_come_back(cluster: Cluster) -> None:
    create(cluster)
    handle, step = serve_gradients(cluster), next_step()
    pending = cluster.client.start(run_plan(step, handle))
    cluster.ask(CancelStep(step.origin, step.number, "the worker gave up"))
    with pytest.raises(errors.StepCancelled, match=f"step {step.index} of chief:0 was cancelled: the worker gave up"):
        pending.wait(DEADLINE_S)
    with pytest.raises(errors.StepCancelled, match="has ended here, or was cancelled"):
        cluster.ask(run_plan(step, handle))
    cluster.client.notify(Values(step.origin, step.number, "grad"), encode_array(ONES))
    assert read(cluster) == [1, 1, 1]
    assert cluster.ps.statistics().rendezvous.open_steps == 0


def test_a_step_cancelled_while_it_runs_does_nothing_more(cluster: Cluster) -> None:
    create(cluster)
    step = next_step()

    def add_and_cancel(w: jax.Array, x: jax.Array) -> list[jax.Array]:
        cluster.ps.runs.cancel(step, errors.StepCancelled("the worker gave up"))
        return [w + x]

    adds = (Call(0, ("w",), (), (0,), ()), Call(1, ("w",), (), (0,), (), after=(0,)))
    programs = [flat_program(add_and_cancel, 1), flat_program(lambda w, x: [w + x], 1)]
    handle = cluster.ps.plans.add(Plan(PS, 1, adds, feeds=(0,), fetches=()), programs)
    with pytest.raises(errors.StepCancelled, match="the worker gave up"):
        start(cluster.ps, handle, step, jnp.ones(3)).result(DEADLINE_S)
    assert read(cluster) == [2, 2, 2]


def test_a_malformed_value_fails_its_step(cluster: Cluster) -> None:
    create(cluster)
    handle, step = serve_gradients(cluster), next_step()
    pending = cluster.client.start(run_plan(step, handle))
    cluster.client.notify(Values(step.origin, step.number, "grad"), bytes(11))
    with pytest.raises(errors.WireError, match=r"'grad' in step .* the values take 12 bytes, but 11 bytes came"):
        pending.wait(DEADLINE_S)
    assert read(cluster) == [1, 1, 1]


def test_a_wait_ends_at_its_deadline_and_names_who_is_missing(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(TaskSettings(wait_timeout_s=0.05))
    create(cluster)
    step = next_step()
    expected = rf"ps:0 waited 0\.05 s in step {step.index} of chief:0 for the value 'grad', which worker:0 should"
    with pytest.raises(errors.DeadlineExceeded, match=expected):
        cluster.ask(run_plan(step, serve_gradients(cluster)))


def test_losing_the_origin_cancels_its_steps(cluster: Cluster) -> None:
    create(cluster)
    handle, step = serve_gradients(cluster), next_step(WORKER)
    pending = cluster.worker.peer(PS).start(run_plan(step, handle))
    cluster.worker.peer(PS).call(ReadVariables(("w",)), timeout_s=DEADLINE_S)
    cluster.ps.roster_changed(roster(cluster.ps, cluster.other, left={WORKER: "no heartbeat for 10 s"}))
    with pytest.raises(errors.TaskLost, match=f"{WORKER} has left the cluster: no heartbeat for 10 s"):
        pending.wait(DEADLINE_S)
    with pytest.raises(errors.TaskLost):
        start(cluster.ps, handle, next_step(WORKER))
    cluster.ps.roster_changed(roster(cluster.ps, cluster.worker, cluster.other))
    back = cluster.reach_ps(WORKER)
    step = next_step(WORKER)
    again = back.start(run_plan(step, handle))
    cluster.client.notify(Values(step.origin, step.number, "grad"), encode_array(ONES))
    assert again.wait(DEADLINE_S).message == Ok()


def test_a_task_that_started_anew_is_a_new_task(cluster: Cluster) -> None:
    create(cluster)
    handle, step = serve_gradients(cluster), next_step(WORKER)
    pending = cluster.worker.peer(PS).start(run_plan(step, handle))
    cluster.worker.peer(PS).call(ReadVariables(("w",)), timeout_s=DEADLINE_S)
    anew = TaskInfo(WORKER, cluster.worker.address, joined_at_s=5.0, life=1)
    cluster.ps.roster_changed(Roster((TaskInfo(WORKER, "", 0.0, 4.0, "killed"), anew), ()))
    with pytest.raises(errors.TaskLost, match=f"{WORKER} has left the cluster: it was started again"):
        pending.wait(DEADLINE_S)


def test_a_lost_connection_ends_the_waits_for_its_values(cluster: Cluster) -> None:
    create(cluster)
    handle, step = serve_gradients(cluster), next_step()
    link = cluster.worker.peer(PS)
    link.call(ReadVariables(("w",)), timeout_s=DEADLINE_S)
    pending = cluster.client.start(run_plan(step, handle))
    until(lambda: cluster.ps.statistics().rendezvous.waiters == 1)
    link.close("killed")
    with pytest.raises(errors.TaskLost, match=f"connection between {PS} and {WORKER} has ended: the other side"):
        pending.wait(DEADLINE_S)
    assert cluster.worker.peer(PS).call(ReadVariables(("w",)), timeout_s=DEADLINE_S)


def test_sending_to_a_task_that_is_not_there_fails_the_plan(cluster: Cluster) -> None:
    plan = Plan(WORKER, 1, (Send("e", "/job:ps/task:9", (0,)),), feeds=(0,))
    done = start(cluster.worker, cluster.worker.plans.add(plan, ()), next_step(), jnp.ones(3))
    with pytest.raises(errors.TaskLost, match=f"/job:ps/task:9 is not in the cluster; these tasks are: .*{PS}"):
        done.result(DEADLINE_S)


def test_closing_a_task_fails_what_it_has_not_begun(cluster: Cluster) -> None:
    create(cluster)
    began, go_on = threading.Event(), threading.Event()

    def slow(w: jax.Array, x: jax.Array) -> list[jax.Array]:
        began.set()
        assert go_on.wait(DEADLINE_S)
        return [w + x]

    plan = Plan(PS, 1, (Call(0, ("w",), (), (0,), ()),), feeds=(0,), fetches=())
    handle = cluster.ps.plans.add(plan, [flat_program(slow, 1)])
    running = [start(cluster.ps, handle, next_step(), jnp.ones(3)) for _ in range(3)]
    assert began.wait(DEADLINE_S)
    cluster.ps.close()
    for done in running[1:]:
        with pytest.raises(errors.TaskLost, match="it closes"):
            done.result(DEADLINE_S)
    go_on.set()
    with pytest.raises(errors.TaskLost, match="it closes"):
        running[0].result(DEADLINE_S)


def test_no_thread_waits_for_a_plan_to_end(cluster: Cluster) -> None:
    """Far more plans than threads wait for values, and the task still answers requests."""
    create(cluster)
    handle = serve_gradients(cluster)
    steps = [next_step() for _ in range(50)]
    running = [cluster.client.start(run_plan(step, handle)) for step in steps]
    assert read(cluster) == [1, 1, 1]
    assert cluster.ps.statistics().running == 50
    for step in steps:
        cluster.client.notify(CancelStep(step.origin, step.number, "enough"))
    for pending in running:
        with pytest.raises(errors.StepCancelled, match="enough"):
            pending.wait(DEADLINE_S)


def test_an_asynchronous_plan_is_run_by_the_thread_that_brings_its_values(cluster: Cluster) -> None:
    create(cluster)
    remote, local = serve_gradients(cluster), send_and_receive(cluster)
    run_step(cluster, remote, local)  # the first run has threads, since programs may be compiled again
    before = threads_of(PS)
    for _ in range(3):
        run_step(cluster, remote, local)
    assert threads_of(PS) == before


def test_a_reader_does_not_wait_for_a_variable_that_a_program_has(cluster: Cluster) -> None:
    """Values of another step arrive while a program uses the variable that an asynchronous plan is to change."""
    create(cluster)
    empty, handle, step = register(cluster, programs=()), serve_gradients(cluster), next_step()
    entered, leave = threading.Event(), threading.Event()

    def hold(w: jax.Array) -> list[jax.Array]:
        entered.set()
        assert leave.wait(DEADLINE_S)
        return [w]

    holding = Plan(PS, 0, (Call(0, ("w",), (), (), ()),))
    held = start(cluster.ps, cluster.ps.plans.add(holding, [flat_program(hold, 1)]), next_step(PS))
    assert entered.wait(DEADLINE_S)
    adding = cluster.client.start(run_plan(step, handle))
    cluster.client.notify(Values(step.origin, step.number, "grad"), encode_array(ONES))
    # Over the same connection, so the answer shows that the reader continues.
    assert cluster.ask(run_plan(next_step(), empty)).message == Ok()
    leave.set()
    held.result(DEADLINE_S)
    adding.wait(DEADLINE_S)
    assert read(cluster) == [2, 2, 2]


def run_step(cluster: Cluster, remote: int, local: int) -> None:
    step = next_step(WORKER)
    pending = cluster.worker.peer(PS).start(run_plan(step, remote))
    start(cluster.worker, local, step, jnp.ones(3)).result(DEADLINE_S)
    pending.wait(DEADLINE_S)


def threads_of(task: str) -> int:
    return sum(thread.name.startswith(f"dflow {task}_") for thread in threading.enumerate())


def test_values_go_back_over_the_connection_that_the_step_came_by(cluster: Cluster) -> None:
    create(cluster)
    remote, local = serve_gradients(cluster), send_and_receive(cluster)
    step = next_step(WORKER)
    pending = cluster.worker.peer(PS).start(run_plan(step, remote))
    start(cluster.worker, local, step, jnp.ones(3)).result(DEADLINE_S)
    pending.wait(DEADLINE_S)
    assert cluster.ps.peer(WORKER).name == WORKER
    cluster.worker.peer(PS).close("test")
    with pytest.raises(errors.DflowError):
        cluster.ps.peer(WORKER).call(GetStatus(), timeout_s=DEADLINE_S)
