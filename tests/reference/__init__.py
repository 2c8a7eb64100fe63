"""The reference interpreter, which defines what each op means."""
