"""Rows of tables at tasks, for the functions that a server of models calls."""
