"""The runtime on a simulated clock and network: every schedule can be repeated from its seed."""
