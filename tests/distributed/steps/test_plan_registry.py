from __future__ import annotations

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import jax
import msgspec
import numpy as np
import pytest

from dflow.distributed.steps import plan_registry
from dflow.distributed.steps.fair_semaphore import FairSemaphore
from dflow.distributed.steps.plan_registry import MOST_UNUSED, PlanRegistry
from dflow.distributed.wire.messages.plans import RegisterPlan
from dflow.lowering.programs.program import Program, export_program, lower_program
from dflow.lowering.steps.plan import Branch, Call, Item, Plan, Scalar, Scan, Send, UseResource, While
from dflow.tracing import errors
from dflow.tracing.ir.resource_op import ResourceOp
from dflow.tracing.ir.types import ArrayType
from tests.distributed.waiting import DEADLINE_S, until
from tests.lowering.flat_programs import run_flat

PS, WORKER = "/job:ps/task:0", "/job:worker/task:0"
F32 = ArrayType(np.dtype("float32"), (3,))
CALL = Call(0, writes=("w",), reads=(), takes=(0,), gives=(1,))


#: A body with one argument and one result of equal type.
ONE = Plan(PS, 1, (), (0,), (0,))


def nested(depth: int) -> Plan:
    """A body within a body within a body."""
    return Plan(PS, 0, (), bodies=(nested(depth - 1),) if depth else ())


def add_in_place(state: jax.Array, delta: jax.Array) -> tuple[jax.Array, jax.Array]:
    return state + delta, state + delta


def add(
    registry: PlanRegistry,
    *items: Item,
    registers: int = 4,
    programs: tuple[bytes, ...] = (),
    task: str = PS,
    **fields: Any,
) -> int:
    plan = msgspec.msgpack.encode(Plan(task, registers, items, **fields))
    message = RegisterPlan(plan, tuple(len(program) for program in programs))
    return registry.register(message, memoryview(b"".join(programs)), WORKER)[0]


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bytes, int]]:
    """The loaded programs with their numbers of donated arguments; all programs compute the same."""
    loaded: list[tuple[bytes, int]] = []
    compiled = cache(lambda writes, reads: lower_program(add_in_place, (F32, F32), writes, reads).compile())

    def load(blob: memoryview, writes: int, reads: int) -> Program:
        loaded.append((bytes(blob), writes))
        return compiled(writes, reads)

    monkeypatch.setattr("dflow.distributed.steps.plan_registry.load_program", load)
    return loaded


def test_equal_plans_share_a_handle_and_equal_programs_one_compilation(loaded: list[tuple[bytes, int]]) -> None:
    registry = PlanRegistry(PS)
    first = add(registry, CALL, programs=(b"add",))
    assert add(registry, CALL, programs=(b"add",)) == first
    assert add(registry, CALL, registers=5, programs=(b"add",)) == first + 1
    assert add(registry, Call(0, (), ("w",), (0,), (1, 2)), programs=(b"add",)) == first + 2
    assert loaded == [(b"add", 1), (b"add", 0)]
    assert len(registry) == 3


def test_a_program_that_travelled_runs_and_donates() -> None:
    registry = PlanRegistry(PS)
    handle = add(registry, CALL, programs=(export_program(add_in_place, (F32, F32)),))
    state = jax.numpy.ones(3)
    new, result = run_flat(registry.get(handle).programs[0], 1, state, jax.numpy.ones(3))
    assert new.tolist() == result.tolist() == [2, 2, 2]
    assert state.is_deleted()


def test_a_program_that_cannot_be_loaded_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    registry, tried = PlanRegistry(PS), []

    def fail(blob: memoryview, writes: int, reads: int) -> Program:
        tried.append(writes)
        raise ValueError("out of memory")

    monkeypatch.setattr("dflow.distributed.steps.plan_registry.load_program", fail)
    for _ in range(2):
        with pytest.raises(ValueError, match="out of memory"):
            add(registry, CALL, programs=(b"add",))
    assert tried == [1, 1]
    assert len(registry) == 0


