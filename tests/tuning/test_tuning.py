"""Comparisons and tuning: budgets kept, results resumed, the choice paid for."""

import collections
import csv
import dataclasses
import functools
import json
import math
import pathlib

import dp_accounting
import keras
import numpy as np
import pytest

import dp_keras_opt as dp
from dp_keras_opt.accounting import Ledger, RandomRepetitions
from dp_keras_opt.tuning import runs

ROOT = pathlib.Path(__file__).parents[2]
DELTA = 1e-5
SGD = dp.tuning.candidate("SGD", "DPSGD", space={"learning_rate": (0.01, 1.0)}, per_norm=True)


def make_task(n=400, **kwargs):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n + 200, 5)).astype("float32")
    y = (x @ np.float32([1, -1, 2, 0, 0.5]))[:, None]

    def build():
        return keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])

    cut = slice(n, n + 100), slice(n + 100, None)
    arguments = {
        "loss": "mse",
        "batch_size": 40,
        "steps": 16,
        "test": (x[cut[1]], y[cut[1]]),
        "public": (x[:8], y[:8]),
    }
    return dp.tuning.Task(build, (x[:n], y[:n]), (x[cut[0]], y[cut[0]]), **arguments | kwargs)


@pytest.fixture(scope="module")
def task():
    return make_task()


def spent(multiplier, steps, private=1, batch=40, n=400):
    accountant = dp_accounting.rdp.RdpAccountant()
    step = dp_accounting.GaussianDpEvent(multiplier / math.sqrt(private))
    accountant.compose(dp_accounting.PoissonSampledDpEvent(batch / n, step), steps)
    return accountant.get_epsilon(DELTA)


@pytest.mark.parametrize("dtype", ["U", object])
@pytest.mark.parametrize("is_column", [False, True])
def test_texts_are_scored(dtype, is_column):
    """Keras could not read them, once privacy was spent."""
    words = np.array(["a b", "b", "a", "b b"] * 100, dtype)
    words = words[:, np.newaxis] if is_column else words
    y = np.arange(400.0)[:, np.newaxis] % 2

    def build():
        inputs = keras.Input(words.shape[1:], dtype="string")
        vectorize = keras.layers.TextVectorization(vocabulary=["a", "b"], output_mode="multi_hot")
        return keras.Model(inputs, keras.layers.Dense(1)(vectorize(inputs)))

    parts = [(words[cut], y[cut]) for cut in (slice(200), slice(200, 300), slice(300, None))]
    task = dp.tuning.Task(build, *parts[:2], "mse", batch_size=40, steps=5, test=parts[2])
    compared = dp.tuning.compare(task, [SGD], 3.0, DELTA, trials=1, seeds=1, verbose=0)
    assert all(np.isfinite(row["score"]) for row in compared.rows)


# Candidates.


def test_the_candidates_are_all_optimizers():
    plan = dp.tuning.RunInfo(80, 64, 1.0)
    made = {
        type(each.make(plan, **each.middle())).__name__ for each in dp.tuning.CANDIDATES.values()
    }
    optimizers = {
        name
        for name in dp.optimizers.__all__
        if isinstance(cls := getattr(dp.optimizers, name), type)
        and issubclass(cls, dp.optimizers.PrivateOptimizer)
    }
    assert made == optimizers - {"PrivateOptimizer", "DPOptimizer"}


@pytest.mark.parametrize("name", dp.tuning.CANDIDATES)
def test_draws_lie_in_the_space_and_repeat(name):
    candidate = dp.tuning.CANDIDATES[name]
    draws = candidate.draw(16)
    assert draws == candidate.draw(16) and len(draws) == 16
    for value, (low, high) in candidate.space.items():
        drawn = np.log([draw[value] for draw in draws])
        ends = np.log([low, high])
        assert ends[0] - 0.01 <= drawn.min() and drawn.max() <= ends[1] + 0.01
        # Sixteen points of a Halton sequence leave no third of the range empty.
        shares = np.histogram(drawn, np.linspace(*ends, 4))[0]
        assert shares.min() >= 3
        assert candidate.middle()[value] == pytest.approx(math.sqrt(low * high), rel=0.01)


