"""Test files written for JAX, run with `jax.jit` as it is and with `dflow.jit` in its place, and compared.

`__main__.py` is the command, `process.py` starts and watches the processes, `child.py` is what runs in them,
`compare.py` says what differs. docs/jax_suite.md tells how to use it.
"""
