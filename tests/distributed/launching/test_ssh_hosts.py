"""The file of hosts of `dflow launch --on ssh`, and the host of each task."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflow.distributed.launching.ssh_hosts import HostPart, SshHost, placed, read_hosts
from dflow.tracing.errors import ConfigError


def hosts_of(folder: Path, text: str) -> tuple[SshHost, ...]:
    (folder / "hosts").write_text(text)
    return read_hosts(folder / "hosts")


def test_a_file_lists_hosts_with_their_settings(tmp_path: Path) -> None:
    text = "# ours\nnode1 slots=2\n\nme@10.0.0.2 port=2222   # spare\n::1 user=you slots=0\n"
    assert hosts_of(tmp_path, text) == (
        SshHost("node1", 2),
        SshHost("10.0.0.2", 1, "me", 2222),
        SshHost("::1", 0, "you"),
    )


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "expected at least one host, got none"),
        ("a\na slots=2", "hosts:2: a is there already"),
        ("a slots=many", "hosts:1: expected slots=N, user=NAME or port=N, got 'slots=many'"),
        ("a max_slots=2", "got 'max_slots=2'"),
        ("a 2", "got '2'"),
        ("-oProxyCommand=x", "hosts:1: expected the name of a host, got '-oProxyCommand=x'"),
        ("a;b", "expected the name of a host, got 'a;b'"),
        ("-x@a", "got 'user=-x'"),
    ],
)
def test_a_malformed_line_is_an_error_that_names_it(tmp_path: Path, text: str, error: str) -> None:
    with pytest.raises(ConfigError) as raised:
        hosts_of(tmp_path, text)
    assert error in str(raised.value)


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hosts cannot be read: No such file"):
        read_hosts(tmp_path / "hosts")


def test_scripts_fill_the_slots_and_servers_go_round(tmp_path: Path) -> None:
    a, b = hosts = hosts_of(tmp_path, "a slots=2\nb slots=2")
    assert placed(hosts, ["ps0", "ps1", "ps2"], ["w0", "w1", "w2"]) == {
        "w0": HostPart(a, 0, 2),
        "w1": HostPart(a, 1, 2),
        "w2": HostPart(b, 0, 1),
        "ps0": HostPart(a),
        "ps1": HostPart(b),
        "ps2": HostPart(a),
    }


def test_servers_go_to_hosts_without_slots(tmp_path: Path) -> None:
    a, b = hosts = hosts_of(tmp_path, "a\nb slots=0")
    assert placed(hosts, ["ps0", "ps1"], ["w0"]) == {"w0": HostPart(a, 0, 1), "ps0": HostPart(b), "ps1": HostPart(b)}


def test_too_few_slots_are_an_error_with_both_numbers(tmp_path: Path) -> None:
    hosts = hosts_of(tmp_path, "a slots=2\nb")
    with pytest.raises(ConfigError, match="expected slots for 4 tasks that run the script, got 3 on 2 hosts"):
        placed(hosts, [], ["w0", "w1", "w2", "w3"])