def test_units_of_a_candidate():
    plan = dp.tuning.RunInfo(100, 50, 0.5, noise_multiplier=2.0)
    sgd = dp.tuning.candidate("x", "DPSGD", space={}, per_norm=True)
    assert float(sgd.make(plan, learning_rate=0.1).learning_rate) == pytest.approx(0.2)
    scaled = dp.tuning.CANDIDATES["DPAdam, scale-then-privatize"]
    # Noise of std σC/B = clip_share in each scaled coordinate.
    optimizer = scaled.make(plan, learning_rate=0.1, clip_share=0.3)
    assert optimizer.clip_norm * 2.0 / 50 == pytest.approx(0.3)
    delayed = dp.tuning.CANDIDATES["DP2RMSprop"].make(
        plan, learning_rate=1.0, adaptive_learning_rate=0.1, clip_share=0.1, delay=0.25
    )
    assert delayed.delay[0] == 25 and delayed.clip_norm == 0.5
    assert delayed.adaptive_clip_norm * 2.0 / 50 == pytest.approx(0.1)


def test_the_page_states_the_ranges():
    page = (ROOT / "docs" / "how_to" / "hyperparameters.md").read_text(encoding="utf-8")
    for candidate in dp.tuning.CANDIDATES.values():
        low, high = candidate.space["learning_rate"]
        assert f"{low:g} to {high:g}" in page, candidate.name


# One run.


@pytest.mark.representatives(9)
@pytest.mark.parametrize("name", dp.tuning.CANDIDATES)
def test_every_candidate_trains_within_its_budget(name, task):
    candidate = dp.tuning.CANDIDATES[name]
    if candidate.sparse_embeddings is not None:
        task = with_tables(task)
    model = runs.train(task, candidate, candidate.middle(), 3.0, DELTA)
    assert model.ledger.steps == (10 if candidate.balls_in_bins else 16)
    assert 2.5 < model.ledger.epsilon(DELTA) <= 3.0
    assert np.isfinite(runs.score(task, model, task.test)) or name == "SubspaceAdagrad"


def with_tables(task):
    """The task, of whose examples nine numbers are ids."""

    def ids(part):
        return np.arange(len(part[1]) * 9).reshape(-1, 9).astype("int32") % 11, part[1]

    def build():
        inputs = keras.Input((9,), dtype="int32")
        rows = keras.layers.Embedding(11, 4)(inputs)
        units = task.build().output_shape[-1]
        return keras.Model(
            inputs, keras.layers.Dense(units)(keras.layers.GlobalAveragePooling1D()(rows))
        )

    parts = {name: ids(getattr(task, name)) for name in ("train", "validation", "test", "public")}
    return dataclasses.replace(task, build=build, **parts)


def test_rows_of_tables_are_chosen_where_there_are_tables(task):
    candidate = dp.tuning.CANDIDATES["DPSGD, chosen rows"]
    assert candidate.sparse_embeddings.threshold == 1.0
    assert with_tables(task).takes(candidate) and not task.takes(candidate)
    with pytest.raises(ValueError, match="finds no trained embeddings"):
        runs.train(task, candidate, candidate.middle(), 3.0, DELTA)


def test_the_noise_of_a_run_is_what_its_budget_asks_for(task):
    model = runs.train(
        task, SGD, {"learning_rate": 0.1}, 2.0, DELTA, num_trainings=3, accountant="rdp"
    )
    sigma = model.optimizer.noise_multiplier
    assert spent(sigma, 3 * 16) <= 2.0 < spent(sigma * (1 - 1e-3), 3 * 16)


def test_cyclic_runs_take_whole_rounds():
    candidate = dp.tuning.CANDIDATES["DPSGD, momentum, banded noise"]
    model = runs.train(make_task(steps=19), candidate, candidate.middle(), 3.0, DELTA)
    assert model.ledger.steps == 16
    assert model.ledger.segments[0].sampling.kind == "cyclic_poisson"


