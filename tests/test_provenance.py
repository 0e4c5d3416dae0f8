"""One ledger, always the current one; and weights that carry what they cost."""

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
SAMPLING = Sampling.poisson(N, B)


def _batches(steps, sampling=SAMPLING):
    """Batches said to be Poisson samples; their content is of no account here."""
    data = tf.data.Dataset.from_tensors((X[:B], Y[:B], dp.data.Rows(np.ones(B, "float32"))))
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
    model.ledger.release()


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
    object.__setattr__(model, "budget", PrivacyBudget(_epsilon(10), DELTA))
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
