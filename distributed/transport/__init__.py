"""Ways to move messages between tasks: `sockets` between processes, `memory` within one; both obey `base`."""
