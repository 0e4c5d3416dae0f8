"""Filters of privatized gradients, and their analysis: the public names."""

from dp_keras_opt.optimizers.filter_analysis import autocorrelation, power_spectral_density, snr
from dp_keras_opt.optimizers.filters import (
    PRESETS,
    Filter,
    LowPass,
    OptimalFIR,
    get,
    optimal_weights,
)
from dp_keras_opt.optimizers.kalman import DiSK
from dp_keras_opt.optimizers.per_example_momentum import PerExampleMomentum
from dp_keras_opt.optimizers.sharpness import SharpnessAware
from dp_keras_opt.optimizers.spectral import FFTKF

__all__ = [
    "DiSK",
    "FFTKF",
    "Filter",
    "LowPass",
    "OptimalFIR",
    "PRESETS",
    "PerExampleMomentum",
    "SharpnessAware",
    "autocorrelation",
    "get",
    "optimal_weights",
    "power_spectral_density",
    "snr",
]
