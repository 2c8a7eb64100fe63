"""`dflow.loggers.TensorBoard`, read back by TensorBoard's own readers and plugins."""

from __future__ import annotations

import itertools
import math
import resource
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.loggers import TensorBoard, event_file
from tests.dflow.loggers.small_runs import Later, trained, warned, write

pytest.importorskip("tensorboardX")
event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

plugin_event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.plugin_event_accumulator")

pytestmark = [
    pytest.mark.once,
    pytest.mark.filterwarnings(
        "ignore::dflow.tracing.primitives.namesakes.DuplicateNameWarning",
        "ignore:html5lib's sanitizer is deprecated:DeprecationWarning",
    ),
]


def read(folder: Path) -> Any:
    """What TensorBoard reads in a folder."""
    return event_accumulator.EventAccumulator(str(folder), {"images": 0, "histograms": 0}).Reload()


def curve(folder: Path, name: str) -> list[tuple[int, float]]:
    """The points of a curve."""
    return [(point.step, point.value) for point in read(folder).Scalars(name)]


def plugin_context(folder: Path) -> Any:
    """What TensorBoard's plugins get of a folder of runs."""
    from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
    from tensorboard.plugins.base_plugin import TBContext

    runs = EventMultiplexer().AddRunsFromDirectory(str(folder))
    runs.Reload()
    provider = MultiplexerDataProvider(runs, str(folder))
    return TBContext(data_provider=provider, logdir=str(folder), flags=SimpleNamespace(generic_data="true"))


def server_steps(folder: Path, name: str) -> list[int]:
    """The steps of a curve or text in TensorBoard's server."""
    reader = plugin_event_accumulator.EventAccumulator(str(folder), {"tensors": 0}).Reload()
    return [point.step for point in reader.Tensors(name)]


def test_curves_of_a_trainer(tmp_path: Path) -> None:
    with TensorBoard(tmp_path, every=1) as board:
        trained([board], steps=4)
    losses = curve(tmp_path, "loss")
    assert [step for step, _ in losses] == [1, 2, 3, 4]
    assert losses[0][1] == 1  # of weights that are zero
    assert [step for step, _ in curve(tmp_path, "evaluation/loss")] == [2, 4]


def test_numbers_are_written_as_they_are(tmp_path: Path) -> None:
    with TensorBoard(tmp_path) as board:
        board.log(0, {"nan": math.nan, "inf": -math.inf, "flag": True, "small": 1e-30, "ä b/c": jnp.bfloat16(3)})
        board.log(2**40, {"late": 1})
    assert math.isnan(curve(tmp_path, "nan")[0][1])
    assert curve(tmp_path, "inf") == [(0, -math.inf)]
    assert curve(tmp_path, "flag") == [(0, 1)]
    assert curve(tmp_path, "small") == [(0, float(np.float32(1e-30)))]
    assert curve(tmp_path, "ä b/c") == [(0, 3)]
    assert curve(tmp_path, "late") == [(2**40, 1)]


def test_a_program_that_is_started_again_goes_on_with_the_curves(tmp_path: Path) -> None:
    for first, until in ((0, 10), (6, 8), (8, 9)):
        with TensorBoard(tmp_path) as board:
            board.text(0, "note", str(first))
            for step in range(first, until):
                board.log(step, {"loss": step + first / 10})
    expected = [0, 1, 2, 3, 4, 5, 6.6, 7.6, 8.8]
    assert curve(tmp_path, "loss") == [(step, float(np.float32(loss))) for step, loss in enumerate(expected)]
    assert server_steps(tmp_path, "loss") == [*range(9)]
    assert server_steps(tmp_path, "note/text_summary") == [0, 0, 0]


def test_a_second_run_with_one_logger_goes_on_with_the_curves(tmp_path: Path) -> None:
    board, cluster = TensorBoard(tmp_path, every=1), dflow.connect()
    for first, last in ((0, 5), (0, 5), (2, 3)):
        board.on_start(first, cluster)
        for step in range(first + 1, last + 1):
            board.on_step(step, {"loss": 10 * last + step})
        board.on_end(last, "done")
    board.close()
    assert curve(tmp_path, "loss") == [(1, 51), (2, 52), (3, 33)]
    assert server_steps(tmp_path, "loss") == [1, 2, 3]


