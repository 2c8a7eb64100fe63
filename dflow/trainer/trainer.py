"""`dflow.Trainer`: the loop of a strategy with evaluations, checkpoints, early stopping and resumption.

The steps are done in segments, from one evaluation or checkpoint to the next. Each segment is a run of the strategy, of
its own name. A run ends on all workers when all its steps are done. So an evaluation or a checkpoint on a cluster is of
exactly the steps before it, and a program that is started again goes on with the step and the batch after it.

Invariants: the end of a segment is handled once on each worker, in the order of the segments; what is decided there is
decided once for all workers (`shared_decisions`).
"""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from dflow.distributed.client.coordinator_client import AGREE_S
from dflow.distributed.process.termination import Terminated
from dflow.distributed.training.batch_supply import END, BatchSupply
from dflow.distributed.training.strategy import Strategy, run_name
from dflow.distributed.training.work_messages import TrainingEvent, TrainingPlan
from dflow.distributed.wire.messages.status import GetStatus, NotFinite
from dflow.tracing.accepted_faults import NOT_FINITE, SHORT, is_accepted
from dflow.tracing.column_tables import refuse_table
from dflow.tracing.devices.task_name import split_task_name, task_name
from dflow.tracing.errors import DeadlineExceeded, QueueClosed, TrainingError
from dflow.tracing.jax_frontend import hides_frames
from dflow.tracing.near_names import suggests_keywords
from dflow.tracing.source import caller
from dflow.trainer.callbacks import Callback, EarlyStopping
from dflow.trainer.evaluation import evaluate, is_on_tasks, metric_names
from dflow.trainer.numbered_batches import by_number, check_count, refusal
from dflow.trainer.own_evaluation import OwnEvaluation
from dflow.trainer.run_progress import RunningMeans, progress_bar
from dflow.trainer.shared_decisions import SharedDecisions
from dflow.training.checkpoint_manager import CheckpointManager
from dflow.training.metric_direction import missing_metric

LOGGER = logging.getLogger("dflow")
#: Least time between two looks at the values that steps returned, in s.
LOOK_S = 1.0
#: Time between two looks for the checkpoint that worker 0 makes, in s.
_WAIT_S = 0.05


@dataclass(frozen=True)
class TrainingResult:
    """The result of `Trainer.run`.

    steps       number of steps of the run that are done, by all workers and earlier programs
    metrics     the newest means of the results of this worker's steps; see `Callback.on_metrics`
    evaluation  the result of the newest evaluation; of one at the end if earlier programs did all steps
    reason      the text of the callback that ended the run; empty if all steps are done
    """

    steps: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    evaluation: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""


