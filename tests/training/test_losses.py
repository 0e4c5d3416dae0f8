"""Per-example losses and metrics against plain NumPy, and against Keras on the unpadded batch."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_keras_opt as dp
from dp_keras_opt.data import RowInfo

layers, ops = keras.layers, keras.ops
ROWS = 5


def _optimizer(batch_size=ROWS, noise_multiplier=0.0, clip_norm=np.inf, learning_rate=0.1):
    return dp.optimizers.DPSGD(
        learning_rate,
        clip_norm=clip_norm,
        noise_multiplier=noise_multiplier,
        batch_size=batch_size,
    )


def _losses(loss, y, y_pred, sample_weight=None, **kwargs):
    """The per-example losses of a model whose outputs are `y_pred` itself."""
    inputs = tf.nest.map_structure(lambda t: keras.Input(t.shape[1:]), y_pred)
    outputs = tf.nest.map_structure(keras.layers.Identity(), inputs)  # older Keras refuses inputs
    model = dp.make_private(keras.Model(inputs, outputs))
    model.compile(_optimizer(), loss, **kwargs)
    to_tensor = tf.nest.map_structure(tf.convert_to_tensor, (y, y_pred))
    weight = sample_weight
    if weight is not None:
        weight = tf.nest.map_structure(tf.convert_to_tensor, weight)
    return np.array(model.per_example_losses(*to_tensor, weight))


def _uniform(*shape, seed=1):
    return np.random.default_rng(seed).uniform(0.1, 0.9, (ROWS, *shape)).astype("float32")


PROBABILITIES = _uniform(4) / _uniform(4).sum(axis=1, keepdims=True)
CLASSES = np.array([0, 3, 1, 2, 2])
ONE_HOT = np.eye(4, dtype="float32")[CLASSES]
TARGET, PREDICTION = _uniform(4, seed=2), _uniform(4, seed=3)
ERROR = PREDICTION - TARGET
SIGNS = np.sign(TARGET - 0.5)
OF_CLASS = PROBABILITIES[np.arange(ROWS), CLASSES]


def _huber(delta):
    size = np.abs(ERROR)
    return np.where(size <= delta, size**2 / 2, delta * size - delta**2 / 2).mean(axis=1)


def _cosine():
    norms = np.linalg.norm(TARGET, axis=1) * np.linalg.norm(PREDICTION, axis=1)
    return -(TARGET * PREDICTION).sum(axis=1) / norms


def _binary(y, p):
    return -(y * np.log(p) + (1 - y) * np.log(1 - p))


BITS = (TARGET > 0.5).astype("float32")

ORACLES = {
    "mse": (TARGET, PREDICTION, (ERROR**2).mean(axis=1)),
    "mae": (TARGET, PREDICTION, np.abs(ERROR).mean(axis=1)),
    "mape": (TARGET, PREDICTION, 100 * np.abs(ERROR / TARGET).mean(axis=1)),
    "msle": (TARGET, PREDICTION, (np.log((1 + PREDICTION) / (1 + TARGET)) ** 2).mean(axis=1)),
    "huber": (TARGET, PREDICTION, _huber(1.0)),
    "log_cosh": (TARGET, PREDICTION, np.log(np.cosh(ERROR)).mean(axis=1)),
    "cosine_similarity": (TARGET, PREDICTION, _cosine()),
    "poisson": (TARGET, PREDICTION, (PREDICTION - TARGET * np.log(PREDICTION)).mean(axis=1)),
    "kl_divergence": (TARGET, PREDICTION, (TARGET * np.log(TARGET / PREDICTION)).sum(axis=1)),
    "hinge": (SIGNS, PREDICTION, np.maximum(1 - SIGNS * PREDICTION, 0).mean(axis=1)),
    "squared_hinge": (SIGNS, PREDICTION, (np.maximum(1 - SIGNS * PREDICTION, 0) ** 2).mean(axis=1)),
    "binary_crossentropy": (BITS, PREDICTION, _binary(BITS, PREDICTION).mean(axis=1)),
    "categorical_crossentropy": (ONE_HOT, PROBABILITIES, -np.log(OF_CLASS)),
    "sparse_categorical_crossentropy": (CLASSES, PROBABILITIES, -np.log(OF_CLASS)),
    "crossentropy": (CLASSES, PROBABILITIES, -np.log(OF_CLASS)),
}

OBJECTS = {
    "mse": keras.losses.MeanSquaredError,
    "mae": keras.losses.MeanAbsoluteError,
    "huber": keras.losses.Huber,
    "binary_crossentropy": keras.losses.BinaryCrossentropy,
    "sparse_categorical_crossentropy": keras.losses.SparseCategoricalCrossentropy,
    "kl_divergence": keras.losses.KLDivergence,
}


@pytest.mark.parametrize("name", ORACLES)
def test_losses_by_name(name):
    y, y_pred, expected = ORACLES[name]
    np.testing.assert_allclose(_losses(name, y, y_pred), expected, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize(
    "reduction", ["sum", "mean", "sum_over_batch_size", "mean_with_sample_weight", "none", None]
)
@pytest.mark.parametrize("name", OBJECTS)
def test_the_reduction_of_a_loss_object_is_of_no_account(name, reduction):
    y, y_pred, expected = ORACLES[name]
    result = _losses(OBJECTS[name](reduction=reduction), y, y_pred)
    np.testing.assert_allclose(result, expected, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize(
    "function",
    [
        keras.losses.mean_squared_error,
        lambda y, y_pred: ops.mean(ops.square(y - y_pred), axis=-1),
        lambda y, y_pred: ops.square(y - y_pred),  # one value per position
    ],
    ids=["keras", "per example", "per position"],
)
def test_losses_given_as_functions(function):
    y, y_pred, expected = ORACLES["mse"]
    np.testing.assert_allclose(_losses(function, y, y_pred), expected, rtol=1e-5)


def test_options_of_a_loss_object_are_kept():
    y, y_pred, _ = ORACLES["huber"]
    np.testing.assert_allclose(
        _losses(keras.losses.Huber(delta=0.2), y, y_pred), _huber(0.2), rtol=1e-4
    )
    logits = np.log(PROBABILITIES)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    np.testing.assert_allclose(_losses(loss, CLASSES, logits), -np.log(OF_CLASS), rtol=1e-4)


def test_target_without_the_last_axis():
    y, y_pred = _uniform(seed=2), _uniform(1, seed=3)
    np.testing.assert_allclose(_losses("mse", y, y_pred), (y - y_pred[:, 0]) ** 2, rtol=1e-5)


# Several positions, several outputs.


def test_a_sequence_has_the_mean_over_its_positions():
    y, y_pred = _uniform(3, 4, seed=2), _uniform(3, 4, seed=3)
    expected = ((y - y_pred) ** 2).mean(axis=(1, 2))
    np.testing.assert_allclose(_losses("mse", y, y_pred), expected, rtol=1e-5)
    summed = _losses(keras.losses.MeanSquaredError(reduction="sum"), y, y_pred)
    np.testing.assert_allclose(summed, expected, rtol=1e-5)
    image_y, image = _uniform(3, 2, 4, seed=2), _uniform(3, 2, 4, seed=3)
    expected = ((image_y - image) ** 2).mean(axis=(1, 2, 3))
    np.testing.assert_allclose(_losses("mse", image_y, image), expected, rtol=1e-5)


@pytest.mark.parametrize("shape", [(), (1,), (3,)], ids=["(B,)", "(B, 1)", "(B, T)"])
def test_sample_weight(shape):
    y, y_pred, weight = _uniform(3, 4, seed=2), _uniform(3, 4, seed=3), _uniform(*shape, seed=4)
    wide = np.broadcast_to(weight.reshape(ROWS, -1), (ROWS, 3))
    expected = (((y - y_pred) ** 2).mean(axis=2) * wide).mean(axis=1)
    for reduction in ("sum", "mean", "mean_with_sample_weight"):
        loss = keras.losses.MeanSquaredError(reduction=reduction)
        np.testing.assert_allclose(_losses(loss, y, y_pred, weight), expected, rtol=1e-5)


def test_sample_weight_as_a_column():
    y, y_pred, expected = ORACLES["mse"]
    weight = _uniform(1, seed=4)
    np.testing.assert_allclose(
        _losses("mse", y, y_pred, weight), expected * weight[:, 0], rtol=1e-5
    )


@pytest.mark.parametrize("structure", [tuple, dict], ids=["list", "dict"])
def test_several_outputs_with_loss_weights(structure):
    y = [_uniform(2, seed=2), CLASSES]
    y_pred = [_uniform(2, seed=3), PROBABILITIES]
    parts = [((y[0] - y_pred[0]) ** 2).mean(axis=1), -np.log(OF_CLASS)]
    losses, factors = ["mse", keras.losses.SparseCategoricalCrossentropy(reduction="sum")], [2, 0.5]
    if structure is dict:
        y, y_pred, losses, factors = (
            dict(zip(("first", "second"), values, strict=True))
            for values in (y, y_pred, losses, factors)
        )
    plain = _losses(losses, y, y_pred)
    np.testing.assert_allclose(plain, parts[0] + parts[1], rtol=1e-4)
    weighted = _losses(losses, y, y_pred, loss_weights=factors)
    np.testing.assert_allclose(weighted, 2 * parts[0] + 0.5 * parts[1], rtol=1e-4)
    sample_weight = [_uniform(seed=5), _uniform(seed=6)]
    expected = sample_weight[0] * parts[0] + sample_weight[1] * parts[1]
    if structure is dict:
        sample_weight = dict(zip(("first", "second"), sample_weight, strict=True))
    np.testing.assert_allclose(_losses(losses, y, y_pred, sample_weight), expected, rtol=1e-4)


def test_one_sample_weight_for_all_outputs():
    y, y_pred, weight = [TARGET, BITS], [PREDICTION, PREDICTION], _uniform(seed=5)
    parts = (ERROR**2).mean(axis=1) + _binary(BITS, PREDICTION).mean(axis=1)
    result = _losses(["mse", "binary_crossentropy"], y, y_pred, weight)
    np.testing.assert_allclose(result, weight * parts, rtol=1e-4)


def test_an_output_without_loss():
    result = _losses([None, "mse"], [TARGET, TARGET], [PREDICTION, PREDICTION])
    np.testing.assert_allclose(result, (ERROR**2).mean(axis=1), rtol=1e-5)


# Masks.


def _masked_model():
    ids = keras.Input((4,), dtype="int32")
    return keras.Model(ids, layers.Dense(2)(layers.Embedding(6, 3, mask_zero=True)(ids)))


IDS = np.array([[1, 2, 0, 0], [3, 0, 0, 0], [4, 5, 1, 2], [0, 0, 0, 0], [2, 2, 2, 0]], "int32")


@pytest.mark.parametrize("reduction", ["sum", "mean", "sum_over_batch_size"])
def test_masked_positions_count_in_no_example(reduction):
    base = _masked_model()
    model = dp.make_private(base)
    model.compile(_optimizer(), keras.losses.MeanSquaredError(reduction=reduction))
    y = _uniform(4, 2)
    result = np.array(model.per_example_losses(tf.constant(y), model(IDS)))
    values, mask = ((y - np.array(base(IDS))) ** 2).mean(axis=2), IDS != 0
    expected = (values * mask).sum(axis=1) / np.maximum(mask.sum(axis=1), 1)
    np.testing.assert_allclose(result, expected, rtol=1e-5)


def test_mask_and_weights_per_position():
    base = _masked_model()
    model = dp.make_private(base)
    model.compile(_optimizer(), "mse")
    y, weight = _uniform(4, 2), _uniform(4, seed=7)
    result = np.array(
        model.per_example_losses(tf.constant(y), model(IDS), sample_weight=tf.constant(weight))
    )
    values, mask = ((y - np.array(base(IDS))) ** 2).mean(axis=2), IDS != 0
    expected = (values * mask * weight).sum(axis=1) / np.maximum(mask.sum(axis=1), 1)
    np.testing.assert_allclose(result, expected, rtol=1e-5)


class _TiedAndMasked(keras.Model):
    """Uses its embedding outside of the layer's call, so that the general engine must serve it."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(6, 3, mask_zero=True)
        self.dense = layers.Dense(3, activation="tanh")

    def call(self, ids):
        return self.dense(self.table(ids)) + 0 * ops.sum(self.table.embeddings)

    def compute_mask(self, inputs, previous_mask=None):
        return self.table.compute_mask(inputs)


