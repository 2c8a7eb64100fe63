"""Starting the tasks of a cluster, watching them, and restarting failed ones."""
