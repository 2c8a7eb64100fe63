"""From a Python function to a jaxpr, and from a jaxpr to a graph."""
