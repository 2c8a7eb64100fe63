"""Keys of attributes, for finding nodes that compute the same.

Python's `==` holds for 0.0 and -0.0, and for 1 and True, also within tuples and dataclasses. Ops that differ in such
attributes are different, so their keys must differ.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import fields, is_dataclass
from operator import itemgetter
from typing import Any

import numpy as np

_NAME = itemgetter(0)


def exact_attributes(attributes: Mapping[str, Any]) -> Hashable:
    """Attributes as a key. Its `hash` raises TypeError where an attribute has none."""
    return tuple((name, exact(value)) for name, value in sorted(attributes.items(), key=_NAME))


def exact(value: Any) -> Hashable:
    """A key that equals that of a value of the same type and bits alone."""
    if isinstance(value, tuple):
        return type(value), tuple(map(exact, value))
    if isinstance(value, frozenset):
        return type(value), frozenset(map(exact, value))
    if is_dataclass(value) and not isinstance(value, type) and type(value).__eq__ is not object.__eq__:
        # The object too, for it says whether it is equal to another.
        return value, tuple(exact(getattr(value, each.name)) for each in fields(value) if each.compare)
    return type(value), repr(value) if isinstance(value, (float, complex, np.generic)) else value
