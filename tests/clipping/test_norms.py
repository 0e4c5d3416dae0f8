"""Norms of examples' gradients, and their picture."""

import keras
import matplotlib
import numpy as np
import pytest
import tensorflow as tf

import dp_keras_opt as dp
from tests.helpers.per_example import one_at_a_time

matplotlib.use("Agg")
layers = keras.layers


def _model():
    inputs = keras.Input((5, 4))
    hidden = layers.Dense(6, activation="tanh")(inputs)
    outputs = layers.Dense(2)(layers.Flatten()(layers.LayerNormalization()(hidden)))
    base = keras.Model(inputs, outputs)
    model = dp.make_private(base)
    model.compile(dp.optimizers.DPSGD(clip_norm=1.0, batch_size=4, noise_multiplier=1.0), "mse")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(7, 5, 4)).astype("float32"), rng.normal(size=(7, 2)).astype("float32")
    return base, model, x, y


@pytest.mark.parametrize("norm", ["l1", "l2"])
@pytest.mark.parametrize("scaled", [False, True])
def test_norms_are_those_of_one_at_a_time_gradients(norm, scaled):
    base, model, x, y = _model()
    scale = None
    if scaled:
        rng = np.random.default_rng(1)
        scale = [rng.uniform(0.2, 2, v.shape).astype("float32") for v in model.trainable_variables]
    weight = np.linspace(0.5, 2, 7).astype("float32")
    norms = dp.clipping.per_example_norms(model, (x, y, weight), norm, scale, batch_size=3)
    gradients = one_at_a_time(
        base, lambda y, p: tf.reduce_mean(tf.square(y - p)), x, y, sample_weight=weight
    )
    expected = [
        np.linalg.norm(
            np.concatenate(
                [
                    (g if scale is None else g * s).ravel()
                    for g, s in zip(example, scale or example, strict=True)
                ]
            ),
            1 if norm == "l1" else 2,
        )
        for example in gradients
    ]
    np.testing.assert_allclose(norms, expected, rtol=1e-4)


def test_no_rows_give_no_norms():
    _, model, x, y = _model()
    assert dp.clipping.per_example_norms(model, (x[:0], y[:0])).shape == (0,)


def test_the_clip_fraction_is_that_of_one_at_a_time_gradients():
    base, model, x, y = _model()
    gradients = one_at_a_time(base, lambda y, p: tf.reduce_mean(tf.square(y - p)), x, y)
    sizes = np.array([[np.sum(g**2) for g in example] for example in gradients])
    by_layer = np.sqrt([sizes[:, i : i + 2].sum(axis=1) for i in (0, 2, 4)])
    for share in (0.0, 2.5 / 7, 6.5 / 7, 1.0):
        flat, layered = (np.quantile(n, share) for n in (np.sqrt(sizes.sum(axis=1)), by_layer))
        for style, expected in [
            ("flat", np.mean(np.sqrt(sizes.sum(axis=1)) > flat * 1.001)),
            ("per_layer", np.mean(np.any(by_layer > layered * 1.001, axis=0))),
        ]:
            bound = flat if style == "flat" else layered * np.sqrt(3)
            optimizer = dp.optimizers.DPSGD(
                clip_norm=bound * 1.001, batch_size=4, noise_multiplier=1.0, clipping=style
            )
            model.compile(optimizer, "mse")
            assert dp.clipping.clip_fraction(model, (x, y), batch_size=3) == pytest.approx(expected)


def test_the_clip_fraction_is_in_the_optimizers_geometry_and_counts_users():
    _, model, x, y = _model()

    def fraction(batch, clip_norm):
        optimizer = dp.optimizers.DPAdam(
            second_moment="scale_then_privatize",
            clip_norm=clip_norm,
            batch_size=4,
            noise_multiplier=1.0,
        )
        model.compile(optimizer, "mse")
        return dp.clipping.clip_fraction(model, batch)

    assert fraction((x, y), 1e-9) == 1.0
    (query,) = model.optimizer.queries()
    plain = dp.clipping.per_example_norms(model, (x, y))
    norms = dp.clipping.per_example_norms(model, (x, y), scale=query.scale)
    assert norms.min() > 2 * plain.max() or norms.max() < plain.min() / 2
    assert fraction((x, y), float(np.median(norms)) * 1.001) == pytest.approx(3 / 7)

    of_users = dp.clipping.Batch(x[:6], y[:6], None, np.array([[1, 1], [1, 0], [0, 0]], bool))
    users = dp.clipping.per_example_norms(model, of_users, scale=query.scale)
    assert fraction(of_users, float(users[:2].mean())) == 0.5  # who is all padding is nobody


