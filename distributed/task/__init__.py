"""A task: the process that holds variables and runs its partition of steps."""
