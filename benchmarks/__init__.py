"""One file a question; each prints a table, and with `--json` writes its figures to `benchmarks/results/`."""
