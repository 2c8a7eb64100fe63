import os
import resource
import socket
import time
from importlib import metadata
from pathlib import Path

import pytest

from dflow.__main__ import main
from dflow.cli.local import doctor_checks
from dflow.cli.local.doctor import show
from dflow.cli.local.doctor_checks import Diagnosis, clock, devices, extras, fits, limits, network, versions


@pytest.mark.once
def test_on_a_machine_where_all_is_well_the_status_is_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "dflow doctor: nothing is wrong"
    for text in ("Python 3.", "jax ", "cores: ", "loopback: connects", "clock: ", "devices: cpu:0 "):
        assert any(line.startswith("ok") and text in line for line in lines), text


def test_what_is_wrong_has_its_remedy_and_the_status_is_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert show([Diagnosis("ok", "fine"), Diagnosis("note", "odd", "try"), Diagnosis("wrong", "bad", "mend")]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "ok     fine",
        "note   odd",
        "       -> try",
        "wrong  bad",
        "       -> mend",
        "dflow doctor: 1 wrong, with the remedies above",
    ]


@pytest.mark.parametrize(
    ("version", "specifiers", "expected"),
    [
        ("0.10.2", ">=0.10.2,<0.13", True),
        ("0.12.0.dev20260101", "<0.13,>=0.10.2", True),
        ("0.13.0", ">=0.10.2,<0.13", False),
        ("0.9.9", ">=0.10.2,<0.13", False),
        ("24.3.25", ">=24", True),
        ("1.0", "", True),
    ],
)
def test_versions_are_compared_by_their_numbers(version: str, specifiers: str, expected: bool) -> None:
    assert fits(version, specifiers) is expected


def test_a_package_that_does_not_fit_is_wrong_with_the_command_that_mends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    required = ["jax<0.13,>=0.10.2", "absent>=2", 'prometheus-absent>=0.20; extra == "metrics"', 'x; extra == "dev"']
    monkeypatch.setattr(metadata, "requires", lambda name: required)
    actual = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.13.1" if name == "jax" else actual(name))
    wrong = [each for each in versions() if each.level != "ok"]
    assert wrong == [
        Diagnosis("wrong", "jax 0.13.1: expected <0.13,>=0.10.2", "pip install 'jax<0.13,>=0.10.2'"),
        Diagnosis("wrong", "absent is not installed", "pip install 'absent>=2'"),
    ]
    assert list(extras()) == [
        Diagnosis("note", "extra metrics: without prometheus-absent", "pip install 'dflow[metrics]'")
    ]


def test_devices_that_do_not_answer_in_time_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "_DEVICES", "import threading; threading.Event().wait()")
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    [found] = devices(0.1)
    assert (found.level, found.text) == (
        "wrong",
        "devices: JAX did not list them within 0.1 s (JAX_PLATFORMS=cuda)",
    )
    assert "JAX_PLATFORMS=cpu" in found.remedy


def test_an_error_of_jax_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "_DEVICES", "raise RuntimeError('jaxlib 0.9 is too old')")
    [found] = devices(60)
    assert found.level == "wrong"
    assert found.text.endswith("RuntimeError: jaxlib 0.9 is too old")
    monkeypatch.setattr(doctor_checks, "_DEVICES", "assert False")
    [found] = devices(60)
    assert found.text.endswith("there is no device of this platform, or no plugin of JAX for it")
    assert "pip install 'jax[cuda12]'" in found.remedy


def test_too_few_files_too_little_memory_and_no_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, flags: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 256))
    monkeypatch.setattr(doctor_checks, "_available_memory", lambda: 5_000_000)
    monkeypatch.setattr(os, "memfd_create", refuse)
    found = [each for each in limits() if each.level != "ok"]
    assert [(each.level, each.text) for each in found] == [
        ("wrong", "memory: 5.0 MB available: expected at least 1.0 GB"),
        ("wrong", "open files: at most 256, raised up to 256 when needed: expected at least 1024"),
        ("note", "shared memory between processes: Operation not permitted"),
    ]
    assert all(each.remedy for each in found)


@pytest.mark.parametrize("lists_cache", [True, False])
def test_the_page_cache_of_a_container_is_memory_that_is_available(
    lists_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {
        "/proc/meminfo": "MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\n",
        "/sys/fs/cgroup/memory.max": "4294967296\n",
        "/sys/fs/cgroup/memory.current": "4200000000\n",
        "/sys/fs/cgroup/memory.stat": "anon 100\nfile 4000000000\ninactive_file 3900000000\nactive_file 7\n",
    }
    if not lists_cache:
        del texts["/sys/fs/cgroup/memory.stat"]
    with_files(texts, monkeypatch)
    [memory] = [each for each in limits() if each.text.startswith("memory")]
    assert memory.level == ("ok" if lists_cache else "wrong")
    assert memory.text.startswith(f"memory: {'4.0 GB' if lists_cache else '95.0 MB'} available")


def test_a_kernel_that_does_not_tell_the_available_memory_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    for texts in ({"/proc/meminfo": "MemTotal: 8 kB\n"}, dict[str, str]()):
        with_files(texts, monkeypatch)
        [memory] = [each for each in limits() if "memory: " in each.text]
        assert (memory.level, memory.text) == ("note", "memory: /proc/meminfo does not tell how much is available")
        assert memory.remedy


def with_files(texts: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the text files that are read by these."""

    def read_text(path: Path) -> str:
        if str(path) not in texts:
            raise FileNotFoundError(2, "No such file", str(path))
        return texts[str(path)]

    monkeypatch.setattr(Path, "read_text", read_text)


def test_no_loopback_is_wrong_and_a_name_without_address_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise OSError("Network is unreachable")

    def unknown(name: str) -> str:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "create_server", refuse)
    monkeypatch.setattr(socket, "gethostbyname", unknown)
    found = list(network())
    assert [each.level for each in found] == ["wrong", "note"]
    assert "Network is unreachable" in found[0].text
    assert "Name or service not known" in found[1].text


def test_a_clock_before_the_installation_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    [now] = clock()
    assert now.level == "ok"
    monkeypatch.setattr(time, "time", lambda: 0.0)
    [found] = clock()
    assert found.level == "wrong"
    assert "1970-01-01" in found.text
