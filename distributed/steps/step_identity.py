"""Identities of the steps of one loop: all attempts at a step have the same one, so each task applies the step once.

Other tasks identify a step by its run and its number in the run, since another worker may do it again. This process
identifies it by the number of the loop's steps that have ended: a step that failed is tried again with the same
elements of the process's own queues, even if its number in the run is another one then.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from dflow.distributed.transport.base import Peer
from dflow.lowering.state.applied_steps import OwnStep, StepOfRun
from dflow.tracing.errors import StepEnded

_loops = itertools.count()


class LoopSteps:
    """Identities of the steps of a loop over the run `run`, which are the same for each attempt at a step.

    unfinished  the numbers of the run's steps that this process began and that have not ended; shared by its loops
    epoch       function that gives the number of times that all tasks have returned to a snapshot
    is_synchronous  as in `StepOfRun`
    """

    def __init__(
        self, run: str, unfinished: set[int], epoch: Callable[[], int] = lambda: 0, *, is_synchronous: bool = False
    ) -> None:
        self.run, self._unfinished, self._newest_epoch = run, unfinished, epoch
        self._is_synchronous = is_synchronous
        #: The run of this process's own part of the steps.
        self.own_run = f"loop {next(_loops)}"
        #: The other tasks that had a part in a step.
        self.peers: dict[str, Peer] = {}
        self._number, self._calls, self._ended, self._epoch = 0, 0, 0, 0

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Return the context of an attempt at step `number` of the run, where `CURRENT_STEPS` is this loop.

        A step that ends with an error stays unfinished, except by StepEnded: another attempt has ended it.
        """
        self._number, self._calls, self._epoch = number, 0, self._newest_epoch()
        token = CURRENT_STEPS.set(self)
        try:
            yield
        except StepEnded:
            self._unfinished.discard(number)
            raise  # by another attempt: the elements of this process's own queues are left for the next step
        except BaseException:
            self._unfinished.add(number)
            raise
        else:
            self._unfinished.discard(number)
            self._ended += 1
        finally:
            CURRENT_STEPS.reset(token)

    def may_come_again(self, number: int) -> None:
        """Count a step as unfinished, although it ended without an error, so that tasks keep its results."""
        self._unfinished.add(number)

    def are_over_before(self, number: int) -> None:
        """Count all steps before `number` as finished: none of them is done again."""
        self._unfinished.difference_update([one for one in self._unfinished if one < number])

    def called(self) -> None:
        """Count a call of a function in the step."""
        self._calls += 1

    def of(self, number: int, call: int = 0) -> StepOfRun:
        """Return the identity, for other tasks, of the call with number `call` in step `number`."""
        return StepOfRun(self.run, number, call, self.unfinished(number), self._epoch, self._is_synchronous)

    @property
    def current(self) -> StepOfRun:
        """The identity, for other tasks, of the newest call in the present step."""
        return self.of(self._number, self._calls - 1)

    @property
    def own(self) -> OwnStep:
        """The identity, for this process, of the newest call in the present step."""
        numbers = self._ended, self._calls - 1
        return OwnStep(self.own_run, *numbers, epoch=self._epoch, is_synchronous=self._is_synchronous)

    def unfinished(self, number: int | None = None) -> tuple[int, ...]:
        """Return the numbers of the unfinished steps in order, without `number`."""
        return tuple(sorted(self._unfinished - {number})) if self._unfinished else ()


#: The loop whose step this thread runs.
CURRENT_STEPS: ContextVar[LoopSteps | None] = ContextVar("dflow_loop_steps", default=None)
