"""Scores on private data: values without noise, sensitivity, noise, price, refusals."""

import copy

import dp_accounting
import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_keras_opt as dp
from dp_keras_opt.audit import bounds
from dp_keras_opt.noise import numbers
from dp_keras_opt.statistics.contributions import Units
from dp_keras_opt.statistics.evaluation import Rows, Scores
from dp_keras_opt.statistics.metrics import AUC, Accuracy, ConfusionMatrix, Loss, Mean
from dp_keras_opt.statistics.release import noisy
from tests.helpers.normals import assert_exactly

layers, evaluate = keras.layers, dp.statistics.evaluate
N, DELTA = 90, 1e-3
RNG = np.random.default_rng(3)
X = RNG.normal(size=(N, 4)).astype("float32")
TWO, THREE = RNG.integers(0, 2, N), RNG.integers(0, 3, N)
USERS = RNG.permutation(np.arange(N) % 17)


def classifier(units, activation, loss, **compiled):
    keras.utils.set_random_seed(5)
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(units, activation, name="scores")(inputs))
    model.compile("sgd", loss, **compiled)
    return model


SIGMOID = classifier(1, "sigmoid", "binary_crossentropy")
SOFTMAX = classifier(3, "softmax", "sparse_categorical_crossentropy")


def private(**arguments):
    return dp.statistics.PrivateData(dp.accounting.Ledger(), **arguments)


def values(model, data, metrics, **arguments):
    found = evaluate(model, data, metrics, private(**arguments), 1.0, DELTA)
    return {name: estimate.value for name, estimate in found.items()}


def by_row(users, each):
    """The mean over units of the mean of their rows, in float64."""
    each = np.asarray(each, np.float64)
    if users is None:
        return each.mean()
    return np.mean([each[users == user].mean() for user in np.unique(users)])


# Values.


@pytest.mark.parametrize("users", [None, USERS])
def test_accuracies_are_those_of_keras(barrier, users):
    def found(model, y):
        return values(model, (X, y), "accuracy", users=users)["accuracy"]

    two, three = SIGMOID.predict(X, verbose=0), SOFTMAX.predict(X, verbose=0)
    assert found(SIGMOID, TWO) == pytest.approx(by_row(users, (two[:, 0] > 0.5) == TWO), abs=1e-6)
    right = by_row(users, three.argmax(1) == THREE)
    for y in (THREE, THREE[:, None], np.eye(3)[THREE]):
        assert found(SOFTMAX, y) == pytest.approx(right, abs=1e-6)
    if users is None:  # by compile, as a whole
        compiled = classifier(3, "softmax", "sparse_categorical_crossentropy", metrics=["accuracy"])
        compiled.set_weights(SOFTMAX.get_weights())
        by_keras = compiled.evaluate(X, THREE, verbose=0, return_dict=True)["accuracy"]
        assert right == pytest.approx(by_keras, abs=1e-6)


@pytest.mark.parametrize("users", [None, USERS])
def test_losses_and_means_are_brought_within_their_bounds(barrier, users):
    output = SOFTMAX.predict(X, verbose=0).astype(np.float64)
    losses = -np.log(output[np.arange(N), THREE])
    errors = np.abs(output - np.eye(3)[THREE]).mean(1)
    bound, low, high = np.median(losses), *np.quantile(errors, [0.3, 0.8])
    found = values(SOFTMAX, (X, np.eye(3)[THREE]), [
        Mean(keras.metrics.mean_absolute_error, (low, high), "mae"),
        Mean(keras.losses.MeanAbsoluteError(), (low, high), "same"),
    ], users=users)  # fmt: skip
    expected = by_row(users, np.clip(errors, low, high))
    assert found == {"mae": pytest.approx(expected, abs=1e-5),
                     "same": pytest.approx(expected, abs=1e-5)}  # fmt: skip
    found = values(SOFTMAX, (X, THREE), Loss(bound), users=users)["loss"]
    assert found == pytest.approx(by_row(users, np.minimum(losses, bound)), abs=1e-5)