class Trainer:
    """Runs training steps with a schedule of evaluations and checkpoints, in one process or on a cluster.

    step            as for the `run` of a strategy
    strategy        for instance `dflow.distributed.Async(cluster)`, with `cluster = dflow.connect()`
    evaluation      step and batches for `dflow.evaluate`, whose batches the workers of a cluster share
    evaluate_every  number of steps between evaluations; there is one at the end too
    checkpoints     a manager, which has restored the newest checkpoint already. With `every` a number of steps, the
                    state is saved after each multiple of it, by a time as soon as that has passed; and at the end
    callbacks       `Callback`s, called in this order
    progress        whether to show a progress bar on standard error; None: if that is a terminal

    On a cluster every worker makes the same trainer. Values that steps return are read about once a second, and only if
    they are computed already, so that reading them never makes the next step wait.

    Raises TrainingError for arguments that do not fit together.
    """

    @suggests_keywords
    def __init__(
        self,
        step: Callable[..., Any],
        strategy: Strategy,
        *,
        evaluation: tuple[Callable[..., Any], Any] | OwnEvaluation | None = None,
        evaluate_every: int | None = None,
        checkpoints: CheckpointManager | None = None,
        callbacks: Sequence[Callback] = (),
        progress: bool | None = None,
    ) -> None:
        self._step, self._strategy, self._progress = step, _checked_strategy(strategy), progress
        self._cluster = strategy.cluster
        self._evaluation, self._evaluate_every = evaluation, evaluate_every
        self._checkpoints, self._callbacks = checkpoints, tuple(callbacks)
        self._check()

    @hides_frames
    @suggests_keywords
    def run(self, batches: Callable[[int], Any] | Any, *, steps: int, name: str | None = None) -> TrainingResult:
        """Do the steps up to number `steps`, after those of the restored checkpoint; return what came of them.

        batches  a function of a number, as for the `run` of the strategy, or what is indexed by it, such as
                 `dflow.data.batches` of arrays. The numbers go on after those of the checkpoint. They end with an
                 IndexError, or when a step takes from a queue that is closed and empty: then the last checkpoint is
                 written and `on_end` is called
        steps    number of steps of the whole run, as the strategy counts them
        name     of the run, the same on every worker; by default, runs are numbered in the order of the program

        Raises TrainingError for other batches, fewer than the steps use, and a negative number of steps. Raises in a
        standalone process also at the end, after the last checkpoint and `on_end`: for batches that have ended before
        the steps were done, and for a loss that was not finite, unless DFLOW_ACCEPT accepts that. And what the
        strategy, the evaluation, the checkpoints and the callbacks raise.
        """
        total = operator.index(steps)
        if total < 0:
            raise TrainingError(f"Trainer: steps: expected at least 0, got {total}", "give 0 or more", at=caller())
        remedy = "give dflow.data.batches(data, size, epochs=None), which takes its rows"
        refuse_table("Trainer", batches, remedy, TrainingError)
        first = self._checkpoints.next_step if self._checkpoints else 0
        check_count(batches, total * self._strategy.batches_per_step)
        self._check_metrics()
        run = _TrainingRun(self, by_number(batches), name or run_name(self._cluster, "trainer"), first, total)
        for callback in self._callbacks:
            callback.on_start(first, self._cluster)
        with progress_bar(run.name, total, first, self._progress) as show:
            result = run.result(show)
        if self._checkpoints:
            self._checkpoints.wait()
        for callback in self._callbacks:
            callback.on_end(result.steps, result.reason)
        if self._cluster.is_standalone:  # else the launcher decides, for all workers
            run.refuse_faults()
        return result

    def _check(self) -> None:
        evaluation: Any = self._evaluation
        if (evaluation is None) != (self._evaluate_every is None):
            raise refusal(
                "expected evaluation= and evaluate_every= together, got one of them",
                "give evaluation=(step, batches), evaluate_every=1000",
            )
        is_pair = isinstance(evaluation, tuple) and len(evaluation) == 2
        if not (is_pair or isinstance(evaluation, OwnEvaluation | None)):
            raise refusal(f"evaluation: expected a step and batches, got {evaluation!r}", "give (step, batches)")
        if self._evaluate_every is not None and self._evaluate_every < 1:
            raise refusal(f"evaluate_every: expected at least 1, got {self._evaluate_every}", "give a number of steps")
        for callback in self._callbacks:
            if not isinstance(callback, Callback):
                raise refusal(f"callbacks: expected dflow.Callback, got {callback!r}", "derive its class from it")
            if isinstance(callback, EarlyStopping) and evaluation is None:
                raise refusal("expected an evaluation for EarlyStopping, got none", "give evaluation=(step, batches)")
        if self._checkpoints is not None:
            self._check_checkpoints(self._checkpoints)

    def _check_metrics(self) -> None:
        """Raise TrainingError if the evaluation returns no metric of that name, as far as a batch of it can be seen."""
        stops = [callback for callback in self._callbacks if isinstance(callback, EarlyStopping)]
        best = self._checkpoints.best_metric if self._checkpoints else None
        pair: Any = self._evaluation
        if not isinstance(pair, tuple) or not (stops or best) or (names := metric_names(*pair)) is None:
            return
        for callback in stops:
            callback.check(names)
        if best is not None and best not in names:
            raise TrainingError(*missing_metric("Trainer: checkpoints: best=", best, names), at=caller())

    def _check_checkpoints(self, manager: CheckpointManager) -> None:
        if not isinstance(manager.every, int) and not self._cluster.is_standalone:
            raise refusal(
                f"checkpoints: expected every= a number of steps on a cluster, got {manager.every!r}",
                "give CheckpointManager(..., every=1000), after which all workers save the same steps",
            )
        if manager.is_on_tasks and self._strategy.ends_together:
            raise refusal(
                f"checkpoints: expected the variables of each worker for {type(self._strategy).__name__}, got those on "
                "tasks alone, which would be of later steps than the others after a restart",
                "give CheckpointManager the dense layers and their optimizer too",
            )
        is_met = isinstance(manager.every, int) and self._evaluate_every and manager.every % self._evaluate_every == 0
        if manager.best_metric is not None and not is_met:
            raise refusal(
                f"checkpoints: expected an evaluation at each checkpoint, for best=({manager.best_metric!r}, ...), got "
                f"every={manager.every!r} and evaluate_every={self._evaluate_every!r}",
                "give evaluate_every= that divides every=, or leave best= out",
            )


