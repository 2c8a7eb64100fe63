"""Rules for the steps of a training loop that begin ahead of their call: all decisions on the options of `Async`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dflow.distributed.wire.messages.plans import Ahead
from dflow.tracing.errors import StrategyError

#: Least number of steps of a claim with lookahead: the first one's batch is not taken early.
LEAST_CLAIM = 8


@dataclass(frozen=True)
class AheadRules:
    """When the steps of a worker's loop begin on other tasks; see `Async` for the options.

    raises  StrategyError for a negative number, and for a `prefetch` above `max_staleness`
    """

    prefetch: int = 0
    lookahead: bool = False
    max_staleness: int | None = None

    def __post_init__(self) -> None:
        for name, count in (("prefetch", self.prefetch), ("max_staleness", self.max_staleness)):
            if count is not None and count < 0:
                raise StrategyError(f"Async: {name}: expected at least 0, got {count}")
        if self.max_staleness is not None and self.prefetch > self.max_staleness:
            raise StrategyError(
                f"Async: prefetch: expected at most max_staleness={self.max_staleness}, got {self.prefetch}: each step "
                "lacks as many updates of its worker",
                "give a smaller prefetch or a larger max_staleness",
            )

    @property
    def most_begun(self) -> int:
        """Number of later steps that have begun ahead while the loop runs one."""
        return self.prefetch + 1

    def ahead(self, called: int, begun: int, *, is_numbered: bool) -> Ahead:
        """Return how the next step begins ahead: the loop calls step `called`, and `begun` later ones have begun.

        is_numbered  whether the number of the step in its run is known
        """
        # The last one of `most_begun` is the first that may have the values of the called step's update.
        return Ahead(called if begun == self.prefetch else 0, self.prefetch == 0, is_numbered)

    @property
    def least_claim(self) -> int:
        """Least number of steps of a claim."""
        return LEAST_CLAIM if self.lookahead else 1

    def least_staleness(self, workers: int) -> int:
        """Return the least `max_staleness` with which steps begin ahead, if all workers take the same time for one."""
        # Each other worker is in a step when the values are read, and begins one before the step is called and one in
        # it. With `prefetch`, all workers do as many steps more before the call.
        return 3 * (workers - 1) + self.prefetch * workers

    def why_not(self, workers: int) -> str:
        """Return why no step may begin ahead: its values would be too old; empty if steps may."""
        least = self.least_staleness(workers)
        if self.max_staleness is None or self.max_staleness >= least:
            return ""
        return f"max_staleness={self.max_staleness} is below {least}, which {workers} workers need for it"


def table(every: Iterable[AheadRules], workers: Sequence[int]) -> str:
    """Return a table with a row for each of the rules: when step n of a worker begins, reads and sends ids.

    Its last columns have the least `max_staleness` for each number of `workers`.
    """
    rows = [["prefetch", "lookahead", "begins in", "reads after", "ids leave in", *(f"workers={n}" for n in workers)]]
    for rules in every:
        begun = [rules.ahead(1, begun, is_numbered=True).after for begun in range(rules.most_begun)]
        begins, reads = f"step n-{len(begun)}", f"step n-{begun.index(1) + 1}"
        ids, least = "step n-1" if rules.lookahead else "step n", map(rules.least_staleness, workers)
        rows.append([str(rules.prefetch), str(rules.lookahead), begins, reads, ids, *map(str, least)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
