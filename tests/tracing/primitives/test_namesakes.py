"""Several variables of one name in use give a warning, in one process and on a cluster."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow
from dflow.testing import memory_cluster

HERE = Path(__file__).name

#: A context for the creation of variables, and whether two of one name are the same there.
Place = tuple[Callable[[], Any], bool]


@pytest.fixture(params=["standalone", "cluster"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    if request.param == "standalone":
        yield nullcontext, False
        return
    with memory_cluster(ps=1) as memory, closing(memory.worker(0)) as worker:
        yield worker.parameter_servers, True


def model(prefix: str = "") -> Any:
    return dflow.variables({"w": jnp.ones(2), "b": jnp.zeros(2)}, prefix=prefix)


_USES: dict[str, Callable[[Any], Any]] = {
    "read": lambda tree: tree["w"].read(),
    "write": lambda tree: tree["w"].assign(jnp.ones(2)),
    "function": lambda tree: dflow.jit(lambda: tree["w"].assign_add(jnp.ones(2)))(),
}


@pytest.mark.parametrize("use", _USES)
def test_a_target_network_of_the_same_names_is_warned_of(place: Place, use: str) -> None:
    with place[0]():
        online = model()
    with place[0]():
        target = model()
    fact = "both are one variable here" if place[1] else "here they are separate, and on a cluster both are one"
    with pytest.warns(dflow.DuplicateNameWarning) as caught:
        _USES[use](online)
    assert caught[0].filename == __file__
    text = str(caught.pop().message)
    assert text.startswith("variable 'w': expected an unused name, got that of one in use: ")
    assert fact in text
    assert text.count(f"{HERE}:") == 2
    assert "another name or `prefix=`" in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _USES[use](online)
        _USES[use](target)
    shared = np.array_equal(dflow.read(online["w"]), dflow.read(target["w"]))
    assert shared or not place[1]


def train(tree: Any, opt: Any) -> None:
    def loss() -> Any:
        return (tree["w"] * tree["b"]).sum()

    opt.apply(dflow.grad(loss, tree)())


def test_a_program_that_runs_again_is_silent(place: Place) -> None:
    held: dict[str, Any] = {}
    for _ in range(3):
        with place[0]():
            held["tree"] = model()
            held["opt"] = dflow.Optimizer(optax.adam(0.1), held["tree"], name="adam")
        held["step"] = dflow.jit(partial(train, held["tree"], held["opt"]))
        held["step"]()


def test_queues_of_one_name_are_warned_of(place: Place) -> None:
    with place[0]():
        first, second = [dflow.FIFOQueue(2, jax.ShapeDtypeStruct((), jnp.float32), name="q") for _ in range(2)]
    with pytest.warns(dflow.DuplicateNameWarning, match=r"queue 'q': expected an unused name, got that of one in use"):
        first.enqueue(1.0)
    second.close()


def test_a_loaded_model_is_silent_whatever_is_made_after_it(tmp_path: Path) -> None:
    trained = model()
    dflow.export(dflow.jit(lambda x: x * trained["w"]), jnp.ones(2)).save(tmp_path / "saved")
    loaded = dflow.load(tmp_path / "saved")
    later = [model(), model()]
    assert len(loaded.variables) == 1
    assert later[-1]["w"].read().shape == (2,)
    loaded.call(jnp.ones(2))


def _of_two_programs(tree: Any) -> Callable[[], Any]:
    queue = dflow.FIFOQueue(2, jax.ShapeDtypeStruct((2,), jnp.float32))

    @dflow.jit
    def step() -> Any:
        queue.enqueue(tree["b"].read())
        tree["w"].assign_add(queue.dequeue())

    return step


def _with_a_loop(tree: Any) -> Callable[[], Any]:
    return dflow.jit(lambda: jax.lax.fori_loop(0, 2, lambda _, x: tree["w"].assign_add(x) or x, jnp.ones(2)))


_STEPS: dict[str, Callable[[Any], Callable[[], Any]]] = {
    "writes": lambda tree: dflow.jit(lambda: tree["w"].assign_add(jnp.ones(2))),
    "of two programs": _of_two_programs,
    "with a loop": _with_a_loop,
}


@pytest.mark.parametrize("kind", _STEPS)
def test_a_namesake_made_after_a_step_ran_is_warned_of_at_the_next_call(place: Place, kind: str) -> None:
    with place[0]():
        online = model()
    step = _STEPS[kind](online)
    for _ in range(3):
        step()
    with place[0]():
        target = model()
        assert target["w"].read().shape == (2,)
    with pytest.warns(dflow.DuplicateNameWarning, match=r"variables? .*'w'.*: expected an unused name"):
        step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            step()


class Layer:
    """Names its variables itself, like the layers of model libraries."""

    def __init__(self) -> None:
        self.w, self.b = dflow.Variable(jnp.ones(2), name="w"), dflow.Variable(jnp.zeros(2), name="b")

    @dflow.jit
    def __call__(self, x: Any) -> Any:
        return x * self.w + self.b


def used_in_turn(layers: list[Layer]) -> None:
    for _ in range(3):
        for layer in layers:
            layer(jnp.ones(2))


def test_models_of_one_class_are_warned_of_once_each_however_often_they_are_used(place: Place) -> None:
    with place[0]():
        layers = [Layer() for _ in range(3)]
    with pytest.warns(dflow.DuplicateNameWarning) as caught:
        used_in_turn(layers)
    assert len(caught) == 2  # for the first and the second, and for the second and the third
    assert all(str(each.message).startswith("variables 'w', 'b': expected an unused name") for each in caught)
    assert "or its own `dflow.container(...)`" in str(caught[0].message)
