"""The start of JAX's runtime: the addresses that it connects to and listens at."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import closing
from types import SimpleNamespace

import jax
import pytest

from dflow.distributed.collectives import collectives, jax_runtime
from dflow.distributed.collectives.collectives import Collectives
from dflow.distributed.transport.loopback import LOOPBACK, loopback
from dflow.testing import memory_cluster
from dflow.tracing.errors import StrategyError


@pytest.mark.parametrize(
    ("given", "within"),
    [
        ({}, None),
        ({"http_proxy": "http://proxy:1"}, "10.0.0.1"),
        ({"https_proxy": "http://proxy:1", "no_proxy": "a.example,b"}, "a.example,b,10.0.0.1"),
        ({"grpc_proxy": "http://proxy:1", "no_grpc_proxy": "c", "no_proxy": "b"}, "c,10.0.0.1"),
    ],
)
def test_grpc_reaches_the_service_without_a_proxy(
    given: Mapping[str, str], within: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if "_proxy" in name.lower()]:
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    with jax_runtime._without_proxy("10.0.0.1:7711"):
        assert os.environ.get(jax_runtime._NO_PROXY) == within
        assert jax.config.read("jax_check_proxy_envs") == (within is None)
    assert dict(os.environ) == before
    assert jax.config.read("jax_check_proxy_envs")


def test_a_service_that_cannot_be_reached_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = "{}:{}".format(*server.getsockname())
        jax_runtime._check_reached(place, 5.0)
    with pytest.raises(StrategyError, match=rf"expected a connection to {place}, got: .*refused(.|\n)*address="):
        jax_runtime._check_reached(place, 5.0)


def test_collectives_listen_at_an_address_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert jax_runtime._host_here("127.0.0.1") == "127.0.0.1"
    monkeypatch.setattr(socket, "gethostname", lambda: LOOPBACK)
    assert jax_runtime._host_here("192.0.2.1") == LOOPBACK  # a translated address
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    fact = r"expected an address of this host, got '192.0.2.1' and 'no-such-host.invalid', which are none"
    with pytest.raises(StrategyError, match=fact):
        jax_runtime._host_here("192.0.2.1")


def test_each_address_of_a_name_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0] for address in ("192.0.2.1", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, *args, **options: found)
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    assert jax_runtime._host_here("here") == "127.0.0.1"


def test_loopback_is_of_the_sixth_version_where_there_is_no_other() -> None:
    assert loopback(v4="127.0.0.1", v6="192.0.2.1") == "127.0.0.1"
    assert loopback(v4="192.0.2.1", v6="::1") == ("::1" if socket.has_ipv6 else "192.0.2.1")


def test_a_process_whose_runtime_does_not_start_does_not_wait_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        closed = False

        def __init__(self, *_: object) -> None: ...

        def abandon(self) -> None: ...

        def close(self) -> None:
            Group.closed = True

    def unreached(*_: object) -> None:
        raise StrategyError("no connection")

    for name, stub in {"ProcessGroup": Group, "start_runtime": unreached, "refuse_late_start": lambda: None}.items():
        monkeypatch.setattr(collectives, name, stub)
    with memory_cluster() as memory, closing(memory.worker()) as worker:
        monkeypatch.setattr(worker.coordinator, "ask", lambda *_: None)
        monkeypatch.setattr(collectives, "parse_endpoints", lambda _: SimpleNamespace(main=None))
        started = Collectives(worker)
        with pytest.raises(StrategyError, match="no connection"):
            started.start()
        started.close()
    assert not Group.closed
