"""XLA programs: made from graphs, compiled, exported and read again."""
