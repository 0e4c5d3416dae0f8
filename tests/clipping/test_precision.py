"""Where products are taken in TF32, no example contributes more than the clip norm.

The rounding of a GPU is emulated: the factors of every product of matrices are rounded to 10 bits
of a mantissa, cut off or to the nearest. The same rows exceed the bound where that is not allowed
for.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_keras_opt as dp
from dp_keras_opt.clipping import Query, clipped_sums, factors, layer_rules, precision
from dp_keras_opt.clipping.clipped_sum import clip_factor
from dp_keras_opt.clipping.factors import DenseGradients, Lookup, OuterProducts, TiedTable
from dp_keras_opt.clipping.layer_rules import Standardized
from tests.clipping.test_layer_rules import CANCELLING, norm_of, taking
from tests.helpers.coarse import a_gpu, cut_off, nearest, tf32

WAYS = pytest.mark.parametrize("rounded", [cut_off, nearest], ids=["cut off", "nearest"])
NORMS = pytest.mark.parametrize("norm", ["l2", "l1"])
POSITIONS, INPUTS, OUTPUTS = 32, 27, 20
#: 1 + HALF is rounded up; of 1 + LOST[way], and of a little more than 1 times that, 1 remains.
HALF = 2.0**-11 + 2.0**-23
LOST = {cut_off: 2.0**-10 * (1 - 2.0**-4), nearest: 2.0**-11 * (1 - 2.0**-4)}


def hiding(rounded):
    """(inputs (1, T, I), deltas (1, T, O)) whose huge terms cancel once they are rounded.

    The last term is small beside what is left of the others if they are not.
    """
    rng = np.random.default_rng(0)
    along, across = rng.normal(size=(1, 1, INPUTS)), np.sign(rng.normal(size=(1, 1, OUTPUTS)))
    along /= np.abs(along).max()  # by which a sum divides inputs, and multiplies deltas
    sizes = 2.0**14 * (1 + rng.integers(0, 50, POSITIONS // 2 - 1) / 1024)
    terms = np.concatenate([sizes * (1 + LOST[rounded]), -sizes, [0, 1]])
    inputs = np.repeat(along, POSITIONS, axis=1)
    return inputs.astype("float32"), (terms[None, :, None] * across).astype("float32")


def products(rounded):
    inputs, deltas = hiding(rounded)
    return OuterProducts(inputs[:, None], deltas[:, None], (INPUTS, OUTPUTS))


def looked_up(rounded):
    _, deltas = hiding(rounded)
    return Lookup(tf.ones((1, POSITIONS), tf.int32), deltas, (3, OUTPUTS))


def paired(rounded):
    """(x - 1) ⊗ 1 of two terms, of which x² - 2x + 1 leaves 0, as x or x² is rounded."""
    x = 1 + (31 / 1024 if rounded is cut_off else 2.0**-5 + HALF)
    inputs = np.float32([[x] * (INPUTS - 1) + [2], [1] * (INPUTS - 1) + [2]])[None, None]
    deltas = np.ones((1, 1, 2, OUTPUTS), "float32") * np.float32([[1], [-1]]) * 2**14
    return OuterProducts(inputs, deltas, (INPUTS, OUTPUTS))


def tied(rounded):
    """Look-ups x = 1 + 2^-5 + 2^-11 and a projection of -1 in one row: x is rounded up."""
    x = np.full((1, 1, OUTPUTS), 1 + 2.0**-5 + HALF, "float32") * 2**8
    row = tf.one_hot([[[1]]], 3)
    minus = tf.fill((1, 1, 1, OUTPUTS), -(2.0**8))
    return TiedTable(
        Lookup(tf.constant([[1]]), x, (3, OUTPUTS)), OuterProducts(row, minus, (3, OUTPUTS))
    )


def standardized(rounded):
    layer = dp.layers.StandardizedConv2D(OUTPUTS, 3)
    layer.build((None, 5, 5, 3))
    inner = products(rounded)
    inner = OuterProducts(inner.inputs, inner.deltas, layer.kernel.shape)
    return Standardized(inner, layer)


def one_position(rounded):
    one = np.full((1, 1, 1, INPUTS), 1 + HALF, "float32")
    one[..., 0] = 2
    return OuterProducts(
        one, np.full((1, 1, 1, OUTPUTS), 7 + 7 * HALF, "float32"), (INPUTS, OUTPUTS)
    )


def written_down(rounded):
    return DenseGradients(np.full((1, INPUTS), 7 + 7 * HALF, "float32"))


#: Factors with the way to their norms.
FACTORS = {
    "gram": (products, "gram"),
    "pairs": (paired, "pairs"),
    "blocks": (products, "blocks"),
    "small": (products, "small"),
    "looked up": (looked_up, "as chosen"),
    "tied": (tied, "as chosen"),
    "standardized": (standardized, "gram"),
    "standardized, written down": (standardized, "small"),
    "one position": (one_position, "as chosen"),
    "written down": (written_down, "as chosen"),
}


def contribution(factor, norm, path, scale, rounded, is_known):
    """The norm of what a row adds to a sum clipped to 1."""
    with tf32(rounded, is_known), taking(path, block=400):
        size = factor.l1_norm(scale) if norm == "l1" else tf.sqrt(factor.squared_norm(scale))
        total = factor.weighted_sum(clip_factor(size, 1.0, Query()))
    total = np.float64(total) * (1.0 if scale is None else np.float64(scale))
    return norm_of([total], norm)


def geometry(factor, scaled):
    shape = factor.weighted_sum(tf.ones(1)).shape
    rng = np.random.default_rng(3)
    return rng.uniform(0.5, 2, shape).astype("float32") if scaled else None


@WAYS
@NORMS
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", FACTORS)
def test_no_factor_exceeds_the_bound(name, scaled, norm, rounded):
    make, path = FACTORS[name]
    scale = geometry(make(rounded), scaled)
    assert contribution(make(rounded), norm, path, scale, rounded, is_known=True) <= 1 + 1e-5


@pytest.mark.parametrize(
    "name, norm, scaled, ways",
    [
        ("pairs", "l2", True, (cut_off, nearest)),
        ("blocks", "l2", False, (cut_off, nearest)),
        ("blocks", "l1", True, (cut_off, nearest)),
        ("looked up", "l2", True, (cut_off, nearest)),
        ("looked up", "l1", False, (cut_off, nearest)),
        ("standardized", "l2", True, (cut_off, nearest)),
        ("standardized", "l1", True, (cut_off, nearest)),
        ("one position", "l2", False, (nearest,)),
        ("written down", "l2", False, (nearest,)),
    ],
)
def test_these_exceed_it_where_rounding_is_not_allowed_for(name, norm, scaled, ways, monkeypatch):
    monkeypatch.setattr(factors, "LEAST_OF_TERMS", 0.0)
    monkeypatch.setattr(layer_rules, "LEAST_OF_PARTS", 0.0)
    make, path = FACTORS[name]
    for rounded in ways:
        scale = geometry(make(rounded), scaled)
        found = contribution(make(rounded), norm, path, scale, rounded, is_known=False)
        assert found > 1 + 1e-4


@WAYS
@NORMS
@pytest.mark.representatives(12)
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("path", ["as chosen", "gram", "pairs", "blocks", "small"])
@pytest.mark.parametrize("make", CANCELLING, ids=lambda make: make.__name__)
def test_no_step_exceeds_the_bound(make, path, policy, norm, rounded):
    """Forward and backward in TF32, too, and in half precision; terms that cancel, and others."""
    keras.config.set_dtype_policy(policy)
    try:
        for huge, exact in [(1e3, True), (1e4 if policy == "mixed_float16" else 1e9, False)]:
            model, x = make(8, huge, exact)
            ones = [tf.random.uniform(v.shape, 0.2, 2.0) for v in model.trainable_variables]
            queries = [
                Query(norm=norm, scale=scale, square=s) for scale in (None, ones) for s in (0, 1)
            ]
            with tf32(rounded), taking(path, block=400):
                sums = clipped_sums(model, (x, np.float32([[1e4]])), queries).sums
            for total in sums:
                assert norm_of([np.float64(t) for t in total], norm) <= 1 + 1e-5
    finally:
        keras.config.set_dtype_policy("float32")


@WAYS
def test_contributions_meet_the_bound_nearly(rounded):
    """Of 1,024 positions, products in TF32 with allowance alone would clip to 0.55 of it."""
    rng = np.random.default_rng(0)
    inputs, deltas = (rng.normal(size=(2, 1, 1024, n)).astype("float32") for n in (24, 40))
    for path in ("gram", "blocks"):
        factor = OuterProducts(inputs, deltas, (24, 40))
        with tf32(rounded), taking(path):
            found = np.sqrt(factor.squared_norm())
        gradients = np.einsum("bgti,bgto->bio", np.float64(inputs), np.float64(deltas))
        expected = np.linalg.norm(gradients, axis=(1, 2))
        assert (expected <= found).all() and (found <= 1.1 * expected).all()


@WAYS
def test_products_in_full_are_those_of_float32(rounded):
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(64, 64)).astype("float32") for _ in range(2))
    sizes = np.abs(a).astype("float64") @ np.abs(b)
    exact = np.float64(a) @ b
    with tf32(rounded):
        once, full = tf.matmul(a, b), precision.in_full(tf.matmul, tf.constant(a), tf.constant(b))
        once, full = (np.max(np.abs(found - exact) / sizes) for found in (once, full))
        assert full <= precision.rounding(64, full=True) < 1e-5
        assert full < once / 30 and once < precision.rounding(64)


def small_model():
    inputs = keras.Input((3,))
    model = dp.DPModel(inputs, keras.layers.Dense(2)(inputs))
    model.compile(dp.optimizers.DPSGD(clip_norm=1.0, noise_multiplier=1.0, batch_size=4), "mse")
    model.sampling = dp.accounting.Sampling.full(4)
    return model, (np.ones((4, 3), "float32"), np.ones((4, 2), "float32"))


@pytest.fixture
def restored():
    yield
    tf.config.optimizer.set_experimental_options({"auto_mixed_precision": False})
    tf.config.experimental.enable_tensor_float_32_execution(True)


@pytest.mark.parametrize("when", ["before", "after"])
def test_rewriting_to_half_precision_is_refused(restored, when):
    model, batch = small_model()
    if when == "after":
        model.train_on_batch(*batch)
    tf.config.optimizer.set_experimental_options({"auto_mixed_precision": True})
    spent = len(model.ledger.segments) and model.ledger.current.steps
    with pytest.raises(ValueError, match="mixed_bfloat16"):
        model.train_on_batch(*batch)
    assert (len(model.ledger.segments) and model.ledger.current.steps) == spent
    with pytest.raises(ValueError, match="clip norm"):
        clipped_sums(model, batch, (Query(),))


@pytest.mark.parametrize("name", ["TF_SET_ONEDNN_FPMATH_MODE", "ONEDNN_DEFAULT_FPMATH_MODE"])
def test_fewer_bits_of_onednn_are_refused(monkeypatch, name):
    model, batch = small_model()
    monkeypatch.setenv(name, "BF16")
    with pytest.raises(ValueError, match=name):
        model.train_on_batch(*batch)
    monkeypatch.delenv(name)
    model.train_on_batch(*batch)


def test_devices_of_which_nothing_is_known_are_refused(monkeypatch):
    model, batch = small_model()
    tpu = [tf.config.LogicalDevice("/device:TPU:0", "TPU")]
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda *_: tpu)
    with pytest.raises(ValueError, match="TPU"):
        model.train_on_batch(*batch)


def test_switching_tf32_after_the_step_was_made_is_refused(restored):
    with a_gpu():
        tf.config.experimental.enable_tensor_float_32_execution(False)
        model, batch = small_model()
        model.train_on_batch(*batch)
        tf.config.experimental.enable_tensor_float_32_execution(True)
        with pytest.raises(ValueError, match="TF32 was switched"):
            model.train_on_batch(*batch)
        model.compile(model.optimizer, "mse")
        model.train_on_batch(*batch)


def test_the_check_of_a_model_runs_without_tf32(monkeypatch):
    """Its tolerances could not tell a mistake from such rounding."""
    model, batch = small_model()
    seen = []
    original = factors.OuterProducts.weighted_sum

    def weighted_sum(self, weights):
        seen.append(precision.is_coarse())
        return original(self, weights)

    monkeypatch.setattr(factors.OuterProducts, "weighted_sum", weighted_sum)
    with a_gpu():
        model.train_on_batch(*batch)
        assert seen[-1] and not all(seen) and precision.is_coarse()
