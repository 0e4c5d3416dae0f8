"""ε during training, the budget that ends it, and the ledger's count of steps."""

import csv
import re
import warnings

import dp_accounting
import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_keras_opt as dp
from dp_keras_opt.accounting import Sampling
from dp_keras_opt.accounting.loss_distributions import LossDistributionAccountant
from dp_keras_opt.callbacks import OptimizerReport, PrivacyBudget, PrivacyReport

layers = keras.layers
N, B, SIGMA, DELTA = 24, 8, 1.0, 1e-3
X = np.random.default_rng(1).normal(size=(N, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
POISSON, SUBSETS = Sampling.poisson(N, B), Sampling.without_replacement(N, B)


def _model(noise_multiplier=SIGMA, **kwargs):
    inputs = keras.Input((3,))
    model = dp.DPModel(inputs, layers.Dense(1)(inputs))
    optimizer = dp.optimizers.DPSGD(
        0.1, clip_norm=1.0, noise_multiplier=noise_multiplier, batch_size=B
    )
    model.compile(optimizer, "mse", **kwargs)
    return model


def _batches(steps):
    """Poisson batches; their content is of no account here."""
    data = tf.data.Dataset.from_tensors((X[:B], Y[:B], dp.data.RowInfo(np.ones(B, "float32"))))
    return dp.data.assume_sampling(data.repeat(steps), POISSON)


def _epsilon(steps):
    """ε by the accountant of loss distributions itself."""
    if not steps:
        return 0.0
    event = dp_accounting.PoissonSampledDpEvent(B / N, dp_accounting.GaussianDpEvent(SIGMA))
    accountant = LossDistributionAccountant(POISSON.neighboring_relation)
    return accountant.compose(dp_accounting.SelfComposedDpEvent(event, steps)).get_epsilon(DELTA)


def _on_batch(function):
    return keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: function(batch, logs)
    )


# PrivacyReport.


def test_epsilon_in_history_is_that_of_dp_accounting():
    report = PrivacyReport(DELTA)
    assert report.epsilon == 0.0
    model = _model()
    history = model.fit(_batches(3), epochs=2, verbose=0, callbacks=[report])
    assert history.history["epsilon"] == pytest.approx([_epsilon(3), _epsilon(6)], rel=1e-9)
    history = model.fit(_batches(3), verbose=0, callbacks=report)  # of earlier fits included
    assert history.history["epsilon"] == pytest.approx([_epsilon(9)], rel=1e-9)
    assert report.epsilon == pytest.approx(_epsilon(9), rel=1e-9)


def test_a_report_that_is_new_counts_the_earlier_steps_too():
    model = _model()
    model.fit(_batches(3), verbose=0)
    report = PrivacyReport(DELTA)
    model.fit(_batches(2), verbose=0, callbacks=[report])
    assert report.epsilon == pytest.approx(_epsilon(5), rel=1e-9)


def test_loggers_listed_before_the_report_see_epsilon(tmp_path):
    seen = []
    path = tmp_path / "log.csv"
    callbacks = [
        keras.callbacks.CSVLogger(str(path)),
        _on_batch(lambda batch, logs: seen.append(logs["epsilon"])),
        PrivacyReport(DELTA, every=1),
    ]
    order = list(callbacks)
    _model().fit(_batches(3), epochs=2, verbose=0, callbacks=callbacks)
    with path.open() as file:
        rows = list(csv.DictReader(file))
    written = [float(row["epsilon"]) for row in rows]
    assert written == pytest.approx([_epsilon(3), _epsilon(6)], rel=1e-6)
    assert seen == pytest.approx([_epsilon(steps) for steps in range(1, 7)], rel=1e-6)
    assert callbacks == order  # the user's list is left alone


def _of_epochs(folder):
    """What TensorBoard's callback wrote at epoch ends: {tag: values}, read from its files."""
    values = {}
    for file in sorted((folder / "train").glob("events*")):
        for record in tf.data.TFRecordDataset(str(file)):
            for value in tf.compat.v1.Event.FromString(record.numpy()).summary.value:
                if value.tag.startswith("epoch_") and value.HasField("tensor"):
                    values.setdefault(value.tag, []).append(float(tf.make_ndarray(value.tensor)))
    return values


def test_tensorboard_files_hold_what_the_reports_write(tmp_path):
    report = OptimizerReport(public=(X[B:], Y[B:]))
    callbacks = [keras.callbacks.TensorBoard(str(tmp_path)), PrivacyReport(DELTA), report]
    history = _model().fit(_batches(3), epochs=2, verbose=0, callbacks=callbacks).history
    written = _of_epochs(tmp_path)
    assert written["epoch_epsilon"] == pytest.approx([_epsilon(3), _epsilon(6)], rel=1e-5)
    for name in ("gradient_norm", "noise_to_signal", "public_clip_fraction"):
        assert written[f"epoch_{name}"] == pytest.approx(history[name], rel=1e-5)
    # Of the private examples there is no raw count.
    assert [tag for tag in written if "clip" in tag] == ["epoch_public_clip_fraction"]


def test_a_tracker_is_given_released_figures_by_a_lambda():
    """As docs/how_to/logging.md has it for MLflow."""
    tracked = []
    to_tracker = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: tracked.append((epoch, logs["epsilon"]))
    )
    _model().fit(_batches(3), epochs=2, verbose=0, callbacks=[to_tracker, PrivacyReport(DELTA)])
    assert [epoch for epoch, _ in tracked] == [0, 1]
    assert [figure for _, figure in tracked] == pytest.approx([_epsilon(3), _epsilon(6)])


