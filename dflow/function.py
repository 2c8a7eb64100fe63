"""`@dflow.jit`: the whole path of a call.

A call's arguments are flattened and keyed by their structure and types. A known key runs its plan at once. An
unknown one traces the function to a graph, runs the passes, compiles, and keeps the plan.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar, cast

import jax
import numpy as np

from dflow.config import CONFIG
from dflow.lowering.local import LocalHome, Runner, RunnerHome
from dflow.lowering.passes.base import Observer
from dflow.tracing.context import set_default_home
from dflow.tracing.errors import VariableError
from dflow.tracing.graph import Graph
from dflow.tracing.jax_frontend import is_tracing, x64_enabled
from dflow.tracing.source import at, caller
from dflow.tracing.text import text
from dflow.tracing.trace import Traced, trace

P = ParamSpec("P")
R = TypeVar("R")

LOCAL = LocalHome()
set_default_home(LOCAL)

_dumps = itertools.count()


class Function(Generic[P, R]):
    """A function compiled for each structure and type of arguments it is called with. Made by `jit`."""

    def __init__(self, fn: Callable[P, R]) -> None:
        functools.update_wrapper(self, fn)
        self.fn = fn
        # The variables are kept alive with the plan that names them.
        self._plans: dict[Any, tuple[Runner, Any, tuple[Any, ...]]] = {}
        self._methods: dict[int, tuple[weakref.ref[Any], Function[..., R]]] = {}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function on the values of its variables; inside another trace, become part of it."""
        if is_tracing():
            return cast(R, jax.jit(self.fn)(*args, **kwargs))
        leaves, in_tree = jax.tree_util.tree_flatten((args, kwargs))
        key = (in_tree, tuple([_type_key(leaf) for leaf in leaves]), x64_enabled())
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._lower(args, kwargs)
        runner, out_tree, _ = plan
        return cast(R, jax.tree_util.tree_unflatten(out_tree, runner(leaves)))

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        if not jax.tree_util.all_leaves([instance]):
            return functools.partial(self, instance)
        return self._method(instance)

    def _method(self, instance: Any) -> Function[..., R]:
        """This function as the method of an object that is no pytree: compiled for each object, and gone with it."""
        number = id(instance)
        if number not in self._methods:
            alive = weakref.ref(instance, lambda _: self._methods.pop(number, None))
            self._methods[number] = alive, Function(_bound(self.fn, alive))
        return self._methods[number][1]

    def _lower(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Runner, Any, tuple[Any, ...]]:
        traced = trace(self.fn, args, kwargs)
        home = _home_of(traced)
        name = getattr(self.fn, "__name__", "function")
        return home.runner(traced, check=CONFIG.check, observe=_dumper(name)), traced.out_tree, traced.variables


def jit(fn: Callable[P, R]) -> Function[P, R]:
    """Compile `fn`, with its reads and writes of variables, into as few XLA calls as its devices allow.

    `fn` takes and returns pytrees of arrays; variables may be closed over, passed and returned. It is traced once
    for each structure and type of arguments. The effects on one variable happen in the order of the program.

    As a method it is traced once for each object, too: the object's variables are read and written as they are then,
    its other attributes count as they were when it was traced.
    """
    return Function(fn)


def _bound(fn: Callable[..., R], alive: weakref.ref[Any]) -> Callable[..., R]:
    """`fn` as the method of an object that it does not keep alive; a caller of a method does."""

    @functools.wraps(fn)
    def method(*args: Any, **kwargs: Any) -> R:
        return fn(alive(), *args, **kwargs)

    method.__signature__ = _without_first(fn)  # type: ignore[attr-defined]
    return method


def _without_first(fn: Callable[..., Any]) -> inspect.Signature:
    signature = inspect.signature(fn)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _type_key(leaf: Any) -> Any:
    aval = getattr(leaf, "aval", None)
    if aval is not None:
        return aval
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.dtype, leaf.shape
    return type(leaf)


def _home_of(traced: Traced) -> RunnerHome:
    homes = {id(variable.home): variable.home for variable in traced.variables if variable.home is not LOCAL}
    if len(homes) > 1:
        names = ", ".join(variable.name for variable in traced.variables)
        raise VariableError(f"one function uses variables of {len(homes)} clusters ({names}){at(caller())}")
    return cast(RunnerHome, next(iter(homes.values()), LOCAL))


def _dumper(name: str) -> Observer | None:
    if CONFIG.dump is None:
        return None
    folder = CONFIG.dump / f"{next(_dumps):03d}-{name.strip('<>')}"
    folder.mkdir(parents=True, exist_ok=True)
    return functools.partial(_write_dump, folder, itertools.count())


def _write_dump(folder: Path, numbers: Iterator[int], stage: str, graph: Graph) -> None:
    (folder / f"{next(numbers):02d}-{stage}.graph").write_text(text(graph) + "\n")
