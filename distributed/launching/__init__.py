"""Starting the tasks of a cluster, watching them, and starting again those that fail."""
