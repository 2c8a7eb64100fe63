"""Who applies what, when: each strategy is a small program over a cluster's variables and steps."""