@pytest.mark.filterwarnings("error:The noise was calibrated for")
@pytest.mark.parametrize(("asked", "taken"), [(1, 1), (8, 8), (6, 2)])
def test_executions_take_several_steps(asked, taken, task):
    several = dataclasses.replace(task, steps_per_execution=asked)
    model = runs.train(several, SGD, {"learning_rate": 0.1}, 2.0, DELTA)
    assert model.steps_per_execution == taken
    assert int(model.optimizer.iterations) == model.ledger.steps == 16
    assert 1.9 < model.ledger.epsilon(DELTA) <= 2.0


@pytest.mark.parametrize("compiled", [True, False])
def test_runs_are_compiled_as_the_task_asks(compiled, task):
    asked = dataclasses.replace(task, jit_compile=compiled)
    model = runs.train(asked, SGD, {"learning_rate": 0.1}, 2.0, DELTA)
    assert model.jit_compile is compiled


@pytest.mark.parametrize("steps", [0, "auto"])
def test_executions_take_a_number_of_steps(steps, task):
    with pytest.raises(ValueError, match="steps_per_execution must be an integer >= 1"):
        dataclasses.replace(task, steps_per_execution=steps)


def test_balls_in_bins_take_whole_epochs(task):
    candidate = dp.tuning.CANDIDATES["DPSGD, momentum, balls in bins"]
    longer = dataclasses.replace(task, steps=39)  # an epoch has ten
    model = runs.train(longer, candidate, candidate.middle(), 3.0, DELTA)
    (segment,) = model.ledger.segments
    assert segment.sampling.kind == "balls_in_bins" and model.ledger.steps == 30
    sampling = dp.accounting.Sampling.balls_in_bins(400, 40)
    plain = dp.optimizers.DPSGD(0.1, clip_norm=1.0, batch_size=40)
    sigma = dp.accounting.calibrate(plain, sampling, 30, 3.0, DELTA)
    assert model.optimizer.noise_multiplier == pytest.approx(sigma, rel=1e-3)


def test_steps_of_several_passes_are_fewer(task):
    """Equal compute; and the noise is that of the steps that are taken."""
    twice = dp.tuning.candidate("twice", "DPSGD", space=SGD.space, passes=2)
    longer = dataclasses.replace(task, steps=17)
    model = runs.train(longer, twice, twice.middle(), 3.0, DELTA)
    assert model.ledger.steps == longer.steps_of(twice) == 8
    plain = dp.optimizers.DPSGD(0.1, clip_norm=1.0, batch_size=40)
    sigma = dp.accounting.calibrate(plain, task.batches(SGD).sampling, 8, 3.0, DELTA)
    assert model.optimizer.noise_multiplier == pytest.approx(sigma, rel=1e-3)
    seen = []
    watched = dataclasses.replace(
        twice, make=lambda run, **values: seen.append(run.steps) or twice.make(run, **values)
    )
    runs.train(longer, watched, twice.middle(), 3.0, DELTA)
    assert set(seen) == {8}


def test_rounds_of_steps_of_several_passes(task):
    banded = dataclasses.replace(dp.tuning.CANDIDATES["DPAdam, banded noise"], passes=2)
    assert [dataclasses.replace(task, steps=n).steps_of(banded) for n in (16, 31, 33)] == [8, 8, 16]
    short = dataclasses.replace(task, steps=15)
    assert task.takes(banded) and not short.takes(banded)
    with pytest.raises(ValueError, match="whole rounds of 8 steps .* a run has 7"):
        short.steps_of(banded)
    with pytest.raises(ValueError, match="a run has 0"):
        dataclasses.replace(task, steps=1).steps_of(dataclasses.replace(SGD, passes=2))


def test_whole_epochs_that_are_longer_than_a_run_are_refused(task):
    """They would be trained longer than others, which takes more than it shows."""
    candidate = dp.tuning.CANDIDATES["DPSGD, momentum, balls in bins"]
    short = dataclasses.replace(task, steps=9)  # an epoch has ten
    assert task.takes(candidate) and not short.takes(candidate)
    assert not dataclasses.replace(task, public=None).takes(dp.tuning.CANDIDATES["AdaDPS"])
    with pytest.raises(ValueError, match="whole rounds of 10 steps .* a run has 9"):
        dp.tuning.compare(short, [candidate], (1.0,), DELTA, verbose=0)
    with pytest.raises(ValueError, match="whole rounds of 8 steps"):
        dataclasses.replace(task, steps=7).steps_of(dp.tuning.CANDIDATES["DPAdam, banded noise"])


