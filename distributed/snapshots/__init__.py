"""Snapshots of the state of all tasks, and the return of all tasks to the newest one."""
