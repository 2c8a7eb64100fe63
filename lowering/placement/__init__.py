"""Choosing devices: costs of nodes and links, a simulation of a step, and the search for the shortest one.

All files have pure functions, except `measure`, which runs programs on the devices.
"""
