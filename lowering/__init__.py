"""Graph to passes, plan and executables on one host: knows XLA, and nothing of the network."""
