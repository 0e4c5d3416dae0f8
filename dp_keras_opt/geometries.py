"""Geometries that examples are clipped in: the public names."""

from dp_keras_opt.optimizers.adaclip import AdaClip
from dp_keras_opt.optimizers.geoclip import GeoClip
from dp_keras_opt.optimizers.geometries import Geometry, Mean, get
from dp_keras_opt.optimizers.kronecker_factored import KroneckerFactored, pink_noise

__all__ = [
    "AdaClip",
    "GeoClip",
    "Geometry",
    "KroneckerFactored",
    "Mean",
    "get",
    "pink_noise",
]
