"""The JAX primitives that stand for ops on state in a jaxpr."""
