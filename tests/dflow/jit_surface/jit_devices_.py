"""Arrays over several devices, meshes, shard_map and pmap; `test_several_devices.py` runs this with eight devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.dflow.jit_surface.comparison import Program, same_as_jax_jit

#: Number of devices in the meshes.
DEVICES = 4


def mesh(*shape: int, kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    shape = shape or (DEVICES,)
    return jax.make_mesh(shape, ("i", "j")[: len(shape)], axis_types=(kind,) * len(shape))


def rows(x: Any) -> jax.Array:
    return jax.device_put(x, NamedSharding(mesh(), P("i")))


def on(number: int, x: Any) -> jax.Array:
    return jax.device_put(x, jax.devices()[number])


def sharded(jit: Any, fn: Any, *args: Any, **options: Any) -> Any:
    f = jit(fn, **options)
    return f(*args), f(*args)


def donated(jit: Any) -> Any:
    f = jit(lambda x: x + 1, donate_argnums=0, out_shardings=NamedSharding(mesh(), P("i")))
    x = rows(jnp.arange(8.0))
    return f(x), x.is_deleted()


def explicit(jit: Any) -> Any:
    with jax.set_mesh(mesh(kind=AxisType.Explicit)):
        x = jax.device_put(jnp.arange(8.0).reshape(4, 2), P("i", None))
        f = jit(lambda x: (x * 2, x @ jnp.ones((2, 3)), jax.typeof(x).sharding.spec))
        try:
            return f(x)[:2]
        except TypeError:
            g = jit(lambda x: (x * 2, x @ jnp.ones((2, 3))))
            return g(x), g(x)


def another_mesh_is_another_trace(jit: Any) -> Any:
    runs: list[int] = []
    f = jit(lambda x: (runs.append(1), jax.lax.with_sharding_constraint(x, P("i")) * 2)[1])
    seen = []
    for shape in ((4,), (2, 2), (4,)):
        with jax.set_mesh(mesh(*shape)):
            seen.append((np.asarray(f(jnp.arange(8.0))), len(runs)))
    return seen


def jit_in_map(jit: Any) -> Any:
    inner = jit(lambda x: x * 2 + jax.lax.axis_index("i"))
    return jax.shard_map(inner, mesh=mesh(), in_specs=P("i"), out_specs=P("i"))(jnp.arange(8.0))


PROGRAMS: dict[str, Program] = {
    "an array over devices": lambda jit: sharded(jit, lambda x: x * 2, rows(jnp.arange(8.0))),
    "arrays on two devices": lambda jit: jit(lambda x, y: x + y)(on(1, 1.0), on(2, 1.0)),
    "in_shardings": lambda jit: sharded(
        jit, lambda x: x * 2, jnp.arange(8.0), in_shardings=NamedSharding(mesh(), P("i"))
    ),
    "in_shardings that an argument does not have": lambda jit: jit(
        lambda x: x * 2, in_shardings=NamedSharding(mesh(), P("i"))
    )(on(1, jnp.arange(8.0))),
    "out_shardings": lambda jit: sharded(
        jit, lambda x: x * 2, jnp.arange(8.0), out_shardings=NamedSharding(mesh(), P("i"))
    ),
    "donation": donated,
    "explicit axes": explicit,
    "another mesh": another_mesh_is_another_trace,
    "shard_map of a jitted function": jit_in_map,
    "a device option": lambda jit: jit(lambda x: x + 1, device=jax.devices()[2])(1.0),
}


#: Differences with state: an error names the program that the function became; JAX's maps, outside of any function,
#: compile their function themselves; a device is refused; and keys are gathered.
WITHOUT_STATE = (
    "arrays on two devices",
    "in_shardings that an argument does not have",
    "shard_map of a jitted function",
    "a device option",
)

test_the_same_as_jax_jit = same_as_jax_jit(PROGRAMS, only_without_state=WITHOUT_STATE)
