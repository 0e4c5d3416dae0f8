"""A function of one example, applied to each of those that were read for a batch."""

from __future__ import annotations

import concurrent.futures.process
import functools
import multiprocessing
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from dp_keras_opt.checks import whole_number
from dp_keras_opt.clipping.graphs import nodes
from dp_keras_opt.data import fresh_randomness
from dp_keras_opt.data.sources import stacking
from dp_keras_opt.noise.entropy import process

_MOST_ROWS = 32  # in a turn of the loop over rows
_OPERATIONS = 512  # of TensorFlow in such a turn, about

#: Operations of which TensorFlow has a form for many rows that gives the same, bit by bit.
_EXACT = {
    "Placeholder", "Const", "Identity", "NoOp", "Reshape", "ExpandDims", "Squeeze", "Transpose",
    "StridedSlice", "Slice", "Pack", "Unpack", "ConcatV2", "Split", "SplitV", "Shape",
    "EnsureShape", "Fill", "Tile", "Pad", "PadV2", "ReverseV2", "Cast", "OneHot", "AddV2", "Sub",
    "Mul", "RealDiv", "FloorDiv", "FloorMod", "Neg", "Abs", "Square", "Maximum", "Minimum",
    "ClipByValue", "Relu", "Equal", "NotEqual", "Less", "LessEqual", "Greater", "GreaterEqual",
    "LogicalAnd", "LogicalOr", "LogicalNot", "Select", "SelectV2", "ParseSingleExample",
}  # fmt: skip


_one_writes = threading.Lock()


def writes_variables(graph) -> bool:
    """Whether this graph writes a variable, as the seeds of Keras's random layers are.

    They read their seed and write the next one in two operations: of batches that are made at the
    same time, two would be given the same random numbers.
    """
    return any(node.op.startswith("Assign") for node in nodes(graph))


def in_turn(*functions):
    """What maps columns, a list, of functions of which each takes what the one before it gives.

    Those that TensorFlow traces run as one of them, so that no column is made between them.

    Args:
        functions: that TensorFlow traces, or `PythonFunction`; None for none.
    """
    changes: list[Any] = []
    for function in functions:
        if isinstance(function, PythonFunction):
            changes.append(function._map_rows)
        elif function is not None and not callable(function):
            raise TypeError(f"map must be a function of one example; received {function!r}.")
        elif function is not None and changes and isinstance(changes[-1], Traced):
            changes[-1] = changes[-1].then(function)
        elif function is not None:
            changes.append(Traced(function))
    return changes


class PythonFunction:
    """A function of one example that TensorFlow cannot trace, as `map` of a sampler.

    For tokenizers and whatever else is Python: it is called with NumPy arrays and strings, one
    example at a time, anew whenever one is drawn, so that it cannot mix examples as long as it
    remembers none: what it has learnt of earlier examples, such as a running mean or a vocabulary,
    must not go into later ones. Learn such things from public data, before the training.

    The global random numbers of Python and NumPy are from fresh seeds while it is called, whatever
    `set_random_seed` said. A generator of its own must have a seed that nobody knows, as
    `np.random.default_rng()` has: what it draws depends on who else is in the batch.

    Args:
        function: takes what an example is (x and y where it is such a tuple), and returns the new
            one, as tuples and dicts of arrays, numbers and strings.
        processes: 0, in this process; or in how many others, at the same time. These are spawned,
            so that their random numbers are their own: `function` must be one that can be imported
            (of a module, and no lambda), and a script that is run must have its work under
            `if __name__ == "__main__":`.
    """

    def __init__(self, function: Callable[..., Any], processes: int = 0) -> None:
        if not callable(function):
            raise TypeError(f"function must be a function of one example; received {function!r}.")
        self.function = function
        self.processes = whole_number(processes, "processes", 0)
        self._pool: concurrent.futures.ProcessPoolExecutor | None = None
        self._pool_of: Any = None
        self._lock = threading.Lock()
        if self.processes:
            self._check_importable()

    def __call__(self, *example: Any) -> Any:
        """The function of one example, in this process."""
        return self.function(*example)

    def _map_rows(self, rows: Any) -> Any:
        """Columns of the new examples, from those of the old."""
        rows = tf.nest.map_structure(_writeable, rows)  # the function may change what it is given
        if not self.processes:
            return _each_row(self.function, rows)
        count = len(tf.nest.flatten(rows)[0])
        parts = np.array_split(np.arange(count), min(self.processes, count))
        shares = [stacking.rows(rows, part) for part in parts]
        pool = self._workers()
        try:
            done = [pool.submit(_each_row, self.function, share) for share in shares]
            return stacking.joined([each.result() for each in done])
        except concurrent.futures.process.BrokenProcessPool as error:
            self._leave(pool)
            raise RuntimeError(
                f"A process that {self.function!r} ran in ended, or gave what is no result: it was "
                "killed, as for want of memory, or what it called ended it. Others are started "
                "when the next batch is read: train on, with fewer processes where memory is short."
            ) from error

    def _workers(self):
        with self._lock:
            if self._pool is None or self._pool_of != process():  # a fork has none of its threads
                spawned = multiprocessing.get_context("spawn")
                self._pool = concurrent.futures.ProcessPoolExecutor(self.processes, spawned)
                self._pool_of = process()
            return self._pool

    def _leave(self, pool):
        """Has others started in the place of processes that are lost."""
        with self._lock:
            if self._pool is pool:
                self._pool = None
        pool.shutdown(wait=False, cancel_futures=True)

    def _check_importable(self):
        try:
            pickle.dumps(self.function)
        except Exception as error:
            raise TypeError(
                f"{self.function!r} cannot be sent to other processes: {error}. Define it at the "
                "top of a module, or use processes=0."
            ) from error


