"""Models of clusters too large to test for real: step times, and the coordinator's load."""
