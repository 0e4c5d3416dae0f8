"""Uniform averages of the weights: against recorded weights, and wherever a model goes."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_keras_opt as dp
from dp_keras_opt.noise import host

N, B, STEPS, SKIPPED = 60, 12, 12, 5
X = np.random.default_rng(0).normal(size=(N, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
PRIVATE = {"clip_norm": 0.5, "batch_size": B, "noise_multiplier": 1.0, "seed": 3}

MAKE = {
    "DPSGD": lambda **k: dp.optimizers.DPSGD(0.1, momentum=0.9, **PRIVATE, **k),
    "decay": lambda **k: dp.optimizers.DPSGD(0.1, weight_decay=0.1, **PRIVATE, **k),
    "DPAdam": lambda **k: dp.optimizers.DPAdam(
        0.1, gradient_filter="first_order_v1", **PRIVATE, **k
    ),
    "DP2RMSprop": lambda **k: dp.optimizers.DP2RMSprop(
        0.1, delay=3, adaptive_clip_norm=1.0, **PRIVATE, **k
    ),
    "DPNesterov": lambda **k: dp.optimizers.DPNesterov(0.1, momentum=0.5, **PRIVATE, **k),
    "ADPAdagradNorm": lambda **k: dp.optimizers.ADPAdagradNorm(0.1, steps=STEPS, **PRIVATE, **k),
    "GaLore": lambda **k: dp.optimizers.DPGaLore(0.1, rank=2, **PRIVATE, **k),
    "wrapper": lambda **k: dp.optimizers.DPOptimizer(keras.optimizers.Lion(0.1), **PRIVATE, **k),
}


class Recorded(keras.callbacks.Callback):
    """The weights after each step."""

    def __init__(self):
        super().__init__()
        self.weights = []

    def on_train_batch_end(self, batch, logs=None):
        self.weights.append(self.model.get_weights())


def batches(steps=STEPS):
    with pytest.warns(UserWarning, match="seed"):
        return dp.data.poisson_batches((X, Y), B, steps, seed=1)


def fit(optimizer, steps=STEPS, callbacks=(), **compiled):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((3,))
    hidden = keras.layers.Dense(4, activation="tanh")(inputs)
    model = dp.DPModel(inputs, keras.layers.Dense(1)(hidden))
    model.compile(optimizer, "mse", **{"jit_compile": False} | compiled)
    record = Recorded()
    with np.testing.suppress_warnings() as quiet:
        quiet.filter(UserWarning)
        history = model.fit(batches(steps), verbose=0, callbacks=[record, *callbacks])
    return model, record.weights, history


def mean(weights, first=SKIPPED):
    return [np.float64(each).mean(axis=0) for each in zip(*weights[first:], strict=True)]


def close(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", MAKE)
def test_the_model_ends_with_the_mean_of_the_last_weights(name):
    """And training is what it is without: bit for bit the same weights on the way."""
    _, plain, _ = fit(MAKE[name]())
    model, weights, _ = fit(MAKE[name](average_from=SKIPPED))
    for before, after in zip(plain, weights, strict=True):
        for a, b in zip(before, after, strict=True):
            np.testing.assert_array_equal(a, b)
    close(model.get_weights(), mean(weights))
    assert not np.allclose(model.get_weights()[0], weights[-1][0], rtol=1e-3)


@pytest.mark.parametrize(
    "compiled",
    [{"jit_compile": True}, {"steps_per_execution": 3}, {"physical_batch_size": 4},
     {"run_eagerly": True}],
    ids=["xla", "executions", "blocks", "eager"],
)  # fmt: skip
def test_however_steps_are_compiled(compiled, monkeypatch):
    monkeypatch.setattr(host, "cores", lambda: 4)  # a seed gives other draws by NumPy
    expected, _, _ = fit(MAKE["DPSGD"](average_from=SKIPPED))
    model, _, _ = fit(MAKE["DPSGD"](average_from=SKIPPED), **compiled)
    close(model.get_weights(), expected.get_weights())


@pytest.mark.parametrize("first", [0, STEPS - 1, STEPS, 100])
def test_from_any_step(first):
    """From beyond the end on, there is nothing to average: the last weights stay."""
    model, weights, _ = fit(MAKE["DPSGD"](average_from=first))
    close(model.get_weights(), mean(weights, min(first, STEPS - 1)))


def test_the_average_is_what_is_evaluated_saved_and_exported(tmp_path):
    model, weights, _ = fit(MAKE["DPSGD"](average_from=SKIPPED))
    expected = mean(weights)
    hidden = np.tanh(X @ expected[0] + expected[1])
    answer = hidden @ expected[2] + expected[3]
    np.testing.assert_allclose(model.predict(X, verbose=0), answer, rtol=1e-4, atol=1e-5)
    loss = model.evaluate(X, Y, verbose=0)
    assert loss == pytest.approx(np.mean((answer - Y) ** 2), rel=1e-4)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    close(again.get_weights(), expected)
    assert again.optimizer.average_from == SKIPPED and again.optimizer.use_ema
    assert again.ledger.epsilon(1e-3) == model.ledger.epsilon(1e-3)
    model.export(tmp_path / "served", verbose=False)
    served = tf.saved_model.load(tmp_path / "served")
    np.testing.assert_allclose(served.serve(X), answer, rtol=1e-4, atol=1e-5)


def test_the_average_is_validated_in_fit_by_keras_own_callback():
    swap = keras.callbacks.SwapEMAWeights()
    optimizer = MAKE["DPSGD"](average_from=SKIPPED)
    keras.utils.set_random_seed(0)
    inputs = keras.Input((3,))
    model = dp.DPModel(inputs, keras.layers.Dense(1)(inputs))
    model.compile(optimizer, "mse")
    record = Recorded()
    history = model.fit(
        batches(4), epochs=3, verbose=0, callbacks=[record, swap], validation_data=(X, Y)
    ).history
    kernel, bias = mean(record.weights)
    assert history["val_loss"][-1] == pytest.approx(np.mean((X @ kernel + bias - Y) ** 2), rel=1e-4)


def test_an_average_goes_on_after_an_interruption(tmp_path):
    """The optimizer's variables hold it: a model that was saved between two fits goes on."""
    model, first, _ = fit(MAKE["DPSGD"](average_from=2), steps=6)
    close(model.get_weights(), mean(first, 2))
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    record = Recorded()
    again.fit(batches(6), verbose=0, callbacks=[record])
    close(again.get_weights(), mean(first + record.weights, 2))


