"""Transports of messages between tasks: `sockets` between processes, `memory` within one; both implement `base`.

Not gRPC, ZeroMQ or the like: docs/decisions/own-transport.md has the figures.

What holds what in a connection over sockets; whatever lies to the left is called through functions:

    SocketTransport -> SocketListener, Dialler -> Peer -> Connection -> SendQueue, FrameReader, Session, Reactor
                                                                     -> Stream, plain or TLS
"""
