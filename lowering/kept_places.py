"""What a step writes stays spread over the devices as its variable is, whatever XLA would make of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeGuard

import jax
from jax import jit as jax_jit
from jax.sharding import AxisType, NamedSharding, Sharding


def is_spread(place: Sharding | None) -> TypeGuard[Sharding]:
    """Whether it is over several devices, where XLA has choices to make."""
    return place is not None and len(place.device_set) > 1


def kept_places(fn: Callable[..., Sequence[Any]], places: Sequence[Sharding | None]) -> Callable[..., list[Any]]:
    """`fn`, to be traced, with the first of its results held to these places, other than None and a single device."""
    held = {number: place for number, place in enumerate(places) if is_spread(place)}

    def kept(*args: Any) -> list[Any]:
        results = list(fn(*args))
        for number, place in held.items():
            results[number] = _at(place, results[number])
        return results

    return kept


def _at(place: Sharding, value: Any) -> Any:
    if not isinstance(place, NamedSharding) or set(place.mesh.axis_types) == {AxisType.Auto}:
        return jax.lax.with_sharding_constraint(value, place)
    # A constraint may name no explicit axis. Of the two ways to move a value along such axes, each leaves out cases.
    return jax_jit(partial(jax.device_put, device=place), out_shardings=place)(value)