def test_the_confusion_matrix_is_that_of_tensorflow(barrier):
    predicted = SOFTMAX.predict(X, verbose=0).argmax(1)
    expected = tf.math.confusion_matrix(THREE, predicted).numpy()
    for y in (THREE, THREE[:, None], np.eye(3)[THREE]):
        found = values(SOFTMAX, (X, y), ConfusionMatrix(3))
        np.testing.assert_allclose(found["confusion_matrix"], expected, atol=1e-4)
        recalls = np.diag(expected) / expected.sum(1)
        assert found["balanced_accuracy"] == pytest.approx(recalls.mean(), abs=1e-5)
    predicted = SIGMOID.predict(X, verbose=0)[:, 0] > 0.5
    found = values(SIGMOID, (X, TWO), ConfusionMatrix(2))
    both = np.sum(predicted & (TWO == 1))
    assert found["precision"] == pytest.approx(both / predicted.sum(), abs=1e-5)
    assert found["recall"] == pytest.approx(both / TWO.sum(), abs=1e-5)


@pytest.mark.parametrize("bins", [10, [0.3, 0.4, 0.45, 0.7]])
def test_the_area_is_that_of_all_pairs_of_binned_scores(barrier, bins):
    scores = SIGMOID.predict(X, verbose=0)[:, 0]
    edges = np.linspace(0, 1, bins + 1)[1:-1] if isinstance(bins, int) else bins
    place = np.searchsorted(np.float32(edges), scores, side="right")
    positive, negative = place[TWO == 1][:, None], place[TWO == 0]
    expected = np.mean((positive > negative) + 0.5 * (positive == negative))
    assert values(SIGMOID, (X, TWO), AUC(bins))["auc"] == pytest.approx(expected, abs=1e-5)
    logits = classifier(1, None, keras.losses.BinaryCrossentropy(from_logits=True))
    logits.set_weights(SIGMOID.get_weights())
    found = values(logits, (X, TWO), AUC(bins, from_logits=True))["auc"]
    assert found == pytest.approx(expected, abs=1e-5)


def test_several_metrics_are_one_vector(barrier):
    metrics = ["accuracy", "auc", Loss(0.7), ConfusionMatrix(2)]
    together = values(SIGMOID, (X, TWO), metrics)
    assert len(barrier) == 1 and barrier[0][0].shape == (1 + 40 + 1 + 4,)
    for metric in metrics:
        for name, value in values(SIGMOID, (X, TWO), metric).items():
            np.testing.assert_allclose(together[name], value, atol=1e-4, err_msg=name)


def test_positions_of_a_row_are_averaged_and_masked_ones_left_out(barrier):
    """Rows of 2 to 5 words of which each is classified; a row's words share its part."""
    lengths = RNG.integers(2, 6, N)
    words = np.where(np.arange(5) < lengths[:, None], RNG.integers(1, 9, (N, 5)), 0)
    classes = RNG.integers(0, 3, (N, 5))
    inputs = keras.Input((5,), dtype="int32")
    hidden = layers.Embedding(9, 4, mask_zero=True)(inputs)
    tagger = keras.Model(inputs, layers.Dense(3, "softmax")(hidden))
    tagger.compile("sgd", "sparse_categorical_crossentropy")
    output = tagger.predict(words, verbose=0).astype(np.float64)
    right, losses, matrix = [], [], np.zeros((3, 3))
    for row, length, true in zip(output, lengths, classes, strict=True):
        row, true = row[:length], true[:length]
        right.append(np.mean(row.argmax(1) == true))
        losses.append(np.mean(-np.log(row[np.arange(length), true])))
        np.add.at(matrix, (true, row.argmax(1)), 1 / length)
    metrics = ["accuracy", Loss(1.1), ConfusionMatrix(3)]
    found = values(tagger, (words, classes), metrics)
    assert found["accuracy"] == pytest.approx(np.mean(right), abs=1e-5)
    assert found["loss"] == pytest.approx(np.mean(np.minimum(losses, 1.1)), abs=1e-4)
    np.testing.assert_allclose(found["confusion_matrix"], matrix, atol=1e-3)


