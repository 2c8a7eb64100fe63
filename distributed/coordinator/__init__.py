"""The coordinator: membership, placement of variables, claims of steps, decisions and barriers."""
