"""Saving to URLs of object stores: the results of local folders, without their renames and locks."""

from __future__ import annotations

import logging
import secrets
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.lowering.files import array_files, lease, object_path
from dflow.lowering.files.object_path import ObjectPath
from dflow.testing import memory_cluster
from tests.dflow.training.managed_run import Run, saved, steps_in
from tests.distributed.processes import Spawned
from tests.s3_server import BUCKET, S3Server, s3_server

# The same program starts again in one process.
pytestmark = pytest.mark.filterwarnings("ignore::dflow.tracing.primitives.namesakes.DuplicateNameWarning")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def s3(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of a new folder in a store of the S3 protocol; the environment has its endpoint."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{secrets.token_hex(4)}"


@pytest.fixture(params=["memory", "s3"])
def url(request: pytest.FixtureRequest) -> str:
    """Return the URL of a new folder in each store."""
    found: str = request.getfixturevalue("s3") if request.param == "s3" else f"memory://{secrets.token_hex(4)}/run"
    return found


def damage(url: str, name: str) -> None:
    """Change the first byte of the only object below `url` whose path ends in `name`."""
    (path,) = (path for path in ObjectPath(url).names() if path.endswith(name))
    content = (ObjectPath(url) / path).read().content
    assert content
    (ObjectPath(url) / path).write(bytes([content[0] ^ 1]) + content[1:])


def state() -> dict[str, Any]:
    names = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(4, jnp.bfloat16), "deep/~odd name": jnp.int4(3)}
    found: dict[str, Any] = {name: dflow.Variable(value, name=name) for name, value in names.items()}
    return found | {"noise": dflow.Generator(0, name="noise")}


def test_what_is_saved_is_restored_and_replaced(url: str) -> None:
    variables = state()
    expected = jax.random.normal(variables["noise"].split(), ())
    dflow.save(f"{url}/c/", variables)
    variables["w"].assign(jnp.zeros((2, 3)))
    moved = jax.random.normal(variables["noise"].split(), ())
    assert set(dflow.restore(f"{url}/c", variables).restored) == set(variables)
    np.testing.assert_array_equal(variables["w"].read(), np.arange(6.0).reshape(2, 3))
    assert jax.random.normal(variables["noise"].split(), ()) == moved != expected

    variables["w"].assign(jnp.ones((2, 3)))
    with pytest.raises(dflow.CheckpointExists, match=r"/c exists\n.*\n  save to another URL, or give overwrite=True"):
        dflow.save(f"{url}/c", variables)
    dflow.save(f"{url}/c", variables, overwrite=True)
    variables["w"].assign(jnp.zeros((2, 3)))
    dflow.restore(f"{url}/c", variables)
    assert float(variables["w"].read().sum()) == 6.0
    names = ObjectPath(f"{url}/c").names()
    assert len({name.partition("/")[0] for name in names}) == 2  # the manifest, and the folder of one attempt
    assert not [name for name in names if ".attempt" in name]


def test_a_copy_of_the_objects_is_a_local_checkpoint_and_back(url: str, tmp_path: Path) -> None:
    variables = state()
    dflow.save(f"{url}/c", variables)
    for name in ObjectPath(f"{url}/c").names():
        file = tmp_path / "c" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes((ObjectPath(f"{url}/c") / name).read().content or b"")
    assert set(dflow.restore(tmp_path / "c", variables).restored) == set(variables)

    dflow.save(tmp_path / "local", variables)
    for file in filter(Path.is_file, (tmp_path / "local").rglob("*")):
        (ObjectPath(f"{url}/local") / file.relative_to(tmp_path / "local").as_posix()).write(file.read_bytes())
    assert set(dflow.restore(f"{url}/local", variables).restored) == set(variables)
    dflow.save(f"{url}/local", variables, overwrite=True)
    assert {name.partition("/")[0][0] for name in ObjectPath(f"{url}/local").names()} == {"d", "~"}


