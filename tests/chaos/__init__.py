"""Random faults over random processes of a cluster, while a program trains on it; see `__main__`."""
