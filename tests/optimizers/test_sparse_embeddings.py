"""Tables of which each step moves some rows: each row by the rule, on its own steps, in float64."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_keras_opt as dp
from dp_keras_opt.noise.released import Released
from dp_keras_opt.optimizers import SparseEmbeddings

V, D, T, STEPS = 7, 3, 5, 9
PRIVATE = {"clip_norm": 0.1, "batch_size": 40, "noise_multiplier": 0.7}
STD = 0.02


class SGD:
    """Of one row, or of a vector: written from the docstrings of the rules."""

    def __init__(self, rate, momentum=0.0, nesterov=False):
        self.rate, self.momentum, self.nesterov, self.m = rate, momentum, nesterov, 0.0

    def step(self, g):
        self.m = self.momentum * self.m + self.rate * g
        return self.momentum * self.m + self.rate * g if self.nesterov else self.m


class Adam:
    def __init__(self, rate, b1=0.9, b2=0.999, yogi=False, amsgrad=False, corrected=False):
        self.rate, self.b1, self.b2, self.yogi, self.amsgrad = rate, b1, b2, yogi, amsgrad
        self.corrected, self.m, self.v, self.top, self.phi, self.t = (
            corrected,
            0.0,
            0.0,
            0.0,
            0.0,
            0,
        )

    def step(self, g):
        self.t += 1
        self.m = self.b1 * self.m + (1 - self.b1) * g
        if self.yogi:
            self.v = self.v + (1 - self.b2) * np.sign(g**2 - self.v) * g**2
        else:
            self.v = self.b2 * self.v + (1 - self.b2) * g**2
        self.phi = self.b2 * self.phi + (1 - self.b2) * STD**2
        self.top = np.maximum(self.top, self.v)
        m = self.m / (1 - self.b1**self.t)
        v = (self.top if self.amsgrad else self.v) / (1 - self.b2**self.t)
        if self.corrected:
            v = np.maximum(v - self.phi / (1 - self.b2**self.t), 1e-4**2)
            return self.rate * m / np.sqrt(v)
        return self.rate * m / (np.sqrt(v) + 1e-4)


class Adagrad:
    def __init__(self, rate):
        self.rate, self.v = rate, 0.1

    def step(self, g):
        self.v = self.v + g**2
        return self.rate * g / (np.sqrt(self.v) + 1e-4)


class RMSprop:
    def __init__(self, rate, momentum):
        self.rate, self.momentum, self.v, self.m = rate, momentum, 0.0, 0.0

    def step(self, g):
        self.v = 0.9 * self.v + 0.1 * g**2
        self.m = self.momentum * self.m + self.rate * g / (np.sqrt(self.v) + 1e-4)
        return self.m


E = {"epsilon": 1e-4}
RULES = {
    "SGD": (dp.optimizers.DPSGD, {}, lambda: SGD(0.1)),
    "momentum": (dp.optimizers.DPSGD, {"momentum": 0.9}, lambda: SGD(0.1, 0.9)),
    "Nesterov": (
        dp.optimizers.DPSGD,
        {"momentum": 0.9, "nesterov": True},
        lambda: SGD(0.1, 0.9, nesterov=True),
    ),
    "Adam": (dp.optimizers.DPAdam, E, lambda: Adam(0.1)),
    "AMSGrad": (dp.optimizers.DPAdam, E | {"amsgrad": True}, lambda: Adam(0.1, amsgrad=True)),
    "Adam without the noise's share": (
        dp.optimizers.DPAdam,
        E | {"second_moment": "bias_corrected"},
        lambda: Adam(0.1, corrected=True),
    ),
    "Yogi": (dp.optimizers.DPYogi, E, lambda: Adam(0.1, yogi=True)),
    "Adagrad": (
        dp.optimizers.DPAdagrad,
        E | {"initial_accumulator_value": 0.1},
        lambda: Adagrad(0.1),
    ),
    "RMSprop": (dp.optimizers.DPRMSprop, E | {"momentum": 0.5}, lambda: RMSprop(0.1, 0.5)),
}


def built(cls, arguments, **sparse):
    """(optimizer, a vector and a table as its variables)."""
    variables = [
        keras.Variable(np.ones(4), name="kernel"),
        keras.Variable(np.ones((V, D)), name="embeddings"),
    ]
    variables[1]._path = "model/words/embeddings"  # as in a layer
    sparse = SparseEmbeddings(**sparse) if sparse else SparseEmbeddings()
    optimizer = cls(0.1, sparse_embeddings=sparse, **PRIVATE, **arguments)
    optimizer.build(variables)
    return optimizer, variables


def releases(seed=0):
    """What each step releases: of the vector, and of some rows, also of none and of all."""
    rng = np.random.default_rng(seed)
    for step in range(STEPS):
        size = {0: V, 3: 0}.get(step, 1 + step % 4)
        rows = np.sort(rng.choice(V, size, replace=False))
        yield rng.normal(size=4), rows, rng.normal(size=(size, D))


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_each_row_is_trained_on_the_steps_at_which_it_was_chosen(name, traced):
    cls, arguments, rule = RULES[name]
    optimizer, (vector, table) = built(cls, arguments)

    def update(g, rows, values):
        slices = tf.IndexedSlices(values, rows, tf.constant([V, D]))
        optimizer.update([Released([g, slices], STD)])

    if traced:
        spec = [tf.TensorSpec(s, t) for s, t in (([4], tf.float32), ([None], tf.int64))]
        update = tf.function(update, [*spec, tf.TensorSpec([None, D], tf.float32)])
    x, w = np.ones(4), np.ones((V, D))
    of_vector, of_rows = rule(), [rule() for _ in range(V)]
    for g, rows, values in releases():
        update(*(tf.constant(part, t) for part, t in
                 ((g, tf.float32), (rows, tf.int64), (values, tf.float32))))  # fmt: skip
        x -= of_vector.step(g)
        for row, value in zip(rows, values, strict=True):
            w[row] -= of_rows[row].step(value)
        np.testing.assert_allclose(vector, x, rtol=2e-4, atol=2e-5)
        np.testing.assert_allclose(table, w, rtol=2e-4, atol=2e-5)
    assert int(optimizer.iterations) == STEPS


@pytest.mark.parametrize("name", RULES)
def test_all_rows_at_each_step_are_the_rule_as_it_is(name):
    cls, arguments, _ = RULES[name]
    optimizer, variables = built(cls, arguments)
    plain = cls(0.1, **PRIVATE, **arguments)
    others = [keras.Variable(v) for v in variables]
    plain.build(others)
    rng, rows = np.random.default_rng(1), tf.range(V, dtype=tf.int64)
    for _ in range(5):
        g, h = (tf.constant(rng.normal(size=size), tf.float32) for size in (4, (V, D)))
        optimizer.update([Released([g, tf.IndexedSlices(h, rows, tf.constant([V, D]))], STD)])
        plain.update([Released([g, h], STD)])
    for one, other in zip(variables, others, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_moments_that_a_report_asks_for():
    optimizer, _ = built(dp.optimizers.DPAdam, E)
    empty = [estimate.numpy() for estimate in optimizer.second_moment_estimates]
    assert all(np.isfinite(each).all() for each in empty)
    for g, rows, values in releases():
        slices = tf.IndexedSlices(tf.constant(values, tf.float32), rows, tf.constant([V, D]))
        optimizer.update([Released([tf.constant(g, tf.float32), slices], STD)])
    of_rows = [Adam(0.1) for _ in range(V)]
    for _, rows, values in releases():
        for row, value in zip(rows, values, strict=True):
            of_rows[row].step(value)
    expected = [rule.v / (1 - 0.999**rule.t) for rule in of_rows]
    np.testing.assert_allclose(optimizer.second_moment_estimates[1], expected, rtol=2e-3)


# In a model.


def text(rows=40, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 20, (rows, T)).astype("int32")
    return x, rng.normal(size=(rows, 2)).astype("float32")


def build(vocabulary=50, dtype=None, length=T, **arguments):
    keras.utils.set_random_seed(3)
    inputs = keras.Input((length,), dtype="int32")
    x = keras.layers.Embedding(vocabulary, 4, name="words", dtype=dtype, **arguments)(inputs)
    x = keras.layers.GlobalAveragePooling1D(dtype=dtype)(x)
    return dp.DPModel(inputs, keras.layers.Dense(2, name="out", dtype=dtype)(x))


def compiled(optimizer, **arguments):
    model = build(**arguments)
    model.compile(optimizer, "mse")
    model.sampling = dp.accounting.Sampling.full(40)
    return model


@pytest.mark.filterwarnings("ignore:.*without privacy.*:UserWarning")
@pytest.mark.parametrize("dtype", [None, "mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize(("physical", "eager"), [(None, False), (7, False), (7, True)])
def test_without_noise_and_bound_it_is_keras(dtype, physical, eager):
    """σ = 0, C = ∞: rows that are touched move as by Keras, the others not."""
    optimizer = dp.optimizers.DPSGD(
        0.5, momentum=0.9, clip_norm=np.inf, noise_multiplier=0.0, batch_size=40,
        sparse_embeddings=SparseEmbeddings(),
    )  # fmt: skip
    model, (x, y) = build(dtype=dtype), text()
    model.compile(optimizer, "mse", physical_batch_size=physical, run_eagerly=eager)
    model.sampling = dp.accounting.Sampling.full(40)
    plain = keras.Model(model.inputs, model.outputs)
    start = model.get_weights()
    for _ in range(4):
        model.train_on_batch(x, y)
    private = model.get_weights()
    plain.set_weights(start)
    plain.compile(keras.optimizers.SGD(0.5, momentum=0.9), "mse", auto_scale_loss=False)
    for _ in range(4):
        plain.train_on_batch(x, y)
    tolerance = 1e-5 if dtype is None else 2e-2
    for one, other in zip(private, plain.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)
    np.testing.assert_array_equal(private[0][20:], start[0][20:])
    assert np.all(np.any(private[0][:20] != start[0][:20], axis=1))


@pytest.mark.parametrize("data", ["poisson", "users", "epochs"])
def test_training_moves_the_rows_that_are_chosen(data):
    optimizer = dp.optimizers.DPAdam(
        0.1, clip_norm=0.5, noise_multiplier=0.5, sparse_embeddings=SparseEmbeddings(6.0)
    )
    (x, y), B = text(60), 20
    batches = {
        "poisson": lambda: dp.data.poisson_batches((x, y), batch_size=B, steps_per_epoch=4),
        "users": lambda: dp.data.poisson_users(
            (x, y), np.arange(60) // 2, 10, steps_per_epoch=4, examples_per_user=2
        ),
        "epochs": lambda: dp.data.balls_in_bins((x, y), batch_size=B),
    }  # fmt: skip
    model = build()
    model.compile(optimizer, "mse")
    start = model.get_weights()[0]
    report = dp.callbacks.PrivacyReport(delta=1e-5)
    model.fit(batches[data](), verbose=0, callbacks=[report])
    moved = np.any(model.get_weights()[0] != start, axis=1)
    # τ = 6: of 30 rows that nobody touches one in 3·10⁷ steps is chosen.
    assert not moved[20:].any()
    chosen = optimizer.variables[-1].numpy().ravel()  # how often each row was
    np.testing.assert_array_equal(chosen > 0, moved)
    assert 0 < report.epsilon < 100


@pytest.mark.filterwarnings("ignore:.*without privacy.*:UserWarning")
def test_batches_of_several_lengths():
    """The rows of each bucket, and of no more; without noise as in one tensor, filled up with 0."""
    rng = np.random.default_rng(5)
    sizes = rng.integers(1, T + 1, 30)
    texts = tf.RaggedTensor.from_row_lengths(rng.integers(1, 20, sizes.sum()), sizes)
    y, found = rng.normal(size=(30, 2)).astype("float32"), []
    for data in (texts, texts.to_tensor(shape=(30, T)).numpy()):
        optimizer = dp.optimizers.DPSGD(
            0.5, clip_norm=0.1, batch_size=30, noise_multiplier=0.0,
            sparse_embeddings=SparseEmbeddings(),
        )  # fmt: skip
        model = build(length=None, mask_zero=True)
        model.compile(optimizer, "mse")
        ragged = isinstance(data, tf.RaggedTensor)
        buckets = {"buckets": dp.data.Buckets([2, T])} if ragged else {}
        batches = dp.data.poisson_batches((data, y), 30, 3, **buckets)  # of all: q = 1
        model.fit(batches, verbose=0)
        found.append(model.get_weights())
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_an_average_is_of_all_steps():
    """Rows that were not chosen count with what they are, in every step."""
    optimizer = dp.optimizers.DPSGD(
        0.5, average_from=1, sparse_embeddings=SparseEmbeddings(0.5, noise_ratio=1.0), **PRIVATE
    )
    model, (x, y) = compiled(optimizer), text()
    weights = []
    for _ in range(5):
        model.train_on_batch(x, y)
        weights.append(model.get_weights()[0])
    averages = optimizer._model_variables_moving_average[0].numpy()
    np.testing.assert_allclose(averages, np.mean(weights[1:], axis=0), rtol=1e-5, atol=1e-6)


class Sub(keras.layers.Embedding):
    """Without a rule of its own: served one example at a time."""


class Scaled(keras.layers.Layer):
    """An embedding inside of a layer with weights of its own, which has no rule."""

    def __init__(self, table=None):
        super().__init__()
        self.table = table or keras.layers.Embedding(50, 4, name="words")

    def build(self, shape):
        self.scale = self.add_weight(shape=(4,), initializer="ones", name="scale")

    def call(self, inputs):
        return self.table(inputs) * self.scale


def of_two_uses(inputs):
    table = keras.layers.Embedding(50, 4, name="words")
    return table(inputs) + Scaled(table)(inputs)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "rows",
    [lambda x: Sub(50, 4, name="words")(x), lambda x: Scaled()(x), of_two_uses],
    ids=["subclass", "inside of a layer", "also used directly"],
)
def test_a_table_without_a_rule_is_refused_and_never_forgotten(rows):
    """Its gradients are of whole tables; read by row they would seem to be none."""
    inputs = keras.Input((T,), dtype="int32")
    outputs = keras.layers.Dense(2)(keras.layers.GlobalAveragePooling1D()(rows(inputs)))
    model, (x, y) = dp.DPModel(inputs, outputs), text()
    model.compile(dp.optimizers.DPSGD(0.5, sparse_embeddings=SparseEmbeddings(), **PRIVATE), "mse")
    model.sampling = dp.accounting.Sampling.full(40)
    with pytest.raises(ValueError, match="is not only looked up in"):
        model.train_on_batch(x, y)


class WithBranch(dp.DPModel):
    """A subclass with an embedding that is never called."""

    def __init__(self):
        super().__init__()
        self.words = keras.layers.Embedding(50, 4, name="words")
        self.unused = keras.layers.Embedding(50, 4, name="unused")
        self.out = keras.layers.Dense(2)

    def call(self, inputs):
        return self.out(keras.ops.mean(self.words(inputs), axis=1))


def test_an_embedding_that_is_never_called():
    model, (x, y) = WithBranch(), text()
    optimizer = dp.optimizers.DPSGD(0.5, sparse_embeddings=SparseEmbeddings(0.5), **PRIVATE)
    model.compile(optimizer, "mse")
    model.sampling = dp.accounting.Sampling.full(40)
    model.train_on_batch(x, y)
    start = model.words.get_weights()[0]
    model.train_on_batch(x, y)
    assert np.any(model.words.get_weights()[0] != start)


@pytest.mark.parametrize("how", ["train_on_batch", "fit"])
def test_rows_that_are_given_to_a_model_that_trained_before(how):
    """Its engines are known; the optimizer is built all the same before a step is traced."""
    model, (x, y) = build(), text()
    given = SparseEmbeddings(1.0, rows={"words": [1, 2, 3]})
    for sparse in (None, given, given):
        model.compile(dp.optimizers.DPSGD(0.5, sparse_embeddings=sparse, **PRIVATE), "mse")
        model.sampling = dp.accounting.Sampling.full(40)
        if how == "fit":
            model.fit(dp.data.poisson_batches((x, y), 40, 2), verbose=0)
        else:
            model.train_on_batch(x, y)
    assert model.ledger.steps == (6 if how == "fit" else 3)


class Counting(dp.optimizers.DPSGD):
    """A user's own rule, with state that it assigns by itself."""

    def build(self, variables):
        super().build(variables)
        self.seen = self.add_variable((), dtype="float32", name="seen")

    def update_step(self, gradient, variable, learning_rate):
        self.seen.assign_add(1.0)
        super().update_step(gradient, variable, learning_rate)


