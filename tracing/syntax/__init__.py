"""The text form of a graph: printing, parsing and verifying it."""
