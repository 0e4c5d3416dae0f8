"""What goes wrong while examples are read reaches the user as it was raised, and no other error."""

import contextlib
import os
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_keras_opt as dp
from dp_keras_opt.data import failures

N = 37
X = np.random.default_rng(0).normal(size=(N, 4)).astype("float32")
Y = np.arange(N)[:, None].astype("float32")


class Own:
    """A source that fails from the time on when it is told how."""

    def __init__(self):
        self.length, self.fail = N, lambda indices: None

    def __len__(self):
        return self.length

    def __getitem__(self, indices):
        return self.fail(indices) or (X[indices], Y[indices])


def _bad_sector(indices):
    if 7 in indices:
        raise OSError("bad sector")


def _unreadable(folder):
    source = Own()
    return source, lambda: setattr(source, "fail", _bad_sector), {}


def _end(indices):
    raise StopIteration


def _ended(folder):
    source = Own()
    return source, lambda: setattr(source, "fail", _end), {}


def _cut_short(folder):
    np.save(folder / "x.npy", X)
    return (folder / "x.npy", Y), lambda: os.truncate(folder / "x.npy", 200), {}


def _shorter(folder):
    source = Own()
    return source, lambda: setattr(source, "length", N - 1), {}


def _ragged(folder):
    source = Own()

    def fail(indices):
        rows = np.empty(len(indices), object)
        rows[:] = [np.zeros(4 + (i == 5), "float32") for i in indices]
        return rows, Y[indices]

    return source, lambda: setattr(source, "fail", fail), {}


def _refuses_9(x, y):
    if y[0] == 9:
        raise KeyError("no such token")
    return x, y


def _in_this_process(folder):
    return (X, Y), lambda: None, {"map": dp.data.PythonFunction(_refuses_9)}


def _in_another_process(folder):
    return (X, Y), lambda: None, {"map": dp.data.PythonFunction(_refuses_9, processes=1)}


FAILURES = {
    _unreadable: (ValueError, "^Record 7 of `data` cannot be read: OSError: bad sector. Mend it"),
    _ended: (ValueError, "^Record 0 of `data` cannot be read: StopIteration"),
    _cut_short: (RuntimeError, "^.*x.npy was changed while it was trained on"),
    _shorter: (RuntimeError, "^`data` had 37 examples and has 36 now: they must stay"),
    _ragged: (ValueError, r"^Examples 0 and 5 have the shapes \(4,\) and \(5,\)"),
    _in_this_process: (ValueError, "^Record 9 of `data` cannot be read: KeyError: 'no such token'"),
    _in_another_process: (ValueError, "^Record 9 of `data` cannot be read: KeyError: 'no such tok"),
}


def _model(batch_size=N, **optimizer):
    inputs = keras.Input((4,))
    model = dp.DPModel(inputs, keras.layers.Dense(1)(inputs))
    private = {"clip_norm": 1.0, "noise_multiplier": 1.0, "batch_size": batch_size} | optimizer
    model.compile(dp.optimizers.DPSGD(0.1, **private), "mse", jit_compile=False)
    return model


@pytest.mark.parametrize("make", FAILURES, ids=lambda make: make.__name__.strip("_"))
def test_fit_and_loops_raise_what_was_raised(make, tmp_path):
    """The step that failed stays in the ledger: what it released is not known for sure."""
    data, break_it, how = make(tmp_path)
    kind, text = FAILURES[make]
    batches = dp.data.poisson_batches(data, N, 3, **how)
    break_it()
    with pytest.raises(kind, match=text) as caught:
        list(batches)
    assert type(caught.value) is kind
    model = _model()
    before = model.get_weights()
    with pytest.raises(kind, match=text) as caught:
        model.fit(batches, verbose=0)
    assert type(caught.value) is kind and "node" not in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__cause__ is not None
    assert model.ledger.steps == 1 and int(model.optimizer.iterations) == 0
    np.testing.assert_array_equal(model.get_weights()[0], before[0])


def _undefined(x, y):
    return x + undefined, y  # noqa: F821


