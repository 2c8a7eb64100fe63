"""A mapping that does not keep its keys alive, and finds them by identity.

`weakref.WeakKeyDictionary` compares keys by `==`, which for variables compares values. With None for values it is a
set.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import TypeVar
from weakref import ref

K = TypeVar("K")
V = TypeVar("V")


class WeakDict(MutableMapping[K, V]):
    """As `weakref.WeakKeyDictionary`, by identity. Threads may get, set and iterate at the same time."""

    def __init__(self) -> None:
        # An item goes when its key dies, before the number can be that of another object.
        self._items: dict[int, tuple[ref[K], V]] = {}

    def __getitem__(self, key: K) -> V:
        return self._items[id(key)][1]

    def __setitem__(self, key: K, value: V) -> None:
        # The callback refers to the dict alone, so that it does not keep this object alive.
        number, items = id(key), self._items
        items[number] = ref(key, lambda _: items.pop(number, None)), value

    def __delitem__(self, key: K) -> None:
        del self._items[id(key)]

    def __iter__(self) -> Iterator[K]:
        # A copy is made in one step, before the collector can remove an item.
        return (key for weak, _ in [*self._items.copy().values()] if (key := weak()) is not None)

    def __len__(self) -> int:
        return len(self._items)
