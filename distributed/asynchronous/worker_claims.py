"""Claims of steps, which wait until other workers end the last steps; a long wait names the workers that hold them."""

from __future__ import annotations

import logging
import threading

from dflow.distributed.client.coordinator_client import DESCRIBE_S, CoordinatorClient
from dflow.distributed.training.work_messages import Claimed, ClaimSteps
from dflow.distributed.wire.messages.status import GetStatus
from dflow.tracing.devices.task_name import short_task_name
from dflow.tracing.errors import DeadlineExceeded, DflowError

#: Deadline of a claim, which may wait for other workers to end their last steps, in s.
CLAIM_S = 3600.0
#: A claim that waits longer is logged, with the workers that hold the steps.
LONG_CLAIM_S = 60.0
LOGGER = logging.getLogger("dflow")


def claimed(coordinator: CoordinatorClient, claim: ClaimSteps, timeout_s: float = CLAIM_S) -> Claimed:
    """Send a claim to the coordinator, and return the answer; log a warning after a wait of `LONG_CLAIM_S`.

    Raises DeadlineExceeded, naming the workers that hold the steps that are left.
    """

    def announce() -> None:
        held = _holders(coordinator)
        LOGGER.warning("%s has waited %g s for steps%s", short_task_name(coordinator.task), LONG_CLAIM_S, held)

    def announce_soon() -> None:  # the session's clock must not wait for an answer
        threading.Thread(target=announce, name="dflow long claim", daemon=True).start()

    notice = coordinator.clock.after(LONG_CLAIM_S, announce_soon)
    try:
        return coordinator.ask(claim, timeout_s)
    except DeadlineExceeded as error:
        raise DeadlineExceeded(f"{error}{_holders(coordinator)}") from None
    finally:
        notice.stop()


def _holders(coordinator: CoordinatorClient) -> str:
    """Ask the coordinator for the other workers that hold claimed steps, and return a text for the end of an error.

    It is empty if there are none, or without an answer.
    """
    try:
        workers = coordinator.ask(GetStatus(), DESCRIBE_S).workers
    except DflowError:
        return ""
    others = [one for one in workers if one.held and one.task != coordinator.task]
    held = ", ".join(f"{coordinator.describe(one.task)} holds {one.held}" for one in others)
    return f"; of the claimed steps, {held}: see its output, or end it, and others do them" if held else ""
