"""Each operation of a private step has a kernel on GPUs: none has data brought to the host.

What TensorFlow registers is asked, in the types of the step. That the kernels run, and how fast, is
not shown here: `benchmarks/compare.py --device gpu` does, where there is one.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_keras_opt as dp
from dp_keras_opt import noise
from dp_keras_opt.accounting import Sampling
from dp_keras_opt.clipping import clipped_sum
from tests.helpers.coarse import a_gpu
from tests.helpers.fuzzing import REFUSALS, RULES, optimizer_of
from tests.helpers.kernels import without_kernel

B, OWN, STEPS = 6, 2, 12


def cnn():
    inputs = keras.Input((8, 8, 1))
    hidden = keras.layers.Conv2D(4, 3, activation="relu")(inputs)
    hidden = keras.layers.DepthwiseConv2D(3)(hidden)
    hidden = keras.layers.GroupNormalization(2)(hidden)
    hidden = keras.layers.Flatten()(keras.layers.MaxPooling2D()(hidden))
    return inputs, keras.layers.Dense(3)(hidden)


def transformer():
    inputs = keras.Input((6,), dtype="int32")
    hidden = keras.layers.Embedding(11, 8)(inputs)
    hidden += keras.layers.MultiHeadAttention(2, 4)(hidden, hidden, use_causal_mask=True)
    hidden = keras.layers.Dropout(0.1)(keras.layers.LayerNormalization()(hidden))
    return inputs, keras.layers.Dense(3)(keras.layers.GlobalAveragePooling1D()(hidden))


def lstm():
    inputs = keras.Input((6,), dtype="int32")
    hidden = keras.layers.Embedding(11, 8, mask_zero=True)(inputs)
    hidden = keras.layers.Bidirectional(keras.layers.LSTM(4))(hidden)
    return inputs, keras.layers.Dense(3)(hidden)


OPTIONS = {
    "plain": {},
    "galore": {"projection": dp.optimizers.GaLore(2, 2)},
    "banded": {"noise": noise.BandedMatrix(STEPS, 3)},
    "laplace": {"noise": noise.Laplace()},
    "filter": {"gradient_filter": "f6"},
    "per layer": {"clipping": "per_layer"},
    "quantile": {"clip_norm": dp.clipping.Quantile(count_noise=3.0), "clipping": "per_layer"},
    "users": {},
}


@pytest.fixture(autouse=True)
def gpu():
    """A step is traced as it is where there is a GPU."""
    with a_gpu():
        yield


def step_of(make, rule, option, jit_compile=False):
    """One traced step of a private model."""
    inputs, outputs = make()
    model = dp.DPModel(inputs, outputs)
    given = {"clip_norm": 0.5, "noise_multiplier": 1.0, "batch_size": B, "seed": 0}
    described = {"wrapped": "lion", "ablation": None, "second_moment": lambda: "post_processing"}
    optimizer = optimizer_of(rule, given | OPTIONS[option], described)
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=jit_compile,
    )
    users = {"unit": "user", "examples_per_unit": OWN} if option == "users" else {}
    sampling = Sampling.fixed_order if option == "banded" else Sampling.poisson
    rows = B * (OWN if users else 1) + 2
    x, y = np.ones((rows, *inputs.shape[1:]), inputs.dtype), np.ones(rows, "int32")
    mask = np.arange(rows) < rows - 2
    info = dp.data.RowInfo(
        mask.reshape(-1, OWN) if users else mask,
        public=None if mask.all() else np.where(mask, 0, 0.5).astype("float32"),
    )
    once = tf.data.Dataset.from_tensors((x, y, info)).filter(lambda *_: True)  # of unknown length
    model.fit(dp.data.assume_sampling(once, sampling(48, B, **users)), verbose=0)
    model._guard.is_stepping = True
    batch = tf.nest.map_structure(
        lambda part: None if part is None else tf.convert_to_tensor(part), (x, y, info)
    )
    step = tf.function(lambda: model.train_step(batch), jit_compile=jit_compile)
    return step.get_concrete_function()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("make", [cnn, transformer, lstm])
@pytest.mark.representatives(18)
def test_every_step_has_kernels_for_gpus(make, option, rule):
    """Of every optimizer with every option and model, as far as they go together."""
    try:
        step = step_of(make, rule, option)
    except REFUSALS as reason:
        assert option != "plain", reason
        pytest.skip(str(reason))
    assert not without_kernel(step, "GPU")


def test_what_is_chosen_for_gpus_is_looked_at():
    """Norms from factors in two parts: a step that is traced as for the CPU has none."""
    operations = {node.op for node in step_of(cnn, "DPSGD", "plain").graph.as_graph_def().node}
    assert {"Bitcast", "BitwiseAnd"} <= operations


@pytest.mark.parametrize("option", ["plain", "banded", "laplace", "users", "quantile"])
@pytest.mark.parametrize("make", [cnn, transformer, lstm])
@pytest.mark.representatives(4)
def test_xla_compiles_every_operation_for_gpus(make, option):
    step = step_of(make, "DPAdam", option, jit_compile=True)  # this has XLA register its kernels
    assert not without_kernel(step, "XLA_GPU_JIT")


def test_a_step_that_goes_through_the_host_is_found(monkeypatch):
    factor = clipped_sum.clip_factor

    def by_text(*args):
        return tf.strings.to_number(tf.strings.as_string(factor(*args)))

    monkeypatch.setattr(clipped_sum, "clip_factor", by_text)
    found = {operation for operation, _ in without_kernel(step_of(cnn, "DPSGD", "plain"), "GPU")}
    assert found == {"AsString", "StringToNumber"}


def test_a_missing_kernel_is_found():
    @tf.function
    def on_host(x):
        return tf.strings.length(tf.strings.as_string(x)), tf.linalg.sqrtm(tf.ones((2, 2)))

    found = without_kernel(on_host.get_concrete_function(tf.ones(3)), "GPU")
    assert {"AsString", "StringLength"} <= {operation for operation, _ in found}
    product = tf.function(lambda x: tf.matmul(x, x))  # of floats only
    of_integers = product.get_concrete_function(tf.ones((2, 2), tf.int64))
    assert {operation for operation, _ in without_kernel(of_integers, "GPU")} == {"MatMul"}
    assert not without_kernel(product.get_concrete_function(tf.ones((2, 2))), "GPU")
    in_types = tf.function(lambda x: tf.bitcast(tf.cast(x, tf.uint16), tf.int16) + 1)
    found = without_kernel(in_types.get_concrete_function(tf.ones(3)), "GPU")
    assert not {"Const", "Cast"} & {operation for operation, _ in found}