def _of_several(x, y):
    return keras.Sequential([keras.layers.RandomFlip()])(x[None, None], training=True)[0, 0, 0], y


def _of_no_shape(x, y):
    return tf.numpy_function(lambda a: a, [x], tf.float32), y


def _of_values(x, y):
    return x.numpy(), y


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize(
    "function, said",
    [
        (_undefined, "NameError: name 'undefined' is not defined"),
        (_of_several, "ValueError.*"),
        (_of_no_shape, r"number of dimensions.*tf.ensure_shape\.$"),
        (_of_values, "Error.*PythonFunction"),
    ],
)
def test_a_map_that_fails_is_not_taken_for_a_record(function, said, skips):
    with pytest.raises(ValueError, match=re.compile(said, re.S)) as caught:
        dp.data.poisson_batches((X, Y), 5, map=function, skip_unreadable=skips)
    message = str(caught.value)
    assert "Record" not in message and "skip_unreadable" not in message and ".." not in message
    if function is not _of_no_shape:
        assert "It is given one example, without the dimension of the batch" in message


class _Pictures(keras.utils.PyDataset):
    """Of which one has no colours, as folders of pictures do."""

    def __init__(self, gray):
        super().__init__()
        self.gray = gray

    def __len__(self):
        return 12

    def __getitem__(self, index):
        shape = (4, 4) if index == self.gray else (4, 4, 3)
        return {"x": np.ones(shape, "float32"), "y": np.float32([index])}


@pytest.mark.parametrize("gray", [0, 7])
def test_a_record_of_another_form_is_one_that_cannot_be_read(gray):
    def red(record):
        return record["x"][:, :, 0], record["y"]

    batches = dp.data.poisson_batches(_Pictures(gray), 12, 1, map=red, skip_unreadable=True)
    list(batches)
    assert list(batches.unreadable) == [gray]
    with pytest.raises(ValueError, match=f"^Record {gray} of `data` cannot be read: NotTraced"):
        list(dp.data.poisson_batches(_Pictures(gray), 12, 1, map=red))


def test_a_map_of_batches_that_fails_says_what_it_is_given():
    batches = dp.data.poisson_batches((X, Y), 5)
    with pytest.raises(ValueError, match="one example, without the dimension of the batch"):
        batches.map(_undefined)


class _Nested(keras.utils.PyDataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return {"x": {"left": np.ones(2, "float32")}, "y": np.float32([index])}


def test_records_of_records_go_through_a_map():
    batches = dp.data.poisson_batches(
        _Nested(), 4, map=lambda record: (record["x"]["left"], record["y"])
    )
    assert next(iter(batches))[0].shape[1] == 2


def test_columns_of_dates_are_named():
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"a": X[:, 0], "day": pd.date_range("2020", periods=len(X)), "y": Y[:, 0]})

    def pick(row):
        return row["a"][None], row["y"][None]

    with pytest.raises(ValueError, match=r"columns \['day'\] have dates.*PythonFunction"):
        dp.data.poisson_batches(frame, 5, map=pick)
    batches = dp.data.poisson_batches(frame, 5, map=dp.data.PythonFunction(pick))
    assert next(iter(batches))[0].shape[1] == 1
    dp.data.poisson_batches(frame.drop(columns="day"), 5, map=pick)


def test_an_error_between_two_steps_counts_the_steps_that_ran():
    source = Own()
    batches = dp.data.fixed_order_epochs(source, 5)
    model = _model(5)
    model.fit(batches, verbose=0)
    assert model.ledger.steps == 8
    calls = []

    def fail(indices):
        calls.append(indices)
        if len(calls) == 3:
            raise MemoryError("of this machine")  # and not of a record: each can be read alone

    source.fail = fail
    for kind, match in ((MemoryError, "^of this machine$"), (ValueError, "^Record 7 of `data`")):
        before = model.ledger.steps, int(model.optimizer.iterations)
        with pytest.raises(kind, match=match):
            model.fit(batches, verbose=0)
        taken = int(model.optimizer.iterations) - before[1]
        assert model.ledger.steps == before[0] + taken + 1 and taken < 8
        source.fail = _bad_sector