def test_many_texts_before_the_first_step_leave_no_stale_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_file, "_numbers", itertools.count(9))  # readers sort the names of files as text
    for run in range(2):
        with TensorBoard(tmp_path) as board:
            for number in range(300):
                board.text(number // 100, f"note {number}", str(run))
            for step in range(2 * (1 - run), 4 - run):
                board.log(step, {"loss": run})
    assert curve(tmp_path, "loss") == [(0, 1), (1, 1), (2, 1)]
    assert server_steps(tmp_path, "note 0/text_summary") == [0]
    assert server_steps(tmp_path, "note 299/text_summary") == [2]


def test_histograms_of_variables_and_of_arrays_that_a_step_returns(tmp_path: Path) -> None:
    w = dflow.Variable(jnp.zeros(3), name="layer/w")
    later = Later()
    with TensorBoard(tmp_path, histogram_every=2, variables={"w": w}) as board:
        board.log(0, {"loss": later})
        for step in range(1, 5):
            w.assign(jnp.full(3, float(step)))
            board.log(step, {"loss": 0.0, "gradients": {"w": jnp.arange(5.0)}})
        board.log(6, np.ones(2))
        w.assign(jnp.zeros(3))  # the histograms are of the values at their steps
        later.is_computed.set()
    found = read(tmp_path)
    assert [(one.step, one.histogram_value.max) for one in found.Histograms("layer/w")] == [
        (0, 0),
        (2, 2),
        (4, 4),
        (6, 4),
    ]
    assert found.Histograms("loss")[0].histogram_value.num == 2
    (_, gradient) = found.Histograms("gradients/w")
    assert gradient.histogram_value.num == 5
    assert sum(gradient.histogram_value.bucket) == 5
    assert gradient.histogram_value.sum == 10
    trained([TensorBoard(tmp_path / "trained", histogram_every=2)], steps=4)
    assert [one.step for one in read(tmp_path / "trained").Histograms("gradient")] == [2, 4]


def test_histograms_of_odd_arrays(tmp_path: Path) -> None:
    with TensorBoard(tmp_path) as board:
        board.histogram(0, "mixed", np.array([1.0, math.nan, math.inf, 2.0]))
        board.histogram(0, "none", jnp.full(3, math.nan))
        board.histogram(0, "half", jnp.ones((2, 2), jnp.bfloat16))
        board.histogram(0, "empty", np.zeros(0))

        def key() -> None:
            board.histogram(0, "key", jax.random.key(0))
            board.flush()

        warned("histogram 'key' could not be made", key)
        warned("metric 'array': expected a real scalar, got an array", lambda: board.log(1, {"array": np.ones(2)}))
    found = read(tmp_path)
    assert sorted(found.Tags()["histograms"]) == ["half", "mixed"]
    assert found.Histograms("mixed")[0].histogram_value.num == 2
    assert curve(tmp_path, "mixed/not_finite") == [(0, 2)]
    assert curve(tmp_path, "none/not_finite") == [(0, 3)]


def test_text_and_images(tmp_path: Path) -> None:
    with TensorBoard(tmp_path) as board:
        board.text(3, "note", "**bold**")
        board.image(3, "grey", jnp.ones((4, 5)))
        board.image(3, "colours", np.zeros((4, 5, 3), np.uint8))
        warned(r"image 'rows': expected the shape \[height, width, channels\], got \[7\]", lambda: odd(board))
    found = read(tmp_path)
    assert found.Tensors("note/text_summary")[0].tensor_proto.string_val == [b"**bold**"]
    assert {name: (found.Images(name)[0].height, found.Images(name)[0].width) for name in ("grey", "colours")} == {
        "grey": (4, 5),
        "colours": (4, 5),
    }


def odd(board: TensorBoard) -> None:
    """Write an image of no image's shape."""
    board.image(3, "rows", np.ones(7))
    board.flush()


@pytest.mark.parametrize("fails", [False, True])
def test_hyperparameters_with_the_last_metrics_and_the_outcome(fails: bool, tmp_path: Path) -> None:
    from tensorboard.context import RequestContext
    from tensorboard.plugins.hparams import api_pb2, list_session_groups
    from tensorboard.plugins.hparams.backend_context import Context

    settings = {"rate": np.float32(0.5), "name": "adam", "nested": {"flag": True}, "sizes": (1, 2)}
    try:
        with TensorBoard(tmp_path / "run", hyperparameters=settings) as board:
            board.log(7, {"loss": 0.25})
            if fails:
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    context = RequestContext()
    wanted = api_pb2.ListSessionGroupsRequest(slice_size=9, allowed_statuses=[api_pb2.STATUS_SUCCESS, 2])
    groups = list_session_groups.Handler(context, Context(plugin_context(tmp_path)), "", wanted).run()
    (group,) = groups.session_groups
    found = {name: getattr(value, value.WhichOneof("kind")) for name, value in group.hparams.items()}
    assert found == {"rate": 0.5, "name": "adam", "nested/flag": True, "sizes": "(1, 2)"}
    assert [(one.name.tag, one.value, one.training_step) for one in group.metric_values] == [("loss", 0.25, 7)]
    assert group.sessions[0].status == (api_pb2.STATUS_FAILURE if fails else api_pb2.STATUS_SUCCESS)


def test_a_profile_of_chosen_steps(tmp_path: Path) -> None:
    with TensorBoard(tmp_path, profile=(1, 3)) as board:
        trained([board], steps=4)
    (file,) = tmp_path.glob("plugins/profile/*/*.xplane.pb")
    profile = jax.profiler.ProfileData.from_file(str(file))
    assert any(event.name for plane in profile.planes for line in plane.lines for event in line.events)
    with TensorBoard(tmp_path / "unended", profile=(1, 30)) as board:
        board.log(1, 0)
        other = TensorBoard(tmp_path / "other", profile=(1, 30))
        warned("the profile could not be started", partial(write, other, (1, 0)))
        other.close()
    assert [*tmp_path.glob("unended/plugins/profile/*/*.xplane.pb")]


def test_a_disk_that_takes_no_more_is_a_warning_and_later_values_are_written(tmp_path: Path) -> None:
    with TensorBoard(tmp_path) as board:
        board.log(0, {"loss": 1})
        board.flush()
        (file,) = tmp_path.iterdir()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 10, limits[1]))  # within the next record
        try:
            text = rf"TensorBoard: {tmp_path}: expected to write, got OSError: .*File too large"
            warned(text, partial(write, board, (1, {"loss": 2})))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        warned(r"writes again; \d entries are lost", partial(write, board, (2, {"loss": 3})))
    assert curve(tmp_path, "loss") == [(0, 1), (2, 3)]


