from __future__ import annotations

import queue

from dflow.distributed.deadlines import Deadlines

DEADLINE_S = 30.0


def test_what_is_added_expires_once_and_in_order() -> None:
    expired: queue.SimpleQueue[str] = queue.SimpleQueue()
    deadlines = Deadlines(0.01, expired.put)
    for key in "abc":
        deadlines.add(key)
    assert [expired.get(timeout=DEADLINE_S) for _ in range(3)] == ["a", "b", "c"]
    deadlines.add("d")
    assert expired.get(timeout=DEADLINE_S) == "d"
    assert expired.empty()
    deadlines.close()


def test_what_is_discarded_does_not_expire() -> None:
    expired: queue.SimpleQueue[str] = queue.SimpleQueue()
    deadlines = Deadlines(0.05, expired.put)
    deadlines.add("discarded")
    deadlines.discard("discarded")
    deadlines.discard("unknown")
    deadlines.add("kept")
    assert expired.get(timeout=DEADLINE_S) == "kept"
    deadlines.close()
