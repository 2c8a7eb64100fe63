"""A server as one writes it by hand: the program of an export, called by `jax.export` in a starlette app.

It takes and returns raw numbers, without metadata, checks, limits or a protocol:
`python -m benchmarks._serving_bare DIR`.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path

import jax
import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import dflow

PATH = "/v2/models/model/infer"


def main() -> None:
    """Serve until SIGTERM; the first line is the address."""
    folder = Path(sys.argv[1])
    program = jax.export.deserialize(bytearray((folder / "programs" / "classify").read_bytes()))
    held = {name: variable.read() for name, variable in dflow.load(folder).variables.items()}
    call = jax.jit(lambda x: program.call(held, {}, x)[0])

    async def classify(request: Request) -> Response:
        x = np.frombuffer(await request.body(), np.float32).reshape(-1, 784)
        return Response((await asyncio.to_thread(lambda: np.asarray(call(x)))).tobytes())

    async def ready(request: Request) -> Response:
        return Response(b"")

    routes = [Route(PATH, classify, methods=["POST"]), Route("/v2/health/ready", ready)]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(f"http://127.0.0.1:{listener.getsockname()[1]}/", flush=True)
        config = uvicorn.Config(Starlette(routes=routes), access_log=False, log_level="warning")
        uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
