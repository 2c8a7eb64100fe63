"""Write the checkpoints of this folder, with TensorFlow: `python write.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

HERE = Path(__file__).parent


def rows(shape: tuple[int, ...], dtype: tf.DType, partition_info: Any) -> Any:
    """Return the rows of a part of the table."""
    start, _ = partition_info.var_offset
    return tf.constant(np.arange(30).reshape(10, 3)[start : start + shape[0]], dtype)


def first() -> None:
    """The names of TensorFlow 1, with a variable in parts."""
    v1 = tf.compat.v1
    with v1.Graph().as_default(), v1.Session() as session:
        v1.get_variable("table", (10, 3), initializer=rows, partitioner=v1.fixed_size_partitioner(3))
        v1.get_variable("half", initializer=tf.constant([1, 2], tf.bfloat16))
        v1.get_variable("global_step", initializer=np.int64(7))
        session.run(v1.global_variables_initializer())
        v1.train.Saver().save(session, str(HERE / "first"), write_meta_graph=False, write_state=False)


def second() -> None:
    """The names of TensorFlow 2: paths of objects."""
    net = tf.Module()
    net.kernel = tf.Variable(np.arange(6, dtype="f4").reshape(2, 3))
    tf.train.Checkpoint(net=net).save(str(HERE / "second" / "ckpt"))


if __name__ == "__main__":
    first()
    second()
