"""`fit`: the loop of a strategy, with an epoch for each part of the run, and Keras's callbacks on worker 0.

At the end of an epoch no step runs. All workers read the same sums of the metrics, evaluate the validation data
together, and wait until worker 0 has called its callbacks and set the variables that these have changed. The next
process of a worker that has died goes through the epochs that are done, whose results are known, to the present one:
the callbacks of worker 0 then see the same logs again, and change and write nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from dflow.distributed.collectives.all_reduce import AllReduce
from dflow.distributed.synchronous.hybrid import Hybrid
from dflow.distributed.synchronous.sync import Sync
from dflow.distributed.training.strategy import Strategy
from dflow.keras.chief_words import ChiefWords
from dflow.keras.fit_data import FitBatches, part_of
from dflow.keras.live_values import (
    KeptWeights,
    LiveValues,
    from_text,
    refuse_changes,
    refuse_weights,
    replaced,
    to_text,
)
from dflow.keras.metric_totals import VECTOR, MetricTotals
from dflow.tracing.errors import TrainingError
from dflow.trainer.callbacks import Callback
from dflow.trainer.own_evaluation import OwnEvaluation
from dflow.trainer.trainer import Trainer

#: Methods of a Keras model that callbacks use to read or write files.
_FILES = ("save", "save_weights", "load_weights", "export")
#: Methods of callbacks that are called for each batch of a training.
_BATCH_CALLS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
_STOPPED = "a callback of Keras has set stop_training"


@dataclass(frozen=True)
class FitPlan:
    """What a call of `fit` does, the same on all workers.

    run         its name
    strategy    the strategy whose loop runs
    step        a `dflow.jit` function of the row of an epoch in `totals`, the weight of a part, and the batch
    batches     the training data, in batches of all workers together
    steps       number of these batches in an epoch
    epochs      numbers of the first epoch and of the one after the last
    totals      gets the metrics; `row` is that of epoch 0
    validate    returns the metrics of the validation data after an epoch; none if there is no validation
    """

    run: str
    strategy: Strategy
    step: Callable[..., Any]
    batches: FitBatches
    steps: int
    epochs: tuple[int, int]
    totals: MetricTotals
    row: int
    validate: Callable[[int], Mapping[str, float]]

    @property
    def has_copies(self) -> bool:
        """Whether each of several workers has the variables itself, so that all change them together."""
        return self.strategy.ends_together and not self.strategy.cluster.is_standalone


class Fit(Callback):
    """One call of `fit` on this worker: calls Keras's callbacks in the run of a `Trainer`.

    model      the Keras model
    values     copies its values from and to the variables of dflow
    kept       the weights that callbacks have taken; None for a model with tables, whose weights are refused
    callbacks  as for Keras's `fit`, and so is `verbose`
    """

    def __init__(
        self, plan: FitPlan, model: Any, values: LiveValues, kept: KeptWeights | None, callbacks: Any, verbose: Any
    ) -> None:
        self._plan, self._model, self._values, self._kept = plan, model, values, kept
        self._words = ChiefWords(plan.strategy.cluster, plan.run, is_together=plan.strategy.ends_together)
        self._callbacks = self._made(callbacks, verbose)
        self._calls_batches = any(map(_is_for_batches, self._callbacks.callbacks))
        #: The first epoch, and the one that has not ended.
        self._first = self._epoch = plan.epochs[0]
        #: Sums of the metrics over this worker's steps of the epoch, for callbacks of batches.
        self._sums: dict[str, Any] = {}
        self._logs: Mapping[str, float] = {}

    def history(self) -> Any:
        """Train, and return Keras's `History`."""
        plan, model = self._plan, self._model
        instead = {} if self._kept is not None else {"get_weights": lambda: refuse_weights(model.name)}
        model.stop_training, model._initial_epoch = False, None
        with self._values.shown(instead) if self._words.is_chief else self._only_history():
            self._first = self._epoch = self._at("the begin", self._begin)["epoch"]
            if self._epoch < plan.epochs[1]:
                plan.batches.end_epoch()  # as Keras does at first
                plan.batches.begin_epoch()
                trainer = Trainer(
                    plan.step,
                    plan.strategy,
                    evaluation=OwnEvaluation(self._epoch_logs),
                    evaluate_every=plan.steps,
                    callbacks=[self],
                    progress=False,
                )
                trainer.run(self._batch, steps=(plan.epochs[1] - self._first) * plan.steps, name=plan.run)
            else:
                self._at("the end", self._end)
        plan.batches.finish(self._epoch - self._first)
        return model.history

    @contextmanager
    def _only_history(self) -> Iterator[None]:
        self._callbacks.on_train_begin()
        yield
        self._callbacks.on_train_end()

    def _made(self, given: Any, verbose: Any) -> Any:
        """Return Keras's list of callbacks; on workers other than worker 0, the history alone."""
        if verbose == "auto":  # as under TensorFlow's ParameterServerStrategy
            verbose = 1 if self._plan.strategy.cluster.is_standalone else 2
        is_chief, own = self._words.is_chief, getattr(given, "callbacks", given)
        # After the callbacks that add to the logs, such as ReduceLROnPlateau.
        last = keras.callbacks.LambdaCallback(on_epoch_end=self._note_logs)
        return keras.callbacks.CallbackList(
            [*(keras.tree.flatten(own) if own else ()), last] if is_chief else None,
            add_history=True,
            add_progbar=is_chief and verbose != 0,
            model=self._model,
            verbose=verbose,
            epochs=self._plan.epochs[1],
            steps=self._plan.steps,
        )

    def _note_logs(self, epoch: int, logs: Any) -> None:
        self._logs = {name: float(value) for name, value in logs.items()}

    def _begin(self) -> dict[str, Any]:
        self._callbacks.on_train_begin()
        epoch = self._model._initial_epoch or self._plan.epochs[0]  # as set by BackupAndRestore
        if epoch < self._plan.epochs[1]:
            self._callbacks.on_epoch_begin(epoch)
        return {"epoch": epoch}

    def _batch(self, number: int) -> Any:
        plan, each = self._plan, self._plan.strategy.batches_per_step
        step, index = divmod(number, each)
        part, weight = part_of(plan.batches.take(step), index, each)
        if weight is not None and sees_all_parts(plan.strategy):
            raise TrainingError(
                f"fit under {type(plan.strategy).__name__}: batch {step}: expected a multiple of {each} examples, one "
                "part for each worker, got another number",
                "give a batch_size that the number of workers divides, and leave out the last examples of the data",
            )
        epoch, position = divmod(step, plan.steps)
        if self._calls_batches and position % self._model.steps_per_execution == 0:
            self._callbacks.on_train_batch_begin(position)
        return (np.int32(plan.row + self._first + epoch), weight, *part)

    def on_step(self, steps: int, outcome: Any) -> str | None:
        """Call worker 0's callbacks of batches, with the metrics of worker 0's steps of the epoch."""
        self._values.stale()
        if not self._calls_batches:
            return None
        position, each = (steps - 1) % self._plan.steps, self._model.steps_per_execution
        added = {name.removeprefix(VECTOR): one for name, one in outcome.items() if name.startswith(VECTOR)}
        self._sums = {dtype: one + self._sums[dtype] for dtype, one in added.items()} if self._sums else added
        if (position + 1) % each == 0 or position + 1 == self._plan.steps:
            self._callbacks.on_train_batch_end(position, self._plan.totals.states.logs(self._sums))
            self._push_after_batch()
        return _STOPPED if self._model.stop_training else None

    def _push_after_batch(self) -> None:
        if changed := self._values.changed():
            if self._plan.has_copies:
                refuse_changes(type(self._plan.strategy).__name__)
            self._values.push(changed)

    def _epoch_logs(self, steps: int) -> Mapping[str, float]:
        """Return the metrics of the epoch that has ended and of its validation."""
        self._values.stale()
        totals, self._sums = self._plan.totals, {}
        logs = totals.states.results(totals.read(self._plan.row + self._epoch))
        return logs | {f"val_{name}": value for name, value in self._plan.validate(self._epoch).items()}

    def on_evaluation(self, steps: int, metrics: Mapping[str, float]) -> str | None:
        """Have worker 0 end the epoch, and begin the next one."""
        epoch, logs = self._epoch, dict(metrics)

        def end() -> dict[str, Any]:
            self._callbacks.on_epoch_end(epoch, logs)
            has_stopped = bool(self._model.stop_training)
            if not has_stopped and epoch + 1 < self._plan.epochs[1]:
                self._callbacks.on_epoch_begin(epoch + 1)
            return {"logs": dict(self._logs), "has_stopped": has_stopped}

        word = self._at(f"the end of epoch {epoch}", end)
        if not self._words.is_chief:
            self._callbacks.on_epoch_end(epoch, dict(word["logs"]))
        self._logs, self._epoch = word["logs"], epoch + 1
        self._plan.batches.end_epoch()
        if not word["has_stopped"] and self._epoch < self._plan.epochs[1]:
            self._plan.batches.begin_epoch()
        return _STOPPED if word["has_stopped"] else None

    def on_end(self, steps: int, reason: str) -> None:
        """End an epoch that a callback of batches has ended early, and the training."""
        ended = (self._epoch - self._first) * self._plan.steps
        if reason == _STOPPED and steps > ended:
            self.on_evaluation(steps, self._epoch_logs(steps))
        self._at("the end", self._end)

    def _end(self) -> dict[str, Any]:
        optimizer = self._model.optimizer
        if getattr(optimizer, "use_ema", False):
            self._values.pull()
            optimizer.finalize_variable_values(self._model.trainable_variables)
        self._callbacks.on_train_end(self._logs)
        return {}

    def _at(self, point: str, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Have worker 0 call its callbacks at a point of the training; return its word, which all workers get.

        When it returns, the variables have what the callbacks have changed.
        """
        word: dict[str, Any] | None
        if not self._words.is_chief:
            word = self._words.hear(point)
        elif (word := self._words.known(point)) is None:
            with self._taking_weights():
                word = call()
            changed = self._values.changed()
            if self._plan.has_copies:
                word["changed"] = to_text(changed)
            else:
                self._values.push(changed)
            self._words.tell(point, word)
        else:
            with self._catching_up():
                call()
        assert word is not None
        self._values.push(from_text(word.get("changed", {})))
        return word

    @contextmanager
    def _taking_weights(self) -> Iterator[None]:
        """Return a context after which the weights that a callback has taken in it are kept on the tasks."""
        if self._kept is None or self._plan.has_copies or self._plan.strategy.cluster.is_standalone:
            yield
            return
        taken = []

        def get_weights() -> Any:
            taken.append(True)
            self._values.pull()
            return type(self._model).get_weights(self._model)

        with replaced(self._model, {"get_weights": get_weights}):
            yield
        if taken:
            self._kept.keep()

    @contextmanager
    def _catching_up(self) -> Iterator[None]:
        """Return a context for callbacks at a point that an earlier process of worker 0 has passed.

        They compute what they keep in memory again, from the same logs; the variables and the files have it already.
        """
        instead: dict[str, Any] = dict.fromkeys((*_FILES, "jax_state_sync"), lambda *args, **kwargs: None)
        if self._kept is not None:
            instead["get_weights"] = self._kept.weights
        with replaced(self._model, instead):
            yield
        self._values.changed()
        self._values.stale()


def without_loss(strategy: Strategy) -> Strategy:
    """Return the strategy as `fit` uses it: a synchronous step waits for the part of a worker that has died."""
    if not isinstance(strategy, Sync) or strategy.has_backup_workers:
        return strategy
    whole = copy.copy(strategy)
    whole.elastic = False
    return whole


def sees_all_parts(strategy: Strategy) -> bool:
    """Whether a step sees the parts of all workers together, as one computation of all of them."""
    return isinstance(strategy, AllReduce) and not isinstance(strategy, Hybrid)


def test_callbacks(model: Any, given: Any, verbose: Any, steps: int) -> Any:
    """Return Keras's list of callbacks for an evaluation. Raises TrainingError for one that is called for batches."""
    default = keras.callbacks.Callback
    for callback in keras.tree.flatten(given) if given else ():
        names = ("on_test_batch_begin", "on_test_batch_end")
        if any(getattr(type(callback), name) is not getattr(default, name) for name in names):
            raise TrainingError(
                f"evaluate: expected callbacks of the begin and the end, got {type(callback).__name__}, which is "
                "called for batches, that several workers share",
                "evaluate to_keras() with it",
            )
    return keras.callbacks.CallbackList(
        given, add_progbar=verbose != 0, model=model, verbose=verbose if verbose != "auto" else 1, epochs=1, steps=steps
    )


def _is_for_batches(callback: Any) -> bool:
    """Whether a callback does something after a batch, so that it needs the metrics then."""
    if getattr(callback, "save_freq", None) == "epoch":
        return False
    if isinstance(callback, keras.callbacks.ProgbarLogger) and callback.verbose == 2:
        return False  # it prints a line for each epoch
    kind, default = type(callback), keras.callbacks.Callback
    return any(getattr(kind, name) is not getattr(default, name) for name in _BATCH_CALLS)