def test_epsilon_in_the_progress_bar(capsys):
    keras.utils.disable_interactive_logging()
    try:
        keras.utils.enable_interactive_logging()
        _model().fit(_batches(2), verbose=2, callbacks=[PrivacyReport(DELTA)])
    finally:
        keras.utils.enable_interactive_logging()
    assert f"epsilon: {_epsilon(2):.4f}" in capsys.readouterr().out


@pytest.mark.parametrize("at_once, shown", [(1, [0, 0, 3, 3, 3, 6, 6]), (2, [0, 4, 6, 6])])
def test_every_k_batches(at_once, shown):
    """Between reports the latest figure is shown; executions of several steps jump over none."""
    seen = []
    model = _model(steps_per_execution=at_once)
    callbacks = [
        PrivacyReport(DELTA, every=3),
        _on_batch(lambda batch, logs: seen.append(logs["epsilon"])),
    ]
    model.fit(_batches(7), verbose=0, callbacks=callbacks)
    assert seen == pytest.approx([_epsilon(steps) for steps in shown], rel=1e-9)


def test_without_every_only_epochs_are_reported():
    seen = []
    callbacks = [PrivacyReport(DELTA), _on_batch(lambda batch, logs: seen.append(set(logs)))]
    _model().fit(_batches(2), verbose=0, callbacks=callbacks)
    assert seen == [{"loss"}] * 2


def test_statement():
    report = PrivacyReport(DELTA, sampling=POISSON)
    with pytest.raises(ValueError, match="pass the report to fit first"):
        report.statement()
    _model().fit(_batches(3), verbose=0, callbacks=[report])
    text = report.statement()
    for part in (f"{_epsilon(3):.3g}", "0.001", "Poisson", str(N), "3 "):
        assert part in text
    assert "infinit" not in text.lower()


def test_training_without_noise_says_so():
    report = PrivacyReport(DELTA)
    history = _model(0.0).fit(_batches(2), verbose=0, callbacks=[report])
    assert history.history["epsilon"] == [np.inf]


def test_an_accountant_by_name():
    report = PrivacyReport(DELTA, accountant="rdp")
    model = _model()
    model.fit(_batches(2), verbose=0, callbacks=[report])
    assert 0 < _epsilon(2) < report.epsilon
    assert report.epsilon == model.ledger.epsilon(DELTA, "rdp")


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_every_out_of_range(every):
    with pytest.raises(ValueError, match="every must be an integer >= 1"):
        PrivacyReport(DELTA, every=every)


@pytest.mark.parametrize("callback", [PrivacyReport(DELTA), PrivacyBudget(1.0, DELTA)])
def test_a_model_that_is_not_private_is_refused(callback):
    inputs = keras.Input((3,))
    model = keras.Model(inputs, layers.Dense(1)(inputs))
    model.compile("sgd", "mse")
    with pytest.raises(TypeError, match="needs a dp_keras_opt.DPModel"):
        model.fit(X, Y, verbose=0, callbacks=[callback])


