"""Step 4 of the pipeline: optimizers, one rule a file."""

from collections.abc import Mapping
from typing import Any

import keras

from dp_keras_opt.optimizers import moments
from dp_keras_opt.optimizers.accelerated import DPHeavyBall, DPMultistageNesterov, DPNesterov
from dp_keras_opt.optimizers.adagrad import DPAdagrad
from dp_keras_opt.optimizers.adam import DPAdam
from dp_keras_opt.optimizers.adp import ADPSGD, ADPAdagradNorm
from dp_keras_opt.optimizers.delayed import DP2Adagrad, DP2RMSprop, DP2Yogi
from dp_keras_opt.optimizers.galore import DPGaLore
from dp_keras_opt.optimizers.private_optimizer import PrivateOptimizer
from dp_keras_opt.optimizers.projection import GaLore
from dp_keras_opt.optimizers.public_data import PDADPMD, AdaDPS, SubspaceAdagrad
from dp_keras_opt.optimizers.rmsprop import DPRMSprop
from dp_keras_opt.optimizers.sgd import DPSGD
from dp_keras_opt.optimizers.wrapper import DPOptimizer
from dp_keras_opt.optimizers.yogi import DPYogi

__all__ = [
    "ADPAdagradNorm",
    "ADPSGD",
    "AdaDPS",
    "DP2Adagrad",
    "DP2RMSprop",
    "DP2Yogi",
    "DPAdagrad",
    "DPAdam",
    "DPGaLore",
    "DPHeavyBall",
    "DPMultistageNesterov",
    "DPNesterov",
    "DPOptimizer",
    "DPRMSprop",
    "DPSGD",
    "DPYogi",
    "GaLore",
    "PDADPMD",
    "PrivateOptimizer",
    "SubspaceAdagrad",
    "get",
    "moments",
]


def classes() -> dict[str, type[PrivateOptimizer]]:
    """All private optimizers by their names in lower case."""
    exported = {name: globals()[name] for name in __all__ if name != "PrivateOptimizer"}
    return {
        name.lower(): cls
        for name, cls in exported.items()
        if isinstance(cls, type) and issubclass(cls, PrivateOptimizer)
    }


def get(identifier: PrivateOptimizer | str | Mapping[str, Any], **kwargs: Any) -> PrivateOptimizer:
    """Resolves the name of a private optimizer, its configuration, or an optimizer object.

    Args:
        identifier: such as "DPAdam" (any case), a serialised optimizer, or an optimizer.
        **kwargs: the constructor's arguments, where `identifier` is a name.

    Raises:
        ValueError: no private optimizer is meant.
    """
    if isinstance(identifier, str):
        known = classes()
        if identifier.lower() not in known:
            raise ValueError(f"optimizer {identifier!r} is not known; use one of {sorted(known)}.")
        return known[identifier.lower()](**kwargs)
    if isinstance(identifier, dict):
        identifier = keras.saving.deserialize_keras_object(identifier)
    if not isinstance(identifier, PrivateOptimizer):
        raise ValueError(f"{identifier!r} is not a private optimizer of dp_keras_opt.optimizers.")
    return identifier
