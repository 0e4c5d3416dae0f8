"""One ledger, always the current one; and weights that carry what they cost."""

import copy

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_keras_opt as dp
from dp_keras_opt.accounting import Ledger, Sampling
from dp_keras_opt.accounting.budget import Budget
from dp_keras_opt.callbacks import PrivacyBudget, PrivacyReport

layers = keras.layers
N, B, DELTA = 24, 8, 1e-3
X = np.random.default_rng(1).normal(size=(N, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
SAMPLING = Sampling.poisson(N, B)


def _batches(steps, sampling=SAMPLING):
    """Batches said to be Poisson samples; their content is of no account here."""
    data = tf.data.Dataset.from_tensors((X[:B], Y[:B], dp.data.RowInfo(np.ones(B, "float32"))))
    return dp.data.assume_sampling(data.repeat(steps), sampling)


def _compiled(model, **kwargs):
    optimizer = dp.optimizers.DPSGD(
        0.1, clip_norm=1.0, noise_multiplier=2.0, batch_size=B, **kwargs
    )
    model.compile(optimizer, "mse")
    return model


def _fit(model, steps, sampling=SAMPLING, **kwargs):
    return model.fit(_batches(steps, sampling), verbose=0, **kwargs)


def _base():
    return keras.Sequential([keras.Input((3,)), layers.Dense(4), layers.Dense(1)])


def _epsilon(steps):
    """ε of so many steps, from a ledger that no model has anything to do with."""
    optimizer = dp.optimizers.DPSGD(0.1, clip_norm=1.0, noise_multiplier=2.0, batch_size=B)
    return Ledger.of(optimizer, SAMPLING, steps).epsilon(DELTA)


# One ledger, always the current one.


def test_report_and_export_speak_of_the_ledger_of_now(tmp_path):
    model, report = _compiled(dp.make_private(_base())), PrivacyReport(DELTA)
    _fit(model, 3, callbacks=[report])
    model.ledger = Ledger(tmp_path / "spent.jsonl")
    _fit(model, 20)
    assert report.epsilon == pytest.approx(_epsilon(23)) == model.ledger.epsilon(DELTA)
    assert "Training, part 2 of 2: 20 steps" in " ".join(report.statement().split())
    dp.serving.export(model, tmp_path / "served", report)
    assert (tmp_path / "served" / dp.serving.STATEMENT).read_text().strip() == (
        report.statement().strip()
    )
    model.ledger.unlock()


def test_a_report_during_training_follows_an_exchanged_ledger(tmp_path):
    model, report = _compiled(dp.make_private(_base())), PrivacyReport(DELTA, every=1)

    def exchange(epoch, logs):
        if epoch == 1:
            other = Ledger()
            other.merge(Ledger.of(model.optimizer, SAMPLING, 50))
            model.ledger = other

    history = _fit(
        model,
        2,
        epochs=3,
        callbacks=[report, keras.callbacks.LambdaCallback(on_epoch_begin=exchange)],
    )
    expected = [_epsilon(2), _epsilon(54), _epsilon(56)]
    assert history.history["epsilon"] == pytest.approx(expected)


def test_a_report_speaks_of_the_model_that_it_served_last(tmp_path):
    report = PrivacyReport(DELTA)
    first, second = (_compiled(dp.make_private(_base())) for _ in range(2))
    _fit(first, 3, callbacks=[report])
    _fit(second, 5, callbacks=[report])
    assert report.epsilon == pytest.approx(_epsilon(5))
    with pytest.raises(ValueError, match="another model"):
        dp.serving.export(first, tmp_path / "served", report)


@pytest.mark.parametrize("shared", ["a ledger", "a budget"])
def test_a_budget_counts_what_another_model_spends_in_between(shared):
    first, second = (_compiled(dp.make_private(_base())) for _ in range(2))
    if shared == "a ledger":
        second.ledger = first.ledger
    budget = PrivacyBudget(_epsilon(10), DELTA)
    with pytest.warns(UserWarning, match="allows no further step"):
        _fit(first, 4, callbacks=[budget])
        _fit(second, 4, callbacks=[budget])
        _fit(first, 100, callbacks=[budget])
        _fit(second, 100, callbacks=[budget])
    assert first.ledger.steps == 10
    assert second.ledger.steps == 10


def test_a_budget_counts_what_is_merged_into_an_open_segment():
    model = _compiled(dp.make_private(_base()))
    model.sampling = SAMPLING
    model.budget = Budget(_epsilon(10), DELTA)
    for _ in range(4):
        model.train_on_batch(X[:B], Y[:B])
    model.ledger.merge(Ledger.of(model.optimizer, SAMPLING, 5))
    model.train_on_batch(X[:B], Y[:B])
    with pytest.raises(dp.PrivacyBudgetError):
        model.train_on_batch(X[:B], Y[:B])
    model.budget.epsilon = _epsilon(11)  # a larger one, on the same callback
    model.train_on_batch(X[:B], Y[:B])
    with pytest.raises(dp.PrivacyBudgetError):
        model.train_on_batch(X[:B], Y[:B])


# Weights carry what they cost.


def _head(model):
    """A model of one's own over all but the last layer of another one."""
    hidden = model.layers[-2].output
    return model.inputs[0], layers.Dense(1)(hidden)


@pytest.mark.parametrize(
    "built",
    [dp.DPModel, lambda *ends: dp.make_private(keras.Model(*ends))],
    ids=["DPModel", "Model"],
)
def test_models_built_over_private_weights_have_their_ledger(built, tmp_path):
    private = _compiled(dp.make_private(_base()))
    _fit(private, 5)
    other = built(*_head(private))
    assert other.ledger.epsilon(DELTA) == pytest.approx(_epsilon(5))
    assert "5 steps" in other.statement(DELTA)
    other.save(tmp_path / "other.keras")
    again = keras.saving.load_model(tmp_path / "other.keras")
    assert again.ledger.epsilon(DELTA) == pytest.approx(_epsilon(5))
    _fit(_compiled(other), 2)
    assert other.ledger.steps == 7
    assert private.ledger.steps == 7  # it shares what was trained
    private.ledger.merge(other.ledger)  # nothing is counted twice
    assert private.ledger.steps == 7
    _fit(private, 3)
    assert (private.ledger.steps, other.ledger.steps) == (10, 10)


def test_an_inner_private_model_sees_what_is_spent_around_it(tmp_path):
    inputs = keras.Input((3,))
    encoder = dp.DPModel(inputs, layers.Dense(4)(inputs), name="encoder")
    outer = _compiled(dp.DPModel(inputs, layers.Dense(1)(encoder(inputs))))
    assert encoder.ledger.steps == 0
    _fit(outer, 4)
    assert encoder.ledger.steps == 4
    assert "No training step" not in encoder.statement(DELTA)
    _fit(outer, 3)
    assert encoder.ledger.steps == 7  # at the next look
    encoder.save(tmp_path / "encoder.keras")
    assert keras.saving.load_model(tmp_path / "encoder.keras").ledger.steps == 7
    outer.save(tmp_path / "outer.keras")
    again = keras.saving.load_model(tmp_path / "outer.keras")
    assert again.ledger.steps == again.get_layer("encoder").ledger.steps == 7


def test_looking_in_the_middle_of_a_run_does_not_end_it():
    inputs = keras.Input((3,))
    encoder = dp.DPModel(inputs, layers.Dense(4)(inputs))
    outer = _compiled(dp.DPModel(inputs, layers.Dense(1)(encoder(inputs))))
    seen = []

    def look(batch, logs):
        seen.append((encoder.ledger.steps, outer.ledger.steps))

    _fit(outer, 4, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=look)])
    assert seen == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert len(outer.ledger.segments) == len(encoder.ledger.segments) == 1