def test_the_traceback_shows_where_it_was_raised():
    source = Own()
    batches = dp.data.poisson_batches(source, N, 3)
    source.fail = _bad_sector
    with pytest.raises(ValueError) as caught:
        _model().fit(batches, verbose=0)
    cause = caught.value.__cause__
    assert isinstance(cause, OSError) and not isinstance(cause, tf.errors.OpError)
    frames = []
    place = cause.__traceback__
    while place:
        frames.append(place.tb_frame.f_code.co_name)
        place = place.tb_next
    assert frames[-1] == "_bad_sector"


def test_public_examples_and_parts_of_other_pipelines():
    source = Own()
    private = dp.data.poisson_batches((X, Y), N, 3)
    batches = dp.data.with_public(private, source)
    source.fail = _bad_sector
    with pytest.raises(ValueError, match="^Record 7 of `data` cannot be read"):
        list(batches)
    mapped = dp.data.poisson_batches(source, N, 3, skip_unreadable=True)
    source.fail = None
    source.length = N - 1
    stated = dp.data.assume_sampling(mapped.dataset.prefetch(2), mapped.sampling)
    with pytest.raises(RuntimeError, match="^`data` had 37 examples"):
        _model().fit(stated, verbose=0)


def test_an_error_of_before_is_not_blamed_for_another_one():
    """One iteration is abandoned with its error unseen; then something else goes wrong."""
    source = Own()
    batches = dp.data.poisson_batches(source, N, 3)
    source.fail = _bad_sector
    with contextlib.suppress(tf.errors.OpError):
        next(iter(batches.dataset))  # not through `Batches`: the error stays
    assert any("Record 7" in str(error) for error in failures._kept)
    source.fail = lambda indices: None
    broken = batches.map(lambda x, y: (x, tf.debugging.check_numerics(y / 0.0, "not the record")))
    with pytest.raises(tf.errors.InvalidArgumentError, match="not the record") as caught:
        _model().fit(broken, verbose=0)
    assert "Record 7" not in str(caught.value)
    with pytest.raises(tf.errors.InvalidArgumentError, match="not the record"):
        list(broken)
    _model().fit(batches, verbose=0)


def test_nothing_is_swallowed():
    for error in (KeyboardInterrupt(), ValueError("mine"), SystemExit(3), StopIteration(4)):
        with pytest.raises(type(error)) as caught, failures.as_raised():
            raise error
        assert caught.value is error
    found = []
    with failures.as_raised():
        found.append(1)
    assert found == [1]


def test_what_is_kept_is_little():
    for number in range(100):
        with contextlib.suppress(ValueError), failures.kept():
            raise ValueError(number)
    assert len(failures._kept) <= 8


# Processes.


def _dies_at_9(x, y):
    if y[0] == 9 and os.path.exists(os.environ["DIES"]):
        os._exit(1)
    return x, y


def test_a_process_that_dies(tmp_path, monkeypatch):
    """The record is named; the next iteration has other processes."""
    monkeypatch.setenv("DIES", str(tmp_path / "now"))
    function = dp.data.PythonFunction(_dies_at_9, processes=1)
    batches = dp.data.fixed_order_epochs((X, Y), N, map=function)
    (tmp_path / "now").touch()
    with pytest.raises(ValueError, match="^Record 9 of `data`.*A process.*ended.*Others are start"):
        list(batches)
    (tmp_path / "now").unlink()
    assert sorted(y for _, y, _ in batches for y in y.numpy().ravel()) == list(range(N))


def test_a_process_that_dies_at_a_record_that_is_skipped(tmp_path, monkeypatch):
    """It alone counts as unreadable, and not what was read beside it."""
    monkeypatch.setenv("DIES", str(tmp_path))
    function = dp.data.PythonFunction(_dies_at_9, processes=1)
    batches = dp.data.fixed_order_epochs((X[:12], Y[:12]), 12, map=function, skip_unreadable=True)
    ((_, y, rows),) = batches
    assert set(range(12)) - set(y.numpy()[rows.mask == 1].ravel()) == {9}
    assert list(batches.unreadable) == [9]
