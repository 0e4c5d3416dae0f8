"""`fit` finds the noise that it was left to find: for exactly its steps, and no step beyond."""

import contextlib
import itertools
import math
import warnings

import dp_accounting
import keras
import numpy as np
import pytest
import tensorflow as tf
from dp_accounting import pld, rdp

import dp_keras_opt as dp
from dp_keras_opt.accounting import Ledger, Sampling
from dp_keras_opt.callbacks import PrivacyBudget, PrivacyReport

N, B, DELTA, EPSILON = 60, 12, 1e-4, 2.0
RNG = np.random.default_rng(3)
X = RNG.normal(size=(N, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def _model(optimizer=None, **kwargs):
    inputs = keras.Input((3,))
    model = dp.DPModel(inputs, keras.layers.Dense(1)(inputs))
    model.compile(optimizer or _optimizer(**kwargs), "mse", run_eagerly=True)
    return model


def _optimizer(**kwargs):
    return dp.optimizers.DPSGD(0.1, **{"clip_norm": 1.0, "batch_size": B} | kwargs)


def _budget(epsilon=EPSILON, accountant="rdp"):
    return PrivacyBudget(epsilon, DELTA, accountant)


def _poisson(steps=5):
    return dp.data.poisson_batches((X, Y), B, steps)


def _stated(sampling, steps):
    """Batches of a sampling that is stated and not done: what is tested is the accounting."""
    data = tf.data.Dataset.from_tensor_slices((X[:B], Y[:B])).batch(B).repeat(steps)
    return dp.data.assume_sampling(data, sampling)


KINDS = {
    "poisson": (Sampling.poisson(N, B), 5),
    "balls in bins": (Sampling.balls_in_bins(N, B), 5),
    "poisson, zero_out": (Sampling.poisson(N, B, adjacency="zero_out"), 5),
    "replace_one": (Sampling.poisson(N, B, adjacency="replace_one"), 5),
    "without replacement": (Sampling.without_replacement(N, B), 5),
    "shuffled": (Sampling.shuffled(N, B), 5),
    "fixed order": (Sampling.fixed_order(N, B), 5),
    "cyclic": (Sampling.cyclic_poisson(N, 6, groups=2), 10),
    "as poisson": (Sampling.shuffled_accounted_as_poisson(N, B), 5),
}


@pytest.mark.representatives(8)
@pytest.mark.parametrize("accountant", ["rdp", "pld"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_step_runs_under_the_budget_and_no_more_noise_than_it_needs(kind, accountant):
    sampling, steps = KINDS[kind]
    if accountant == "pld" and kind == "without replacement":
        pytest.skip("PLD does not price subsets")
    if accountant == "rdp" and kind == "replace_one":
        pytest.skip("RDP does not price Poisson sampling under replace_one")
    model = _model(batch_size=sampling.batch_size)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # none says that the budget ended it
        budget = _budget(accountant=accountant)
        model.fit(_stated(sampling, steps), epochs=2, verbose=0, callbacks=[budget])
    assert model.ledger.steps == 2 * steps
    assert model.ledger.epsilon(DELTA, accountant) <= EPSILON
    multiplier = model.optimizer.noise_multiplier
    less = _optimizer(batch_size=sampling.batch_size, noise_multiplier=multiplier * (1 - 1e-3))
    assert Ledger.of(less, sampling, 2 * steps).epsilon(DELTA, accountant) > EPSILON
    model.stop_training = False
    with pytest.warns(UserWarning, match="allows no further step"):
        model.fit(_stated(sampling, steps), verbose=0)  # the budget holds on


def test_pure_epsilon_is_found_for_delta_0():
    model = _model(noise="laplace")
    full = _stated(Sampling.full(B), 3)
    model.fit(full, epochs=2, verbose=0, callbacks=[PrivacyBudget(EPSILON, 0.0, "pure")])
    assert model.ledger.steps == 6
    assert model.optimizer.noise_multiplier == pytest.approx(6 / EPSILON, rel=1e-3)


@pytest.mark.parametrize("accountant", [rdp.RdpAccountant, pld.PLDAccountant])
def test_the_noise_is_that_of_dp_accounting(accountant):
    name = "rdp" if accountant is rdp.RdpAccountant else "pld"
    model = _model()
    model.fit(_poisson(), epochs=3, verbose=0, callbacks=[_budget(accountant=name)])
    event = dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(
            B / N, dp_accounting.GaussianDpEvent(model.optimizer.noise_multiplier)
        ),
        15,
    )
    assert accountant().compose(event).get_epsilon(DELTA) == pytest.approx(EPSILON, rel=2e-3)


def test_arrays_are_planned_by_their_own_epochs():
    model = _model()
    with pytest.warns(UserWarning, match="accounted as shuffled"):
        model.fit(X, Y, epochs=3, shuffle=False, verbose=0, callbacks=[_budget()])
    assert model.ledger.steps == 15
    assert model.optimizer.plan.sampling == Sampling.shuffled(N, B)
    once = dp_accounting.GaussianDpEvent(model.optimizer.noise_multiplier / 2)  # replace_one: 2C
    event = dp_accounting.SelfComposedDpEvent(once, 3)
    assert rdp.RdpAccountant().compose(event).get_epsilon(DELTA) == pytest.approx(EPSILON, rel=2e-3)


def test_it_says_what_it_found_and_later_what_is_left(capsys):
    model = _model()
    model.fit(_poisson(), epochs=2, verbose=2, callbacks=[_budget()])
    multiplier = model.optimizer.noise_multiplier
    found = f"noise_multiplier = {multiplier:.5g}: the least for 10 steps within ε = 2"
    assert found in capsys.readouterr().out
    with pytest.warns(UserWarning, match="stopped after 0 of 10 steps"):
        model.fit(_poisson(), epochs=2, verbose=2, callbacks=[_budget()])
    said = capsys.readouterr().out
    assert f"noise_multiplier = {multiplier:.5g}, as before." in said
    assert "leaves 0 steps" in said
    assert model.optimizer.noise_multiplier == multiplier
    model.fit(_poisson(), epochs=1, verbose=2, callbacks=[_budget(2 * EPSILON)])
    assert "leaves 0 steps" not in capsys.readouterr().out
    assert model.ledger.steps == 15


def test_it_says_nothing_where_fit_is_silent(capsys):
    _model().fit(_poisson(), verbose=0, callbacks=[_budget()])
    assert capsys.readouterr().out == ""


def test_a_new_optimizer_is_planned_from_what_is_left():
    model = _model()
    model.fit(_poisson(), verbose=0, callbacks=[_budget()])
    first = model.optimizer.noise_multiplier
    model.compile(_optimizer(), "mse", run_eagerly=True)
    model.fit(_poisson(), verbose=0, callbacks=[_budget(1.1 * EPSILON)])
    assert model.ledger.steps == 10
    assert 1.09 * EPSILON < model.ledger.epsilon(DELTA, "rdp") <= 1.1 * EPSILON
    assert model.optimizer.noise_multiplier > first
    model.compile(_optimizer(), "mse", run_eagerly=True)
    with pytest.raises(ValueError, match="spent already"):
        model.fit(_poisson(), verbose=0, callbacks=[_budget(1.1 * EPSILON)])


class _Crash(keras.callbacks.Callback):
    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            raise KeyboardInterrupt


def _fit_with_ledger(tmp_path, crash=None, accountant="rdp", **kwargs):
    """What a script does, run again after it was interrupted."""
    model = _model()
    model.ledger = Ledger(tmp_path / "spent.jsonl")
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    callbacks = [
        backup,
        _budget(accountant=accountant),
        *([] if crash is None else [_Crash(crash)]),
    ]
    try:
        model.fit(_poisson(), epochs=4, verbose=0, callbacks=callbacks, **kwargs)
    except KeyboardInterrupt:
        assert crash is not None
    model.ledger.sync()
    return model


def test_a_script_that_is_run_again_goes_on_with_its_plan(tmp_path, capsys):
    interrupted = _fit_with_ledger(tmp_path, crash=2)
    assert interrupted.ledger.steps == 10
    interrupted.ledger.unlock()
    resumed = _fit_with_ledger(tmp_path)
    assert resumed.optimizer.noise_multiplier == interrupted.optimizer.noise_multiplier
    assert resumed.ledger.steps == 20
    assert 0.99 * EPSILON < resumed.ledger.epsilon(DELTA, "rdp") <= EPSILON
    assert [segment.plan.steps for segment in resumed.ledger.segments] == [20, 20]


@pytest.mark.parametrize("planned", [True, False])
def test_a_budget_that_a_resumed_job_spends_has_not_stopped_it(planned, tmp_path, recwarn):
    """Steps that a backup brought were missed: "stopped after 10 of 20 steps"."""
    for crash in (2, None):
        model = _model(**({} if planned else {"noise_multiplier": 2.0}))
        sampling = _poisson().sampling
        spent = EPSILON if planned else Ledger.of(model.optimizer, sampling, 20).epsilon(DELTA)
        callbacks = [
            keras.callbacks.BackupAndRestore(tmp_path / "backup"),
            PrivacyBudget(spent * (1 + 1e-6), DELTA),
            *([] if crash is None else [_Crash(crash)]),
        ]
        with contextlib.suppress(KeyboardInterrupt):
            model.fit(_poisson(), epochs=4, verbose=0, callbacks=callbacks)
    assert model.ledger.steps == 20 == int(model.optimizer.iterations)
    assert not [w for w in recwarn if "stopped after" in str(w.message)]


def test_a_plan_of_when_rdp_was_the_default_is_gone_on_with(tmp_path):
    interrupted = _fit_with_ledger(tmp_path, crash=2)
    interrupted.ledger.unlock()
    resumed = _fit_with_ledger(tmp_path, accountant="auto")
    assert resumed.optimizer.noise_multiplier == interrupted.optimizer.noise_multiplier
    assert resumed.ledger.steps == 20
    assert [segment.plan.accountant for segment in resumed.ledger.segments] == ["rdp"] * 2
    assert resumed.ledger.epsilon(DELTA) < 0.99 * EPSILON


def test_a_plan_that_is_done_is_not_gone_on_with(tmp_path):
    done = _fit_with_ledger(tmp_path)
    done.ledger.unlock()
    with pytest.raises(ValueError, match="spent already"):
        _fit_with_ledger(tmp_path)


@pytest.mark.parametrize("change", ["epsilon", "noise", "steps"])
def test_another_plan_is_found_anew_from_what_is_left(change, tmp_path):
    first = _fit_with_ledger(tmp_path, crash=1)
    again = _model(noise_schedule=[1.0] * 20) if change == "noise" else _model()
    again.ledger = Ledger.from_json(first.ledger.to_json())
    epsilon = 3.0 if change == "epsilon" else EPSILON
    epochs = 5 if change == "steps" else 4
    again.fit(_poisson(), epochs=epochs, verbose=0, callbacks=[_budget(epsilon)])
    assert again.optimizer.noise_multiplier != first.optimizer.noise_multiplier
    assert again.ledger.steps == 5 + 5 * epochs
    assert again.ledger.epsilon(DELTA, "rdp") <= epsilon


def test_a_loaded_model_goes_on_with_its_noise(tmp_path):
    model = _model()
    model.fit(_poisson(), epochs=4, verbose=0, callbacks=[_budget(), _Stop(2)])
    assert model.ledger.steps == 10
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.noise_multiplier == model.optimizer.noise_multiplier
    assert loaded.optimizer.plan == model.optimizer.plan
    loaded.fit(_poisson(), epochs=4, initial_epoch=2, verbose=0, callbacks=[_budget()])
    assert loaded.ledger.steps == 20
    assert loaded.ledger.epsilon(DELTA, "rdp") <= EPSILON


class _Stop(keras.callbacks.Callback):
    def __init__(self, epochs):
        super().__init__()
        self.epochs = epochs

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = epoch + 1 == self.epochs


def test_without_a_budget_the_error_says_what_to_do():
    with pytest.raises(ValueError, match="PrivacyBudget.*calibrate"):
        _model().fit(_poisson(), verbose=0)
    with pytest.raises(ValueError, match="noise_multiplier is not set"):
        _model().fit(_poisson(), verbose=0, callbacks=[_budget(math.inf)])


def test_batches_without_a_length_need_steps_per_epoch():
    data = tf.data.Dataset.from_tensors((X[:B], Y[:B])).repeat(7).filter(lambda *_: True)
    batches = dp.data.assume_sampling(data, Sampling.poisson(N, B))
    with pytest.raises(ValueError, match="Pass steps_per_epoch to fit"):
        _model().fit(batches, verbose=0, callbacks=[_budget()])
    model = _model()
    model.fit(batches, steps_per_epoch=3, epochs=2, verbose=0, callbacks=[_budget()])
    assert model.ledger.steps == 6
    assert model.optimizer.plan.steps == 6


def test_train_on_batch_finds_no_noise():
    model = _model()
    model.sampling = Sampling.poisson(N, B)
    with pytest.raises(ValueError, match="noise_multiplier is not set"):
        model.train_on_batch(X[:B], Y[:B])


def test_the_batch_size_is_that_of_the_data():
    model = _model(batch_size=None)
    model.fit(_poisson(), verbose=0, callbacks=[_budget()])
    assert model.optimizer.batch_size == B
    model = _model(batch_size=None)
    with pytest.warns(UserWarning, match="balls in bins"):
        model.fit(X, Y, verbose=0, callbacks=[_budget()])
    assert model.optimizer.batch_size == 32  # as in Keras


def test_what_cannot_be_settled_leaves_the_optimizer_as_it_was():
    model = _model(batch_size=None)
    with pytest.raises(ValueError, match="noise_multiplier is not set"):
        model.fit(_poisson(), verbose=0)
    assert model.optimizer.batch_size is None
    other = dp.data.poisson_batches((X, Y), 10, 4)
    model.fit(other, verbose=0, callbacks=[_budget()])
    assert model.optimizer.batch_size == 10


def test_a_batch_size_that_contradicts_the_data_raises():
    with pytest.raises(ValueError, match="divides by batch_size=11"):
        _model(batch_size=11).fit(_poisson(), verbose=0, callbacks=[_budget()])


def test_a_report_takes_delta_from_the_budget():
    model, report = _model(), PrivacyReport()
    history = model.fit(_poisson(), verbose=0, callbacks=[report, _budget()])
    assert report.delta == DELTA
    assert report.epsilon == model.ledger.epsilon(DELTA) == history.history["epsilon"][-1]
    with pytest.raises(ValueError, match="PrivacyReport needs a delta"):
        _model(noise_multiplier=1.0).fit(_poisson(), verbose=0, callbacks=[PrivacyReport()])


def test_a_search_by_keras_tuner_is_warned_of():
    of_tuner = type("SaveBestEpoch", (keras.callbacks.Callback,), {"__module__": "keras_tuner.x"})
    with pytest.warns(UserWarning, match=r"n times ε.*tuning\.tune"):
        _model().fit(_poisson(), verbose=0, callbacks=[of_tuner(), _budget()])


@pytest.mark.parametrize("steps_at_once", [2, 5])
def test_several_steps_at_once_are_all_planned(steps_at_once):
    inputs = keras.Input((3,))
    model = dp.DPModel(inputs, keras.layers.Dense(1)(inputs))
    model.compile(_optimizer(), "mse", steps_per_execution=steps_at_once)
    model.fit(_poisson(), epochs=2, verbose=0, callbacks=[_budget()])
    assert model.ledger.steps == 10
    assert model.optimizer.plan.steps == (11 if steps_at_once == 2 else 10)
    assert 0.95 * EPSILON < model.ledger.epsilon(DELTA, "rdp") <= EPSILON


@pytest.mark.parametrize("noise", ["BandedMatrix", "TreeAggregation", "SquareRootFactorization"])
def test_a_mechanism_without_steps_covers_those_of_the_run(noise):
    mechanism = getattr(dp.noise, noise)
    kwargs = {} if noise == "TreeAggregation" else {"bands": 5}
    model = _model(noise=mechanism(**kwargs))
    batches = dp.data.fixed_order_epochs((X, Y), B)
    model.fit(batches, epochs=3, verbose=0, callbacks=[_budget()])
    assert model.optimizer.noise.steps == 15
    assert model.optimizer.noise == mechanism(steps=15, **kwargs)
    assert model.ledger.steps == 15
    assert 0.99 * EPSILON < model.ledger.epsilon(DELTA, "rdp") <= EPSILON


def test_the_noise_that_is_drawn_is_that_of_the_plan():
    """120,000 draws, so that an error of 2% has a probability below 1e-20; 2/3 and 3/2 are seen."""
    inputs = keras.Input((1500,))
    model = dp.DPModel(inputs, keras.layers.Dense(2)(inputs))
    model.compile(_optimizer(), "mse")
    x = np.zeros((N, 1500), "float32")
    batches = dp.data.poisson_batches((x, np.zeros((N, 2), "float32")), B, 4)
    record = _Recorded(model)
    model.fit(batches, epochs=10, verbose=0, callbacks=[_budget(), record])
    std = np.std(record.steps)
    expected = model.optimizer.noise_multiplier / B
    assert std == pytest.approx(expected, rel=0.02)


class _Recorded(keras.callbacks.Callback):
    """The steps of SGD on data whose gradients are 0, in units of the learning rate."""

    def __init__(self, model):
        super().__init__()
        self.steps, self._last = [], model.get_weights()[0]

    def on_train_batch_end(self, batch, logs=None):
        now = self.model.get_weights()[0]
        self.steps.append((now - self._last) / 0.1)
        self._last = now


# What a reviewer tried.


def test_a_sampling_that_is_stated_again_begins_a_new_pass():
    """Keras skips to assign what getattr already gives; the four steps would be one pass."""
    endless = ((X[:B], Y[:B]) for _ in itertools.count())
    batches = dp.data.assume_sampling(endless, Sampling.shuffled(N, B))
    model, given = _model(noise_multiplier=5.0), iter(batches)
    model.sampling = batches.sampling
    for _ in range(3):
        model.train_on_batch(*next(given))
    model.sampling = model.sampling
    model.train_on_batch(*next(given))
    model.sampling = batches.sampling
    model.train_on_batch(*next(given))
    assert [segment.steps for segment in model.ledger.segments] == [3, 1, 1]
    three = rdp.RdpAccountant().compose(dp_accounting.GaussianDpEvent(2.5), 3)
    assert model.ledger.epsilon(DELTA, "rdp") == pytest.approx(three.get_epsilon(DELTA))


@pytest.mark.parametrize(
    "left_open",
    [{"noise": dp.noise.BandedMatrix(bands=2)},
     {"noise_schedule": dp.noise.schedules.from_function(lambda t: 1.0)}],
)  # fmt: skip
def test_what_is_left_open_enters_no_ledger(left_open, tmp_path):
    model = _model(noise_multiplier=1.0, **left_open)
    model.ledger = Ledger(tmp_path / "spent.jsonl")
    model.sampling = Sampling.fixed_order(N, B)
    with pytest.raises(ValueError, match="does not know yet for how many steps"):
        model.train_on_batch(X[:B], Y[:B])
    with pytest.raises(ValueError, match="does not know yet for how many steps"):
        Ledger.of(model.optimizer, model.sampling, 5)
    assert model.ledger.segments == () and model.ledger.epsilon(DELTA) == 0
    model.fit(dp.data.fixed_order_epochs((X, Y), B), verbose=0)
    assert model.ledger.steps == 5


def test_numbers_of_numpy_are_taken(tmp_path):
    model = _model()
    model.ledger = Ledger(tmp_path / "spent.jsonl")
    budget = PrivacyBudget(np.float32(EPSILON), np.float32(DELTA))
    model.fit(_poisson(), verbose=0, callbacks=[budget])
    model.save(tmp_path / "model.keras")
    assert keras.models.load_model(tmp_path / "model.keras").ledger.steps == 5


def test_a_budget_may_be_assigned_as_the_callback():
    model = _model(noise_multiplier=5.0)
    model.budget = _budget()
    assert model.budget.epsilon == EPSILON
    model.fit(_poisson(), verbose=0)
    with pytest.raises(ValueError, match="budget must be"):
        model.budget = EPSILON


def test_a_plan_is_that_of_its_own_noise():
    model = _model()
    model.fit(_poisson(), verbose=0, callbacks=[_budget()])
    config = model.optimizer.get_config()
    same = type(model.optimizer).from_config(config)
    assert same.plan == model.optimizer.plan and same.calibrated_for == model.sampling
    other = type(model.optimizer).from_config(config | {"noise_multiplier": 0.5})
    assert other.plan is None and other.calibrated_for is None


@pytest.mark.representatives(1)
@pytest.mark.parametrize("make", [dp.optimizers.ADPSGD, dp.optimizers.ADPAdagradNorm])
def test_adp_without_steps_is_for_those_of_the_run(make):
    optimizer = make(0.1, clip_norm=1.0)
    assert type(optimizer).from_config(optimizer.get_config()).steps is None
    model = _model(optimizer)
    model.fit(_poisson(), epochs=2, verbose=0, callbacks=[_budget()])
    assert optimizer.steps == optimizer.noise_schedule.length == 10
    assert type(optimizer).from_config(optimizer.get_config()).steps == 10
    assert model.ledger.steps == 10


def test_no_epochs_find_no_noise():
    inputs = keras.Input((3,))
    model = dp.DPModel(inputs, keras.layers.Dense(1)(inputs))
    model.compile(_optimizer(), "mse", steps_per_execution=3)
    with pytest.raises(ValueError, match="none will"):
        model.fit(_poisson(), epochs=0, verbose=0, callbacks=[_budget()])
    assert model.optimizer.noise_multiplier is None
    model.fit(_poisson(), epochs=2, verbose=0, callbacks=[_budget()])
    assert model.ledger.steps == 10


@pytest.mark.parametrize("part", ["schedule", "mechanism"])
def test_what_would_pass_the_end_of_the_noise_is_refused_before_its_first_step(part):
    if part == "schedule":
        batches, noise = _poisson(), {"noise_schedule": dp.noise.schedules.Fixed([1.0] * 7)}
    else:
        batches = dp.data.fixed_order_epochs((X, Y), B)
        noise = {"noise": dp.noise.BandedMatrix(bands=2, steps=7)}
    model = _model(noise_multiplier=2.0, **noise)
    with pytest.raises(ValueError, match=r"steps=10 .* 7 are left"):
        model.fit(batches, epochs=2, verbose=0)
    assert model.ledger.steps == model.optimizer.iterations == 0
    model.fit(batches, epochs=1, verbose=0)
    if part == "schedule":  # correlated noise begins anew with each fit
        with pytest.raises(ValueError, match=r"steps=5 .* 2 are left"):
            model.fit(batches, epochs=1, verbose=0)
    assert model.ledger.steps == 5


def test_a_budget_may_end_a_fit_before_its_noise_ends():
    model = _model(noise_multiplier=2.0, noise_schedule=dp.noise.schedules.Fixed([1.0] * 7))
    batches = _poisson()
    limit = dp.accounting.epsilon(model.optimizer, batches.sampling, 6, DELTA, accountant="rdp")
    with pytest.warns(UserWarning, match="stopped after 6"):
        model.fit(batches, epochs=2, verbose=0, callbacks=[_budget(limit * 1.0001)])
    assert model.ledger.steps == 6


def test_a_fit_that_goes_on_has_noise_for_what_is_left(tmp_path):
    model = _model(noise_multiplier=2.0, noise_schedule=dp.noise.schedules.Fixed([1.0] * 10))

    class Interrupts(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1 and not model.interrupted:
                model.interrupted = True
                raise KeyboardInterrupt

    model.interrupted = False
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    with pytest.raises(KeyboardInterrupt):
        model.fit(_poisson(), epochs=2, verbose=0, callbacks=[backup, Interrupts()])
    assert model.ledger.steps == 5
    model.fit(_poisson(), epochs=2, verbose=0, callbacks=[backup, Interrupts()])
    assert model.ledger.steps == 10
