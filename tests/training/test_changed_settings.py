"""What is changed after it was made, compiled or checked: refused, or looked at again."""

import copy
import dataclasses
import functools
import pickle
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_keras_opt as dp
from dp_keras_opt.accounting import Sampling
from dp_keras_opt.noise import schedules
from dp_keras_opt.noise.source import NoiseSource

N, B = 200, 20
X = np.random.default_rng(0).normal(size=(N, 3)).astype("float32")
Y = X[:, :1]
PRIVATE = {"clip_norm": 1.0, "noise_multiplier": 1.0, "batch_size": B}


def model_with(optimizer, loss="mse", layer=None, **compiled):
    inputs = keras.Input((3,))
    hidden = inputs if layer is None else layer(inputs)
    model = dp.DPModel(inputs, keras.layers.Dense(1)(hidden))
    model.compile(optimizer, loss, **compiled)
    return model


# Noise: what is drawn and what it costs follow from one object.


@dataclasses.dataclass(frozen=True, eq=False)
class Decay(schedules.NoiseSchedule):
    """As somebody may write one."""

    rate: float

    def alphas(self, start, steps):
        return self.rate ** np.arange(start, start + steps)

    def alpha(self, step):
        return self.rate ** keras.ops.cast(step, "float32")

    @functools.cached_property
    def half_life(self):
        return np.log(0.5) / np.log(self.rate)


COPIES = {
    "itself": lambda made: made,
    "a copy": copy.copy,
    "a deep copy": copy.deepcopy,
    "pickled": lambda made: pickle.loads(pickle.dumps(made)),
}
copies = pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)


@copies
def test_a_schedule_of_ones_own_may_be_a_dataclass(copied):
    made = copied(Decay(0.99))
    assert made.half_life == pytest.approx(68.97, rel=1e-3)
    assert made == Decay(0.99)
    with pytest.raises(AttributeError):
        made.rate = 0.5


MADE = {
    "a fraction": (lambda: dp.noise.LambdaCGD(40, 0.5), "fraction", 0.99),
    "bands": (lambda: dp.noise.BandedMatrix(40, bands=8), "bands", 4),
    "scales": (lambda: dp.noise.BufferedToeplitz(40), "scales", (0.1, 0.1)),
    "the length of a schedule": (lambda: schedules.Fixed([1.0] * 10), "length", 40),
    "factors": (lambda: schedules.Fixed([1.0] * 10), "values", np.ones(40, np.float32)),
    "the share of a choice": (dp.optimizers.SparseEmbeddings, "noise_ratio", 1.0),
    "what is planned": (lambda: dp.noise.get("planned"), "max_buffers", 1),
}


class Plain(dp.noise.Gaussian):
    """Of somebody's own, in no registry."""