class Traced:
    """A function of one example that runs in TensorFlow, compiled once for each form of it."""

    def __init__(self, function):
        self._function = function
        self._compiled: dict[Any, list[Any]] = {}
        self._lock = threading.Lock()

    def then(self, function):
        """This function, and another of what it gives."""
        first = self._function

        def both(*example):
            return call(function, first(*example))

        return Traced(both)

    def __call__(self, rows):
        if isinstance(rows, dict):
            dtypes = {name: getattr(column, "dtype", None) for name, column in rows.items()}
            dates = [
                name for name, dtype in dtypes.items() if getattr(dtype, "kind", "") in ("m", "M")
            ]
            if dates:
                raise fresh_randomness.NotTraced(
                    f"The columns {dates} have dates or durations, of which TensorFlow has no "
                    "type. Make numbers of them, leave them out of the data, or give map as a "
                    "dp_keras_opt.data.PythonFunction, which reads them."
                )
        flat = [_tensor(array) for array in tf.nest.flatten(rows)]
        with tf.device("CPU:0"):
            compiled, form = self._of_form(rows, flat)
            return tf.nest.map_structure(_array, tf.nest.pack_sequence_as(form, compiled(*flat)))

    def _of_form(self, rows, flat):
        """(what maps tensors of this form, the structure of what it gives)."""
        specs = tuple(_any_number_of(tensor) for tensor in flat)
        with self._lock:
            kind = tuple((type(spec), spec.dtype, spec.shape.rank) for spec in specs)
            seen = self._compiled.setdefault(kind, [])
            for known, *found in seen:
                if all(k.is_compatible_with(s) for k, s in zip(known, specs, strict=True)):
                    return found
            if seen:  # sizes that change once will go on changing
                specs = tuple(map(_of_any_size, specs))
            seen.append((specs, *self._compile(rows, specs)))
            return seen[-1][1:]

    def _compile(self, rows, specs):
        """A function of the tensors of many examples; the structure of what it gives."""
        one = [tf.TensorSpec(spec.shape[1:], spec.dtype) for spec in specs]

        def example(*leaves):
            return _without_lists(call(self._function, tf.nest.pack_sequence_as(rows, leaves)))

        # No variable may be made whenever it is called, so that it is called once before.
        traced = fresh_randomness.traced(example, *one)
        form = tf.nest.map_structure(lambda _: 0, traced.structured_outputs)
        outputs = tf.nest.flatten(traced.structured_outputs)
        inputs = {id(tensor): place for place, tensor in enumerate(traced.inputs)}
        places = [inputs.get(id(tensor)) for tensor in traced.outputs]
        if None not in places:  # it only picks
            return (lambda *leaves: [leaves[place] for place in places]), form
        made = [row for row, place in enumerate(places) if place is None]
        signature = [_of_new(outputs[row]) for row in made]

        def changed(*leaves):
            row = tf.nest.flatten(traced(*leaves))
            return [row[place] for place in made]

        def compiled(by_rows):
            def many(*leaves):
                columns = iter(by_rows(changed, leaves, signature))
                # What is only passed on need not go through the loop, which takes time.
                return [next(columns) if place is None else leaves[place] for place in places]

            whole = tf.function(many, input_signature=specs, autograph=False)
            return whole.get_concrete_function()

        at_once = _rows_at_once(traced.graph, (*specs, *signature))
        in_turns = compiled(functools.partial(_row_by_row, at_once=at_once))
        if writes_variables(traced.graph):
            return _alone(in_turns), form
        if at_once == 1 or not {op.type for op in traced.graph.get_operations()} <= _EXACT:
            return in_turns, form
        return _Checked(compiled(_all_rows), in_turns), form


def _alone(function):
    def alone(*leaves):
        with _one_writes:
            return function(*leaves)

    return alone


class _Checked:
    """What maps all rows at once, as long as it gives what another function does row by row.

    They are compared on the first rows that are several. TensorFlow's forms for many rows do not
    serve a single one, of which they take the dimension for one to broadcast.
    """

    def __init__(self, at_once, row_by_row):
        self._at_once, self._row_by_row, self._agrees = at_once, row_by_row, None

    def __call__(self, *leaves):
        if leaves[0].shape[0] == 1 or self._agrees is False:
            return self._row_by_row(*leaves)
        found = self._at_once(*leaves)
        if self._agrees is None:
            expected = self._row_by_row(*leaves)
            self._agrees = all(map(_same, found, expected))
            return expected
        return found


