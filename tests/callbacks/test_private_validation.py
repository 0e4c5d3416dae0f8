"""Scores on private validation data: paid for before the training, released once each."""

import copy
import csv
import json
import warnings

import dp_accounting
import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_keras_opt as dp
from dp_keras_opt import workers
from dp_keras_opt.accounting import Ledger, Sampling
from dp_keras_opt.callbacks import PrivacyBudget, PrivacyReport, PrivateValidation
from dp_keras_opt.noise import entropy, numbers
from dp_keras_opt.statistics.evaluation import Scores
from dp_keras_opt.statistics.metrics import ConfusionMatrix, Loss, Mean
from tests.helpers.normals import assert_exactly

layers = keras.layers
N, B, V, SIGMA, EPSILON, DELTA = 60, 12, 40, 1.1, 0.6, 1e-3
RNG = np.random.default_rng(2)
X = RNG.normal(size=(N, 4)).astype("float32")
Y = (X[:, 0] > 0).astype("int32")
X_VAL = RNG.normal(size=(V, 4)).astype("float32")
Y_VAL = (X_VAL[:, 0] > 0).astype("int32")


def make(noise_multiplier=SIGMA, rate=0.3, **compiled):
    inputs = keras.Input((4,))
    model = dp.DPModel(inputs, layers.Dense(2, "softmax")(inputs))
    optimizer = dp.optimizers.DPSGD(rate, clip_norm=0.5, noise_multiplier=noise_multiplier)
    model.compile(optimizer, "sparse_categorical_crossentropy", **compiled)
    return model


def batches(**arguments):
    return dp.data.poisson_batches((X, Y), B, **arguments)


def scored(metrics="accuracy", epsilon=EPSILON, delta=DELTA, data=(X_VAL, Y_VAL), **arguments):
    return PrivateValidation(data, metrics, epsilon, delta, **arguments)


def fit(model, *callbacks, epochs=3, x=None, **arguments):
    callbacks = list(callbacks)
    x = batches() if x is None else x
    return model.fit(x, epochs=epochs, verbose=0, callbacks=callbacks, **arguments)


def epsilon_of(multiplier, times, steps=0, delta=DELTA):
    """By dp_accounting, called directly: scores, and steps of Poisson batches."""
    accountant = dp_accounting.pld.PLDAccountant()
    scores = dp_accounting.GaussianDpEvent(multiplier)
    accountant.compose(dp_accounting.SelfComposedDpEvent(scores, times))
    if steps:
        step = dp_accounting.PoissonSampledDpEvent(B / N, dp_accounting.GaussianDpEvent(SIGMA))
        accountant.compose(dp_accounting.SelfComposedDpEvent(step, steps))
    return accountant.get_epsilon(delta)


@pytest.fixture
def draws(monkeypatch):
    """What was released: (total, noisy), in their order."""
    seen, honest = [], numbers.released

    def record(total, *terms):
        seen.append((total, honest(total, *terms)))
        return seen[-1][1]

    monkeypatch.setattr(numbers, "released", record)
    return seen


# The price.


@pytest.mark.parametrize("is_disjoint", [False, True])
def test_all_that_is_planned_is_paid_for_before_the_first_step(is_disjoint):
    model, validation = make(), scored(disjoint_from_training=is_disjoint)
    report = PrivacyReport(DELTA)
    paid = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: seen.append([s.steps for s in model.ledger.segments])
    )
    seen = []
    history = fit(model, validation, report, paid, epochs=4).history
    assert seen[0] == [4, 0]
    name = "validation" if is_disjoint else "training"
    (scores,) = (s for s in model.ledger.of_data_set(name) if s.purpose)
    multiplier = scores.releases[0].multiplier
    assert (scores.steps, scores.clip_norm) == (4, 1.0)
    assert scores.sampling == Sampling.full(V)
    assert epsilon_of(multiplier, 4) == pytest.approx(EPSILON, rel=1e-3)
    assert epsilon_of(0.999 * multiplier, 4) > EPSILON * (1 - 1e-3)
    if is_disjoint:
        trained = epsilon_of(1e9, 1, steps=20)
        assert history["epsilon_validation"] == pytest.approx([EPSILON] * 4, rel=1e-3)
    else:
        trained = epsilon_of(multiplier, 4, steps=20)
    assert history["epsilon"][-1] == pytest.approx(trained, rel=1e-3)


