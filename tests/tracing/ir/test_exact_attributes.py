"""Keys of attributes are equal only for values of one type and equal bits, at any depth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from dflow.tracing.ir.exact_attributes import exact


@dataclass(frozen=True)
class Held:
    value: Any


WITHIN = {
    "alone": lambda value: value,
    "in a tuple": lambda value: (1, (value,)),
    "in a dataclass": lambda value: Held((value,)),
}


@pytest.mark.parametrize("within", WITHIN.values(), ids=WITHIN)
def test_values_of_other_bits_or_types_have_other_keys(within: Any) -> None:
    for one, other in ((0.0, -0.0), (1, True), (1, 1.0)):
        assert exact(within(one)) != exact(within(other))
    assert hash(exact(within(0.0))) == hash(exact(within(0.0)))
    assert exact(within(0.0)) == exact(within(0.0))


def test_a_list_has_no_key_that_can_be_compared() -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(exact([1]))
