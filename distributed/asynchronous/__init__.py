"""Asynchronous training: each worker applies its own steps, within a bound of staleness."""
