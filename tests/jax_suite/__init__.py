"""Run test files written for JAX with `jax.jit` and with `dflow.jit` instead, and compare.

`__main__.py` is the command, `process.py` starts and watches the processes, `child.py` runs in them, `compare.py` finds
the differences. docs/jax_suite.md describes the use.
"""
