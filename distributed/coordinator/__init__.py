"""The coordinator: membership, places of variables, claims of steps, decisions and barriers."""
