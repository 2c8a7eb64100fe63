"""Processes that run one program together, over JAX's own multi-process runtime and XLA's collectives."""
