"""Ways to make the ε of a statistic false in good faith, found by a reviewer: refused, or paid."""

import copy
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_keras_opt as dp
from dp_keras_opt.noise import entropy
from dp_keras_opt.statistics.contributions import Units
from dp_keras_opt.statistics.vocabulary import word_counts

N = 200
RNG = np.random.default_rng(0)
X = RNG.normal(size=N)


def private(**arguments):
    return dp.statistics.PrivateData(dp.accounting.Ledger(), **arguments)


@pytest.mark.parametrize("name", ["histogram", "quantiles", "bounds", "mean", "mean_and_variance"])
def test_a_row_of_more_numbers_than_others(name):
    """As batches are that are padded to their longest row."""
    rows = tf.data.Dataset.from_generator(
        lambda: ([1.0] * size for size in (1,) * 4 + (64,) * 4),
        output_signature=tf.TensorSpec((None,), tf.float32),
    )
    arguments = {
        "histogram": {"edges": [0.0, 2.0]},
        "quantiles": {"probabilities": [0.5], "bounds": (0, 2)},
        "bounds": {},
        "mean": {"bounds": (0, 2)},
        "mean_and_variance": {"bounds": (0, 2)},
    }[name]
    data = private()
    with pytest.raises(ValueError, match="Rows have the shapes .*Pad all of them to one length"):
        getattr(data, name)(rows.padded_batch(4), epsilon=1.0, delta=0.01, **arguments)
    assert not data.ledger.segments


def test_a_split_that_makes_rows_of_words():
    """Each word would count as a unit."""
    texts = np.array(["spam " * 300, "a b"])

    def flat(rows):
        return tf.strings.split(rows).flat_values

    with pytest.raises(ValueError, match="split made 302 rows of 2"):
        word_counts([texts], Units(), 1, split=flat)
    layer = keras.layers.TextVectorization(split=flat)
    with pytest.raises(ValueError, match="split made"):
        dp.statistics.adapt_privately(layer, texts, private(), 1.0, 0.01, most_per_unit=1)


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_would_release_into_ledgers_that_nobody_reads(way):
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        way(private())


def test_a_fork_has_a_ledger_of_its_own(monkeypatch):
    data = private()
    monkeypatch.setattr(entropy, "process", lambda: (-1, 0))
    with pytest.raises(RuntimeError, match="forked from"):
        data.mean(X, (-1, 1), 1.0, 0.01)


WORDS = np.char.add("w", RNG.integers(0, 9, size=(20, 30)).astype(str))
WORDS[7, :25] = "alice-smith"


@pytest.mark.parametrize("name", ["histogram", "vocabulary", "adapt_privately", "evaluate"])
def test_examples_are_no_batches(name):
    """Of a data set for a sampler each number, or word, counted as a unit: ε = 33 for 1."""
    examples = tf.data.Dataset.from_tensor_slices(
        WORDS if name != "histogram" else X.reshape(8, -1)
    )
    pairs = tf.data.Dataset.zip((examples, examples))
    data, layer = private(), keras.layers.StringLookup()

    def call(rows):
        if name == "histogram":
            return data.histogram(rows, [-1.0, 0.0, 1.0], 1.0, 0.01)
        if name == "vocabulary":
            return data.vocabulary(rows, 30, 1.0, 0.01)
        if name == "adapt_privately":
            return dp.statistics.adapt_privately(layer, rows, data, 1.0, 0.01, most_per_unit=30)
        return dp.statistics.evaluate(None, rows, "accuracy", data, 1.0, 0.01)

    for rows in (examples, examples.batch(2).unbatch().shuffle(3)):
        with pytest.raises(ValueError, match="nothing shows that these are batches"):
            call(pairs if name == "evaluate" else rows)
    assert not data.ledger.segments
    if name == "histogram":
        call(examples.batch(4))
        (segment,) = data.ledger.segments
        assert segment.sampling.num_examples == len(list(examples))


@pytest.mark.parametrize(
    "ids",
    [
        ["a", np.nan, np.nan],
        [1, "b", 2],
        ["a", None, "b"],
        np.ma.masked_array([1, 0, 0], [False, True, True]),
    ],
)
def test_persons_without_an_id_are_not_one_person(ids):
    with pytest.raises(TypeError, match="none missing"):
        private(users=ids)
    with pytest.raises(TypeError, match="none missing"):
        dp.data.poisson_users((np.ones((3, 1)), np.ones(3)), ids, 1, examples_per_user=1)


def test_ids_in_a_list_are_taken():
    assert private(users=["a", "b", "a"]).count(np.ones(3, bool), 1.0, 0.01)
    assert private(users=[3, np.int64(1), 3]).count(np.ones(3, bool), 1.0, 0.01)


def test_rows_that_come_in_another_order_later():
    """The first batch of a data set that shuffles batches is often the same; so is a boolean."""
    batches = tf.data.Dataset.from_tensor_slices(X).batch(10)
    kept, shuffled = batches.take(1), batches.skip(1).shuffle(50)
    data = private(users=np.arange(N) % 20)
    with pytest.raises(ValueError, match="in another order at each pass"):
        data.mean(kept.concatenate(shuffled), (-1, 1), 1.0, 0.01)
    words = tf.data.Dataset.from_tensor_slices([f"w{i}" for i in range(N)]).shuffle(N)
    with pytest.raises(ValueError, match="in another order"):
        data.vocabulary(words, 1, 1.0, 0.01)


