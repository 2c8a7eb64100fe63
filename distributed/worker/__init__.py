"""A worker's view of the cluster: variables on other tasks, and steps that run over them."""
