"""Identities of processes: whether the process of an identity has ended."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from dflow.distributed.transport.process_identity import has_ended, host_identity, process_identity

CODE = "from dflow.distributed.transport.process_identity import process_identity as i; print(i(), flush=True); input()"


def test_a_living_process_has_not_ended() -> None:
    assert not has_ended(process_identity())


def test_a_process_has_ended_before_its_parent_asks_for_its_status_and_afterwards() -> None:
    command = [sys.executable, "-c", CODE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        identity = child.stdout.readline().strip()
        assert not has_ended(identity)
        child.kill()
        child.stdout.read()  # ends with the child's last thread
        while not has_ended(identity):  # the test's time-out ends this
            assert child.returncode is None
    assert has_ended(identity)


def test_a_later_process_of_the_same_number_is_another() -> None:
    boot, namespace, pid, started = process_identity().split("/")
    assert has_ended(f"{boot}/{namespace}/{pid}/{int(started) + 1}")


@pytest.mark.parametrize("identity", ["", "x", "another boot/1/1/1", "a/b/c/d/e", "///"])
def test_a_process_that_is_not_visible_here_counts_as_alive(identity: str) -> None:
    assert not has_ended(identity)


def test_equal_user_numbers_of_two_user_namespaces_are_two_users() -> None:
    code = "from dflow.distributed.transport.process_identity import host_identity as i; print(i())"
    number = f"--map-user={os.geteuid()}"
    ran = subprocess.run(
        ["unshare", "--user", number, sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    if ran.returncode:
        pytest.skip(f"no user namespace: {ran.stderr.strip()}")
    inner, own = ran.stdout.strip().split("/"), host_identity().split("/")
    assert (inner[0], inner[-1]) == (own[0], own[-1])
    assert inner != own
