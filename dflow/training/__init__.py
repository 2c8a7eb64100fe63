"""The optimizer, random generators, saving and restoring."""
