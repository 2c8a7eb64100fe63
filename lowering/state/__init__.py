"""The table of variables, queues and accumulators of one process."""
