"""The coordinator of a process that is in no cluster: the same state machine, called without a connection."""

from __future__ import annotations

import itertools
import logging
import threading
from typing import cast

from dflow.distributed.client.request_numbers import RequestNumbers
from dflow.distributed.coordinator.coordinator_events import Asked, Event, Log, SendReply, Started, Told
from dflow.distributed.coordinator.coordinator_state import CoordinatorState
from dflow.distributed.wire.failures import error_from
from dflow.distributed.wire.messages.connection import Failure
from dflow.distributed.wire.messages.message import Answer, Message, Notice, Request
from dflow.distributed.wire.messages.roster import Join

LOGGER = logging.getLogger("dflow")
#: The number of the only connection.
_PEER = 0


class OwnCoordinator:
    """Answers the only task of a cluster, `task`; thread-safe. Its time stands still, since nothing has to expire."""

    def __init__(self, task: str) -> None:
        self._state = CoordinatorState({})
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._request_numbers = RequestNumbers()
        self._handle(Started(0.0, "standalone"))
        self.ask(Join(task, ""))

    def ask(self, message: Request[Answer]) -> Answer:
        """Return the answer, which a request of the only task never waits for. Raises the error that it is."""
        with self._lock:
            number = next(self._numbers)
            request = self._request_numbers.numbered(number, message)
            answer = self._handle(Asked(0.0, _PEER, number, request))[number]
            self._request_numbers.answered(number, request, answer)
        if isinstance(answer, Failure):
            raise error_from(answer)
        return cast(Answer, answer)

    def tell(self, message: Notice) -> None:
        """Take a notification."""
        with self._lock:
            self._handle(Told(0.0, _PEER, message))

    def _handle(self, event: Event) -> dict[int, Message]:
        """Return the answers by the number of their request."""
        answers = {}
        for command in self._state.handle(event):
            match command:
                case SendReply(ask, message):
                    answers[ask] = message
                case Log(text):
                    LOGGER.warning("%s", text)
        return answers