# Comparisons.


def test_compare_resumes_and_reports(task, tmp_path, monkeypatch):
    path = tmp_path / "results.csv"
    other = dataclasses.replace(SGD, name="other")
    options = {"trials": 2, "seeds": 2, "results": path, "name": "linear", "verbose": 0}
    options["extend"] = False
    comparison = dp.tuning.compare(task, [SGD, other], (1.0, 4.0), DELTA, **options)
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * (2 * 2 + 2 * 2)
    searched = [row for row in rows if row["part"] == "validation"]
    for row in comparison.rows:
        at_once = row["candidate"], f"{row['epsilon']:g}"
        tried = {
            r["values"]: float(r["score"])
            for r in searched
            if (r["candidate"], r["epsilon"]) == at_once
        }
        assert len(tried) == 2
        assert str(row["values"]).replace("'", '"') == min(tried, key=tried.get)
        tested = [r for r in rows if r["part"] == "test"]
        key = row["candidate"], row["epsilon"]
        own = [float(r["score"]) for r in tested if (r["candidate"], float(r["epsilon"])) == key]
        assert row["scores"] == own
        assert row["score"] == pytest.approx(np.mean(own))
        assert row["standard_error"] == pytest.approx(np.std(own, ddof=1) / math.sqrt(2))
    for epsilon in (1.0, 4.0):
        scores = [row["score"] for row in comparison.rows if row["epsilon"] == epsilon]
        assert scores == sorted(scores)
    table = comparison.markdown().splitlines()
    assert table[0] == "| optimizer | ε = 1 | ε = 4 |" and len(table) == 4

    def refuse(*args, **kwargs):
        raise AssertionError("ran again what is in the file")

    monkeypatch.setattr(runs, "train", refuse)
    again = dp.tuning.compare(task, [SGD, other], (1.0, 4.0), DELTA, **options)
    assert again.rows == comparison.rows
    with pytest.raises(AssertionError, match="ran again"):
        dp.tuning.compare(task, [SGD], (1.0, 2.0), DELTA, **options)


def test_who_leads_is_within_two_standard_errors_of_the_best():
    scores = {"a": (0.50, 0.03), "b": (0.55, 0.04), "c": (0.60, 0.02), "d": (0.50, 0.0)}
    rows = [
        {"candidate": name, "epsilon": e, "score": score, "standard_error": error, "values": {}}
        for e in (1.0, 3.0)
        for name, (score, error) in sorted(scores.items(), key=lambda item: item[1][0])
    ]
    rows[4:] = [row | {"standard_error": math.nan} for row in rows[4:]]  # of one seed
    comparison = dp.tuning.Comparison(rows, higher_is_better=False)
    assert comparison.leading(1.0) == ["a", "d", "b"]  # 0.05 is 1.0 of the errors, 0.10 is 2.8
    assert comparison.leading(3.0) == ["a"]
    cells = [line.split(" | ") for line in comparison.markdown().splitlines()[2:]]
    assert [cell[1].startswith("**0.") for cell in cells] == [True, True, True, False]


def test_each_hyperparameter_has_its_trials_and_one_epsilon_can_do(task, tmp_path):
    path = tmp_path / "results.csv"
    two = dp.tuning.candidate(
        "two", "DPSGD", space={"learning_rate": (0.05, 0.5), "clip_norm": (0.1, 1.0)}
    )
    none = dp.tuning.candidate("none", "DPSGD", space={}, learning_rate=0.1)
    comparison = dp.tuning.compare(
        task, [SGD, two, none], (1.0, 4.0), DELTA, trials=2, seeds=1, search_at=4.0, results=path,
        verbose=0, extend=False,
    )  # fmt: skip
    with open(path, newline="", encoding="utf-8") as file:
        searched = [row for row in csv.DictReader(file) if row["part"] == "validation"]
    assert {row["epsilon"] for row in searched} == {"4"}
    counts = collections.Counter(row["candidate"] for row in searched)
    assert counts == {SGD.name: 2, "two": 4}  # what has nothing to search for is not tried
    for name in (SGD.name, "two", "none"):
        low, high = (row["values"] for row in comparison.rows if row["candidate"] == name)
        assert low == high


