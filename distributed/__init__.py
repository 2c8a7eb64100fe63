"""Many hosts: tasks, coordinator, transfers, sharding, strategies and recovery."""