def test_a_handle_that_names_no_plan_is_refused() -> None:
    stale = PlanRegistry(PS).add(Plan(PS, 0, ()), ())
    registry = PlanRegistry(PS)
    for handle in (-1, 0, 7, stale):
        text = f"ps:0 was asked for plan {handle}, which is none of its 0: it has been started again since, and what it"
        with pytest.raises(errors.TaskLost, match=text):
            registry.get(handle)


TWO_WAYS = (Call(0, ("w",), (), (), ()), Call(0, (), (), (), ()))
MALFORMED: dict[str, tuple[tuple[Item, ...], dict[str, Any], str]] = {
    "another task's": ((), {"task": WORKER}, f"task of a plan: expected {PS}, got {WORKER}"),
    "registers": ((), {"registers": 1 << 40}, "registers of a plan: expected 0 to 1048576, got 1099511627776"),
    "feed": ((), {"feeds": (4,)}, "a plan with 4 registers names register 4"),
    "fetch": ((), {"fetches": (-1,)}, "a plan with 4 registers names register -1"),
    "take": ((Send("e", WORKER, (9,)),), {}, "a plan with 4 registers names register 9"),
    "after": ((Send("e", WORKER, (0,), after=(1,)),), {}, "a plan with 1 items names item 1"),
    "program": ((Call(1, (), (), (), ()),), {"programs": (b"x",)}, "a plan with 1 programs names program 1"),
    "number's register": ((), {"scalars": (Scalar(7, "i32", bytes(4)),)}, "a plan with 4 registers names register 7"),
    "number": ((), {"scalars": (Scalar(0, "i32", bytes(3)),)}, "scalar of register 0: expected i32, got 3 bytes"),
    "number's dtype": ((), {"scalars": (Scalar(0, "u13", b""),)}, "scalar of register 0: expected a dtype"),
    "key": (
        (),
        {"scalars": (Scalar(0, "key<fry>", bytes(8)),)},
        "scalar of register 0: expected key<fry>, got 8 bytes",
    ),
    "names": ((Send("e", WORKER, (0,)),), {"names": ("a", "b")}, "names of a plan's items: expected 1, got 2"),
    "op": (
        (UseResource("q", ResourceOp("queue.peek")),),
        {},
        "expected an op on a queue or an accumulator, got 'queue.peek'",
    ),
    "count": (
        (UseResource("q", ResourceOp("accumulator.take", count=0)),),
        {},
        "accumulator.take: expected a count of 1 to .*, got 0",
    ),
    "many": (
        (UseResource("q", ResourceOp("queue.dequeue_many", count=1 << 40)),),
        {},
        "queue.dequeue_many: expected a count of 0 to .*, got 1099511627776",
    ),
    "timeout": (
        (UseResource("q", ResourceOp("queue.size", timeout_s=float("nan"))),),
        {},
        "expected a timeout in s, got nan",
    ),
    "line": (
        (UseResource("q", ResourceOp("queue.size", line="x" * 9999)),),
        {},
        "queue.size: expected a line of at most 4096 characters, got 9999",
    ),
    "filled twice": (
        (UseResource("q", ResourceOp("queue.size"), gives=(1,)),),
        {"feeds": (1,)},
        "register 1 of a plan is filled",
    ),
    "circle": ((Send("a", WORKER, (0,), (1,)), Send("b", WORKER, (0,), (0,))), {}, "item 0 of a plan waits for itself"),
    "no body": ((Branch((), (0,), ()),), {}, "branch of 1 values to 0 does not fit its bodies"),
    "body's number": ((Branch((1,), (0,), ()),), {"bodies": (ONE,)}, "a plan with 1 inner plans names inner plan 1"),
    "branch": ((Branch((0,), (0,), ()),), {"bodies": (ONE,)}, "branch of 1 values to 0 does not fit its bodies"),
    "while": ((While(0, 0, 2, (0,), (1,)),), {"bodies": (ONE,)}, "while of 1 values to 1 does not fit its bodies"),
    "scan": (
        (Scan(0, 3, False, 0, 1, ("?",), (0,), (1,)),),
        {"bodies": (ONE,)},
        "stacked results of a loop: expected types",
    ),
    "turns": (
        (Scan(0, -3, False, 0, 1, ("f32[]",), (0,), (1,)),),
        {"bodies": (ONE,)},
        "length of a loop: expected at least 0, got -3",
    ),
    "at once": (
        (While(0, 0, 1, (0,), (1,), (), 0),),
        {"bodies": (ONE,)},
        "parallel_iterations must be at least 1, got 0",
    ),
    "body": ((), {"bodies": (Plan(PS, 1, (), (3,)),)}, "a plan with 1 registers names register 3"),
    "another's body": ((), {"bodies": (Plan(WORKER, 0, ()),)}, f"task of a plan: expected {PS}, got {WORKER}"),
    "a body's number": (
        (),
        {"bodies": (Plan(PS, 1, (), scalars=(Scalar(0, "i32", b""),)),)},
        "expected i32, got 0 bytes",
    ),
    "depth": ((), {"bodies": (nested(80),)}, "expected at most 64 levels"),
    "donation": (
        TWO_WAYS,
        {"programs": (b"x",)},
        "program 0 is called with 1 variables to write and 0 to read, and with 0 and 0",
    ),
}