def test_sampling_other_than_the_data_is_refused():
    report = PrivacyReport(DELTA, sampling=Sampling.poisson(2 * N, B))
    model = _model()
    with pytest.raises(ValueError, match="PrivacyReport accounts"):
        model.fit(_batches(3), verbose=0, callbacks=[report])
    assert model.ledger.steps == 0


# PrivacyBudget.


def _budget_for(steps):
    """A budget that `steps` steps meet and one more exceeds."""
    budget = (_epsilon(steps) + _epsilon(steps + 1)) / 2
    assert _epsilon(steps) <= budget < _epsilon(steps + 1)
    return budget


def _assert_steps(model, steps):
    assert model.ledger.steps == int(model.optimizer.iterations) == steps


@pytest.mark.parametrize("affordable", [1, 4, 6])
def test_the_budget_stops_at_the_last_affordable_step(affordable):
    """1: within an epoch; 4: in the second one; 6: at the end of one."""
    model = _model()
    callbacks = [PrivacyReport(DELTA), PrivacyBudget(_budget_for(affordable), DELTA)]
    history = model.fit(_batches(3), epochs=4, verbose=0, callbacks=callbacks)
    _assert_steps(model, affordable)
    assert len(history.epoch) == -(-affordable // 3)
    assert history.history["epsilon"][-1] == pytest.approx(_epsilon(affordable))
    assert all(loss > 0 for loss in history.history["loss"])  # no epoch without a step


def test_the_budget_holds_over_several_fits_and_for_single_steps():
    model = _model()
    budget = PrivacyBudget(_budget_for(5), DELTA)
    model.fit(_batches(2), verbose=0, callbacks=[budget])
    _assert_steps(model, 2)
    model.fit(_batches(2), verbose=0)  # it stays on the model
    _assert_steps(model, 4)
    model.sampling = _batches(2).sampling
    model.train_on_batch(X, Y)
    before = model.get_weights()
    with pytest.raises(dp.PrivacyBudgetError, match="exceed the privacy budget ε = "):
        model.train_on_batch(X, Y)
    with pytest.warns(UserWarning, match="allows no further step"):
        model.fit(_batches(2), verbose=0)
    _assert_steps(model, 5)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    model.fit(_batches(9), verbose=0, callbacks=[PrivacyBudget(_budget_for(7), DELTA)])
    _assert_steps(model, 7)  # a new budget replaces it


@pytest.mark.parametrize(
    "epochs, initial, ran, planned", [(3, 0, 4, 9), (2, 0, 4, 6), (5, 3, 4, 6)]
)
def test_an_end_before_the_last_step_is_said(epochs, initial, ran, planned):
    model = _model()
    budget = PrivacyBudget(_budget_for(4), DELTA)
    words = f"{budget} allows no further step: training stopped after {ran} of {planned} steps"
    with pytest.warns(UserWarning, match=re.escape(words)):
        model.fit(_batches(3), epochs=epochs, initial_epoch=initial, verbose=0, callbacks=[budget])
    _assert_steps(model, ran)


@pytest.mark.parametrize("steps, affordable", [(2, 4), (2, 9)])
def test_the_planned_end_is_no_early_one(steps, affordable):
    model = _model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        budget = PrivacyBudget(_budget_for(affordable), DELTA)
        model.fit(_batches(steps), epochs=2, verbose=0, callbacks=[budget])
    _assert_steps(model, 4)


def test_an_early_end_is_said_where_the_length_is_not_known():
    budget = PrivacyBudget(_budget_for(2), DELTA)
    with pytest.warns(UserWarning, match="training stopped after 2 steps"):
        _model().fit(_unknown_length(3, POISSON), verbose=0, callbacks=[budget])


@pytest.mark.parametrize(
    "arguments, named",
    [
        ((-1.0, DELTA), "epsilon"),
        ((float("nan"), DELTA), "epsilon"),
        (("2", DELTA), "epsilon"),
        ((1.0, 1.0), "delta"),
        ((1.0, -1e-6), "delta"),
        ((1.0, DELTA, "moments"), "accountant"),
    ],
)
def test_what_cannot_be_a_budget_is_refused_at_once(arguments, named):
    with pytest.raises(ValueError, match=f"{named} must be"):
        PrivacyBudget(*arguments)


@pytest.mark.parametrize("affordable, run", [(8, 8), (9, 8), (7, 4), (4, 4)])
def test_the_budget_with_several_steps_at_once(affordable, run):
    """Four steps run together or not at all."""
    model = _model(steps_per_execution=4)
    budget = PrivacyBudget(_budget_for(affordable), DELTA)
    model.fit(_batches(16), verbose=0, callbacks=[budget])
    _assert_steps(model, run)


def test_a_budget_that_allows_no_step_of_a_new_model_is_an_error():
    model = _model(metrics=["mae"])
    before = model.get_weights()
    callbacks = [PrivacyReport(DELTA), PrivacyBudget(_budget_for(0), DELTA)]
    with pytest.raises(dp.PrivacyBudgetError, match="not even the first 1 step.*Raise epsilon"):
        model.fit(_batches(3), epochs=3, verbose=0, callbacks=callbacks)
    _assert_steps(model, 0)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    model.fit(_batches(3), verbose=0, callbacks=[PrivacyBudget(_budget_for(2), DELTA)])
    _assert_steps(model, 2)


def test_a_budget_that_allows_no_whole_execution_of_a_new_model_is_an_error():
    model = _model(steps_per_execution=4)
    with pytest.raises(dp.PrivacyBudgetError, match="not even the first 4 step"):
        model.fit(_batches(8), verbose=0, callbacks=[PrivacyBudget(_budget_for(3), DELTA)])


def test_a_budget_that_allows_no_further_step_ends_cleanly():
    ends = []
    model = _model(metrics=["mae"])
    model.fit(_batches(3), verbose=0)
    before = model.get_weights()
    callbacks = [
        PrivacyReport(DELTA),
        PrivacyBudget(_budget_for(3), DELTA),
        keras.callbacks.LambdaCallback(on_train_end=lambda logs: ends.append(logs)),
    ]
    with pytest.warns(UserWarning, match="allows no further step") as caught:
        history = model.fit(
            _batches(3), epochs=3, verbose=0, callbacks=callbacks, validation_data=(X, Y)
        )
    assert {w.filename for w in caught if "allows no" in str(w.message)} == {__file__}
    _assert_steps(model, 3)
    assert history.history == {}  # not a loss of 0
    assert ends == [{}]
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    figures = model.evaluate(X, Y, verbose=0, return_dict=True)
    assert set(figures) == {"loss", "mae"} and figures["loss"] > 0


def test_the_budget_counts_what_a_loaded_model_has_spent(tmp_path):
    model = _model()
    model.fit(_batches(4), verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    loaded.fit(_batches(9), verbose=0, callbacks=[PrivacyBudget(_budget_for(6), DELTA)])
    _assert_steps(loaded, 6)


def test_the_budget_with_validation_data():
    model = _model(metrics=["mae"])
    budget = PrivacyBudget(_budget_for(4), DELTA)
    history = model.fit(
        _batches(3), epochs=3, verbose=0, callbacks=[budget], validation_data=(X, Y)
    )
    _assert_steps(model, 4)
    assert len(history.history["val_mae"]) == 2


# The ledger's count is that of the optimizer, however training ends.


def _unknown_length(steps, sampling=SUBSETS):
    spec = tf.TensorSpec([B, 3], tf.float32), tf.TensorSpec([B, 1], tf.float32)
    elements = [(X[:B], Y[:B])] * steps
    data = tf.data.Dataset.from_generator(lambda: iter(elements), output_signature=spec)
    return dp.data.assume_sampling(data, sampling)


@pytest.mark.representatives(5)
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}, {"jit_compile": True}],
                         ids=["graph", "eager", "xla"])  # fmt: skip
