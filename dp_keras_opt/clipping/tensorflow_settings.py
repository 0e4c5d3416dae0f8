"""Settings of TensorFlow that decide in how many bits float32 numbers are multiplied."""

import contextlib
import os

import tensorflow as tf

from dp_keras_opt.clipping import precision


@contextlib.contextmanager
def without_tf32():
    """Has what runs in this block multiply float32 numbers as they are, for comparisons."""
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    try:
        yield
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(before)


#: Environment variables by which oneDNN multiplies float32 numbers in fewer bits.
_FEWER_BITS = (
    "TF_SET_ONEDNN_FPMATH_MODE", "ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE",
)  # fmt: skip


def check(was_coarse=None):
    """Refuses to compute norms and sums of which it is not known how far they are rounded.

    Args:
        was_coarse: what `precision.is_coarse` was when the step was traced, to be the same still;
            None where it is traced now.

    Raises:
        ValueError: float32 numbers are multiplied in fewer bits than TF32 has, or may be.
    """
    options = tf.config.optimizer.get_experimental_options()
    found = [name for name, on in options.items() if name.startswith("auto_mixed_precision") and on]
    found += [f"{name}={os.environ[name]}" for name in _FEWER_BITS if os.environ.get(name)]
    kinds = {device.device_type for device in tf.config.list_logical_devices()}
    found += sorted(kind for kind in kinds if kind.removeprefix("XLA_") not in ("CPU", "GPU"))
    if found:
        raise ValueError(
            f"TensorFlow has {', '.join(found)}: norms of gradients and their sums could be "
            "computed in half precision, and an example contribute more than the clip norm. Leave "
            "options of tf.config.optimizer and variables of oneDNN unset, and train on CPUs or "
            "GPUs. For mixed precision, set a dtype policy of Keras: "
            'keras.config.set_dtype_policy("mixed_bfloat16").'
        )
    if was_coarse not in (None, precision.is_coarse()):
        raise ValueError(
            "TF32 was switched on or off (tf.config.experimental.enable_tensor_float_32_execution) "
            "after the training step was made, which allows for the rounding of what was set then. "
            "Switch it before compile, or compile again."
        )
