"""The step of `benchmarks.many_variables` by JAX and sockets: a worker, and 2 processes that share the variables.

In a step the worker sends each of the two processes its gradients in one message, and receives the new values in one.
"""

from __future__ import annotations

import functools
import multiprocessing
import socket
import sys
import time
from typing import Any

import jax
import numpy as np
import optax

from benchmarks._models import LEARNING_RATE, Model, dense
from benchmarks._raw_sockets import receive
from benchmarks._rounds import train

PS = 2


def main() -> None:
    began = time.perf_counter()
    layers = int(sys.argv[1])
    model = dense(layers)
    context = multiprocessing.get_context("spawn")
    messages = []
    for index in range(PS):
        here, there = socket.socketpair()
        context.Process(target=serve, args=(there, layers, index), daemon=True).start()
        there.close()
        messages.append(Messages(here, part(model, index)))
    values_and_gradients = jax.jit(jax.value_and_grad(model.loss))
    parameters = dict(model.initial)

    def step() -> float:
        loss, gradients = values_and_gradients(parameters, *model.batch)
        for message in messages:
            message.send(gradients)
        for message in messages:
            parameters.update(message.receive())
        return float(loss)

    train(step, began)


def part(model: Model, index: int) -> dict[str, np.ndarray]:
    """Return every `PS`-th parameter."""
    return dict(list(model.initial.items())[index::PS])


def serve(sock: socket.socket, layers: int, index: int) -> None:
    """Hold a part of the parameters and their slots, and update them by each message of gradients."""
    parameters: Any = jax.tree.map(jax.numpy.array, part(dense(layers), index))
    adam = optax.adam(LEARNING_RATE)
    slots = adam.init(parameters)
    messages = Messages(sock, parameters)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(parameters: Any, slots: Any, gradients: Any) -> Any:
        updates, slots = adam.update(gradients, slots, parameters)
        return optax.apply_updates(parameters, updates), slots

    while gradients := messages.receive():
        parameters, slots = update(parameters, slots, gradients)
        messages.send(parameters)


class Messages:
    """Messages of arrays with these names, shapes and dtypes. Received arrays are valid until the next message."""

    def __init__(self, sock: socket.socket, like: dict[str, Any]) -> None:
        self._sock = sock
        self._buffer = np.empty(sum(array.nbytes for array in like.values()), np.uint8)
        ends = np.cumsum([array.nbytes for array in like.values()])
        parts = np.split(self._buffer, ends[:-1])
        self._arrays = {
            name: view.view(array.dtype).reshape(array.shape)
            for (name, array), view in zip(like.items(), parts, strict=True)
        }

    def send(self, arrays: Any) -> None:
        """Send the arrays' own memory, once they are computed."""
        if self._sock.sendmsg([np.asarray(arrays[name]) for name in self._arrays]) != len(self._buffer):
            raise OSError("a message was sent in part")

    def receive(self) -> dict[str, np.ndarray]:
        """Return views of the receive buffer, or nothing once the peer has ended."""
        return self._arrays if receive(self._sock, memoryview(self._buffer)) else {}


if __name__ == "__main__":
    main()
