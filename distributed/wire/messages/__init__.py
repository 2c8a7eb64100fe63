"""The messages between tasks, the coordinator and clients, a file for each subject."""
