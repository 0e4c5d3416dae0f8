"""Keras without privacy, with and without XLA, and the bare draw of the noise."""

import keras
import tensorflow as tf
from workloads import WORKLOADS

from workers.keras_common import fit_steps, inputs_and_outputs, optimizer_megabytes
from workers.protocol import serve, timed
from workers.tensorflow_devices import peak_megabytes, strategy


def prepare(workload, variant, batch_size, device):
    """See `protocol.serve`; variants "plain", "xla" and "noise", "plain+two" on two devices."""
    spec = WORKLOADS[workload]
    with strategy(device, 2 if variant.endswith("+two") else 1).scope():
        model = keras.Model(*inputs_and_outputs(keras, workload, spec))
        if variant == "noise":
            return noise_draws([v.shape for v in model.trainable_variables]), model.count_params()
        model.compile(
            keras.optimizers.Adam(0.001),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=variant == "xla",
        )
    data = tf.data.Dataset.from_tensor_slices(spec.batch(batch_size)).batch(batch_size)
    data = data.cache().repeat()
    return fit_steps(keras, model, data), model.count_params(), optimizer_megabytes(model)


def noise_draws(shapes):
    """The `run` that draws a normal for every weight, from TensorFlow's Philox generator."""
    generator = tf.random.Generator.from_non_deterministic_state(alg="philox")

    @tf.function(jit_compile=bool(tf.config.list_physical_devices("GPU")))
    def draw():
        return [tf.reduce_max(generator.normal(shape)) for shape in shapes]

    return timed(draw, wait=lambda maxima: maxima[-1].numpy())


if __name__ == "__main__":
    serve(prepare, ("tensorflow", "keras"), peak_megabytes)
