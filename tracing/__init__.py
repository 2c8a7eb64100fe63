"""From a Python function to a stateful graph. Knows JAX's tracing; knows nothing of XLA, devices in use, or hosts."""