def test_a_missing_or_foreign_place_says_so(url: str) -> None:
    variable = dflow.Variable(1.0, name="v")
    with pytest.raises(dflow.NoCheckpoint, match=r"there is no checkpoint .*/c\n.*\n  correct the URL"):
        dflow.restore(f"{url}/c", variable)
    dflow.save(f"{url}/c/step_1", variable)
    with pytest.raises(dflow.NoCheckpoint, match="in it there are: step_1; give the path of one of them"):
        dflow.restore(f"{url}/c", variable)
    for overwrite in (False, True):
        with pytest.raises(dflow.CheckpointExists, match=r"exists and holds no dflow\.json, so it is not what may be"):
            dflow.save(f"{url}/c", variable, overwrite=overwrite)
    assert dflow.restore(f"{url}/c/step_1", variable).restored == ("v",)


@pytest.mark.parametrize("damaged", ["w/c.0.0", "w/zarr.json", "b/c.0"])
def test_a_damaged_or_missing_object_is_named(url: str, damaged: str) -> None:
    variables = state()
    dflow.save(f"{url}/c", variables)
    says = r"array 'w' \(f32\[2,3\]\) in .*/c is damaged or missing: "
    if damaged == "b/c.0":
        (name,) = (name for name in ObjectPath(f"{url}/c").names() if name.endswith(damaged))
        ObjectPath(f"{url}/c").remove([name])
        says = r"array 'b' .* is damaged or missing: NOT_FOUND"
    else:
        damage(f"{url}/c", damaged)
    with pytest.raises(dflow.DamagedCheckpoint, match=says):
        dflow.restore(f"{url}/c", variables)


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_restored(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run()
    with run.manager(url) as manager:
        saved(manager, run, 0)
        saved(manager, run, 1)
    damage(f"{url}/step_1", "seen/c.0")
    again = Run()
    with caplog.at_level(logging.WARNING, "dflow"), again.manager(url, keep=1) as manager:
        assert (manager.resumed, again.last) == (0, 0)
        (aside,) = {name.partition("/")[0] for name in ObjectPath(f"{url}/step_1").names()}
        assert f"step_1 is damaged, and step_0 is restored: array 'seen' (f32[4]) in {url}/step_1" in caplog.text
        assert f"it stays as {url}/step_1/{aside}" in caplog.text
        for step in (1, 2):
            saved(manager, again, step)
    assert f"{aside}/seen/c.0" in ObjectPath(f"{url}/step_1").names()
    third = Run()
    with third.manager(url) as manager:
        assert (manager.resumed, third.last) == (2, 2)
    assert f"{aside}/seen/c.0" in ObjectPath(f"{url}/step_1").names()
    damage(f"{url}/step_1/{aside}", "seen/c.0")  # the damage is undone
    dflow.restore(f"{url}/step_1/{aside}", {"seen": third.seen})
    assert third.last == 1


def test_a_second_manager_is_refused_while_the_first_renews_its_lease(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "RENEWAL_S", 0.02)
    monkeypatch.setattr(lease, "LEASE_S", 60.0)
    with (
        Run().manager(url),
        pytest.raises(
            dflow.CheckpointError,
            match=r"expected no other CheckpointManager that runs, got one in process \d+ on .*\n.*\n  close that one",
        ),
    ):
        Run().manager(url)
    Run().manager(url).close()


def test_a_manager_that_lost_its_lease_saves_no_more(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "RENEWAL_S", 3600.0)  # the first manager's process is paused
    monkeypatch.setattr(lease, "LEASE_S", 0.2)
    paused, other = Run(), Run()
    first = paused.manager(url)
    saved(first, paused, 0)
    with other.manager(url) as second:
        assert second.resumed == 0
        saved(second, other, 1)
        paused.set(7)
        first.save(7)
        with pytest.raises(dflow.CheckpointError, match=r"expected only this process to write there, got process \d+"):
            first.wait()
        with pytest.raises(dflow.CheckpointError, match="expected only this process to write there"):
            first.step(8)
        assert steps_in(second) == [0, 1]
        record = (ObjectPath(url) / "runs.json").read().content
        with pytest.raises(dflow.CheckpointError, match="expected only this process"):
            first.close()
        assert (ObjectPath(url) / "runs.json").read().content == record
        saved(second, other, 2)


KILLED = """
import os, signal, sys
from dflow.lowering.files import array_files, lease, object_path
from tests.dflow.training.managed_run import Run, saved

url, left = sys.argv[1], int(sys.argv[2])
lease.LEASE_S = 0.5
run = Run()
manager = run.manager(url, keep=2)
for step in range(3):
    saved(manager, run, step)
print("saved three", flush=True)
answer = object_path.ObjectPath._answer

def dies(*args):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return answer(*args)

object_path.ObjectPath._answer = dies
saved(manager, run, 3)
print("saved the fourth", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.once
@pytest.mark.parametrize("request_number", [9, 10_000])
def test_a_process_that_dies_while_it_saves_leaves_a_checkpoint_that_is_restored(
    s3: str, request_number: int, tmp_path: Path
) -> None:
    with Spawned("-c", KILLED, s3, str(request_number), cwd=Path.cwd()) as process:
        code, output = process.finish()
    assert code == -signal.SIGKILL, output
    assert "saved three" in output
    run = Run()
    with run.manager(s3, keep=2) as manager:
        assert manager.resumed in (2, 3)
        assert manager.resumed == 3 or "saved the fourth" not in output
        assert run.last == manager.resumed
        assert steps_in(manager)[-2:] == [manager.resumed - 1, manager.resumed]
        saved(manager, run, 4)
        assert steps_in(manager) == [manager.resumed, 4]
        names = {name.partition("/")[0] for name in ObjectPath(s3).names()}
    assert names == {".manager.lock", "runs.json", f"step_{manager.resumed}", "step_4"}


def test_tasks_save_and_other_numbers_of_tasks_restore(url: str) -> None:
    for tasks in (3, 2, 1):
        with memory_cluster(ps=tasks) as memory:
            cluster = memory.worker()
            with cluster.parameter_servers():
                held = [dflow.Variable(lambda: jnp.zeros(3), name=name) for name in ("one", "two", "three")]
                table = dflow.ShardedVariable(lambda: jnp.arange(7.0), by="modulo", name="table")
            manager = dflow.CheckpointManager(url, [held, table])
            assert (len(table.shards), table.read().tolist()) == (tasks, [n + 3.0 - tasks for n in range(7)])
            table.assign(table.read() + 1)
            for index, variable in enumerate(held):
                expected = [float(index + 3 - tasks)] * 3 if manager.resumed is not None else [0.0] * 3
                assert variable.read().tolist() == ([0.0] * 3 if tasks == 3 else expected)
                variable.assign(jnp.full(3, float(index + 4 - tasks)))
            manager.save(manager.next_step)
            manager.close()
            cluster.close()
    one = [dflow.Variable(jnp.zeros(3), name=name) for name in ("one", "two", "three")]
    whole = dflow.Variable(jnp.zeros(7), name="table")
    dflow.restore(f"{url}/step_2", [one, whole])
    assert [variable.read().tolist() for variable in one] == [[3.0] * 3, [4.0] * 3, [5.0] * 3]
    assert whole.read().tolist() == [n + 3.0 for n in range(7)]


def test_a_store_that_cannot_be_reached_is_an_error_with_a_remedy(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variable, run = dflow.Variable(1.0, name="v"), Run()
    with run.manager(s3) as manager:
        saved(manager, run, 0)
    elsewhere = s3.replace(BUCKET, "no-such-bucket")
    with pytest.raises(dflow.CheckpointError, match=r"NoSuchBucket.*\n.*\n  make the bucket, or correct the URL"):
        dflow.save(f"{elsewhere}/c", variable)
    with pytest.raises(dflow.CheckpointError, match=r"NoSuchBucket.*\n.*\n  make the bucket, or correct the URL"):
        run.manager(elsewhere)


def test_missing_credentials_are_an_error_with_a_remedy(s3: str, server: S3Server, tmp_path: Path) -> None:
    says = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "")
    script = "import sys, dflow; dflow.save(sys.argv[1], dflow.Variable(1.0, name='v'))"
    with Spawned("-c", script, f"{s3}/c", cwd=Path.cwd(), **says) as process:
        code, output = process.finish()
    assert code == 1
    assert "PERMISSION_DENIED" in output
    assert "  give this process credentials that may read, write and list there" in output


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://host/c", r"or a URL of file, gs, memory, s3, got 'http'"),
        ("s3://bucket", r"s3://bucket: expected s3://bucket/path, got another form"),
        ("s3:///c", "expected s3://bucket/path, got another form"),
        ("gs://bucket/a//b", "expected gs://bucket/path, got another form"),
        ("gs://bucket/../b", "expected gs://bucket/path, got another form"),
        ("s3://bucket/c?region=x", "expected s3://bucket/path, got another form"),
        ("memory://", "expected memory://path, got another form"),
        ("gs://UPPER/c", "expected the name of a bucket, got"),
        ("file://host/c", "expected file:///path, got another form"),
        (Path("s3://bucket/c"), r"s3:/bucket/c: expected a URL with two slashes, .*\n.*\n  give a str, 's3://...'"),
        ("s3://bucket/c.safetensors", "expected the URL of a folder that dflow writes, got one that ends in"),
        ("memory://c.orbax", "expected the URL of a folder that dflow writes, got one that ends in"),
    ],
)
def test_other_urls_are_refused(url: Any, says: str) -> None:
    variable = dflow.Variable(1.0, name="v")
    for use in (dflow.save, dflow.restore, dflow.CheckpointManager):
        with pytest.raises(dflow.CheckpointError, match=says):
            use(url, variable)


def test_a_file_url_is_the_local_path(tmp_path: Path) -> None:
    variable = dflow.Variable(1.0, name="v")
    dflow.save(f"file://{tmp_path}/a%20b.safetensors", variable)
    assert dflow.restore(tmp_path / "a b.safetensors", variable).restored == ("v",)
    says = "expected no other CheckpointManager that runs"
    with (
        dflow.CheckpointManager(f"file://localhost{tmp_path}/run", variable),
        pytest.raises(dflow.CheckpointError, match=says),
    ):
        dflow.CheckpointManager(tmp_path / "run", variable)


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """TensorStore's spec of a store that accepts connections and never answers; the waits are short."""
    for module in (object_path, array_files):
        monkeypatch.setattr(module, "LONGEST_S", 0.2)
    monkeypatch.setattr(object_path, "ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        yield {"driver": "s3", "bucket": "bucket", "path": "v/", "endpoint": endpoint, "aws_region": "us-east-1"}


def test_a_store_that_accepts_and_never_answers_is_left(silent: dict[str, Any]) -> None:
    says = (
        r"s3://bucket/c.*: expected an object store .*, got: no answer in time\n.*\n  see whether this machine reaches"
    )
    for use in (dflow.save, dflow.restore, dflow.CheckpointManager):
        with pytest.raises(dflow.CheckpointError, match=says):
            use("s3://bucket/c", dflow.Variable(1.0, name="v"))


def test_arrays_that_a_store_never_answers_for_are_not_taken_for_damaged(
    silent: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, variable, kvstore = f"memory://{secrets.token_hex(4)}", dflow.Variable(1.0, name="v"), ObjectPath.kvstore
    dflow.save(f"{url}/c", variable)
    monkeypatch.setattr(ObjectPath, "kvstore", lambda place: silent if place.name == "v" else kvstore(place))
    with pytest.raises(dflow.CheckpointError, match=r"array 'v' cannot be written into .*/other: no answer in time"):
        dflow.save(f"{url}/other", variable)
    with pytest.raises(dflow.CheckpointError, match=r"/c: expected an object store .* got: no answer") as raised:
        dflow.restore(f"{url}/c", variable)
    assert not isinstance(raised.value, dflow.DamagedCheckpoint)
    assert ObjectPath(f"{url}/other").names() == []
