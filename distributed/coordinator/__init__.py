"""The coordinator: membership, places of variables, claims of steps, elections and barriers."""