def test_a_budget_leaves_the_training_what_the_scores_leave():
    found = {}
    for is_disjoint in (False, True):
        model = make(None)
        fit(model, PrivacyBudget(2.0, DELTA), scored(disjoint_from_training=is_disjoint))
        assert 1.99 < model.ledger.epsilon(DELTA) <= 2.0 * (1 + 1e-6)
        found[is_disjoint] = model.optimizer.noise_multiplier
        assert int(model.optimizer.iterations) == 15
    alone = make(None)
    fit(alone, PrivacyBudget(2.0, DELTA))
    assert found[True] == pytest.approx(alone.optimizer.noise_multiplier)
    assert found[False] > 1.02 * found[True]


@pytest.mark.parametrize("multiplier", [None, SIGMA])
def test_scores_beyond_the_budget_are_refused_and_not_paid(multiplier):
    model = make(multiplier)
    with pytest.raises(dp.PrivacyBudgetError, match="would exceed the privacy budget ε = 0.5"):
        fit(model, PrivacyBudget(0.5, DELTA), scored())
    assert not model.ledger.steps
    with pytest.raises(dp.PrivacyBudgetError, match="not even the first"):
        fit(make(0.4), PrivacyBudget(0.7, DELTA), scored())


def test_a_budget_of_before_counts_too():
    model = make()
    fit(model, PrivacyBudget(20.0, DELTA), epochs=1)
    model.budget = PrivacyBudget(model.ledger.epsilon(DELTA) + 0.01, DELTA)
    with pytest.raises(dp.PrivacyBudgetError, match="scores of PrivateValidation would exceed"):
        fit(model, scored(epsilon=5.0))


def test_an_early_stop_has_paid_and_a_later_fit_goes_on(draws):
    model, validation = make(), scored()
    stop = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: setattr(model, "stop_training", epoch == 1)
    )
    fit(model, validation, stop, epochs=5)
    paid = model.ledger.to_json()
    assert json.loads(paid)["segments"][0]["steps"] == 5 and len(draws) == 2
    with pytest.raises(ValueError, match="paid for 3 more evaluations, and this fit plans 4"):
        fit(model, validation, epochs=4)
    fit(model, validation, epochs=3)
    assert len(draws) == 5 and validation.epochs == [0, 1, 0, 1, 2]
    with pytest.raises(ValueError, match="paid for 0 more"):
        fit(model, validation, epochs=1)
    assert [s.steps for s in model.ledger.segments if s.purpose] == [5]
    with pytest.raises(RuntimeError, match="No evaluation is left"):
        validation.on_epoch_end(7, {})
    assert len(draws) == 5


def test_which_epochs_are_scored(draws):
    validation = scored(every=2)
    history = fit(make(), validation, epochs=7, initial_epoch=2).history
    assert validation.epochs == [3, 5] and len(draws) == 2
    assert [s.steps for s in validation.model.ledger.segments] == [2, 25]
    assert len(history["private_accuracy"]) == 2
    with pytest.raises(ValueError, match="none of epochs 0 to 1 is"):
        fit(make(), scored(every=2), epochs=1)
    model, more = make(), scored(evaluations=6)
    fit(model, more, epochs=2)
    fit(model, more, epochs=4)
    assert [s.steps for s in model.ledger.segments if s.purpose] == [6]
    with pytest.raises(ValueError, match="paid for 2 more"):
        fit(make(), scored(evaluations=2), epochs=3)


def test_a_copy_and_a_fork_pay_anew(monkeypatch):
    model, validation = make(), scored(evaluations=9)
    fit(model, validation, epochs=1)
    validation._model = None
    again = copy.deepcopy(validation)
    fit(model, again, epochs=1)
    assert [s.steps for s in model.ledger.segments if s.purpose] == [9, 9]
    monkeypatch.setattr(entropy, "process", lambda: "another")
    fit(model, again, epochs=1)
    assert [s.steps for s in model.ledger.segments if s.purpose] == [9, 9, 9]
    with pytest.raises(ValueError, match="in the ledger of another model"):
        fit(make(), again, epochs=1)


