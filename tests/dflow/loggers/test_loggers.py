"""What all loggers have in common, and `dflow.loggers.WandB` and `MLflow` with the real libraries, offline."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.distributed import Async
from dflow.loggers import CSV, MLflow, Print, WandB, logger, writer_thread
from dflow.loggers.writer_thread import WriterThread
from dflow.testing import memory_cluster
from dflow.trainer import trainer as trainer_module
from tests.dflow.loggers.small_runs import Later, trained, warned, write
from tests.disk_faults import FAULTS
from tests.distributed.waiting import DEADLINE_S, until

pytestmark = [
    pytest.mark.filterwarnings("ignore::dflow.tracing.primitives.namesakes.DuplicateNameWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def rows_of(path: Path) -> list[dict[str, float]]:
    """The rows of a CSV file without their times, and without empty fields."""
    with path.open() as file:
        return [
            {name: float(value) for name, value in row.items() if value and name != "time"}
            for row in csv.DictReader(file)
        ]


def test_a_loop_by_hand_writes_each_step(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.csv"
    with CSV(path) as log:
        run = Async(dflow.connect()).run(dflow.jit(lambda x: {"loss": x * 2}), [1.0, 2.0, 3.0], steps=3)
        for step, metrics in enumerate(run):
            log.log(step, metrics)
    log.log(2, {"step": 9})  # it is opened again, and goes on
    log.close()
    assert rows_of(path) == [
        {"step": 0, "loss": 2},
        {"step": 1, "loss": 4},
        {"step": 2, "loss": 6},
        {"step": 2, "step_": 9},
    ]


def test_a_trainer_writes_means_or_single_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_module, "LOOK_S", math.inf)
    single = CSV(tmp_path / "single.csv", every=3)
    trained([CSV(tmp_path / "means.csv"), single], steps=6)
    means, exact = rows_of(tmp_path / "means.csv"), rows_of(tmp_path / "single.csv")
    evaluations = [row for row in means if "evaluation/loss" in row]
    assert [row["step"] for row in evaluations] == [2, 4, 6]
    assert [{*row} for row in evaluations] == [{"step", "evaluation/loss"}] * 3
    assert [row["step"] for row in means if "loss" in row] == [2, 4, 6]  # at the latest when an evaluation begins
    assert [row["step"] for row in exact if "loss" in row] == [3, 6]
    assert [row for row in exact if "evaluation/loss" in row] == evaluations


def test_no_step_waits_for_a_value_that_is_not_computed(tmp_path: Path) -> None:
    later = Later()
    with CSV(tmp_path / "log.csv") as log:
        log.log(0, {"loss": later})
        log.log(1, {"loss": 1})
        assert rows_of(tmp_path / "log.csv") == []
        later.is_computed.set()
        log.flush()
        assert rows_of(tmp_path / "log.csv") == [{"step": 0, "loss": 2.5}, {"step": 1, "loss": 1}]


def test_a_value_that_changes_later_is_written_as_it_was(tmp_path: Path) -> None:
    later, variable, number = Later(), dflow.Variable(1.0, name="v"), np.array(1.0)
    with CSV(tmp_path / "log.csv") as log:
        log.log(0, {"loss": later})
        log.log(1, {"variable": variable, "number": number})
        variable.assign(5.0)
        number[...] = 5.0
        later.is_computed.set()
    assert rows_of(tmp_path / "log.csv")[1] == {"step": 1, "variable": 1, "number": 1}


def test_what_is_logged_can_be_read_without_a_flush(tmp_path: Path) -> None:
    with CSV(tmp_path / "log.csv") as log:
        log.log(0, {"loss": 1})
        log.log(1, {"loss": 2})
        until(lambda: len(rows_of(tmp_path / "log.csv")) == 2)


def test_an_odd_metric_is_a_warning_once_and_ends_nothing(tmp_path: Path) -> None:
    with CSV(tmp_path / "log.csv") as log:
        odd = {"loss": 1.0, "flag": np.bool_(True), "text": "abc", "pair": (1, 2), "rows": jnp.ones((2, 3))}
        odd["complex"] = jnp.complex64(1)
        with pytest.warns(RuntimeWarning) as caught:
            log.log(0, odd)
        log.log(1, odd)
        assert sorted(str(one.message).removeprefix(f"dflow.loggers.CSV: {tmp_path}/log.csv: ") for one in caught) == [
            f"metric {name}: expected a real scalar, got {what}; it is left out"
            for name, what in (
                ("'complex'", "an array of shape () and dtype complex64"),
                ("'pair'", "tuple (1, 2)"),
                ("'rows'", "an array of shape (2, 3) and dtype float32"),
                ("'text'", "str 'abc'"),
            )
        ]
        numbers = {"nan": math.nan, "inf": jnp.inf, "minus": -np.inf, "large": 10**400, "half": jnp.bfloat16(0.5)}
        warned("metric 'large' could not be read: int too large", partial(write, log, (3, numbers)))
    read = rows_of(tmp_path / "log.csv")
    assert read[:2] == [{"step": 0, "loss": 1, "flag": 1}, {"step": 1, "loss": 1, "flag": 1}]
    assert math.isnan(read[2].pop("nan"))
    assert read[2:] == [{"step": 3, "inf": math.inf, "minus": -math.inf, "half": 0.5}]
    with pytest.raises(dflow.TrainingError, match=r"(?s)step: expected an integer, got dict .*write log\(step, values"):
        log.log({"loss": 1}, 3)  # type: ignore[arg-type]


def test_a_value_whose_computation_failed_is_a_warning(tmp_path: Path) -> None:
    deleted = jnp.ones(())
    with CSV(tmp_path / "log.csv") as log:
        deleted.delete()
        entry = 0, {"loss": deleted, "other": 1}
        warned("metric 'loss' could not be read: Array has been deleted", partial(write, log, entry))
    assert rows_of(tmp_path / "log.csv") == [{"step": 0, "other": 1}]


def test_a_program_that_is_started_again_goes_on_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"

    class Killed(dflow.Callback):
        def on_step(self, steps: int, outcome: Any) -> None:
            if steps == 7:
                raise ZeroDivisionError

    first = CSV(path, every=1)
    with pytest.raises(ZeroDivisionError):
        trained([first, Killed()], steps=12, folder=tmp_path / "run")
    first.close()
    before = rows_of(path)
    assert [row["step"] for row in before if "loss" in row] == [1, 2, 3, 4, 5, 6, 7]
    with path.open("a") as file:
        file.write("8,1234.5,0.")  # killed while it wrote
    trained([CSV(path, every=1)], steps=9, folder=tmp_path / "run")
    after = rows_of(path)
    assert [row["step"] for row in after if "loss" in row] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert [row["step"] for row in after if "evaluation/loss" in row] == [2, 4, 6, 8, 9]
    assert after[:6] == before[:6]


def test_a_second_run_with_one_logger_replaces_rows_that_are_still_in_memory(tmp_path: Path) -> None:
    log, cluster = CSV(tmp_path / "log.csv", every=1), dflow.connect()
    log.on_start(0, cluster)
    for step in range(1, 6):
        log.on_step(step, {"loss": 10 + step})  # then the run raises, and has no end
    log.on_start(2, cluster)
    for step in (3, 4):
        log.on_step(step, {"loss": 20 + step})
    log.close()
    assert [row["loss"] for row in rows_of(tmp_path / "log.csv")] == [11, 12, 23, 24]


def test_a_place_that_cannot_be_written_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    log = CSV(tmp_path / "file" / "log.csv")
    steps: list[int] = []

    class Counter(dflow.Callback):
        def on_step(self, count: int, outcome: Any) -> None:
            steps.append(count)

    with pytest.raises(
        dflow.TrainingError, match=r"(?s)be written, got .*/file/log.csv: .*test_loggers.py:\d+\n  give"
    ):
        trained([Counter(), log])
    assert steps == []


def test_another_programs_file_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("a,b\n1,2\n")
    with pytest.raises(
        dflow.TrainingError, match=r"data.csv: expected a file with the columns step and time, got a, b"
    ):
        CSV(tmp_path / "data.csv").log(0, 1)
    assert (tmp_path / "data.csv").read_text() == "a,b\n1,2\n"


def test_a_disk_that_fails_is_a_warning_and_later_values_are_written(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    with CSV(path) as log:
        log.log(0, {"loss": 1})
        log.flush()
        with FAULTS.within(tmp_path, first=1, count=100):
            entries = (1, {"loss": 2, "new": 1}), (2, {"loss": 3})
            text = rf"(?s)CSV: {path}: expected to write, got OSError.*training goes on"
            warned(text, partial(write, log, *entries))
        warned(r"log.csv: writes again; \d entries are lost", partial(write, log, (3, {"loss": 4})))
    assert rows_of(path) == [{"step": 0, "loss": 1}, {"step": 3, "loss": 4}]


def test_values_that_are_never_computed_do_not_keep_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logger, "FLUSH_S", 0.01)
    later, log = Later(), CSV(tmp_path / "log.csv")
    log.log(0, later)
    warned("expected all values to be computed and written within", log.close)
    later.is_computed.set()


def test_a_writer_that_hangs_does_not_keep_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_thread, "MOST_WAITING", 2)
    later, log = Later(), CSV(tmp_path / "log.csv")
    log.log(0, {"loss": later})
    assert log._thread is not None
    until(log._thread._calls.empty)  # the thread waits for the value
    with monkeypatch.context() as patched:
        patched.setattr(logger, "FLUSH_S", 0.01)
        log.log(1, {"loss": 1})
        log.log(2, {"loss": 2})
        text = "log.csv: expected fewer than 2 entries to wait, and they do for 0.01 s; later ones are lost"
        warned(text, lambda: log.log(3, {"loss": 3}))
    log.log(4, {"loss": 4})  # neither waits nor warns again
    later.is_computed.set()
    warned("log.csv: 2 entries are lost, as they found no room", log.flush)
    log.log(5, {"loss": 5})
    log.close()
    assert [row["step"] for row in rows_of(tmp_path / "log.csv")] == [0, 1, 2, 5]


def test_a_flush_returns_after_its_failure_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    class Done(threading.Event):
        def set(self) -> None:
            order.append("returns")
            super().set()

    def sync() -> None:
        raise OSError("the disk is full")

    order: list[str] = []
    thread = WriterThread("test", sync, lambda error: order.append(str(error)))
    with monkeypatch.context() as patched:
        patched.setattr(threading, "Event", Done)
        assert thread.flush(DEADLINE_S)
    assert order == ["the disk is full", "returns"]
    assert thread.close(DEADLINE_S)


@pytest.mark.parametrize("all_workers", [False, True])
def test_on_a_cluster_the_first_worker_writes_or_each_its_own(all_workers: bool, tmp_path: Path) -> None:
    with memory_cluster(ps=1, workers=2) as memory, ThreadPoolExecutor(2) as pool:
        workers = list(pool.map(memory.worker, range(2)))

        def run(index: int) -> None:
            log = CSV(tmp_path / "log.csv", all_workers=all_workers, every=1)
            trained([log], steps=10, cluster=workers[index])
            log.close()
            by_hand = CSV(tmp_path / "hand.csv", cluster=workers[index], all_workers=all_workers)
            with by_hand:
                by_hand.log(0, {"worker": index})

        list(pool.map(run, range(2)))
        for worker in workers:
            worker.close()
    names = ["log.worker-0.csv", "log.worker-1.csv"] if all_workers else ["log.csv"]
    assert sorted(path.name for path in tmp_path.glob("log*")) == names
    found = [row["step"] for name in names for row in rows_of(tmp_path / name) if "loss" in row]
    assert sorted(found) == sorted({*found})
    assert not all_workers or len(found) == 10
    hand = [rows_of(tmp_path / name.replace("log", "hand")) for name in names]
    assert hand == [[{"step": 0, "worker": index}] for index in range(len(names))]


def test_print_writes_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with Print() as log:
        log.log(3, {"loss": 0.123456789, "accuracy": jnp.float32(1)})
    assert capsys.readouterr().out == "step 3: loss 0.123457, accuracy 1\n"
    file = io.StringIO()
    trained([Print(file)], steps=2)
    assert file.getvalue().splitlines()[-1].startswith("step 2: evaluation/loss 0.")


@pytest.mark.once
def test_a_program_that_ends_without_close_has_written_all(tmp_path: Path) -> None:
    script = """