def test_models_that_train_shared_weights_in_turns():
    inputs = keras.Input((3,))
    shared = layers.Dense(4)
    models = [_compiled(dp.DPModel(inputs, layers.Dense(1)(shared(inputs)))) for _ in range(2)]
    for model in models:
        model.sampling = SAMPLING
        model.budget = Budget(_epsilon(9), DELTA)
    for steps in range(1, 10):
        models[steps % 2].train_on_batch(X[:B], Y[:B])
        assert [model.ledger.steps for model in models] == [steps, steps]
    for model in models:
        assert len(model.ledger.segments) == 2
        with pytest.raises(dp.PrivacyBudgetError):
            model.train_on_batch(X[:B], Y[:B])


def test_frozen_weights_carry_nothing():
    inputs = keras.Input((3,))
    public = layers.Dense(4, trainable=False)
    _fit(_compiled(dp.DPModel(inputs, layers.Dense(1)(public(inputs)))), 3)
    assert dp.DPModel(inputs, layers.Dense(1)(public(inputs))).ledger.steps == 0


def test_weights_that_a_model_without_a_ledger_brings():
    private = _compiled(dp.make_private(_base()))
    _fit(private, 3)
    plain = keras.Model(private.inputs, private.outputs)
    assert dp.clipping.fix(private).ledger.steps == 3
    fixed = dp.clipping.fix(plain)
    _fit(private, 2)
    assert dp.make_private(fixed).ledger.steps == 3  # copied then
    assert dp.make_private(plain).ledger.steps == 5


def test_a_checkpoint_brings_the_ledger_to_the_weights(tmp_path):
    private = _compiled(dp.make_private(_base()))
    _fit(private, 3)
    path = tf.train.Checkpoint(model=private).write(str(tmp_path / "checkpoint"))
    base = _base()
    tf.train.Checkpoint(model=dp.make_private(base)).restore(path).expect_partial()
    assert dp.DPModel(*_head(base)).ledger.steps == 3


