"""Variables that are created together: few messages, the values of one process, and errors with the user's lines."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow
from dflow.distributed.cluster import variable_batch
from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.transport.base import Peer
from dflow.distributed.wire.messages.placement import PlaceVariables
from dflow.distributed.wire.messages.variables import CreateVariables, ReadVariables, WriteVariable
from dflow.lowering.programs import initial_ops
from dflow.lowering.programs.initial_ops import InitialOps
from dflow.testing import MemoryCluster
from dflow.tracing.errors import TaskLost, VariableError
from tests.user_line import line_of

KEYS = list(jax.random.split(jax.random.key(5), 12))


Sent = list[Any]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    found: Sent = []
    start = Peer.start

    def noted(self: Peer, message: Any, payload: Any = b"", on_reply: Any = None) -> Any:
        found.append(message)
        return start(self, message, payload, on_reply)

    monkeypatch.setattr(Peer, "start", noted)
    return found


def questions(sent: Sent) -> Counter[str]:
    """Number of messages for the creation of variables, by type."""
    kinds = (CreateVariables, PlaceVariables)
    return Counter(type(message).__name__ for message in sent if isinstance(message, kinds))


def held(memory: MemoryCluster) -> set[str]:
    return {name for task in memory.tasks.values() for name in task.server.store.table.entries}


# Few messages.


def model(cluster: Cluster) -> tuple[list[dflow.Variable], dflow.Optimizer]:
    with cluster.parameter_servers():
        variables = [
            dflow.Variable(lambda: jax.random.normal(key, (9, 9)) * 0.02 * n, name=f"w{n}")  # noqa: B023
            for n, key in enumerate(KEYS)
        ]
        return variables, dflow.Optimizer(optax.adam(1e-3), variables, name="adam")


def test_a_model_and_its_slots_take_few_messages(worker: Cluster, sent: Sent) -> None:
    model(worker)
    # For the variables, then for the slots: their tasks, the existing ones, and the values of the others.
    assert questions(sent) == {"PlaceVariables": 2, "CreateVariables": 2 * 2 * 2}


def test_a_process_that_joins_late_asks_and_computes_nothing(
    memory: MemoryCluster, worker: Cluster, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = model(worker)
    sent.clear()
    ran: list[Any] = []
    monkeypatch.setattr(InitialOps, "__call__", ran.append)
    with closing(memory.worker(1)) as late:
        found, optimizer = model(late)
        assert questions(sent) == {"PlaceVariables": 2, "CreateVariables": 2 * 2}
        assert not ran
        for here, there in zip(first, found, strict=True):
            np.testing.assert_array_equal(here, there)
        assert int(optimizer.slots[0].count) == 0


def test_slots_that_begin_as_the_parameters_are_read_from_them_by_the_first_worker_alone(
    memory: MemoryCluster, worker: Cluster, sent: Sent
) -> None:
    doubling = optax.GradientTransformation(
        init=lambda parameters: {"twice": jax.tree.map(lambda p: 2 * p, parameters), "count": jnp.zeros(())},
        update=lambda gradients, state, parameters=None: (gradients, state),
    )

    def made(cluster: Cluster) -> dflow.Optimizer:
        with cluster.parameter_servers():
            variables = [dflow.Variable(jnp.full(2, float(n)), name=f"v{n}") for n in range(3)]
            return dflow.Optimizer(doubling, variables, name="doubling")

    first = made(worker)
    np.testing.assert_array_equal(dflow.read(first.slots["twice"]), [[0, 0], [2, 2], [4, 4]])
    worker.requests.ask(str(first.slots["twice"][1].device), WriteVariable("v1", "float32", (2,)), bytes(8))
    sent.clear()
    with closing(memory.worker(1)) as late:
        slots = made(late).slots
        assert not [message for message in sent if isinstance(message, ReadVariables)]
        np.testing.assert_array_equal(slots["twice"][1], [2, 2])


def test_a_message_has_a_bound(worker: Cluster, sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variable_batch, "MOST_VARIABLES", 5)
    with worker.parameter_servers():
        variables = [dflow.Variable(jnp.full(3, n), name=f"v{n}") for n in range(24)]
    assert max(len(message.variables) for message in sent if isinstance(message, CreateVariables)) == 5
    assert [int(variable[0]) for variable in variables] == list(range(24))


def test_a_full_batch_is_created_before_its_block_ends(
    memory: MemoryCluster, worker: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(variable_batch, "FULL_BYTES", 100)
    with worker.parameter_servers():
        for n in range(3):
            dflow.Variable(jnp.zeros(12), name=f"v{n}")
        assert held(memory) == {"v0", "v1", "v2"}
        dflow.Variable(jnp.zeros(12), name="v3")
        assert held(memory) == {"v0", "v1", "v2"}
    assert held(memory) == {"v0", "v1", "v2", "v3"}


# The values of one process.


def test_programs_are_sent_once_for_initialisers_that_differ_in_numbers(
    worker: Cluster, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(initial_ops, "SENT_BYTES", 0)
    exported: list[Any] = []
    export = initial_ops.export_program
    monkeypatch.setattr(initial_ops, "export_program", lambda *args: (exported.append(args), export(*args))[1])
    variables, _ = model(worker)
    recipes = [message for message in sent if isinstance(message, CreateVariables) and message.program_sizes]
    assert len([each for each in recipes if each.variables[0].name.startswith("w")]) == len(KEYS)
    assert len(exported) <= 4
    for variable, alone in zip(variables, model(dflow.connect())[0], strict=True):
        np.testing.assert_array_equal(variable, alone)


def test_an_initialiser_sees_what_it_closes_over_as_it_was(worker: Cluster) -> None:
    row = np.ones(3, np.float32)
    with worker.parameter_servers():
        numbered = [
            dflow.Variable(lambda: jnp.full(2, number), name=f"v{number}")  # noqa: B023
            for number in range(3)
        ]
        copied = [
            dflow.Variable(row, name="given"),
            dflow.Variable(lambda: jnp.asarray(row) + 0, name="closed over"),
            dflow.Variable(lambda: row, name="returned"),
        ]
        row[:] = 7
    assert [int(variable[0]) for variable in numbered] == [0, 1, 2]
    for variable in copied:
        np.testing.assert_array_equal(variable, [1, 1, 1])


# The time of creation.


USES: dict[str, Callable[[Any], Any]] = {
    "read": lambda v: v.read(),
    "write": lambda v: v.assign(jnp.ones(3)),
    "update": lambda v: v.assign_add(jnp.ones(3)),
    "gather": lambda v: v.gather(jnp.array([0])),
    "device": lambda v: v.device,
    "key": lambda v: v.key,
    "step": lambda v: dflow.jit(v.read)(),
    "gradient": lambda v: dflow.jit(dflow.grad(lambda: jnp.sum(v * v), v))(),
    "optimizer": lambda v: dflow.Optimizer(optax.sgd(0.1, momentum=0.9), v, name="sgd"),
}


@pytest.mark.parametrize("use", USES)
def test_a_use_within_the_block_creates_what_was_made_before(memory: MemoryCluster, worker: Cluster, use: str) -> None:
    with worker.parameter_servers():
        v, _ = dflow.Variable(jnp.zeros(3), name="v"), dflow.Variable(jnp.zeros(3), name="other")
        assert repr(v) == "<Variable 'v': f32[3]>"
        assert not held(memory)
        USES[use](v)
        assert {"v", "other"} <= held(memory)
        assert v.device is not None
        assert v.device in repr(v)


def test_two_threads_make_their_own_batches(worker: Cluster) -> None:
    made: dict[int, Any] = {}
    begun = threading.Barrier(2, timeout=60)

    def make(number: int) -> None:
        with worker.parameter_servers():
            begun.wait()
            made[number] = [dflow.Variable(jnp.full(2, number), name=f"{number}.{n}") for n in range(5)]
            begun.wait()

    threads = [threading.Thread(target=make, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [[int(variable[0]) for variable in made[number]] for number in range(2)] == [[0] * 5, [1] * 5]


# Variables that cannot be created.


def test_an_error_names_the_line_and_the_others_are_created(memory: MemoryCluster, worker: Cluster) -> None:
    with worker.parameter_servers():
        dflow.Variable(jnp.zeros(2), name="taken")
    made = []
    text = r"'taken' is float32\[2\] and was asked for as float32\[3\]"
    with pytest.raises(VariableError, match=text) as caught, worker.parameter_servers():  # noqa: PT012
        made.append(dflow.Variable(jnp.zeros(3), name="before"))
        made.append(dflow.Variable(jnp.zeros(3), name="taken"))
        made.append(dflow.Variable(jnp.zeros(3), name="after"))
    assert line_of(caught.value, __file__) == 'made.append(dflow.Variable(jnp.zeros(3), name="taken"))'
    assert held(memory) == {"taken", "before", "after"}
    np.testing.assert_array_equal(made[2], [0, 0, 0])
    with pytest.raises(VariableError, match="'taken' is float32") as again:
        made[1].read()
    assert line_of(again.value, __file__) == line_of(caught.value, __file__)


def test_a_block_that_fails_creates_nothing_until_a_variable_is_used(memory: MemoryCluster, worker: Cluster) -> None:
    made = []
    with pytest.raises(ZeroDivisionError), worker.parameter_servers():  # noqa: PT012
        made.append(dflow.Variable(jnp.ones(3), name="v"))
        made.append(dflow.Variable(1 / 0, name="w"))
    assert not held(memory)
    np.testing.assert_array_equal(made[0], [1, 1, 1])


def test_ops_that_fail_name_the_line_and_run_again(worker: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(ops: InitialOps) -> Any:
        raise MemoryError("no memory")

    with monkeypatch.context() as broken:
        broken.setattr(InitialOps, "__call__", fail)
        with pytest.raises(MemoryError, match="no memory") as caught, worker.parameter_servers():
            v = dflow.Variable(lambda: jnp.ones(2), name="v")
    assert (
        line_of(RuntimeError(caught.value.__notes__[0]), __file__)
        == 'v = dflow.Variable(lambda: jnp.ones(2), name="v")'
    )
    np.testing.assert_array_equal(v, [1, 1])


def test_a_task_that_is_gone_is_said_at_the_line(memory: MemoryCluster, worker: Cluster) -> None:
    with worker.parameter_servers():
        v, w = dflow.Variable(jnp.zeros(2), name="v"), dflow.Variable(jnp.zeros(2), name="w")
    memory.tasks["ps:1"].close()
    made = []
    text = "variable 'w' is on ps:1, which is not there"
    with pytest.raises(TaskLost, match=text) as caught, worker.parameter_servers():  # noqa: PT012
        made.append(dflow.Variable(jnp.ones(2), name="there", near=v))
        made.append(dflow.Variable(jnp.ones(2), name="gone", near=w))
    assert line_of(caught.value, __file__) == 'made.append(dflow.Variable(jnp.ones(2), name="gone", near=w))'
    np.testing.assert_array_equal(made[0], [1, 1])
