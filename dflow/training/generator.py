"""`dflow.Generator`: random numbers whose state is a variable, so that no trace makes it a constant."""

from __future__ import annotations

import functools
import math
import operator
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.export
import jax.numpy as jnp

from dflow.calls.function import Function, jit
from dflow.tracing.devices.device import device_scope
from dflow.tracing.devices.device_name import is_on_task
from dflow.tracing.errors import VariableError
from dflow.tracing.jax_frontend import is_tracing
from dflow.tracing.near_names import suggests_keywords
from dflow.tracing.primitives.state_primitives import split_p
from dflow.tracing.state.resources import Variable


class Generator:
    """A sequence of JAX random keys. Thread-safe.

    seed  an integer, or a JAX key to start from; equal seeds give equal sequences, traced or not
    name  name of the variable with the state; on a cluster, generators with the same name share one sequence
    impl  the algorithm, as for `jax.random.key`; default: that of `seed` if it is a key, or else JAX's

    The state is `key`, a variable of uint32 (`jax.random.key_data`), which can be saved and assigned like any other.
    In traced code each `split` reads and writes it, so each call of a compiled function continues the sequence.
    Raises VariableError when created inside traced code.
    """

    @suggests_keywords
    def __init__(self, seed: Any = 0, *, name: str | None = None, impl: str | None = None) -> None:
        if is_tracing():
            raise VariableError(
                f"a generator ({name or 'unnamed'}) is created inside traced code, which runs once, not once a step",
                "create it before, and split it inside",
            )
        is_key = hasattr(seed, "dtype") and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key)
        #: The algorithm, as for `jax.random.key`.
        self.impl = str(jax.random.key_impl(seed if is_key else jax.random.key(0, impl=impl)))
        self.key = Variable(
            lambda: jax.random.key_data(seed if is_key else jax.random.key(seed, impl=impl)),
            name=name,
        )
        #: The name of the variable that holds the state.
        self.name = self.key.name
        # Not a bound method, which would keep this object alive.
        self._advance = functools.partial(_advance, self.key, self.impl)
        #: By shape: one compiled function each, because one function with many shapes would get a RetraceWarning.
        self._advance_now: dict[tuple[int, ...], Function[[], jax.Array]] = {}
        self._lock = threading.Lock()

    def split(self, n: int | Sequence[int] | None = None) -> jax.Array:
        """Return a new key, or an array of new keys of shape `n`, of dtype `key<impl>`. No key is returned twice.
        Raises VariableError under `vmap`, where the whole batch would get the same key: split before, and map over
        the keys too.
        """
        shape: tuple[Any, ...] = () if n is None else tuple(n) if isinstance(n, Sequence) else (n,)
        # A size that an export leaves open is no integer.
        shape = tuple(size if jax.export.is_symbolic_dim(size) else operator.index(size) for size in shape)
        if is_tracing():
            return self._advance(shape)
        with self._lock:
            if shape not in self._advance_now:
                self._advance_now[shape] = jit(functools.partial(self._advance, shape))
            return self._advance_now[shape]()

    def fork(self, *, name: str | None = None) -> Generator:
        """Return a new, independent generator that starts from the next key of this one."""
        return Generator(self.split(), name=name)

    def __repr__(self) -> str:
        return f"<Generator {self.name!r}: {self.impl}>"


def _advance(state: Variable, impl: str, shape: tuple[int, ...]) -> jax.Array:
    # On the task of the state these ops are one program, so that two workers never get the same key.
    task = state.device
    with device_scope(task) if task is not None and is_on_task(task) else nullcontext():
        data = split_p.bind(state.read(), generator=state.name)
        keys = jax.random.split(jax.random.wrap_key_data(data, impl=impl), math.prod(shape) + 1)
        state.assign(jax.random.key_data(keys[0]))
        return keys[1:].reshape(shape)


jax.tree_util.register_static(Generator)
