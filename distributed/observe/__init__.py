"""Events, traces and metrics of a running cluster."""
