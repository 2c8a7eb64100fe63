"""Synchronous training: rounds of gradients, which a task adds up and applies once."""
