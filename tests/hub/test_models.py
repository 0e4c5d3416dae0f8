"""Models of keras_hub: rules serve their layers, and the clipped sums are right.

Run by `tox -e hub`; skipped where keras_hub is not installed.
"""

import math
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

pytest.importorskip("keras_hub")

import dp_keras_opt as dp  # noqa: E402
from dp_keras_opt.clipping import Batch, Query, clipped_sums  # noqa: E402
from dp_keras_opt.clipping.self_check import checked_engines  # noqa: E402
from tests.helpers.per_example import clip_and_sum, one_at_a_time  # noqa: E402
from tests.hub import models  # noqa: E402

#: Layers without a rule, by model.
WITHOUT_RULE = {"deberta": {"RelativeEmbedding"}}


def randomized(base):
    rng = np.random.default_rng(3)
    for weight in base.trainable_weights:  # not ids of positions
        weight.assign(rng.normal(0, 0.4, weight.shape))


def mse(y, y_pred):
    return tf.reduce_mean(tf.square(y - tf.cast(y_pred, tf.float32)))


@pytest.mark.parametrize("make", models.ALL, ids=lambda make: make.__name__)
def test_rules_serve_the_model(make):
    assert served(*make()) == WITHOUT_RULE.get(make.__name__, set())


def served(base, x):
    """The classes of layers that no rule serves; the clipped sums are held to the oracle."""
    base = keras.Model(base.input, base.output)  # without a `train_step` of its own
    randomized(base)
    y = np.random.default_rng(4).normal(size=base(x).shape).astype("float32")
    model = dp.make_private(base)
    optimizer = dp.optimizers.DPSGD(0.1, clip_norm=1.0, noise_multiplier=1.0, batch_size=4)
    model.compile(optimizer=optimizer, loss="mse")
    x, y = tf.nest.map_structure(tf.convert_to_tensor, (x, y))
    engines = checked_engines(model, Batch(x, y))
    gradients = one_at_a_time(base, mse, x, y)
    rng = np.random.default_rng(5)
    scale = [rng.uniform(0.2, 2.0, v.shape).astype("float32") for v in model.trainable_variables]
    norms = [math.sqrt(sum((g**2).sum() for g in one)) for one in gradients]
    clip_norm = float(np.median(norms))
    queries = (Query(clip_norm=clip_norm), Query(clip_norm=clip_norm, scale=scale))
    sums = clipped_sums(model, (x, y), queries, engines).sums
    for query, total in zip(queries, sums, strict=True):
        expected = clip_and_sum(gradients, clip_norm, query.scale)
        whole = max(np.abs(e).max() for e in expected)
        for actual, e in zip(total, expected, strict=True):
            np.testing.assert_allclose(actual, e, rtol=0, atol=1e-4 * whole)
    return {type(layer).__name__ for layer in engines.general}


def test_a_rule_that_no_longer_holds_is_demoted(monkeypatch):
    """As if a later keras_hub had changed the class."""
    from keras_hub.src.models.llama.llama_layernorm import LlamaLayerNorm

    def call(layer, x):
        return x * keras.ops.flip(layer.scale, axis=0)

    monkeypatch.setattr(LlamaLayerNorm, "call", call)
    with pytest.warns(UserWarning, match="rule for LlamaLayerNorm"):
        general = served(*models.llama3())
    assert general == {"LlamaLayerNorm"}


def test_keras_hub_is_not_imported_for_its_rules():
    code = "import sys, dp_keras_opt.clipping; assert 'keras_hub' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
