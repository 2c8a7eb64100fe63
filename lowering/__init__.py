"""Lower a stateful graph to programs and run them on one host. This layer uses XLA, and never the network."""
