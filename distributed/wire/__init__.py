"""Messages and arrays as bytes: what crosses the border between processes."""
