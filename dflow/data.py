"""Input pipelines: feed any Python iterable to a queue, and make batches of arrays or of any iterable.

`feed` runs an iterable in its own threads and enqueues the elements for traced code and other threads. `batches`
returns an iterable of NumPy batches, for `feed` or for a plain loop. `numpy_batches` makes them of another library's.
"""

from dflow.input.batching import Batches, batches
from dflow.input.feeding import Feed, feed
from dflow.input.numpy_batches import NumpyBatches, numpy_batches

__all__ = ["Batches", "Feed", "NumpyBatches", "batches", "feed", "numpy_batches"]
