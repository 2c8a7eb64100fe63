"""`dflow.Trainer` in one process: its schedule, callbacks, checkpoints, resumption, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow
from dflow.distributed import Async, Sync
from dflow.distributed.wire.messages.status import GetEvents, GetStatus
from dflow.trainer import trainer as trainer_module
from dflow.trainer.run_progress import RunningMeans

ROWS = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
DATA = dflow.data.batches((ROWS, ROWS @ np.array([1.0, -2.0, 0.5], np.float32)), 8, shuffle=True, epochs=None)
HELD_OUT = dflow.data.batches(DATA.data, 25)

pytestmark = pytest.mark.filterwarnings(
    "ignore::dflow.tracing.primitives.namesakes.DuplicateNameWarning",
    "ignore:.* is traced and compiled again during a run:dflow.RetraceWarning",  # of short batches
)


class Program:
    """A model of three weights, whose steps record the numbers of their batches."""

    def __init__(self) -> None:
        self.w = w = dflow.Variable(jnp.zeros(3), name="w")
        self.optimizer = dflow.Optimizer(optax.adam(0.1), [w], name="adam")
        self.numbers: list[int] = []

        @dflow.jit
        def step(x: Any, y: Any) -> Any:
            loss, gradients = dflow.value_and_grad(lambda: jnp.mean((x @ w - y) ** 2), [w])()
            self.optimizer.apply(gradients)
            return {"loss": loss, "rows": x}

        self.step = step
        self.errors = dflow.jit(lambda x, y: jnp.mean((x @ w - y) ** 2))

    def batch(self, number: int) -> Any:
        self.numbers.append(number)
        return DATA[number]

    def manager(self, folder: Path, **options: Any) -> dflow.CheckpointManager:
        return dflow.CheckpointManager(folder, {"w": self.w, "adam": self.optimizer}, **options)

    def trainer(self, **options: Any) -> dflow.Trainer:
        return dflow.Trainer(self.step, Async(dflow.connect()), **options)


def plainly(steps: int) -> np.ndarray[Any, Any]:
    """The weights after a plain loop."""
    program = Program()
    for number in range(steps):
        program.step(*DATA[number])
    return np.asarray(program.w.read())


class Recorder(dflow.Callback):
    """Records its calls; may end the run."""

    def __init__(self, ends: Callable[[str, int], str | None] = lambda what, steps: None) -> None:
        self.calls: list[tuple[str, int]] = []
        self._ends = ends

    def _called(self, what: str, steps: int) -> str | None:
        self.calls.append((what, steps))
        return self._ends(what, steps)

    def on_step(self, steps: int, outcome: Any) -> str | None:
        assert outcome["loss"].shape == ()
        return self._called("step", steps)

    def on_metrics(self, steps: int, metrics: Mapping[str, float]) -> str | None:
        assert metrics.keys() == {"loss"}
        return self._called("metrics", steps)

    def on_evaluation(self, steps: int, metrics: Mapping[str, float]) -> str | None:
        assert metrics["examples"] == 60
        return self._called("evaluation", steps)

    def on_end(self, steps: int, reason: str) -> None:
        self.calls.append((f"end {reason}", steps))


@pytest.mark.parametrize("strategy", [Async, Sync])
def test_a_run_is_the_plain_loop_with_a_schedule(strategy: Any) -> None:
    program, recorder = Program(), Recorder()
    trainer = dflow.Trainer(
        program.step,
        strategy(dflow.connect()),
        evaluation=(program.errors, HELD_OUT),
        evaluate_every=3,
        callbacks=[recorder],
    )
    result = trainer.run(DATA, steps=7)
    assert np.allclose(program.w.read(), plainly(7), rtol=1e-5)
    assert (result.steps, result.reason, {*result.metrics}) == (7, "", {"loss"})
    assert result.evaluation == dflow.evaluate(program.errors, HELD_OUT)
    assert [call for call in recorder.calls if call[0] != "metrics"] == [
        *(("step", steps) for steps in (1, 2, 3)),
        ("evaluation", 3),
        *(("step", steps) for steps in (4, 5, 6)),
        ("evaluation", 6),
        ("step", 7),
        ("evaluation", 7),
        ("end ", 7),
    ]


def test_a_run_that_was_killed_goes_on_with_the_right_step_and_batch(tmp_path: Path) -> None:
    def until(program: Program, steps: int, fails_at: int = 0) -> tuple[dflow.EarlyStopping, dflow.TrainingResult]:
        def fail(what: str, step: int) -> None:
            if step == fails_at:
                raise ZeroDivisionError

        stopping = dflow.EarlyStopping(patience=10, mode="max")  # never better than at first
        with program.manager(tmp_path, every=4) as manager:
            trainer = program.trainer(
                evaluation=(program.errors, HELD_OUT),
                evaluate_every=2,
                checkpoints=manager,
                callbacks=[Recorder(fail), stopping],
            )
            return stopping, trainer.run(program.batch, steps=steps)

    with pytest.raises(ZeroDivisionError):
        until(Program(), 12, fails_at=7)
    second = Program()
    stopping, result = until(second, 11)
    assert second.numbers == [4, 5, 6, 7, 8, 9, 10]
    assert np.allclose(second.w.read(), plainly(11), rtol=1e-5)
    assert result.steps == 11
    assert stopping.since == 5  # at 4, 6, 8, 10 and 11 steps; the first value was that at 2
    third, evaluation = Program(), result.evaluation
    _, result = until(third, 11)
    assert (third.numbers, result.steps, result.evaluation) == ([], 11, evaluation)  # all steps were done before
    _, result = until(third, 13)
    assert third.numbers == [11, 12]


def test_checkpoints_have_the_metrics_of_their_step(tmp_path: Path) -> None:
    program = Program()
    with program.manager(tmp_path, every=4, best=("loss", 1, "min")) as manager:
        trainer = program.trainer(evaluation=(program.errors, HELD_OUT), evaluate_every=2, checkpoints=manager)
        result = trainer.run(program.batch, steps=10)
        assert [checkpoint.step for checkpoint in manager.checkpoints] == [3, 7, 9]
        assert manager.checkpoints[-1].metrics == result.evaluation
        assert manager.best == manager.checkpoints[-1]


def test_checkpoints_by_time_are_made_between_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_module, "LOOK_S", 0.0)
    program = Program()
    with program.manager(tmp_path, every=timedelta(microseconds=1), keep=100) as manager:

        class Waits(dflow.Callback):
            def on_step(self, steps: int, outcome: Any) -> None:
                manager.wait()

        program.trainer(checkpoints=manager, callbacks=[Waits()]).run(DATA, steps=5)
        assert [checkpoint.step for checkpoint in manager.checkpoints] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("what", ["step", "metrics", "evaluation"])
def test_a_callback_ends_the_run(tmp_path: Path, what: str) -> None:
    program = Program()
    ends = Recorder(lambda called, steps: "enough" if called == what and steps >= 4 else None)
    with program.manager(tmp_path, every=100) as manager:
        trainer = program.trainer(
            evaluation=(program.errors, HELD_OUT), evaluate_every=2, checkpoints=manager, callbacks=[ends]
        )
        result = trainer.run(DATA, steps=10)
        assert (result.steps, result.reason) == (4, "enough")
        assert ends.calls[-1] == ("end enough", 4)
        assert [checkpoint.step for checkpoint in manager.checkpoints] == [3]


def test_early_stopping_ends_after_evaluations_that_are_not_better() -> None:
    def stopped(values: list[float], **options: Any) -> int | None:
        stopping = dflow.EarlyStopping("value", patience=2, **({"mode": "min"} | options))
        reasons = [stopping.on_evaluation(number, {"value": value}) for number, value in enumerate(values)]
        return next((number for number, reason in enumerate(reasons) if reason), None)

    assert stopped([3, 2, 2.5, 1, 1, 1]) == 5
    assert stopped([3, 2, 1]) is None
    assert stopped([3, 2, 1], mode="max") == 2
    assert stopped([3, 2.9, 2.8, 2.7], min_delta=0.15) is None
    assert stopped([3, 2.95, 2.9], min_delta=0.15) == 2
    assert stopped([np.nan, np.nan]) == 1
    assert dflow.EarlyStopping().state() == {}


def test_values_that_are_not_computed_are_not_waited_for() -> None:
    class Value:
        shape, dtype = (), np.dtype(np.float32)

        def __init__(self, value: float) -> None:
            self._value, self.is_computed = value, False

        def is_ready(self) -> bool:
            return self.is_computed

        def __float__(self) -> float:
            return self._value

    means, values = RunningMeans(), [Value(number) for number in (1.0, 3.0, 8.0)]
    for value in values:
        means.add({"loss": value, "lr": 2, "rows": ROWS})
    assert means.take() == {}
    values[0].is_computed = values[1].is_computed = True
    assert means.take() == {"loss": 2.0, "lr": 2.0}
    assert means.take() == {}
    assert means.take(waits=True) == {"loss": 8.0, "lr": 2.0}
    for number in range(150):
        means.add(number)
    assert means.take() == {"loss": sum(range(50, 150)) / 100}  # the newest hundred


def test_the_progress_bar_is_shown_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    program = Program()
    program.trainer().run(DATA, steps=2, name="hidden")
    program.trainer(progress=True).run(DATA, steps=3, name="fit")
    shown = capsys.readouterr()
    assert "fit" in shown.err
    assert "3/3" in shown.err
    assert "loss" in shown.err
    assert "hidden" not in shown.err
    assert shown.out == ""


def test_arguments_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    program = Program()

    def refused(text: str, **options: Any) -> None:
        with pytest.raises(dflow.TrainingError, match=rf"(?s)^Trainer: {text}.*test_trainer.py:\d+\n  \w"):
            program.trainer(**options)

    evaluation = {"evaluation": (program.errors, HELD_OUT)}
    refused("expected evaluation= and evaluate_every= together", **evaluation)
    refused("evaluation: expected a step and batches, got <", evaluation=program.errors, evaluate_every=1)
    refused("evaluate_every: expected at least 1, got 0", **evaluation, evaluate_every=0)
    refused("callbacks: expected dflow.Callback, got 3", callbacks=[3])
    refused("expected an evaluation for EarlyStopping, got none", callbacks=[dflow.EarlyStopping()])
    with program.manager(tmp_path, every=5, best=("loss", 1, "min")) as manager:
        best = r"checkpoints: expected an evaluation at each checkpoint, for best=\('loss', ...\), got every=5"
        refused(f"{best} and evaluate_every=None", checkpoints=manager)
        refused(f"{best} and evaluate_every=2", **evaluation, evaluate_every=2, checkpoints=manager)
    with pytest.raises(dflow.TrainingError, match=r"(?s)strategy: expected a strategy, got <dflow.*give dflow.distrib"):
        dflow.Trainer(program.step, dflow.connect())  # type: ignore[arg-type]
    with pytest.raises(dflow.TrainingError, match=r"(?s)by number, got a list_iterator, whose place.*give dflow.data"):
        program.trainer().run(iter([1]), steps=1)
    with pytest.raises(dflow.TrainingError, match=r"(?s)batches: expected 3 for all steps, got 2\n.*epochs=None"):
        program.trainer().run([DATA[0], DATA[1]], steps=3)
    assert program.numbers == []
    with pytest.raises(dflow.TrainingError, match="steps: expected at least 0, got -1"):
        program.trainer().run(DATA, steps=-1)
    with pytest.raises(dflow.TrainingError, match="mode: expected 'min' or 'max', got 'least'"):
        dflow.EarlyStopping(mode="least")
    with pytest.raises(dflow.TrainingError, match=r"patience of at least 1 and min_delta of at least 0, got 0 and 0.0"):
        dflow.EarlyStopping(patience=0)
    with pytest.raises(
        dflow.TrainingError, match=r"expected 'accuracy' among the metrics.* got \['examples', 'loss'\]"
    ):
        program.trainer(**evaluation, evaluate_every=1, callbacks=[dflow.EarlyStopping("accuracy")]).run(DATA, steps=1)


class Ended:
    """Batches by number that end early, and do not say where."""

    def __init__(self, program: Program, count: int) -> None:
        self._program, self._count = program, count

    def __getitem__(self, number: int) -> Any:
        if number >= self._count:
            raise IndexError(number)
        return self._program.batch(number)


@pytest.mark.parametrize("kind", ["sequence", "function", "queue"])
@pytest.mark.parametrize("is_accepted", [False, True])
def test_batches_that_end_early_end_the_run_with_its_last_checkpoint(
    kind: str, is_accepted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLOW_ACCEPT", "short" if is_accepted else "")
    program, recorder = Program(), Recorder()
    queue = dflow.FIFOQueue(9, tuple(jax.ShapeDtypeStruct(part.shape, part.dtype) for part in DATA[0]), name="rows")
    step = dflow.jit(lambda: program.step(*queue.dequeue())) if kind == "queue" else program.step
    ended = Ended(program, 5)
    batches = {"sequence": ended, "function": lambda number: ended[number], "queue": lambda number: ()}[kind]
    says = "queue 'rows' is closed" if kind == "queue" else "the batches have ended"
    with program.manager(tmp_path, every=3) as manager:
        trainer = dflow.Trainer(step, Async(dflow.connect()), checkpoints=manager, callbacks=[recorder])
        with dflow.data.feed((DATA[number] for number in range(5)), queue):
            if is_accepted:
                result = trainer.run(batches, steps=9)
                assert result.steps == 5
                assert says in result.reason
            else:
                with pytest.raises(dflow.TrainingError, match=f"expected 9 steps, got 5: .*{says}"):
                    trainer.run(batches, steps=9)
        assert [one.step for one in manager.checkpoints] == [2, 4]
    assert np.allclose(program.w.read(), plainly(5), rtol=1e-5)
    ((last, at),) = recorder.calls[-1:]
    assert (last.startswith("end "), says in last, at) == (True, True, 5)


def test_a_loss_that_is_not_finite_fails_the_run_and_the_checkpoint_before_it_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, recorder = Program(), Recorder()
    spoilt = [DATA[number] for number in range(6)]
    spoilt[4] = (spoilt[4][0] * np.inf, spoilt[4][1])
    with program.manager(tmp_path, every=1, keep=1) as manager:
        trainer = program.trainer(checkpoints=manager, callbacks=[recorder])
        text = r"a finite loss at each step, got nan first at step 4(.|\n)*go on from .*step_3; DFLOW_ACCEPT"
        with pytest.raises(dflow.TrainingError, match=text):
            trainer.run(spoilt, steps=6)
        assert [one.step for one in manager.checkpoints] == [3, 5]
    assert recorder.calls[-1] == ("end ", 6)
    # An earlier run's loss is not this one's.
    assert Program().trainer().run(DATA, steps=2).steps == 2
    monkeypatch.setenv("DFLOW_ACCEPT", "not-finite")
    assert Program().trainer().run(spoilt, steps=6).steps == 6


LARGER = "auc", "val_AUC", "accuracy", "topAccuracy", "f1_score", "recall@10", "hits", "mAP", "return", "mean reward"
LARGER = *LARGER, "precision", "NDCG@10", "r2", "log_likelihood"
SMALLER = "loss", "auc_loss", "error rate", "RMSE", "perplexity", "valLoss", "nll"


@pytest.mark.parametrize(("metric", "mode"), [*((one, "max") for one in LARGER), *((one, "min") for one in SMALLER)])
def test_the_name_of_a_metric_says_which_value_is_better(metric: str, mode: str) -> None:
    stop = dflow.EarlyStopping(metric, patience=1)
    assert stop.on_evaluation(1, {metric: 0.5}) is None
    worse, which = (0.4, "larger") if mode == "max" else (0.6, "smaller")
    says = f"{metric} has not become better than 0.5 for 1 evaluations; {which} is better (mode='{mode}')"
    assert stop.on_evaluation(2, {metric: worse}) == says
    assert stop.on_evaluation(3, {metric: 1.0 - worse}) is None


@pytest.mark.parametrize("metric", ["quality", "maple", "price", "speed"])
def test_a_metric_whose_name_does_not_say_which_value_is_better_is_refused(metric: str, tmp_path: Path) -> None:
    with pytest.raises(dflow.TrainingError, match=f"expected 'min' or 'max' for '{metric}'"):
        dflow.EarlyStopping(metric).on_evaluation(1, {metric: 0.5})
    with pytest.raises(dflow.CheckpointError, match="expected \\(metric, count, 'min' or 'max'\\)"):
        Program().manager(tmp_path, best=(metric, 1))


@pytest.mark.parametrize("once", [False, True])
def test_a_misspelt_metric_is_an_error_before_the_first_step(once: bool, tmp_path: Path) -> None:
    program = Program()
    held_out: Any = (batch for batch in HELD_OUT) if once else HELD_OUT
    options: dict[str, Any] = {"evaluation": (program.errors, held_out), "evaluate_every": 2}
    trainer = program.trainer(callbacks=[dflow.EarlyStopping("los")], **options)
    with pytest.raises(dflow.TrainingError, match=r"expected 'los' among .*'loss'.*(.|\n)*did you mean loss\?"):
        trainer.run(program.batch, steps=4)
    assert len(program.numbers) == (2 if once else 0)
    with program.manager(tmp_path, every=2, best=("losss", 1, "min")) as manager:
        trainer = program.trainer(checkpoints=manager, evaluation=(program.errors, HELD_OUT), evaluate_every=2)
        says = r"best=: expected 'losss' among .*(.|\n)*did you mean loss\?"
        with pytest.raises(dflow.TrainingError, match=says):
            trainer.run(DATA, steps=4)


@pytest.mark.parametrize("stops", [False, True])
def test_the_status_is_of_the_whole_run_with_its_evaluations_and_checkpoints(stops: bool, tmp_path: Path) -> None:
    program, name, cluster = Program(), f"whole {stops}", dflow.connect()
    ask = cluster.coordinator.ask
    seen: list[tuple[int, int]] = []

    def look(what: str, steps: int) -> str | None:
        status = ask(GetStatus())
        seen.append((status.steps_done, status.steps_total))
        return "enough" if stops and steps == 6 and what == "evaluation" else None

    with program.manager(tmp_path, every=6) as manager:
        trainer = dflow.Trainer(
            program.step,
            Async(cluster),
            evaluation=(program.errors, HELD_OUT),
            evaluate_every=3,
            checkpoints=manager,
            callbacks=[Recorder(look)],
        )
        result = trainer.run(DATA, steps=9, name=name)
    assert {total for _, total in seen} == {9}
    assert max(done for done, _ in seen) == result.steps
    after = ask(GetStatus())
    assert after.steps_done == after.steps_total == result.steps
    assert after.results["evaluation/loss"] == result.evaluation["loss"]
    events = [(event.kind, event.text) for event in ask(GetEvents()).events if event.kind != "joined"]
    assert [kind for kind, _ in events] == [
        "evaluation",
        "evaluation",
        "checkpoint",
        *([] if stops else ["evaluation", "checkpoint"]),
    ]
    assert events[0][1].startswith(f"evaluation of run '{name}' after 3 steps: loss ")
    assert events[2][1] == f"checkpoint of run '{name}' after 6 steps"
