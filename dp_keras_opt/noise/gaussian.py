"""Independent Gaussian noise: the mechanism of DP-SGD."""

import dp_accounting
import keras

from dp_keras_opt.noise.mechanism import Mechanism


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class Gaussian(Mechanism):
    """Independent Gaussian noise of std σ·C on each coordinate (Abadi et al. 2016).

    Formal guarantee: releasing a sum of L2 sensitivity C with this noise is the Gaussian
    mechanism with noise multiplier σ. It holds for real numbers; the rounding of float32 draws
    is not covered.
    """

    norm = "l2"
    budget_exponent = 2

    def event(self, multiplier):
        return dp_accounting.GaussianDpEvent(multiplier)

    def unit_noise(self, shapes, source, stream=0):
        return [source.normal(shape) for shape in shapes]

    def std(self, step):
        return 1.0
