"""Tests: they mirror the tree, and helpers are imported as `tests.<name>`."""
