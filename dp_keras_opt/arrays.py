"""The user's data as tensors in memory: structures of arrays, or a data set of examples."""

import numbers

import keras
import numpy as np
import tensorflow as tf

from dp_keras_opt.checks import whole_number


def examples(data, class_weight, max_bytes):
    """((x, y, sample_weight) as tensors, their number), class weights multiplied in."""
    max_bytes = whole_number(max_bytes, "max_bytes")
    if isinstance(data, tf.data.Dataset):
        data = _read(data, max_bytes)
    x, y, sample_weight = tensors(data, max_bytes)
    if class_weight is not None:
        sample_weight = _weights_of_classes(y, class_weight, sample_weight)
    return (x, y, sample_weight), len(keras.tree.flatten(x)[0])


def _read(dataset, max_bytes):
    """A finite data set of examples as a tuple of structures of NumPy arrays."""
    spec, n = dataset.element_spec, int(dataset.cardinality())
    _check_tuple(spec)
    if n == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            "`data` is an infinite data set, but the probability of an example is batch_size / n. "
            "Remove `repeat()`, or sample batches yourself and use `dp.data.assume_sampling`."
        )
    leaves = tf.nest.flatten(spec)
    if not all(isinstance(leaf, tf.TensorSpec) for leaf in leaves):
        raise TypeError(f"`data` must have dense examples: pad them. Received: {spec}")
    if all(leaf.shape.rank and leaf.shape[0] is None for leaf in leaves):
        raise ValueError(
            f"`data` must be examples, but looks like batches: {spec}. Call `.unbatch()`, or state "
            "the shape of an example with `tf.ensure_shape` in a `map`."
        )
    chunks, rows, size = [], 0, 0
    try:
        for chunk in dataset.batch(128).as_numpy_iterator():
            chunks.append(tf.nest.map_structure(as_floatx, chunk))
            rows += len(tf.nest.flatten(chunk)[0])
            size += _nbytes(chunks[-1])
            _check_size(size if n < 0 else size * n // rows, max_bytes)
    except tf.errors.InvalidArgumentError as error:
        raise ValueError(
            "`data` must have examples of equal shape: pad them or, if they are batches, call "
            f"`.unbatch()`. TensorFlow says: {error.message}"
        ) from error
    if not chunks:
        raise ValueError("`data` is empty. Received: a data set without examples.")
    return tf.nest.map_structure(lambda *parts: np.concatenate(parts), *chunks)


def tensors(data, max_bytes):
    """`(x, y, sample_weight)` as structures of tensors of equal length; the last may be None."""
    _check_tuple(data)
    names = ("x", "y", "sample_weight") if len(data) == 3 and data[2] is not None else ("x", "y")
    # Lists become tuples, as in Keras: tf.data takes a list for one tensor.
    data = dict(zip(names, keras.tree.lists_to_tuples(data), strict=False))
    data = {
        name: tf.nest.map_structure(lambda leaf, name=name: _array(name, leaf), structure)
        for name, structure in data.items()
    }
    lengths = {name: [len(a) for a in tf.nest.flatten(s)] for name, s in data.items()}
    distinct = set().union(*lengths.values())
    if not all(lengths.values()) or 0 in distinct:
        raise ValueError(f"`data` is empty. Received lengths: {lengths}")
    if len(distinct) > 1:
        raise ValueError(f"`data` must have arrays of equal length. Received lengths: {lengths}")
    _check_size(_nbytes(data), max_bytes)
    with tf.device("CPU:0"):  # where tf.data gathers, also beside a GPU
        data = tf.nest.map_structure(tf.convert_to_tensor, data)
    return data["x"], data["y"], data.get("sample_weight")


def _array(name, value):
    """One leaf of the data as a NumPy array with a first dimension."""
    array = as_floatx(np.asarray(value))
    is_object = array.dtype == object and not all(isinstance(v, str | bytes) for v in array.flat)
    if array.ndim == 0 or is_object:
        raise TypeError(
            f"`{name}` must be a dense array of numbers or strings with the examples along its "
            f"first dimension, or a structure of such. Received: {type(value).__name__}"
        )
    if name == "sample_weight":
        array = array.astype(np.float32)
        if array.ndim != 1 or not np.isfinite(array).all():
            raise ValueError(
                "`sample_weight` must have one finite number for each example. Received: shape "
                f"{array.shape}, of which {np.sum(~np.isfinite(array))} are not finite"
            )
    return array


def as_floatx(array):
    """Floats in the precision that Keras gives them, all else as it is."""
    return array.astype(keras.config.floatx()) if array.dtype.kind == "f" else array


def _nbytes(structure):
    arrays = tf.nest.flatten(structure)
    return sum(a.nbytes + (sum(map(len, a.flat)) if a.dtype == object else 0) for a in arrays)


def _weights_of_classes(y, class_weight, sample_weight):
    """The weight of each example's class, times its `sample_weight` where that is given."""
    if not isinstance(class_weight, dict) or not all(
        isinstance(w, numbers.Real) and np.isfinite(w) for w in class_weight.values()
    ):
        raise TypeError(
            f"`class_weight` must be a dict from class to finite weight. Received: {class_weight!r}"
        )
    if tf.nest.is_nested(y) or tf.nest.is_nested(sample_weight):
        raise ValueError(
            "`class_weight` needs one output and one array of weights. Received: a structure of y "
            "or of `sample_weight`. Put the class weights into `sample_weight` instead."
        )
    labels = y.numpy()
    if labels.ndim == 2:
        labels = labels.argmax(axis=1) if labels.shape[1] > 1 else labels[:, 0]
    if labels.ndim != 1 or labels.dtype.kind not in "biuf":
        raise ValueError(
            "`class_weight` needs integer classes of shape [n] or [n, 1], or one-hot classes of "
            f"shape [n, classes]. Received: y of shape {y.shape} and dtype {y.dtype.name}"
        )
    classes, index = np.unique(labels.round().astype(np.int64), return_inverse=True)
    weights = np.array([class_weight.get(int(c), 1.0) for c in classes], np.float32)[index]
    return tf.convert_to_tensor(weights if sample_weight is None else weights * sample_weight)


def _check_tuple(data):
    if not isinstance(data, tuple) or len(data) not in (2, 3):
        what = f"{len(data)} elements" if isinstance(data, tuple) else type(data).__name__
        raise TypeError(
            "`data` must be a tuple (x, y) or (x, y, sample_weight), or a tf.data.Dataset of "
            f"such. Received: {what}. Without targets, as in an autoencoder, use (x, x)."
        )


def _check_size(size, max_bytes):
    if size > max_bytes:
        raise ValueError(
            f"`data` takes at least {size:,} bytes, but max_bytes={max_bytes:,}. Raise it if there "
            "is memory, or sample batches yourself and use `dp.data.assume_sampling`."
        )
