"""Noise, batches and length that are chosen after looking: what a `PrivacyBudget` keeps."""

import json
import math
import warnings

import keras
import numpy as np
import pytest

import dp_keras_opt as dp
from dp_keras_opt.accounting import GaussianFilter, Ledger, RenyiFilter, Sampling
from dp_keras_opt.callbacks import PrivacyBudget, PrivacyReport
from dp_keras_opt.noise import BandedMatrix

N, B, DELTA = 60, 12, 1e-4
RNG = np.random.default_rng(3)
X = RNG.normal(size=(N, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
RENYI, GAUSSIAN = RenyiFilter(8), GaussianFilter()


def _optimizer(**kwargs):
    return dp.optimizers.DPSGD(0.1, **{"clip_norm": 1.0, "batch_size": B} | kwargs)


def _model(**kwargs):
    inputs = keras.Input((3,))
    model = dp.DPModel(inputs, keras.layers.Dense(1)(inputs))
    _compile(model, **kwargs)
    return model


def _compile(model, **kwargs):
    model.compile(_optimizer(**kwargs), "mse", run_eagerly=True)


def _budget(epsilon=4.0, accountant=RENYI, delta=DELTA):
    return PrivacyBudget(epsilon, delta, accountant)


def _poisson(steps=5, batch_size=B):
    return dp.data.poisson_batches((X, Y), batch_size, steps)


def _epochs():
    return dp.data.fixed_order_epochs((X, Y), B)


def _fit(model, batches, epochs=1, callbacks=()):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        return model.fit(batches, epochs=epochs, verbose=0, callbacks=list(callbacks))


def _said(stated):
    return " ".join(stated.split())


def test_noise_that_is_chosen_after_looking_keeps_the_budget():
    """A first fit; noise and batches by what it gave; then noise that is found for the rest."""
    model = _model(noise_multiplier=3.0)
    _fit(model, _poisson(), 2, [_budget()])
    loss = model.evaluate(X, Y, verbose=0)  # as somebody does who looks
    _compile(model, noise_multiplier=4.0 if loss < 1e6 else 2.0, batch_size=6)
    _fit(model, _poisson(4, 6), 1, [_budget()])
    _compile(model)  # the noise is found
    report = PrivacyReport()
    history = _fit(model, _poisson(), 3, [_budget(), report])
    ledger = model.ledger
    assert [each.steps for each in ledger.segments] == [10, 4, 15]
    assert {each.filter for each in ledger.segments} == {_budget().budget.filter}
    assert 4.0 * (1 - 1e-3) < ledger.epsilon(DELTA) <= 4.0
    assert history.history["epsilon"][-1] == report.epsilon == ledger.epsilon(DELTA, RENYI)
    assert ledger.epsilon_as_planned(DELTA) == 4.0
    text = _said(report.statement())
    assert "with epsilon = 4.000 at delta = 0.0001" in text and "whatever was chosen" in text
    less = [_optimizer(noise_multiplier=model.optimizer.noise_multiplier * (1 - 1e-3))]
    planned = Ledger.of_segments(
        [*ledger.segments[:2], *Ledger.of(less[0], Sampling.poisson(N, B), 15).segments]
    )
    assert planned.epsilon(DELTA, RENYI) > 4.0


@pytest.mark.parametrize(
    ("accountant", "batches", "sigma"), [(RENYI, _poisson, 1.5), (GAUSSIAN, _epochs, 8.0)]
)
def test_it_ends_before_the_step_that_would_exceed(accountant, batches, sigma):
    model = _model(noise_multiplier=sigma)
    with pytest.warns(UserWarning, match="allows no further step.*fixed before the first step"):
        model.fit(batches(), epochs=200, verbose=0, callbacks=[_budget(accountant=accountant)])
    ledger = model.ledger
    (segment,) = ledger.segments
    assert ledger.epsilon(DELTA) <= 4.0
    more = Ledger.of(_optimizer(noise_multiplier=sigma), segment.sampling, segment.steps + 1)
    assert more.epsilon(DELTA, accountant) > 4.0
    others = batches()
    model.sampling = others.sampling
    with pytest.raises(dp.PrivacyBudgetError):
        model.train_on_batch(*next(iter(others))[:2])
    # More noise may still be affordable, and less than one step's is not.
    _compile(model, noise_multiplier=1.0)
    with pytest.raises(dp.PrivacyBudgetError, match="Add noise"):
        model.fit(batches(), verbose=0)
    assert model.ledger.steps == segment.steps


def test_early_stopping_is_covered():
    model = _model(noise_multiplier=3.0)
    stop = keras.callbacks.EarlyStopping(monitor="val_loss", min_delta=1e3)
    model.fit(_poisson(), epochs=10, verbose=0, callbacks=[_budget(), stop], validation_data=(X, Y))
    assert model.ledger.steps == 10
    text = _said(model.statement(DELTA))
    assert "with epsilon = 4.000" in text and "Stopped early" not in text
    assert "10 steps of 50 planned" in text


def test_loaded_models_keep_it(tmp_path):
    model = _model(noise_multiplier=3.0)
    _fit(model, _poisson(), 1, [_budget()])
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert again.ledger.segments[0].filter == _budget().budget.filter
    assert again.ledger.epsilon_as_planned(DELTA) == 4.0
    with pytest.raises(ValueError, match="ran under a privacy filter"):
        again.fit(_poisson(), verbose=0)
    assert again.ledger.steps == 5
    _fit(again, _poisson(), 1, [_budget()])
    assert again.ledger.steps == 10 and again.ledger.epsilon_as_planned(DELTA) == 4.0


def test_noise_that_was_found_survives_a_file(tmp_path):
    model = _model()
    _fit(model, _poisson(), 2, [_budget()])
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert again.optimizer.plan == model.optimizer.plan
    assert again.optimizer.plan.accountant == RENYI


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (_budget(5.0), "another privacy filter"),
        (_budget(3.0), "another privacy filter"),
        (_budget(accountant=RenyiFilter(9)), "privacy filter"),
        (_budget(4.0, "auto"), "under a privacy filter"),
        (_budget(4.0, "pld"), "under a privacy filter"),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_another_budget_is_refused(other, message, compiled):
    model = _model(noise_multiplier=3.0)
    _fit(model, _poisson(), 1, [_budget()])
    if compiled:
        _compile(model)
    with pytest.raises(ValueError, match=message):
        model.fit(_poisson(), verbose=0, callbacks=[other])
    assert model.ledger.steps == 5
    assert model.optimizer.noise_multiplier == (None if compiled else 3.0)  # found for no budget
    assert model.budget.accountant == RENYI and model.budget.epsilon == 4.0
    _fit(model, _poisson(), 1, [_budget()])
    assert model.ledger.steps == 10 and model.ledger.epsilon_as_planned(DELTA) == 4.0


def test_a_budget_that_is_taken_away_or_changed_is_noticed():
    model = _model(noise_multiplier=3.0)
    _fit(model, _poisson(), 1, [_budget()])
    model.sampling = _poisson().sampling
    kept = model.budget
    for budget in (None, _budget(40.0), _budget(40.0, "auto")):
        model.budget = budget
        with pytest.raises(ValueError, match="privacy filter"):
            model.train_on_batch(X[:B], Y[:B])
    model.budget = kept
    kept.epsilon = 40.0
    with pytest.raises(ValueError, match="another privacy filter"):
        model.train_on_batch(X[:B], Y[:B])
    assert model.ledger.steps == 5


def test_it_cannot_begin_after_a_step():
    model = _model(noise_multiplier=3.0)
    _fit(model, _poisson())
    with pytest.raises(ValueError, match="must be fixed before the first step"):
        model.fit(_poisson(), verbose=0, callbacks=[_budget()])
    assert model.ledger.steps == 5


def test_reports_beside_it():
    model = _model(noise_multiplier=3.0)
    with pytest.raises(ValueError, match="does not bound steps that ran under a privacy filter"):
        model.fit(
            _poisson(), verbose=0, callbacks=[_budget(), PrivacyReport(DELTA, accountant="pld")]
        )
    assert model.ledger.steps == 0
    at_another_delta = PrivacyReport(1e-3)
    _fit(model, _poisson(), 1, [_budget(), at_another_delta])
    assert "converted from the limit" in _said(at_another_delta.statement())
    assert at_another_delta.epsilon <= model.ledger.epsilon_as_planned(1e-3) < 4.0


def test_sampling_that_it_cannot_price_is_refused_before_a_step():
    model = _model(noise_multiplier=3.0)
    with pytest.raises(ValueError, match="Gaussian filter cannot price 'poisson' sampling"):
        model.fit(_poisson(), verbose=0, callbacks=[_budget(accountant=GAUSSIAN)])
    assert model.ledger.steps == 0


def test_a_run_of_correlated_noise_may_end_and_go_on(tmp_path):
    """A run that is stopped costs what its steps cost, and the rest of the budget is left."""
    model = _model(noise_multiplier=8.0, noise=BandedMatrix(20, 3))
    batches = _epochs()
    _fit(model, batches, 2, [_budget(accountant=GAUSSIAN)])
    model.save(tmp_path / "model.keras")
    model.save_run(tmp_path / "run.secret.npz")
    again = keras.saving.load_model(tmp_path / "model.keras")
    order_seed = again.resume_run(tmp_path / "run.secret.npz")
    more = dp.data.fixed_order_epochs((X, Y), B, order_seed=order_seed)
    with pytest.raises(ValueError, match="ran under a privacy filter"):
        again.fit(more, verbose=0)  # without the budget that it was saved under
    _fit(again, more, 1, [_budget(accountant=GAUSSIAN)])
    assert [each.steps for each in again.ledger.segments] == [15]
    _compile(again)  # independent noise for the rest
    _fit(again, _epochs(), 1, [_budget(accountant=GAUSSIAN)])
    first, second = again.ledger.segments
    assert again.ledger.epsilon_as_planned(DELTA) == 4.0
    mu = math.hypot(1 / first.event().noise_multiplier, 2 / again.optimizer.noise_multiplier)
    assert mu == pytest.approx(1 / first.filter.noise_multiplier, rel=1e-3)
    assert second.steps == 5


def test_a_file_that_is_shared_keeps_it(tmp_path):
    """Two models on one ledger share the limit."""
    path = tmp_path / "spent.jsonl"
    first, second = _model(noise_multiplier=3.0), _model(noise_multiplier=2.0)
    first.ledger = second.ledger = Ledger(path)
    _fit(first, _poisson(), 2, [_budget()])
    with pytest.raises(ValueError, match="under a privacy filter"):
        second.fit(_poisson(), verbose=0)
    with pytest.warns(UserWarning, match="allows no further step"):
        second.fit(_poisson(), epochs=100, verbose=0, callbacks=[_budget()])
    first.ledger.unlock()
    read = Ledger.read(path)
    assert read.epsilon(DELTA) <= 4.0 and read.epsilon_as_planned(DELTA) == 4.0


def test_what_is_written_beside_the_model_says_the_budget(tmp_path):
    model, report = _model(noise_multiplier=3.0), PrivacyReport(DELTA)
    _fit(model, _poisson(), 1, [_budget(), report])
    dp.serving.export(model, tmp_path / "served", report)
    (card,) = (tmp_path / "served").rglob("*.json")
    privacy = json.loads(card.read_text(encoding="utf-8"))["privacy"]
    (guarantee,) = privacy["guarantees"]
    assert guarantee["epsilon"] == 4.0
    assert guarantee["accountants"] == ["Renyi filter of order 8"]
    assert guarantee["risk"]["basis"] == "budget of a filter"
    assert "whatever was chosen" in _said(privacy["statement"])
    (training,) = privacy["training"]
    assert training["privacy_filter"] == "Renyi filter of order 8, epsilon = 4 at delta = 0.0001"


def test_a_run_goes_on_only_where_it_was_the_last(tmp_path):
    noise, budget = {"noise_multiplier": 8.0, "noise": BandedMatrix(20, 3)}, _budget()
    model = _model(**noise)
    _fit(model, _epochs(), 1, [budget])
    model.save_run(tmp_path / "run.secret.npz")
    _compile(model, noise_multiplier=20.0)
    _fit(model, _epochs(), 1, [budget])
    _compile(model, **noise)
    order_seed = model.resume_run(tmp_path / "run.secret.npz")
    more = dp.data.fixed_order_epochs((X, Y), B, order_seed=order_seed)
    with pytest.raises(ValueError, match="Other steps ran since the run was saved"):
        model.fit(more, verbose=0, callbacks=[budget])
    assert model.ledger.steps == 10 and model.ledger.epsilon_as_planned(DELTA) == 4.0


def test_models_that_share_layers_share_the_limit():
    """Each sees what the other has spent before each of its steps."""
    inputs = keras.Input((3,))
    shared = keras.layers.Dense(2)(inputs)
    models = [dp.DPModel(inputs, keras.layers.Dense(1)(shared)) for _ in range(2)]
    for turn in range(2):
        for model in models:
            if not turn:
                _compile(model, noise_multiplier=3.0)
            _fit(model, _poisson(), 1, [_budget()])
    assert [model.ledger.steps for model in models] == [20, 20]
    for model in models:
        assert model.ledger.epsilon_as_planned(DELTA) == 4.0
        assert "whatever was chosen" in _said(model.statement(DELTA))
    with pytest.warns(UserWarning, match="allows no further step"):
        models[0].fit(_poisson(), epochs=100, verbose=0, callbacks=[_budget()])
    assert models[1].ledger.epsilon(DELTA) <= 4.0


def test_groups_have_no_guarantee_where_one_unit_has_none():
    """Two that each kept the budget, merged: what both spent may have been chosen by results."""

    def spent():
        ledger = Ledger()
        ledger.begin(
            _optimizer(noise_multiplier=2.0).releases,
            Sampling.full(B),
            filter=_budget(8.0, GAUSSIAN).budget.filter,
        )
        ledger.reserve(5)
        return ledger

    ledger = spent()
    assert "Groups: for any 2 examples together, epsilon" in _said(
        ledger.statement(DELTA, "auto", 2)
    )
    ledger.merge(spent())
    said = _said(ledger.statement(DELTA, "auto", 2))
    assert "NO DIFFERENTIAL PRIVACY" in said
    assert "Groups: for any 2 examples together no guarantee follows" in said


def test_a_filter_goes_on_beside_scores_on_other_data():
    mae = dp.statistics.metrics.Mean(keras.metrics.mean_absolute_error, (0, 5), "mae")
    scores = dp.callbacks.PrivateValidation(
        (X[:20], Y[:20]), mae, 0.5, 1e-5, disjoint_from_training=True
    )
    model = _model(noise_multiplier=3.0)
    for callbacks in ([_budget(8.0), scores], [_budget(8.0)], [_budget(8.0)]):
        model.fit(_poisson(), verbose=0, callbacks=callbacks)
    assert [each.steps for each in model.ledger.of_data_set()] == [5, 5, 5]
    assert model.ledger.epsilon_as_planned(DELTA) == 8.0
