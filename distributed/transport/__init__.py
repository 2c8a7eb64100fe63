"""Transports of messages between tasks: `sockets` between processes, `memory` within one; both implement `base`."""
