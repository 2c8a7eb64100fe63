"""Imported at the start of each Python process of a test: collect garbage seldom, and not at exit.

A process that imports JAX spends a third of its processor time on these collections.
"""

import atexit
import gc

gc.set_threshold(50_000, 20, 20)
atexit.register(gc.freeze)
