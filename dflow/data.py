"""Input pipelines: feed any Python iterable to a queue, and make batches of arrays or of any iterable.

`feed` runs an iterable in its own threads and enqueues the elements for traced code and other threads. `batches`
returns an iterable of NumPy batches, for `feed` or for a plain loop. `read` gives it the rows of files, which need not
fit into memory. `numpy_batches` makes NumPy batches of another library's.
"""

from dflow.input.batching import Batches, batches
from dflow.input.feeding import Feed, feed
from dflow.input.file_blocks import BadRecord
from dflow.input.numpy_batches import NumpyBatches, numpy_batches
from dflow.input.reading import FileRows, read
from dflow.input.serving_batches import serve, served

__all__ = [
    "BadRecord",
    "Batches",
    "Feed",
    "FileRows",
    "NumpyBatches",
    "batches",
    "feed",
    "numpy_batches",
    "read",
    "serve",
    "served",
]
