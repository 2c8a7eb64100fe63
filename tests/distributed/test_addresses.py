"""What an address says."""

from __future__ import annotations

import pytest

from dflow.distributed.transport.addresses import MAX_UNIX_PATH_BYTES, TcpAddress, UnixAddress, parse_address


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
