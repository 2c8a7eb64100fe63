"""The passes, one a file; a pass is a value that maps a graph to a graph."""
