"""Keras's own call: `fit(x, y)` samples balls in bins, and says so, or keeps its epochs."""

import dataclasses
import warnings

import dp_accounting
import keras
import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf
from dp_accounting import rdp

import dp_keras_opt as dp
from dp_keras_opt.accounting import Ledger, Sampling, calibrate
from dp_keras_opt.callbacks import PrivacyBudget, PrivacyReport
from dp_keras_opt.data import held

N, B, T, DELTA = 30, 8, 4, 1e-4
RNG = np.random.default_rng(3)
X = RNG.normal(size=(N, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
IN_BINS = Sampling.balls_in_bins(N, B, "zero_out")
SHUFFLED = Sampling.shuffled(N, B)


def _sgd(noise_multiplier=1.0, learning_rate=0.1, **options):
    options = {"clip_norm": 1.0, "batch_size": B} | options
    return dp.optimizers.DPSGD(learning_rate, noise_multiplier=noise_multiplier, **options)


def _model(optimizer=None, **compiled):
    inputs = keras.Input((3,))
    model = dp.DPModel(inputs, keras.layers.Dense(1)(inputs))
    model.compile(optimizer or _sgd(), "mse", **{"run_eagerly": True} | compiled)
    return model


def _said(call, words):
    """The warnings of a call with these words; each points here."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    found = [each for each in caught if words in str(each.message)]
    assert all(each.filename == __file__ for each in found)
    return [str(each.message) for each in found]


# What is sampled, and what is said of it.


@pytest.mark.parametrize("jit_compile", [False, True])
def test_arrays_are_balls_in_bins_in_keras_epochs(jit_compile):
    model = _model(run_eagerly=False, jit_compile=jit_compile)
    seen = []
    batches = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(batch)
    )
    history = model.fit(X, Y, batch_size=B, epochs=3, verbose=0, callbacks=[batches])
    assert model.sampling == IN_BINS
    assert history.params["steps"] == T and seen == 3 * list(range(T))
    assert history.epoch == [0, 1, 2] and np.all(np.isfinite(history.history["loss"]))
    (segment,) = model.ledger.segments
    assert (segment.steps, segment.planned, segment.sampling) == (3 * T, 3 * T, IN_BINS)
    text = " ".join(model.statement(DELTA).split())
    assert "replaced by zero in one (zero_out)" in text and "Balls in bins" in text


def test_an_epoch_has_each_example_once_divided_by_the_declared_batch_size():
    """Of the clipped gradients at fixed weights, the epoch's releases add up to the whole sum."""
    model, released = _model(_sgd(0.0, learning_rate=0.0)), []
    model.observe_releases(lambda _, parts: released.append([g.numpy() for g in parts[0].value]))
    model.fit(X, Y, epochs=2, verbose=0)
    with tf.GradientTape(persistent=True) as tape:
        losses = tf.unstack(model.per_example_losses(Y, model(X)))
    expected = [np.zeros_like(g) for g in released[0]]
    for loss in losses:
        gradient = tape.gradient(loss, model.trainable_variables)
        clipped, _ = tf.clip_by_global_norm(gradient, 1.0)
        expected = [total + g.numpy() for total, g in zip(expected, clipped, strict=True)]
    for epoch in (released[:T], released[T:]):
        assert len(epoch) == T
        for place, whole in enumerate(expected):
            found = B * sum(step[place] for step in epoch)
            np.testing.assert_allclose(found, whole, rtol=1e-4, atol=1e-5)
    assert not np.allclose(released[0][0], released[T][0])  # drawn anew


def test_a_user_is_clipped_once_in_an_epoch():
    """Of each user's mean gradient, with at most K rows; here all have as many."""
    users = np.repeat(np.arange(N // 3), 3)
    batches = dp.data.balls_in_bins((X, Y), B, users=users, examples_per_user=3)
    model, released = _model(_sgd(0.0, learning_rate=0.0)), []
    model.observe_releases(lambda _, parts: released.append([g.numpy() for g in parts[0].value]))
    model.fit(batches, verbose=0)
    assert len(released) == 2  # 10 users in batches of 8
    expected = [np.zeros_like(g) for g in released[0]]
    for user in range(N // 3):
        own = users == user
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model.per_example_losses(Y[own], model(X[own])))
        clipped, _ = tf.clip_by_global_norm(tape.gradient(loss, model.trainable_variables), 1.0)
        expected = [total + g.numpy() for total, g in zip(expected, clipped, strict=True)]
    for place, whole in enumerate(expected):
        found = B * sum(step[place] for step in released)
        np.testing.assert_allclose(found, whole, rtol=1e-4, atol=1e-5)


def test_an_epoch_of_few_examples_has_all_of_its_steps():
    """Of 3 examples in 3 batches some batch is empty with probability 7/9, in one of 5: 0.9994."""
    model = _model(_sgd(batch_size=1))
    history = model.fit(X[:3], Y[:3], epochs=5, verbose=0)
    assert history.params["steps"] == 3 and model.ledger.steps == 15


def test_the_choice_is_said_once_with_what_it_cost_before():
    model = _model()
    shuffled = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(1.0 / 2), 2)
    before = rdp.RdpAccountant().compose(shuffled)
    report = PrivacyReport(DELTA)
    (said,) = _said(
        lambda: model.fit(X, Y, epochs=2, verbose=0, callbacks=[report]), "balls in bins"
    )
    for words in (
        "one of 4 batches",
        "ε is that of adjacency 'zero_out'",
        f"under replace_one, as it was before, this training would have ε = "
        f"{before.get_epsilon(DELTA):.4g} at δ = 0.0001",
        "shuffle=False",
    ):
        assert words in said
    assert not _said(lambda: model.fit(X, Y, verbose=0), "balls in bins")  # once
    (said,) = _said(lambda: _model().fit(X, Y, verbose=0), "balls in bins")
    assert f"at δ = {0.1 / N:.3g}" in said  # where nobody asked for one


def test_who_calibrated_for_it_hears_nothing():
    for adjacency in ("zero_out", "add_or_remove_one"):
        optimizer = _sgd(None)
        sampling = Sampling.balls_in_bins(N, B, adjacency, unit="rating")
        calibrate(optimizer, sampling, epochs=2, epsilon=30.0, delta=DELTA)
        model = _model(optimizer)
        assert not _said(lambda: model.fit(X, Y, epochs=2, verbose=0), "rrays")  # noqa: B023
        assert model.sampling == sampling


# The noise and the budget.


def test_the_noise_is_found_for_its_epochs():
    model = _model(_sgd(None))
    model.fit(X, Y, epochs=3, verbose=0, callbacks=[PrivacyBudget(3.0, DELTA)])
    assert model.optimizer.plan.sampling == IN_BINS and model.ledger.steps == 3 * T
    assert 2.99 < model.ledger.epsilon(DELTA) <= 3.0
    exactly = Ledger.of(model.optimizer, IN_BINS, 3 * T).epsilon(DELTA)
    assert model.ledger.epsilon(DELTA) == exactly


@pytest.mark.parametrize("at_once", [3, 16])
def test_several_steps_at_once_end_with_the_epoch(at_once):
    """Nothing is reserved, nor paid, of an epoch that does not follow."""
    model = _model(_sgd(None), run_eagerly=False, steps_per_execution=at_once)
    history = model.fit(X, Y, epochs=2, verbose=0, callbacks=[PrivacyBudget(3.0, DELTA)])
    assert model.optimizer.plan.steps == model.ledger.steps == 2 * T
    assert len(history.epoch) == 2 and int(model.optimizer.iterations.numpy()) == 2 * T
    (segment,) = model.ledger.segments
    assert segment.planned == 2 * T
    assert 2.99 < model.ledger.epsilon(DELTA) <= 3.0


def test_data_that_go_on_where_they_should_end_are_counted():
    batches = dp.data.balls_in_bins((X, Y), B)
    twice = dataclasses.replace(batches, dataset=batches.dataset.concatenate(batches.dataset))
    model = _model(run_eagerly=False, steps_per_execution=3)
    with pytest.raises(RuntimeError, match="1 training steps were accounted, but 3 ran"):
        model.fit(twice, verbose=0)
    assert model.ledger.steps == int(model.optimizer.iterations.numpy()) == 6
    assert model.ledger.epsilon(DELTA) == np.inf  # an example is in two steps of a pass


@pytest.mark.parametrize("end", ["fails", "ends"])
@pytest.mark.parametrize("schedule", [None, [1.0] * T])
@pytest.mark.parametrize("kept", ["on file", "in memory"])
def test_steps_past_what_was_stated_have_no_noise(end, schedule, kept, tmp_path):
    """They were in no ledger where the data failed, or the noise had come to its end."""

    def rows():
        for _ in range(T + 1):
            yield X[:B], Y[:B]
        if end == "fails":
            raise OSError("a bad sector")

    spec = tf.TensorSpec((B, *X.shape[1:])), tf.TensorSpec((B, *Y.shape[1:]))
    longer = tf.data.Dataset.from_generator(rows, output_signature=spec)
    optimizer = dp.optimizers.DPSGD(
        0.1, clip_norm=1.0, noise_multiplier=5.0, batch_size=B, noise_schedule=schedule
    )
    # XLA reads past the end of a schedule.
    model = _model(optimizer, run_eagerly=False, jit_compile=True, steps_per_execution=2 * T)
    if kept == "on file":
        model.ledger = Ledger(tmp_path / "ledger.jsonl")
    error = tf.errors.OpError if end == "fails" else RuntimeError
    with pytest.raises(error, match="sector" if end == "fails" else "more batches than was stated"):
        model.fit(dp.data.assume_sampling(longer, IN_BINS), verbose=0)
    ledger = Ledger.read(tmp_path / "ledger.jsonl") if kept == "on file" else model.ledger
    assert ledger.steps == T + 1 and ledger.epsilon(DELTA) == np.inf
    assert "NO DIFFERENTIAL PRIVACY" in model.statement(DELTA)


def test_a_budget_ends_the_training_before_an_epoch():
    model = _model(_sgd(5.0))
    limit = Ledger.of(_sgd(5.0), IN_BINS, 2 * T).epsilon(DELTA) * 1.1
    budget = PrivacyBudget(limit, DELTA)
    with pytest.warns(UserWarning, match="stopped after 8 of 40 steps"):
        history = model.fit(X, Y, epochs=10, verbose=0, callbacks=[budget])
    assert len(history.epoch) == 2 and model.ledger.steps == 2 * T


def test_a_second_fit_begins_an_epoch_of_its_own():
    model = _model()
    stop = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: setattr(model, "stop_training", batch == 1)
    )
    model.fit(X, Y, verbose=0, callbacks=[stop])
    model.fit(X, Y, verbose=0)
    assert [segment.steps for segment in model.ledger.segments] == [2, T]
    assert model.ledger.epsilon(DELTA) == Ledger.of(_sgd(), IN_BINS, 2 * T).epsilon(DELTA)


# What keeps its accounting.


def _calibrated(sampling):
    optimizer = _sgd(None)
    calibrate(optimizer, sampling, T, epsilon=20.0, delta=DELTA)
    return optimizer


@pytest.mark.parametrize(
    ("optimizer", "options", "expected"),
    [
        (_sgd, {"shuffle": False}, SHUFFLED),
        (lambda: _calibrated(SHUFFLED), {}, SHUFFLED),
        (
            lambda: _calibrated(Sampling.shuffled(N, B, "zero_out")),
            {},
            Sampling.shuffled(N, B, "zero_out"),
        ),
        (lambda: _sgd(noise="laplace"), {}, SHUFFLED),
        (
            lambda: dp.optimizers.DPAdam(
                clip_norm=1.0, noise_multiplier=1.0, batch_size=B,
                second_moment=dp.optimizers.moments.Joint(1.0, B, "replace_one"),
            ),
            {},
            SHUFFLED,
        ),
        (
            lambda: dp.optimizers.DPAdam(
                clip_norm=1.0, noise_multiplier=1.0, batch_size=B,
                second_moment=dp.optimizers.moments.Joint(1.0, 2 * B, "add_or_remove_one"),
            ),
            {},
            Sampling.balls_in_bins(N, B),
        ),
    ],
    ids=["in order", "calibrated", "calibrated, zero_out", "laplace", "replaced", "joint"],
)  # fmt: skip
def test_what_the_noise_is_for_decides(optimizer, options, expected):
    model = _model(optimizer())
    model.fit(X, Y, verbose=0, **options)
    assert model.sampling == expected and model.ledger.steps == T


def test_laplace_noise_without_a_delta():
    model = _model(_sgd(10.0, noise="laplace"))
    model.fit(X, Y, verbose=0, callbacks=[PrivacyBudget(5.0, 0.0, "pure")])
    assert model.ledger.epsilon(0.0) == pytest.approx(2 / 10)  # one epoch; replaced: twice 1/λ


def test_correlated_noise_is_told_of_its_order():
    model = _model(_sgd(noise=dp.noise.BandedMatrix(T, 2)))
    with pytest.raises(ValueError, match="fixed_order_epochs"):
        model.fit(X, Y, verbose=0)
    assert model.ledger.steps == 0


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling.balls_in_bins(N + 1, B, "zero_out"),
        Sampling.balls_in_bins(N, B, unit="user", examples_per_unit=2),
        Sampling.poisson(N, B),
    ],
    ids=["n", "users", "poisson"],
)
def test_noise_that_is_for_other_batches_is_refused(sampling):
    model = _model(_calibrated(sampling))
    with pytest.raises(ValueError, match="The noise was calibrated for"):
        model.fit(X, Y, verbose=0)
    assert model.ledger.steps == 0
    model = _model(_calibrated(Sampling.balls_in_bins(N, B, "zero_out")))
    with pytest.raises(ValueError, match="The noise was calibrated for"):
        model.fit(X, Y, shuffle=False, verbose=0)


