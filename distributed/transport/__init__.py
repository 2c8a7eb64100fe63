"""Transports of messages between tasks: `sockets` between processes, `memory` within one; both implement `base`.

What holds what in a connection over sockets; whatever lies to the left is called through functions:

    SocketTransport -> SocketListener, Dialler -> Peer -> Connection -> SendQueue, FrameReader, Session, Reactor
                                                                     -> Stream, plain or TLS
"""