import sys
import threading
from dflow.loggers import CSV
log = CSV(sys.argv[1])
for step in range(100):
    log.log(step, {"loss": step})
assert not {"tensorboardX", "wandb", "mlflow"} & sys.modules.keys()
raise SystemExit(3)
"""
    ran = subprocess.run([sys.executable, "-c", script, str(tmp_path / "log.csv")], timeout=DEADLINE_S, check=False)
    assert ran.returncode == 3
    assert [row["loss"] for row in rows_of(tmp_path / "log.csv")] == [*range(100)]


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(
        dflow.TrainingError, match=r"(?s)dflow.loggers.Print: every: expected at least 1, got 0.*give a"
    ):
        Print(every=0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'evry'") as error:
        Print(evry=1)  # type: ignore[call-arg]
    assert "did you mean every?" in error.value.__notes__[0]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A local store of MLflow."""
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    return (tmp_path / "mlruns").as_uri()


def history(store: str, run_id: str, name: str) -> list[tuple[int, float]]:
    import mlflow

    found = mlflow.MlflowClient(store).get_metric_history(run_id, name)
    return sorted((metric.step, metric.value) for metric in found)


def runs(store: str, experiment: str) -> list[Any]:
    import mlflow

    client = mlflow.MlflowClient(store)
    found = client.get_experiment_by_name(experiment)
    return list(client.search_runs([found.experiment_id]))


