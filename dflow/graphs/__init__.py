"""What a user sees of a graph: text, drawings, parts and placement."""
