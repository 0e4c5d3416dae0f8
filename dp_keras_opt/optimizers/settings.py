"""The arguments of private optimizers: what they may be, what they mean, and when they are fixed.

An argument is declared once, as a `Setting` of the class that takes it. The check, the line in the
docstring of every optimizer, the entry in the configuration and the refusal after `build` follow.
"""

from __future__ import annotations

import inspect
import math
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import keras
import numpy as np

from dp_keras_opt.accounting import batch_sizes
from dp_keras_opt.accounting.batch_sizes import BatchSizes
from dp_keras_opt.checks import is_number, whole_number
from dp_keras_opt.clipping.bounds import bound
from dp_keras_opt.noise.mechanism import Mechanism
from dp_keras_opt.noise.schedules import NoiseSchedule
from dp_keras_opt.optimizers.filters import Filter
from dp_keras_opt.types import ClippingStyle

#: What is taken as `noise`: a mechanism or its name.
NoiseLike: TypeAlias = Mechanism | str

#: What is taken as `noise_schedule`: a schedule or its factors; None is constant noise.
NoiseScheduleLike: TypeAlias = NoiseSchedule | Sequence[float] | np.ndarray | None

#: What is taken as `gradient_filter`: a filter or the name of a preset; None is no filter.
FilterLike: TypeAlias = Filter | str | None

_Value = TypeVar("_Value")


class Setting(Generic[_Value]):
    """An argument that the training depends on; a traced graph would not notice a later change.

    The owner keeps the values in `_untracked`, a plain object that Keras does not look into.

    Args:
        check: function of name and value that returns the value to keep, or raises.
        description: one paragraph for the docstrings of the optimizers.
        later: whether None stands for "not set yet", which may be made good after the build.
        at_once: whether it is fixed before that, when the optimizer is made.
    """

    def __init__(
        self,
        check: Callable[[str, Any], _Value],
        description: str = "",
        later: bool = False,
        at_once: bool = False,
    ) -> None:
        self.check = check
        self.later = later
        self.at_once = at_once
        self.__doc__ = description

    def __set_name__(self, owner, name):
        self.name = name

    def __get__(self, instance: Any, owner: type | None = None) -> _Value:
        if instance is None:
            return self  # type: ignore[return-value]
        try:
            return getattr(vars(instance)["_untracked"], self.name)
        except (KeyError, AttributeError):
            # Not None: Keras skips assigning what getattr already gives.
            raise AttributeError(f"{self.name} is not set yet.") from None

    def __set__(self, instance: Any, value: Any) -> None:
        value = self.check(self.name, value)
        kept = instance._untracked
        unset = self.later and getattr(kept, self.name, None) is None
        if self.at_once and hasattr(kept, self.name):
            raise ValueError(
                f"{self.name} is fixed when the optimizer is made, as is what draws its noise. "
                f"Make a new optimizer with {self.name}={value!r}."
            )
        if instance.built and not unset:
            raise ValueError(
                f"{self.name} is fixed once the optimizer is built, because the compiled training "
                "step and the privacy ledger depend on it. Make a new optimizer and compile again."
            )
        setattr(kept, self.name, value)


def settings_of(cls: type) -> dict[str, Setting]:
    """The settings of a class by name, inherited ones first."""
    return {
        name: attribute
        for base in reversed(cls.__mro__)
        for name, attribute in vars(base).items()
        if isinstance(attribute, Setting)
    }


def average_from(arguments: dict[str, Any]) -> int | None:
    """Takes `average_from` out of keyword arguments, and turns Keras's averaging on for it.

    Raises:
        ValueError: it is no step; or an argument of the exponential average is set, too.
    """
    step = arguments.pop("average_from", None)
    if step is None:
        return None
    step = whole_number(step, "average_from", 0, "Steps count from 0.")
    for name in ("use_ema", "ema_overwrite_frequency"):
        if arguments.get(name):
            raise ValueError(
                f"average_from={step} keeps a uniform average of the variables, beside their "
                f"training; {name}={arguments[name]!r} is of the exponential one. Leave one of "
                "them out."
            )
    arguments["use_ema"] = True
    return step


