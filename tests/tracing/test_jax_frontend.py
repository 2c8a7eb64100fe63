"""JAX's internals that dflow uses in every call."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dflow.tracing.jax_frontend import is_tracing, own_ir_context, runs_plainly


def test_calls_run_plainly_only_where_nothing_is_traced_or_disabled_or_checked() -> None:
    seen: dict[str, tuple[bool, bool]] = {}

    def look(name: str, x: Any) -> Any:
        seen[name] = runs_plainly(), is_tracing()
        return x * 1.0

    x = jnp.ones(2)
    look("outside", x)
    jax.jit(lambda x: look("jit", x))(x)
    jax.vmap(lambda x: look("vmap", x))(x)
    jax.vmap(lambda x: look("named axis", x) + jax.lax.psum(0, "i"), axis_name="i")(x)
    jax.grad(lambda x: look("grad", x))(1.0)
    jax.jvp(lambda x: look("jvp", x), (x,), (x,))
    jax.eval_shape(lambda x: look("eval_shape", x), x)
    jax.lax.scan(lambda c, x: (look("scan", c), x), 0.0, x)
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")
    jax.shard_map(lambda x: look("shard_map", x), mesh=mesh, in_specs=spec, out_specs=spec)(x)
    with jax.disable_jit():
        look("disabled", x)
    with jax.debug_nans(True):
        look("nans", x)
    with jax.debug_infs(True):
        look("infs", x)
    look("outside again", x)
    plainly = {name for name, (plain, _) in seen.items() if plain}
    assert plainly == {"outside", "outside again"}
    assert {name for name, (_, tracing) in seen.items() if not tracing} - plainly == {"disabled", "nans", "infs"}


def test_a_program_lowered_in_its_own_context_shares_it_with_no_other() -> None:
    def lowered(number: int) -> Any:
        return jax.jit(lambda x: x + number).lower(1.0).compiler_ir()

    before = lowered(0)
    with own_ir_context():
        own = lowered(1)
    after = lowered(2)
    assert own.context not in (before.context, after.context)
