"""Variables on given devices of one process, the device of an array, and the plan of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

import dflow
from dflow.lowering.steps.plan import Call, Item, Plan
from dflow.state_backends import LOCAL
from dflow.tracing.jaxprs.trace import trace

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def on(array: Any) -> str:
    """Return the only device of an array."""
    [where] = array.devices()
    return f"cpu:{where.id}"


def variable(device: str, value: Any = 1.0, name: str | None = None) -> dflow.Variable:
    with dflow.device(device):
        return dflow.Variable(jnp.asarray(value, jnp.float32), name=name)


def plan_of(fn: Callable[..., Any], *args: Any) -> Plan:
    """Return the plan of a call of `fn`."""
    return LOCAL.lower(trace(fn, args, {}), check=True, observe=None).lowered.plan


def calls(items: tuple[Item, ...]) -> list[str]:
    return [item.device for item in items if isinstance(item, Call)]
