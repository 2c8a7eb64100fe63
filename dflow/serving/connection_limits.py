"""Limits of a server's connections, of HTTP and of gRPC."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of a server's connections; gRPC itself holds those of its connections.

    request_s    longest TLS handshake; longest time from a connection of HTTP, or the first byte of a later request, to
                 the end of its head, and from an answer to the end of its request's body
    idle_s       longest time from an answer to the next request: longer than that of usual proxies, which else send
                 requests over connections that end
    body_s       longest time of a body of HTTP before its answer
    answer_s     longest time without a byte of an answer read by a client of HTTP; with gRPC, longest time until a
                 client that is idle answers a ping
    head_bytes   most bytes of a request besides its body or message
    waiting      most connections of HTTP that have not sent the head of a first request
    connections  most others
    streams      most requests in progress of one connection of gRPC; its client holds further ones back
    """

    request_s: float = 10.0
    idle_s: float = 75.0
    body_s: float = 60.0
    answer_s: float = 30.0
    head_bytes: int = 32 << 10
    waiting: int = 1024
    connections: int = 16384
    streams: int = 1024