@pytest.mark.parametrize("at_once", [1, 2, 4])
def test_data_that_end_early(at_once, options):
    """The end is found out by asking for one more batch, which is no step."""
    model = _model(steps_per_execution=at_once, **options)
    model.fit(_unknown_length(3), epochs=2, verbose=0)
    _assert_steps(model, 6)
    model.fit(_unknown_length(3), steps_per_epoch=20, verbose=0)
    _assert_steps(model, 9)
    model.fit(_batches(4), verbose=0)
    _assert_steps(model, 13)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_a_noise_schedule_stays_in_step_where_data_end_early():
    """A counter that ran ahead would take less noise than is accounted."""
    inputs = keras.Input((3,))
    model = dp.DPModel(inputs, layers.Dense(1)(inputs))
    optimizer = dp.optimizers.DPSGD(
        0.1, clip_norm=1.0, noise_multiplier=1.0, batch_size=B, noise_schedule=[3.0] * 6 + [0.1]
    )
    model.compile(optimizer, "mse")
    model.fit(_unknown_length(3), epochs=2, verbose=0)
    _assert_steps(model, 6)
    (segment,) = model.ledger.segments
    assert segment.last_step == 6


@pytest.mark.representatives(4)
@pytest.mark.parametrize("at_once", [1, 2])
@pytest.mark.parametrize("hook", ["on_train_batch_begin", "on_train_batch_end", "on_epoch_end"])
def test_an_interrupt_in_a_callback(hook, at_once):
    def interrupt(index, logs):
        if hook == "on_epoch_end" or index >= 2:
            raise KeyboardInterrupt

    model = _model(steps_per_execution=at_once)
    callback = keras.callbacks.Callback()
    setattr(callback, hook, lambda index, logs=None: interrupt(index, logs))
    with pytest.raises(KeyboardInterrupt):
        model.fit(_batches(6), verbose=0, callbacks=[callback])
    ran = {"on_train_batch_begin": 2, "on_train_batch_end": 3, "on_epoch_end": 6}[hook]
    ran = -(-ran // at_once) * at_once
    _assert_steps(model, ran)
    model.fit(_batches(3), verbose=0)
    _assert_steps(model, ran + 3)


def test_stopping_within_an_epoch():
    model = _model()

    def stop(batch, logs):
        model.stop_training = batch == 1

    model.fit(_batches(5), epochs=3, verbose=0, callbacks=[_on_batch(stop)])
    _assert_steps(model, 2)


def test_a_crash_within_a_step_is_counted():
    """It may have released something: over-counted, never under-counted."""
    model = _model(run_eagerly=True)
    model.fit(_batches(2), verbose=0)
    update, model.optimizer.update = model.optimizer.update, None
    with pytest.raises(TypeError):
        model.fit(_batches(2), verbose=0)
    model.optimizer.update = update
    model.fit(_batches(2), verbose=0)
    assert int(model.optimizer.iterations) == 4
    assert model.ledger.steps == 5


# What a callback or a user might change between the steps.


def _optimizer(**kwargs):
    kwargs = {"noise_multiplier": SIGMA} | kwargs
    return dp.optimizers.DPSGD(0.1, clip_norm=1.0, batch_size=B, **kwargs)


class _Each(keras.callbacks.Callback):
    def __init__(self, action):
        super().__init__()
        self.action = action

    def on_epoch_begin(self, epoch, logs=None):
        self.action(self.model)


def test_resetting_the_step_counter_does_not_hide_steps():
    model = _model()
    model.compile(_optimizer(), "mse", steps_per_execution=5)
    reset = _Each(lambda model: model.optimizer.iterations.assign(0))
    model.fit(_batches(10), epochs=3, callbacks=[reset], verbose=0)
    assert model.ledger.steps == 30


def test_a_schedule_and_a_reset_counter_are_refused():
    model = _model()
    model.compile(_optimizer(noise_schedule=[0.5] * 10 + [8.0] * 20), "mse")
    reset = _Each(lambda model: model.optimizer.iterations.assign(0))
    with pytest.raises(ValueError, match="step counter"):
        model.fit(_batches(10), epochs=2, callbacks=[reset], verbose=0)


def test_what_the_compiled_step_would_not_notice_is_refused():
    model = _model()
    model.compile(_optimizer(), "mse", steps_per_execution=5)
    model.fit(_batches(10), verbose=0)
    model.steps_per_execution = 1
    with pytest.raises(ValueError, match="compiling again"):
        model.fit(_batches(10), verbose=0)
    model.steps_per_execution = 5
    model.optimizer = _optimizer()
    with pytest.raises(ValueError, match="compiling again"):
        model.fit(_batches(10), verbose=0)