@pytest.mark.once
def test_a_trainer_with_mlflow(store: str) -> None:
    with MLflow("digits", uri=store, every=1, hyperparameters={"rate": 0.1, "sizes": [1, 2]}) as log:
        trained([log], steps=4)
    (run,) = runs(store, "digits")
    assert run.info.status == "FINISHED"
    assert run.data.params == {"rate": "0.1", "sizes": "[1, 2]"}
    assert [step for step, _ in history(store, run.info.run_id, "loss")] == [1, 2, 3, 4]
    assert [step for step, _ in history(store, run.info.run_id, "evaluation/loss")] == [2, 4]


@pytest.mark.once
def test_a_run_of_mlflow_goes_on_by_its_name_and_fails_with_its_program(store: str) -> None:
    with MLflow("digits", uri=store, run="it's one") as log:
        log.log(0, {"loss": math.nan, "top-1 (%)": 2})
    with suppress(ZeroDivisionError), MLflow("digits", uri=store, run="it's one") as log:
        log.log(1, {"loss": math.inf})
        raise ZeroDivisionError
    (run,) = runs(store, "digits")
    assert run.info.status == "FAILED"
    (_, first), (step, second) = history(store, run.info.run_id, "loss")
    assert (math.isnan(first), step, second) == (True, 1, math.inf)
    assert history(store, run.info.run_id, "top-1 ___") == [(0, 2)]
    MLflow("digits", uri=store).log(0, 1)
    assert len(runs(store, "digits")) == 2


