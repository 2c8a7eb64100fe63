"""Variables, queues and accumulators as the user holds them."""
