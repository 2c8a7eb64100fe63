"""Arrays whose pages lie in files, and in memory as far as a limit allows."""
