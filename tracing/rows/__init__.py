"""Lookups of rows, and gradients that have rows."""
