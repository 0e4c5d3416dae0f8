"""`map` of a sampler: what TensorFlow runs for many rows together is of each row alone."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from dp_keras_opt.data import mapping


def loop(function, columns):
    """The function of one row after another, called as Python."""
    rows = [
        tf.nest.map_structure(np.asarray, function(*(column[row] for column in columns)))
        for row in range(len(columns[0]))
    ]
    return tf.nest.map_structure(lambda *values: np.stack(values), *rows)


def parsed(record):
    row = tf.io.parse_single_example(record, {"x": tf.io.FixedLenFeature((3,), tf.float32)})
    return row["x"]


def decoded(record):
    return tf.reshape(tf.io.decode_raw(record, tf.float32), (3,))


def records(numbers):
    return [
        tf.train.Example(
            features=tf.train.Features(
                feature={"x": tf.train.Feature(float_list=tf.train.FloatList(value=row))}
            )
        ).SerializeToString()
        for row in numbers
    ]


# What TensorFlow has a form for many rows of; and what it takes row by row, many in a turn.
AT_ONCE = {
    "reshaped": lambda x, y: (tf.reshape(x, (3, 2)), y),
    "scaled": lambda x, y: (tf.cast(x, tf.float32) / 255 - 0.5, tf.one_hot(y, 4)),
    "of both": lambda x, y: (x * tf.cast(y, x.dtype), x[0, 1]),
    "broadcast": lambda x, y: (tf.stack([x[0], x[1] + tf.cast(y, x.dtype)]), tf.transpose(x)),
    "keras": lambda x, y: (keras.ops.clip(x, -1.0, 1.0), keras.ops.where(y > 1, x[0, 0], 0.0)),
}
IN_TURNS = {
    "sorted": lambda x, y: (tf.sort(tf.reshape(x, (6,))), y),
    "standardised": lambda x, y: (tf.image.per_image_standardization(x[..., None]), y),
    "branches": lambda x, y: tf.cond(y > 1, lambda: (x, y), lambda: (-x, y)),
}


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 100])
@pytest.mark.parametrize("name", [*AT_ONCE, *IN_TURNS])
def test_each_row_is_what_the_function_gives_for_it_alone(name, count):
    function = (AT_ONCE | IN_TURNS)[name]
    rng = np.random.default_rng(count)
    columns = rng.normal(size=(count, 2, 3)).astype("float32"), rng.integers(0, 4, count)
    mapped = mapping.Traced(function)
    expected = loop(function, columns)
    for _ in range(2):  # the first time it may be compared with a loop, and not again
        found = mapped(columns)
        tf.nest.assert_same_structure(found, expected)
        for one, other in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
    ((_, compiled, _),) = next(iter(mapped._compiled.values()))
    assert isinstance(compiled, mapping._Checked) == (name in AT_ONCE)
    if name in AT_ONCE:
        assert compiled._agrees is (None if count == 1 else True)


@pytest.mark.parametrize("count", [1, 2, 40])
def test_records_are_parsed_each_alone(count):
    numbers = np.random.default_rng(0).normal(size=(count, 3)).astype("float32")
    mapped = mapping.Traced(parsed)
    for _ in range(2):
        np.testing.assert_array_equal(mapped(np.array(records(numbers), object)), numbers)
    raw = np.array([row.tobytes() for row in numbers], object)
    np.testing.assert_array_equal(mapping.Traced(decoded)(raw), numbers)


@pytest.mark.parametrize("seed", [None, 1])
def test_random_numbers_are_others_for_each_row(seed):
    """Also where TensorFlow is seeded, and a copy of an operation would begin as the others do."""
    if seed is not None:
        keras.utils.set_random_seed(seed)
    mapped = mapping.Traced(lambda x: x + tf.random.uniform(()))
    drawn = np.concatenate([mapped(np.zeros(100, "float32")) for _ in range(3)])
    assert len(set(drawn.tolist())) > 290  # of 300; floats of 24 bits collide rarely


def test_a_form_for_many_rows_that_gives_something_else_is_not_used(monkeypatch):
    at_once = mapping._all_rows

    def mixes(function, columns, signature):
        return [tf.reverse(values, [0]) for values in at_once(function, columns, signature)]

    monkeypatch.setattr(mapping, "_all_rows", mixes)
    mapped = mapping.Traced(lambda x: x * 2.0)
    assert mapped(np.ones(1, "float32")) == [2]  # tells nothing yet
    x = np.arange(5, dtype="float32")
    for _ in range(2):
        np.testing.assert_array_equal(mapped(x), 2 * x)


def test_a_record_that_cannot_be_read_fails_the_turn_that_it_is_in():
    mapped = mapping.Traced(lambda x: (tf.ensure_shape(tf.io.decode_raw(x, tf.uint8), (3,)), x))
    whole = np.array([b"abc"] * 40, object)
    assert mapped(whole)[0].shape == (40, 3)
    whole[17] = b"ab"
    with pytest.raises(tf.errors.InvalidArgumentError):
        mapped(whole)
