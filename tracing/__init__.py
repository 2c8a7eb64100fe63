"""Function to stateful graph: knows JAX tracing, and nothing of executables, devices or hosts."""
