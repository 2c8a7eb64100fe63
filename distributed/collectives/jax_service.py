"""Run as a process: JAX's coordination service for a group of processes.

Why not in a member: when the process of the service dies, JAX aborts all the others with its own message, before they
learn which member has died. It imports nothing but JAX's compiler library, which takes 0.2 s.

Arguments: the host to listen at, the number of members, and the timeout of JAX's own heartbeats in s. It prints its
address. It ends when a byte comes on its standard input. When that is closed, its parent has died: the other members
then have some time to end by themselves.
"""

from __future__ import annotations

import signal
import socket
import sys
import time

from jaxlib import _jax

#: Time between the death of the parent and the end of the service, in s.
LINGER_S = 15.0


def main() -> None:
    """Print the service's address, and serve until the parent sends a byte, or until `LINGER_S` after its death."""
    host, members, timeout_s = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    # An interrupt from the terminal comes to all processes there: the members decide what happens.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Bound but not listening, it keeps the port from other processes, and gRPC may bind it too.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as port:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        port.bind((host, 0))
        address = f"[{host}]:{port.getsockname()[1]}" if ":" in host else f"{host}:{port.getsockname()[1]}"
        service = _jax.get_distributed_runtime_service(
            address, members, heartbeat_timeout=timeout_s, shutdown_timeout=timeout_s
        )
    print(address, flush=True)
    if not sys.stdin.buffer.read(1):
        time.sleep(LINGER_S)
    service.shutdown()


if __name__ == "__main__":
    main()
