"""Arrays in files, written whole or not at all."""