def test_the_ledger_file_has_them_before_anything_is_released(tmp_path, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(numbers, "released", killed)
    model = make()
    model.ledger = Ledger(tmp_path / "spent.jsonl")
    with pytest.raises(KeyboardInterrupt):
        fit(model, scored(), epochs=6)
    (scores,) = (s for s in Ledger.read(tmp_path / "spent.jsonl").segments if s.purpose)
    assert scores.steps == 6


def test_a_saved_model_has_paid(tmp_path):
    model = make()
    fit(model, scored())
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.ledger.to_json() == model.ledger.to_json()
    fit(loaded, scored(), epochs=1)
    assert [s.steps for s in loaded.ledger.segments if s.purpose] == [3, 1]


# The release.


@pytest.mark.parametrize("compiled", [
    {}, {"jit_compile": True}, {"run_eagerly": True}, {"steps_per_execution": 3},
], ids=str)  # fmt: skip
def test_each_evaluation_is_drawn_once_and_afresh(draws, compiled):
    """At weights that stay, so that the totals are the same and the noise is all that differs."""
    model, validation = make(rate=0.0, **compiled), scored(["accuracy", Loss(2.0)])
    fit(model, validation, epochs=4)
    assert len(draws) == 4
    totals, noisy = map(np.array, zip(*draws, strict=True))
    np.testing.assert_allclose(totals, totals[:1] * np.ones((4, 1)), atol=1e-5)
    assert len(np.unique(noisy)) == noisy.size
    right = np.mean(model.predict(X_VAL, verbose=0).argmax(1) == Y_VAL)
    assert (totals[0, 0] * 2**0.5 / V + 1) / 2 == pytest.approx(right, abs=1e-6)


def test_the_noise_has_the_deviation_that_is_stated(monkeypatch):
    """900 evaluations; the same test refuses two thirds and one and a half of it."""
    validation = scored(evaluations=901, epsilon=20.0)
    fit(make(), validation, epochs=1)
    total = validation._scores.total(validation.model, validation._rows, _units())
    exact = validation._scores.estimates(total, 0.0, V)["accuracy"].value

    def known(self, model, rows, units):
        units.rows(V)
        return total

    monkeypatch.setattr(Scores, "total", known)
    for epoch in range(900):
        validation.on_epoch_end(epoch, {})
    values, stds = np.transpose(validation.history["accuracy"][1:])
    assert np.ptp(stds) == 0
    assert_exactly(values - exact, stds[0])


def _units():
    return dp.statistics.PrivateData(Ledger())._units()


def test_scores_are_of_the_weights_at_the_end_of_the_epoch(draws):
    """Those of the training, also where the optimizer keeps an average."""
    model = make()
    model.compile(
        dp.optimizers.DPSGD(0.3, clip_norm=0.5, noise_multiplier=SIGMA, use_ema=True),
        "sparse_categorical_crossentropy",
    )
    right = []
    exact = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: right.append(
            np.mean(model(X_VAL).numpy().argmax(1) == Y_VAL)
        )
    )
    fit(model, exact, scored())
    np.testing.assert_allclose([(total[0] / V + 1) / 2 for total, _ in draws], right, atol=1e-6)


def test_the_training_is_the_same_without_it():
    """Scoring draws nothing that the training draws, and moves no weight."""
    weights = []
    for callbacks in ([], [scored()]):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((4,))
        model = dp.DPModel(inputs, layers.Dense(2, "softmax")(inputs))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer = dp.optimizers.DPSGD(0.3, clip_norm=0.5, noise_multiplier=SIGMA, seed=1)
            model.compile(optimizer, "sparse_categorical_crossentropy")
            fit(model, *callbacks, x=batches(seed=3))
        weights.append(model.get_weights()[0])
    np.testing.assert_array_equal(*weights)


# What reads them.


