"""What an address says."""

from __future__ import annotations

import pytest

from dflow.distributed.transport.addresses import (
    MAX_UNIX_PATH_BYTES,
    Endpoints,
    TcpAddress,
    UnixAddress,
    parse_address,
    parse_endpoints,
)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:4321", TcpAddress("127.0.0.1", 4321)),
        ("localhost:0", TcpAddress("127.0.0.1", 0)),
        ("[::1]:80", TcpAddress("::1", 80)),
        ("ps0.example.com:80", TcpAddress("ps0.example.com", 80)),
        ("unix:/run/ps", UnixAddress("/run/ps")),
        ("unix:", UnixAddress("")),
    ],
)
def test_an_address_is_read_and_written(text: str, address: TcpAddress | UnixAddress) -> None:
    assert parse_address(text) == address
    assert parse_address(str(address)) == address


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:", "127.0.0.1:-1", "127.0.0.1:65536", "localhost:http"])
def test_an_address_that_cannot_be_read_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="is not of the form 'host:port'"):
        parse_address(address)


def test_a_path_too_long_for_a_socket_is_refused() -> None:
    with pytest.raises(ValueError, match=f"takes at most {MAX_UNIX_PATH_BYTES} bytes but .* takes 108"):
        parse_address("unix:/" + "a" * 107)


def test_a_path_starts_at_the_root() -> None:
    with pytest.raises(ValueError, match="starts with '/' but this is 'run/ps'"):
        parse_address("unix:run/ps")


@pytest.mark.parametrize(("host", "loopback"), [("127.0.0.1", True), ("::1", True), ("0.0.0.0", False), ("ps", False)])
def test_only_numbers_of_this_machine_are_loopback(host: str, loopback: bool) -> None:
    assert TcpAddress(host, 1).is_loopback is loopback


@pytest.mark.parametrize(
    ("text", "ways"),
    [
        ("127.0.0.1:80", Endpoints(TcpAddress("127.0.0.1", 80))),
        ("ps0:80;unix:", Endpoints(TcpAddress("ps0", 80), UnixAddress(""))),
        ("[::1]:80;unix:/run/ps@boot/0", Endpoints(TcpAddress("::1", 80), UnixAddress("/run/ps"), "boot/0")),
    ],
)
def test_an_address_with_two_ways_is_read_and_written(text: str, ways: Endpoints) -> None:
    assert parse_endpoints(text) == ways
    assert str(ways) == text


def test_the_second_way_is_a_unix_socket() -> None:
    with pytest.raises(ValueError, match=r"second way of address .* is not of the form 'unix:/path@identity'"):
        parse_endpoints("127.0.0.1:80;127.0.0.1:81")