def test_state_of_a_rule_of_ones_own():
    model, (x, y) = compiled(Counting(0.5, sparse_embeddings=SparseEmbeddings(), **PRIVATE)), text()
    for _ in range(3):
        model.train_on_batch(x, y)
    assert float(model.optimizer.seen) == 3 * len(model.trainable_variables)


@pytest.mark.parametrize("dtype", ["int64", "int32", "float32"])
def test_ids_are_those_of_keras(dtype):
    """From the end where they are negative; of 64 bits, none is taken for another."""
    inputs = keras.Input((T,), dtype=dtype)
    wide = dp.DPModel(inputs, keras.layers.Flatten()(keras.layers.Embedding(50, 4)(inputs)))
    query = dp.clipping.Query(clip_norm=0.1, tables=dp.clipping.Tables({0: None}))
    x = np.array([[3, -1, 0, 49, -50]]).astype(dtype)
    y = np.zeros((1, T * 4), "float32")

    def losses(y, y_pred, weight=None):
        return tf.reduce_mean(tf.square(y - y_pred), axis=1)

    found = dp.clipping.clipped_sums(wide, (x, y), [query], per_example_loss=losses)
    np.testing.assert_allclose(found.y_pred, wide(x), rtol=1e-6)
    assert sorted(found.sums[0][0].indices.numpy()) == [0, 3, 49]
    if dtype == "int64":
        x[0, 0] += 2**32
        with pytest.raises(tf.errors.InvalidArgumentError):
            dp.clipping.clipped_sums(wide, (x, y), [query], per_example_loss=losses)


