"""Objectives of one's own and losses that layers add, against gradients of one row at a time."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import dp_keras_opt as dp
from dp_keras_opt.clipping import Batch, Query, checked_engines, clipped_sums
from dp_keras_opt.clipping.engines import Engines, engines_for
from tests.helpers.per_example import assert_close, clip_and_sum, one_at_a_time

layers, ops = keras.layers, keras.ops
B = 7
rng = np.random.default_rng(0)
X = rng.normal(size=(B, 6)).astype("float32")
Y = rng.normal(size=(B, 2)).astype("float32")
TRIPLETS = [rng.normal(size=(B, 4)).astype("float32") for _ in range(3)]


def _compile(
    model, objective, clip_norm=0.05, noise_multiplier=1.0, rate=0.1, batch_size=4, **kwargs
):
    optimizer = dp.optimizers.DPSGD(
        rate, clip_norm=clip_norm, noise_multiplier=noise_multiplier, batch_size=batch_size
    )
    model.compile(optimizer, objective, **kwargs)
    return model


def _fit(model, x=X, y=Y, **kwargs):
    return model.fit(dp.data.poisson_batches((x, y), batch_size=4, **kwargs), verbose=0)


# Models: (model of Keras, objective, inputs, targets, layers whose outputs the oracle needs).


def _vae():
    """The divergence from what two layers give, which the outputs do not show."""
    inputs = keras.Input((6,))
    hidden = layers.Dense(5, activation="tanh")(inputs)
    mean, spread = layers.Dense(2, name="z_mean")(hidden), layers.Dense(2, name="z_spread")(hidden)
    outputs = layers.Dense(6)(mean * ops.exp(spread / 2))

    def elbo(inputs, targets, outputs, intermediates):
        assert targets is None
        mean, spread = intermediates["z_mean"], intermediates["z_spread"]
        error = ops.sum(ops.square(inputs - outputs), axis=-1)
        return error + ops.sum(ops.exp(spread) + ops.square(mean) - 1 - spread, axis=-1) / 2

    return keras.Model(inputs, outputs), elbo, X, None, ("z_mean", "z_spread")


def _triplets():
    """A layer that is called three times gives a list, in the order of its calls."""
    encoder = keras.Sequential(
        [keras.Input((4,)), layers.Dense(3, "tanh"), layers.Dense(2)], name="encoder"
    )
    inputs = [keras.Input((4,)) for _ in range(3)]
    outputs = ops.sum(ops.stack([encoder(each) for each in inputs], axis=1), axis=(1, 2))

    def margin(inputs, targets, outputs, intermediates):
        anchor, near, far = intermediates["encoder"]
        nearer = ops.sum(ops.square(anchor - near), axis=-1)
        return ops.softplus(nearer - ops.sum(ops.square(anchor - far), axis=-1)) + 0.1 * outputs

    return keras.Model(inputs, outputs), margin, TRIPLETS, None, ("encoder",)


class Block(layers.Layer):
    """Has a weight of its own, so that it is run one example at a time, and a layer in it."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = layers.Dense(3, name="inner")
        self.several = Several(name="several")

    def build(self, shape):
        self.scale = self.add_weight(shape=(3,), initializer="ones", name="scale")
        self.inner.build(shape)
        super().build(shape)

    def call(self, inputs):
        return self.several(ops.tanh(self.inner(inputs)) * self.scale)["sum"]


class Several(layers.Layer):
    """Gives a structure."""

    def call(self, inputs):
        return {"sum": inputs * 2, "parts": (inputs**2, ops.sum(inputs, axis=-1)), "none": None}


def _block():
    """Intermediates inside of a layer that has no rule; one of them is a structure."""
    inputs = keras.Input((6,))
    outputs = layers.Dense(2)(Block(name="block")(layers.Dense(4, "tanh")(inputs)))

    def penalized(inputs, targets, outputs, intermediates):
        squares, total = intermediates["several"]["parts"]
        error = ops.mean(ops.square(targets - outputs), axis=-1)
        return error + ops.sum(squares, axis=-1) + total * intermediates["block/inner"][:, 0]

    return keras.Model(inputs, outputs), penalized, X, Y, ("block/inner", "several")