@pytest.fixture
def best_at_one(monkeypatch):
    """Scores that are best at a learning rate of 1: those of trainings at such rates are chance."""

    def score(task, values, part):
        return abs(math.log(values["learning_rate"]) + 0.01 * math.log(values.get("clip_norm", 1)))

    monkeypatch.setattr(runs, "train", lambda task, candidate, values, *rest, **how: values)
    monkeypatch.setattr(runs, "score", score)


@pytest.mark.usefixtures("best_at_one")
@pytest.mark.parametrize("space", [(1e-4, 1e-3), (30.0, 300.0)])
def test_a_rate_at_an_end_is_followed_until_it_is_no_better(task, space, tmp_path, monkeypatch):
    path = tmp_path / "results.csv"
    far = dp.tuning.candidate(
        "far", "DPSGD", space={"learning_rate": space, "clip_norm": (0.95, 1.0)}
    )
    options = {"trials": 2, "seeds": 1, "results": path, "verbose": 0}
    found = dp.tuning.compare(task, [far], (8.0,), DELTA, **options).rows[0]["values"]
    with open(path, newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["part"] == "validation"]
    tried = [(json.loads(row["values"]), float(row["score"])) for row in rows]
    drawn, beyond = tried[:4], tried[4:]
    rates = [values["learning_rate"] for values, _ in beyond]
    upwards = space[0] < 1
    assert len(rates) > 2 and sorted(rates, reverse=not upwards) == rates
    np.testing.assert_allclose(np.diff(np.log(rates)), math.log(10) / 2 * (1 if upwards else -1),
                               rtol=0.02)  # fmt: skip
    best = min(drawn, key=lambda each: each[1])[0]
    assert {values["clip_norm"] for values, _ in beyond} == {best["clip_norm"]}
    scores = [score for _, score in beyond]
    assert found == beyond[-2][0] and scores[-1] >= scores[-2]
    assert scores[:-1] == sorted(scores[:-1], reverse=True)

    monkeypatch.setattr(runs, "train", None)  # nothing is left to run
    assert dp.tuning.compare(task, [far], (8.0,), DELTA, **options).rows[0]["values"] == found


@pytest.mark.usefixtures("best_at_one")
def test_a_rate_inside_is_not_followed(task, tmp_path):
    path = tmp_path / "results.csv"
    wide = dp.tuning.candidate("wide", "DPSGD", space={"learning_rate": (1e-4, 100.0)})
    dp.tuning.compare(task, [wide], (8.0,), DELTA, trials=6, seeds=1, results=path, verbose=0)
    with open(path, newline="", encoding="utf-8") as file:
        assert len([row for row in csv.DictReader(file) if row["part"] == "validation"]) == 6


def test_plot(task):
    rows = [
        {"candidate": name, "epsilon": e, "score": 1.0, "standard_error": error, "values": {}}
        for name, error in (("a", 0.1), ("b", math.nan))
        for e in (1.0, 3.0)
    ]
    axes = dp.tuning.Comparison(rows, True).plot()
    assert [label.get_text() for label in axes.get_yticklabels()] == ["b", "a"]
    assert axes.get_xlabel() == "score (higher is better)"
    with pytest.raises(ValueError, match="nothing to draw"):
        dp.plots.scores([])


def test_nan_never_wins():
    task = make_task(higher_is_better=True)
    assert task.better([math.nan, 0.1, 0.3, math.nan]) == 2
    assert make_task().better([math.nan, 0.1, 0.3]) == 1


# Tuning.