def test_tables_of_one_name():
    """Those of two models in one, say."""
    inputs, towers = keras.Input((T,), dtype="int32"), []
    for name in ("one", "other"):
        words = keras.Input((T,), dtype="int32")
        rows = keras.layers.Embedding(50, 4, name="words")(words)
        tower = keras.Model(words, keras.layers.GlobalAveragePooling1D()(rows), name=name)
        towers.append(tower(inputs))
    optimizer = dp.optimizers.DPSGD(sparse_embeddings=SparseEmbeddings(layers=["words"]), **PRIVATE)
    model, (x, y) = dp.DPModel(inputs, keras.layers.Dense(2)(towers[0] * towers[1])), text()
    model.compile(optimizer, "mse")
    model.sampling = dp.accounting.Sampling.full(40)
    model.train_on_batch(x, y)
    assert len(optimizer._untracked.by_row.tables) == 2


def test_given_rows_alone_are_trained():
    optimizer = dp.optimizers.DPSGD(
        0.5, sparse_embeddings=SparseEmbeddings(None, rows={"words": [1, 2, 40]}), **PRIVATE
    )
    model, (x, y) = compiled(optimizer), text()
    start = model.get_weights()[0]
    for _ in range(2):
        model.train_on_batch(x, y)
    moved = np.any(model.get_weights()[0] != start, axis=1)
    assert np.flatnonzero(moved).tolist() == [1, 2, 40]


