"""A planned step, and the threads that run it."""