def test_an_output_of_several_is_named(barrier):
    inputs = keras.Input((4,))
    outputs = {"a": layers.Dense(1, "sigmoid", name="a")(inputs),
               "b": layers.Dense(3, "softmax", name="b")(inputs)}  # fmt: skip
    model = keras.Model(inputs, outputs)
    data = X, {"a": TWO, "b": THREE}
    found = values(model, data, [
        Accuracy("a", output="a"), Accuracy("b", output="b"),
        Mean(lambda y, p: tf.cast(y["a"] == y["b"], "float32"), (0, 1), "same"),
    ])  # fmt: skip
    a, b = model(X)["a"].numpy()[:, 0] > 0.5, model(X)["b"].numpy().argmax(1)
    expected = {"a": np.mean(a == TWO), "b": np.mean(b == THREE), "same": np.mean(TWO == THREE)}
    assert found == pytest.approx(expected, abs=1e-6)
    with pytest.raises(ValueError, match="Name the one that it is about"):
        values(model, data, "accuracy")
    with pytest.raises(ValueError, match="about output 'c'"):
        values(model, data, Accuracy(output="c"))


def test_rows_that_are_not_finite_count_nothing(barrier):
    x = X.copy()
    x[:30] = np.nan
    metrics = [ConfusionMatrix(3), Loss(0.7), Mean(lambda y, p: p[:, 0], (0.0, 1.0), "first")]
    found = values(SOFTMAX, (x, THREE), metrics)
    output = SOFTMAX.predict(X[30:], verbose=0)
    matrix = tf.math.confusion_matrix(THREE[30:], output.argmax(1), num_classes=3).numpy()
    np.testing.assert_allclose(found["confusion_matrix"], matrix, atol=1e-4)
    losses = -np.log(output[np.arange(60), THREE[30:]])
    expected = (30 * 0.7 + np.minimum(losses, 0.7).sum()) / N  # no number counts as the bound
    assert found["loss"] == pytest.approx(expected, abs=1e-5)
    assert found["first"] == pytest.approx((30 * 0.5 + output[:, 0].sum()) / N, abs=1e-5)


# Data.


def test_data_of_every_kind_give_the_same(barrier, tmp_path):
    np.save(tmp_path / "x.npy", X)
    on_disk = np.load(tmp_path / "x.npy", mmap_mode="r")
    dataset = tf.data.Dataset.from_tensor_slices((X, THREE))
    empty = dataset.take(0).batch(7)
    in_parts = dataset.take(70).batch(7).concatenate(empty).concatenate(dataset.skip(70).batch(20))
    given = [(X, THREE), (tf.constant(X), tf.constant(THREE)), (on_disk, THREE), dataset.batch(7),
             in_parts]  # fmt: skip
    found = [values(SOFTMAX, data, ["accuracy", Loss(1.0)], users=USERS) for data in given]
    for each in found:
        assert each == pytest.approx(found[0], abs=1e-6)
    for seen in barrier:
        np.testing.assert_allclose(seen[0], barrier[0][0], atol=1e-5)


def test_texts_go_through_the_layers_of_a_model(barrier):
    texts = np.array(["good film", "bad film", "good", "awful bad"] * 5)
    lookup = layers.TextVectorization(output_mode="multi_hot", vocabulary=["good", "bad"])
    model = keras.Sequential([keras.Input((1,), dtype="string"), lookup,
                              layers.Dense(1, "sigmoid")])  # fmt: skip
    model.layers[-1].set_weights([np.array([[0.0], [4.0], [-4.0]]), np.zeros(1)])
    y = np.array([1, 0, 1, 1] * 5)
    found = values(model, (texts[:, None], y), ["accuracy"])
    assert found["accuracy"] == pytest.approx(0.75, abs=1e-6)