# The arguments of Keras.


def test_the_validation_split_is_cut_off_before():
    model = _model()
    history = model.fit(X, Y, epochs=2, validation_split=0.4, verbose=0).history
    assert model.sampling == Sampling.balls_in_bins(18, B, "zero_out")
    assert model.ledger.steps == 2 * 3
    last = model.evaluate(X[18:], Y[18:], verbose=0)
    assert history["val_loss"][-1] == pytest.approx(last, rel=1e-5)
    assert len(history["val_loss"]) == 2


def test_validation_data_leave_all_rows_to_train_on():
    """As in Keras, which then does not split."""
    model = _model()
    model.fit(X, Y, validation_split=0.4, validation_data=(X[:4], Y[:4]), verbose=0)
    assert model.sampling == IN_BINS


def _two_headed():
    inputs = {name: keras.Input((3,), name=name) for name in ("a", "b")}
    hidden = keras.layers.Concatenate()(list(inputs.values()))
    outputs = {name: keras.layers.Dense(1, name=name)(hidden) for name in ("p", "q")}
    model = dp.DPModel(inputs, outputs)
    model.compile(_sgd(), {"p": "mse", "q": "mae"}, run_eagerly=True)
    return model


@pytest.mark.parametrize("weight", [None, np.ones(N), {"p": np.ones(N), "q": np.zeros(N)}])
def test_dicts_and_their_weights(weight):
    model = _two_headed()
    history = model.fit(
        {"a": X, "b": X}, {"p": Y, "q": Y}, sample_weight=weight, validation_split=0.2, verbose=0
    )
    assert model.ledger.steps == 3
    assert np.isfinite(history.history["val_loss"]).all()


