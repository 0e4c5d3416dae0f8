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

__all__ = [
    "Filter",
    "LowPass",
    "OptimalFIR",
    "PRESETS",
    "autocorrelation",
    "get",
    "optimal_weights",
    "power_spectral_density",
    "snr",
]