def test_an_objective_is_the_loss(barrier):
    def error(x, y, outputs, intermediates):
        return tf.reduce_sum(tf.square(outputs - x), axis=1)

    inputs = keras.Input((4,))
    model = dp.DPModel(inputs, layers.Dense(4)(inputs))
    model.compile(dp.optimizers.DPSGD(0.1, clip_norm=1.0, noise_multiplier=1.0),
                  dp.Objective(error))  # fmt: skip
    losses = np.sum((model(X).numpy() - X) ** 2, axis=1)
    found = values(model, (X, None), Loss(5.0), data_set="test")["loss"]
    assert found == pytest.approx(np.minimum(losses, 5).mean(), rel=1e-4)


# Sensitivity, noise, price.


@pytest.mark.parametrize("norm", ["l2", "l1"])
@pytest.mark.parametrize("weights", [None, [1.0, 5.0, 0.2, 2.0]])
def test_a_unit_moves_the_sum_by_one_at_most(norm, weights):
    """One user with all rows more, of the worst values; the bound is reached."""
    metrics = [Mean(lambda y, p: 1e9 * (p[:, 0] - 0.5), (-1, 1), "m"), "accuracy", "auc",
               ConfusionMatrix(2)]  # fmt: skip
    scores, users = Scores(metrics, norm, weights), np.sort(USERS)
    with_all = scores.total(SIGMOID, Rows((X, TWO)), Units(users))
    moved = []
    for user in range(max(users)):
        rest = users != user
        without = scores.total(
            SIGMOID,
            Rows((X[rest], TWO[rest])),
            Units(np.unique(users[rest], return_inverse=True)[1]),
        )
        moved.append(np.linalg.norm(with_all - without, 1 if norm == "l1" else 2))
    assert max(moved) <= 1 + 1e-9
    one = [np.linalg.norm(scores.total(SIGMOID, Rows((X[i:i + 1], TWO[i:i + 1])), Units()),
                          1 if norm == "l1" else 2) for i in range(20)]  # fmt: skip
    assert max(one) == pytest.approx(1, abs=1e-6) and max(one) <= 1


def test_weights_share_out_the_noise():
    even, other = (
        evaluate(SIGMOID, (X, TWO), ["accuracy", Loss(1.0)], private(), 1.0, DELTA, weights=weights)
        for weights in (None, [3.0, 4.0])
    )
    sigma = np.sqrt(2) * other["accuracy"].noise_std * 3 / 5
    assert even["accuracy"].noise_std == pytest.approx(sigma)
    assert even["loss"].noise_std == pytest.approx(np.sqrt(2) * other["loss"].noise_std * 4 / 5)


@pytest.mark.parametrize("metric", [
    "accuracy", Loss(2.0), Mean(lambda y, p: p[:, 0], (-3.0, 1.0), "m"), ConfusionMatrix(3),
], ids=["accuracy", "loss", "mean", "matrix"])  # fmt: skip
def test_the_noise_has_the_deviation_that_is_stated(metric, monkeypatch):
    """900 releases; the same test refuses two thirds and one and a half of it."""
    scores = Scores([metric, "acc"], "l2")
    name = scores.metrics[0].name
    own = private()
    total = scores.total(SOFTMAX, Rows((X, THREE)), own._units())
    exact = scores.estimates(total, 0.0, N)[name].value
    monkeypatch.setattr(Scores, "total", lambda self, *rest: _sizes(self, scores, total, rest[-1]))
    draws = []
    for _ in range(900 if np.ndim(exact) == 0 else 100):
        found = evaluate(SOFTMAX, (X, THREE), [metric, "acc"], private(), 1.0, DELTA)[name]
        draws.append(np.ravel(found.value - exact))
    assert_exactly(np.concatenate(draws), found.noise_std)


def _sizes(scores, known, total, units):
    scores._sizes = known._sizes
    units.rows(N)
    return total