def test_what_is_not_to_be_composed_is_listed_apart():
    users = Sampling.poisson(N, B, unit="user")
    first = _compiled(dp.make_private(_base()))
    _fit(first, 5, users)
    second = _compiled(dp.DPModel(*_head(first)))
    report = PrivacyReport(DELTA)
    history = _fit(second, 2, callbacks=[report])
    assert history.history["epsilon_user_add_or_remove_one"] == pytest.approx([_epsilon(5)])
    assert history.history["epsilon_example_add_or_remove_one"] == pytest.approx([_epsilon(2)])
    text = " ".join(report.statement().split())
    assert "privacy for one user with epsilon" in text
    assert "privacy for one example with epsilon" in text
    assert "the epsilons add up" in text and "n = 24 users" in text
    assert "as many units as a person has" in text  # examples, of whom there are users
    with pytest.raises(ValueError, match="do not compose"):
        report.epsilon  # noqa: B018
    with pytest.raises(ValueError, match="do not compose"):
        _fit(second, 2, callbacks=[PrivacyBudget(9.0, DELTA)])
    assert second.ledger.steps == 7


def test_every_statement_names_the_starting_weights():
    private = _compiled(dp.make_private(_base()))
    _fit(private, 1)
    assert "the starting weights, as given when training began" in " ".join(
        private.statement(DELTA).split()
    )


# The original of a private model, saved.


class Subclassed(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(1)

    def call(self, inputs):
        return self.dense(inputs)


def _functional():
    inputs = keras.Input((3,))
    return keras.Model(inputs, layers.Dense(1)(layers.Dense(4)(inputs)))


@pytest.mark.parametrize("make", [_base, _functional, Subclassed])
def test_the_original_of_a_private_model_is_saved_with_the_ledger(make, tmp_path):
    base = make()
    base(X)
    private = _compiled(dp.make_private(base))
    _fit(private, 3)
    expected = base.predict(X, verbose=0)
    objects = {"Subclassed": Subclassed}
    base.save(tmp_path / "base.keras")
    with keras.saving.custom_object_scope(objects):
        loaded = [keras.saving.load_model(tmp_path / "base.keras"), copy.deepcopy(base)]
        keras.saving.save_model(base, tmp_path / "plain.keras")
        with pytest.raises(ValueError):
            keras.saving.load_model(tmp_path / "plain.keras")
    for each in loaded:
        assert dp.make_private(each).ledger.epsilon(DELTA) == pytest.approx(_epsilon(3))
        np.testing.assert_allclose(each.predict(X, verbose=0), expected, rtol=1e-5)
    base.save_weights(tmp_path / "base.weights.h5")
    fresh = make()
    fresh(X)
    with pytest.raises(ValueError):
        fresh.load_weights(tmp_path / "base.weights.h5")
    assert dp.make_private(fresh).ledger.steps == 0
    fresh.load_weights(tmp_path / "base.weights.h5")  # now it has where to keep the ledger
    assert dp.make_private(fresh).ledger.steps == 3
    with pytest.raises(ValueError, match="lose the privacy ledger"):
        base.save(tmp_path / "base.h5")


def test_a_model_around_the_original_loads(tmp_path):
    base = _base()
    _fit(_compiled(dp.make_private(base)), 3)
    inputs = keras.Input((3,))
    outer = dp.DPModel(inputs, layers.Dense(1)(base(inputs)))
    outer.save(tmp_path / "outer.keras")
    assert keras.saving.load_model(tmp_path / "outer.keras").ledger.steps == 3


def test_what_was_never_trained_is_saved_as_it_is(tmp_path):
    base = _base()
    dp.make_private(base)
    base.save(tmp_path / "base.keras")
    for each in (keras.saving.load_model(tmp_path / "base.keras"), copy.deepcopy(base)):
        assert type(each) is keras.Sequential
    base.save_weights(tmp_path / "base.weights.h5")
    _base().load_weights(tmp_path / "base.weights.h5")
    private = _compiled(dp.make_private(base))
    _fit(private, 1)
    assert dp.make_private(keras.models.clone_model(base)).ledger.steps == 0  # fresh weights


def test_a_ledger_that_cannot_be_read_is_not_skipped(tmp_path, monkeypatch):
    private = _compiled(dp.make_private(_base()))
    _fit(private, 3)
    private.save_weights(tmp_path / "private.weights.h5")
    fresh = dp.make_private(_base())
    fresh.load_weights(tmp_path / "private.weights.h5", skip_mismatch=True)
    assert fresh.ledger.steps == 3
    monkeypatch.setattr(private, "_saved_ledger", lambda: "no ledger")
    private.save_weights(tmp_path / "private.weights.h5")
    fresh = dp.make_private(_base())
    with pytest.raises(ValueError, match="could not be read"):
        fresh.load_weights(tmp_path / "private.weights.h5", skip_mismatch=True)
    with pytest.raises(ValueError, match="could not be read"):
        fresh.ledger  # noqa: B018
