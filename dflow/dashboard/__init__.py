"""Looking at a running cluster: what `dflow status` and `dflow trace` show, and the dashboard in the browser."""
