"""The graph: types, ops, effects and nodes."""