def test_callbacks_see_them_wherever_they_stand(tmp_path, monkeypatch):
    values = iter([0.9, 0.5, 0.4, 0.3])
    monkeypatch.setattr(
        Scores, "estimates", lambda *_: {"accuracy": dp.statistics.Estimate(next(values), 0.1)}
    )
    best = tmp_path / "best.keras"
    readers = [
        keras.callbacks.EarlyStopping("private_accuracy", mode="max", patience=2),
        keras.callbacks.ModelCheckpoint(best, "private_accuracy", mode="max", save_best_only=True),
        keras.callbacks.ReduceLROnPlateau("private_accuracy", mode="max", patience=1, factor=0.5),
        keras.callbacks.CSVLogger(tmp_path / "log.csv"),
    ]
    model = make()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*steered by figures")
        history = fit(model, *readers, scored(), epochs=4).history
    assert history["private_accuracy"] == [0.9, 0.5, 0.4]
    with (tmp_path / "log.csv").open() as file:
        assert [row["private_accuracy"] for row in csv.DictReader(file)] == ["0.9", "0.5", "0.4"]
    assert keras.saving.load_model(best).optimizer.iterations == 5
    assert float(model.optimizer.learning_rate) < 0.3
    text = " ".join(model.statement(DELTA).split())
    assert "15 steps of 20 planned" in text and "released 4 times" in text


def test_raw_figures_draw_their_warning_still():
    with pytest.warns(UserWarning, match=r"steered by .* EarlyStopping \(monitor='loss'\)"):
        fit(make(), keras.callbacks.EarlyStopping("loss"), scored(), epochs=1)
    with pytest.warns(UserWarning, match=r"EarlyStopping \(monitor='private_accuracy'\)"):
        fit(make(), keras.callbacks.EarlyStopping("private_accuracy", mode="max"), epochs=1)


def test_the_history_may_be_drawn_and_put_into_a_card(tmp_path):
    model, validation = make(), scored(["accuracy", ConfusionMatrix(2)])
    fit(model, validation)
    axes = dp.plots.training_curve(validation)
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["accuracy", "balanced_accuracy", "precision", "recall"]
    values = [estimate.value for estimate in validation.history["accuracy"]]
    np.testing.assert_allclose(axes.get_lines()[0].get_ydata(), values)
    np.testing.assert_allclose(axes.get_lines()[0].get_xdata(), [1, 2, 3])
    assert validation.history["confusion_matrix"][0].value.shape == (2, 2)
    with pytest.raises(ValueError, match="no evaluation"):
        dp.plots.training_curve(scored())
    last = validation.history["accuracy"][-1]
    metric = dp.serving.Metric(last, "validation data", private=True)
    assert (metric.figure, metric.noise_std) == (last.value, pytest.approx(last.noise_std))
    card = dp.serving.ModelCard(metrics={"accuracy": metric})
    report = PrivacyReport(DELTA)
    report.set_model(model)
    dp.serving.export(model, tmp_path / "served", report, card=card)
    text = (tmp_path / "served" / dp.serving.MODEL_CARD).with_suffix(".json").read_text()
    written = json.loads(text)
    assert written["metrics"]["accuracy"]["noise_std"] == pytest.approx(last.noise_std)
    assert "released with noise" in written["metrics"]["accuracy"]["note"]
    purposes = [each["purpose"] for each in written["privacy"]["training"]]
    assert purposes[1] is None and "confusion_matrix" in purposes[0]
    with pytest.raises(ValueError, match="finite number"):
        dp.serving.Metric(dp.statistics.Estimate(np.nan, 1.0), "data", private=True)


# Whose data they are.


def test_statements_say_whose_data_they_are():
    for is_disjoint in (False, True):
        model = make()
        fit(model, scored(disjoint_from_training=is_disjoint))
        text = " ".join(model.statement(DELTA).split())
        name = " of the validation data" if is_disjoint else ""
        assert f"times the L2 sensitivity 1; of n = {V} examples{name}." in text
        assert "the best is optimistic" in text
        assert ("No example is in two of these data sets" in text) == is_disjoint
        assert f"one example{name} with epsilon" in text
        assert text.count("Guarantee:") == 1 + is_disjoint


def test_arrays_and_their_adjacency():
    model = make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(X, Y, batch_size=B, epochs=2, verbose=0, callbacks=[scored()])
    scores, trained = model.ledger.segments
    assert scores.sampling == Sampling.full(V, "zero_out")
    assert trained.sampling.adjacency == "zero_out"
    assert model.ledger.epsilon(DELTA) > EPSILON  # they compose


def test_replaced_rows_have_twice_the_noise():
    found = {}
    for adjacency in ("zero_out", "replace_one"):
        data = tf.data.Dataset.from_tensors((X[:B], Y[:B])).repeat(5)
        x = dp.data.assume_sampling(data, Sampling.without_replacement(N, B, adjacency))
        model = make()
        model.compile(
            dp.optimizers.DPSGD(0.3, clip_norm=0.5, noise_multiplier=SIGMA, batch_size=B),
            "sparse_categorical_crossentropy",
        )
        fit(model, scored(), x=x, epochs=1)
        found[adjacency] = model.ledger.segments[0].releases[0].multiplier
    assert found["replace_one"] == pytest.approx(2 * found["zero_out"], rel=1e-3)


