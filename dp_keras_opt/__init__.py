"""Differentially private training for Keras 3 on TensorFlow."""

from keras import backend as _backend

if _backend.backend() != "tensorflow":
    raise ImportError(
        f"dp_keras_opt needs Keras's TensorFlow backend, but it is '{_backend.backend()}'. "
        "Set the environment variable KERAS_BACKEND=tensorflow before Keras is imported."
    )

from dp_keras_opt import (
    accounting,
    audit,
    callbacks,
    clipping,
    data,
    filters,
    geometries,
    layers,
    noise,
    optimizers,
    plots,
    replicas,
    serving,
    statistics,
    theory,
    tuning,
)
from dp_keras_opt.clipping import Objective
from dp_keras_opt.counterpart import make_private
from dp_keras_opt.model import DPModel
from dp_keras_opt.training.guard import PrivacyBudgetError
from dp_keras_opt.version import __version__  # noqa: F401

__all__ = [
    "DPModel",
    "Objective",
    "PrivacyBudgetError",
    "accounting",
    "audit",
    "callbacks",
    "clipping",
    "data",
    "filters",
    "geometries",
    "layers",
    "make_private",
    "noise",
    "optimizers",
    "plots",
    "replicas",
    "serving",
    "statistics",
    "theory",
    "tuning",
]
