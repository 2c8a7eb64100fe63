"""Input pipelines: any Python iterable into a queue, and batches of arrays or of any iterable.

`feed` runs an iterable in threads of its own, into a queue that traced code and other threads take from. `batches` is
an iterable of batches, in NumPy, for it or for a plain loop.
"""

from dflow.batching import Batches, batches
from dflow.feeding import Feed, feed

__all__ = ["Batches", "Feed", "batches", "feed"]
