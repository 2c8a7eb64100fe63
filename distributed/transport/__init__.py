"""Ways to move messages between tasks: `tcp` between processes, `memory` within one; both obey `base`."""