def test_users_share_the_contributions_of_their_rows(draws):
    owners = np.arange(N) % 20
    users = np.repeat(np.arange(8), [1, 1, 2, 2, 4, 5, 5, 20])
    x = dp.data.poisson_users((X, Y), owners, 6, examples_per_user=3)
    model = make(rate=0.0)
    fit(model, scored(users=users), x=x, epochs=1)
    scores = model.ledger.segments[0]
    assert scores.sampling == Sampling.full(8, unit="user")
    right = model.predict(X_VAL, verbose=0).argmax(1) == Y_VAL
    expected = np.mean([right[users == user].mean() for user in range(8)])
    assert (draws[0][0][0] / 8 + 1) / 2 == pytest.approx(expected, abs=1e-6)
    with pytest.raises(ValueError, match="The training protects users .* users=ids"):
        fit(model, scored(), x=x, epochs=1)
    with pytest.raises(ValueError, match="The training protects examples"):
        fit(make(), scored(users=users), epochs=1)
    model = make()
    fit(model, scored(users=users, disjoint_from_training=True), epochs=1)
    assert model.ledger.of_data_set("validation")[0].sampling.unit == "user"
    with pytest.raises(ValueError, match="`users` names 7 rows"):
        fit(make(), scored(users=np.arange(7), disjoint_from_training=True), epochs=1)


# Refusals.


def test_figures_without_noise_beside_it_are_refused():
    model = make()
    for raw in ({"validation_data": (X_VAL, Y_VAL)}, {"validation_split": 0.2}):
        with pytest.raises(ValueError, match=f"does not take {next(iter(raw))} beside Private"):
            model.fit(X, Y, verbose=0, callbacks=[scored()], **raw)
    with pytest.raises(ValueError, match="takes one PrivateValidation"):
        fit(model, scored(), scored())
    assert not model.ledger.steps


def test_where_nothing_is_counted_it_is_refused(monkeypatch):
    inputs = keras.Input((4,))
    plain = keras.Model(inputs, layers.Dense(2, "softmax")(inputs))
    plain.compile("sgd", "sparse_categorical_crossentropy")
    with pytest.raises(TypeError, match=r"needs a dp_keras_opt\.DPModel"):
        plain.fit(X, Y, verbose=0, callbacks=[scored()])
    monkeypatch.setattr(workers, "place", lambda *_: (0, 2))
    with pytest.raises(ValueError, match="not for several workers"):
        scored().enter_evaluations(make(), Sampling.poisson(N, B), range(2), None)


def test_arguments_out_of_range_are_refused_at_once():
    for wrong in (
        {"every": 0}, {"evaluations": 0}, {"epsilon": 0.0}, {"epsilon": np.inf}, {"delta": 0.0},
        {"delta": 1.0}, {"noise": "uniform"}, {"weights": [1, 2]},
    ):  # fmt: skip
        with pytest.raises(ValueError):
            scored(**wrong)
    with pytest.raises(TypeError, match="no noise can be scaled"):
        scored("mae")


def test_data_that_change_their_length_are_refused():
    sizes = iter([V, V, 30])

    def rows():
        for row in range(next(sizes)):
            yield X_VAL[row], Y_VAL[row]

    data = tf.data.Dataset.from_generator(rows, output_signature=(
        tf.TensorSpec((4,)), tf.TensorSpec((), tf.int32)
    )).batch(16)  # fmt: skip
    with pytest.raises(ValueError, match="30 examples in the validation data, and 40 when"):
        fit(make(), scored(data=data))


# Models.


def test_what_does_not_fit_is_refused_before_anything_is_paid():
    model = make()
    with pytest.raises(ValueError, match="of 3 classes, but the output has 2"):
        fit(model, scored(ConfusionMatrix(3)))
    with pytest.raises(ValueError, match="mixes rows"):
        fit(model, scored(Mean(lambda y, p: p[:, 0] - tf.reduce_mean(p[:, 0]), (-1, 1), "m")))
    assert not model.ledger.steps


