"""Every kind of state, by name."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import dflow
from tests.composition.kind import TABLE, Kind
from tests.composition.kinds_of_resources import Accumulator, Padded, Queue, Random, Shuffled
from tests.composition.kinds_of_training import (
    CHAINS,
    Bags,
    Keras,
    Model,
    Slots,
    Table,
    Vocabulary,
    equinox_layer,
    nnx_layer,
)
from tests.composition.kinds_of_variables import Container, Marked, Numbers, Shards

_QUEUES = (
    Queue(dflow.FIFOQueue, lambda number: number, lambda element: element),
    Shuffled(dflow.RandomShuffleQueue, lambda number: number, lambda element: element),
    Queue(dflow.PriorityQueue, lambda number: (number.astype(jnp.int32), number), lambda element: element[1]),
    Padded(dflow.PaddingFIFOQueue, lambda number: jnp.ones(1, jnp.float32) * number, lambda element: element.sum()),
)
_NUMBERS = ("float32", "bfloat16", "float16", "float8_e5m2", "int8", "int32", "uint8", "complex64")

#: Every kind, by name: a new one is one entry here.
KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        *map(Numbers, _NUMBERS),
        Marked("variable bool", lambda n: jnp.stack([n % 2 == 1, n > 1]), lambda v: v.sum().astype(jnp.float32)),
        Marked("variable key", lambda n: jax.random.fold_in(jax.random.key(0), n), jax.random.uniform),
        Container(),
        *map(Shards, ("rows", "modulo", "columns")),
        Table(),
        Bags(),
        Vocabulary("int64", [2**40 + n for n in range(TABLE)]),
        Vocabulary("strings", [f"user {n}" for n in range(TABLE)]),
        *map(Slots, CHAINS),
        Model("NNX model", nnx_layer),
        Model("Equinox model", equinox_layer),
        Keras(),
        Random(),
        *_QUEUES,
        Accumulator(),
    )
}
