"""From a stateful graph to programs that run on one host. Knows XLA; knows nothing of the network."""
