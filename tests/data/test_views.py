"""Augmentation multiplicity: the views of an example are averaged before the clip."""

import dataclasses
import json
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_keras_opt as dp

N, B, K, CLIP = 30, 6, 3, 0.05
_rng = np.random.default_rng(0)
X = _rng.normal(size=(N, 4)).astype("float32")
Y = _rng.normal(size=(N, 1)).astype("float32")
USERS = np.repeat(np.arange(10), 3)


def _noisy(x, y):
    return x + tf.random.normal(tf.shape(x)), y


def _model(engine):
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(5, activation="tanh")(inputs)
    if engine == "general":
        hidden = keras.layers.Reshape((5,))(keras.layers.SimpleRNN(5)(hidden[:, None]))
    return dp.DPModel(inputs, keras.layers.Dense(1)(hidden))


@pytest.mark.parametrize("engine", ["book-keeping", "general"])
@pytest.mark.parametrize("physical_batch_size", [None, 2 * K])
@pytest.mark.parametrize("of_users", [False, True])
def test_the_mean_over_the_views_is_clipped(engine, physical_batch_size, of_users):
    """Against the gradients of one unit at a time."""
    how = {"map": _noisy, "views": K, "physical_batch_size": physical_batch_size}
    if of_users:
        batches = dp.data.poisson_users((X, Y), USERS, B, 1, examples_per_user=2, **how)
    else:
        batches = dp.data.poisson_batches((X, Y), B, 1, **how)
    (batch,) = batches
    x, y, rows = batch
    per_unit = K * (2 if of_users else 1)
    assert rows.mask.shape[1] == per_unit and np.sum(rows.mask) > 0
    model = _model(engine)
    before = [tf.identity(v) for v in model.trainable_variables]
    expected = [np.zeros(v.shape) for v in before]
    for unit, mask in enumerate(np.asarray(rows.mask)):
        own = [unit * per_unit + row for row in np.flatnonzero(mask)]
        if not own:
            continue
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(tf.gather(x, own)) - tf.gather(y, own)) ** 2)
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        norm = np.sqrt(sum(np.sum(np.square(g)) for g in gradients))
        assert norm > CLIP  # it binds
        expected = [
            e + g.numpy() * CLIP / norm / B for e, g in zip(expected, gradients, strict=True)
        ]
    optimizer = dp.optimizers.DPSGD(1.0, clip_norm=CLIP, noise_multiplier=1e-9, batch_size=B)
    model.compile(optimizer, "mse")
    again = tf.data.Dataset.from_tensors(batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(dataclasses.replace(batches, dataset=again), verbose=0)
    for one, variable, change in zip(before, model.trainable_variables, expected, strict=True):
        np.testing.assert_allclose(one - variable, change, atol=2e-7)


def test_epsilon_is_that_of_one_view_and_the_statement_says_so(tmp_path):
    made = {
        views: dp.data.poisson_batches((X, Y), B, 4, map=_noisy, views=views) for views in (1, K)
    }
    statements = []
    for views, batches in made.items():
        model = _model("book-keeping")
        optimizer = dp.optimizers.DPSGD(0.1, clip_norm=CLIP, noise_multiplier=2.0, batch_size=B)
        model.compile(optimizer, "mse")
        report = dp.callbacks.PrivacyReport(delta=1e-3)
        model.fit(batches, verbose=0, callbacks=[report])
        statements.append((report.epsilon, report.statement()))
        assert ("views are taken" in report.statement()) == (views > 1)
        model.save(tmp_path / "model.keras")
        assert keras.saving.load_model(tmp_path / "model.keras").ledger.epsilon(1e-3) == (
            pytest.approx(report.epsilon)
        )
    assert statements[0][0] == statements[1][0]
    assert f"{K} views" in statements[1][1]
    sampling = made[K].sampling
    assert type(sampling).from_config(json.loads(json.dumps(sampling.get_config()))) == sampling
    assert "views" not in made[1].sampling.get_config()  # as ledgers of before have it


def test_noise_for_one_view_is_noise_for_several():
    batches = dp.data.poisson_batches((X, Y), B, 4, map=_noisy, views=K)
    optimizer = dp.optimizers.DPSGD(0.1, clip_norm=CLIP, batch_size=B)
    sampling = dp.accounting.Sampling.poisson(N, B)
    dp.accounting.calibrate(optimizer, sampling, steps=4, epsilon=5.0, delta=1e-3)
    model = _model("book-keeping")
    model.compile(optimizer, "mse")
    model.fit(batches, verbose=0)
    assert model.ledger.epsilon(1e-3) <= 5.0


@pytest.mark.parametrize(
    "how, match",
    [
        ({"views": 2}, "views=2 are made by map.*received none"),
        ({"views": 0, "map": _noisy}, "views must be an integer >= 1"),
        ({"views": 1.5, "map": _noisy}, "views must be an integer >= 1"),
    ],
)
def test_refuses(how, match):
    with pytest.raises(ValueError, match=match):
        dp.data.poisson_batches((X, Y), B, **how)


def test_batches_that_are_not_of_so_many_views_are_refused():
    batches = dp.data.poisson_batches((X, Y), B, 4, map=_noisy, views=K)
    one_view = dp.data.poisson_batches((X, Y), B, 4)
    model = _model("book-keeping")
    optimizer = dp.optimizers.DPSGD(0.1, clip_norm=CLIP, noise_multiplier=2.0, batch_size=B)
    model.compile(optimizer, "mse")
    with pytest.raises(ValueError, match="sampling says that 3 rows.*clipped"):
        model.fit(dataclasses.replace(batches, dataset=one_view.dataset), verbose=0)
