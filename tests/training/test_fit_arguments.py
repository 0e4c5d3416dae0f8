"""What `fit`, `evaluate` and `compile` are given: honoured, or refused with the reason."""

import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras.callbacks import (
    CallbackList,
    CSVLogger,
    EarlyStopping,
    ModelCheckpoint,
    ReduceLROnPlateau,
    TerminateOnNaN,
)

import dp_keras_opt as dp
from dp_keras_opt.accounting import Sampling
from dp_keras_opt.callbacks import OptimizerReport, PrivacyBudget, PrivacyReport

N, B, DELTA = 60, 6, 1e-5
X = np.random.default_rng(0).normal(size=(N, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def _model(optimizer=None, **compiled):
    inputs = keras.Input((3,))
    model = dp.DPModel(inputs, layers.Dense(1)(layers.Dense(2, name="body")(inputs)))
    model.compile(optimizer or _sgd(), "mse", **compiled)
    return model


def _sgd(noise_multiplier=1.0):
    return dp.optimizers.DPSGD(0.1, clip_norm=1.0, noise_multiplier=noise_multiplier, batch_size=B)


def _batches(steps=2):
    return dp.data.poisson_batches((X, Y), B, steps)


def _shuffled(data):
    return dp.data.assume_sampling(data, Sampling.shuffled(N, B))


def _warnings_of(function, about):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [warning for warning in caught if about in str(warning.message)]


# Arguments beside Batches.


@pytest.mark.parametrize(
    "argument, value, instead",
    [
        ("y", Y, r"poisson_batches\(\(x, y\)"),
        ("sample_weight", np.ones(N), r"poisson_batches\(\(x, y, sample_weight\)"),
        ("class_weight", {0: 1.0}, r"poisson_batches\(\.\.\., class_weight="),
        ("validation_split", 0.1, r"validation_data=\(x, y\)"),
        ("batch_size", 64, r"expected size of 6.*physical_batch_size"),
    ],
)
def test_what_batches_say_already_is_refused_beside_them(argument, value, instead):
    model = _model()
    with pytest.raises(ValueError, match=f"fit does not take {argument} beside Batches.*{instead}"):
        model.fit(_batches(), verbose=0, **{argument: value})
    assert model.ledger.steps == 0


def test_the_batch_size_that_batches_have_may_be_repeated():
    model = _model()
    model.fit(_batches(), batch_size=B, validation_split=0.0, verbose=0)
    assert model.ledger.steps == 2


def test_class_weight_is_honoured_where_batches_have_no_weights():
    dataset = tf.data.Dataset.from_tensor_slices((X, np.ones((N, 1), "float32"))).batch(B)
    model = _model()
    history = model.fit(_shuffled(dataset), class_weight={0: 5.0, 1: 0.0}, verbose=0)
    assert history.history["loss"] == [0.0]
    weighted = dataset.map(lambda x, y: (x, y, tf.ones(tf.shape(x)[0])))
    for data, match in (
        (weighted, "have weights already"),
        (_generator_of(dataset), "third element"),
    ):
        with pytest.raises(ValueError, match=f"class_weight beside Batches.*{match}"):
            _model().fit(_shuffled(data), class_weight={0: 5.0}, verbose=0)


def _generator_of(dataset):
    return (batch for batch in dataset)


# Figures.


@pytest.mark.parametrize("how", ["evaluate", "predict"])
@pytest.mark.parametrize("by_name", [True, False])
def test_figures_of_batches_are_refused(how, by_name):
    call = getattr(_model(), how)
    with pytest.raises(TypeError, match=f"x of {how} cannot be Batches.*Give arrays"):
        call(**{"x": _batches()}) if by_name else call(_batches())


@pytest.mark.parametrize(
    "given, match",
    [
        (_batches, "validation_data cannot be Batches"),
        (lambda: (_batches(),), "validation_data cannot be Batches"),
        (lambda: (X.tolist(), Y.tolist()), "validation_data must be arrays.*float"),
        (lambda: (list(X[:, 0]), Y), "validation_data must be arrays.*float32.*np.asarray"),
        (lambda: object(), "validation_data must be arrays.*object"),
    ],
    ids=["batches", "tuple of batches", "lists", "list of an array's rows", "object"],
)
def test_validation_data_are_refused_before_a_step_is_spent(given, match):
    model = _model()
    with pytest.raises(TypeError, match=match):
        model.fit(_batches(), validation_data=given(), verbose=0)
    assert model.ledger.steps == 0


def test_validation_data_that_keras_takes():
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(B)
    several = (X, Y), [X, Y], (X, Y, np.ones(N)), dataset, _PyBatches(), _batches().dataset
    for given in several:
        history = _model().fit(_batches(), validation_data=given, verbose=0)
        assert "val_loss" in history.history


@pytest.mark.parametrize("dtype", ["U", "S", object, "bytes"])
@pytest.mark.parametrize("how", ["validation_data", "validation_split"])
@pytest.mark.parametrize("is_column", [False, True])
def test_validation_data_of_strings(how, dtype, is_column):
    """Keras reads none of them but `str` in flat objects, and raises once an epoch is spent."""
    words = np.array(["a b", "b", "a"] * 8, "S" if dtype == "bytes" else dtype)
    words = words.astype(object) if dtype == "bytes" else words
    vectorize = keras.layers.TextVectorization(vocabulary=["a", "b"], output_mode="multi_hot")
    words = words[:, np.newaxis] if is_column else words
    inputs = keras.Input(words.shape[1:], dtype="string")
    model = dp.DPModel(inputs, keras.layers.Dense(1)(vectorize(inputs)))
    model.compile(dp.optimizers.DPSGD(0.1, clip_norm=1.0, noise_multiplier=1.0), "mse")
    given = {"validation_split": 0.5} if how == "validation_split" else {how: (words, Y[:24])}
    history = model.fit(words, Y[:24], batch_size=4, verbose=0, **given)
    assert np.isfinite(history.history["val_loss"]).all()


class _PyBatches(keras.utils.PyDataset):
    def __len__(self):
        return N // B

    def __getitem__(self, index):
        rows = slice(index * B, (index + 1) * B)
        return X[rows], Y[rows]


# Steering by raw figures.


class _OwnStopping(EarlyStopping):
    pass


class _Tracker(keras.callbacks.Callback):
    """Somebody's callback that decides by a figure."""

    monitor = "loss"


class _PublicFigure(keras.callbacks.Callback):
    private_logs = ("public_accuracy",)

    def on_epoch_end(self, epoch, logs=None):
        logs["public_accuracy"] = 0.5


def _kept(**kwargs):
    return ModelCheckpoint("never_written.keras", **kwargs)


@pytest.mark.parametrize(
    "callbacks, names",
    [
        (lambda: EarlyStopping("loss"), ["EarlyStopping (monitor='loss')"]),
        (lambda: [EarlyStopping("loss", restore_best_weights=True)], ["EarlyStopping"]),
        (lambda: [_OwnStopping("mae", mode="min")], ["_OwnStopping (monitor='mae')"]),
        (lambda: [_kept(monitor="loss", save_best_only=True)], ["ModelCheckpoint"]),
        (lambda: [ReduceLROnPlateau("loss"), EarlyStopping("mae")], ["ReduceLROn", "EarlySt"]),
        (lambda: [TerminateOnNaN()], ["TerminateOnNaN"]),
        (lambda: [_Tracker()], ["_Tracker"]),
        (lambda: CallbackList([EarlyStopping("loss")]), ["EarlyStopping"]),
        (lambda: [CallbackList([EarlyStopping("loss")])], ["EarlyStopping"]),
    ],
)
def test_steering_by_raw_figures_is_warned_of_once(callbacks, names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, given = _model(metrics=["mae"]), callbacks()
    if isinstance(given, CallbackList):
        given = CallbackList(given.callbacks, add_history=True, model=model)
    (warning,) = _warnings_of(
        lambda: model.fit(_batches(), callbacks=given, verbose=0), "Training is steered"
    )
    text = str(warning.message)
    assert all(name in text for name in names)
    assert "val_ metric on public data" in text and "'epsilon'" in text and "PrivacyBudget" in text
    assert warning.filename == __file__


@pytest.mark.representatives(4)
@pytest.mark.parametrize(
    "callbacks",
    [
        lambda: None,
        lambda: [EarlyStopping(), ReduceLROnPlateau("val_mae")],
        lambda: [_kept(monitor="val_loss", save_best_only=True)],
        lambda: [_kept(monitor="loss")],  # keeps all of them
        lambda: [EarlyStopping("epsilon", mode="max"), PrivacyReport(DELTA)],
        lambda: [EarlyStopping("v_q50", mode="max"), OptimizerReport()],
        lambda: [EarlyStopping("public_accuracy", mode="max"), _PublicFigure()],
        lambda: [CSVLogger("log.csv"), PrivacyBudget(100.0, DELTA)],
    ],
)
def test_what_steers_by_nothing_raw_draws_no_warning(callbacks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def fit():
        model = _model(metrics=["mae"])
        model.fit(_batches(), callbacks=callbacks(), validation_data=(X, Y), verbose=0)

    assert not _warnings_of(fit, "Training is steered")


def test_the_names_that_reports_log_are_those_that_they_state():
    """A figure that they log and do not state would be taken for a raw one."""
    optimizer = dp.optimizers.DPAdam(0.1, clip_norm=1.0, noise_multiplier=1.0, batch_size=B)
    reports = [PrivacyReport(DELTA), OptimizerReport(public=(X[:4], Y[:4]))]
    logged = set(_model(optimizer).fit(_batches(), callbacks=reports, verbose=0).history)
    assert len(logged) == 9

    class Monitors(keras.callbacks.Callback):
        def __init__(self, name):
            super().__init__()
            self.monitor = name

    for name in logged:
        text = _warnings_of(
            lambda name=name: dp.model.fit_arguments.warn_of_monitors([*reports, Monitors(name)]),
            "Training is steered",
        )
        assert bool(text) == (name == "loss")


# Past the plan.


def _calibrated(steps):
    optimizer = _sgd(None)
    dp.accounting.calibrate(optimizer, Sampling.poisson(N, B), steps, 2.0, DELTA)
    return _model(optimizer)


def test_training_past_the_calibrated_steps_warns_once_with_its_epsilon():
    model = _calibrated(4)
    assert not _warnings_of(lambda: model.fit(_batches(4), verbose=0), "calibrated for")
    (warning,) = _warnings_of(
        lambda: model.fit(_batches(4), epochs=2, verbose=0), "calibrated for 4 steps, for ε = 2"
    )
    stated = re.search(r"goes on to step 12: ε will be (\d+\.\d+)", str(warning.message)).group(1)
    assert float(stated) == pytest.approx(model.ledger.epsilon(DELTA), rel=1e-3)
    assert warning.filename == __file__
    assert not _warnings_of(lambda: model.fit(_batches(4), verbose=0), "calibrated for")


def test_training_on_batches_past_the_calibrated_steps_warns_once():
    model = _calibrated(2)
    model.sampling = Sampling.poisson(N, B)

    def train():
        for batch in _batches(4):
            model.train_on_batch(*batch)

    (warning,) = _warnings_of(train, "calibrated for 2 steps")
    assert "goes on to step 3" in str(warning.message)


def test_data_of_unknown_length_are_warned_of_when_they_pass_the_plan():
    model = _calibrated(3)
    data = dp.data.assume_sampling((batch for batch in _batches(5)), Sampling.poisson(N, B))
    (warning,) = _warnings_of(lambda: model.fit(data, verbose=0), "calibrated for 3 steps")
    assert "goes on to step 4" in str(warning.message)
    assert model.ledger.steps == 5


def test_an_execution_that_the_data_end_within_is_not_past_the_plan():
    """Poisson batches of 10 steps, 4 at a time: the third execution is reserved in full."""
    for planned, is_past in ((20, False), (19, True)):
        optimizer = _sgd(None)
        dp.accounting.calibrate(optimizer, Sampling.poisson(N, B), planned, 2.0, DELTA)
        model = _model(optimizer, steps_per_execution=4)
        caught = _warnings_of(
            lambda model=model: model.fit(_batches(10), epochs=2, verbose=0), "calibrated for"
        )
        assert bool(caught) == is_past and model.ledger.steps == 20


def test_a_budget_is_no_reason_to_warn_of_the_plan():
    model = _calibrated(3)
    budget = PrivacyBudget(2.0, DELTA)
    caught = _warnings_of(
        lambda: model.fit(_batches(3), epochs=2, callbacks=[budget], verbose=0), "calibrated for"
    )
    assert not caught and model.ledger.steps == 3


# Compiling, and what changes behind its back.


def test_a_private_optimizer_in_a_loss_scale_optimizer_is_to_be_passed_as_it_is():
    with pytest.raises(ValueError, match="LossScaleOptimizer skips.*Pass the DPSGD in it"):
        _model(keras.optimizers.LossScaleOptimizer(_sgd()))


@pytest.mark.parametrize("how", ["freeze", "unfreeze"])
def test_layers_frozen_since_the_first_fit_are_not_trained_on_in_silence(how):
    inputs = keras.Input((3,))
    model = dp.DPModel(inputs, layers.Dense(1)(layers.Dense(2, name="body")(inputs)))
    model.get_layer("body").trainable = how == "freeze"
    model.compile(_sgd(), "mse")
    model.fit(_batches(), verbose=0)
    before = model.get_weights()
    model.get_layer("body").trainable = how != "freeze"
    with pytest.raises(ValueError, match="frozen or unfrozen since.*[Cc]ompile"):
        model.fit(_batches(), verbose=0)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    model.compile(_sgd(), "mse")
    model.fit(_batches(), verbose=0)
    assert model.ledger.steps == 4


def test_layers_frozen_between_compile_and_the_first_fit_are_frozen():
    model = _model()
    model.get_layer("body").trainable = False
    before = model.get_layer("body").get_weights()
    model.fit(_batches(), verbose=0)
    for old, new in zip(before, model.get_layer("body").get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_layers_quantized_before_training_are_named_as_such():
    inputs = keras.Input((8,))
    model = keras.Model(inputs, layers.Dense(1)(layers.Dense(4, name="body")(inputs)))
    model.quantize("float8")  # of int8, small layers train by luck
    private = dp.make_private(model)
    private.compile(_sgd(), "mse")
    batches = dp.data.poisson_batches((np.ones((N, 8)), np.ones((N, 1))), B)
    with pytest.raises(ValueError, match="(?s)quantized.*'body': 'float8'.*Train first"):
        private.fit(batches, verbose=0)
    assert private.ledger.steps == 0


def test_the_check_of_a_quantized_model_that_fails_says_so(monkeypatch):
    def fails(*args, **kwargs):
        raise ValueError("The gradients cannot be computed.")

    monkeypatch.setattr(dp.clipping, "checked_engines", fails)
    inputs = keras.Input((8,))
    plain = keras.Model(inputs, layers.Dense(1)(layers.Dense(4, name="body")(inputs)))
    for mode, match in ((None, "^The gradients"), ("int8", "quantized.*int8.*The gradients")):
        model = keras.models.clone_model(plain)
        if mode:
            model.quantize(mode)
        private = dp.make_private(model)
        private.compile(_sgd(), "mse")
        with pytest.raises(ValueError, match=match):
            private.fit(dp.data.poisson_batches((np.ones((N, 8)), np.ones((N, 1))), B), verbose=0)
