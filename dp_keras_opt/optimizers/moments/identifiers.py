"""Sources of the second moment by name."""

from collections.abc import Mapping
from typing import Any, TypeAlias

import keras

from dp_keras_opt.optimizers.moments.base import PostProcessing, SecondMoment
from dp_keras_opt.optimizers.moments.bias_corrected import BiasCorrected
from dp_keras_opt.optimizers.moments.joint import Independent
from dp_keras_opt.optimizers.moments.noiseless import Noiseless
from dp_keras_opt.optimizers.moments.scale_then_privatize import ScaleThenPrivatize
from dp_keras_opt.optimizers.moments.side_information import SideInformation

#: What is taken as `second_moment`: a source or its name.
SecondMomentLike: TypeAlias = SecondMoment | str

_NAMES: dict[str, type[SecondMoment]] = {
    "post_processing": PostProcessing,
    "bias_corrected": BiasCorrected,
    "independent": Independent,
    "scale_then_privatize": ScaleThenPrivatize,
    "side_information": SideInformation,
    "noiseless": Noiseless,
}


def get(identifier: SecondMoment | str | Mapping[str, Any]) -> SecondMoment:
    """Resolves a source of the second moment: an object, a name, or a serialised one.

    Raises:
        ValueError: nothing is known by that name; "joint" needs its weight: moments.Joint(weight).
    """
    if isinstance(identifier, dict):
        identifier = keras.saving.deserialize_keras_object(identifier)
    if isinstance(identifier, str):
        if identifier == "joint":
            raise ValueError("second_moment='joint' needs its weight λ: moments.Joint(weight).")
        if identifier not in _NAMES:
            raise ValueError(
                f"second_moment={identifier!r} is not known; use one of {sorted(_NAMES)}, "
                "moments.Joint(weight), or another object of dp_keras_opt.optimizers.moments."
            )
        identifier = _NAMES[identifier]()
    if not isinstance(identifier, SecondMoment):
        raise ValueError(
            "second_moment must be a name or an object of dp_keras_opt.optimizers.moments; "
            f"received {identifier!r}."
        )
    return identifier