@pytest.mark.parametrize(("items", "fields", "text"), MALFORMED.values(), ids=MALFORMED)
def test_a_plan_that_cannot_run_is_refused(items: tuple[Item, ...], fields: dict[str, Any], text: str) -> None:
    with pytest.raises(errors.WireError, match=text):
        add(PlanRegistry(PS), *items, **fields)


def named(blobs: tuple[bytes, ...], sizes: tuple[int, ...], calls: int = 1) -> RegisterPlan:
    """A plan with calls of the named programs; programs of size 0 are not sent."""
    items = tuple(Call(n, ("w",), (), (0,), (n + 1,)) for n in range(calls))
    plan = msgspec.msgpack.encode(Plan(PS, 4, items))
    return RegisterPlan(plan, sizes, tuple(hashlib.sha256(blob).digest() for blob in blobs))


def missing(registry: PlanRegistry, *blobs: bytes) -> tuple[int, ...]:
    """Indices of the programs that are not in a registry."""
    handle, lacks = registry.register(named(blobs, (0,) * len(blobs), len(blobs)), memoryview(b""), WORKER)
    registry.release(handle)
    return lacks


def test_a_program_that_is_here_need_not_be_sent_again(loaded: list[tuple[bytes, int]]) -> None:
    registry = PlanRegistry(PS)
    assert missing(registry, b"one", b"two") == (0, 1)
    add(registry, CALL, programs=(b"one",))
    assert missing(registry, b"one", b"two") == (1,)
    handle, _ = registry.register(named((b"one", b"two"), (0, 3), calls=2), memoryview(b"two"), WORKER)
    assert registry.register(named((b"one", b"two"), (0, 0), calls=2), memoryview(b""), WORKER) == (handle, ())
    assert loaded == [(b"one", 1), (b"two", 1)]


@pytest.mark.parametrize(
    ("message", "payload", "text"),
    [
        (named((b"one",), (3,)), b"two", "program 0: SHA-256 mismatch: declared .*, payload has"),
        (named((), (0,)), b"", "fingerprints of a plan's programs: expected 1, got 0"),
        (named((b"one", b"two"), (3,)), b"one", "fingerprints of a plan's programs: expected 1, got 2"),
        (RegisterPlan(b"junk", ()), b"", "4 bytes are no plan"),
        (named((), (3, -1)), bytes(2), r"programs of \[3, -1\] bytes do not fill a payload of 2 bytes"),
    ],
    ids=["another", "not named", "too many", "no plan", "sizes"],
)
def test_a_registration_whose_parts_do_not_fit_is_refused(message: RegisterPlan, payload: bytes, text: str) -> None:
    with pytest.raises(errors.WireError, match=text):
        PlanRegistry(PS).register(message, memoryview(payload), WORKER)