@pytest.mark.parametrize(
    "batch, found",
    [
        (lambda x, y: dp.data.poisson_batches((x, y), 3), "Batches"),
        (lambda x, y: tf.data.Dataset.from_tensor_slices((x, y)).batch(3), "BatchDataset"),
        (lambda x, y: x, "ndarray"),
        (lambda x, y: (x.tolist(), y.tolist()), "tuple"),
        (lambda x, y: (x,), "tuple"),
        (lambda x, y: (x, list(y[:, 0])), "tuple"),
    ],
)
def test_norms_are_of_arrays(batch, found):
    _, model, x, y = _model()
    with pytest.raises(TypeError, match=f"must be arrays .x, y..*received a .*{found}.$"):
        dp.clipping.per_example_norms(model, batch(x, y))


def test_norms_of_a_batch_of_a_sampler_and_without_targets():
    _, model, x, y = _model()
    drawn = next(iter(dp.data.poisson_batches((x, y), 3, 1)))  # which has padding
    norms = dp.clipping.per_example_norms(model, drawn)
    there = np.asarray(drawn[2].mask, bool)
    alone = dp.clipping.per_example_norms(model, (drawn[0][there], drawn[1][there]))
    np.testing.assert_allclose(norms[there], alone, rtol=1e-5)
    inputs = keras.Input((5, 4))
    model = dp.DPModel(inputs, layers.Dense(2)(layers.Flatten()(inputs)))
    model.compile(
        dp.optimizers.DPSGD(clip_norm=1.0, batch_size=4, noise_multiplier=1.0),
        dp.Objective(lambda inputs, targets, outputs, _: tf.reduce_sum(outputs**2, 1)),
    )
    assert dp.clipping.per_example_norms(model, (x, None)).shape == (7,)
    assert 0 <= dp.clipping.clip_fraction(model, (x, None)) <= 1


def test_losses_of_another_precision():
    """As after `keras.config.set_floatx("float64")`."""
    inputs = keras.Input((4,), dtype="float64")
    model = dp.DPModel(inputs, layers.Dense(1, dtype="float64")(inputs))
    optimizer = dp.optimizers.DPSGD(0.1, clip_norm=1.0, batch_size=4, noise_multiplier=1.0)
    loss = keras.losses.MeanSquaredError(dtype="float64")
    model.compile(optimizer, loss)
    model.fit(np.ones((8, 4)), np.ones((8, 1)), batch_size=4, verbose=0)
    assert model.ledger.steps == 2


def test_the_clip_fraction_of_nobody():
    _, model, x, y = _model()
    x[1] = np.nan
    assert dp.clipping.clip_fraction(model, (x[:1], y[:1])) in (0.0, 1.0)
    assert np.isnan(dp.clipping.clip_fraction(model, (x[1:2], y[1:2])))
    assert np.isnan(dp.clipping.clip_fraction(model, (x[:0], y[:0])))


def test_histogram_says_how_many_are_clipped():
    axes = dp.plots.norm_histogram([0.1, 1.0, 2.0, 8.0, np.nan, np.inf, 0.0], clip_norm=1.5)
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert texts == ["median 1.5", "C = 1.5 clips 50%"]
    assert sum(patch.get_height() for patch in axes.patches) == 4
    dp.plots.norm_histogram([2.0, 2.0], axes=axes)  # no spread at all
    with pytest.raises(ValueError, match="nothing to draw"):
        dp.plots.norm_histogram([np.nan, 0.0])


def test_the_clip_fraction_is_of_what_a_step_clips():
    """Rows of tables that are not trained, probes that were not asked, rows of weight 0."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(10, 50, (32, 3)), rng.normal(size=(32, 2)).astype("float32")
    inputs = keras.Input((3,), dtype="int32")
    rows = keras.layers.Flatten()(keras.layers.Embedding(50, 8, name="rows")(inputs))
    model = dp.DPModel(inputs, keras.layers.Dense(2)(rows))

    def fraction(*batch, **settings):
        optimizer = dp.optimizers.DPSGD(
            0.1, batch_size=8, noise_multiplier=1.0, **{"clip_norm": 1.0} | settings
        )
        model.compile(optimizer, "mse")
        return dp.clipping.clip_fraction(model, batch)

    large = 30 * y
    model.layers[-1].kernel.assign(30 * model.layers[-1].kernel)
    for rows, expected in (([*range(50)], 1.0), ([*range(10)], 0.0)):
        model.layers[-1].trainable = False
        some = dp.optimizers.SparseEmbeddings(None, rows={"rows": rows})
        assert fraction(x, large, sparse_embeddings=some) == expected
    model.layers[-1].trainable = True

    fraction(x, y, geometry=dp.geometries.KroneckerFactored((x, large)))
    left = np.array(model.optimizer.queries()[0].geometry.left[1])
    assert np.abs(left - np.eye(len(left))).max() > 0.1

    around = dp.geometries.Mean()
    assert np.isnan(fraction(x, y, np.zeros(32, "float32"), geometry=around))
