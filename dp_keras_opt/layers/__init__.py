"""Layers that private training of convolutional networks does well with."""

from dp_keras_opt.layers.scattering import Scattering2D
from dp_keras_opt.layers.standardized import StandardizedConv2D

__all__ = ["Scattering2D", "StandardizedConv2D"]
