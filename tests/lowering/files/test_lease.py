"""A lease in an object store: one owner at a time, however the answers of the store get lost."""

from __future__ import annotations

import secrets
import threading
from typing import Any

import msgspec
import pytest

from dflow.lowering.files import lease
from dflow.lowering.files.lease import Lease
from dflow.lowering.files.object_path import ObjectPath, StoredObject, no_answer
from dflow.tracing.errors import CheckpointError
from tests.distributed.waiting import until


@pytest.fixture(autouse=True)
def _no_renewals_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "RENEWAL_S", 3600.0)
    monkeypatch.setattr(lease, "LEASE_S", 0.05)


@pytest.fixture
def file() -> ObjectPath:
    return ObjectPath(f"memory://{secrets.token_hex(4)}/lock")


def test_a_lease_that_is_not_renewed_is_taken_over_and_its_owner_finds_out(file: ObjectPath) -> None:
    first = Lease.take(file, "first")
    first.renew()
    second = Lease.take(file, "second")
    first.check()  # nothing is known yet
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"got second too, which took over .* for 0\.05 s\n.*\n  end one"):
            first.renew()
    first.release()
    second.renew()
    second.release()


def test_a_lease_that_is_renewed_is_held(file: ObjectPath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "LEASE_S", 60.0)
    monkeypatch.setattr(lease, "RENEWAL_S", 0.01)
    first = Lease.take(file, "first")
    assert Lease.take(file, "second") == "first"
    first.release()
    Lease.take(file, "second").release()


def test_a_lease_that_is_released_while_another_waits_is_taken(
    file: ObjectPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "LEASE_S", 60.0)
    first, read = Lease.take(file, "first"), ObjectPath.read
    looks = 0

    def released_at_the_second_look(place: ObjectPath) -> StoredObject:
        nonlocal looks
        looks += 1
        if looks == 2:
            first.release()
        return read(place)

    monkeypatch.setattr(ObjectPath, "read", released_at_the_second_look)
    monkeypatch.setattr(lease, "_LOOKS", 6000)
    Lease.take(file, "second").release()


def test_a_renewal_whose_answer_was_lost_is_the_owners(file: ObjectPath, monkeypatch: pytest.MonkeyPatch) -> None:
    held, replace = Lease.take(file, "first"), ObjectPath.replace

    def lost(*args: Any, **options: Any) -> Any:
        replace(*args, **options)
        raise no_answer(file, TimeoutError())

    with monkeypatch.context() as patched:
        patched.setattr(ObjectPath, "replace", lost)
        with pytest.raises(CheckpointError, match="got: no answer in time"):
            held.renew()
    held.renew()
    held.check()
    held.release()


def test_a_lease_whose_object_was_deleted_is_written_again(file: ObjectPath) -> None:
    held = Lease.take(file, "first")
    file.parent.remove([file.name])
    held.renew()
    assert msgspec.json.decode(file.read().content or b"")["owner"] == "first"
    held.release()


def test_the_thread_that_renews_goes_on_after_a_failure_and_ends_with_the_lease(
    file: ObjectPath, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lease, "RENEWAL_S", 0.01)
    held, replace, failed = Lease.take(file, "first"), ObjectPath.replace, threading.Event()

    def fails_once(*args: Any, **options: Any) -> Any:
        if not failed.is_set():
            failed.set()
            raise no_answer(file, TimeoutError())
        return replace(*args, **options)

    monkeypatch.setattr(ObjectPath, "replace", fails_once)
    assert failed.wait(60)
    before = file.read().content
    until(lambda: file.read().content != before)
    file.write(msgspec.json.encode({"owner": "other", "token": "t", "renewals": 0, "lease_s": 1.0}))
    until(lambda: not held._thread.is_alive())
    with pytest.raises(CheckpointError, match="got other too"):
        held.check()
    assert "is not renewed: " in caplog.text
    assert "no answer in time" in caplog.text
    held.release()
    assert b"other" in (file.read().content or b"")


@pytest.mark.parametrize("content", [b"", b"no json", b"{}"])
def test_a_malformed_lease_is_replaced(file: ObjectPath, content: bytes) -> None:
    file.write(content)
    Lease.take(file, "first").release()


def test_a_write_that_took_place_but_found_itself_counts(file: ObjectPath) -> None:
    seen = file.read()
    written = file.replace(seen, b"content")
    assert written is not None
    assert file.replace(seen, b"content") == written  # as TensorStore does after a lost answer
    assert file.replace(seen, b"other") is None
