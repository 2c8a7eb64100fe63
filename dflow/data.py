"""Input pipelines: feed any Python iterable to a queue, make batches of arrays or of any iterable, and measure data.

`feed` runs an iterable in its own threads and enqueues the elements for traced code and other threads. `batches`
returns an iterable of NumPy batches, for `feed` or for a plain loop, and `bucket_by_sequence_length` one of padded
sequences. `read` gives them the rows of files, which need not fit into memory. `numpy_batches` makes NumPy batches of
another library's. `statistics` measures columns, for `Normalization` and `StringLookup`.
"""

from dflow.input.batching import Batches, batches
from dflow.input.bucketing import BucketedBatches, bucket_by_sequence_length
from dflow.input.feeding import Feed, feed
from dflow.input.file_blocks import BadRecord
from dflow.input.numpy_batches import NumpyBatches, numpy_batches
from dflow.input.reading import FileRows, read
from dflow.input.serving_batches import serve, served
from dflow.statistics.column_statistics import ColumnStatistics
from dflow.statistics.data_statistics import Statistics, statistics
from dflow.statistics.preprocessing import Normalization, StringLookup

__all__ = [
    "BadRecord",
    "Batches",
    "BucketedBatches",
    "ColumnStatistics",
    "Feed",
    "FileRows",
    "Normalization",
    "NumpyBatches",
    "Statistics",
    "StringLookup",
    "batches",
    "bucket_by_sequence_length",
    "feed",
    "numpy_batches",
    "read",
    "serve",
    "served",
    "statistics",
]
