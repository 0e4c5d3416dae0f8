"""Engines against one-example-at-a-time gradients, and what a neighbouring batch can change."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import dp_keras_opt as dp
from dp_keras_opt.clipping import Batch, Query, clipped_sums
from dp_keras_opt.clipping.engines import Engines, engines_for
from dp_keras_opt.clipping.per_example import max_rows
from tests.helpers.per_example import assert_close, clip_and_sum, one_at_a_time

layers = keras.layers
ROWS = 5


def _compiled(model, loss="mse", **kwargs):
    optimizer = dp.optimizers.DPSGD(0.1, clip_norm=1.0, noise_multiplier=1.0, batch_size=4)
    model = dp.make_private(model)
    model.compile(optimizer=optimizer, loss=loss, **kwargs)
    return model


def _features(*shape):
    return np.random.default_rng(1).normal(size=(ROWS, *shape)).astype("float32")


def dense():
    inputs = keras.Input((6,))
    hidden = layers.Dense(7, activation="tanh")(inputs)
    return keras.Model(inputs, layers.Dense(3, use_bias=False)(hidden)), _features(6), _features(3)


def dense_on_sequence():
    inputs = keras.Input((4, 6))
    hidden = layers.Dense(5, activation="tanh")(inputs)
    outputs = layers.Dense(2)(layers.Flatten()(hidden))
    return keras.Model(inputs, outputs), _features(4, 6), _features(2)


def shared_dense():
    inputs = keras.Input((6,))
    shared = layers.Dense(6, activation="tanh")
    return keras.Model(inputs, shared(shared(inputs))), _features(6), _features(6)


def frozen_kernel():
    inputs = keras.Input((6,))
    frozen = layers.Dense(5, activation="tanh", trainable=False)
    return keras.Model(inputs, layers.Dense(2)(frozen(inputs))), _features(6), _features(2)


def embedding():
    ids = keras.Input((), dtype="int32")
    outputs = layers.Dense(2)(layers.Embedding(9, 4)(ids))
    return keras.Model(ids, outputs), np.arange(ROWS) % 3, _features(2)


def embedding_with_repeats():
    ids = keras.Input((6,), dtype="int32")
    pooled = layers.GlobalAveragePooling1D()(layers.Embedding(4, 3)(ids))
    data = np.random.default_rng(2).integers(0, 4, (ROWS, 6))
    return keras.Model(ids, layers.Dense(2)(pooled)), data, _features(2)


def embedding_used_twice():
    ids = keras.Input((2,), dtype="int32")
    table = layers.Embedding(4, 3)
    product = layers.Dot(-1)([table(ids[:, 0]), table(ids[:, 1])])
    data = np.array([[0, 0], [1, 2], [3, 3], [2, 1], [0, 1]])
    return keras.Model(ids, product), data, _features(1)


def _convolution(**options):
    inputs = keras.Input((9, 8, 2))
    hidden = layers.Conv2D(3, (3, 2), activation="tanh", **options)(inputs)
    outputs = layers.Dense(2)(layers.Flatten()(hidden))
    return keras.Model(inputs, outputs), _features(9, 8, 2), _features(2)


def conv2d():
    return _convolution()


def conv2d_strided_same():
    return _convolution(strides=(2, 3), padding="same")


def conv2d_dilated_without_bias():
    return _convolution(dilation_rate=(2, 1), use_bias=False)


def grouped_convolution():  # no rule: served by the general engine
    inputs = keras.Input((6, 6, 4))
    hidden = layers.Conv2D(4, 3, groups=2, activation="tanh")(inputs)
    outputs = layers.Dense(2)(layers.Flatten()(hidden))
    return keras.Model(inputs, outputs), _features(6, 6, 4), _features(2)


def layer_norm_and_attention():
    inputs = keras.Input((4, 6))
    attended = layers.MultiHeadAttention(2, 3)(inputs, inputs)
    normed = layers.LayerNormalization()(attended + inputs)
    outputs = layers.Dense(2)(layers.Flatten()(normed))
    return keras.Model(inputs, outputs), _features(4, 6), _features(2)


def lstm():
    inputs = keras.Input((4, 3))
    outputs = layers.Dense(2)(layers.LSTM(5)(inputs))
    return keras.Model(inputs, outputs), _features(4, 3), _features(2)


def stacked_cells():
    """A loop without a rule."""
    inputs = keras.Input((4, 3))
    hidden = layers.RNN([layers.LSTMCell(3), layers.GRUCell(2)])(inputs)
    return keras.Model(inputs, layers.Dense(2)(hidden)), _features(4, 3), _features(2)


def time_distributed():
    inputs = keras.Input((4, 3))
    hidden = layers.TimeDistributed(layers.Dense(3, activation="tanh"))(inputs)
    outputs = layers.Dense(2)(layers.Flatten()(hidden))
    return keras.Model(inputs, outputs), _features(4, 3), _features(2)


def two_inputs():
    first, second = keras.Input((3,), name="first"), keras.Input((2,), name="second")
    joined = layers.Concatenate()([layers.Dense(4, activation="tanh")(first), second])
    x = {"first": _features(3), "second": _features(2)}
    return keras.Model({"first": first, "second": second}, layers.Dense(2)(joined)), x, _features(2)


MODELS = [
    dense, dense_on_sequence, shared_dense, frozen_kernel, embedding, embedding_with_repeats,
    embedding_used_twice, conv2d, conv2d_strided_same, conv2d_dilated_without_bias,
    grouped_convolution, layer_norm_and_attention, lstm, stacked_cells, time_distributed,
    two_inputs,
]  # fmt: skip


def _mse(y, y_pred):
    return tf.reduce_mean(tf.square(tf.cast(y, y_pred.dtype) - y_pred))


def _setup(make):
    base, x, y = make()
    model = _compiled(base)
    gradients = one_at_a_time(base, _mse, x, y)
    norms = [np.sqrt(sum((g**2).sum() for g in example)) for example in gradients]
    return model, x, y, gradients, float(np.median(norms))


@pytest.mark.representatives(15)
@pytest.mark.parametrize("whole_model", [False, True], ids=["per layer", "whole model"])
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_clipped_sum_is_that_of_one_at_a_time_gradients(make, whole_model):
    model, x, y, gradients, median = _setup(make)
    scale = [
        np.random.default_rng(3).uniform(0.2, 2.0, v.shape).astype("float32")
        for v in model.trainable_variables
    ]
    queries = (
        Query(clip_norm=np.inf),
        Query(clip_norm=median),  # binds for half of the examples
        Query(clip_norm=median, normalize=True),
        Query(clip_norm=median, scale=[tf.constant(s) for s in scale]),
        Query(clip_norm=median, scale=[tf.constant(s) for s in scale], square=True),
    )
    engines = Engines((), (model,)) if whole_model else engines_for(model)
    result = clipped_sums(model, (x, y), queries, engines)
    assert_close(result.sums[0], clip_and_sum(gradients, np.inf))
    assert_close(result.sums[1], clip_and_sum(gradients, median))
    assert_close(result.sums[2], clip_and_sum(gradients, median, normalize=True))
    assert_close(result.sums[3], clip_and_sum(gradients, median, scale=scale))
    assert_close(result.sums[4], clip_and_sum(gradients, median, scale=scale, square=True))


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_second_moment_of_public_rows_times_directions(make):
    model, x, y, gradients, _ = _setup(make)
    public = np.array([0.5, 0, 0, 0.5, 0], np.float32)  # two of the rows
    rng = np.random.default_rng(4)
    directions = [rng.normal(size=(3, *v.shape)) for v in model.trainable_variables]
    query = Query(population="public", directions=[tf.constant(d, tf.float32) for d in directions])
    x, y = tf.nest.map_structure(tf.convert_to_tensor, (x, y))
    batch = Batch(x, y, None, tf.constant(public == 0), tf.constant(public))
    flat = np.array([np.concatenate([g.ravel() for g in example]) for example in gradients])
    moment = np.einsum("b,bi,bj->ij", public, flat, flat)
    along = np.concatenate([d.reshape(3, -1) for d in directions], axis=1)
    products = np.split(along @ moment, np.cumsum([d[0].size for d in directions])[:-1], axis=1)
    expected = [p.reshape(d.shape) for p, d in zip(products, directions, strict=True)]
    assert_close(clipped_sums(model, batch, (query,)).sums[0], expected)


@pytest.mark.representatives(5)
@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
@pytest.mark.parametrize("make", [dense, embedding_with_repeats, conv2d, layer_norm_and_attention])
def test_traced_step_gives_the_same_sums(make, jit_compile):
    model, x, y, gradients, median = _setup(make)

    @tf.function(jit_compile=jit_compile)
    def traced(x, y):
        return clipped_sums(model, (x, y), (Query(clip_norm=median),)).sums[0]

    x, y = tf.nest.map_structure(tf.convert_to_tensor, (x, y))
    assert_close(traced(x, y), clip_and_sum(gradients, median))


def test_which_layers_have_rules():
    assert len(engines_for(_compiled(dense()[0])).ruled) == 2
    assert not engines_for(_compiled(conv2d()[0])).general
    assert not engines_for(_compiled(lstm()[0])).general
    (layer,) = engines_for(_compiled(stacked_cells()[0])).general
    assert isinstance(layer, layers.RNN)

    class Custom(layers.Dense):  # may compute something else: no rule
        def call(self, inputs):
            return 2 * super().call(inputs)

    inputs = keras.Input((3,))
    (layer,) = engines_for(_compiled(keras.Model(inputs, Custom(2)(inputs)))).general
    assert isinstance(layer, Custom)


# What a neighbouring batch can change: invariant 1.


@pytest.mark.representatives(6)
@pytest.mark.parametrize("normalize", [False, True], ids=["clip", "normalize"])
@pytest.mark.parametrize("make", [dense, shared_dense, embedding_with_repeats, conv2d, lstm])
def test_neighbouring_batches_differ_by_at_most_the_clip_norm(make, normalize):
    base, x, y = make()
    model = _compiled(base)

    @tf.function
    def sums(x, y, mask, clip_norm, scale):
        scales = [tf.fill(v.shape, scale) for v in model.trainable_variables]
        query = Query(clip_norm=clip_norm, normalize=normalize, scale=scales)
        queries = (query, query._replace(square=True))
        return clipped_sums(model, Batch(x, y, None, mask), queries).sums

    numbers = st.sampled_from([np.nan, np.inf, -np.inf, 0.0, 1e30, -1e30, 1e19, 1e4, 1e-30])

    @settings(max_examples=40, deadline=None)
    @given(
        clip_norm=st.floats(1e-3, 1.0),
        scale=st.sampled_from([1e-3, 1.0, 30.0]),
        place=st.integers(0, 10**6),
        entry=numbers,
        factor=st.one_of(st.just(1.0), numbers),
    )
    def check(clip_norm, scale, place, entry, factor):
        adversarial_x, adversarial_y = x.copy(), y.copy()
        if x.dtype == np.float32:
            adversarial_x[0].flat[place % x[0].size] = entry
        with np.errstate(all="ignore"):
            adversarial_y[0] *= np.float32(factor)
        args = (tf.constant(adversarial_x), tf.constant(adversarial_y))
        mask = np.ones(ROWS, bool)
        bounds = (tf.constant(clip_norm, tf.float32), tf.constant(scale, tf.float32))
        with_row = sums(*args, tf.constant(mask), *bounds)
        mask[0] = False
        without = sums(*args, tf.constant(mask), *bounds)
        for one, other, bound in zip(with_row, without, (clip_norm, clip_norm**2), strict=True):
            difference = [np.float64(a) - np.float64(b) for a, b in zip(one, other, strict=True)]
            distance = np.sqrt(sum((d**2).sum() for d in difference))
            assert distance <= bound * (1 + 1e-5)

    check()


def test_padding_and_non_finite_rows_contribute_exactly_zero():
    base, x, y = dense()
    model = _compiled(base)
    query = (Query(clip_norm=0.1),)
    without = clipped_sums(model, (x[:3], y[:3]), query).sums[0]
    x[3:] = 0
    padding = Batch(tf.constant(x), tf.constant(y), None, tf.range(5) < 3)
    good = clipped_sums(model, padding, query).sums[0]
    x[3], x[4] = np.nan, 1e30
    mask = tf.constant([True, True, True, True, False])
    result = clipped_sums(model, Batch(tf.constant(x), tf.constant(y), None, mask), query)
    for a, b in zip(result.sums[0], good, strict=True):
        np.testing.assert_array_equal(a, b)
    assert_close(good, without, rtol=1e-6)  # kernels may round by the number of rows
    assert int(result.non_finite) == 1  # the NaN row; the padding row is not looked at


def test_zero_sample_weight_contributes_exactly_zero():
    base, x, y = dense()
    model = _compiled(base)
    weight = np.array([1, 0, 2, 0, 1], "float32")
    result = clipped_sums(model, (x, y, weight), (Query(clip_norm=0.1),)).sums[0]
    keep = weight > 0
    kept = (x[keep], y[keep], weight[keep])
    expected = clipped_sums(model, kept, (Query(clip_norm=0.1),)).sums[0]
    assert_close(result, expected, rtol=1e-6)


def test_tied_uses_are_summed_before_the_norm():
    """Adding the squared norms of the two uses would give another, wrong, norm."""
    inputs = keras.Input((1,))
    shared = layers.Dense(1, use_bias=False, kernel_initializer="ones")
    model = _compiled(keras.Model(inputs, shared(inputs) - shared(inputs)))
    x, y = np.ones((2, 1), "float32"), np.ones((2, 1), "float32")
    (total,) = clipped_sums(model, (x, y), (Query(clip_norm=1e-3, normalize=True),)).sums[0]
    np.testing.assert_allclose(total, 0.0, atol=1e-7)  # the uses cancel for each example


def test_same_dropout_mask_for_norm_and_gradient():
    """With one mask the clipped gradient of a single example has norm C at most, always."""
    inputs = keras.Input((50,))
    hidden = layers.Dropout(0.5)(layers.Dense(50)(layers.Dropout(0.5)(inputs)))
    model = _compiled(keras.Model(inputs, layers.Dense(1)(hidden)))
    x, y = _features(50)[:1], _features(1)[:1]
    norms = []
    for _ in range(20):
        total = clipped_sums(model, (x, y), (Query(clip_norm=0.1),)).sums[0]
        norms.append(np.sqrt(sum(float(tf.reduce_sum(t**2)) for t in total)))
    np.testing.assert_allclose(norms, 0.1, rtol=1e-4)  # C binds, and is met exactly


def test_memory_of_the_general_engine_is_bounded():
    model = _compiled(stacked_cells()[0])
    (layer,) = engines_for(model).general
    numbers = sum(np.prod(v.shape) for v in layer.trainable_variables)
    assert max_rows([layer]) * numbers * 4 <= 2**28
    assert max_rows([]) is None


def test_an_example_cannot_hide_its_norm_in_the_rounding():
    """Tiny deltas beside huge inputs, and huge terms that cancel, must not give a norm of zero."""
    inputs = keras.Input((1000,))
    model = _compiled(keras.Model(inputs, layers.Dense(1000)(inputs)), loss="mae")
    x = np.full((1, 1000), 9e18, "float32")
    batch = (x, np.zeros((1, 1000), "float32"), np.float32([1e-16]))
    total = clipped_sums(model, batch, (Query(clip_norm=1.0),)).sums[0]
    assert np.sqrt(sum(np.sum(np.float64(t) ** 2) for t in total)) <= 1 + 1e-4

    ids = keras.Input((8,), dtype="int32")
    table = layers.Embedding(4, 3)
    outputs = layers.Dense(1, trainable=False)(layers.Flatten()(table(ids)))
    model = _compiled(keras.Model(ids, outputs))
    rng = np.random.default_rng(0)
    for huge in (1e7, 1e9, 1e10):
        kernel = rng.normal(size=(8, 3)).astype("float32") * huge
        kernel -= kernel.mean(axis=0)  # one id at all positions: its terms cancel
        model.layers[-1].set_weights([kernel.reshape(24, 1), np.zeros(1)])
        batch = (np.zeros((1, 8), "int32"), np.ones((1, 1), "float32"))
        total = clipped_sums(model, batch, (Query(clip_norm=1.0),)).sums[0]
        assert np.sqrt(sum(np.sum(np.float64(t) ** 2) for t in total)) <= 1.001


@keras.saving.register_keras_serializable(package="test")
class TokenAndPosition(layers.Layer):
    """One of its embeddings is called on positions, in a way that leaves no place for rows."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.token, self.position = layers.Embedding(7, 4), layers.Embedding(6, 4)

    def call(self, ids):
        positions = self.position(keras.ops.arange(ids.shape[1]))
        return self.token(ids) + keras.ops.reshape(positions, (1, ids.shape[1], 4))


def test_where_a_rule_fails_only_the_layer_around_it_is_run_one_example_at_a_time():
    ids = keras.Input((6,), dtype="int32")
    hidden = layers.Dense(4, activation="tanh")(TokenAndPosition()(ids))
    base = keras.Model(ids, layers.Dense(2)(layers.GlobalAveragePooling1D()(hidden)))
    model = _compiled(base)
    x, y = np.random.default_rng(0).integers(0, 7, (ROWS, 6)), _features(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engines = dp.clipping.checked_engines(model, Batch(tf.constant(x), tf.constant(y)))
    assert [type(layer).__name__ for layer in engines.general] == ["TokenAndPosition"]
    assert [type(layer).__name__ for layer in engines.ruled] == ["Dense", "Dense"]
    gradients = one_at_a_time(base, _mse, x, y)
    sums = clipped_sums(model, (x, y), (Query(clip_norm=0.1),), engines).sums[0]
    assert_close(sums, clip_and_sum(gradients, 0.1))
