"""A server of the S3 protocol on this machine, for tests: moto, in a separate process."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.distributed.processes import Spawned

BUCKET = "bucket"

_SERVER = """
import logging
from threading import Event
from moto.server import ThreadedMotoServer
logging.disable()  # no test reads the output, a pipe that would be full
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print("serves at", *server.get_host_and_port(), flush=True)
Event().wait()
"""


class S3Server:
    """A running server at `endpoint`, with the bucket `BUCKET`."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.environment = {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "tests",
            "AWS_SECRET_ACCESS_KEY": "tests",
            # As for Amazon's own stores.
            "TENSORSTORE_S3_USE_CONDITIONAL_WRITE": "1",
            # Without these the client looks at files of the user, and for a service of the machine.
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        self.request("PUT", "")

    def request(self, method: str, key: str, body: bytes | None = None) -> bytes:
        """Send a request for an object of the bucket, or for the bucket if `key` is empty; return the answer."""
        request = urllib.request.Request(f"{self.endpoint}/{BUCKET}/{key}".rstrip("/"), body, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            content: bytes = answer.read()
            return content


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """Yield a new server, which ends with the block."""
    pytest.importorskip("moto", reason="moto is among the development dependencies")
    with Spawned("-c", _SERVER, cwd=folder) as process:
        (line,) = process.read_until("serves at")
        host, port = line.split()[-2:]
        yield S3Server(f"http://{host}:{port}")
