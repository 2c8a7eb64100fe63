"""Benchmarks, one question per file; each prints a table, and with `--json` writes it to `benchmarks/results/`."""
