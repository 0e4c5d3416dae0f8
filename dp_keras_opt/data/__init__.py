"""Batches whose sampling is known, so that the accountant is told the truth about it.

A privacy guarantee depends on how examples get into batches. `poisson_batches` samples them the
way the accountant assumes, and says so; `assume_sampling` carries the word of a user who samples.
Both give `Batches`, which `DPModel.fit` takes.
"""

from dp_keras_opt.data.batches import (  # noqa: F401
    LOST_ROWS,
    Batches,
    RowInfo,
    are_batches,
    assume_sampling,
    check_rows,
    for_keras,
    is_endless,
    number_of_batches,
)
from dp_keras_opt.data.buckets import Blocks, Buckets
from dp_keras_opt.data.mapping import PythonFunction
from dp_keras_opt.data.public import with_public
from dp_keras_opt.data.sampled import (
    balls_in_bins,
    cyclic_poisson,
    fixed_order_epochs,
    poisson_batches,
    poisson_users,
    without_replacement_batches,
)
from dp_keras_opt.data.shards import shard  # noqa: F401
from dp_keras_opt.data.sources.folders import image_folder, text_folder
from dp_keras_opt.data.sources.protocol import Source
from dp_keras_opt.data.sources.tfrecord import TFRecords, index_tfrecord
from dp_keras_opt.data.sources.written import write
from dp_keras_opt.data.units import own_shard
from dp_keras_opt.deprecation import renamed_names

__all__ = [
    "Batches",
    "Blocks",
    "Buckets",
    "PythonFunction",
    "RowInfo",
    "Source",
    "TFRecords",
    "assume_sampling",
    "balls_in_bins",
    "cyclic_poisson",
    "fixed_order_epochs",
    "image_folder",
    "index_tfrecord",
    "own_shard",
    "poisson_batches",
    "poisson_users",
    "text_folder",
    "with_public",
    "without_replacement_batches",
    "write",
]

__getattr__ = renamed_names(__name__, {"Rows": RowInfo})
