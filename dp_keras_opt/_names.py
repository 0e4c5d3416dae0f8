"""The public names of the library, once it is clear that Keras runs on TensorFlow."""

import keras as _keras

if _keras.backend.backend() != "tensorflow":
    raise ImportError(
        f"dp_keras_opt needs Keras's TensorFlow backend, but it is '{_keras.backend.backend()}'. "
        "Set the environment variable KERAS_BACKEND=tensorflow before Keras is imported."
    )

from dp_keras_opt import (
    accounting,
    audit,
    callbacks,
    clipping,
    data,
    filters,
    noise,
    optimizers,
    plots,
    replicas,
    serving,
    theory,
    tuning,
)
from dp_keras_opt.guard import PrivacyBudgetError
from dp_keras_opt.model import DPModel, make_private

__all__ = [
    "DPModel",
    "PrivacyBudgetError",
    "accounting",
    "audit",
    "callbacks",
    "clipping",
    "data",
    "filters",
    "make_private",
    "noise",
    "optimizers",
    "plots",
    "replicas",
    "serving",
    "theory",
    "tuning",
]
