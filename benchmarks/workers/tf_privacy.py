"""TF Privacy on `tf_keras`: its vectorized optimizer, its model class, and fast clipping."""

# ruff: noqa: E402

import os
import sys

os.environ["TF_USE_LEGACY_KERAS"] = "1"
sys.skip_tf_privacy_import = True  # or it imports tensorflow_estimator, which is no more

import tensorflow as tf
from tensorflow_privacy.privacy.fast_gradient_clipping.layer_registry import (
    make_default_layer_registry,
)
from tensorflow_privacy.privacy.fast_gradient_clipping.registry_functions import (
    layer_normalization,
    multi_head_attention,
)
from tensorflow_privacy.privacy.keras_models.dp_keras_model import DPModel
from tensorflow_privacy.privacy.optimizers.dp_optimizer_keras_vectorized import (
    VectorizedDPKerasAdamOptimizer,
)
from workloads import WORKLOADS

from workers.keras_common import fit_steps, inputs_and_outputs
from workers.protocol import serve
from workers.tensorflow_devices import peak_megabytes, require

keras = tf.keras


def prepare(workload, variant, batch_size, device):
    """See `protocol.serve`; variants "vectorized", "model" and "fast"."""
    require(device)
    spec = WORKLOADS[workload]
    inputs, outputs = inputs_and_outputs(keras, workload, spec)
    privacy = {"l2_norm_clip": 1.0, "noise_multiplier": 1.0}
    if variant == "vectorized":
        model = keras.Model(inputs, outputs)
        optimizer, reduction = (
            VectorizedDPKerasAdamOptimizer(**privacy, learning_rate=0.001),
            "none",
        )
    else:
        registry = layers_with_a_rule() if variant == "fast" else None
        model = DPModel(**privacy, layer_registry=registry, inputs=inputs, outputs=outputs)
        optimizer, reduction = keras.optimizers.Adam(0.001), "sum_over_batch_size"
        if registry is not None and not model._enable_fast_peg_computation:
            missing = {type(layer).__name__ for layer in model.layers
                       if layer.trainable_variables and not registry.is_elem(layer)}  # fmt: skip
            raise NotImplementedError(f"no fast clipping for {', '.join(sorted(missing))}")
    model.compile(optimizer, ExampleLoss(reduction))
    data = tf.data.Dataset.from_tensors(spec.batch(batch_size)).repeat()
    return fit_steps(keras, model, data), model.count_params()


class ExampleLoss(keras.losses.Loss):
    """Cross-entropy of one value an example, its mean over sequences: fast clipping needs that."""

    def call(self, y_true, y_pred):
        losses = keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
        return tf.reduce_mean(tf.reshape(losses, (tf.shape(losses)[0], -1)), axis=1)


def layers_with_a_rule():
    """All that TF Privacy has: its default layers, layer normalization and attention."""
    registry = make_default_layer_registry()
    registry.insert(
        keras.layers.LayerNormalization, layer_normalization.layer_normalization_computation
    )
    registry.insert(
        keras.layers.MultiHeadAttention, multi_head_attention.multi_head_attention_layer_computation
    )
    return registry


if __name__ == "__main__":
    serve(prepare, ("tensorflow", "tf_keras", "tensorflow_privacy"), peak_megabytes)
