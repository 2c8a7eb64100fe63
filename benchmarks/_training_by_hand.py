"""The step of `benchmarks.many_variables` by JAX and sockets: a worker, and 2 processes that share the variables.

In a step the worker sends each of the two processes its gradients in one message, and receives the new values in one.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import socket
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax

from benchmarks._losses import LOSSES
from benchmarks._models import LEARNING_RATE, MODELS
from benchmarks._raw_sockets import receive
from benchmarks._train import train

PS = 2


def main() -> None:
    began = time.perf_counter()
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, required=True)
    for name in ("layers", "width"):
        parser.add_argument(f"--{name}", type=int, required=True)
    given = parser.parse_args()
    model = MODELS[given.model](given.layers, given.width)
    context = multiprocessing.get_context("spawn")
    servers = []
    for index in range(PS):
        here, there = socket.socketpair()
        mine = part(model.initial, index)
        context.Process(target=serve, args=(there, mine), daemon=True).start()
        there.close()
        servers.append(Messages(here, mine))
    value_and_gradients = jax.jit(jax.value_and_grad(LOSSES[given.model]))
    parameters = dict(model.initial)

    def step() -> float:
        loss, gradients = value_and_gradients(parameters, *model.batch)
        for server in servers:
            server.send(gradients)
        for server in servers:
            parameters.update(server.receive())
        return float(loss)

    train(step, began)


def part(values: Mapping[str, np.ndarray], index: int) -> dict[str, np.ndarray]:
    """Return the `index`-th of every `PS` values."""
    return dict(list(values.items())[index::PS])


def serve(sock: socket.socket, initial: Mapping[str, np.ndarray]) -> None:
    """Hold parameters and their slots, and update them by each message of gradients."""
    parameters: Any = jax.tree.map(jax.numpy.array, dict(initial))
    adam = optax.adam(LEARNING_RATE)
    slots = adam.init(parameters)
    worker = Messages(sock, initial)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(parameters: Any, slots: Any, gradients: Any) -> Any:
        updates, slots = adam.update(gradients, slots, parameters)
        return optax.apply_updates(parameters, updates), slots

    while gradients := worker.receive():
        parameters, slots = update(parameters, slots, gradients)
        worker.send(parameters)


class Messages:
    """Messages of arrays with these names, shapes and dtypes. Received arrays are valid until the next message."""

    def __init__(self, sock: socket.socket, like: Mapping[str, np.ndarray]) -> None:
        self._sock = sock
        sizes = [array.nbytes for array in like.values()]
        self._buffer = np.empty(sum(sizes), np.uint8)
        views = np.split(self._buffer, np.cumsum(sizes)[:-1])
        self._arrays = {
            name: view.view(array.dtype).reshape(array.shape)
            for (name, array), view in zip(like.items(), views, strict=True)
        }

    def send(self, arrays: Mapping[str, Any]) -> None:
        """Send the arrays' own memory, once they are computed."""
        if self._sock.sendmsg([np.asarray(arrays[name]) for name in self._arrays]) != len(self._buffer):
            raise OSError("a message was sent in part")

    def receive(self) -> dict[str, np.ndarray]:
        """Return views of the receive buffer, or nothing once the peer has ended."""
        return self._arrays if receive(self._sock, memoryview(self._buffer)) else {}


if __name__ == "__main__":
    main()