def test_tune_by_composition(task):
    ledger = Ledger()
    options = {"trials": 3, "ledger": ledger, "verbose": 0, "accountant": "rdp"}
    tuned = dp.tuning.tune(task, SGD, 3.0, DELTA, **options)
    assert len(tuned.trials) == 3 and len(ledger.segments) == 3
    assert tuned.model.ledger is ledger and tuned.epsilon <= 3.0
    sigma = tuned.model.optimizer.noise_multiplier
    assert tuned.epsilon == pytest.approx(spent(sigma, 3 * 16), rel=1e-9)
    assert tuned.epsilon > 2.9
    best = min(tuned.trials, key=lambda each: each["score"])
    assert (tuned.values, tuned.score) == (best["values"], best["score"])
    assert runs.score(task, tuned.model, task.validation) == pytest.approx(tuned.score)


def test_tune_by_private_selection(task, tmp_path, monkeypatch):
    repetitions = RandomRepetitions(4.0, 1.0)
    monkeypatch.setattr(RandomRepetitions, "draw", lambda self, generator: 3)
    ledger = Ledger(tmp_path / "spent.jsonl")
    seen = []
    train = runs.train

    def spy(*args, **kwargs):
        # The whole selection is in the file before any run, in case the process is killed.
        seen.append(Ledger.read(ledger.path).epsilon(DELTA))
        model = train(*args, **kwargs)
        seen.append(runs.score(task, model, task.validation))
        return model

    monkeypatch.setattr(runs, "train", spy)
    tuned = dp.tuning.tune(task, SGD, 3.0, DELTA, repetitions=repetitions, ledger=ledger, verbose=0)
    assert tuned.trials is None and tuned.score == pytest.approx(min(seen[1::2]))
    assert set(seen[::2]) == {tuned.epsilon}
    accountant = dp_accounting.rdp.RdpAccountant()
    step = dp_accounting.GaussianDpEvent(tuned.model.optimizer.noise_multiplier)
    run = dp_accounting.SelfComposedDpEvent(dp_accounting.PoissonSampledDpEvent(0.1, step), 16)
    accountant.compose(dp_accounting.dp_event.RepeatAndSelectDpEvent(run, 4.0, 1.0))
    assert tuned.epsilon == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-9)
    assert 2.9 < tuned.epsilon <= 3.0
    assert "private selection" in " ".join(tuned.statement().lower().split())
    # The model goes on with the ledger of the selection, saved or trained on.
    tuned.model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.ledger.epsilon(DELTA) == pytest.approx(tuned.epsilon)
    tuned.model.fit(task.batches(SGD), verbose=0)
    assert tuned.model.ledger.steps == 32 and tuned.epsilon > 3.0


def test_what_the_model_spent_before_is_not_forgotten(task, tmp_path, monkeypatch):
    monkeypatch.setattr(RandomRepetitions, "draw", lambda self, generator: 2)
    earlier = runs.train(task, SGD, {"learning_rate": 0.1}, 2.0, DELTA)
    earlier.save(tmp_path / "earlier.keras")
    build = functools.partial(keras.saving.load_model, tmp_path / "earlier.keras", compile=False)
    again = dataclasses.replace(task, build=build)
    tuned = dp.tuning.tune(again, SGD, 3.0, DELTA, repetitions=RandomRepetitions(2.0), verbose=0)
    selection, spent_before = tuned.model.ledger.segments
    assert spent_before.run == earlier.ledger.segments[0].run
    assert selection.selection is not None and tuned.epsilon > 3.0


@pytest.mark.parametrize("shared", ["layer", "model"])
def test_models_that_share_what_is_trained_are_not_compared(task, shared):
    """The third run at ε = 1 had spent 1.7."""
    layer, model = keras.layers.Dense(2, name="shared"), task.build()

    def around():
        inputs = keras.Input(model.input_shape[1:])
        return keras.Model(inputs, keras.layers.Dense(model.output_shape[-1])(layer(inputs)))

    again = dataclasses.replace(task, build=around if shared == "layer" else lambda: model)
    again = dataclasses.replace(again, test=task.validation)
    with pytest.raises(ValueError, match="has spent privacy before.*made anew"):
        dp.tuning.compare(again, [SGD], [1.0], DELTA, trials=1, seeds=2, verbose=0)