def _moves(**options):
    """By how much the weights move in an epoch without noise."""
    model = _model(_sgd(0.0))
    before = model.get_weights()[0]
    labels = (Y > 0).astype("float32")
    model.fit(X, labels, verbose=0, **options)
    return np.abs(model.get_weights()[0] - before).max()


@pytest.mark.parametrize(
    ("kind", "none", "some"),
    [
        ("sample_weight", np.zeros(N), np.ones(N)),
        ("sample_weight", np.zeros((N, 1)), np.ones((N, 1))),
        ("class_weight", {0: 0.0, 1: 0.0}, {0: 0.0}),
    ],
    ids=["rows", "column", "classes"],
)
def test_weights_reach_the_loss(kind, none, some):
    assert _moves(**{kind: none}) == 0.0 < _moves(**{kind: some})


@pytest.mark.parametrize(
    "convert",
    [lambda a: a, tf.constant, lambda a: a.astype("float64"), lambda a: _ArrayLike(a)],
    ids=["numpy", "tensor", "float64", "array-like"],
)
def test_arrays_of_other_types(convert):
    model = _model()
    model.fit(convert(X), convert(Y), verbose=0)
    assert model.ledger.steps == T


class _ArrayLike:
    """What NumPy can make an array of, as a column of another library."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.array, dtype)

    def __len__(self):
        return len(self.array)


@pytest.mark.parametrize(
    ("x", "y", "options", "words"),
    [
        (X, None, {}, "fit needs targets"),
        (X, Y[:-1], {}, "arrays of equal length"),
        (X, Y, {"sample_weight": np.full(N, np.nan)}, "not finite"),
        (X, Y, {"sample_weight": np.ones((N, 2))}, r"of shape \[n\]"),
        (X, Y, {"sample_weight": np.ones(N), "class_weight": {0: 1.0}}, "beside sample_weight"),
        (X, Y, {"steps_per_epoch": 2}, "steps_per_epoch with arrays"),
        (X, Y, {"batch_size": 5}, "batch_size=8.*batch_size=5"),
        (X, Y, {"validation_split": 0.99}, "not sufficient to split"),
        (X[:4], Y[:4], {}, "at most num_examples=4"),
        (scipy.sparse.csr_matrix(X), Y, {}, "must be a dense array"),
        (X.tolist(), Y, {}, "does not say how its batches are sampled"),
        (["a text"] * N, Y, {}, r"a structure of arrays; for one array, np.array\(list\)"),
        (list(np.array(["a text"] * N)), Y, {}, "a structure of arrays"),
    ],
)
def test_what_cannot_be_sampled_is_refused_before_a_step(x, y, options, words):
    model = _model()
    with pytest.raises((ValueError, TypeError), match=words):
        model.fit(x, y, verbose=0, **options)
    assert model.ledger.steps == 0


def test_what_keras_takes_is_not_refused_for_its_size(monkeypatch):
    monkeypatch.setattr(held, "nbytes", lambda array: 2**45)
    with pytest.raises(ValueError, match="max_bytes"):
        dp.data.balls_in_bins((X, Y), B)
    model = _model()
    model.fit(X, Y, verbose=0)
    assert model.ledger.steps == T


# Without `fit`.


def test_each_assignment_that_is_drawn_is_charged_at_its_first_step():
    """Epochs are counted from where each iteration began, and not from the first step of all."""
    batches = dp.data.balls_in_bins((X, Y), B, adjacency="zero_out")
    model = _model()
    model.sampling = batches.sampling

    def epochs():
        found = [segment.event() for segment in model.ledger.segments]
        return sum(each.count for each in found)

    def train(steps):
        charged = []
        for (x, y, rows), _ in zip(batches, range(steps), strict=False):
            model.train_on_batch(x, y, rows)
            charged.append(epochs())
        return charged

    assert train(T) == [1] * T
    assert train(2) == [2, 2]
    assert train(T) == [3] * T  # the second was broken off
    assert [segment.steps for segment in model.ledger.segments] == [T + 2, T]
    assert [train(1) for _ in range(T)] == [[4], [5], [6], [7]]  # next(iter(batches)) in a loop


def test_train_on_batch_after_a_fit_that_was_stopped():
    batches = dp.data.balls_in_bins((X, Y), B)
    model = _model()
    stop = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: setattr(model, "stop_training", True)
    )
    model.fit(batches, verbose=0, callbacks=[stop])
    model.sampling = batches.sampling
    for x, y, rows in batches:
        model.train_on_batch(x, y, rows)
    assert [segment.steps for segment in model.ledger.segments] == [1, T]


def test_fit_goes_through_a_pass_in_parts():
    """`steps_per_epoch` of Keras within one iteration: no pass is charged twice."""
    batches = dp.data.balls_in_bins((X, Y), B)
    model = _model()
    model.fit(batches, steps_per_epoch=2, epochs=4, verbose=0)
    (segment,) = model.ledger.segments
    assert segment.steps == 8 and segment.event().count == 2
    assert batches.sampling.passes.begun == 2


@pytest.mark.parametrize("shuffle", [True, False])
def test_fewer_rows_than_the_batches_of_keras_are_one_batch(shuffle):
    inputs = keras.Input((3,))
    model = dp.DPModel(inputs, keras.layers.Dense(1)(inputs))
    model.compile(dp.optimizers.DPSGD(0.1, clip_norm=1.0, noise_multiplier=1.0), "mse")
    model.fit(X[:20], Y[:20], epochs=2, verbose=0, shuffle=shuffle, validation_split=0.2)
    assert model.ledger.steps == 2 and model.optimizer.batch_size == 16
    assert model.ledger.segments[-1].sampling.num_examples == 16