def test_a_saved_model_goes_on(tmp_path):
    def make():
        return dp.optimizers.DPAdam(
            0.1, sparse_embeddings=SparseEmbeddings(1.0, rows={"words": range(30)}), **PRIVATE
        )

    model, (x, y) = compiled(make()), text()
    for _ in range(3):
        model.train_on_batch(x, y)
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert loaded.optimizer.sparse_embeddings == model.optimizer.sparse_embeddings
    for one, other in zip(model.optimizer.variables, loaded.optimizer.variables, strict=True):
        np.testing.assert_array_equal(one, other)
    loaded.sampling = dp.accounting.Sampling.full(40)
    loaded.train_on_batch(x, y)
    assert int(loaded.optimizer.iterations) == 4
    assert loaded.ledger.steps == 4


def test_what_observers_are_given():
    """Canaries and the report of the geometry of training, which know tables as a whole."""
    optimizer = dp.optimizers.DPAdam(
        0.1, sparse_embeddings=SparseEmbeddings(1.0), clip_norm=0.5, noise_multiplier=0.5,
        batch_size=20,
    )  # fmt: skip
    model, (x, y) = build(), text(60)
    model.compile(optimizer, "mse")
    batches = dp.data.poisson_batches((x, y), batch_size=20, steps_per_epoch=3)
    history = model.fit(batches, verbose=0, callbacks=[dp.callbacks.OptimizerReport()])
    assert np.isfinite(history.history["noise_to_signal"]).all()


