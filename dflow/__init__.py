"""Stateful dataflow on JAX and XLA: variables, queues and clusters behind ordinary Python functions."""

__version__ = "0.1.0"
