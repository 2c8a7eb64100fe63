"""Variables of PRNG keys, and generators, on the tasks of a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.distributed.cluster.cluster import Cluster
from dflow.testing import MemoryCluster
from dflow.tracing.errors import VariableError, VariableShapeError
from tests.own_keys import keys_of_an_own_algorithm


@pytest.fixture
def workers(memory: MemoryCluster) -> Iterator[tuple[Cluster, Cluster]]:
    with closing(memory.worker(0)) as one, closing(memory.worker(1)) as other:
        yield one, other


def on_task(worker: Cluster, initial: Any, name: str = "keys") -> dflow.Variable:
    with worker.parameter_servers():
        return dflow.Variable(initial, name=name)


def same(one: Any, other: Any) -> None:
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    np.testing.assert_array_equal(jax.random.key_data(one), jax.random.key_data(other))


@pytest.mark.parametrize("algorithm", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_a_key_is_written_and_read_by_two_workers(workers: tuple[Cluster, Cluster], algorithm: str) -> None:
    first, second = (jax.random.key(seed, impl=algorithm) for seed in range(2))
    v, other = (on_task(worker, first) for worker in workers)
    same(other.read(), first)
    v.assign(second)
    same(other.read(), second)
    with pytest.raises(VariableShapeError, match=r"holds key<.*but assign was given u32"):
        v.assign(jnp.zeros(2, jnp.uint32))


def test_keys_of_an_algorithm_that_other_processes_lack_are_refused(workers: tuple[Cluster, Cluster]) -> None:
    with pytest.raises(VariableError, match=r"'keys' holds key<own>\[\](.|\n)*use keys of one of .* threefry2x32, rbg"):
        on_task(workers[0], keys_of_an_own_algorithm())
