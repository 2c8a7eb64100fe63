"""`dflow.Generator`: fresh keys, the same from the same seed, traced or not."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.testing import memory_cluster
from dflow.tracing.errors import VariableError


def bits(keys: Any) -> Any:
    return np.asarray(jax.random.key_data(keys)).tolist()


def test_one_seed_is_one_sequence_compiled_or_not() -> None:
    eager, compiled, other = dflow.Generator(7), dflow.Generator(7), dflow.Generator(8)
    split = dflow.jit(lambda g: (g.split(), g.split(3)))
    for _ in range(2):
        expected = [bits(eager.split()), bits(eager.split(3))]
        assert [bits(keys) for keys in split(compiled)] == expected
        assert [bits(keys) for keys in split(other)] != expected
    assert bits(jax.random.wrap_key_data(eager.key.read())) == bits(jax.random.wrap_key_data(compiled.key.read()))


def test_no_key_is_given_twice() -> None:
    generator = dflow.Generator(0)
    keys = [generator.split(), *generator.split(5), *generator.split((2, 3)).ravel(), *generator.fork().split(2)]
    assert len({tuple(bits(key)) for key in keys}) == len(keys) == 14


def test_the_key_that_comes_next_is_not_derived_from_one_given() -> None:
    generator = dflow.Generator(0)
    given = [generator.split(), *generator.split(3)]
    derived = {tuple(bits(key)) for parent in given for count in (2, 4) for key in jax.random.split(parent, count)}
    later = {tuple(bits(key)) for key in [generator.split(), *generator.split(3)]}
    assert not derived & later


def test_the_shape_of_the_keys_is_what_was_asked_for() -> None:
    generator = dflow.Generator(0)
    shapes = [generator.split(n).shape for n in (None, 1, 3, np.int64(2), (2, 3), [4], 0)]
    assert shapes == [(), (1,), (3,), (2,), (2, 3), (4,), (0,)]
    assert jax.random.normal(generator.split()).shape == ()


def test_a_split_under_vmap_is_refused_and_keys_split_before_differ() -> None:
    generator = dflow.Generator(0, name="noise")

    def noisy(x: Any) -> Any:
        return x + jax.random.normal(generator.split())

    nested = [noisy, jax.jit(noisy), jax.grad(noisy), lambda x: jax.lax.cond(generator.key[0] > 0, noisy, noisy, x)]
    nested.append(lambda x: jax.lax.scan(lambda c, _: (noisy(c), None), x, None, length=2)[0])
    message = (
        r"generator 'noise' is split under vmap, where all of the batch would get the same key\n"
        r"  at .*test_generator\.py:\d+\n  split before, keys = generator\.split\(n\), and map over the keys"
    )
    for function in nested:
        for batched in (jax.vmap(function), dflow.jit(jax.vmap(function))):
            with pytest.raises(VariableError, match=message):
                batched(np.ones(3, np.float32))
    assert bits(generator.split()) == bits(dflow.Generator(0).split())

    @dflow.jit
    def right(xs: Any) -> Any:
        return jax.vmap(lambda x, key: x + jax.random.normal(key))(xs, generator.split(3))

    assert len(set(right(np.ones(3, np.float32)).tolist())) == 3


def test_a_fork_goes_its_own_way() -> None:
    one, two = dflow.Generator(5), dflow.Generator(5)
    fork, again = one.fork(name="dropout"), two.fork()
    fork.split(100)
    assert fork.name == fork.key.name == "dropout"
    assert bits(one.split()) == bits(two.split())
    assert bits(fork.split()) != bits(again.split())


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_every_algorithm_of_jax_does(impl: str) -> None:
    generator, twin = dflow.Generator(4, impl=impl), dflow.Generator(jax.random.key(4, impl=impl))
    assert repr(generator) == f"<Generator {generator.name!r}: {impl}>"
    key = generator.split()
    assert str(jax.random.key_impl(key)) == impl
    assert bits(key) == bits(dflow.jit(twin.split)())


def test_a_generator_is_not_made_in_traced_code() -> None:
    with pytest.raises(
        VariableError, match=r"a generator \(noise\) is created inside traced code(.|\n)*create it before"
    ):
        dflow.jit(lambda: jax.random.normal(dflow.Generator(0, name="noise").split()))()


def test_threads_share_a_generator_and_get_keys_of_their_own() -> None:
    generator = dflow.Generator(0)
    draw = dflow.jit(generator.split)
    with ThreadPoolExecutor(4) as pool:
        keys = list(pool.map(lambda turn: (generator.split if turn % 2 else draw)(), range(40)))
    assert len({tuple(bits(key)) for key in keys}) == 40


def test_a_generator_is_freed_with_its_last_user() -> None:
    gc.collect()
    gc.disable()
    try:
        generator = dflow.Generator(0)
        generator.split()
        state = weakref.ref(generator.key)
        alive = weakref.ref(generator)
        del generator
        assert alive() is None
    finally:
        gc.enable()
    gc.collect()
    assert state() is None


def test_on_a_cluster_the_state_lives_with_the_other_variables() -> None:
    with memory_cluster(ps=1, workers=1) as cluster:
        worker = cluster.worker()
        with worker.parameter_servers():
            generator = dflow.Generator(3, name="noise")
        twin = dflow.Generator(3)
        draw = dflow.jit(lambda: jax.random.bits(generator.split()))
        assert generator.key.device == "/job:ps/task:0"
        drawn = [int(draw()), int(jax.random.bits(generator.split()))]
        worker.close()
    assert drawn == [int(jax.random.bits(twin.split())) for _ in range(2)]


def test_an_export_splits_into_as_many_keys_as_an_open_dimension() -> None:
    generator = dflow.Generator(3, name="open")

    def draw(x: Any) -> Any:
        return jax.vmap(jax.random.uniform)(generator.split(x.shape[0])) + x

    exported = dflow.export(draw, dflow.spec(("b",), jnp.float32))
    assert "f32[b]" in str(exported)
    assert dflow.jit(draw)(jnp.zeros(5)).shape == (5,)
