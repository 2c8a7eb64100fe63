"""Numbers of claims and of arrivals at barriers: the coordinator recognises one that is sent again by its number."""

from __future__ import annotations

from typing import Any

import msgspec

from dflow.distributed.wire.messages.coordination import AwaitBarrier
from dflow.distributed.wire.messages.message import Message, Request
from dflow.distributed.wire.messages.rounds import Claimed, ClaimSteps


class RequestNumbers:
    """The numbers that one client of the coordinator gives its requests."""

    def __init__(self) -> None:
        #: By run, the number of the last claim whose answer was seen.
        self._last_claims: dict[str, int] = {}

    def numbered(self, number: int, request: Request[Any]) -> Request[Any]:
        """Return the request to send; `number` is greater than all before."""
        match request:
            case AwaitBarrier():
                return msgspec.structs.replace(request, number=number)
            case ClaimSteps(run):
                return msgspec.structs.replace(request, number=number, last=self._last_claims.get(run, 0))
            case _:
                return request

    def answered(self, number: int, request: Request[Any], answer: Message) -> None:
        """Note the answer to the request that has this number."""
        if isinstance(request, ClaimSteps) and isinstance(answer, Claimed):
            self._last_claims[request.run] = number