def test_models_that_have_spent_something_are_not_compared(task, tmp_path):
    """Runs at ε = 1 from private weights had spent 4.3."""
    earlier = runs.train(task, SGD, {"learning_rate": 0.1}, 2.0, DELTA)
    earlier.save(tmp_path / "earlier.keras")
    build = functools.partial(keras.saving.load_model, tmp_path / "earlier.keras", compile=False)
    again = dataclasses.replace(task, build=build)
    with pytest.raises(ValueError, match="has spent privacy before"):
        dp.tuning.compare(again, [SGD], (1.0,), DELTA, verbose=0)


def test_a_seed_is_in_the_statement_of_a_selection(task, monkeypatch):
    monkeypatch.setattr(RandomRepetitions, "draw", lambda self, generator: 1)
    known = dp.tuning.candidate("known", "DPSGD", space={"learning_rate": (0.01, 0.1)}, seed=1)
    tuned = dp.tuning.tune(task, known, 3.0, DELTA, repetitions=RandomRepetitions(2.0), verbose=0)
    (selection,) = tuned.model.ledger.segments
    assert selection.conditions == ("noise seed",) and selection.clip_norm is not None
    assert "Whoever knows it can subtract the noise" in tuned.statement()


def test_the_number_of_runs_is_drawn_anew(task, monkeypatch):
    counted = []
    monkeypatch.setattr(runs, "train", lambda *args, **kwargs: counted.append(1) or _Model())
    monkeypatch.setattr(runs, "score", lambda *args: 1.0)
    totals = set()
    for _ in range(12):  # all the same with probability < 0.1 ** 11
        counted.clear()
        dp.tuning.tune(task, SGD, 3.0, DELTA, repetitions=RandomRepetitions(20.0), verbose=0)
        totals.add(len(counted))
    assert len(totals) > 1


class _Model:
    def __init__(self):
        self.ledger = Ledger.of_segments([None])


# Errors.


def test_errors(task):
    with pytest.raises(ValueError, match="balls in bins, or sampled from 4 groups"):
        dp.tuning.candidate("x", "DPSGD", space={}, groups=4, balls_in_bins=True)
    with pytest.raises(ValueError, match="passes must be an integer >= 1; received 0"):
        dp.tuning.candidate("x", "DPSGD", space={}, passes=0)
    with pytest.raises(ValueError, match="There is no candidate 'Adam'"):
        dp.tuning.compare(task, ["Adam"], verbose=0)
    with pytest.raises(ValueError, match="There is no candidate 'Adam'"):
        dp.tuning.tune(task, "Adam", 1.0, DELTA)
    with pytest.raises(ValueError, match="AdaDPS needs public data"):
        dp.tuning.compare(make_task(public=None), ["AdaDPS"], verbose=0)
    with pytest.raises(ValueError, match="AdaDPS needs public data"):
        dp.tuning.tune(make_task(public=None), "AdaDPS", 1.0, DELTA, verbose=0)
    with pytest.raises(ValueError, match="give the Task a `test` part"):
        dp.tuning.compare(make_task(test=None), [SGD], verbose=0)
    with pytest.raises(ValueError, match="must be at least 1"):
        dp.tuning.compare(task, [SGD], seeds=0, verbose=0)
    with pytest.raises(ValueError, match="repetitions must be None or"):
        dp.tuning.tune(task, SGD, 1.0, DELTA, repetitions=8)
    with pytest.raises(ValueError, match="trials"):
        dp.tuning.tune(task, SGD, 1.0, DELTA, trials=0)


def test_tune_refuses_noise_that_depends_on_the_values(task):
    def make(plan, ratio):
        moments = dp.optimizers.moments.Joint(ratio, max_batch_size=200)
        return dp.optimizers.DPAdam(
            0.1, clip_norm=1.0, batch_size=plan.batch_size, second_moment=moments
        )

    candidate = dp.tuning.Candidate("joint", make, {"ratio": (0.1, 10.0)})
    with pytest.raises(ValueError, match="depends on the values drawn"):
        dp.tuning.tune(task, candidate, 1.0, DELTA, verbose=0)