def test_a_plan_is_gone_when_it_was_released_as_often_as_it_was_registered(loaded: list[tuple[bytes, int]]) -> None:
    registry = PlanRegistry(PS)
    call = Call(0, ("w",), (), (0,), (1,))
    handle = add(registry, call, programs=(b"one",))
    assert add(registry, call, programs=(b"one",)) == handle
    for left in (1, 0):
        registry.get(handle)
        registry.release(handle)
        assert len(registry) == left
    with pytest.raises(errors.InternalError, match=f"asked to run plan {handle}, which was released"):
        registry.get(handle)
    registry.release(handle)
    assert missing(registry, b"one") == (), "another plan may need it soon"
    again = add(registry, call, programs=(b"one",))
    assert again != handle
    registry.release(again)
    for number in range(MOST_UNUSED):
        registry.release(add(registry, call, programs=(b"%d" % number,)))
    assert missing(registry, b"one") == (0,), "only the newest are kept"
    assert len(loaded) == 1 + MOST_UNUSED


def test_programs_of_initialisers_are_kept_for_a_while_and_those_of_plans_as_long_as_the_plans(
    loaded: list[tuple[bytes, int]],
) -> None:
    registry = PlanRegistry(PS)
    add(registry, CALL, programs=(b"plan",))
    for _ in range(2):
        for number in range(MOST_UNUSED):
            registry.program(memoryview(b"%d" % number), WORKER)
    assert len(loaded) == 1 + MOST_UNUSED
    registry.program(memoryview(b"another"), WORKER)
    registry.program(memoryview(b"0"), WORKER)
    assert loaded[-2:] == [(b"another", 0), (b"0", 0)], "the one unused longest is gone"
    assert missing(registry, b"plan") == ()


@pytest.mark.parametrize("size", [0, 3], ids=["not sent", "sent"])
def test_a_program_that_a_registration_uses_is_kept_while_another_one_of_it_loads(
    loaded: list[tuple[bytes, int]], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    registry = PlanRegistry(PS)
    registry.release(add(registry, CALL, programs=(b"one",)))
    load = plan_registry.load_program

    def after_others(blob: memoryview, writes: int, reads: int) -> Program:
        if blob == b"two":
            for number in range(MOST_UNUSED + 1):
                registry.program(memoryview(b"%d" % number), "another")
        return load(blob, writes, reads)

    monkeypatch.setattr(plan_registry, "load_program", after_others)
    registry.compiling = FairSemaphore(2)
    message = named((b"one", b"two"), (size, 3), calls=2)
    assert registry.register(message, memoryview(b"one"[:size] + b"two"), WORKER)[0]
    assert missing(registry, b"one", b"two") == ()
    assert (b"one", 1) not in loaded[1:]


def test_a_registration_of_a_program_that_another_one_fails_to_compile_has_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry = PlanRegistry(PS)
    loads, fails = threading.Event(), threading.Event()

    def fail(blob: memoryview, *_: Any) -> Program:
        loads.set()
        assert fails.wait(DEADLINE_S)
        raise errors.WireError(f"program {bytes(blob)!r} cannot run")

    def fails_now(*_: Any) -> None:
        """End the compilation after the second registration has found the program."""
        if loads.is_set():
            fails.set()
            until(lambda: not registry._programs)

    monkeypatch.setattr(plan_registry, "load_program", fail)
    monkeypatch.setattr(plan_registry, "reach", fails_now)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(add, registry, CALL, programs=(b"one",))
        assert loads.wait(DEADLINE_S)
        with pytest.raises(errors.WireError, match="program b'one' cannot run"):
            missing(registry, b"one")
        with pytest.raises(errors.WireError, match="program b'one' cannot run"):
            first.result(DEADLINE_S)
    assert missing(registry, b"one") == (0,)