def test_the_folder_of_each_worker(tmp_path: Path) -> None:
    from dflow.testing import memory_cluster

    with memory_cluster(ps=1, workers=1) as memory:
        worker = memory.worker()
        with TensorBoard(tmp_path, cluster=worker, all_workers=True) as board:
            board.log(0, 1)
        worker.close()
    assert curve(tmp_path / "worker-0", "loss") == [(0, 1)]


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(text: str, **options: Any) -> None:
        with pytest.raises(
            dflow.TrainingError, match=rf"(?s)^dflow.loggers.TensorBoard: {text}.*test_.*py:\d+\n  give"
        ):
            TensorBoard(tmp_path, **options)

    refused("histogram_every: expected at least 1, got 0", histogram_every=0)
    refused(r"expected variables together with histogram_every, got \[", variables=[dflow.Variable(0.0, name="z")])
    refused("expected variables together with histogram_every, got 3", variables=3, histogram_every=1)
    refused(r"profile: expected two numbers of steps, the smaller first, got \(5, 5\)", profile=(5, 5))
    refused("hyperparameters: expected values by name, got 3", hyperparameters=3)
    (tmp_path / "file").write_text("")
    with pytest.raises(dflow.TrainingError, match=r"be written, got .*/file: "):
        TensorBoard(tmp_path / "file").log(0, 1)
    with pytest.raises(dflow.TrainingError, match=r"(?s)graph: expected a dflow.GraphView, got .*give dflow.graph\("):
        TensorBoard(tmp_path).graph(abs)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(dflow.ConfigError, match=r"(?s)tensorboardX, which is not installed.*'dflow\[tensorboard\]'"):
        TensorBoard(tmp_path)
