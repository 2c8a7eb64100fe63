"""Functions and their state in a directory that other processes load."""