def _rows_at_once(graph, specs):
    """How many rows a turn of the loop over them takes, as a turn costs more than most functions.

    One where what is random, or has a state, would be the same in all copies of the function, and
    where rows have several lengths.
    """
    operations = graph.get_operations()
    has_state = any(operation.op_def.is_stateful for operation in operations)
    if has_state or any(isinstance(spec, tf.RaggedTensorSpec) for spec in specs):
        return 1
    return max(1, min(_MOST_ROWS, _OPERATIONS // len(operations)))


def _row_by_row(function, columns, signature, at_once):
    """Columns of what `function` gives for each row alone, as tensors of this signature."""
    if at_once == 1:
        return tf.map_fn(lambda row: function(*row), columns, fn_output_signature=signature)

    def several(places):
        parts = [tf.unstack(tf.gather(column, places), at_once) for column in columns]
        made = [function(*row) for row in zip(*parts, strict=True)]
        return [tf.stack(values) for values in zip(*made, strict=True)]

    count = tf.shape(columns[0])[0]
    turns = -(-count // at_once)  # in the last one the last row fills up
    places = tf.reshape(tf.minimum(tf.range(turns * at_once), count - 1), (turns, at_once))
    of_turn = [tf.TensorSpec([at_once, *spec.shape], spec.dtype) for spec in signature]
    found = tf.map_fn(several, places, fn_output_signature=of_turn)
    return [
        tf.reshape(values, (turns * at_once, *spec.shape))[:count]
        for values, spec in zip(found, signature, strict=True)
    ]


def _all_rows(function, columns, signature):
    """The same at once, where TensorFlow has a form of each operation for many rows."""
    made = tf.vectorized_map(lambda row: function(*row), columns, fallback_to_while_loop=False)
    return [
        tf.ensure_shape(values, [None, *spec.shape])
        for values, spec in zip(made, signature, strict=True)
    ]


def _same(one, other):
    return one.shape == other.shape and np.array_equal(one, other, equal_nan=one.dtype.is_floating)


def call(function, example):
    """`function` of an example, which as a tuple is its arguments."""
    return function(*example) if isinstance(example, tuple) else function(example)


def _without_lists(example):
    """An example with tensors in the places of lists of numbers, as tf.data has them."""
    if isinstance(example, dict):
        return {name: _without_lists(part) for name, part in example.items()}
    if isinstance(example, list) and all(_rank(value) == 0 for value in example):
        return tf.convert_to_tensor(example)
    if isinstance(example, tuple) and not hasattr(example, "_fields"):
        return tuple(_without_lists(part) for part in example)
    return example


def _rank(value):
    return None if tf.nest.is_nested(value) else tf.convert_to_tensor(value).shape.rank


def _each_row(function, rows):
    count = len(tf.nest.flatten(rows)[0])
    with fresh_randomness.of_python():
        examples = [call(function, stacking.row(rows, index)) for index in range(count)]
    return stacking.stacked(examples)


def _writeable(array):
    return array if array.flags.writeable else array.copy()


def _tensor(array):
    """A column as a tensor; ragged where its examples have several lengths."""
    if not stacking.is_ragged(array):
        return tf.convert_to_tensor(array)
    if any(value.ndim != 1 for value in array):
        shapes = sorted({value.shape for value in array})
        raise ValueError(
            f"Examples of the shapes {shapes} go through no function of TensorFlow: of several "
            "sizes can be one dimension only. Use a PythonFunction that makes them equal."
        )
    return tf.RaggedTensor.from_row_lengths(np.concatenate(array), [len(v) for v in array])


def _any_number_of(tensor):
    if isinstance(tensor, tf.RaggedTensor):
        return tf.RaggedTensorSpec([None, None], tensor.dtype, ragged_rank=1)
    return tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype)


def _of_any_size(spec):
    if isinstance(spec, tf.RaggedTensorSpec):
        return spec
    return tf.TensorSpec([None] * spec.shape.rank, spec.dtype)


def _of_new(tensor):
    """The signature of what `tf.map_fn` gives for an output of this form."""
    if tensor.shape.is_fully_defined():
        return tf.TensorSpec(tensor.shape, tensor.dtype)
    if tensor.shape.rank is None:
        raise fresh_randomness.NotTraced(
            "The function of `map` gives a tensor whose number of dimensions TensorFlow cannot "
            "tell. Name its shape with tf.ensure_shape."
        )
    return tf.RaggedTensorSpec(tensor.shape, tensor.dtype, ragged_rank=0)


def _array(tensor):
    """A tensor as a column, which shares its memory: nobody may write there."""
    if isinstance(tensor, tf.RaggedTensor):
        return stacking.column([row.numpy() for row in tensor])
    return np.asarray(tensor)
