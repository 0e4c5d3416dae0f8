"""Products of matrices as GPUs may take them: their factors rounded to TF32."""

import contextlib
from unittest import mock

import tensorflow as tf
from tensorflow.python.ops import gen_linalg_ops, gen_math_ops, gen_nn_ops

#: Operations that multiply matrices, where TensorFlow itself looks them up.
_PRODUCTS = {
    gen_math_ops: ("mat_mul", "batch_mat_mul", "batch_mat_mul_v2", "batch_mat_mul_v3"),
    gen_linalg_ops: ("einsum",),
    gen_nn_ops: ("conv2d", "conv3d", "depthwise_conv2d_native"),
}


@tf.custom_gradient
def cut_off(tensor):
    """The 10 first bits of the mantissas."""
    bits = tf.bitcast(tensor, tf.int32)
    return tf.bitcast(tf.bitwise.bitwise_and(bits, ~0x1FFF), tf.float32), lambda g: g


@tf.custom_gradient
def nearest(tensor):
    """The nearest numbers with 10 bits of a mantissa."""
    bits = tf.bitcast(tensor, tf.int32)
    nearer = tf.bitcast(tf.bitwise.bitwise_and(bits + 0x1000, ~0x1FFF), tf.float32)
    return tf.where(tf.math.is_finite(nearer), nearer, tensor), lambda g: g


@contextlib.contextmanager
def tf32(rounded=cut_off, is_known=True):
    """TensorFlow as on a GPU that takes factors through `rounded`; what it runs on stays the CPU.

    Args:
        rounded: `cut_off` or `nearest`.
        is_known: whether a GPU is listed, so that the rounding is allowed for.
    """

    def coarse(product):
        def of_rounded(*args, **kwargs):
            args = [_through(rounded, arg) for arg in args]
            kwargs = {name: _through(rounded, arg) for name, arg in kwargs.items()}
            return product(*args, **kwargs)

        return of_rounded

    with contextlib.ExitStack() as patches:
        for module, names in _PRODUCTS.items():
            for name in names:
                patch = mock.patch.object(module, name, coarse(getattr(module, name)))
                patches.enter_context(patch)
        if is_known:
            patches.enter_context(a_gpu())
        yield


def _through(rounded, arg):
    if isinstance(arg, list | tuple):
        return [_through(rounded, each) for each in arg]
    return rounded(arg) if tf.is_tensor(arg) and arg.dtype == tf.float32 else arg


@contextlib.contextmanager
def a_gpu():
    """The same list of devices as on a machine with a GPU."""
    listed = tf.config.list_physical_devices

    def list_physical_devices(device_type=None):
        gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
        return listed(device_type) + ([gpu] if device_type in (None, "GPU") else [])

    with mock.patch.object(tf.config, "list_physical_devices", list_physical_devices):
        yield