def test_a_loss_that_is_compiled_anew_is_the_one_that_is_scored(draws):
    def halved(y_true, y_pred):
        return 0.5 * keras.losses.sparse_categorical_crossentropy(y_true, y_pred)

    model, validation = make(rate=0.0), scored(Loss(2.0), evaluations=2)
    for loss in ("sparse_categorical_crossentropy", halved):
        model.compile(dp.optimizers.DPSGD(0.0, clip_norm=0.5, noise_multiplier=SIGMA), loss)
        fit(model, validation, epochs=1)
    output = model(X_VAL).numpy()
    whole = -np.log(output[np.arange(V), Y_VAL])
    for (total, _), losses in zip(draws, (whole, whole / 2), strict=True):
        assert total[0] == pytest.approx(np.sum(np.minimum(losses, 2) - 1), abs=1e-3)


def test_a_model_of_texts(draws):
    texts = np.where(Y == 1, "good film", "bad film")[:, None]
    words = layers.TextVectorization(vocabulary=["good", "bad", "film"], output_mode="multi_hot")
    model = keras.Sequential([
        keras.Input((1,), dtype="string"), words, layers.Dense(1, "sigmoid")
    ])  # fmt: skip
    model = dp.make_private(model)
    optimizer = dp.optimizers.DPSGD(3.0, clip_norm=1.0, noise_multiplier=0.1)
    model.compile(optimizer, "binary_crossentropy")
    data = tf.data.Dataset.from_tensor_slices((texts, Y)).batch(16)
    x = dp.data.poisson_batches((texts, Y[:, None].astype("float32")), 20)
    fit(model, scored(data=data), x=x, epochs=5)
    assert len(draws) == 5
    assert draws[-1][0][0] == pytest.approx(N)  # all are right


def test_laplace_noise_for_no_delta():
    model = make()
    fit(model, scored(delta=0.0, noise="laplace", disjoint_from_training=True))
    ledger = Ledger.of_segments(model.ledger.of_data_set("validation"))
    assert ledger.epsilon(0.0, data_set="validation") == pytest.approx(EPSILON, rel=1e-3)


def test_a_network_for_pictures():
    images = np.where(Y[:, None, None, None] == 1, 1.0, -1.0) + RNG.normal(size=(N, 8, 8, 1))
    model = keras.Sequential([
        keras.Input((8, 8, 1)), layers.Conv2D(4, 3, activation="relu"),
        layers.GroupNormalization(2), layers.GlobalAveragePooling2D(), layers.Dropout(0.5),
        layers.Dense(1, "sigmoid"),
    ])  # fmt: skip
    model = dp.make_private(model)
    model.compile(dp.optimizers.DPAdam(0.1, clip_norm=1.0, noise_multiplier=0.1),
                  "binary_crossentropy")  # fmt: skip
    x = dp.data.poisson_batches((images.astype("float32"), Y[:, None]), 20)
    metrics = ["accuracy", "auc", Loss(1.0), ConfusionMatrix(2)]
    validation = scored(metrics, epsilon=1e4, data=(images[:40].astype("float32"), Y[:40]))
    history = fit(model, validation, x=x, epochs=8).history
    exact = np.mean((model.predict(images[:40], verbose=0)[:, 0] > 0.5) == Y[:40])
    assert history["private_accuracy"][-1] == pytest.approx(exact, abs=0.1)
    assert history["private_auc"][-1] > 0.8


def test_scores_keep_the_filter_of_their_training():
    """Epochs, scores and a further fit with other noise: all within one limit."""
    budget = PrivacyBudget(3.0, DELTA, accountant=dp.accounting.RenyiFilter(12))
    validation = scored(epsilon=0.3)
    model = make(noise_multiplier=4.0)
    fit(model, budget, validation, epochs=1)
    filters = {segment.filter for segment in model.ledger.segments}
    assert filters == {budget.budget.filter}
    model.compile(dp.optimizers.DPSGD(0.1, clip_norm=0.5, noise_multiplier=6.0),
                  "sparse_categorical_crossentropy")  # fmt: skip
    fit(model, budget, scored(epsilon=0.3), epochs=1)
    assert model.ledger.epsilon(DELTA) <= 3.0 == model.ledger.epsilon_as_planned(DELTA)
