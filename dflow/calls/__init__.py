"""From a call of a `dflow.jit` function to the program that runs."""