class Subclass(keras.Model):
    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential([layers.Dense(3, "tanh", name="code")], name="encoder")
        self.decoder = keras.Sequential([layers.Dense(3, "tanh", name="code")], name="decoder")
        self.head = layers.Dense(2)

    def call(self, inputs):
        return self.head(self.decoder(self.encoder(inputs)))


def _subclassed():
    """Two layers of one name, told apart by their paths."""

    def alike(inputs, targets, outputs, intermediates):
        one, other = intermediates["encoder/code"], intermediates["decoder/code"]
        error = ops.mean(ops.square(targets - outputs), axis=-1)
        return error + ops.sum(ops.abs(one - other), axis=-1)

    return Subclass(), alike, X, Y, ("encoder/code", "decoder/code")


class Penalty(layers.Layer):
    """Adds each row's own loss, of what it is given."""

    def call(self, inputs):
        self.add_loss(ops.sum(ops.abs(inputs) ** 1.5, axis=-1))
        return inputs

    def compute_output_shape(self, input_shape):
        return input_shape


class PenaltyInside(layers.Layer):
    """The same, in a layer that is run one example at a time, twice in each call."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.penalty = Penalty()

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, inputs):
        hidden = self.penalty(inputs * self.scale)
        self.add_loss(ops.sum(hidden, axis=-1) ** 2)
        return self.penalty(ops.tanh(hidden) * self.scale)


def _added():
    """Losses that layers add, one of them called twice, one inside of a layer without a rule."""
    inputs = keras.Input((6,))
    penalty = Penalty()
    hidden = penalty(layers.Dense(4, "tanh")(inputs))
    hidden = penalty(layers.Dense(3)(PenaltyInside()(hidden)))
    return keras.Model(inputs, layers.Dense(2)(hidden)), "mse", X, Y, ()


def _added_alone():
    """No loss but what layers add."""
    inputs = keras.Input((6,))
    outputs = PenaltyInside()(layers.Dense(2)(inputs))
    return keras.Model(inputs, outputs), None, X, None, ()


CASES = [_vae, _triplets, _block, _subclassed, _added, _added_alone]


def _layer(base, path):
    for name in path.split("/"):
        base = next(e for e in base._flatten_layers(include_self=False) if e.name == name)
    return base


def _oracle_loss(base, loss, x, names):
    """The loss of one row: what Keras gives for a batch of one, and the layers' calls noted."""
    noted = {name: [] for name in names}
    for name in names:
        layer = _layer(base, name)

        def noting(*args, _call=layer.call, _name=name, **kwargs):
            noted[_name].append(_call(*args, **kwargs))
            return noted[_name][-1]

        object.__setattr__(layer, "call", noting)
    rows = iter(range(B))

    def of_row(y, y_pred):
        row = next(rows)
        x_row = tf.nest.map_structure(lambda t: tf.constant(t[row : row + 1]), x)
        added = sum(tf.reduce_sum(tf.cast(each, tf.float32)) for each in base.losses)
        y_pred = tf.cast(y_pred, tf.float32)
        seen = {name: each[0] if len(each) == 1 else list(each) for name, each in noted.items()}
        [each.clear() for each in noted.values()]
        if callable(loss):
            return loss(x_row, y, y_pred, seen)[0] + added
        return added if loss is None else tf.reduce_mean((y - y_pred) ** 2) + added

    return of_row


def _oracle(base, loss, x, y, names, weight=None):
    base(tf.nest.map_structure(tf.constant, x))
    targets = Y if y is None else y
    of_row = _oracle_loss(base, loss, x, names)
    without = (lambda y, p: of_row(None, p)) if y is None else of_row
    gradients = one_at_a_time(base, without, x, targets, weight)
    for name in names:
        object.__delattr__(_layer(base, name), "call")
    return gradients


def _private(base, loss, names, **kwargs):
    objective = dp.Objective(loss, names) if callable(loss) else loss
    return _compile(dp.make_private(base), objective, **kwargs)


