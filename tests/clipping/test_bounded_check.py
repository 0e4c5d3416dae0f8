"""The check before the first step: how much it runs, how often, and what it says meanwhile."""

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import dp_keras_opt as dp
from dp_keras_opt.clipping.self_check import engine_check, passes
from dp_keras_opt.training import engines

B = 4
X = np.random.default_rng(0).normal(size=(3 * B, 4)).astype("float32")
Y = X[:, :1]


@pytest.fixture
def checks(monkeypatch):
    """Which models were checked, in order."""
    found, check = [], engines.clipping.checked_engines

    def counted(model, *args, **kwargs):
        found.append(model)
        return check(model, *args, **kwargs)

    monkeypatch.setattr(engines.clipping, "checked_engines", counted)
    return found


@pytest.fixture
def rows(monkeypatch):
    """How many rows the check ran a model on at once."""
    found = []
    run, engines = passes.Passes.run, engine_check.per_example_gradients

    def noted(function, place):
        def noting(*args):
            found.append(args[place].num_rows)
            return function(*args)

        return noting

    monkeypatch.setattr(passes.Passes, "run", noted(run, 1))
    monkeypatch.setattr(engine_check, "per_example_gradients", noted(engines, 1))
    return found


def _model(*stack):
    inputs = keras.Input((4,))
    tensor = inputs
    for layer in stack:
        tensor = layer(tensor)
    return dp.DPModel(inputs, layers.Dense(1)(tensor))


def _compile(model, loss="mse", **options):
    optimizer = dp.optimizers.DPSGD(0.1, clip_norm=1.0, noise_multiplier=1.0, batch_size=B)
    model.compile(optimizer, loss, **{"jit_compile": False, **options})
    return model


def _fit(model, **options):
    model.fit(X, Y, batch_size=B, **{"verbose": 0, **options})


@pytest.mark.parametrize(("physical", "most"), [(1, 2), (2, 2), (3, 3), (None, B)])
def test_the_check_runs_no_more_rows_than_a_step(rows, physical, most):
    _fit(_compile(_model(), physical_batch_size=physical), shuffle=False)  # all of one size
    assert max(rows) == most and len(rows) > 20


def test_batches_of_unknown_size_do_not_bound_the_check(rows):
    _compile(_model()).fit(dp.data.poisson_batches((X, Y), B, 1), verbose=0)
    assert max(rows) == 18


def test_two_rows_show_mixing_and_a_wrong_rule():
    centre = layers.Lambda(lambda t: t - ops.mean(t, axis=0, keepdims=True))
    with pytest.raises(ValueError, match="mixes"):
        _fit(_compile(_model(centre), physical_batch_size=1))


class _Normalized(layers.Layer):
    """Has no variables, and mixes."""

    def call(self, inputs):
        return inputs / (1e-3 + ops.std(inputs, axis=0, keepdims=True))


def test_what_is_frozen_is_checked_by_what_it_gives():
    base = keras.Sequential([keras.Input((4,)), layers.Dense(3), _Normalized(), layers.Dense(3)])
    base.trainable = False
    with pytest.raises(ValueError, match=r"'sequential[^']*'.*mixes"):
        _fit(_compile(_model(base)))


class _Penalty(layers.Layer):
    def call(self, inputs, training=None):
        if training:
            self.add_loss(ops.mean(ops.square(inputs)))
        return inputs


def test_a_loss_that_is_added_in_training_alone_is_refused_beside_dropout():
    """Passes are compiled once for each mode: that of inference adds none."""
    with pytest.raises(ValueError, match="add_loss"):
        _fit(_compile(_model(layers.Dense(3), layers.Dropout(0.5), _Penalty())))


# Once.


def _loss(y, p):
    return tf.reduce_mean(tf.square(y - p), axis=-1)


def _other_loss(y, p):
    return tf.reduce_mean(tf.abs(y - p), axis=-1)


def test_a_model_is_checked_once(checks):
    model = _model(layers.Dense(3, activation="relu"), layers.Dropout(0.5))
    for _ in range(2):
        _fit(_compile(model, "mse"))
        _fit(model)
        model.evaluate(X, Y, verbose=0)
        model.predict(X, verbose=0)
    assert checks == [model]


def test_a_model_of_own_code_is_checked_once_each_time_it_is_compiled(checks):
    model = Moody()
    for _ in range(2):
        _fit(_compile(model, "mse", metrics=["mae"]))
        _fit(model)
    assert checks == [model] * 2


CHANGES = [
    dict(run_eagerly=True),
    dict(loss=_other_loss),
    dict(loss_weights=[2.0]),
    dict(metrics=[keras.metrics.MeanAbsoluteError()]),
    dict(physical_batch_size=2),
    dict(run_eagerly=False),
    dict(jit_compile=True),
]


def test_what_is_compiled_otherwise_is_checked_again(checks):
    """Each time one thing changes, and the others are as they were."""
    model, compiled = _model(layers.Dense(2)), {"loss": _loss}
    _fit(_compile(model, **compiled))
    for number, change in enumerate(CHANGES, 1):
        compiled |= change
        _fit(_compile(model, **compiled))
        assert checks == [model] * (1 + number), change


def test_what_trains_is_part_of_what_was_checked(checks):
    dense = layers.Dense(2)
    model = _model(dense)
    for trainable in (True, False, True):
        dense.trainable = trainable
        _fit(_compile(model, "mse"))
    assert checks == [model] * 2  # the third is as the first


class Moody(dp.DPModel):
    def __init__(self):
        super().__init__()
        self.dense, self.mode = layers.Dense(1), "each"

    def call(self, inputs):
        return self.dense(inputs - ops.mean(inputs, axis=0) if self.mode == "all" else inputs)


def test_a_model_that_changes_its_ways_is_checked_again():
    model = _compile(Moody(), _loss)
    _fit(model)
    model.mode = "all"
    with pytest.raises(ValueError, match="mixes"):
        _fit(_compile(model, _loss))


def test_a_layer_that_changes_its_ways_is_checked_again():
    dense = layers.Dense(3)
    model = _compile(_model(dense), _loss)
    _fit(model)
    dense.activation = lambda t: ops.softmax(t, axis=0)
    with pytest.raises(ValueError, match="mixes"):
        _fit(_compile(model, _loss))


def test_losses_are_held_weakly():
    class Loss:
        def __call__(self, y, p):
            return _loss(y, p)

    loss, model = Loss(), _model()
    held = weakref.ref(loss)
    _fit(_compile(model, loss))
    _compile(model, "mse")
    del loss
    gc.collect()
    assert held() is None
    _fit(model)


# Heard.


@pytest.mark.parametrize(
    ("patience", "verbose", "heard"), [(0.0, 2, True), (0.0, 0, False), (1e6, 2, False)]
)
def test_a_long_check_is_heard(monkeypatch, capsys, patience, verbose, heard):
    monkeypatch.setattr(engines, "PATIENCE", patience)
    model = _compile(_model(layers.Dense(3)))
    for _ in range(2):  # once
        _fit(model, verbose=verbose)
        said = capsys.readouterr().out
        assert said.count("Checking the model (once)") == heard
        heard = False
