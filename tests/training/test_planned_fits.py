"""A stop that looked at results: `fit` tells the ledger what it planned."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_keras_opt as dp
from dp_keras_opt.accounting import Ledger, Sampling
from dp_keras_opt.callbacks import PrivacyBudget, PrivacyReport

layers = keras.layers
N, B, DELTA = 24, 8, 1e-3
X = np.random.default_rng(1).normal(size=(N, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
POISSON = Sampling.poisson(N, B)
STEPS = 3  # of an epoch


def _elements(steps):
    return tf.data.Dataset.from_tensors(
        (X[:B], Y[:B], dp.data.RowInfo(np.ones(B, "float32")))
    ).repeat(steps)


def _batches(steps=STEPS):
    """Batches said to be Poisson samples; their content is of no account here."""
    return dp.data.assume_sampling(_elements(steps), POISSON)


def _unknown(steps=STEPS):
    """The same, of a length that TensorFlow cannot know."""
    return dp.data.assume_sampling(_elements(steps).filter(lambda *_: True), POISSON)


def _model(noise_schedule=None, **compiled):
    inputs = keras.Input((3,))
    model = dp.DPModel(inputs, layers.Dense(1)(inputs))
    optimizer = dp.optimizers.DPSGD(
        0.1, clip_norm=1.0, noise_multiplier=2.0, batch_size=B, noise_schedule=noise_schedule
    )
    model.compile(optimizer, "mse", **compiled)
    return model


def _epsilon(steps):
    optimizer = dp.optimizers.DPSGD(0.1, clip_norm=1.0, noise_multiplier=2.0, batch_size=B)
    return Ledger.of(optimizer, POISSON, steps).epsilon(DELTA)


def _guarantees(model, steps):
    assert model.ledger.epsilon_as_planned(DELTA) == pytest.approx(_epsilon(steps), rel=1e-9)


class _At(keras.callbacks.Callback):
    """Does something after so many batches."""

    def __init__(self, batches, what):
        super().__init__()
        self.left, self.what = batches, what

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            self.what(self.model)


def _stop(model):
    model.stop_training = True


def _raise(error):
    def fail(model):
        raise error

    return fail


def test_early_stopping_has_the_guarantee_of_the_plan(tmp_path):
    model, report = _model(), PrivacyReport(DELTA)
    stop = keras.callbacks.EarlyStopping(monitor="loss", min_delta=1e3)
    model.fit(_batches(), epochs=10, verbose=0, callbacks=[report, stop])
    assert model.ledger.steps == 2 * STEPS
    _guarantees(model, 10 * STEPS)
    assert report.epsilon == pytest.approx(_epsilon(2 * STEPS))  # of the steps that ran
    text = " ".join(report.statement().split())
    assert "6 steps of 30 planned" in text and "Stopped early" in text
    model.save(tmp_path / "model.keras")
    _guarantees(keras.saving.load_model(tmp_path / "model.keras"), 10 * STEPS)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("out of patience")])
def test_an_exception_leaves_the_plan(error, tmp_path):
    model = _model()
    model.ledger = Ledger(tmp_path / "spent.jsonl")
    with pytest.raises(type(error)):
        model.fit(_batches(), epochs=10, verbose=0, callbacks=[_At(4, _raise(error))])
    assert model.ledger.steps == 4
    _guarantees(model, 10 * STEPS)
    on_file = Ledger.read(tmp_path / "spent.jsonl")
    assert on_file.epsilon_as_planned(DELTA) == pytest.approx(_epsilon(10 * STEPS))
    model.ledger.unlock()


def test_the_plan_is_on_file_while_the_process_may_be_killed(tmp_path):
    path, seen = tmp_path / "spent.jsonl", []
    model = _model()
    model.ledger = Ledger(path)
    look = _At(4, lambda model: seen.append(Ledger.read(path)))
    model.fit(_batches(), epochs=10, verbose=0, callbacks=[look])
    assert seen[0].epsilon_as_planned(DELTA) == pytest.approx(_epsilon(10 * STEPS))
    assert Ledger.read(path).segments[0].planned == 10 * STEPS
    model.ledger.unlock()


def test_a_plain_end_is_exact():
    model = _model()
    model.fit(_batches(), epochs=2, verbose=0)
    _guarantees(model, 2 * STEPS)
    model.fit(X, Y, epochs=2, verbose=0)
    assert [segment.planned for segment in model.ledger.segments] == [6, 6]
    model.fit(X, Y, epochs=20, verbose=0, validation_split=0.5, callbacks=[_At(1, _stop)])
    assert [segment.planned for segment in model.ledger.segments] == [6, 6, 40]


def test_a_stop_at_the_very_end_is_no_stop():
    model = _model()
    model.fit(_batches(), epochs=2, verbose=0, callbacks=[_At(2 * STEPS, _stop)])
    _guarantees(model, 2 * STEPS)


def test_data_that_end_early_are_exact():
    model = _model()
    with pytest.warns(UserWarning, match="ran out of data"):
        model.fit(_batches(), epochs=10, steps_per_epoch=4, verbose=0)
    _guarantees(model, model.ledger.steps)


@pytest.mark.parametrize("data", [_batches, _unknown])
@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_a_budget_is_exact(data, steps_per_execution):
    model = _model(steps_per_execution=steps_per_execution)
    with pytest.warns(UserWarning, match="allows no further step"):
        model.fit(data(), epochs=10, verbose=0, callbacks=[PrivacyBudget(_epsilon(7), DELTA)])
    assert 5 <= model.ledger.steps <= 7
    _guarantees(model, model.ledger.steps)


@pytest.mark.parametrize("data", [_batches, _unknown])
def test_a_plan_is_at_most_what_the_budget_affords(data):
    model = _model()
    callbacks = [PrivacyBudget(_epsilon(7), DELTA), _At(4, _stop)]
    model.fit(data(), epochs=10, verbose=0, callbacks=callbacks)
    assert model.ledger.steps == 4
    _guarantees(model, 7)


def test_an_infinite_budget_is_none():
    model = _model()
    callbacks = [PrivacyBudget(math.inf, DELTA), _At(4, _stop)]
    model.fit(_batches(), epochs=10, verbose=0, callbacks=callbacks)
    _guarantees(model, 30)


@pytest.mark.parametrize(
    ("epochs", "stopped_at", "steps"), [(6, None, 30), (10, 1, 12 + 30), (1, None, 30)]
)
def test_a_fit_that_goes_on(epochs, stopped_at, steps):
    model = _model()
    model.fit(_batches(), epochs=10, verbose=0, callbacks=[_At(12, _stop)])
    stop = [] if stopped_at is None else [_At(stopped_at, _stop)]
    model.fit(_batches(), epochs=epochs, verbose=0, callbacks=stop)
    _guarantees(model, steps)


def test_data_of_unknown_length():
    model = _model()
    model.fit(_unknown(), epochs=2, verbose=0)
    _guarantees(model, 2 * STEPS)
    assert "Stopped early" not in model.ledger.statement(DELTA)
    model.fit(_unknown(), epochs=2, verbose=0, callbacks=[_At(4, _stop)])
    text = " ".join(model.ledger.statement(DELTA).split())
    assert "holds only if the stop was fixed beforehand" in text


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_a_stop_in_the_last_epoch_of_unknown_length(at_once):
    """The end within an execution, and the one that found nothing after it, counted as two."""
    model = _model(steps_per_execution=at_once)
    budget = PrivacyBudget(_epsilon(20), DELTA)
    stop = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: setattr(stop, "epoch", epoch),
        on_train_batch_end=lambda batch, logs: stop.epoch == 2 and _stop(model),
    )
    model.fit(_unknown(5), epochs=3, verbose=0, callbacks=[budget, stop])
    assert 10 < model.ledger.steps < 15
    _guarantees(model, 20)


def test_train_on_batch_has_no_plan():
    model = _model()
    model.sampling = POISSON
    for _ in range(3):
        model.train_on_batch(X[:B], Y[:B])
    assert model.ledger.segments[0].planned is None
    model.fit(_batches(), verbose=0)
    model.sampling = POISSON
    model.train_on_batch(X[:B], Y[:B])
    _guarantees(model, 3 + STEPS + 1)


def test_a_schedule_that_ends_before_the_plan():
    model = _model(noise_schedule=[1.0] * 7)
    budget = dp.callbacks.PrivacyBudget(1e3, DELTA)  # which might end it before
    with pytest.warns(UserWarning, match=r"No noise is left.*has 7 steps.*after 7 of"):
        model.fit(_batches(), epochs=10, verbose=0, callbacks=[budget])
    _guarantees(model, 7)
    assert model.ledger.steps == 7


def test_a_schedule_that_ends_before_the_first_execution():
    model = _model(noise_schedule=[1.0] * 2, steps_per_execution=STEPS)
    budget = dp.callbacks.PrivacyBudget(1e3, DELTA)
    with pytest.raises(ValueError, match="end of the noise schedule"):
        model.fit(_batches(), epochs=10, verbose=0, callbacks=[budget])
    assert model.ledger.steps == 0


def test_a_ledger_exchanged_in_the_middle_keeps_the_plan(tmp_path):
    model = _model()

    def exchange(model):
        model.ledger = Ledger(tmp_path / "spent.jsonl")

    model.fit(_batches(), epochs=10, verbose=0, callbacks=[_At(4, exchange), _At(20, _stop)])
    assert [segment.steps for segment in model.ledger.segments] == [4, 16]
    _guarantees(model, 30)
    model.ledger.unlock()


def test_an_interrupted_fit_that_is_resumed_by_keras(tmp_path):
    """BackupAndRestore, in a new process: what was planned before is done in the end."""
    for interrupt in ([_At(STEPS + 1, _raise(KeyboardInterrupt()))], []):
        model = _model()
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False)
        try:
            model.fit(_batches(), epochs=4, verbose=0, callbacks=[backup, *interrupt])
        except KeyboardInterrupt:
            _guarantees(model, 4 * STEPS)
    assert model.ledger.steps == 4 * STEPS
    _guarantees(model, 4 * STEPS)
    assert "Stopped early" not in model.ledger.statement(DELTA)


class _Raises(keras.callbacks.Callback):
    """What Keras takes for the end of the data."""

    def __init__(self, error, step):
        super().__init__()
        self.error, self.step = error, step

    def on_train_batch_end(self, batch, logs=None):
        if self.model.ledger.steps == self.step:
            raise self.error


class _StopsAndHidesIt(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = True

    def on_train_end(self, logs=None):
        self.model.stop_training = False


@pytest.mark.parametrize("stops", [True, False])
def test_steps_that_a_backup_brings_are_not_those_of_a_fit(stops, tmp_path):
    """A job that goes on with one that ended, and stops within its last epoch."""

    def backup():
        return keras.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)

    _model().fit(_batches(), epochs=1, verbose=0, callbacks=[backup()])
    model = _model()
    stop = [_At(1, _stop)] if stops else []
    model.fit(_batches(), epochs=2, verbose=0, callbacks=[backup(), *stop])
    assert model.ledger.steps == STEPS + (1 if stops else STEPS)
    # What is planned when `fit` begins, which does not know yet that a backup brings an epoch.
    _guarantees(model, (3 if stops else 2) * STEPS)
    assert ("Stopped early" in model.statement(DELTA)) == stops


def _no_more():
    return tf.errors.OutOfRangeError(None, None, "")


@pytest.mark.parametrize(
    ("callback", "epochs"),
    [
        (lambda: _Raises(StopIteration(), 2), 1),
        (lambda: _Raises(StopIteration(), 2), 4),
        (lambda: _Raises(_no_more(), 2), 4),
        (_StopsAndHidesIt, 4),
    ],
)
def test_stops_that_look_like_the_end_of_the_data(callback, epochs):
    """They stated 1.562 where 2.021 was planned."""
    model = _model()
    model.fit(_batches(), epochs=epochs, verbose=0, callbacks=[callback()])
    assert model.ledger.steps < epochs * STEPS
    _guarantees(model, epochs * STEPS)
