"""`dflow launch --on ray`: the actor of a task, and launches that are refused. `test_recovery_on_ray.py` launches."""

from __future__ import annotations

import importlib.util
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dflow.__main__ import main
from dflow.cli.launch_backends import ray_resources
from dflow.tracing.errors import ConfigError

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed; pip install 'dflow[ray]' brings it"
)


@pytest.fixture(autouse=True)
def _folder_of_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the folder that an actor changed to, as later tests start processes in the repository's."""
    monkeypatch.chdir(Path.cwd())


@needs_ray
def test_lines_are_kept_until_the_launcher_has_them(tmp_path: Path) -> None:
    from dflow.distributed.launching.on_ray import TaskActor

    words = ["-c", "print('one'); print('two'); raise SystemExit(3)"]
    actor = TaskActor("/job:worker/task:0", words, {}, {}, signal.SIGTERM, str(tmp_path), is_secured=False)
    with ThreadPoolExecutor(1) as pool:
        status = pool.submit(actor.run)
        found: tuple[str, ...] = ()
        while len(found) < 2:
            found, _ = actor.lines(0)
        assert found == ("one", "two")
        assert actor.lines(1)[0] == ("two",)
        assert actor.lines(1)[0] == ("two",), "an answer that did not arrive is given again"
        assert not status.done()
        assert actor.lines(2) == ((), 3)
        assert status.result(30.0) == 3


@needs_ray
def test_a_program_ends_by_sigint_though_ray_blocks_that_signal(tmp_path: Path) -> None:
    from dflow.distributed.launching.on_ray import TaskActor

    program = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); signal.alarm(20); print('up'); signal.pause()"
    )
    words = ["-c", program]

    def made() -> TaskActor:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        return TaskActor("/job:ps/task:0", words, {}, {}, signal.SIGINT, str(tmp_path), is_secured=False)

    with ThreadPoolExecutor(1) as pool:
        actor = pool.submit(made).result(30.0)
        while not actor.lines(0)[0]:
            pass
        actor.lines(1)
        actor.stop()
        assert pool.submit(actor.run).result(60.0) == -signal.SIGINT


@needs_ray
@pytest.mark.parametrize(("found", "sees"), [("", "none"), ("of another launch", "another one")])
def test_a_task_server_does_not_start_where_the_snapshots_are_not_seen(tmp_path: Path, found: str, sees: str) -> None:
    from dflow.distributed.launching.on_ray import TaskActor

    if found:
        (tmp_path / "launch.id").write_text(found)
    text = rf"expected a folder that all nodes see, but ps:0 on the node .* sees {sees}\n[\s\S]*shared file system"
    with pytest.raises(ConfigError, match=text):
        TaskActor("/job:ps/task:0", ["-c", ""], {}, {}, signal.SIGINT, ".", False, (str(tmp_path), "of this launch"))


@needs_ray
def test_a_launcher_outside_of_the_cluster_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    monkeypatch.setenv("RAY_ADDRESS", "ray://10.0.0.1:10001")
    assert main(["launch", "--on", "ray", "train.py"]) == 2
    assert "expected the address of a cluster that this machine is a node of, got ray://" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_the_way_to_get_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    assert main(["launch", "--on", "ray", "train.py"]) == 2
    text = capsys.readouterr().err
    assert text.startswith("dflow launch: --on ray needs Ray, which is not installed\n")
    assert text.endswith("\n  pip install 'dflow[ray]'\n")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--ps-resources", "CPU=1"], "--ps-resources is for --on ray, got --on this-machine"),
        (["--on", "ray", "--cpus-per-worker", "1"], "--cpus-per-worker is for --on this-machine, got --on ray"),
    ],
)
def test_options_of_another_place_are_refused(
    words: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    assert main(["launch", *words, "train.py"]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "resources"),
    [
        ("CPU=2", {"CPU": 2.0}),
        ("GPU=0.5", {"CPU": 1.0, "GPU": 0.5}),
        ("CPU=0, GPU=1,tpu=4", {"CPU": 0.0, "GPU": 1.0, "tpu": 4.0}),
    ],
)
def test_resources_are_read(text: str, resources: dict[str, float]) -> None:
    assert ray_resources(text) == resources


@pytest.mark.parametrize("text", ["", "CPU", "CPU=", "=1", "CPU=x", "CPU=-1", "CPU=1,,", "CPU=nan"])
def test_a_text_without_a_resource_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"states no resources; write them as CPU=1,GPU=0\.5"):
        ray_resources(text)