def test_it_costs_no_privacy():
    plain, _, _ = fit(MAKE["DPSGD"]())
    model, _, _ = fit(MAKE["DPSGD"](average_from=SKIPPED))
    assert model.ledger.epsilon(1e-3) == plain.ledger.epsilon(1e-3)


@pytest.mark.parametrize("name", ["DPSGD", "wrapper"])
def test_configuration(name):
    optimizer = MAKE[name](average_from=4)
    again = type(optimizer).from_config(optimizer.get_config())
    assert again.average_from == 4 and again.get_config() == optimizer.get_config()
    assert MAKE[name]().average_from is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"average_from": -1}, "average_from"),
        ({"average_from": 0.5}, "average_from"),
        ({"average_from": 3, "use_ema": True}, "use_ema=True is of the exponential one"),
        ({"average_from": 3, "ema_overwrite_frequency": 2}, "ema_overwrite_frequency=2"),
    ],
)
def test_refuses(arguments, words):
    with pytest.raises(ValueError, match=words):
        MAKE["DPSGD"](**arguments)


def test_the_wrapper_keeps_one_average():
    inner = keras.optimizers.SGD(0.1, use_ema=True)
    with pytest.raises(ValueError, match="inner optimizer's use_ema=True"):
        dp.optimizers.DPOptimizer(inner, average_from=3, **PRIVATE)
