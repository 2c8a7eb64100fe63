"""Processes of a group compare the programs that they call: a difference is an error in all of them that names it."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow
from dflow.distributed.collectives.agreed_programs import AgreedPrograms, refuse_own_resources
from dflow.lowering.steps.program_watch import WatchedProgram
from dflow.tracing.errors import StrategyError
from dflow.tracing.jaxprs.trace import trace, written_keys
from dflow.tracing.syntax.listing import listing

#: Both members are in this process, where equal names are those of two variables.
pytestmark = pytest.mark.filterwarnings("ignore::dflow.tracing.primitives.namesakes.DuplicateNameWarning")
SOON = 30.0
NAMES = "worker:0", "worker:1"
Step = Callable[[Any], Any]


class Meeting:
    """The words of two members that come to points of a program."""

    def __init__(self) -> None:
        self.words: list[list[tuple[str, str]]] = [[], []]
        self.barrier = threading.Barrier(2, timeout=SOON)

    def member(self, index: int) -> AgreedPrograms:
        group: Any = Member(self, index)
        return AgreedPrograms(group)


class Member:
    names = NAMES

    def __init__(self, meeting: Meeting, index: int) -> None:
        self.meeting, self.index = meeting, index

    def exchange(self, name: str, word: str) -> tuple[str, ...]:
        mine = self.meeting.words[self.index]
        mine.append((name, word))
        self.meeting.barrier.wait()
        points, words = zip(*(given[len(mine) - 1] for given in self.meeting.words), strict=True)
        if len({*points}) > 1:
            raise StrategyError(f"at different points: {points}")
        return words


def program_of(step: Step, *arguments: Any) -> WatchedProgram:
    traced = trace(step, arguments, {})
    return WatchedProgram(traced, written_keys(traced), lambda args, kwargs: None)


def both(work: Callable[[AgreedPrograms, int], Any]) -> list[str]:
    """Do the work of both members; return the error of each, or an empty text."""
    meeting = Meeting()

    def done(index: int) -> str:
        try:
            work(meeting.member(index), index)
        except dflow.DflowError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(done, range(2)))


class Model:
    """What each worker has: the step of worker `index` is `step(x)`."""

    def __init__(self, index: int) -> None:
        self.w = dflow.Variable(np.ones(3, np.float32), name="w")
        self.key, self.index = jax.random.key(index), index
        self.many = np.arange(64.0, dtype=np.float32) * (index + 1)
        self.generator = dflow.Generator(index, name="generator")
        self.queue = dflow.FIFOQueue(4, jax.ShapeDtypeStruct((3,), np.float32), name="queue")
        self.gradients = dflow.ConditionalAccumulator(jax.ShapeDtypeStruct((3,), np.float32), name="gradients")
        self.rate = 0.1 * (index + 1)

    def optimizer(self, transformation: optax.GradientTransformation) -> Step:
        opt = dflow.Optimizer(transformation, [self.w], name="opt")
        return lambda x: opt.apply([x])


#: By name: the step of a worker, and what its error has.
DIFFERENT: dict[str, tuple[Callable[[Model], Step], str]] = {
    "key": (lambda m: lambda x: m.w + jax.random.normal(m.key, (3,)), r"same closed-over array (.|\n)*key<fry>"),
    "large array": (lambda m: lambda x: m.w + jnp.asarray(m.many).sum() * x, r"f32\[64\] of checksum"),
    "number": (lambda m: lambda x: m.w * m.rate, r"same operation (.|\n)*worker:0: .*0\.1:f32\[\](.|\n)*0\.2:f32"),
    "schedule": (lambda m: m.optimizer(optax.adam(optax.cosine_decay_schedule(m.rate, 9))), r"0\.1(.|\n)*0\.2"),
    "branch": (lambda m: lambda x: (m.w + x) + 1 if m.index else m.w + x, r"worker:0: return %\d+\n.*jax.add.*py:\d+"),
    "result": (lambda m: lambda x: [m.w + x] * (m.index + 1), r"worker:0: return %1\n.*worker:1: return %1, %1"),
    "body": (lambda m: lambda x: jax.lax.fori_loop(0, 3, lambda _, c: c * m.rate, m.w + x), r"0\.1(.|\n)*0\.2"),
    "generator": (
        lambda m: lambda x: m.w + jax.random.normal(m.generator.split(), (3,)),
        r"generator u32\[2\] \[0, 1\]",
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_step_that_differs_is_refused_on_all_workers_with_the_first_difference(name: str) -> None:
    build, shown = DIFFERENT[name]
    models = [Model(0), Model(1)]
    programs = [program_of(build(model), jnp.ones(3)) for model in models]

    def work(agreed: AgreedPrograms, index: int) -> None:
        with agreed.step("step 0", is_one_call=True):
            agreed.called(programs[index], (), {}, [])

    errors = both(work)
    for error in errors:
        assert "in step 0: expected the same" in error
        assert re.search(shown, error), error
        assert "worker:0: " in error
        assert "worker:1: " in error
    assert len({*errors}) == 1


EQUAL: dict[str, Callable[[Model], Step]] = {
    "frozen set": lambda m: lambda x: jax.lax.psum(m.w + x, ()) + m.w,
    "callback": lambda m: lambda x: (jax.debug.callback(lambda v: None, x), m.w + x)[1],
    "custom derivative": lambda m: lambda x: jax.nn.relu(m.w) + jax.nn.gelu(x),
    "optimizer": lambda m: m.optimizer(optax.chain(optax.clip(1.0), optax.adam(0.1))),
    "enqueue": lambda m: lambda x: m.queue.enqueue(m.w + x),
}


@pytest.mark.parametrize("name", EQUAL)
def test_equal_steps_are_compared_once(name: str) -> None:
    programs = [program_of(EQUAL[name](Model(0)), jnp.ones(3)), program_of(EQUAL[name](Model(0)), jnp.ones(3))]
    points: list[Any] = []

    def work(agreed: AgreedPrograms, index: int) -> None:
        for number in range(3):
            with agreed.step(f"step {number}", is_one_call=True):
                agreed.called(programs[index], (), {}, [])
        points.append(agreed._group.meeting.words[index])  # type: ignore[attr-defined]

    assert both(work) == ["", ""]
    assert [[point for point, _ in given] for given in points] == [[f"a call of {programs[0].name!r} in step 0"]] * 2


def test_another_setting_of_jax_is_refused() -> None:
    model = Model(0)
    programs = [program_of(lambda x: model.w + x, jnp.ones(3))] * 2

    def work(agreed: AgreedPrograms, index: int) -> None:
        with jax.default_matmul_precision("float32" if index else "bfloat16"):
            agreed.compare("here", listing(programs[index].traced))

    for error in both(work):
        assert "worker:0: jax_default_matmul_precision=bfloat16\n    worker:1: jax_default_matmul_prec" in error


def test_another_call_within_a_step_meets_the_others() -> None:
    programs = [program_of(EQUAL["optimizer"](Model(0)), jnp.ones(3)) for _ in range(2)]

    def work(agreed: AgreedPrograms, index: int) -> None:
        with agreed.step("step 0", is_one_call=False):
            agreed.called(programs[index], (), {}, [])
            if index:
                agreed.called(programs[index], (), {}, [])
        agreed.compare("step 1", [])

    assert all("at different points" in error for error in both(work))


def test_a_variable_of_a_process_that_steps_use_is_written_alike() -> None:
    models = [Model(0), Model(0)]
    programs = [program_of(lambda x, m=model: m.w + x, jnp.ones(3)) for model in models]

    def work(agreed: AgreedPrograms, index: int) -> None:
        agreed.written(models[index].w, "assign", [jnp.full(3, float(index))])  # no step has used it
        with agreed.step("step 0", is_one_call=True):
            agreed.called(programs[index], (), {}, [])
        agreed.written(models[index].w, "assign", [jnp.full(3, 7.0)])
        agreed.written(models[index].w, "assign", [jnp.full(3, float(index))])

    for error in both(work):
        assert "a write to variable 'w' outside of steps: expected the same value on all workers" in error
        assert "worker:1: of assign 0 f32[3] [1., 1., 1.]" in error


@pytest.mark.parametrize(
    ("build", "shown"),
    [
        (lambda m: lambda x: m.w + m.queue.dequeue(), "dequeue of a queue that each worker has for itself"),
        (lambda m: lambda x: m.w + m.queue.size(), "size of a queue that each worker has for itself"),
        (lambda m: lambda x: jax.lax.cond(x[0] > 0, m.queue.dequeue, m.w.read), "dequeue of a queue"),
        (lambda m: lambda x: (m.gradients.apply(x), m.w + m.gradients.take(1))[1], "expected no accumulator"),
    ],
)
def test_values_of_one_process_are_refused(build: Callable[[Model], Step], shown: str) -> None:
    with pytest.raises(StrategyError, match=shown):
        refuse_own_resources(program_of(build(Model(0)), jnp.ones(3)))