# Docstrings.

_PLACE = re.compile(r"^( *)\{\{(private|keras)_arguments\}\}\n?", re.M)
_WIDTH = 100

_KERAS_ARGUMENTS = (
    "**kwargs: what every Keras optimizer takes, `name`, `weight_decay`, `use_ema`, `ema_momentum` "
    "and `ema_overwrite_frequency`; and `average_from`:",
    "name: of the optimizer. Defaults to that of the class.",
    "weight_decay: None, or a float w: each step first shrinks the variables by the factor "
    "1 − learning_rate·w. It does not look at the data and costs no privacy. Defaults to None.",
    "use_ema: whether to keep an exponential moving average of the variables, which `fit` leaves "
    "in the model at its end. Defaults to False.",
    "ema_momentum: its decay, in [0, 1]. Defaults to 0.99.",
    "ema_overwrite_frequency: None, or the number of steps after which the average takes the place "
    "of the variables, again and again. Defaults to None.",
    "average_from: None, or the step, counted from 0, from which on the variables are averaged "
    "uniformly, in place of `use_ema`: `fit` leaves the average in the model at its end. Fixed "
    "without looking at the data; an average of weights costs no privacy. Defaults to None.",
)


def fill_docstring(cls: type) -> None:
    """Puts the arguments that optimizers share into the docstring of a class.

    `{{private_arguments}}` becomes one paragraph for each `Setting` in the signature, and
    `{{keras_arguments}}` the arguments of Keras's base class. What the docstring describes by
    itself is not described again.
    """
    if not cls.__doc__:  # python -OO
        return
    own = cls.__doc__
    parameters = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
    settings = settings_of(cls)

    def private():
        for name, parameter in parameters.items():
            if name not in settings or re.search(rf"^ *{name}:", own, re.M):
                continue
            text = f"{name}: {settings[name].__doc__}"
            if parameter.default is not parameter.empty:
                text += f" Defaults to {_shown(parameter.default)}."
            yield text

    def fill(found):
        paragraphs = private() if found[2] == "private" else _KERAS_ARGUMENTS
        return "".join(_wrapped(paragraph, found[1]) for paragraph in paragraphs)

    cls.__doc__ = _PLACE.sub(fill, own)