def test_the_fallback_to_the_general_engine_keeps_the_mask():
    base = _TiedAndMasked()
    model = dp.make_private(base)
    model.compile(_optimizer(), "mse", run_eagerly=True)
    y = _uniform(4, 3)
    model(IDS)
    batch = dp.clipping.Batch(tf.constant(IDS), tf.constant(y))
    engines = dp.clipping.engines.Engines((), (model,))
    result = dp.clipping.clipped_sums(model, batch, (dp.clipping.Query(),), engines).losses
    values, mask = ((y - np.array(base(IDS))) ** 2).mean(axis=2), IDS != 0
    expected = (values * mask).sum(axis=1) / np.maximum(mask.sum(axis=1), 1)
    np.testing.assert_allclose(result, expected, rtol=1e-5)


# What cannot be taken per example.


class _OverridesCall(keras.losses.Loss):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return ops.mean(ops.square(y_true - y_pred))


class _ReducesToScalar(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return ops.mean(ops.square(y_true - y_pred))


@pytest.mark.parametrize(
    "loss, words",
    [
        (_OverridesCall(), "_OverridesCall overrides `__call__`"),
        (_ReducesToScalar(), "reduces over the batch.*one value per example"),
        (lambda y, y_pred: ops.mean(y - y_pred), "reduces over the batch.*one value per example"),
        (keras.losses.Dice(), r"'dice' reduces over the batch.*Pass axis=\(1,\) to it"),
        (keras.losses.Tversky(), r"'tversky' reduces over the batch.*Pass axis=\(1,\) to it"),
        (
            lambda y, y_pred: ops.mean(ops.square(y - y_pred), axis=0),
            "The loss mixes the examples.*one value per example",
        ),
        (
            lambda y, y_pred: ops.mean(ops.square(y - y_pred), axis=(0, 1), keepdims=True),
            "The loss mixes the examples",
        ),
        (
            lambda y, y_pred: ops.square(y_pred - ops.mean(y_pred, axis=0)),
            "The loss mixes the examples",
        ),
        (
            lambda y, y_pred: ops.square(y - y_pred) / (1 + ops.sum(ops.square(y))),
            "The loss mixes the examples",
        ),
    ],
    ids=[
        "__call__",
        "scalar",
        "function",
        "dice",
        "tversky",
        "axis 0",
        "keepdims",
        "contrast",
        "by the targets",
    ],
)
def test_losses_over_the_batch_are_refused(loss, words):
    inputs = keras.Input((3,))
    model = dp.DPModel(inputs, layers.Dense(1)(inputs))
    model.compile(_optimizer(noise_multiplier=1.0, clip_norm=1.0), loss)
    before = model.get_weights()
    with pytest.raises(ValueError, match=words):
        model.fit(_uniform(3), _uniform(1), verbose=0)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_no_loss_is_named():
    inputs = keras.Input((3,))
    model = dp.DPModel(inputs, layers.Dense(1)(inputs))
    model.compile(_optimizer(noise_multiplier=1.0, clip_norm=1.0))
    with pytest.raises(ValueError, match="No loss to compute"):
        model.fit(_uniform(3), _uniform(1), verbose=0)


# Metrics: those of Keras on the rows that count.

METRICS = {
    "binary": (
        ["mse", "mae", "accuracy", "AUC", "Precision", "Recall", "TruePositives",
         "RootMeanSquaredError", "BinaryIoU", "R2Score", "hinge"],
        (1,),
        (1,),
    ),
    "binary without last axis": (["mse", "accuracy", "AUC", "Precision"], (), (1,)),
    "several labels": (["mse", "AUC", "Precision", "F1Score", "cosine_similarity"], (4,), (4,)),
    "classes": (
        ["accuracy", "sparse_top_k_categorical_accuracy", "sparse_categorical_crossentropy"],
        None,
        (4,),
    ),
    "sequence": (["mse", "mae", "binary_accuracy"], (3, 2), (3, 2)),
    "sequence of labels": (["AUC", "Precision", "Recall"], (5,), (5,)),
}  # fmt: skip


@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("case", METRICS)
def test_metrics_are_those_of_keras_on_the_unpadded_batch(case, weighted):
    names, y_shape, shape = METRICS[case]
    if "R2Score" in names and weighted:
        names = [name for name in names if name != "R2Score"]
    y = CLASSES if y_shape is None else (_uniform(*y_shape, seed=2) > 0.5).astype("float32")
    y_pred, weight = _uniform(*shape, seed=3), _uniform(seed=4)
    mask = np.array([1, 0, 1, 1, 0], "float32")
    keep = mask > 0
    inputs = keras.Input(shape)
    key = "weighted_metrics" if weighted else "metrics"
    outputs = keras.layers.Identity()(inputs)
    models = keras.Model(inputs, outputs), dp.DPModel(inputs, outputs)
    models[0].compile("sgd", "mse", **{key: list(names)})
    models[1].compile(_optimizer(), "mse", **{key: list(names)})
    expected = models[0].compute_metrics(None, y[keep], y_pred[keep], weight[keep])
    rows = RowInfo(tf.constant(mask), tf.constant(weight))
    result = models[1].compute_metrics(None, tf.constant(y), tf.constant(y_pred), rows)
    assert set(result) == set(expected) and len(result) == len(names) + 1  # and the loss
    for name in expected:
        np.testing.assert_allclose(result[name], expected[name], rtol=1e-5, err_msg=name)


_METRICS = keras.metrics
#: (metrics, shape of y, whole numbers below which it is, shape of the prediction). As many rows as
#: there are positions on an axis: a weight for each row may not be taken for one of each position.
OF_POSITIONS = {
    "mask of a picture": (
        [_METRICS.AUC, _METRICS.Precision, _METRICS.Recall, _METRICS.TruePositives,
         _METRICS.FalseNegatives, _METRICS.BinaryIoU, _METRICS.BinaryAccuracy,
         _METRICS.MeanSquaredError, lambda: _METRICS.SensitivityAtSpecificity(0.5),
         lambda: _METRICS.RecallAtPrecision(0.5)],
        (5, 5, 1), 2, (5, 5, 1),
    ),
    "masks of a picture": (
        [_METRICS.AUC, lambda: _METRICS.Precision(class_id=1), lambda: _METRICS.Recall(top_k=2),
         lambda: _METRICS.OneHotMeanIoU(3), lambda: _METRICS.OneHotIoU(3, [1])],
        (5, 5, 3), 2, (5, 5, 3),
    ),
    "classes of a picture": (
        [lambda: _METRICS.MeanIoU(3, sparse_y_pred=False), _METRICS.SparseCategoricalAccuracy,
         lambda: _METRICS.IoU(3, [1], sparse_y_pred=False)],
        (5, 5), 3, (5, 5, 3),
    ),
    "tags": (
        [lambda: _METRICS.MeanIoU(3, sparse_y_pred=False), _METRICS.SparseCategoricalAccuracy,
         lambda: _METRICS.SparseTopKCategoricalAccuracy(2)],
        (5,), 3, (5, 3),
    ),
    "tags in a column": ([lambda: _METRICS.MeanIoU(3, sparse_y_pred=False)], (5, 1), 3, (5, 3)),
    "without an axis": ([_METRICS.BinaryIoU, _METRICS.BinaryAccuracy], (5,), 2, (5,)),
    "two axes without one": ([_METRICS.BinaryIoU, _METRICS.AUC], (5, 4), 2, (5, 4)),
}  # fmt: skip


@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("case", OF_POSITIONS)
def test_metrics_of_positions_are_those_of_keras_on_the_rows_that_count(case, weighted):
    """Those of a row that is there as often as it weighs. Precision of pictures was 1 for 0.5."""
    makers, y_shape, classes, shape = OF_POSITIONS[case]
    y = np.random.default_rng(2).integers(0, classes, (5, *y_shape))
    y_pred, mask = _uniform(*shape, seed=3), np.array([1, 0, 1, 1, 0], "float32")
    times = np.array([2, 1, 1, 3, 4] if weighted else [1] * 5)
    rows = np.repeat(np.arange(5), times * mask.astype(int))
    inputs = keras.Input(shape)
    for make in makers:
        model, expected = dp.DPModel(inputs, keras.layers.Identity()(inputs)), make()
        key = "weighted_metrics" if weighted else "metrics"
        model.compile(_optimizer(), "mse", **{key: [make()]})
        weight = tf.constant(times, tf.float32)
        info = RowInfo(tf.constant(mask), weight)
        found = model.compute_metrics(None, tf.constant(y), tf.constant(y_pred), info)
        expected.update_state(y[rows], y_pred[rows])
        (value,) = (found[name] for name in found if name != "loss")
        np.testing.assert_allclose(value, expected.result(), rtol=1e-5, err_msg=expected.name)


class _OfLikeliest(keras.metrics.MeanIoU):
    """As people write it for probabilities."""

    def update_state(self, y, y_pred, sample_weight=None):
        return super().update_state(y, ops.argmax(y_pred, -1), sample_weight)


class _OfMost(keras.metrics.Precision):
    """Of whether there is anything in a picture."""

    def update_state(self, y, y_pred, sample_weight=None):
        return super().update_state(y, ops.max(y_pred, axis=(1, 2)), sample_weight)


@pytest.mark.parametrize("places", [(), (5,), (5, 5)])
def test_metrics_that_derive_from_those_of_positions(places):
    mask, rng = np.array([1, 0, 1, 1, 0], "float32"), np.random.default_rng(2)
    kept = mask > 0
    cases = [(_OfLikeliest(3), _OfLikeliest(3), rng.integers(0, 3, (5, *places)), (*places, 3))]
    if len(places) == 2:
        cases += [(_OfMost(), _OfMost(), rng.integers(0, 2, 5), (*places,))]
    for metric, expected, y, shape in cases:
        y_pred, inputs = _uniform(*shape, seed=3), keras.Input(shape)
        model = dp.DPModel(inputs, keras.layers.Identity()(inputs))
        model.compile(_optimizer(), "mse", metrics=[metric])
        rows = RowInfo(tf.constant(mask))
        found = model.compute_metrics(None, tf.constant(y), tf.constant(y_pred), rows)
        expected.update_state(y[kept], y_pred[kept])
        (value,) = (found[name] for name in found if name != "loss")
        np.testing.assert_allclose(value, expected.result(), rtol=1e-5)


def test_metrics_of_masks_in_fit():
    """Batches as large as the pictures are wide."""
    x, y = np.ones((64, 16, 16, 1), "float32"), np.zeros((64, 16, 16, 1), "float32")
    y[:, :, :8] = 1
    inputs = keras.Input((16, 16, 1))
    ones = {"kernel_initializer": "zeros", "bias_initializer": "ones", "activation": "sigmoid"}
    model = dp.DPModel(inputs, layers.Conv2D(1, 1, **ones)(inputs))
    optimizer = dp.optimizers.DPSGD(0.0, clip_norm=1.0, noise_multiplier=1.0)
    model.compile(optimizer, "binary_crossentropy", metrics=["Precision", "BinaryIoU"])
    batches = dp.data.poisson_batches((x, y), 8, max_batch_size=16)
    (precision,) = model.fit(batches, verbose=0).history["Precision"]
    assert precision == pytest.approx(0.5)


class _Rows(keras.metrics.Metric):
    """How many there were; of padding too, unless the weights are heeded."""

    def __init__(self, heeds):
        super().__init__(name="rows")
        self.heeds, self.number = heeds, self.add_weight(name="number", initializer="zeros")

    def update_state(self, y, y_pred, sample_weight=None):
        heeded = self.heeds and sample_weight is not None
        self.number.assign_add(ops.sum(sample_weight if heeded else ops.ones_like(y_pred)))

    def result(self):
        return self.number.value


@pytest.mark.parametrize("heeds", [False, True])
@pytest.mark.parametrize("options", [{}, {"jit_compile": True}, {"steps_per_execution": 2}])
def test_a_metric_of_ones_own_that_counts_padding_is_told_of(heeds, options):
    x = np.ones((24, 3), "float32")
    inputs = keras.Input((3,))
    model = dp.DPModel(inputs, layers.Dense(1, kernel_initializer="ones")(inputs))
    optimizer = dp.optimizers.DPSGD(0.0, clip_norm=1.0, noise_multiplier=1.0)
    model.compile(optimizer, "mse", metrics=[_Rows(heeds), "mae"], **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (rows,) = model.fit(dp.data.balls_in_bins((x, x[:, :1]), 8), verbose=0).history["rows"]
    said = [str(each.message) for each in caught if "counts the rows" in str(each.message)]
    assert rows == 24 if heeds else rows > 24
    assert bool(said) != heeds and all("The metric 'rows'" in each for each in said)


def test_a_metric_without_rows_is_named():
    def error_of_all(y, y_pred):
        return keras.ops.sqrt(keras.ops.mean((y - y_pred) ** 2))

    inputs = keras.Input((3,))
    model = dp.DPModel(inputs, keras.layers.Dense(1)(inputs))
    optimizer = dp.optimizers.DPSGD(0.1, clip_norm=1.0, noise_multiplier=1.0, batch_size=8)
    model.compile(optimizer, "mse", metrics=[error_of_all])
    x = np.ones((24, 3), "float32")
    with pytest.raises(ValueError, match="metric 'error_of_all' failed.*value for each example"):
        model.fit(dp.data.poisson_batches((x, x[:, :1]), 8), verbose=0)


def test_metrics_of_several_outputs():
    inputs = {"a": keras.Input((4,), name="a"), "b": keras.Input((4,), name="b")}
    outputs = {"p": layers.Identity(name="p")(inputs["a"]), "q": layers.Identity()(inputs["b"])}
    models = keras.Model(inputs, outputs), dp.DPModel(inputs, outputs)
    options = {
        "loss": {"p": "mse", "q": "mae"},
        "metrics": {"p": ["mae"]},
        "weighted_metrics": {"q": ["mse", "binary_accuracy"]},
    }
    models[0].compile("sgd", **options)
    models[1].compile(_optimizer(), **options)
    y = {"p": TARGET, "q": BITS}
    y_pred = {"p": PREDICTION, "q": _uniform(4, seed=8)}
    weight = {"p": _uniform(seed=4), "q": _uniform(seed=5)}
    mask = np.array([1, 0, 1, 1, 0], "float32")

    def kept(structure):
        return tf.nest.map_structure(lambda t: t[mask > 0], structure)

    expected = models[0].compute_metrics(None, kept(y), kept(y_pred), kept(weight))
    to_tensors = tf.nest.map_structure(tf.constant, (y, y_pred, weight))
    rows = RowInfo(tf.constant(mask), to_tensors[2])
    result = models[1].compute_metrics(None, *to_tensors[:2], rows)
    assert set(result) == set(expected) and len(result) == 4
    for name in expected:
        np.testing.assert_allclose(result[name], expected[name], rtol=1e-5, err_msg=name)


def test_losses_and_metrics_of_training_are_those_of_keras():
    """One step from the same weights, with padding: the figures are those before the update."""
    inputs = keras.Input((3,))
    hidden = layers.Dense(3, kernel_regularizer=keras.regularizers.L2(0.1))(inputs)
    outputs = [layers.Dense(1, name="u")(hidden), layers.Dense(1, name="v")(hidden)]
    base = keras.Model(inputs, outputs)
    model = dp.make_private(base)
    options = {"metrics": [["mae"], ["mse"]], "loss_weights": [1.0, 3.0]}
    base.compile("sgd", ["mse", "mae"], **options)
    model.compile(_optimizer(3, learning_rate=0.0), ["mse", "mae"], **options)
    x, y = _uniform(3), (_uniform(1, seed=2), _uniform(1, seed=3))
    mask, keep = np.array([1, 0, 1, 1, 0], "float32"), [0, 2, 3]
    expected = base.test_on_batch(x[keep], [t[keep] for t in y], return_dict=True)
    data = tf.data.Dataset.from_tensors((x, y, RowInfo(mask)))
    batches = dp.data.assume_sampling(data, dp.accounting.Sampling.poisson(100, 3))
    logs = model.fit(batches, verbose=0).history
    assert set(logs) == set(expected) == {"loss", "u_loss", "v_loss", "u_mae", "v_mse"}
    for name in expected:
        np.testing.assert_allclose(logs[name][0], expected[name], rtol=1e-5, err_msg=name)


def test_evaluation_is_blind_to_padding_too():
    inputs = keras.Input((3,))
    model = dp.DPModel(inputs, layers.Dense(1)(inputs))
    model.compile(_optimizer(3), "mse", metrics=["mse"])
    x, y = _uniform(3), _uniform(1, seed=2)
    mask = np.array([1, 0, 1, 1, 0], "float32")
    expected = model.evaluate(x[mask > 0], y[mask > 0], verbose=0)
    result = model.evaluate(tf.data.Dataset.from_tensors((x, y, RowInfo(mask))), verbose=0)
    np.testing.assert_allclose(result, expected, rtol=1e-5)


def test_a_metric_that_takes_no_weights_is_refused_where_there_is_padding():
    class Count(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="count")
            self.total = self.add_weight(shape=(), initializer="zeros")

        def update_state(self, y_true, y_pred):
            self.total.assign_add(1.0)

        def result(self):
            return self.total

    inputs = keras.Input((3,))
    model = dp.DPModel(inputs, layers.Dense(1)(inputs))
    model.compile(_optimizer(), "mse", metrics=[Count()])
    mask = tf.ones(ROWS)
    with pytest.raises(TypeError, match="sample_weight"):
        model.compute_metrics(None, _uniform(1), _uniform(1), RowInfo(mask))
