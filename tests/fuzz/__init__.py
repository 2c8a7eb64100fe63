"""Malformed and hostile bytes against a live task; see `__main__`."""
