"""Layers that are adapted privately: their state is what was released, and nothing else."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_keras_opt as dp
from dp_keras_opt.noise import numbers

RNG = np.random.default_rng(0)
N = 2000
TEXTS = [
    " ".join(row) for row in np.array(["The", "cat,", "sat", "mat"])[RNG.integers(0, 4, (N, 5))]
]


@pytest.fixture
def silent(monkeypatch):
    """No noise: then a state is what `adapt` finds."""
    monkeypatch.setattr(numbers, "released", lambda total, *terms: np.asarray(total))


def adapted(layer, data, epsilon=1.0, delta=1e-6, **arguments):
    private = dp.statistics.PrivateData(dp.accounting.Ledger())
    dp.statistics.adapt_privately(layer, data, private, epsilon, delta, **arguments)
    return layer, private.ledger


NUMBERS = {
    "table": (RNG.normal([1, 5], [1, 3], (N, 2)), {"axis": -1}, ([-10, -20], [10, 30])),
    "column": (RNG.normal(1, 2, N), {"axis": None}, (-15, 15)),
    "images": (RNG.random((200, 4, 4, 3)), {"axis": -1}, (0, 1)),
    "all": (RNG.random((200, 4, 4)), {"axis": None}, (0, 1)),
    "two axes": (RNG.random((200, 4, 3)), {"axis": (1, 2)}, (0, 1)),
}


@pytest.mark.parametrize("kind", NUMBERS)
def test_normalization_without_noise_is_that_of_keras(kind, silent):
    values, arguments, bounds = NUMBERS[kind]
    mine, _ = adapted(keras.layers.Normalization(**arguments), values, bounds=bounds)
    keras_own = keras.layers.Normalization(**arguments)
    keras_own.adapt(values)
    np.testing.assert_allclose(mine(values), keras_own(values), atol=2e-3)


def test_a_variance_is_no_less_than_its_noise():
    layer, _ = adapted(keras.layers.Normalization(axis=None), np.ones(N), 0.1, bounds=(-10, 10))
    assert layer.adapt_variance.numpy() > 1e-3


def test_discretization_without_noise_is_that_of_keras(silent):
    values = RNG.normal(0, 1, N)
    mine, _ = adapted(keras.layers.Discretization(num_bins=4), values, bounds=(-5, 5), bins=1000)
    np.testing.assert_allclose(
        mine.bin_boundaries, np.quantile(values, [0.25, 0.5, 0.75]), atol=0.02
    )
    again = keras.layers.Discretization.from_config(mine.get_config())
    np.testing.assert_array_equal(again(values), mine(values))


@pytest.mark.parametrize("output_mode", ["int", "multi_hot", "tf_idf"])
@pytest.mark.parametrize("max_tokens", [None, 4])
def test_text_vectorization_without_noise_is_that_of_keras(output_mode, max_tokens, silent):
    def layer():
        return keras.layers.TextVectorization(max_tokens=max_tokens, output_mode=output_mode)

    # Frequencies far apart, so that documents and occurrences have one order.
    texts = ["cat"] * 900 + ["cat sat"] * 600 + ["cat sat mat!"] * 300
    mine, _ = adapted(layer(), texts, most_per_unit=10)
    keras_own = layer()
    keras_own.adapt(texts)
    assert mine.get_vocabulary() == keras_own.get_vocabulary()
    np.testing.assert_allclose(mine(texts[-1:]), keras_own(texts[-1:]), rtol=1e-5)


@pytest.mark.parametrize("dtype", ["string", "integer"])
def test_lookups_without_noise_are_those_of_keras(dtype, silent):
    numbers_ = RNG.permutation(np.repeat([7, 3, 5], [900, 600, 300]))
    values = numbers_ if dtype == "integer" else numbers_.astype(str)
    kind = keras.layers.IntegerLookup if dtype == "integer" else keras.layers.StringLookup
    mine, _ = adapted(kind(), values, most_per_unit=1)
    keras_own = kind()
    keras_own.adapt(values)
    assert mine.get_vocabulary() == keras_own.get_vocabulary()


def test_the_state_has_noise_and_its_price():
    values = RNG.random(N)
    states = set()
    for _ in range(3):
        layer, ledger = adapted(keras.layers.Normalization(axis=None), values, bounds=(0, 1))
        states.add(float(layer.adapt_mean.numpy().ravel()[0]))
        assert 0.99 < ledger.epsilon(1e-6) <= 1.0
        assert ledger.segments[0].purpose == f"mean and variance of Normalization {layer.name!r}"
    assert len(states) == 3


def test_a_model_of_adapted_layers_is_saved_with_its_ledger(tmp_path):
    ledger = dp.accounting.Ledger()
    private = dp.statistics.PrivateData(ledger, unit="review")
    words = keras.layers.TextVectorization(output_mode="multi_hot", max_tokens=8)
    texts = tf.data.Dataset.from_tensor_slices(TEXTS).batch(100)
    dp.statistics.adapt_privately(words, texts, private, 0.5, 1e-6, most_per_unit=4)
    inputs = keras.Input((), dtype="string")
    model = dp.DPModel(inputs, keras.layers.Dense(1)(words(inputs)))
    optimizer = dp.optimizers.DPSGD(0.1, clip_norm=0.5, noise_multiplier=1.5)
    model.compile(optimizer, "mse")
    model.ledger = ledger
    y = np.float32([["cat" in text] for text in TEXTS])
    batches = dp.data.poisson_batches((np.array(TEXTS), y), 100, unit="review", steps_per_epoch=3)
    model.fit(batches, epochs=1, verbose=0)
    assert model.ledger.epsilon(1e-5) > 0.5
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.ledger.epsilon(1e-5) == pytest.approx(model.ledger.epsilon(1e-5))
    text = " ".join(loaded.statement(1e-5).split())
    assert "Statistic: vocabulary of TextVectorization 'text_vectorization" in text
    assert "Training: 3 steps" in text


def test_a_budget_counts_what_was_adapted():
    """The noise of the training is found for what the statistics have left."""

    def multiplier(ledger):
        model = dp.make_private(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))
        model.compile(dp.optimizers.DPSGD(0.1, clip_norm=0.5), "mse")
        model.ledger = ledger
        x, y = RNG.random((N, 2)), RNG.random((N, 1))
        batches = dp.data.poisson_batches((x, y), 100, steps_per_epoch=3)
        budget = dp.callbacks.PrivacyBudget(1.0, 1e-5)
        model.fit(batches, epochs=1, verbose=0, callbacks=[budget])
        assert model.ledger.epsilon(1e-5) <= 1.0
        return model.optimizer.noise_multiplier

    _, ledger = adapted(keras.layers.Normalization(axis=None), RNG.random(N), 0.8, bounds=(0, 1))
    assert multiplier(ledger) > 1.05 * multiplier(dp.accounting.Ledger())


@pytest.mark.parametrize(
    "layer, arguments, error, message",
    [
        (keras.layers.Normalization(axis=None), {}, ValueError, "needs bounds, within which range"),
        (keras.layers.Discretization(num_bins=3), {}, ValueError, "needs bounds"),
        (keras.layers.StringLookup(), {}, ValueError, "needs most_per_unit, for how many words"),
        (keras.layers.StringLookup(vocabulary=["a"]), {"most_per_unit": 1}, ValueError, "already"),
        (keras.layers.Discretization([1.0]), {"bounds": (0, 1)}, ValueError, "bin_boundaries"),
        (
            keras.layers.Normalization(mean=0.0, variance=1.0), {"bounds": (0, 1)},
            ValueError, "was given its mean",
        ),
        (keras.layers.Normalization(axis=0), {"bounds": (0, 1)}, ValueError, "keeps axis 0"),
        (keras.layers.Dense(1), {}, TypeError, "Dense cannot be adapted privately"),
        (keras.layers.Hashing(3), {}, TypeError, "Set its state from what PrivateData releases"),
    ],
)  # fmt: skip
def test_what_cannot_be_adapted_is_named(layer, arguments, error, message):
    with pytest.raises(error, match=message):
        adapted(layer, RNG.random(N), **arguments)


def test_a_ledger_alone_does_not_say_whose_data_they_are():
    with pytest.raises(TypeError, match="private must be"):
        dp.statistics.adapt_privately(
            keras.layers.Normalization(), RNG.random((N, 1)), dp.accounting.Ledger(), 1.0, 1e-6
        )
