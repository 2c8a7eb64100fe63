"""Models and their versions: found, replaced, refused, learned and saved, also with variables of the same names."""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
import socket
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.exporting import export_format
from dflow.lowering.files import array_manifest
from dflow.serving import served_version
from dflow.serving.served_model import find_models
from dflow.serving.served_version import ServingSettings
from dflow.tracing.errors import ConfigError, DeviceError, ExportError, NoCheckpoint, TaskLost
from tests.dflow.serving.inference_client import binary_request, call, infer, json_request
from tests.dflow.serving.small_exports import ONE_ROW, ROWS, HeldCalls, learner, scale, served
from tests.distributed.waiting import until

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def scales(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of versions 1 and 2, which multiply by 1 and by 2."""
    folder = tmp_path_factory.mktemp("scales")
    for factor in (1, 2):
        scale(folder / str(factor), factor)
    return folder


@pytest.fixture
def model(scales: Path, tmp_path: Path) -> Iterator[Path]:
    """A folder that has version 1."""
    shutil.copytree(scales / "1", tmp_path / "scale" / "1")
    return tmp_path / "scale"


def answered(url: str, model: str = "scale") -> tuple[str, float]:
    """Return the version that answers, and its factor."""
    status, body, _ = infer(url, model, ONE_ROW)
    assert status == 200, body
    return body["model_version"], body["outputs"][0]["data"][0]


def load_newest(url: str, model: str = "scale") -> tuple[int, str]:
    status, body, _ = call(url, f"/v2/repository/models/{model}/load", b"")
    return status, body.get("error", "")


def test_an_export_versions_and_folders_of_both_are_found(scales: Path, tmp_path: Path) -> None:
    one, both = scales / "1", tmp_path / "both"
    shutil.copytree(one, both / "plain")
    shutil.copytree(scales, both / "numbered")
    (both / "other").mkdir()
    assert find_models(scales) == {scales.name: scales}
    assert find_models(one, "mine") == {"mine": one}
    assert find_models(both) == {"numbered": both / "numbered", "plain": both / "plain"}
    with served(both) as server:
        assert (answered(server.url, "plain"), answered(server.url, "numbered")) == (("1", 1.0), ("2", 2.0))
    for place, text in ((tmp_path / "none", "there is no folder"), (both / "other", "holds no export")):
        with pytest.raises(ConfigError, match=text):
            find_models(place)
    with pytest.raises(ConfigError, match=r"--name mine names one model, and .* has numbered, plain"):
        find_models(both, "mine")
    for name in ("a/b", "", "..", "a b", "a%2Fb", "a?", "ü"):
        with pytest.raises(ConfigError, match="--name: expected a name that a URL can have"):
            find_models(one, name)


def test_a_new_version_takes_over_without_losing_a_request(model: Path, scales: Path) -> None:
    with served(model) as server:
        old = weakref.ref(server.models["scale"].current)
        held = HeldCalls(server)
        # Three requests wait in the queue of the old version when the new one takes over.
        asked = [held.ask_first(), *(held.ask() for _ in range(3))]
        shutil.copytree(scales / "2", model / "2")
        loading = held.later(load_newest, server.url)
        until(lambda: call(server.url, "/v2/models/scale")[1]["versions"] == ["2"])
        assert answered(server.url) == ("2", 2.0)  # while the old one still computes
        held.release()
        assert loading.result(60) == (200, "")
        bodies = [one.result(60)[1] for one in asked]
        answers = [(body["model_version"], body["outputs"][0]["data"][0]) for body in bodies]
        assert answers[0] == ("1", 1.0)
        assert set(answers) <= {("1", 1.0), ("2", 2.0)}
        del held, asked, loading
        gc.collect()
        assert old() is None
        assert server.lines == ["scale: version 2 is served; version 1 is unloaded"]  # type: ignore[attr-defined]


def test_a_broken_version_is_refused_and_the_old_one_goes_on(model: Path, scales: Path) -> None:
    shutil.copytree(scales / "2", model / "2")
    chunk = model / "2" / "programs" / "times"
    content = chunk.read_bytes()
    chunk.write_bytes(content[:-1])
    with served(model) as server:
        assert answered(server.url) == ("1", 1.0)
        status, error = load_newest(server.url)
        assert status == 400
        assert "scale: version 2 is refused: " in error
        assert f"{chunk} is damaged: expected {len(content)} bytes, got {len(content) - 1}" in error
        entries = call(server.url, "/v2/repository/index", b"")[1]
        assert [(one["version"], one["state"]) for one in entries] == [("1", "READY"), ("2", "UNAVAILABLE")]
        assert entries[1]["reason"] == error
        assert call(server.url, "/v2/repository/index", b'{"ready": true}')[1] == entries[:1]
        assert b'dflow_serve_refused_versions{model="scale"} 1.0' in call(server.url, "/metrics")[1]
        # The rest of a copy arrives.
        chunk.write_bytes(content)
        assert load_newest(server.url) == (200, "")
        assert answered(server.url) == ("2", 2.0)
        assert len([line for line in server.lines if "is refused" in line]) == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES, errno.ESTALE])
def test_a_version_that_this_process_cannot_open_is_not_called_damaged(
    number: int, model: Path, scales: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Any, *_: Any) -> Any:
        raise OSError(number, os.strerror(number), str(path))

    for module in (export_format, array_manifest):
        with monkeypatch.context() as failing:
            failing.setattr(module, "read_regular", fail)
            with pytest.raises(ExportError, match=f"cannot be read: .*{os.strerror(number)}") as error:
                dflow.load(scales / "1")
            assert "damaged" not in str(error.value)
    with served(model) as server:
        shutil.copytree(scales / "2", model / "2")
        with monkeypatch.context() as failing:
            failing.setattr(export_format, "read_regular", fail)
            assert os.strerror(number) in load_newest(server.url)[1]
        unseen = ExportError("the tables could not be loaded", "look")
        unseen.__cause__ = NoCheckpoint("there is no checkpoint", "save one")
        for error in (TaskLost("ps:0 has left", "start it"), DeviceError("no task of ps", "start one"), unseen):
            with monkeypatch.context() as failing:  # with tables at tasks
                failing.setattr(served_version, "load", lambda *_, error=error, **__: _raise(error))
                assert str(error) in load_newest(server.url)[1]
        assert load_newest(server.url) == (200, "")


def _raise(error: Exception) -> None:
    raise error


def test_versions_whose_folder_is_gone_are_not_listed(model: Path, scales: Path) -> None:
    shutil.copytree(scales / "2", model / "2")
    shutil.copytree(scales / "2", model / "3")
    (model / "3" / "programs" / "times").unlink()

    def listed(url: str) -> list[tuple[str, str, str]]:
        entries = call(url, "/v2/repository/index", b"")[1]
        return [(one["version"], one["state"], one.get("reason", "")[:18]) for one in entries]

    with served(model) as server:
        assert listed(server.url) == [("2", "READY", ""), ("3", "UNAVAILABLE", "scale: version 3 i")]
        shutil.rmtree(model / "3")
        assert load_newest(server.url) == (200, "")
        assert listed(server.url) == [("2", "READY", "")]
        # If a version's folder is removed, the version before it is served.
        shutil.rmtree(model / "2")
        assert load_newest(server.url) == (200, "")
        assert listed(server.url) == [("2", "READY", "its folder is gone")]
        assert load_newest(server.url) == (200, "")
        assert listed(server.url) == [("1", "READY", "")]
        assert answered(server.url) == ("1", 1.0)
        shutil.rmtree(model)
        assert load_newest(server.url) == (400, f"scale: {model} holds no export; it is served from memory")
        assert answered(server.url) == ("1", 1.0)


def test_a_model_that_cannot_be_served_leaves_the_others_alone(model: Path, scales: Path) -> None:
    dflow.export(lambda x: x, dflow.spec("b", jnp.complex64)).save(model.parent / "waves")
    shutil.copytree(scales / "2", model.parent / "cut")
    program = model.parent / "cut" / "programs" / "times"
    content = program.read_bytes()
    program.write_bytes(content[:9])
    with served(model.parent) as server:
        assert answered(server.url) == ("1", 1.0)
        entries = {one["name"]: one for one in call(server.url, "/v2/repository/index", b"")[1]}
        assert {name: one["state"] for name, one in entries.items()} == {
            "scale": "READY",
            "waves": "UNAVAILABLE",
            "cut": "UNAVAILABLE",
        }
        for name, text in (("waves", "has no such dtype"), ("cut", "is damaged: expected")):
            assert text in entries[name]["reason"]
            for path in ("", "/ready", "/versions/1", "/infer"):
                body = ONE_ROW if path == "/infer" else None
                status, answer, _ = call(server.url, f"/v2/models/{name}{path}", body)
                assert (status, answer["error"][: 24 + len(name)]) == (503, f"model {name!r} is unavailable:")
                assert text in answer["error"]
        assert b'dflow_serve_refused_versions{model="cut"} 1.0' in call(server.url, "/metrics")[1]
        program.write_bytes(content)
        assert load_newest(server.url, "cut") == (200, "")
        assert answered(server.url, "cut") == ("1", 2.0)


def test_an_export_that_is_replaced_in_place_is_served(scales: Path, tmp_path: Path) -> None:
    place = tmp_path / "scale"
    shutil.copytree(scales / "1", place)
    with served(place) as server:
        assert answered(server.url) == ("1", 1.0)
        dflow.load(scales / "2").save(place, overwrite=True)
        assert load_newest(server.url) == (200, "")
        assert answered(server.url) == ("1", 2.0)


def test_a_model_without_a_sound_version_is_refused_at_the_start(model: Path) -> None:
    (model / "1" / "programs" / "times").unlink()
    text = r"scale: no version can be served:\nscale: version 1 is refused: .*it is missing"
    with pytest.raises(ExportError, match=text), served(model):
        pass


def test_settings_below_their_least_values_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_batch: expected at least 0, got -1"):
        ServingSettings(max_batch=-1)
    with pytest.raises(ConfigError, match="max_delay_s: expected at least 0, got nan"):
        ServingSettings(max_delay_s=float("nan"))
    with pytest.raises(ConfigError, match=r"timeout_s: expected a time above 0, got 0\.0"):
        ServingSettings(timeout_s=0.0)


def test_exports_in_64_bit_precision_are_served_beside_others(scales: Path, tmp_path: Path) -> None:
    with jax.enable_x64(True):
        total, w = dflow.Variable(jnp.zeros((), jnp.int64), name="total"), dflow.Variable(jnp.ones(2), name="w")

        def add(ids: Any, x: Any) -> Any:
            total.assign_add(ids.sum())
            return {"ids": ids + 1, "x": x / w / 3, "total": total.read()}

        spec = dflow.spec("b", jnp.int64), dflow.spec("b, 2", jnp.float64)
        functions = {"add": (add, *spec), "third": (lambda x: x / w / 3, spec[1])}
        dflow.export(functions).save(tmp_path / "wide" / "1")
    shutil.copytree(scales / "1", tmp_path / "plain")
    settings = ServingSettings(learn=True, max_batch=2)
    with served(tmp_path, settings) as server:
        for binary in (False, True):
            inputs = {"ids": np.array([2**53, 2**53 + 1]), "x": np.ones((2, 2))}
            body, headers = binary_request(**inputs) if binary else (json_request(**inputs), {})
            assert infer(server.url, "wide.add", body, **headers)[0] == 200
        _, answer, _ = infer(server.url, "wide.add", json_request(ids=np.array([2**62]), x=np.ones((1, 2))))
        found = {one["name"]: (one["datatype"], one["data"]) for one in answer["outputs"]}
        assert found["ids"] == ("INT64", [2**62 + 1])
        assert found["x"] == ("FP64", [1 / 3] * 2)
        assert found["total"] == ("INT64", [2 * (2**54 + 1) + 2**62])
        third = infer(server.url, "wide.third", json_request(x=np.ones((1, 2))))[1]["outputs"][0]
        assert (third["datatype"], third["data"]) == ("FP64", [1 / 3] * 2)
        assert answered(server.url, "plain") == ("1", 1.0)
        server.models["wide"].save()
    with jax.enable_x64(True):
        assert int(dflow.load(tmp_path / "wide" / "2").variables["total"].read()) == 2 * (2**54 + 1) + 2**62


def test_functions_that_write_are_refused_without_learn(tmp_path: Path) -> None:
    learner(tmp_path / "counter")
    with served(tmp_path / "counter") as server:
        status, body, _ = infer(server.url, "counter.add", json_request(x=np.float32(1)))
        text = "counter.add is not served: it writes total, which needs dflow serve --learn"
        assert (status, body) == (403, {"error": text})
        status, body, _ = infer(server.url, "counter.total", b'{"inputs":[]}')
        assert (status, body["outputs"][0]["data"]) == (200, [0.0])
    for folder, settings, text in (
        (tmp_path / "counter", ServingSettings(learn=True), "--save-every writes versions, and .* is one export"),
        (tmp_path / "counter", ServingSettings(), "--save-every saves what calls have learned, and --learn is absent"),
    ):
        with pytest.raises(ConfigError, match=text), served(folder, settings, save_every_s=60):
            pass


def test_updates_are_applied_one_by_one_and_saved_as_a_new_version(tmp_path: Path) -> None:
    learner(tmp_path / "counter" / "1")
    totals: list[float] = []

    def add(url: str) -> None:
        for _ in range(5):
            status, body, _ = infer(url, "counter.add", json_request(x=np.float32(1)))
            assert status == 200
            totals.append(body["outputs"][0]["data"][0])

    with served(tmp_path / "counter", ServingSettings(learn=True, max_batch=4), save_every_s=3600) as server:
        reasons = "it writes variables", "its inputs and outputs have no leading dimension in common"
        for line, reason in zip(server.lines, reasons, strict=True):  # type: ignore[attr-defined]
            assert f"computes its requests one by one: {reason}" in line
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(add, [server.url] * 4))
        # Each call saw the updates before it: none was lost, and the one that compiled it left no trace.
        assert sorted(totals) == list(range(1, 21))
        status, error = load_newest(server.url, "counter")
        assert (status, error.split(";")[0]) == (400, "counter learns, and keeps its version 1")
        server.models["counter"].save()
        server.models["counter"].save()  # nothing has changed since
        assert call(server.url, "/v2/models/counter.add")[1]["versions"] == ["2"]
        infer(server.url, "counter.add", json_request(x=np.float32(100)))
    assert sorted(entry.name for entry in (tmp_path / "counter").iterdir()) == ["1", "2", "3"]
    assert [float(dflow.load(tmp_path / "counter" / number).total()) for number in "123"] == [0, 20, 120]


def test_a_request_for_wrong_outputs_is_refused_before_its_update(tmp_path: Path) -> None:
    learner(tmp_path / "counter")
    with served(tmp_path / "counter", ServingSettings(learn=True)) as server:
        request = json.loads(json_request(x=np.float32(1))) | {"outputs": [{"name": "result"}] * 2}
        status, body, _ = infer(server.url, "counter.add", json.dumps(request).encode())
        assert (status, body["error"]) == (400, "output 'result': expected once, got twice")
        assert infer(server.url, "counter.total", b'{"inputs":[]}')[1]["outputs"][0]["data"] == [0.0]


def test_a_state_that_cannot_be_saved_is_reported_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner(tmp_path / "counter" / "1")
    with served(tmp_path / "counter", ServingSettings(learn=True), save_every_s=3600) as server:
        infer(server.url, "counter.add", json_request(x=np.float32(3)))
        with monkeypatch.context() as full:
            full.setattr(dflow.Loaded, "save", lambda *_: (_ for _ in ()).throw(OSError("no space")))
            assert not server._save()
        lines: list[str] = server.lines  # type: ignore[attr-defined]
        assert lines == ["counter: its state could not be saved, and will be tried again: no space"]
        assert server.models["counter"].current.has_unsaved_updates
    assert lines[1:] == ["counter: saved as version 2"]
    assert float(dflow.load(tmp_path / "counter" / "2").total()) == 3.0


def test_a_stop_ends_in_time_although_a_call_of_an_old_version_hangs(model: Path, scales: Path) -> None:
    with served(model, poll_s=0.02) as server:
        held = HeldCalls(server)
        first = held.ask_first()
        shutil.copytree(scales / "2", model / "2")
        until(lambda: call(server.url, "/v2/models/scale")[1]["versions"] == ["2"])
        with server.models["scale"]._changing:  # free while the old version is closed
            assert server._watching.is_alive()
        assert held.later(server.stop, 0.1).result(30) is False
        held.release()
        first.result(60)
        server._watching.join(60)


@pytest.mark.parametrize(("grace_s", "leaves"), [(600.0, True), (0.0, False)])
def test_a_client_that_does_not_read_delays_no_save(grace_s: float, leaves: bool, tmp_path: Path) -> None:
    big = dflow.Variable(jnp.zeros(4_000_000), name="big")

    def add(x: Any) -> Any:
        big.assign_add(jnp.broadcast_to(x, (4_000_000,)))
        return big.read()

    dflow.export(add, dflow.spec("", jnp.float32)).save(tmp_path / "add" / "1")
    body, headers = binary_request(x=np.float32(1))
    lines = [
        f"{name}: {value}" for name, value in {**headers, "Host": "localhost", "Content-Length": len(body)}.items()
    ]
    head = "\r\n".join(["POST /v2/models/add/infer HTTP/1.1", *lines, "", ""])
    with served(tmp_path / "add", ServingSettings(learn=True), save_every_s=3600) as server:
        port = int(server.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            client.sendall(head.encode() + body)
            assert client.recv(8)
            with ThreadPoolExecutor(1) as pool:
                stopping = pool.submit(server.stop, grace_s)
                until((tmp_path / "add" / "2" / "manifest.json").exists)  # while the server waits for the client
                if leaves:
                    client.close()
                assert stopping.result(60) is leaves


def test_rows_that_depend_on_each_other_are_not_batched(tmp_path: Path) -> None:
    dflow.export(lambda x: x - x.mean(0), ROWS).save(tmp_path / "center")
    with served(tmp_path / "center", ServingSettings(max_batch=4)) as server:
        assert server.lines == [  # type: ignore[attr-defined]
            "center computes its requests one by one: row 0 of result changes with the other rows of the batch"
        ]
        rows = np.array([[1, 2], [3, 6], [5, 1], [7, 3], [9, 8]], np.float32)
        outputs = infer(server.url, "center", json_request(x=rows))[1]["outputs"]
        np.testing.assert_allclose(np.reshape(outputs[0]["data"], (5, 2)), rows - rows.mean(0))


def test_batches_of_at_most_one_row(model: Path) -> None:
    with served(model, ServingSettings(max_batch=1)) as server:
        assert answered(server.url) == ("1", 1.0)
        status, answer, _ = infer(server.url, "scale", json_request(x=np.ones((2, 2), np.float32)))
        assert (status, "expected at most 1 rows, got 2" in answer["error"]) == (400, True)


IDS = dflow.spec("b", jnp.int32)


def plain(rows: int) -> Any:
    """Return a function of row numbers over a variable of `rows` rows, whose values are all `rows`."""
    return dflow.Variable(jnp.full((rows, 2), float(rows)), name="items").gather


def table_of_ids(rows: int) -> Any:
    """Return a function like that of `plain` over a table with a vocabulary."""
    initializer = jax.nn.initializers.constant(rows)
    items = dflow.Embedding(rows, 2, initializer=initializer, name="items", vocabulary=dflow.Vocabulary(bucket=1))
    return lambda ids: items(dflow.WideIds(jnp.zeros(ids.shape, jnp.uint32), ids.astype(jnp.uint32)))


def write(path: Path, fn: Any) -> None:
    """Export a function of row numbers."""

    def look_up(ids: Any) -> Any:
        return fn(ids)

    dflow.export(look_up, IDS).save(path, overwrite=True)


def write_refused(path: Path, rows: int) -> None:
    """Export a function that is refused when its variable has been loaded: the protocol lacks its dtype."""
    items = dflow.Variable(jnp.ones((rows, 2)), name="items")
    dflow.export(lambda x: x * items[0, 0], dflow.spec("b", jnp.complex64)).save(path)


def rows_of(url: str, model: str) -> tuple[str, list[float]]:
    """Return the version that answers, and the row of id 1."""
    status, body, _ = infer(url, model, json_request(ids=np.array([1], np.int32)))
    assert status == 200, body
    return body["model_version"], body["outputs"][0]["data"]


@pytest.mark.parametrize("kind", [plain, table_of_ids])
def test_models_and_versions_have_variables_of_one_name_and_other_shapes(
    kind: Callable[[int], Any], tmp_path: Path
) -> None:
    write(tmp_path / "a" / "1", kind(3))
    write(tmp_path / "b", kind(5))
    with served(tmp_path) as server:
        assert (rows_of(server.url, "a"), rows_of(server.url, "b")) == (("1", [3.0, 3.0]), ("1", [5.0, 5.0]))
        write(tmp_path / "a" / "2", kind(7))
        assert call(server.url, "/v2/repository/models/a/load", b"")[0] == 200
        # Files of a served version that are replaced are loaded beside the earlier ones.
        write(tmp_path / "b", kind(9))
        assert call(server.url, "/v2/repository/models/b/load", b"")[0] == 200
        assert (rows_of(server.url, "a"), rows_of(server.url, "b")) == (("2", [7.0, 7.0]), ("1", [9.0, 9.0]))
        assert not [line for line in server.lines if "refused" in line]  # type: ignore[attr-defined]


def test_a_version_that_is_replaced_or_refused_leaves_no_memory_in_use(tmp_path: Path) -> None:
    def held(rows: int) -> int:
        return sum(array.shape == (rows, 2) for array in jax.live_arrays())

    folder = tmp_path / "a"
    write(folder / "1", plain(331))
    with served(folder) as server:
        write(folder / "2", plain(337))
        write_refused(folder / "3", 347)
        gc.collect()
        assert (held(331), held(337), held(347)) == (1, 0, 0)
        gc.disable()  # memory does not wait for the collector
        try:
            assert "has no such dtype" in call(server.url, "/v2/repository/models/a/load", b"")[1]["error"]
            assert (held(331), held(337), held(347)) == (0, 1, 0)
        finally:
            gc.enable()
        assert rows_of(server.url, "a") == ("2", [337.0, 337.0])


def test_what_a_model_learns_does_not_change_another_of_the_same_names_and_shapes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        learner(tmp_path / name / "1")

    def total(url: str, name: str) -> float:
        value: float = infer(url, f"{name}.total", b'{"inputs":[]}')[1]["outputs"][0]["data"][0]
        return value

    with served(tmp_path, ServingSettings(learn=True), save_every_s=3600) as server:
        for name, number in (("a", 2), ("b", 30), ("a", 5)):
            assert infer(server.url, f"{name}.add", json_request(x=np.float32(number)))[0] == 200
        assert [total(server.url, name) for name in "ab"] == [7.0, 30.0]
    # Each was saved under the names of its export.
    saved = [dflow.load(tmp_path / name / "2") for name in "ab"]
    assert [(list(one.variables), float(one.total())) for one in saved] == [(["total"], 7.0), (["total"], 30.0)]