def test_noise_of_ones_own_is_loaded_with_its_class(tmp_path):
    """Keras no longer offered what `custom_objects` gave when the ledger was read."""
    model = model_with(dp.optimizers.DPSGD(0.1, **PRIVATE, noise=Plain()))
    model.fit(dp.data.poisson_batches((X, Y), B), verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras", custom_objects={"Plain": Plain})
    assert loaded.ledger.segments == model.ledger.segments
    loaded.fit(dp.data.poisson_batches((X, Y), B), verbose=0)
    assert loaded.ledger.steps == 2 * N // B


@pytest.mark.parametrize("noise", [None, "gaussian"])
def test_noise_of_ones_own_is_loaded_in_a_scope(noise, tmp_path):
    """A scope of the optimizer's classes hid that of the caller."""
    model = model_with(dp.optimizers.DPSGD(0.1, **PRIVATE, noise=Plain()))
    model.fit(dp.data.poisson_batches((X, Y), B), verbose=0)
    model.save_weights(tmp_path / "model.weights.h5")
    other = model_with(dp.optimizers.DPSGD(0.1, **PRIVATE, noise=noise or "gaussian"))
    if noise is None:
        inputs = keras.Input((3,))
        other = dp.DPModel(inputs, keras.layers.Dense(1)(inputs))
    with keras.saving.custom_object_scope({"Plain": Plain}):
        other.load_weights(tmp_path / "model.weights.h5")
    assert other.ledger.segments == model.ledger.segments


@pytest.mark.parametrize("kind", MADE)
@copies
def test_noise_is_fixed_when_it_is_made(kind, copied):
    """λ = 0.99 in noise that was made for 0.5 had ε = 4.38 where 6.53 would have been right."""
    make, name, value = MADE[kind]
    made = copied(make())
    with pytest.raises(AttributeError, match=f"fixed once it is made.*{name}.*Make a new one"):
        setattr(made, name, value)
    assert made == make()


@pytest.mark.parametrize(
    ("made", "name"),
    [
        (schedules.Fixed([1.0] * 10), "values"),
        (dp.noise.BandedMatrix(40, bands=8), "coefficients"),
        (dp.noise.from_matrix(np.tril(np.ones((4, 4)))), "matrix"),
        (dp.noise.LambdaCGD(40, 0.5), "coefficients"),
    ],
)
@copies
def test_arrays_of_noise_are_not_written_to(made, name, copied):
    with pytest.raises(ValueError, match="read-only"):
        getattr(copied(made), name)[0] = 4.0


def test_a_matrix_is_copied():
    """A buffer that was used again lowered what past steps had cost."""
    given = np.linalg.cholesky(np.eye(20) + 0.5)
    given /= np.linalg.norm(given, axis=0).max()
    made = dp.noise.from_matrix(given)
    before = made.sensitivity(20, 10)
    given[:] = np.eye(20)
    assert made.sensitivity(20, 10) == before != pytest.approx(2**0.5, rel=0.05)


def test_what_is_released_is_not_changed_under_a_compiled_step():
    """As the first refusal advises: half of the noise was drawn that was accounted."""
    moment = dp.optimizers.moments.Joint(1.0, max_batch_size=40)
    model = model_with(dp.optimizers.DPAdam(0.1, **PRIVATE, second_moment=moment))
    model.fit(dp.data.poisson_batches((X, Y), B), verbose=0)
    other = dp.data.poisson_batches((X, Y), B, adjacency="replace_one")
    with pytest.raises(ValueError, match="Pass adjacency='replace_one'"):
        model.fit(other, verbose=0)
    model.optimizer.second_moment.adjacency = "replace_one"
    with pytest.raises(ValueError, match=r"releases was changed.*Call compile"):
        model.fit(other, verbose=0)
    assert model.ledger.steps == N // B
    model.compile(model.optimizer, "mse")
    stds = []
    model.observe_releases(lambda queries, released: stds.append(released[0].noise_std))
    model.run_eagerly = True
    model.fit(other, verbose=0)
    joint = model.optimizer.releases[0].joint
    assert float(stds[-1]) == pytest.approx(joint.sensitivity(1.0, B), rel=1e-5)


def test_the_source_of_noise_is_not_exchanged():
    """For one of a known seed, of which the statement did not speak."""
    optimizer = dp.optimizers.DPSGD(0.1, **PRIVATE)
    with pytest.warns(UserWarning, match="seed"), pytest.raises(ValueError, match="is fixed"):
        optimizer.noise_source = NoiseSource(3)


# The model: what is traced again is checked again.


@keras.saving.register_keras_serializable("test_changed_settings")
class Centre(keras.layers.Layer):
    active = False

    def is_active(self):
        return self.active

    def call(self, x):
        return x - keras.ops.mean(x, axis=0, keepdims=True) if self.is_active() else x


@keras.saving.register_keras_serializable("test_changed_settings")
class CentreByList(Centre):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.flags = [False]

    def is_active(self):
        return self.flags[0]


SETTINGS = {"centre": False}


@keras.saving.register_keras_serializable("test_changed_settings")
class CentreByGlobal(Centre):
    def is_active(self):
        return SETTINGS["centre"]


def own(x, y, outputs, intermediates):
    return keras.ops.sum((y - outputs) ** 2, axis=-1)


def mixing(x, y, outputs, intermediates):
    return keras.ops.sum((y - outputs) ** 2, axis=-1) * keras.ops.mean(outputs)


def switch(model):
    model.layers[1].active = True


def exchange(model):
    model.loss = dp.Objective(mixing)


#: What a model is made with, and what then makes it mix.
CHANGES = {
    "a layer": (lambda: {"layer": Centre()}, switch),
    "an objective": (lambda: {"loss": dp.Objective(own)}, exchange),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("again", ["observer", "report", "forced", "eager"])
def test_a_step_that_is_traced_again_is_checked_again(change, again):
    """A row moved the sum by 21 C where C was claimed."""
    settings, apply = CHANGES[change]
    model = model_with(dp.optimizers.DPSGD(0.1, **PRIVATE), **settings())
    batches = dp.data.poisson_batches((X, Y), B)
    if again == "eager":
        model.run_eagerly = True
    model.fit(batches, verbose=0)
    apply(model)
    callbacks = []
    if again == "observer":
        model.observe_releases(lambda queries, released: None)
    elif again == "report":
        callbacks = [dp.callbacks.OptimizerReport()]
    elif again == "forced":
        model.make_train_function(force=True)
    with pytest.raises(ValueError, match="mixes"):
        model.fit(batches, verbose=0, callbacks=callbacks)
    assert model.ledger.steps in (N // B, N // B + 1)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("eager", [False, True])
def test_a_loop_of_ones_own_looks_again(change, eager):
    """With other numbers of rows TensorFlow traces anew; without graphs nothing is traced."""
    settings, apply = CHANGES[change]
    model = model_with(dp.optimizers.DPSGD(0.1, **PRIVATE), **settings(), run_eagerly=eager)
    model.sampling = Sampling.poisson(N, B)
    model.train_on_batch(X[:B], Y[:B])
    apply(model)
    with pytest.raises(ValueError, match="mixes"):
        model.train_on_batch(X[: B + 1], Y[: B + 1])


def turn_in_list(model):
    model.layers[1].flags[0] = True


def turn_global(model):
    SETTINGS["centre"] = True


@pytest.mark.parametrize(
    ("layer", "turn"), [(CentreByList, turn_in_list), (CentreByGlobal, turn_global)]
)
def test_what_is_traced_again_is_checked_wherever_its_switch_is(layer, turn, monkeypatch):
    """In a list, or nowhere in the layer: a row moved the sum by 18.4 where 2 C = 2."""
    monkeypatch.setitem(SETTINGS, "centre", False)
    model = model_with(dp.optimizers.DPSGD(0.1, **PRIVATE), layer=layer())
    model.sampling = Sampling.poisson(N, B)
    model.train_on_batch(X[:B], Y[:B])
    turn(model)
    with pytest.raises(ValueError, match="mixes"):
        model.train_on_batch(X[: B - 1], Y[: B - 1])


def test_a_callback_that_changes_the_model_of_an_eager_fit():
    model = model_with(dp.optimizers.DPSGD(0.1, **PRIVATE), layer=Centre(), run_eagerly=True)
    change = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: switch(model))
    with pytest.raises(ValueError, match="mixes"):
        model.fit(dp.data.poisson_batches((X, Y), B), verbose=0, callbacks=[change])


@pytest.mark.parametrize("at_once", [1, 4])
@pytest.mark.parametrize("turned_after", [0, 2])
def test_an_observer_that_changes_the_model_of_an_eager_fit(at_once, turned_after):
    """Within an execution a row moved the sum by 15.3 where 2 C = 2."""
    model = model_with(
        dp.optimizers.DPSGD(0.1, **PRIVATE), layer=Centre(),
        run_eagerly=True, steps_per_execution=at_once,
    )  # fmt: skip
    seen = []

    def turn(queries, released):
        seen.append(released)
        if len(seen) > turned_after:
            switch(model)

    model.observe_releases(turn)
    with pytest.raises(ValueError, match="mixes"):
        model.fit(dp.data.poisson_batches((X, Y), B), verbose=0)
    assert len(seen) == turned_after + 1


class Switched(dp.DPModel):
    """Of one's own; set up before or after Keras is."""

    def __init__(self, early=None, late=None):
        if early is not None:
            self.centre = early
        super().__init__()
        if late is not None:
            self.centre = late
        self.dense = keras.layers.Dense(1)

    def call(self, x, training=None):
        return self.dense(x - keras.ops.mean(x, axis=0, keepdims=True) if self.centre else x)


@pytest.mark.parametrize("given", [{"early": False}, {"late": False}, {"late": np.bool_(False)}])
def test_a_switch_of_an_eager_model_is_seen(given):
    model = Switched(**given)
    model.compile(dp.optimizers.DPSGD(0.1, **PRIVATE), "mse", run_eagerly=True)
    model.sampling = Sampling.poisson(N, B)
    model.train_on_batch(X[:B], Y[:B])
    model.centre = type(model.centre)(True)
    with pytest.raises(ValueError, match="mixes"):
        model.train_on_batch(X[:B], Y[:B])


@keras.saving.register_keras_serializable("test_changed_settings")
class Methods(keras.layers.Layer):
    """Of one's own, with what is made anew whenever one looks."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.squash = self.squashed
        self.scale = {"by": 2.0}.get

    def squashed(self, x):
        return keras.ops.tanh(x)

    def call(self, x):
        return self.squash(x) * self.scale("by")


@pytest.fixture
def checks(monkeypatch):
    """A list that each check of a model makes longer."""
    found, check = [], dp.clipping.checked_engines
    monkeypatch.setattr(
        "dp_keras_opt.clipping.checked_engines",
        lambda *args, **kwargs: found.append(1) or check(*args, **kwargs),
    )
    return found


@pytest.mark.parametrize("loss", ["mse", lambda y, outputs: keras.ops.mean((y - outputs) ** 2, -1)])
@pytest.mark.parametrize("eager", [False, True])
def test_what_was_not_changed_is_checked_once(loss, eager, checks):
    model = model_with(dp.optimizers.DPSGD(0.1, **PRIVATE), loss, Methods(), run_eagerly=eager)
    model.fit(dp.data.poisson_batches((X, Y), B), epochs=2, verbose=0)
    assert len(checks) == 1
    model.fit(dp.data.poisson_batches((X, Y), B), verbose=0)
    assert len(checks) == (2 if eager else 1)


class Counts(keras.layers.Layer):
    calls = 0

    def call(self, x):
        self.calls += 1
        return 2 * x


def test_a_counter_is_named_where_it_has_each_eager_step_checked():
    model = model_with(dp.optimizers.DPSGD(0.1, **PRIVATE), layer=Counts(name="own"))
    batches = dp.data.poisson_batches((X, Y), B)
    plain = model_with(dp.optimizers.DPSGD(0.1, **PRIVATE), run_eagerly=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model.fit(batches, verbose=0)
        for given in ({}, {"validation_data": (X, Y)}, {}):
            plain.fit(batches, verbose=0, **given)
    model.run_eagerly = True
    with pytest.warns(UserWarning, match="own.calls changed: it is checked again"):
        model.fit(batches, verbose=0)


class Noted(keras.layers.Layer):
    """Of one's own, with a mark for what is missing."""

    def __init__(self):
        super().__init__()
        self.missing, self.lost = float("nan"), np.float32("nan")

    def call(self, x):
        return 2 * x


def test_looking_at_an_encoder_does_not_have_it_checked_again(checks):
    """`predict` leaves marks on it, and what is no number is not equal to itself."""
    encoder = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    encoder.layers[0].missing = float("nan")
    model = model_with(dp.optimizers.DPSGD(0.1, **PRIVATE), layer=encoder, run_eagerly=True)
    for _ in range(2):
        model.fit(dp.data.poisson_batches((X, Y), B), verbose=0)
        encoder.predict(X, verbose=0)
    assert len(checks) == 1
    model = model_with(dp.optimizers.DPSGD(0.1, **PRIVATE), layer=Noted(), run_eagerly=True)
    model.fit(dp.data.poisson_batches((X, Y), B), verbose=0)
    assert len(checks) == 2


# Batches: a word that somebody gave.


def test_batches_by_their_constructor_are_checked_and_stated():
    """They were taken for those of a sampler."""
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(N).batch(B, drop_remainder=True)
    with pytest.raises(ValueError, match="may come in another in each"):
        dp.data.Batches(data, Sampling.fixed_order(N, B))
    with pytest.raises(ValueError, match="batches of 40 examples, but those of `data` have 20"):
        dp.data.Batches(data, Sampling.shuffled(N, 40))
    with pytest.warns(UserWarning, match="vary in size"):
        dp.data.Batches(data, Sampling.poisson(N, B))
    batches = dp.data.Batches(data, Sampling.shuffled(N, B, drop_remainder=True))
    model = model_with(dp.optimizers.DPSGD(0.1, **PRIVATE))
    model.fit(batches, verbose=0)
    assert model.ledger.segments[0].conditions == ("stated sampling",)
    drawn = dp.data.poisson_batches((X, Y), B)
    assert not drawn.map(lambda x, y: (x, y)).sampling.is_stated