class _TrainingRun:
    """One call of `Trainer.run`."""

    def __init__(self, trainer: Trainer, by_number: Callable[[int], Any], name: str, first: int, total: int) -> None:
        self._step, self._strategy, self._cluster = trainer._step, trainer._strategy, trainer._cluster
        self._evaluation, self._evaluate_every = trainer._evaluation, trainer._evaluate_every
        self._checkpoints, self._callbacks = trainer._checkpoints, trainer._callbacks
        self._on_step = [one for one in self._callbacks if type(one).on_step is not Callback.on_step]
        self._by_number, self.name = by_number, name
        self._first, self._total = first, total
        self._means = RunningMeans()
        self._done, self._reason = first, ""
        #: A reason of this worker that came after the others had decided to go on; it counts at the next point.
        self._late_reason = ""
        self._decisions = SharedDecisions(self._cluster, name, is_together=self._strategy.ends_together)
        self._metrics, self._found = dict[str, float](), dict[str, float]()
        #: Whether all losses were finite, as far as the coordinator knew at the last save.
        self._is_finite = True
        self._begun: list[tuple[int, int]] = []
        #: Whether the batches have ended before the steps were done, and the error that says so.
        self._has_ended = False
        self._ended: Exception | None = None
        self._restore_callbacks()

    def result(self, show: Callable[[int, Mapping[str, float]], None]) -> TrainingResult:
        """Do the steps, and the evaluations and checkpoints between them; `show` shows the progress."""
        self._show = show
        self._tell_plan()
        self._undone = self._cluster.steps.undone
        for segment in self._segments():
            self._begun.append(segment)
            self._steps(*segment)
            self._repeat()
            self._look(waits=True)
            self._decide(_point(segment[1]))
            if self._has_reason():
                is_one_step = self._cluster.is_standalone or self._strategy.ends_together
                if is_one_step or (self._has_ended and self._is_saver):
                    self._save(self._done, {})
                break
            self._done = segment[1]
            self._end_segment(self._done)
            self._repeat()
            if self._has_reason():
                break
        if self._has_reason() and not self._has_ended:
            self._tell_plan(is_over=True)
        if self._evaluation is not None and not self._begun and self._first > 0:  # an earlier program did all steps
            self._found = self._evaluated(self._done)
        return TrainingResult(self._done, self._metrics, self._found, self._reason)

    def _tell_plan(self, *, is_over: bool = False) -> None:
        """Report the steps of the whole run to the coordinator; each segment is a part of that run."""
        plan = TrainingPlan(self.name, self._cluster.task, self._first, self._total, is_over)
        self._cluster.coordinator.tell(plan)

    def _tell_event(self, kind: str, steps: int, metrics: Mapping[str, float] | None = None) -> None:
        """Tell the coordinator of an evaluation or a checkpoint of all workers, once."""
        task = self._cluster.task
        if split_task_name(task)[1] == 0:
            self._cluster.coordinator.tell(TrainingEvent(self.name, task, kind, steps, dict(metrics or {})))

    def _repeat(self) -> None:
        """Do steps again that a return of the tasks to a snapshot has undone, in the last segment and before it."""
        while not self._reason and self._cluster.steps.undone != self._undone:
            self._undone = self._cluster.steps.undone
            for segment in self._begun:
                self._steps(*segment)
                if self._checkpoints is not None and self._checkpoints.last_step >= segment[1] - 1:
                    self._checkpoints.passed(segment[1] - 1)

    def _segments(self) -> Iterator[tuple[int, int]]:
        """Yield the first and one after the last step of each segment."""
        every = self._checkpoints.every if self._checkpoints else None
        periods = [period for period in (self._evaluate_every, every) if isinstance(period, int)]
        start = self._first
        while start < self._total:
            stop = min([self._total, *((start // period + 1) * period for period in periods)])
            yield start, stop
            start = stop

    def _steps(self, start: int, stop: int) -> None:
        """Do this worker's part of the steps from `start` to `stop` - 1."""
        each = self._strategy.batches_per_step
        offset = start * each
        batches = BatchSupply(lambda number: self._batch(number + offset), may_end=True, first=offset)
        look_s = time.monotonic() + LOOK_S
        run = self._strategy.run(self._step, batches, steps=stop - start, name=f"{self.name} {start}-{stop}")
        with closing(cast(Any, run)), self._saved_at_stop(), self._ended_by_queue():
            for outcome in run:
                self._means.add(outcome)
                self._done = start + batches.taken // each + 1
                for callback in self._on_step:
                    self._note(callback.on_step(self._done, outcome))
                if time.monotonic() >= look_s:
                    self._look()
                    self._save_by_time()
                    self._note(self._decisions.known_reason(_point(stop)))
                    look_s = time.monotonic() + LOOK_S
                if self._reason and not self._strategy.ends_together:
                    return
        # Where all workers end together, the batches of another one may have ended, or it has a reason.
        if self._strategy.ends_together and self._done < stop:
            self._decide(f"{_point(stop)}, which the loop has not come to")
        if batches.has_ended or (self._strategy.ends_together and self._done < stop):
            self._note_end("the batches have ended")

    def _batch(self, number: int) -> Any:
        """Return the batch of a number; `END` after the last one, and where all loops end with this worker's."""
        if self._reason:
            return END
        try:
            return self._by_number(number)
        except (IndexError, StopIteration) as error:
            self._ended = error
            return END
        except QueueClosed as error:
            if not self._strategy.ends_together:
                raise
            self._ended = error
            return END

    @contextmanager
    def _ended_by_queue(self) -> Iterator[None]:
        """Return a context of steps whose batches end with a queue that is closed and empty."""
        try:
            yield
        except QueueClosed as closed:
            self._ended = closed
            self._note_end(str(closed).splitlines()[0])

    def _note_end(self, why: str) -> None:
        """Note that the batches have ended, unless all steps are done or the run ends for another reason."""
        if not self._reason:
            self._has_ended = True
        self._note(why)

    def refuse_faults(self) -> None:
        """Raise TrainingError if the batches ended too early or a loss was not finite, unless that is accepted."""
        if self._has_ended and self._done < self._total and not is_accepted(SHORT):
            raise TrainingError(
                f"Trainer: run {self.name!r}: expected {self._total} steps, got {self._done}: {self._reason}",
                f"give more, or ask for fewer steps; DFLOW_ACCEPT={SHORT} accepts it",
            ) from self._ended
        found = self._not_finite()
        if found and not is_accepted(NOT_FINITE):
            saved = self._checkpoints.checkpoints if self._checkpoints else ()
            last = next((f", go on from {one.path}" for one in reversed(saved) if one.is_finite), "")
            step = int(found[0].run.rpartition(" ")[2].partition("-")[0]) + found[0].step
            raise TrainingError(
                f"Trainer: run {self.name!r}: expected a finite {found[0].metric} at each step, got {found[0].value} "
                f"first at step {step}",
                f"look for NaN in the data and in the restored checkpoint, lower the learning rate, or clip the "
                f"gradients{last}; DFLOW_ACCEPT={NOT_FINITE} accepts it",
            )

    def _not_finite(self) -> list[NotFinite]:
        """Return the first losses of this run that are not finite."""
        found = self._cluster.coordinator.ask(GetStatus(), AGREE_S).not_finite
        return [one for one in found if one.run.rpartition(" ")[0] == self.name]

    def _begin_save(self, manager: CheckpointManager, stop: int, metrics: Mapping[str, float]) -> None:
        if Terminated.raised is None:  # else the coordinator may have been ended too
            self._is_finite = not self._not_finite()
        manager.save(stop - 1, metrics, extra=self._callback_state(), is_finite=self._is_finite)
        self._tell_event("checkpoint", stop)

    @contextmanager
    def _saved_at_stop(self) -> Iterator[None]:
        """Return a context that saves when all workers end their loops after the same step, by SIGTERM."""
        try:
            yield
        except Terminated as terminated:
            if terminated.is_agreed:
                self._save(self._done, {})
            raise

    def _look(self, *, waits: bool = False) -> None:
        """Read the values that steps returned; with `waits`, wait for the values that are not computed yet."""
        metrics = self._means.take(waits=waits)
        self._show(self._done, metrics)
        if metrics:
            self._metrics = metrics
            for callback in self._callbacks:
                self._note(callback.on_metrics(self._done, metrics))

    def _save_by_time(self) -> None:
        manager = self._checkpoints
        if manager is not None and not isinstance(manager.every, int) and manager.should_save(self._done - 1):
            self._save(self._done, {})

    def _end_segment(self, stop: int) -> None:
        is_last, found = stop == self._total, dict[str, float]()
        if self._evaluate_every is not None and (is_last or stop % self._evaluate_every == 0):
            found = self._found = self._evaluated(stop)
            LOGGER.info("%s: after %d steps: %s", self.name, stop, found)
            self._tell_event("evaluation", stop, found)
            for callback in self._callbacks:
                self._note(callback.on_evaluation(stop, found))
            self._decide(f"{_point(stop)}, after the evaluation")
        every = self._checkpoints.every if self._checkpoints else None
        if is_last or self._reason or (isinstance(every, int) and stop % every == 0):
            self._save(stop, found)

    def _evaluated(self, stop: int) -> dict[str, float]:
        """Return the results of an evaluation, the same on all workers."""
        assert self._evaluation is not None
        if isinstance(self._evaluation, OwnEvaluation):
            found = self._evaluation.metrics(stop)
            while not self._reason and self._cluster.steps.undone != self._undone:
                self._repeat()  # the state may have lacked steps
                found = self._evaluation.metrics(stop)
            return self._decisions.results(f"{_point(stop)}, evaluated", found)
        step, batches = self._evaluation
        # Variables of the workers' own processes are the same in all of them: each evaluates all batches.
        if self._cluster.is_standalone or not is_on_tasks(step, batches):
            return self._decisions.results(f"{_point(stop)}, evaluated", evaluate(step, batches))
        return evaluate(step, batches, cluster=self._cluster, name=f"{self.name} {stop}")

    def _save(self, stop: int, metrics: Mapping[str, float]) -> None:
        """Save the state after `stop` steps, if there is a manager, and it has not saved them yet."""
        manager = self._checkpoints
        if manager is None or manager.last_step >= stop - 1:
            return
        if not manager.is_shared:
            self._begin_save(manager, stop, metrics)
            return
        # The other workers begin no step until worker 0 has captured the state, or one of them was elected to go on
        # without a checkpoint, because it has left.
        saver, election = task_name(split_task_name(self._cluster.task)[0], 0), f"{self.name} saves {stop}"
        if self._cluster.task == saver:
            if self._cluster.elect(election):
                self._begin_save(manager, stop, metrics)
            return
        until = time.monotonic() + manager.timeout_s
        while manager.last_step < stop - 1 and self._cluster.steps.undone == self._undone:
            if saver not in self._cluster.tasks and self._cluster.elect(election):
                LOGGER.warning("%s: no checkpoint after %d steps: %s has left", self.name, stop, saver)
                return
            if time.monotonic() > until:
                raise DeadlineExceeded(
                    f"Trainer: expected worker 0 to save step {stop - 1}, waited {manager.timeout_s:g} s for that",
                    "see its output, and give the same Trainer on all workers",
                )
            time.sleep(_WAIT_S)

    @property
    def _is_saver(self) -> bool:
        """Whether this worker saves: only worker 0 if it saves for the others, else every worker."""
        return (
            self._checkpoints is None or not self._checkpoints.is_shared or split_task_name(self._cluster.task)[1] == 0
        )

    def _decide(self, point: str) -> None:
        """Take the decision of all workers whether the run ends here; batches that have ended are one worker's own."""
        if self._has_ended:
            return
        mine = self._reason or self._late_reason
        self._reason = self._decisions.reason(point, mine)
        self._late_reason = "" if self._reason else mine

    def _has_reason(self) -> bool:
        return bool(self._reason)  # a method, since mypy takes the attribute for unchanged by other methods

    def _note(self, reason: str | None) -> None:
        self._reason = self._reason or reason or ""

    def _callback_state(self) -> dict[str, float]:
        return {
            f"{number}/{type(callback).__name__}/{key}": value
            for number, callback in enumerate(self._callbacks)
            for key, value in callback.state().items()
        }

    def _restore_callbacks(self) -> None:
        manager = self._checkpoints
        if manager is None or not self._first:
            return
        # The one before `first` may be deleted: the tasks had returned to a snapshot of that moment.
        saved = next((one.extra for one in reversed(manager.checkpoints) if one.step < self._first), {})
        for number, callback in enumerate(self._callbacks):
            prefix = f"{number}/{type(callback).__name__}/"
            state = {key.removeprefix(prefix): value for key, value in saved.items() if key.startswith(prefix)}
            callback.restore(state)


def _point(stop: int) -> str:
    return f"the end of step {stop - 1}"


def _checked_strategy(strategy: Any) -> Strategy:
    if not isinstance(strategy, Strategy):
        raise refusal(
            f"strategy: expected a strategy, got {strategy!r}", "give dflow.distributed.Async(dflow.connect())"
        )
    return strategy
