"""Snapshots of the state of all tasks, the pauses of steps for them, and the return of all tasks to one."""
