"""Plans go to all tasks concurrently, each with its missing programs; an error names the task that it came from."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.steps import plan_registry
from dflow.distributed.steps.plan_registration import start_registration
from dflow.distributed.steps.plan_registry import PlanRegistry
from dflow.distributed.transport.base import Reply
from dflow.distributed.wire.messages.plans import Registered, RegisterPlan
from dflow.lowering.programs import shared_exports
from dflow.lowering.programs.program import LoweredProgram
from dflow.lowering.steps.plan import Plan
from dflow.testing import MemoryCluster
from dflow.tracing.errors import DeadlineExceeded, WireError

DEADLINE_S = 60.0


def made(worker: Cluster, here: Callable[[Any], Any] = lambda x: x) -> tuple[list[dflow.Variable], Any]:
    """A variable on each task, and a step that adds the result of `here` on the worker to both."""
    with worker.parameter_servers():
        variables = [dflow.Variable(jnp.zeros(3), name=name) for name in "ab"]

    @dflow.jit
    def step(x: Any) -> None:
        added = here(x)
        for variable in variables:
            variable.assign_add(added)

    return variables, step


def test_the_worker_compiles_while_the_tasks_do(memory: MemoryCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    all_three = threading.Barrier(3, timeout=DEADLINE_S)
    owners: list[tuple[Any, str]] = [(plan_registry, "load_program"), (LoweredProgram, "compile")]
    for owner, name in owners:
        done: Any = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, done=done: (all_three.wait(), done(*given))[1])
    with closing(memory.worker(0)) as worker:
        variables, step = made(worker, lambda x: x * 2)
        step(jnp.ones(3))
        np.testing.assert_array_equal([variable.read() for variable in variables], np.full((2, 3), 2))


def test_programs_that_compute_the_same_are_exported_once(
    memory: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported: list[Any] = []
    export = shared_exports.export_program
    monkeypatch.setattr(shared_exports, "export_program", lambda *given: (exported.append(given), export(*given))[1])
    with closing(memory.worker(0)) as worker:
        variables, step = made(worker)
        step(jnp.ones(3))
        np.testing.assert_array_equal([variable.read() for variable in variables], np.ones((2, 3)))
    assert len(exported) == 1


@pytest.mark.parametrize(
    ("place", "text"),
    [((LoweredProgram, "compile"), "no such plan"), ((plan_registry, "load_program"), "/job:ps/task:0: no such plan")],
    ids=["here", "on a task"],
)
def test_an_error_of_compiling_is_raised_with_the_name_of_the_task(
    memory: MemoryCluster, monkeypatch: pytest.MonkeyPatch, place: tuple[Any, str], text: str
) -> None:
    def refuse(*_: Any) -> Any:
        raise WireError("no such plan")

    monkeypatch.setattr(*place, refuse)
    with closing(memory.worker(0)) as worker:
        _, step = made(worker, lambda x: x * 2)
        with pytest.raises(WireError, match=f"^{text}"):
            step(jnp.ones(3))


def test_a_program_that_a_task_has_is_not_sent_again(memory: MemoryCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[int, ...]] = []
    register = PlanRegistry.register

    def noted(self: PlanRegistry, message: Any, *given: Any) -> Any:
        sizes.append(message.program_sizes)
        return register(self, message, *given)

    def run(worker: Cluster) -> list[dflow.Variable]:
        variables, step = made(worker)
        step(jnp.ones(3))
        return variables

    monkeypatch.setattr(PlanRegistry, "register", noted)
    with closing(memory.worker(0)) as first, closing(memory.worker(1)) as second:
        run(first)
        variables = run(second)  # another line, which makes no other program
        np.testing.assert_array_equal(variables[0], [2, 2, 2])
    assert sorted(min(each) > 0 for each in sizes[:4]) == [False, False, True, True]
    assert [min(each) > 0 for each in sizes[4:]] == [False, False]


@pytest.mark.parametrize(("third", "fact"), [(Registered(7), ""), (Registered(missing=(1,)), r"lacks programs \[1\]")])
def test_a_program_that_a_task_has_dropped_meanwhile_is_sent_too(third: Registered, fact: str) -> None:
    answers, sent = [Registered(missing=(0,)), Registered(missing=(1,)), third], list[bytes]()

    class Task:
        name = "/job:ps/task:0"

        def start(self, message: RegisterPlan, payload: bytes = b"", *, on_reply: Any) -> None:
            sent.append(payload)
            assert sum(message.program_sizes) == len(payload)
            on_reply(Reply(answers.pop(0), memoryview(b"")))

    lowered: Any = SimpleNamespace(functions=[b"one", b"two"], plan=Plan(Task.name, 0, ()))
    handle = start_registration(Task(), lowered, lambda program: program)  # type: ignore[arg-type, return-value]
    if fact:
        with pytest.raises(WireError, match=fact):
            handle(DEADLINE_S)
    else:
        assert handle(DEADLINE_S) == 7
    assert sent == [b"", b"one", b"onetwo"]


def test_a_task_that_does_not_answer_is_named(memory: MemoryCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(PlanRegistry, "register", lambda *_: (released.wait(DEADLINE_S), (1, ()))[1])
    with closing(memory.worker(0)) as worker:
        _, step = made(worker)
        worker.requests.timeout_s = 0.2
        with pytest.raises(DeadlineExceeded, match=r"ps:0 did not register a plan within 0\.2 s; ps:0"):
            step(jnp.ones(3))
        released.set()
