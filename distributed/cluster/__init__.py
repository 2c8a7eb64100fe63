"""A process as a task of a cluster: its server, its requests, its shared steps, and where its variables are."""