@pytest.mark.parametrize("name", ["auc", "balanced_accuracy", "precision", "recall"])
def test_the_deviation_of_a_share_is_about_that_of_many_releases(name):
    """To first order, of counts well above the noise; 3000 draws have it within 4%, 3 std."""
    metric = AUC(8) if name == "auc" else ConfusionMatrix(2)
    scores = Scores(metric, "l2")
    total = 40 * scores.total(SIGMOID, Rows((X, TWO)), Units())
    noise, std = np.random.default_rng(0).normal(size=(3000, len(total))), 12.0
    exact = scores.estimates(total, std, 40 * N)[name]
    seen = [scores.estimates(total + std * z, std, 40 * N)[name].value for z in noise]
    assert np.std(seen) == pytest.approx(exact.noise_std, rel=0.08)
    assert np.mean(seen) == pytest.approx(exact.value, abs=0.2 * exact.noise_std)


def test_the_price_is_that_of_dp_accounting():
    for noise, event in (("gaussian", dp_accounting.GaussianDpEvent),
                         ("laplace", dp_accounting.LaplaceDpEvent)):  # fmt: skip
        own = private(noise=noise, data_set="test")
        found = evaluate(SIGMOID, (X, TWO), ["accuracy"], own, 0.7, DELTA, "test scores")
        (segment,) = own.ledger.of_data_set("test")
        assert (segment.purpose, segment.steps, segment.clip_norm) == ("test scores", 1, 1.0)
        multiplier = segment.releases[0].multiplier
        factor = 2**0.5 if noise == "laplace" else 1.0  # b of Laplace noise has √2·b
        assert found["accuracy"].noise_std == pytest.approx(multiplier * factor / 2 / N)
        accountant = dp_accounting.pld.PLDAccountant()
        accountant.compose(event(multiplier))
        assert accountant.get_epsilon(DELTA) == pytest.approx(0.7, rel=1e-3)
        assert own.ledger.epsilon(DELTA, data_set="test") == pytest.approx(0.7, rel=1e-3)


def test_the_ledger_has_the_release_before_it_is_drawn(monkeypatch):
    own = private()

    def refuse(*_):
        raise RuntimeError

    monkeypatch.setattr(numbers, "released", refuse)
    with pytest.raises(RuntimeError):
        evaluate(SIGMOID, (X, TWO), "accuracy", own, 0.7, DELTA)
    assert own.ledger.steps == 1


def attack(factor, monkeypatch):
    """A lower bound on ε from 2000 releases of neighbours, with `factor` times the noise."""
    honest = numbers.released
    monkeypatch.setattr(
        numbers, "released",
        lambda total, mechanism, multiplier, sensitivity: honest(
            total, mechanism, factor * multiplier, sensitivity
        ),
    )  # fmt: skip
    scores = Scores(["accuracy", "auc"], "l2")
    totals = [scores.total(SIGMOID, Rows((X[k:], TWO[k:])), Units()) for k in (0, 1)]
    segment = private()._plan_scores(N, 1.0, 0.05, "scores")
    away = (totals[0] - totals[1]) / np.sum((totals[0] - totals[1]) ** 2)
    seen = [[(noisy(each, segment)[0] - totals[1]) @ away for _ in range(2000)] for each in totals]
    hits, alarms = (int(np.sum(np.array(each) > 0.9)) for each in seen)
    return bounds.many_run_bound(alarms, 2000, 2000 - hits, 2000, 0.05, 0.9999)


def test_an_attack_proves_no_more_than_the_price(monkeypatch):
    """Wrong by chance in 1 of 10⁴ runs; with half of the noise it proves more."""
    assert attack(1.0, monkeypatch) <= 1.0


def test_an_attack_finds_too_little_noise(monkeypatch):
    assert attack(0.5, monkeypatch) > 1.0


# What is refused.


