"""The settings of optax transformations: workers compare them to find optimizers that differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import optax
import pytest

from dflow.training.optimizer_settings import settings_of

RATE = 0.5


def decaying(rate: float) -> Any:
    """Return a schedule with a number in a closure, one in its code, and one of this file."""
    return lambda count: rate * 0.25**count * RATE


#: By name: a transformation with a setting, and a text for its value.
CASES: dict[str, tuple[Callable[[float], Any], str]] = {
    "sgd": (optax.sgd, "scale.step_size: -0.125"),
    "adam": (lambda value: optax.adam(1.0, b1=value), "scale_by_adam.b1: 0.125"),
    "schedule": (lambda value: optax.sgd(optax.cosine_decay_schedule(value, 9)), "schedule.init_value: 0.125"),
    "function": (lambda value: optax.sgd(decaying(value)), "learning_rate.rate: 0.125"),
    "chain": (lambda value: optax.chain(optax.clip_by_global_norm(value), optax.sgd(1.0)), "max_norm: 0.125"),
    "groups": (
        lambda value: optax.multi_transform({"a": optax.sgd(value), "b": optax.set_to_zero()}, {"w": "a"}),
        "scale.step_size: -0.125",
    ),
    "accumulated": (lambda value: optax.MultiSteps(optax.sgd(value), 2), "scale.step_size: -0.125"),
    "array": (lambda value: optax.scale_by_schedule(lambda count: np.full(3, value)[count]), "value: 0.125"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_setting_is_found_by_its_name(name: str) -> None:
    make, text = CASES[name]
    found = settings_of(make(0.125))
    assert any(one.endswith(text) for one in found), found
    assert settings_of(make(0.125)) == found
    assert settings_of(make(0.25)) != found
    assert not any(" at 0x" in one for one in found)


def test_numbers_in_the_code_of_the_user_count() -> None:
    found = settings_of(optax.sgd(decaying(1.0)))
    assert [one.rpartition(": ")[2] for one in found if "code" in one or ".RATE" in one] == ["0.25", "0.5"]
