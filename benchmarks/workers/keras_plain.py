"""Keras without privacy, with and without XLA, and the bare draw of the noise."""

import keras
import tensorflow as tf
from workloads import WORKLOADS

from workers.keras_common import fit_steps, inputs_and_outputs, optimizer_megabytes
from workers.protocol import resident_peak, serve, timed


def prepare(workload, variant, batch_size, device):
    """See `protocol.serve`; variants "plain", "xla" and "noise"."""
    require(device)
    spec = WORKLOADS[workload]
    model = keras.Model(*inputs_and_outputs(keras, workload, spec))
    if variant == "noise":
        return noise_draws([v.shape for v in model.trainable_variables]), model.count_params()
    model.compile(
        keras.optimizers.Adam(0.001),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=variant == "xla",
    )
    data = tf.data.Dataset.from_tensors(spec.batch(batch_size)).repeat()
    return fit_steps(keras, model, data), model.count_params(), optimizer_megabytes(model)


def noise_draws(shapes):
    """The `run` that draws a normal for every weight, from TensorFlow's Philox generator."""
    generator = tf.random.Generator.from_non_deterministic_state(alg="philox")

    @tf.function(jit_compile=bool(tf.config.list_physical_devices("GPU")))
    def draw():
        return [tf.reduce_max(generator.normal(shape)) for shape in shapes]

    return timed(draw, wait=lambda maxima: maxima[-1].numpy())


def require(device):
    """Raises if the run is meant for a GPU that TensorFlow does not see."""
    if device == "gpu" and not tf.config.list_physical_devices("GPU"):
        raise RuntimeError("TensorFlow sees no GPU")


def peak_megabytes(device):
    """The most memory that TensorFlow held on the GPU, or that the process held on the CPU."""
    if device == "cpu":
        return resident_peak()
    return tf.config.experimental.get_memory_info("GPU:0")["peak"] / 2**20


if __name__ == "__main__":
    serve(prepare, ("tensorflow", "keras"), peak_megabytes)