def _wrapped(paragraph, indent):
    return (
        textwrap.fill(
            paragraph,
            _WIDTH,
            initial_indent=indent,
            subsequent_indent=indent + "    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        + "\n"
    )


def _shown(default):
    return f'"{default}"' if isinstance(default, str) else repr(default)


# Checks.


def number(name: str, value: Any) -> float:
    """`value` as a float, infinities included."""
    if not is_number(value) or math.isnan(value):
        raise ValueError(f"{name} must be a number, received {value!r}.")
    return float(value)


def positive(name: str, value: Any) -> float:
    """`value` as a float, positive and finite."""
    if not (is_number(value) and 0 < value < math.inf):
        raise ValueError(f"{name} must be positive and finite, received {value!r}.")
    return float(value)


def noise_multiplier(name: str, value: Any) -> float | None:
    """A noise multiplier, or None."""
    if value is None:
        return None
    value = number(name, value)
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be at least 0 and finite, received {value}.")
    return value


def batch_size(name: str, value: Any) -> int | BatchSizes | None:
    """An expected batch size, or `BatchSizes`, or None."""
    return None if value is None else batch_sizes.resolve(name, value, "It is the expected size.")


def seed(name: str, value: Any) -> int | None:
    """A seed, or None."""
    return None if value is None else whole_number(value, name, 0, "Give an integer, or None.")


def optional(kind: type) -> Callable[[str, Any], Any]:
    """The check that a value is None, or of this class, or the configuration of one."""

    def check(name, value):
        if isinstance(value, dict):
            value = keras.saving.deserialize_keras_object(value)
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{name} must be None or a {kind.__name__}, received {value!r}.")
        return value

    return check


def one_of(*allowed: Any) -> Callable[[str, Any], Any]:
    """The check that a value is one of these."""

    def check(name, value):
        if value not in allowed:
            raise ValueError(f"{name} must be one of {list(allowed)}, received {value!r}.")
        return value

    return check


def clipping_style(name: str, value: Any) -> ClippingStyle:
    """ "flat", "per_layer", or proportions of the bounds by layer."""
    if isinstance(value, dict) and value:
        shares = {str(layer): bound(f"{name}[{layer!r}]", v) for layer, v in value.items()}
        if math.inf in shares.values():
            raise ValueError(f"{name} must give finite proportions, received {value!r}.")
        return dict(sorted(shares.items()))
    return one_of("flat", "per_layer")(name, value)


def boolean(name: str, value: Any) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, received {value!r}.")
    return value


# What is refused.

#: Keras arguments that would mean something else under clipping and noise, and what to use.
REFUSED = {
    "clipnorm": "it would clip the batch gradient, which bounds no single example; use clip_norm",
    "global_clipnorm": "it would clip the batch gradient, which bounds no single example; use "
    "clip_norm",
    "clipvalue": "it would clip the batch gradient, which bounds no single example; use clip_norm",
    "loss_scale_factor": "the model scales a float16 loss itself and undoes it before the norm; "
    "leave it out",
    "gradient_accumulation_steps": "it would add noise to each micro-batch; use "
    "model.compile(..., physical_batch_size=...)",
}

_MICROBATCHES = (
    "every example is clipped alone here. Leave it out; rows that are processed at once are "
    "model.compile(..., physical_batch_size=...)"
)

#: What is called otherwise by TensorFlow Privacy, Opacus and JAX Privacy.
_CALLED_OTHERWISE = {
    "l2_norm_clip": "it is called clip_norm here",
    "num_microbatches": _MICROBATCHES,
    "unroll_microbatches": _MICROBATCHES,
    "max_grad_norm": "it is called clip_norm here",
    "expected_batch_size": "it is called batch_size here",
    "target_epsilon": "dp_keras_opt.accounting.calibrate(optimizer, sampling, steps, epsilon, "
    "delta) finds the noise_multiplier for it",
    "secure_mode": "it is called secure_noise here",
    "l2_clip_norm": "it is called clip_norm here",
    "clipping_norm": "it is called clip_norm here",
    "noise_std": "give noise_multiplier, the standard deviation over clip_norm",
    "stddev": "give noise_multiplier, the standard deviation over clip_norm",
    "noise_seed": "it is called seed here",
}


def refuse_keras_arguments(owner: str, kwargs: dict[str, Any]) -> None:
    """Takes out of `kwargs` what would mean something else here.

    Raises:
        ValueError: one of these arguments is set.
    """
    for name, reason in REFUSED.items():
        if kwargs.pop(name, None) is not None:
            raise ValueError(f"{owner} does not take {name}: {reason}.")


def refuse_foreign_names(owner: str, kwargs: dict[str, Any]) -> None:
    """Translates the names that other libraries have for the arguments.

    Raises:
        TypeError: one of these names is used.
    """
    reasons = {name: _CALLED_OTHERWISE[name] for name in kwargs if name in _CALLED_OTHERWISE}
    if reasons:
        listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise TypeError(
            f"{owner} does not take {listed}. It needs clip_norm; batch_size (the expected number "
            "of examples in a batch) and noise_multiplier may be left to fit."
        )


def refuse_noise_schedule(owner: str, kwargs: dict[str, Any]) -> None:
    """Takes the noise schedule out of `kwargs`, for optimizers that make their own.

    Raises:
        ValueError: it is set.
    """
    if kwargs.pop("noise_schedule", None) is not None:
        raise ValueError(
            f"{owner} makes its own noise schedule. For another one use DPSGD with "
            "noise_schedule=..."
        )
