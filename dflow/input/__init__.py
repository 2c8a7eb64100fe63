"""Batches of data, and queues that they are fed into."""