@pytest.mark.parametrize("engine", ["book_keeping", "whole model", "checked"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_clipped_sums_are_those_of_single_rows(case, engine):
    base, loss, x, y, names = case()
    gradients = _oracle(base, loss, x, y, names)
    model = _private(base, loss, names)
    batch = Batch(*tf.nest.map_structure(lambda t: None if t is None else tf.constant(t), (x, y)))
    engines = {
        "book_keeping": lambda: engines_for(model),
        "whole model": lambda: Engines((), (model,), splits={}),
        "checked": lambda: checked_engines(model, batch),
    }[engine]()
    assert model not in engines.general or engine == "whole model"
    norms = [np.sqrt(sum((g**2).sum() for g in one)) for one in gradients]
    bound = float(np.median(norms))  # it binds for half of the rows
    queries = tuple(Query(clip_norm=c) for c in (bound, 1e9))
    sums = clipped_sums(model, batch, queries, engines).sums
    for query, total in zip(queries, sums, strict=True):
        assert_close(total, clip_and_sum(gradients, query.clip_norm))


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("physical", [None, 3])
@pytest.mark.parametrize("case", [_vae, _block, _added], ids=lambda case: case.__name__)
def test_a_step_takes_the_clipped_sums(case, physical, jit_compile):
    """Chunks of 3 of the 7 rows: two rows of the last are padding, and add nothing."""
    base, loss, x, y, names = case()
    gradients = _oracle(base, loss, x, y, names)
    model = _private(
        base, loss, names, noise_multiplier=0.0, rate=1.0, physical_batch_size=physical,
        jit_compile=jit_compile, batch_size=B,
    )  # fmt: skip
    model.sampling = dp.accounting.Sampling.shuffled(B, B)
    before = model.get_weights()
    model.train_on_batch(x, y)
    steps = [B * (old - new) for old, new in zip(before, model.get_weights(), strict=True)]
    assert_close(steps, clip_and_sum(gradients, 0.05), rtol=1e-3)


def test_sample_weights_multiply_objectives_and_not_what_is_added():
    weight = np.linspace(0, 2, B).astype("float32")
    base, loss, x, y, names = _vae()
    gradients = _oracle(base, loss, x, y, names, weight)
    model = _private(base, loss, names)
    for shape in ((B,), (B, 1)):
        batch = Batch(tf.constant(x), None, tf.constant(weight.reshape(shape)))
        (total,) = clipped_sums(model, batch, (Query(clip_norm=0.5),)).sums
        assert_close(total, clip_and_sum(gradients, 0.5))
    inputs = keras.Input((6,))
    model = _compile(dp.DPModel(inputs, layers.Dense(2)(Penalty()(inputs))), "mse")
    losses = clipped_sums(model, (X, Y, tf.zeros(B)), (Query(),)).losses
    np.testing.assert_allclose(losses, np.sum(np.abs(X) ** 1.5, axis=1), rtol=1e-5)
    model = _compile(dp.DPModel(inputs, layers.Dense(2)(inputs)), dp.Objective(_error))
    with pytest.raises(ValueError, match=r"Sample weights beside the objective '_error'"):
        clipped_sums(model, (X, Y, tf.ones((B, 2))), (Query(),))


@keras.saving.register_keras_serializable("tests")
def _error(inputs, targets, outputs, intermediates):
    return ops.mean(ops.square(targets - outputs), axis=-1)


def test_rows_of_a_user_are_clipped_as_one():
    """Three users of two rows, of which the last has one: the mean over a user's rows."""
    base, loss, x, _, names = _vae()
    gradients = _oracle(base, loss, x, None, names)
    of_users = [
        [(a + b) / 2 for a, b in zip(*pair, strict=True)]
        for pair in (gradients[:2], gradients[2:4])
    ]
    users = [*of_users, gradients[4]]
    model = _private(base, loss, names)
    mask = tf.constant([[True, True], [True, True], [True, False]])
    (total,) = clipped_sums(
        model, Batch(tf.constant(x[:6]), None, None, mask), (Query(clip_norm=0.5),)
    ).sums
    assert_close(total, clip_and_sum(users, 0.5))


def test_half_precision_computes_objectives_in_single():
    """A square of 300 is infinite in float16."""
    seen = []

    def loss(inputs, targets, outputs, intermediates):
        seen.extend(t.dtype for t in (inputs, outputs, intermediates["mine"]))
        return ops.mean(ops.square(300 * intermediates["mine"]), axis=-1)

    inputs = keras.Input((6,))
    outputs = layers.Dense(2, name="mine", dtype="mixed_float16")(inputs)
    model = _compile(dp.DPModel(inputs, outputs), dp.Objective(loss, ["mine"]))
    result = clipped_sums(model, (tf.constant(X), None), (Query(),))
    assert set(seen) == {tf.float32} and np.isfinite(result.losses).all()


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_steps_in_half_precision_are_those_of_single_rows(policy):
    keras.config.set_dtype_policy(policy)
    try:
        base, loss, x, y, names = _added()
    finally:
        keras.config.set_dtype_policy("float32")
    gradients = _oracle(base, loss, x, y, names)
    model = _private(base, loss, names, noise_multiplier=0.0, rate=1.0, batch_size=B)
    model.sampling = dp.accounting.Sampling.shuffled(B, B)
    before = model.get_weights()
    model.train_on_batch(x, y)
    steps = [B * (old - new) for old, new in zip(before, model.get_weights(), strict=True)]
    assert_close(steps, clip_and_sum(gradients, 0.05), rtol=0.05)


# Evaluation and metrics.


@pytest.mark.parametrize("padded", [False, True])
def test_evaluation_is_the_mean_over_examples(padded):
    base, loss, x, y, names = _block()
    model = _private(base, loss, names, metrics=["mae"])
    block = _layer(base, "block")
    hidden = base.layers[1](X)
    inner = np.array(block.inner(hidden))
    inputs = np.tanh(inner) * np.array(block.scale)
    outputs = np.array(base(X))
    expected = np.mean((Y - outputs) ** 2, axis=-1)
    expected += np.sum(inputs**2, axis=-1) + np.sum(inputs, axis=-1) * inner[:, 0]
    by_threes = model.evaluate(x, y, 3, verbose=0)  # the last batch has one row
    result = by_threes if padded else model.test_on_batch(x, y)
    np.testing.assert_allclose(result[0], expected.mean(), rtol=1e-5)
    np.testing.assert_allclose(result[1], np.mean(np.abs(Y - outputs)), rtol=1e-5)


def test_evaluation_adds_the_mean_of_what_layers_add():
    """Keras would add the sum over the batch: another number for each batch size."""
    inputs = keras.Input((6,))
    hidden = layers.Dense(6, kernel_regularizer=keras.regularizers.L2(0.1))(inputs)
    model = _compile(dp.DPModel(inputs, layers.Dense(2)(Penalty()(hidden))), "mse")
    first, second = model.layers[1], model.layers[-1]
    hidden = X @ first.kernel.numpy()
    added = np.sum(np.abs(hidden) ** 1.5, axis=1)
    error = np.mean((Y - hidden @ second.kernel.numpy()) ** 2, axis=1)
    expected = np.mean(added + error) + 0.1 * np.sum(first.kernel.numpy() ** 2)
    for size in (2, B):
        np.testing.assert_allclose(model.evaluate(X, Y, size, verbose=0), expected, rtol=1e-5)
    model.sampling = dp.accounting.Sampling.poisson(12, 4)
    np.testing.assert_allclose(model.train_on_batch(X, Y), expected, rtol=1e-5)


def test_other_models_of_keras_are_left_as_they_are():
    inputs = keras.Input((6,))
    model = keras.Model(inputs, Penalty()(inputs))
    model.compile("sgd")
    total = np.sum(np.abs(X) ** 1.5)
    np.testing.assert_allclose(model.evaluate(X, verbose=0), total, rtol=1e-5)
    (added,) = dp.make_private(model).losses or model.losses
    assert added.shape[0] in (None, B)


# Training, saving.


@keras.saving.register_keras_serializable("tests")
def _code_of(inputs, targets, outputs, intermediates):
    error = ops.mean(ops.square(inputs - outputs), axis=-1)
    return error + ops.sum(ops.abs(intermediates["code"]), axis=-1)


def _autoencoder():
    inputs = keras.Input((6,))
    hidden = layers.Dropout(0.1)(layers.Dense(2, name="code")(inputs))
    return dp.DPModel(inputs, layers.Dense(6)(hidden))


def test_an_objective_is_saved_and_loaded(tmp_path):
    model = _compile(_autoencoder(), dp.Objective(_code_of, "code"))
    model.fit(X, batch_size=4, epochs=2, verbose=0)  # no targets
    _fit(model, y=None)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.loss == dp.Objective(_code_of, ("code",)) and loaded.ledger.steps > 0
    np.testing.assert_allclose(loaded.evaluate(X, verbose=0), model.evaluate(X, verbose=0))
    _fit(loaded, y=None)
    assert loaded.ledger.steps > model.ledger.steps


@pytest.mark.parametrize(
    "batches",
    [
        lambda data: dp.data.poisson_batches(data, 4, 2, max_batch_size=6),
        lambda data: dp.data.poisson_users(data, np.arange(B) // 2, 4, 2, examples_per_user=2),
        lambda data: dp.data.with_public(dp.data.poisson_batches(data, 4, 2), (X[:3], None)),
        lambda data: dp.data.without_replacement_batches(data, 4, 2),
        lambda data: dp.data.fixed_order_epochs(data, 4),
    ],
    ids=["one shape", "users", "public", "without replacement", "in order"],
)
def test_batches_of_every_sampler_may_have_no_targets(batches):
    model = _compile(_autoencoder(), dp.Objective(_code_of, "code"), physical_batch_size=2)
    model.fit(batches((X, None)), verbose=0)
    assert model.ledger.steps == 2
    with pytest.raises(ValueError, match="no targets.*Objective needs no"):
        _compile(model, "mse").fit(batches((X, None)), verbose=0)
    with pytest.raises(ValueError, match="without targets.*without map"):
        dp.data.poisson_batches((X, None), 4, map=lambda x: x)


def test_compiling_again_changes_the_objective():
    model = _compile(_autoencoder(), "mse")
    error = model.evaluate(X, X, verbose=0)
    _compile(model, dp.Objective(_code_of, "code"))
    assert model.evaluate(X, X, verbose=0) > error
    assert model.evaluate(X, verbose=0) == model.evaluate(X, X, verbose=0)
    _compile(model, "mse")
    assert model.evaluate(X, X, verbose=0) == error
    assert model.loss == "mse"


def test_norms_and_audits_take_the_objective():
    base, loss, x, y, names = _vae()
    gradients = _oracle(base, loss, x, y, names)
    model = _private(base, loss, names)
    norms = dp.clipping.per_example_norms(model, (x, None))
    np.testing.assert_allclose(
        np.ravel(norms), [np.sqrt(sum((g**2).sum() for g in one)) for one in gradients], rtol=1e-4
    )


# What is refused before the first step.


def _assert_refused(objective, words, intermediates=(), model=None, error=ValueError, **kwargs):
    if model is None:
        inputs = keras.Input((6,))
        hidden = layers.Dense(4, "tanh", name="hidden")(inputs)
        model = dp.DPModel(inputs, layers.Dense(2, name="head")(hidden))
    before = model.get_weights()
    with pytest.raises(error, match=words):
        if not isinstance(objective, dp.Objective):
            objective = dp.Objective(objective, intermediates)
        _fit(_compile(model, objective, **kwargs))
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    assert not model.ledger.steps


def _in_batch_negatives(inputs, targets, outputs, intermediates):
    scores = ops.matmul(outputs, ops.transpose(targets))
    own = ops.arange(ops.shape(scores)[0])
    return keras.losses.sparse_categorical_crossentropy(own, scores, from_logits=True)


def _less_its_mean(inputs, targets, outputs, intermediates):
    hidden = intermediates["hidden"]
    return ops.sum(ops.square(hidden - ops.mean(hidden, axis=0)), axis=-1)


def _of_the_neighbour(inputs, targets, outputs, intermediates):
    return ops.sum(ops.square(outputs - ops.roll(intermediates["head"], 1, axis=0)), axis=-1)


def _drawn_across_rows(inputs, targets, outputs, intermediates):
    return _error(inputs, keras.random.shuffle(targets, seed=1), outputs, intermediates)


SEEDS = keras.random.SeedGenerator(0)


def _noise_of_its_own(inputs, targets, outputs, intermediates):
    return _error(inputs, targets + keras.random.normal(ops.shape(targets)), outputs, None)


def _noise_of_a_generator(inputs, targets, outputs, intermediates):
    noise = keras.random.normal(ops.shape(targets), seed=SEEDS)
    return _error(inputs, targets + noise, outputs, None)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(
    "function",
    [_in_batch_negatives, _less_its_mean, _of_the_neighbour, _drawn_across_rows],
)
def test_objectives_that_mix_examples_are_refused_by_name(function, eager):
    words = f"The objective '{function.__name__}' mixes the examples.*public catalogue.*map="
    _assert_refused(function, words, ("hidden", "head"), run_eagerly=eager)


@pytest.mark.parametrize("function", [_noise_of_its_own, _noise_of_a_generator])
def test_random_numbers_that_are_not_of_a_layer_are_refused(function):
    """Nobody could tell them from what other rows give."""
    _assert_refused(function, "mixes the examples.*SeedGenerator of the layer")


def test_layers_that_add_a_loss_of_other_rows_are_refused_by_name():
    class Centred(layers.Layer):
        def call(self, inputs):
            centred = inputs - ops.mean(inputs, axis=0)
            self.add_loss(ops.sum(ops.square(centred), axis=-1))
            return inputs

    inputs = keras.Input((6,))
    model = dp.DPModel(inputs, layers.Dense(2)(Centred(name="culprit")(inputs)))
    _assert_refused(dp.Objective(_error), "'culprit'.* mixes the examples", model=model)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(
    "reduced, shape",
    [(ops.sum, r"\(\)"), (lambda t: t, r"\(.*, 6\)"), (lambda t: ops.mean(t)[None], r"\(1,\)")],
    ids=["scalar", "of numbers", "of one row"],
)
def test_added_losses_that_are_not_the_examples_own_are_refused_by_name(reduced, shape, eager):
    class Adds(layers.Layer):
        def call(self, inputs):
            self.add_loss(reduced(ops.square(inputs)))
            return inputs

    inputs = keras.Input((6,))
    model = dp.DPModel(inputs, layers.Dense(2)(Adds(name="culprit")(inputs)))
    words = rf"'culprit' calls add_loss .*depends on the data.*{shape}.*vector \(B,\)"
    _assert_refused(dp.Objective(_error), words, model=model, run_eagerly=eager)


def test_losses_added_in_each_step_of_a_loop_are_refused_by_name():
    inputs = keras.Input((3, 2))
    hidden = layers.TimeDistributed(Penalty(name="culprit"))(inputs)
    model = dp.DPModel(inputs, layers.Dense(2)(layers.Flatten()(hidden)))
    _assert_loop_refused(model, "mse", "'culprit' calls add_loss in a loop")
    objective = dp.Objective(_error, ["culprit"])
    model = dp.DPModel(
        inputs, layers.Dense(2)(layers.Flatten()(layers.TimeDistributed(
            layers.Dense(2, name="culprit"))(inputs)))
    )  # fmt: skip
    _assert_loop_refused(
        model, objective, "'culprit', an intermediate .* is run by 'time_distributed.*in a loop"
    )


def _assert_loop_refused(model, objective, words):
    with pytest.raises(ValueError, match=words):
        _fit(_compile(model, objective), x=np.reshape(X, (B, 3, 2)))


@pytest.mark.parametrize(
    "function, words",
    [
        (lambda i, t, o, m: ops.mean(ops.square(o - t)), "'<lambda>' returns a scalar"),
        (lambda i, t, o, m: ops.square(o - t), r"returns the shape \(.*, 2\).*over its other axes"),
        (lambda i, t, o, m: ops.ones(2) * ops.sum(o), r"returns the shape \(2,\)"),
        (lambda i, t, o, m: None, "returns None"),
    ],
    ids=["scalar", "of outputs", "wrong length", "nothing"],
)
@pytest.mark.parametrize("eager", [False, True])
def test_what_is_not_one_loss_for_each_example_is_refused(function, words, eager):
    _assert_refused(function, words, run_eagerly=eager)


@given(
    shape=st.lists(st.sampled_from([1, 2, B]), max_size=3),
    weighted=st.sampled_from([None, (B,), (B, 1)]),
)
@settings(deadline=None)
def test_a_vector_of_one_loss_for_each_row_is_taken_and_nothing_else(shape, weighted):
    values = np.arange(np.prod(shape, dtype=int), dtype="float32").reshape(shape)
    objective = dp.Objective(lambda *_: tf.constant(values))
    weight = None if weighted is None else tf.reshape(tf.range(1.0, B + 1), weighted)
    batch = Batch(tf.constant(X), None, weight)
    if shape == [B]:
        factor = 1.0 if weight is None else np.arange(1.0, B + 1)
        np.testing.assert_array_equal(objective.losses(batch, None, {}), values * factor)
    else:
        with pytest.raises(ValueError, match="returns (a scalar|the shape)"):
            objective.losses(batch, None, {})


class Weights(layers.Layer):
    """Gives something that is not of the batch, whatever its number of rows."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 2), name="kernel")

    def call(self, inputs):
        return ops.matmul(inputs, self.of_weights(self.kernel))

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.of_weights = layers.Lambda(lambda kernel: kernel * 2, name="of_weights")


def test_intermediates_without_the_axis_of_the_batch_are_refused_by_name():
    inputs = keras.Input((6,))
    model = dp.DPModel(inputs, Weights()(inputs))
    words = r"'of_weights', an intermediate .* shape \(6, 2\), without one row for each example"
    _assert_refused(dp.Objective(_error, ["of_weights"]), words, model=model)
    hidden = layers.Lambda(lambda t: ops.mean(t), name="of_all")(inputs)
    model = dp.DPModel(inputs, layers.Dense(2)(inputs) + 0 * hidden)
    _assert_refused(dp.Objective(_error, ["of_all"]), r"'of_all'.*shape \(\)", model=model)


def test_unknown_and_ambiguous_names_are_refused_at_compile():
    _assert_refused(_error, "'hiden' of the objective is no layer.*'hidden'", ["hiden"])
    encoders = [
        keras.Sequential([keras.Input((6,)), layers.Dense(2, name="code")], name=name)
        for name in ("one", "other")
    ]
    inputs = keras.Input((6,))
    model = dp.DPModel(inputs, encoders[0](inputs) + encoders[1](inputs))
    words = "several layers.*'one/code', 'other/code'"
    _assert_refused(dp.Objective(_error, ["code"]), words, model=model)
    _fit(_compile(model, dp.Objective(_error, ["other/code"])))


def test_an_intermediate_that_is_not_called_is_refused():
    base = Subclass()
    base.unused = layers.Dense(2, name="unused")
    model = _compile(dp.make_private(base), dp.Objective(_error, ["unused"]))
    with pytest.raises(ValueError, match="'unused'.* is not called by the model"):
        _fit(model)


def test_objectives_are_the_whole_loss():
    inputs = keras.Input((6,))
    model = dp.DPModel(inputs, [layers.Dense(2, name="a")(inputs), layers.Dense(2)(inputs)])
    with pytest.raises(ValueError, match="cannot be one of several"):
        _compile(model, [dp.Objective(_error), "mse"])
    with pytest.raises(ValueError, match="loss_weights .* one loss"):
        _compile(model, dp.Objective(_error), loss_weights=[1.0, 2.0])
    with pytest.raises(ValueError, match="takes inputs and intermediates"):
        _compile(model, dp.Objective(_error)).per_example_losses(Y, Y)
    with pytest.raises(ValueError, match="from outputs alone"):
        model.compute_loss(X, Y, Y)
    with pytest.raises(TypeError, match="function must be callable"):
        dp.Objective("mse")
    with pytest.raises(TypeError, match="names of layers"):
        dp.Objective(_error, [model.layers[0]])
    with pytest.raises(ValueError, match="needs targets.*Objective needs none"):
        _compile(_autoencoder(), "mse").fit(X, verbose=0)


# In good faith.


def test_running_means_of_a_closure_are_refused():
    average = tf.Variable(tf.zeros(2), name="average")

    def centred(inputs, targets, outputs, intermediates):
        average.assign(0.9 * average + 0.1 * tf.reduce_mean(targets, axis=0))
        return ops.mean(ops.square(targets - average - outputs), axis=-1)

    _assert_refused(centred, "'average.*' is updated from the data")


def test_a_cache_in_python_is_refused_where_the_step_runs_eagerly():
    """Negatives of the batch before: each example would be in two steps."""
    cache = []

    def against_the_last(inputs, targets, outputs, intermediates):
        last = cache[-1] if cache else ops.zeros_like(outputs)
        cache.append(outputs)
        return _error(inputs, targets, outputs, None) - ops.mean(outputs * last[:1], axis=-1)

    _assert_refused(against_the_last, ".", run_eagerly=True)


def test_a_cache_in_python_does_not_reach_a_graph():
    cache = [tf.zeros((1, 2))]

    def against_the_last(inputs, targets, outputs, intermediates):
        loss = _error(inputs, targets, outputs, None) - ops.mean(outputs * cache[-1][:1], axis=-1)
        cache.append(outputs)
        return loss

    _assert_refused(against_the_last, ".", error=Exception)


def test_weights_that_the_function_uses_past_their_layers_are_refused():
    """No engine sees them: the penalty of a weight that is multiplied by the data."""
    inputs = keras.Input((6,))
    head = layers.Dense(2, name="head")
    model = dp.DPModel(inputs, head(inputs))

    def past(inputs, targets, outputs, intermediates):
        return ops.sum(ops.square(ops.matmul(inputs, head.kernel)), axis=-1)

    _assert_refused(past, "head/kernel.* cannot be computed", model=model)


@pytest.mark.parametrize("engine", ["book_keeping", "checked"])
def test_layers_that_the_function_calls_are_clipped_with_the_rest(engine):
    """As a decoder that the model itself does not call on this input."""
    inputs = keras.Input((6,))
    head = layers.Dense(2, name="head")
    model = dp.DPModel(inputs, head(layers.Dense(6, "tanh")(inputs)))

    def again(inputs, targets, outputs, intermediates):
        return _error(inputs, targets, outputs, None) + ops.sum(head(inputs) ** 2, axis=-1)

    gradients = one_at_a_time(model, lambda y, p: 0.0 * tf.reduce_sum(p), X, Y)
    for row in range(B):
        x, y = tf.constant(X[row : row + 1]), tf.constant(Y[row : row + 1])
        with tf.GradientTape() as tape:
            loss = again(x, y, model(x), None)[0]
        gradients[row] = [
            np.float64(g) for g in tape.gradient(loss, [v.value for v in model.trainable_variables])
        ]
    _compile(model, dp.Objective(again))
    batch = Batch(tf.constant(X), tf.constant(Y))
    engines = engines_for(model) if engine == "book_keeping" else checked_engines(model, batch)
    (total,) = clipped_sums(model, batch, (Query(clip_norm=0.1),), engines).sums
    assert_close(total, clip_and_sum(gradients, 0.1))


def test_a_teacher_that_trains_on_the_batch_is_refused():
    """Its statistics would move with the rows; its outputs, mix them."""
    teacher = keras.Sequential([keras.Input((6,)), layers.BatchNormalization(), layers.Dense(2)])

    def distilled(inputs, targets, outputs, intermediates):
        return _error(inputs, teacher(inputs, training=True), outputs, None)

    _assert_refused(distilled, "updated from the data|mixes the examples")

    def sound(inputs, targets, outputs, intermediates):
        return _error(inputs, teacher(inputs, training=False), outputs, None)

    before = teacher.get_weights()
    inputs = keras.Input((6,))
    _fit(_compile(dp.DPModel(inputs, layers.Dense(2)(inputs)), dp.Objective(sound)))
    for old, new in zip(before, teacher.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
