"""Queues and accumulators of this process, and ops that wait for them."""
