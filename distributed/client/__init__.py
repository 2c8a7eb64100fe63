"""A task's session with the coordinator."""
