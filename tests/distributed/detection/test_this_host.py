import http.server
import socket
import threading
from collections.abc import Iterator

import pytest

from dflow.distributed.detection.this_host import listening_address, own_host, read_metadata
from dflow.distributed.transport.addresses import LOCAL_ADDRESS
from dflow.tracing.errors import DeadlineExceeded


class _Answers(http.server.BaseHTTPRequestHandler):
    """Serves attributes to requests with Google's header; `busy` fails once, and `broken` always."""

    failures = 0

    def do_GET(self) -> None:
        if self.headers["Metadata-Flavor"] != "Google":
            self.send_error(403)
        elif self.path == "/computeMetadata/v1/instance/attributes/busy" and _Answers.failures < 1:
            _Answers.failures += 1
            self.send_error(503)
        elif self.path.startswith("/computeMetadata/v1/instance/attributes/b"):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"3")
        elif self.path.endswith("/broken"):
            self.send_error(500)
        else:
            self.send_error(404)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{served.server_port}"
        served.shutdown()


def test_attributes_are_read_past_a_failure_and_past_a_proxy(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    environment = {"GCE_METADATA_HOST": server}
    assert read_metadata(environment, "busy") == "3"
    assert read_metadata(environment, "nothing") is None


def test_a_server_that_does_not_answer_is_waited_for_no_longer_than_said() -> None:
    with pytest.raises(DeadlineExceeded, match=r"the metadata server did not give 'key' within 0\.1 s: "):
        read_metadata({"GCE_METADATA_IP": "127.0.0.1:1"}, "key", timeout_s=0.1)


@pytest.mark.parametrize(
    "coordinator", ["127.0.0.1:7", "localhost:7", "[::1]:7", "unix:/run/c", "127.0.0.1:7;unix:/run/c@host"]
)
def test_a_coordinator_on_this_machine_alone_is_reached_by_loopback(coordinator: str) -> None:
    assert own_host(coordinator) == "127.0.0.1"


def test_a_name_that_nobody_knows_yet_or_that_is_ones_own_gives_the_address_of_the_default_route() -> None:
    elsewhere = own_host("192.0.2.77:7")
    assert own_host("no.such.host.invalid:7") == elsewhere
    own = own_host(f"{socket.gethostname()}:7")
    assert own.startswith("127.") == elsewhere.startswith("127."), "others cannot use what its name stands for here"


@pytest.mark.parametrize(
    ("said", "coordinator", "address"),
    [
        ("10.0.0.9", "h:7", "10.0.0.9:0;unix:"),
        ("10.0.0.9:5", "h:7", "10.0.0.9:5;unix:"),
        ("fd00::2", "h:7", "[fd00::2]:0;unix:"),
        ("[fd00::2]:5", "h:7", "[fd00::2]:5;unix:"),
        ("unix:/run/x", "h:7", "unix:/run/x"),
        ("127.0.0.3", "127.0.0.1:7", "127.0.0.3:0;unix:"),
        ("", "127.0.0.1:7", LOCAL_ADDRESS),
        ("", "127.0.0.1:7;unix:/run/x@host", LOCAL_ADDRESS),
    ],
)
def test_a_task_listens_where_it_is_told_or_where_the_coordinator_is_reached_from(
    said: str, coordinator: str, address: str
) -> None:
    assert listening_address(said, coordinator) == address