# Refusals.


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"threshold": 0.0}, "half of the rows"),
        ({"threshold": np.nan}, "threshold"),
        ({"threshold": None}, "chooses no rows"),
        ({"noise_ratio": 0.0}, "noise_ratio"),
        ({"contribution_norm": -1.0}, "contribution_norm"),
        ({"layers": "words"}, "list of names"),
        ({"rows": {"words": []}}, "list of ids"),
        ({"rows": {"words": [0.5]}}, "list of ids"),
        ({"rows": {"words": [-1]}}, "list of ids"),
    ],
)
def test_arguments_out_of_range(arguments, named):
    with pytest.raises(ValueError, match=named):
        SparseEmbeddings(**arguments)


@pytest.mark.parametrize(
    ("cls", "arguments", "named"),
    [
        ("DPNesterov", {"strong_convexity": 0.1}, "does not take sparse_embeddings"),
        ("ADPAdagradNorm", {"steps": 9}, "does not take sparse_embeddings"),
        ("DPSGD", {"noise": "laplace"}, "noise=Laplace"),
        ("DPSGD", {"noise": dp.noise.BandedMatrix(8, 2)}, "noise=BandedMatrix"),
        ("DPSGD", {"noise": dp.noise.Planned()}, "noise=Planned"),
        ("DPSGD", {"clip_norm": dp.clipping.Quantile(0.5)}, "clip_norm=Quantile"),
        ("DPSGD", {"gradient_filter": "first_order_v1"}, "gradient_filter=LowPass"),
        ("DPAdam", {"projection": dp.optimizers.GaLore(2)}, "projection=GaLore"),
        ("DPAdam", {"geometry": dp.geometries.Mean()}, "geometry=Mean"),
        ("DPAdam", {"weight_decay": 0.1}, "weight_decay=0.1"),
        ("DPAdam", {"second_moment": "scale_then_privatize"}, "second_moment=ScaleThenPrivatize"),
        ("DPAdam", {"second_moment": "independent"}, "second_moment=Independent"),
        ("DPAdam", {"second_moment": "side_information"}, "second_moment=SideInformation"),
        ("DPAdam", {"second_moment": "noiseless"}, "second_moment=Noiseless"),
        ("DPAdam", {"second_moment": dp.optimizers.moments.Joint(1.0)}, "second_moment=Joint"),
        ("AdaDPS", {}, "second_moment=SideInformation"),
        ("DPGaLore", {"rank": 2}, "projection=GaLore"),
        ("DPSGD", {"sparse_embeddings": 3.0}, "must be None or a SparseEmbeddings"),
    ],
)
def test_what_needs_whole_tables_is_refused(cls, arguments, named):
    arguments = PRIVATE | {"sparse_embeddings": SparseEmbeddings()} | arguments
    with pytest.raises(ValueError, match=named):
        getattr(dp.optimizers, cls)(**arguments)


