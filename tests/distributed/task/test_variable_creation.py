"""Creation of several variables by one message: a variable that cannot be created has an error, all others exist."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from dflow.distributed.steps.plan_registry import PlanRegistry
from dflow.distributed.task.variable_creation import VariableCreation
from dflow.distributed.wire.codec import encode_arrays
from dflow.distributed.wire.messages.basic import ArrayInfo
from dflow.distributed.wire.messages.variables import CreateVariable, CreateVariables, VariablesCreated
from dflow.lowering.programs.program import export_program
from dflow.lowering.state.store import Store
from dflow.tracing.errors import WireError
from dflow.tracing.ir.types import ArrayType
from tests.distributed.task_parts import handled, without_server

F32 = ArrayType(np.dtype("float32"), (3,))
PS, WORKER = "/job:ps/task:0", "/job:worker/task:0"
DOUBLED = export_program(lambda x: [x * 2, x + 1], [F32])
TEN = np.full(3, 10, np.float32)


class Task:
    def __init__(self) -> None:
        self.store = Store()
        self.creation = made(self.store, PlanRegistry(PS))

    def create(
        self, *variables: CreateVariable, arrays: Any = (), programs: tuple[bytes, ...] = ()
    ) -> VariablesCreated:
        infos, data = encode_arrays(arrays)
        message = CreateVariables(variables, infos, tuple(map(len, programs)))
        created: VariablesCreated = handled(self.creation, message, b"".join((data, *programs)), sender=WORKER)
        return created

    def values(self) -> dict[str, list[float]]:
        return {name: self.store.read(name).tolist() for name in sorted(self.store.table.entries)}


def made(store: Store, plans: Any) -> VariableCreation:
    return without_server(
        VariableCreation, name=PS, store=store, plans=plans, refuse_for_another_process=lambda name, process: None
    )


@pytest.fixture
def task() -> Task:
    return Task()


def variable(name: str, *calls: tuple[int, tuple[int, ...]], **fields: Any) -> CreateVariable:
    return CreateVariable(name, "float32", (3,), calls=calls, **fields)


def test_values_and_programs_make_variables(task: Task) -> None:
    calls = ((0, (0,)), (0, (1,)))
    answer = task.create(
        variable("sent", arrays=1),
        variable("made", *calls, arrays=1, result=4),
        arrays=[TEN, 2 * TEN],
        programs=(DOUBLED,),
    )
    assert answer == VariablesCreated()
    assert task.values() == {"made": [41] * 3, "sent": [10] * 3}


def test_a_variable_without_a_value_is_missing_unless_it_is_there(task: Task) -> None:
    task.create(variable("there", arrays=1), arrays=[TEN])
    assert task.create(variable("new"), variable("there"), variable("newer")) == VariablesCreated((0, 2))
    assert task.values() == {"there": [10] * 3}


def test_the_first_value_stays(task: Task) -> None:
    task.create(variable("w", arrays=1), variable("w", arrays=1), arrays=[TEN, 2 * TEN])
    task.create(variable("w", arrays=1), arrays=[3 * TEN])
    assert task.values() == {"w": [10] * 3}


OTHER = CreateVariable("w", "float32", (4,))
FOUR = [np.ones(4, np.float32)]
FAILING: dict[str, tuple[CreateVariable, list[Any], str]] = {
    "another type": (replace(OTHER, arrays=1), FOUR, "VariableError: .*'w' exists"),
    "another type that is asked for": (OTHER, [], "VariableError: .*'w' exists and holds"),
    "no dtype": (CreateVariable("v", "object", (3,), arrays=1), [TEN], "WireError: dtype 'object' does not travel"),
    "a value of another type": (
        variable("v", arrays=1),
        [TEN[:2]],
        r"VariableError: .* is f32\[2\], but it is to hold",
    ),
    "a value that is not there": (variable("v", arrays=1, result=1), [TEN], "WireError: .* names value 1, of 1"),
    "a negative number": (variable("v", arrays=1, result=-1), [TEN], "WireError: .* names value -1, of 1"),
    "no such program": (variable("v", (1, ())), [], "WireError: .* names program 1, of 1"),
    "no program": (variable("v", (0, (0,)), arrays=1), [TEN], "WireError: .* no exported program"),
    "operands that do not fit": (variable("v", (0, ())), [], "VariableError: .*'v' cannot be run here"),
}


@pytest.mark.parametrize("name", FAILING)
def test_a_variable_that_cannot_be_created_does_not_stop_the_others(task: Task, name: str) -> None:
    bad, arrays, text = FAILING[name]
    task.create(variable("w", arrays=1), arrays=[TEN])
    programs = (b"nothing" if name == "no program" else DOUBLED,)
    answer = task.create(bad, variable("after", arrays=1), arrays=[*arrays, TEN], programs=programs)
    assert [*answer.failures] == [0]
    assert not answer.missing
    said = f"{answer.failures[0].kind}: {answer.failures[0].text}"
    assert re.search(text, said), said
    assert task.values() == {"after": [10] * 3, "w": [10] * 3}


MALFORMED = {
    "arrays that no variable takes": (CreateVariables((), (ArrayInfo("float32", (3,)),)), 12),
    "more arrays than there are": (CreateVariables((variable("v", arrays=2),), (ArrayInfo("float32", (3,)),)), 12),
    "fewer than no arrays": (CreateVariables((variable("v", arrays=-1), variable("u", arrays=1))), 0),
    "programs beyond the payload": (CreateVariables((), (), (13,)), 12),
    "a program of a negative size": (CreateVariables((), (), (-1, 13)), 12),
    "a payload that is longer": (CreateVariables((variable("v"),)), 12),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_parts_that_do_not_fit_together_are_refused(task: Task, name: str) -> None:
    message, size = MALFORMED[name]
    with pytest.raises(WireError, match=r"arrays|payload"):
        handled(task.creation, message, bytes(size), sender=WORKER)
    assert not task.values()


def test_a_program_is_compiled_once() -> None:
    compiled: list[tuple[memoryview, str]] = []
    registry = PlanRegistry(PS)
    noted = SimpleNamespace(program=lambda *given: (compiled.append(given), registry.program(*given))[1])
    message = CreateVariables(
        tuple(variable(name, (0, (0,)), arrays=1, result=1) for name in "abc"),
        (ArrayInfo("float32", (3,)),) * 3,
        (len(DOUBLED),),
    )
    creation, payload = made(Store(), noted), TEN.tobytes() * 3 + DOUBLED
    assert handled(creation, message, payload, sender=WORKER) == VariablesCreated()
    assert [task for _, task in compiled] == [WORKER]
