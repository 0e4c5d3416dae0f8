"""TensorFlow's devices: that they are there, their memory, and several of them at once."""

import tensorflow as tf

from workers.protocol import resident_peak


def require(device, count=1):
    """Raises if the run is meant for GPUs that TensorFlow does not see."""
    found = len(tf.config.list_physical_devices("GPU"))
    if device == "gpu" and found < count:
        raise RuntimeError(f"TensorFlow sees {found} of {count} GPUs")


def peak_megabytes(device):
    """The most memory that TensorFlow held on a GPU, or that the process held on the CPU."""
    if device == "cpu":
        return resident_peak()
    names = [gpu.name for gpu in tf.config.list_logical_devices("GPU")]
    places = (name.removeprefix("/device:") for name in names)
    return max(tf.config.experimental.get_memory_info(place)["peak"] for place in places) / 2**20


def strategy(device, count):
    """Of so many GPUs, the batch split between them; or of as many parts of the CPU, to try it."""
    require(device, count)
    if count == 1:
        return tf.distribute.get_strategy()
    if device == "cpu":
        (cpu,) = tf.config.list_physical_devices("CPU")
        parts = [tf.config.LogicalDeviceConfiguration()] * count
        tf.config.set_logical_device_configuration(cpu, parts)
    return tf.distribute.MirroredStrategy([f"{device.upper()}:{i}" for i in range(count)])
