"""Records that are read by their number: ArrayRecord, grain, TFDS, `keras.utils.PyDataset`."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from dp_keras_opt.data.sources.stacking import stacked


class Records:
    """Random access to single records, as a source.

    Reads several at once where the records have `__getitems__`, as those of ArrayRecord, TFDS and
    PyTorch's data sets may have, and else one by one.

    Args:
        records: has a length, and gives a record, an example, for an integer.

    Attributes:
        records: the same.
    """

    def __init__(self, records: Any) -> None:
        self.records = records
        module = type(records).__module__.partition(".")[0]
        # One reader for all threads is what these two promise; of other classes nothing is known.
        self.is_thread_safe = module in ("array_record", "grain")
        self.is_one_by_one = not hasattr(records, "__getitems__")

    def __len__(self) -> int:
        if isinstance(self.records, keras.utils.PyDataset):
            return self.records.num_batches
        return len(self.records)

    def __getitem__(self, indices: np.ndarray) -> Any:
        places = indices.tolist()
        if self.is_one_by_one:
            return stacked([self.records[place] for place in places])
        return stacked(self.records.__getitems__(places))
