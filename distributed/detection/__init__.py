"""Which cluster a process belongs to, as its environment says: one pure function for each kind of environment."""
