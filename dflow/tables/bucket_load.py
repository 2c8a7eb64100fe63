"""How full the buckets of a vocabulary are: ids fall into them at random, so some are full while rows are free.

The number of ids of a bucket has a Poisson distribution. Its mean is the bucket's size times the load: the number of
ids divided by the number of rows.
"""

from __future__ import annotations

import math

#: Share of ids without a row of their own that a table with enough room has at most.
SMALL_SHARE = 0.001
#: Least share of free rows that is worth a warning when ids have lost their rows.
MUCH_FREE = 0.1


def share_without_row(load: float, bucket: int = 32) -> float:
    """Return the expected share of ids that have no row at a time, and that evict another id when they are used."""
    mean = load * bucket
    if mean <= 0:
        return 0.0
    last = int(mean + 12 * math.sqrt(mean) + bucket + 12)
    beyond = sum(
        (count - bucket) * math.exp(count * math.log(mean) - mean - math.lgamma(count + 1))
        for count in range(bucket + 1, last)
    )
    return beyond / mean


def rows_for(ids: int, bucket: int = 32, share: float = SMALL_SHARE) -> int:
    """Return the number of rows, rounded up to two digits, at which at most `share` of `ids` ids have no row."""
    load = max((step / 100 for step in range(1, 100) if share_without_row(step / 100, bucket) <= share), default=0.01)
    rows = ids / load
    unit: int = 10 ** max(0, math.floor(math.log10(max(rows, 1))) - 1)
    return int(math.ceil(rows / unit) * unit)
