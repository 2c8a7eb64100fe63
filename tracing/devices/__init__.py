"""Names of tasks and devices, and the scope that places ops on them."""