@pytest.mark.parametrize("function", [
    lambda y, p: p[:, 0] - tf.reduce_mean(p[:, 0]),
    lambda y, p: tf.cast(tf.argsort(tf.argsort(p[:, 0])), "float32") / N,
    lambda y, p: tf.roll(p[:, 0], 1, 0),
    lambda y, p: tf.reverse(p[:, 0], [0]),
])  # fmt: skip
def test_metrics_that_mix_rows_are_refused(function):
    own = private()
    with pytest.raises(ValueError, match="'m' gives rows other values in another batch"):
        evaluate(SOFTMAX, (X, THREE), Mean(function, (0, 1), "m"), own, 1.0, DELTA)
    assert not own.ledger.steps


@pytest.mark.parametrize("users", [None, USERS])
@pytest.mark.parametrize("kind", ["hinge", "squared_hinge"])
def test_hinge_whose_labels_another_row_changes_is_refused(kind, users):
    """Labels of 0 and 1 are -1 and 1 if all of a batch are: one label of 2 moved a sum by 77."""
    function, loss = getattr(keras.metrics, kind), keras.losses.get(kind)
    compiled = classifier(1, "tanh", kind)
    whatever = ((SIGMOID, Mean(function, (0, 3), "m")), (SIGMOID, Mean(loss, (0, 3), "m")),
                (compiled, Loss(3.0)))  # fmt: skip
    for model, metric in whatever:
        own = private(users=users)
        with pytest.raises(ValueError, match="where another row of their batch is changed"):
            evaluate(model, (X, TWO[:, None]), metric, own, 1.0, DELTA)
        assert not own.ledger.steps


@pytest.mark.parametrize(
    "mixing",
    [
        lambda t: t + tf.nn.relu(tf.reduce_max(tf.abs(t)) - 100),
        lambda t: t * tf.cast(tf.reduce_all(tf.reduce_any(t != 0, axis=1)), tf.float32),
    ],
)
def test_rows_that_only_an_unusual_row_changes_are_refused(mixing):
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(3, "softmax")(layers.Lambda(mixing)(inputs)))
    with pytest.raises(ValueError, match="where another row of their batch is changed"):
        evaluate(model, (X, THREE), "accuracy", private(), 1.0, DELTA)


def test_models_that_mix_rows_or_draw_are_refused():
    inputs = keras.Input((4,))
    mixing = layers.Lambda(lambda t: t - tf.reduce_mean(t, 0))(inputs)
    drawing = layers.Lambda(lambda t: t + tf.random.normal(tf.shape(t)), name="d")(inputs)
    for hidden in (mixing, drawing):
        model = keras.Model(inputs, layers.Dense(3, "softmax")(hidden))
        with pytest.raises(ValueError, match="mixes rows, .* or it draws random numbers"):
            evaluate(model, (X, THREE), "accuracy", private(), 1.0, DELTA)


def test_texts_that_pad_each_other_are_refused():
    """A layer of words without a length of its own pads to the longest text of a batch."""
    texts = np.array(["good film", "bad", "good", "awful bad film"] * 5)[:, None]
    lookup = layers.TextVectorization(vocabulary=["good", "bad", "film"])
    model = keras.Sequential([
        keras.Input((1,), dtype="string"), lookup,
        layers.Embedding(9, 4, keras.initializers.RandomNormal(seed=0)),
        layers.GlobalAveragePooling1D(),
        layers.Dense(1, "sigmoid", kernel_initializer="ones"),
    ])  # fmt: skip
    with pytest.raises(ValueError, match="it mixes rows"):
        evaluate(model, (texts, np.ones(20)), "accuracy", private(), 1.0, DELTA)


