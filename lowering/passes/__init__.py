"""The passes, one per file. A pass is a callable that maps a graph to a graph."""
