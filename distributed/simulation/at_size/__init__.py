"""Clusters of sizes that nobody here owns: how long steps take, and what the coordinator bears."""