@pytest.mark.once
def test_a_store_that_fails_is_a_warning(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    with MLflow("digits", uri=store) as log:
        log.log(0, 1)
        log.flush()
        with monkeypatch.context() as broken:
            broken.delattr(mlflow.MlflowClient, "log_batch")
            text = r"MLflow: file.*, digits: expected to write, got AttributeError"
            warned(text, partial(write, log, (1, 1)))
        warned("writes again; 1 entries are lost", partial(write, log, (2, 1)))
        with monkeypatch.context() as broken:
            broken.delattr(mlflow.MlflowClient, "log_batch")
            warned("expected to write", partial(write, log, (3, 1)))
    (run,) = runs(store, "digits")
    assert run.info.status == "FINISHED"
    assert [step for step, _ in history(store, run.info.run_id, "loss")] == [0, 2]


@pytest.mark.once
def test_a_trainer_with_weights_and_biases_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    settings = wandb.Settings(silent=True, console="off", x_disable_stats=True)
    with WandB(
        "digits", run="one", every=1, hyperparameters={"rate": 0.1}, mode="offline", dir=tmp_path, settings=settings
    ) as log:
        trained([log], steps=4)
        log.log(2, {"loss": math.nan})
    (file,) = tmp_path.glob("wandb/offline-run-*-one/run-one.wandb")
    until(lambda: any(record.HasField("exit") for record in records(file.read_bytes())))  # its service writes it
    found = [*records(file.read_bytes())]
    (run,) = (record.run for record in found if record.HasField("run"))
    assert (run.project, run.run_id, run.display_name) == ("digits", "one", "one")
    assert {one.key: json.loads(one.value_json) for one in run.config.update}["rate"] == 0.1
    rows = [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for record in found
        if record.HasField("history")
    ]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 2]
    assert [row["step"] for row in rows if "evaluation/loss" in row] == [2, 4]
    assert rows[0]["loss"] == 1  # of weights that are zero
    assert math.isnan(float(rows[-1]["loss"]))
    (axis,) = (record.metric for record in found if record.HasField("metric") and record.metric.glob_name == "*")
    assert axis.step_metric == "step"
    assert next(record.exit.exit_code for record in found if record.HasField("exit")) == 0


def records(written: bytes) -> Iterator[Any]:
    """The records of a file of Weights & Biases: 7 bytes, then blocks of 32 KiB of fragments, as in LevelDB's logs."""
    from wandb.proto.wandb_internal_pb2 import Record

    at, record = 7, b""
    while at + 7 <= len(written):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        size, kind = struct.unpack_from("<HB", written, at + 4)
        record += written[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last fragment
            yield Record.FromString(record)
            record = b""


@pytest.mark.once
def test_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, module in ((WandB, "wandb"), (MLflow, "mlflow")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(dflow.ConfigError, match=rf"(?s)expected the package {module}.*test_.*pip install {module}"):
            kind("project")
