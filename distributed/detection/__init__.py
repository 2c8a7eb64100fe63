"""Detection of the cluster that a process belongs to: one pure function for each kind of environment."""