def model_of(*layers):
    model = dp.DPModel(inputs := keras.Input((1,)), keras.Sequential(layers)(inputs))
    model.compile(dp.optimizers.DPSGD(0.1, clip_norm=0.5, noise_multiplier=1.5), "mse")
    return model


def train(model, **arguments):
    batches = dp.data.poisson_batches((X[:, None], X[:, None]), 20, steps_per_epoch=2, **arguments)
    model.fit(batches, verbose=0)


def test_a_layer_brings_what_its_state_has_cost():
    """Also where nobody gave the model the ledger."""
    layer, data = keras.layers.Normalization(), private()
    dp.statistics.adapt_privately(layer, X[:, None], data, 1.0, 0.01, bounds=(-3, 3))
    model = model_of(layer, keras.layers.Dense(1))
    assert [segment.purpose is None for segment in model.ledger.segments] == [False]
    train(model)
    assert model.ledger.epsilon(0.01) > 1.0
    assert "Statistic: mean and variance" in model.statement(0.01)


def test_scores_of_the_training_data_go_to_the_ledger_of_the_model():
    model = model_of(keras.layers.Dense(1))
    data = dp.statistics.PrivateData(model.ledger)
    model.ledger = dp.accounting.Ledger()
    train(model)
    metric = dp.statistics.metrics.Mean(keras.losses.mean_absolute_error, (0, 1), "mae")
    rows = X[:, None], X[:, None]
    with pytest.raises(ValueError, match="not the ledger of the model"):
        dp.statistics.evaluate(model, rows, metric, data, 1.0, 0.01)
    dp.statistics.evaluate(model, rows, metric, dp.statistics.PrivateData(model.ledger), 1.0, 0.01)
    other = private(data_set="test")
    dp.statistics.evaluate(model, rows, metric, other, 1.0, 0.01)


def test_rows_beside_users_of_the_same_name():
    users = np.arange(N) % 20
    ledger = dp.accounting.Ledger()
    dp.statistics.PrivateData(ledger, unit="user").mean(X, (-1, 1), 1.0, 0.01)
    model = model_of(keras.layers.Dense(1))
    model.ledger = ledger
    batches = dp.data.poisson_users(
        (X[:, None], X[:, None]), users, 5, examples_per_user=5, steps_per_epoch=2
    )
    with pytest.raises(ValueError, match="were rows counted as such"):
        model.fit(batches, verbose=0)
    with_ids = model_of(keras.layers.Dense(1))
    dp.statistics.PrivateData(with_ids.ledger, users=users).mean(X, (-1, 1), 1.0, 0.01)
    with_ids.fit(batches, verbose=0)
    with pytest.raises(ValueError, match="were rows counted as such"):
        dp.statistics.PrivateData(with_ids.ledger, unit="user").mean(X, (-1, 1), 1.0, 0.01)


def test_a_data_set_that_the_ledger_does_not_know_is_not_one_of_which_nothing_is_known():
    data = private(data_set="survey")
    data.mean(X, (-1, 1), 2.0, 0.001)
    for call in (
        lambda: data.ledger.epsilon(0.001),
        lambda: data.ledger.epsilon(0.001, data_set="Survey"),
        lambda: data.ledger.epsilon_as_planned(0.001),
        lambda: data.ledger.risk(),
    ):
        with pytest.raises(ValueError, match=r"has nothing, but of \['survey'\]"):
            call()
    assert data.ledger.epsilon_as_planned(0.001, data_set="survey") > 1.9


def test_how_often_something_was_asked_counts_as_fixed():
    data = private()
    data.mean(X, (-1, 1), 0.1, 0.001)
    assert "count as fixed" not in data.ledger.statement(0.001)
    data.mean(X, (-1, 1), 0.1, 0.001)
    assert "count as fixed beforehand" in " ".join(data.ledger.statement(0.001).split())


def test_a_summary_without_noise_is_not_kept():
    layer = keras.layers.Discretization(num_bins=4)
    layer.adapt(X)
    with pytest.raises(ValueError, match="was adapted before"):
        dp.statistics.adapt_privately(layer, X, private(), 1.0, 0.01, bounds=(-3, 3))


def searched(runs, monkeypatch):
    """What `tune` finds in so many runs, each of which adapts a layer anew."""

    def build():
        layer, data = keras.layers.Normalization(), private()
        dp.statistics.adapt_privately(layer, X[:, None], data, 1.0, 0.01, bounds=(-3, 3))
        return keras.Sequential([keras.Input((1,)), layer, keras.layers.Dense(1)])

    rows = X[:, None].astype("float32"), X[:, None].astype("float32")
    task = dp.tuning.Task(build, rows, rows, "mse", batch_size=20, steps=2)
    repetitions = dp.accounting.RandomRepetitions(30.0, shape=0.0)
    monkeypatch.setattr(dp.accounting.RandomRepetitions, "draw", lambda self, generator: runs)
    candidate = dp.tuning.CANDIDATES["DPSGD"]
    return dp.tuning.tune(task, candidate, 3.0, 1e-3, repetitions=repetitions)


def test_a_search_that_releases_something_in_each_run(monkeypatch):
    with pytest.raises(ValueError, match="releases something anew in each run"):
        searched(2, monkeypatch)


def test_what_a_search_of_a_single_run_released_is_in_the_ledger(monkeypatch):
    ledger = searched(1, monkeypatch).model.ledger
    assert ledger.epsilon(0.011) > 3.2  # 3 at δ = 1e-3 is the budget of the search alone