def test_no_weight_decay_may_be_a_number():
    optimizer = dp.optimizers.DPSGD(
        sparse_embeddings=SparseEmbeddings(), weight_decay=0.0, **PRIVATE
    )
    assert optimizer.weight_decay == 0.0


def test_keras_optimizers_are_refused():
    with pytest.raises((TypeError, ValueError), match="sparse_embeddings"):
        dp.optimizers.DPOptimizer(
            keras.optimizers.Lion(), sparse_embeddings=SparseEmbeddings(), **PRIVATE
        )


@pytest.mark.parametrize(
    ("sparse", "embedding", "named"),
    [
        ({"layers": ["sentences"]}, {}, "sentences.*there are"),
        ({"rows": {"other": [1]}}, {}, "other"),
        ({"rows": {"words": [50]}}, {}, "50 rows"),
        ({}, {"embeddings_regularizer": "l2"}, "regularizer"),
        ({}, {"embeddings_constraint": "unit_norm"}, "constraint"),
    ],
)
def test_tables_that_do_not_fit_are_refused(sparse, embedding, named):
    optimizer = dp.optimizers.DPSGD(sparse_embeddings=SparseEmbeddings(**sparse), **PRIVATE)
    model, (x, y) = compiled(optimizer, **embedding), text()
    with pytest.raises(ValueError, match=named):
        model.train_on_batch(x, y)


def test_a_model_without_tables_is_refused():
    inputs = keras.Input((3,))
    model = dp.DPModel(inputs, keras.layers.Dense(2)(inputs))
    model.compile(dp.optimizers.DPSGD(sparse_embeddings=SparseEmbeddings(), **PRIVATE), "mse")
    model.sampling = dp.accounting.Sampling.full(40)
    with pytest.raises(ValueError, match="finds no trained embeddings"):
        model.train_on_batch(np.ones((4, 3)), np.ones((4, 2)))


def test_not_by_xla():
    def optimizer():
        return dp.optimizers.DPSGD(sparse_embeddings=SparseEmbeddings(), **PRIVATE)

    with pytest.raises(ValueError, match="XLA cannot compile"):
        build().compile(optimizer(), "mse", jit_compile=True)
    model = build()
    model.compile(optimizer(), "mse")
    assert not model.jit_compile
