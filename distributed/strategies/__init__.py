"""Training strategies: programs over a cluster's variables and steps that decide when gradients are applied."""
