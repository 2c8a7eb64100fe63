"""Choosing devices: costs of nodes and links, a simulated step, and what searches for its shortest.

Pure functions but for `measure`, which asks the devices how fast they are.
"""