def test_metrics_without_a_bounded_form_say_what_to_use():
    for metric, words in (
        ("precision", "ConfusionMatrix"), (keras.metrics.Recall(), "ConfusionMatrix"),
        ("loss", r"Loss\(bound\)"), ("mae", "Mean"), (keras.metrics.AUC(), "Mean"),
        (keras.metrics.mean_squared_error, "Mean"),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=f"no noise can be scaled .*{words}"):
            dp.statistics.metrics.get(metric)
    with pytest.raises(TypeError, match="keeps sums over batches"):
        Mean(keras.metrics.MeanSquaredError(), (0, 1), "m")
    with pytest.raises(ValueError, match="tell them apart.*accuracy"):
        dp.statistics.metrics.get(["accuracy", "accuracy"])
    with pytest.raises(ValueError, match="received none"):
        dp.statistics.metrics.get([])
    for wrong in ((1, 0), (0, np.inf), 3):
        with pytest.raises(ValueError, match="finite and ascending"):
            Mean(keras.metrics.mean_squared_error, wrong, "m")
    with pytest.raises(ValueError, match="reduces over the batch"):
        values(SOFTMAX, (X, THREE), Mean(lambda y, p: tf.reduce_mean(p), (0, 1), "m"))
    with pytest.raises(ValueError, match="gives 2 values for 90 rows"):
        values(SOFTMAX, (X, THREE), Mean(lambda y, p: tf.zeros(2), (0, 1), "m"))
    with pytest.raises(ValueError, match="of 4 classes, but the output has 3"):
        values(SOFTMAX, (X, THREE), ConfusionMatrix(4))
    with pytest.raises(ValueError, match="one positive number for each of 1 metrics"):
        evaluate(SOFTMAX, (X, THREE), "accuracy", private(), 1.0, DELTA, weights=[1.0, 2.0])


def test_data_that_are_no_rows_are_refused():
    weights = np.ones(N, "float32")
    dataset = tf.data.Dataset.from_tensor_slices((X, THREE))
    for data, error, words in (
        ((X, THREE, weights), ValueError, "sample_weight is not taken"),
        (tf.data.Dataset.from_tensors((X, THREE, weights)), ValueError, "sample_weight is not"),
        (dataset.batch(5).repeat(), ValueError, "no end"),
        (dataset, ValueError, "batches of rows"),
        (
            dataset.padded_batch(5).map(lambda x, y: (x[:, : tf.reduce_max(y)], y)),
            ValueError,
            "longest of a batch may pad all others",
        ),
        (tf.data.Dataset.from_tensors(X), TypeError, r"batches \(x, y\)"),
        (dataset.take(0).batch(5), ValueError, "empty"),
        (dp.data.poisson_batches((X, THREE), 10), TypeError, "not of Batches"),
    ):
        with pytest.raises(error, match=words):
            values(SOFTMAX, data, "accuracy")
    with pytest.raises(ValueError, match="`users` names 17 rows"):
        values(SOFTMAX, (X, THREE), "accuracy", users=np.arange(17))
    with pytest.raises(TypeError, match="which ledger counts"):
        evaluate(SOFTMAX, (X, THREE), "accuracy", dp.accounting.Ledger(), 1.0, DELTA)


def test_scores_can_be_copied_after_use():
    scores = Scores("accuracy", "l2")
    total = scores.total(SOFTMAX, Rows((X, THREE)), Units())
    again = copy.deepcopy(scores).total(SOFTMAX, Rows((X, THREE)), Units())
    np.testing.assert_array_equal(total, again)


def test_auc_of_logits_is_asked_for_by_name():
    x = np.random.default_rng(0).normal(size=(200, 3)).astype("float32")
    y = np.float32(x[:, :1] > 0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", keras.losses.BinaryCrossentropy(from_logits=True))
    private = dp.statistics.PrivateData(dp.accounting.Ledger())
    with pytest.raises(ValueError, match=r"outputs are logits.*AUC\(from_logits=True\)"):
        dp.statistics.evaluate(model, (x, y), "auc", private, 1.0, 1e-4)
    assert not private.ledger.segments
    metric = dp.statistics.metrics.AUC(from_logits=True)
    dp.statistics.evaluate(model, (x, y), metric, private, 1.0, 1e-4)
