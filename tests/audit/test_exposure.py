"""Exposure of inserted sequences: ranks by hand, and a language model that learns one by heart."""

import math

import keras
import numpy as np
import pytest

from dp_keras_opt import audit


def test_ranks_by_hand():
    # Seven candidates and the secret: rank 1 is 3 bits, rank 2 is 2, rank 8 is 0.
    candidates = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    found = audit.exposure([0.5, 1.5, 9.0, 3.0], candidates)
    np.testing.assert_allclose(found, [3, 2, 0, 1])  # the last one's rank is 4: ties count
    assert audit.exposure([0.0], [0.0] * 7) == [0.0]  # a constant model exposes nothing


def test_of_a_model_that_saw_nothing_the_exposure_is_rarely_large():
    rng = np.random.default_rng(0)
    found = np.array([audit.exposure(rng.random(1), rng.random(255))[0] for _ in range(4000)])
    for bits in (1, 3, 5):  # 2^-bits, within four standard errors
        share = 2.0**-bits
        assert np.mean(found >= bits) == pytest.approx(share, abs=4 * math.sqrt(share / 4000))


@pytest.mark.parametrize("inserted, candidates", [([np.nan], [1.0]), ([], [1.0]), ([1.0], [[1.0]])])
def test_what_are_no_losses_is_refused(inserted, candidates):
    with pytest.raises(ValueError, match="one per sequence"):
        audit.exposure(inserted, candidates)


def language_model(logits=True, mask=False):
    inputs = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(11, 16, mask_zero=mask)(inputs)
    x = keras.layers.GRU(48, return_sequences=True)(x)
    model = keras.Model(inputs, keras.layers.Dense(11)(x))
    model.compile(
        keras.optimizers.Adam(1e-2), keras.losses.SparseCategoricalCrossentropy(from_logits=logits)
    )
    return model


def shifted(sequences):
    """The next token from those before it; 10 begins a sequence."""
    begin = np.full((len(sequences), 1), 10)
    return np.concatenate([begin, sequences[:, :-1]], axis=1), sequences


def test_losses_are_sums_over_the_positions_that_count():
    keras.utils.set_random_seed(0)
    x, y = np.array([[1, 2, 3], [4, 5, 0], [6, 0, 0]]), np.array([[2, 3, 1], [5, 1, 7], [1, 7, 7]])
    for mask in (False, True):
        model = language_model(mask=mask)
        logits = model.predict(x, verbose=0).astype(float)
        losses = (
            np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, y[..., None], 2)[..., 0]
        )
        counted = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 0]])
        expected = (losses * (counted if mask else 1)).sum(axis=1)
        found = audit.sequence_losses(model, (x, y), batch_size=2)
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        weights = (np.array([[0, 1, 1], [1, 1, 1], [1, 1, 1]]) * counted).astype("float32")
        found = audit.sequence_losses(model, (x, y, weights))
        np.testing.assert_allclose(found, (losses * weights).sum(axis=1), rtol=1e-5)


def test_a_model_without_positions_is_refused():
    inputs = keras.Input((3,))
    model = keras.Model(inputs, keras.layers.Dense(2)(inputs))
    with pytest.raises(ValueError, match="no compiled loss"):
        audit.sequence_losses(model, (np.zeros((2, 3)), np.zeros(2)))
    model.compile(loss="mse")
    with pytest.raises(ValueError, match="positions"):
        audit.sequence_losses(model, (np.zeros((2, 3)), np.zeros((2, 2))))


def test_what_a_language_model_learned_by_heart_is_exposed():
    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    data, secrets = rng.integers(0, 10, (400, 6)), rng.integers(0, 10, (3, 6))
    candidates = rng.integers(0, 10, (1023, 6))
    trained = np.concatenate([data, np.repeat(secrets[:1], 20, axis=0), secrets[1:2]])
    model = language_model()
    model.fit(*shifted(trained), epochs=12, batch_size=32, verbose=0)
    losses = [audit.sequence_losses(model, shifted(each)) for each in (secrets, candidates)]
    often, once, never = audit.exposure(*losses)
    assert often == 10.0  # log₂ 1024, the limit
    assert never < 7  # 7 bits by chance: once in 128 models
    assert once < often
