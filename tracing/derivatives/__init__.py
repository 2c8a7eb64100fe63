"""Derivatives of functions with state."""
