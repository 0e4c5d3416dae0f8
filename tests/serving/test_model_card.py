"""The model card says what the statement says, and nothing that is not public."""

import json
import math
import re
from types import SimpleNamespace

import keras
import numpy as np
import pytest

import dp_keras_opt as dp
from dp_keras_opt.accounting import Ledger, Sampling
from dp_keras_opt.serving import card as cards
from dp_keras_opt.serving import signature

layers = keras.layers
N, B, DELTA = 24, 8, 1e-3
X = np.random.default_rng(1).normal(size=(N, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def _model(optimizer=None, **options):
    inputs = keras.Input((3,), name="features")
    model = dp.DPModel(inputs, layers.Dense(1, name="score")(inputs), name="scores")
    model.compile(optimizer or _optimizer(**options), "mse", metrics=["mae"])
    return model


def _optimizer(multiplier=1.0, **options):
    options = {"clip_norm": 1.0, "batch_size": B} | options
    return dp.optimizers.DPSGD(0.1, noise_multiplier=multiplier, **options)


def _fitted(model, epochs=1):
    report = dp.callbacks.PrivacyReport(DELTA)
    model.fit(dp.data.poisson_batches((X, Y), B), epochs=epochs, verbose=0, callbacks=[report])
    return report


def _export(model, report, folder, card=None):
    """(the card as JSON, as Markdown, the statement) as they were exported."""
    dp.serving.export(model, folder, report, card=card)
    file = folder / dp.serving.MODEL_CARD
    texts = [file, file.with_suffix(".md"), folder / dp.serving.STATEMENT]
    content, markdown, statement = (text.read_text(encoding="utf-8") for text in texts)
    return json.loads(content), markdown, statement


def _words(text):
    return " ".join(text.split())


def _agrees(content, statement):
    """Whether each figure of the card is in the statement, and each guarantee in the card."""
    text, privacy = _words(statement), content["privacy"]
    assert _words(privacy["statement"]) == text
    for claim in privacy["guarantees"]:
        if claim["epsilon"] == "infinite":
            assert f"epsilon is infinite at delta = {claim['delta']:g}" in text
        else:
            figures = f"epsilon = {claim['epsilon']:.3f} at delta = {claim['delta']:g}"
            assert f"privacy for one {claim['unit']} with {figures}" in text
        assert f"({claim['adjacency']})." in text
        assert claim["proven"] == ("HEURISTIC" not in text)
    assert len(privacy["guarantees"]) == len(re.findall(r"Neighbouring data sets:", text))
    for part in privacy["training"]:
        assert f"{part['steps']} steps" in text
        for noise in part["noise"]:
            assert f"{noise['distribution']} noise on the" in text
            assert f"sigma = {noise['multiplier']:.6g}" in text
        sampling = part["sampling"]
        assert f"n = {sampling['num_examples']} {sampling['unit']}s" in text
        assert part["clip_norm"] is None or f"clip norm C = {part['clip_norm']:.6g}" in text
    for line in privacy["not_covered"]:
        assert _words(line) in text
    return True


def test_the_card_says_what_is_known(tmp_path):
    model = _model()
    report = _fitted(model)
    content, markdown, statement = _export(model, report, tmp_path / "1")
    assert _agrees(content, statement) and statement.strip() in markdown
    assert content["name"] == "scores"
    assert content["optimizer"]["name"] == "DPSGD"
    settings = content["optimizer"]["settings"]
    assert (settings["learning_rate"], settings["clip_norm"]) == (0.1, 1.0)
    assert content["architecture"] == {
        "inputs": {"features": {"dtype": "float32", "shape": [None, 3]}},
        "outputs": {"score": {"dtype": "float32", "shape": [None, 1]}},
        "parameters": 4,
        "trainable_parameters": 4,
        "layers": {"Dense": 1},
        "dtype_policy": "float32",
    }
    assert content["versions"]["keras"] == keras.__version__
    assert (content["intended_use"], content["data"], content["metrics"]) == (None, None, {})
    assert content["privacy"]["weights_changed_since"] is False


def test_no_figure_of_the_training_gets_into_the_card(tmp_path):
    """Losses and metrics are computed from raw data; so are histories of them."""
    keras.utils.set_random_seed(7)  # no loss that is another figure of the card by chance
    model = _model(_optimizer(seed=7))
    report = _fitted(model)
    content, markdown, _ = _export(model, report, tmp_path / "1")
    del content["versions"]
    markdown = markdown.split("## Versions")[0]
    raw = [value for values in model.history.history.values() for value in values]
    raw = [value for value in raw if value != report.epsilon]
    assert len(raw) == 2  # loss and mae
    figures = [float(text) for text in re.findall(r"-?\d+\.\d+", json.dumps(content) + markdown)]
    assert not [
        figure for figure in figures for value in raw if math.isclose(figure, value, rel_tol=1e-3)
    ]


def test_the_seed_of_the_noise_is_in_no_file(tmp_path):
    """Whoever knows it draws the noise again and has the raw sums."""
    seed = 918273645
    model = _model(_optimizer(seed=seed))
    _export(model, _fitted(model), tmp_path / "1")
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or str(seed).encode() not in file.read_bytes(), file
    optimizer = dp.optimizers.DPAdam(
        0.1, clip_norm=1.0, noise_multiplier=1.0, batch_size=B, seed=seed
    )
    assert str(seed) not in json.dumps(cards._optimizer(optimizer))


def test_the_caller_adds_what_only_he_knows(tmp_path):
    card = dp.serving.ModelCard(
        name="Scores",
        intended_use="Ranking, never decisions about persons.",
        data="Answers of 2024, ½ of them from schools.",
        metrics={
            "mae": dp.serving.Metric(0.25, "held-out answers", private=True),
            "public mae": dp.serving.Metric(np.float32(0.5), "the public benchmark", private=False),
        },
    )
    model = _model()
    content, markdown, _ = _export(model, _fitted(model), tmp_path / "1", card)
    assert markdown.startswith("# Scores\n")
    assert content["data"] in markdown and content["intended_use"] in markdown
    assert content["metrics"]["mae"]["value"] == 0.25
    assert "not covered by the guarantee" in content["metrics"]["mae"]["note"]
    assert "no protection" in content["metrics"]["public mae"]["note"]
    assert "| mae | 0.25 | held-out answers | computed from private data without noise" in markdown


def _content(ledger, delta=DELTA, accountant="rdp"):
    """The card of a model with a ledger, and its statement."""
    model = _model()
    model.ledger = ledger
    report = SimpleNamespace(delta=delta, accountant=accountant, model=model)
    text = model.statement(delta, accountant)
    inputs = signature.inputs(model)
    content = cards.content(model, report, text, inputs, {})
    return json.loads(cards.to_json(content)), text


POISSON = Sampling.poisson(num_examples=800, batch_size=B)


@pytest.mark.parametrize(
    ("optimizer", "sampling", "delta", "accountant"),
    [
        (_optimizer(), POISSON, 1e-5, "rdp"),
        (_optimizer(), POISSON, 1e-5, "pld"),
        (_optimizer(1e-12), POISSON, 1e-5, "rdp"),
        (_optimizer(0.0), POISSON, 1e-5, "rdp"),
        (_optimizer(noise="laplace"), POISSON, 0.0, "pure"),
        (_optimizer(noise="laplace"), POISSON, 1e-5, "rdp"),
        (_optimizer(noise_schedule=[1.0, 2.0] * 5), POISSON, 1e-5, "rdp"),
        (_optimizer(), Sampling.shuffled(800, B), 1e-5, "rdp"),
        (_optimizer(), Sampling.shuffled_accounted_as_poisson(800, B), 1e-5, "rdp"),
    ],
    ids=[
        "rdp",
        "pld",
        "little noise",
        "no noise",
        "pure",
        "laplace",
        "schedule",
        "shuffled",
        "heuristic",
    ],
)
def test_the_card_cannot_disagree_with_the_statement(optimizer, sampling, delta, accountant):
    content, statement = _content(Ledger.of(optimizer, sampling, 10), delta, accountant)
    assert len(content["privacy"]["guarantees"]) == 1
    assert _agrees(content, statement)


def test_guarantees_that_do_not_compose_are_listed():
    ledger = Ledger.of(_optimizer(), POISSON, 10)
    ledger.merge(Ledger.of(_optimizer(), Sampling.shuffled(800, B), 20))
    content, statement = _content(ledger)
    assert len(content["privacy"]["guarantees"]) == 2
    assert _agrees(content, statement)


def test_the_guarantee_of_a_training_that_was_stopped_is_that_of_its_plan(tmp_path):
    """What ran is less than what the statement promises."""
    model = _model()
    report = dp.callbacks.PrivacyReport(DELTA)
    stop = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: setattr(model, "stop_training", True)
    )
    model.fit(dp.data.poisson_batches((X, Y), B), epochs=9, verbose=0, callbacks=[report, stop])
    content, _, statement = _export(model, report, tmp_path / "1")
    assert _agrees(content, statement)
    assert content["privacy"]["guarantees"][0]["epsilon"] > report.epsilon + 0.1
    assert content["privacy"]["training"][0]["planned_steps"] == 27


def test_weights_that_were_changed_are_said_to_be(tmp_path):
    model = _model()
    report = _fitted(model)
    model.set_weights([weight + 1 for weight in model.get_weights()])
    content, markdown, _ = _export(model, report, tmp_path / "1")
    assert content["privacy"]["weights_changed_since"] is True
    assert "The weights were changed since" in markdown


def test_a_report_of_ones_own_has_a_card_too(tmp_path):
    """With its text, and no figures where it names no delta."""
    model = _model()
    text = _fitted(model).statement()
    content, markdown, statement = _export(
        model, SimpleNamespace(statement=lambda: text), tmp_path / "1"
    )
    assert content["privacy"]["guarantees"] == [] and text.strip() in markdown
    assert content["privacy"]["training"][0]["steps"] == 3


def test_settings_are_for_people():
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 10)
    wrapped = dp.optimizers.DPOptimizer(
        keras.optimizers.Lion(schedule), clip_norm=1.0, noise_multiplier=1.0, batch_size=B
    )
    settings = cards._optimizer(wrapped)["settings"]
    assert settings["optimizer"]["learning_rate"]["name"] == "CosineDecay"
    assert "registered_name" not in json.dumps(settings)
    long = dp.optimizers.DPAdam(
        0.1, clip_norm=1.0, noise_multiplier=1.0, batch_size=B, noise_schedule=[1.0] * 5000
    )
    assert "5000 values, not shown" in json.dumps(cards._optimizer(long))
    assert cards._settings([math.inf, None, True, "a", object]) == ["inf", None, True, "a", "type"]


def test_errors():
    with pytest.raises(ValueError, match="value must be a finite number"):
        dp.serving.Metric(math.nan, "data", private=False)
    with pytest.raises(ValueError, match="say whether the metric was computed on private data"):
        dp.serving.Metric(0.5, "data", private=None)
    with pytest.raises(ValueError, match="must be a dp_keras_opt.serving.Metric"):
        dp.serving.ModelCard(metrics={"mae": 0.5})
