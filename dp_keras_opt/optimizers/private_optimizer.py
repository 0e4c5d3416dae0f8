"""What makes a Keras optimizer private: a mixin that all optimizers of this library share."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from dp_keras_opt import filters, noise, replicas
from dp_keras_opt.checks import is_number, whole_number
from dp_keras_opt.clipping.query import Query
from dp_keras_opt.noise.entropy import NoiseSource
from dp_keras_opt.noise.mechanism import Release
from dp_keras_opt.noise.secure import SecureNoiseSource
from dp_keras_opt.optimizers import projection as projections
from dp_keras_opt.types import ClippingStyle

if TYPE_CHECKING:
    from dp_keras_opt.accounting.calibration import Calibration
    from dp_keras_opt.accounting.sampling import Sampling
    from dp_keras_opt.filters import Filter
    from dp_keras_opt.noise.mechanism import Mechanism
    from dp_keras_opt.noise.release import Released
    from dp_keras_opt.noise.schedules import NoiseSchedule
    from dp_keras_opt.optimizers.projection import GaLore

_Kept = TypeVar("_Kept")

#: Beyond them, squares of the gradients that they bound leave the range of float32.
_LEAST_CLIP_NORM, _MOST_CLIP_NORM = 1e-12, 1e18

#: Keras arguments that would mean something else under clipping and noise, and what to use.
_REFUSED = {
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


def refuse_arguments(owner, kwargs):
    """Takes out of `kwargs` what would mean something else here, and refuses it where it is set."""
    for name, reason in _REFUSED.items():
        if kwargs.pop(name, None) is not None:
            raise ValueError(f"{owner} does not take {name}: {reason}.")


class _FrozenAtBuild(Generic[_Kept]):
    """A parameter that the noise depends on: a traced graph would not notice a later change.

    Args:
        check: function of name and value that returns the value to keep, or raises.
        later: whether None stands for "not set yet", which may be made good after the build.
    """

    def __init__(self, check: Callable[[str, Any], _Kept], later: bool = False) -> None:
        self.check = check
        self.later = later

    def __set_name__(self, owner, name):
        self.name = name

    def __get__(self, instance: Any, owner: type | None = None) -> _Kept:
        if instance is None:
            return self  # type: ignore[return-value]
        try:
            return vars(instance)["_" + self.name]
        except KeyError:  # not None: Keras skips assigning what getattr already gives
            raise AttributeError(f"{self.name} is not set yet.") from None

    def __set__(self, instance: Any, value: Any) -> None:
        value = self.check(self.name, value)
        current = vars(instance).get("_" + self.name)
        unset = current is None and self.later
        if getattr(instance, "built", False) and not unset:
            raise ValueError(
                f"{self.name} is fixed once the optimizer is built, because the compiled training "
                "step and the privacy ledger depend on it. Make a new optimizer and compile again."
            )
        object.__setattr__(instance, "_" + self.name, value)


def _number(name, value) -> float:
    if not is_number(value) or math.isnan(value):
        raise ValueError(f"{name} must be a number, received {value!r}.")
    return float(value)


def _clip_norm(name: str, value: Any) -> float:
    value = _number(name, value)
    if value <= 0:
        raise ValueError(f"{name} must be positive, received {value}.")
    if value < _LEAST_CLIP_NORM:
        raise ValueError(
            f"{name}={value} is too small for the squares of float32 gradients, which would count "
            f"as 0: norms would not be bounded. Use at least {_LEAST_CLIP_NORM}, and scale the "
            "learning rate instead."
        )
    if _MOST_CLIP_NORM < value < math.inf:
        raise ValueError(
            f"{name}={value} is too large: gradients and noise of that size leave the range of "
            f"float32. Use at most {_MOST_CLIP_NORM}."
        )
    return value


def _noise_multiplier(name: str, value: Any) -> float | None:
    if value is None:
        return None
    value = _number(name, value)
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be at least 0 and finite, received {value}.")
    return value


def _batch_size(name: str, value: Any) -> int:
    return whole_number(value, name, 1, "Give the expected batch size.")


def _one_of(*allowed):
    def check(name, value):
        if value not in allowed:
            raise ValueError(f"{name} must be one of {list(allowed)}, received {value!r}.")
        return value

    return check


def _clipping_style(name: str, value: Any) -> ClippingStyle:
    if isinstance(value, dict) and value:
        shares = {str(layer): _clip_norm(f"{name}[{layer!r}]", v) for layer, v in value.items()}
        if math.inf in shares.values():
            raise ValueError(f"{name} must give finite proportions, received {value!r}.")
        return shares
    return _one_of("flat", "per_layer")(name, value)


def _bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, received {value!r}.")
    return value


class PrivateOptimizer(replicas.UpdatesOnce):
    """Mixin over `keras.optimizers.Optimizer`: what is asked of the data, and what comes back.

    A subclass inherits from this first and from a Keras optimizer second. Most write only
    `update_step`, the Keras way; one that needs another geometry or several statistics overrides
    `queries`, `releases_for` and `update`.

    Args:
        clip_norm: C > 0, the bound on the L2 norm of each example's gradient. `math.inf` only
            together with noise_multiplier=0, which gives no privacy.
        batch_size: B, the expected batch size; the noisy sum is divided by it. A public constant,
            never the realised size.
        noise_multiplier: σ ≥ 0, the noise's standard deviation over C. None until
            `accounting.calibrate` sets it. 0 trains without privacy, and the ledger says so.
        noise: a mechanism of `dp_keras_opt.noise`, or its name.
        noise_schedule: factors α_t on σ fixed in advance; None for constant noise.
        clipping: "flat", one norm over all variables; "per_layer", one for each layer, with bounds
            C/√L for L layers; or a dict from layer names to the proportions of their bounds C_l,
            where √ΣC_l² = C (for noise that is calibrated in L1: ΣC_l = C).
        normalize: False for clip(g; C) = g·min(1, C/‖g‖); True for g·C/(‖g‖ + 0.01).
        seed: None, noise from the operating system's entropy. An integer makes the noise
            reproducible and voids the guarantee.
        secure_noise: whether the noise withstands attacks on floating-point numbers and on the
            random generator (`noise.secure`). Slower, and not for steps compiled by XLA.
        gradient_filter: None, or an object of `dp_keras_opt.filters` or the name of a preset, which
            smooths the privatized gradients over time. The rule then steps along its output; second
            moments come from the unfiltered gradients. It takes the place of Adam's first moment.
        projection: None, or an `optimizers.GaLore`, for optimizers that take one.
        *args, **kwargs: those of the Keras optimizer.

    Raises:
        ValueError: an argument is out of range, or is one of Keras's that would mean something
            else here.
    """

    clip_norm = _FrozenAtBuild(_clip_norm)
    batch_size = _FrozenAtBuild(_batch_size)
    noise_multiplier = _FrozenAtBuild(_noise_multiplier, later=True)
    noise = _FrozenAtBuild(lambda name, value: noise.get(value))
    noise_schedule = _FrozenAtBuild(lambda name, value: noise.schedules.get(value))
    clipping = _FrozenAtBuild(_clipping_style)
    normalize = _FrozenAtBuild(_bool)
    secure_noise = _FrozenAtBuild(_bool)
    gradient_filter = _FrozenAtBuild(lambda name, value: filters.get(value))
    projection = _FrozenAtBuild(lambda name, value: projections.get(value))

    #: Whether the rule can work in a subspace: it moves the variables by `_descend` alone.
    takes_projection = False

    #: Whether the optimizer needs public rows in each batch (`data.with_public`).
    needs_public = False

    #: The `Sampling` that `accounting.calibrate` assumed; training on other data is refused.
    calibrated_for: Sampling | None = None

    #: The steps and the budget that it was for.
    calibration: Calibration | None = None

    def __new__(cls, *args: Any, **kwargs: Any):
        # Here, because `__init__` is not reached where clip_norm or batch_size is missing.
        reasons = {name: _CALLED_OTHERWISE[name] for name in kwargs if name in _CALLED_OTHERWISE}
        if reasons:
            listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
            raise TypeError(
                f"{cls.__name__} does not take {listed}. It needs clip_norm, batch_size "
                "(the expected number of examples in a batch) and noise_multiplier."
            )
        return super().__new__(cls)

    def __init__(
        self,
        *args: Any,
        clip_norm: float,
        batch_size: int,
        noise_multiplier: float | None = None,
        noise: Mechanism | str = "gaussian",
        noise_schedule: NoiseSchedule | Sequence[float] | np.ndarray | None = None,
        clipping: ClippingStyle = "flat",
        normalize: bool = False,
        seed: int | None = None,
        secure_noise: bool = False,
        gradient_filter: Filter | str | None = None,
        projection: GaLore | None = None,
        **kwargs: Any,
    ) -> None:
        refuse_arguments(type(self).__name__, kwargs)
        super().__init__(*args, **kwargs)
        self.clip_norm = clip_norm
        self.batch_size = batch_size
        self.noise_multiplier = noise_multiplier
        self.noise = noise
        self.noise_schedule = noise_schedule
        self.clipping = clipping
        self.normalize = normalize
        self.seed = seed
        self.secure_noise = secure_noise
        self.gradient_filter = gradient_filter
        self.projection = projection
        # A plain object behind Keras's tracking: the state of the noise is never saved.
        if secure_noise and seed is not None:
            raise ValueError(
                "secure_noise=True and a seed contradict each other: whoever knows the seed can "
                "subtract the noise. Leave one of them out."
            )
        source = SecureNoiseSource() if secure_noise else NoiseSource(seed)
        object.__setattr__(self, "noise_source", source)
        object.__setattr__(self, "_memory", [])

    @property
    def smooths(self) -> bool:
        """Whether the rule itself averages over time what it is given."""
        return False

    def build(self, variables: Sequence[keras.Variable]) -> None:
        if self.built:
            return
        if self.projection is not None:
            self.check_projection()
            self.projection.plan(variables)
        if self.gradient_filter is not None and self.smooths:
            warnings.warn(
                f"{type(self).__name__} has momentum and a gradient_filter: both smooth, and the "
                "step lags behind the gradient by their sum. Set one of them only.",
                stacklevel=2,
            )
        super().build(variables)
        self._remember_noise(variables)
        if self.projection is not None:
            self.projection.build(self)
        if self.gradient_filter is not None:
            self.gradient_filter.build(self, variables)

    def _remember_noise(self, variables):
        """Makes the memory of correlated noise, for each draw that a step takes."""
        if not self.noise.is_correlated:
            return
        if not isinstance(self.noise_schedule, noise.schedules.Constant):
            raise ValueError(
                f"{type(self.noise).__name__} noise and a noise_schedule are not accounted "
                "together. Leave noise_schedule out."
            )
        shapes = [tuple(variable.shape) for variable in variables]
        for index, release in enumerate(self.releases_for(1.0)):
            if not release.is_public and release.multiplier:
                for part in range(2 if release.statistic == "mean_and_square" else 1):
                    self.noise_source.remember((index, part), self.noise.slots, shapes)

    def check_projection(self) -> None:
        """Refuses a projection where the rule does not work in a subspace."""
        if not self.takes_projection:
            raise ValueError(
                f"{type(self).__name__} does not take a projection. DPSGD, DPAdam, DPAdagrad, "
                "DPRMSprop and DPYogi do."
            )

    def add_variable(
        self, shape: Sequence[int], initializer: Any = "zeros", *args: Any, **kwargs: Any
    ) -> keras.Variable:
        """Keras's; what is added once the rule is built is what `forget` forgets."""
        variable = super().add_variable(shape, initializer, *args, **kwargs)
        if self.built:  # before that, Keras adds its moving averages
            self._memory.append((variable, initializer))
        return variable

    def add_variable_from_reference(
        self,
        reference_variable: keras.Variable,
        name: str | None = None,
        initializer: Any = "zeros",
    ) -> keras.Variable:
        """Keras's; where there is a projection, what the rule remembers is of the subspace."""
        shape = None
        if self.built and self.projection is not None:
            shape = self.projection.shape_of(reference_variable)
        if shape is None:
            return super().add_variable_from_reference(reference_variable, name, initializer)
        name = f"{reference_variable.path.replace('/', '_')}_{name}"
        return self.add_variable(shape, initializer, dtype=reference_variable.dtype, name=name)

    def serve(self, variables: Sequence[keras.Variable]) -> None:
        """Builds the optimizer for these variables, or checks that it was built for them.

        Raises:
            ValueError: it was built for others: statistics and variables would be mixed up.
        """
        if not self.built:
            self.build(variables)
        if [id(v) for v in self._trainable_variables] != [id(v) for v in variables]:
            raise ValueError(
                f"This {type(self).__name__} was built for other variables: it served another "
                "model, or layers were frozen or unfrozen since. Compile with a new optimizer."
            )

    # What is asked of the data.

    def check_sampling(self, sampling: Sampling) -> None:
        """Refuses a `Sampling` for which sensitivity or noise would not be as accounted."""
        self.noise.check_sampling(sampling)

    def prepare(self, variables: Sequence[keras.Variable]) -> None:
        """Moves the variables to the point where the gradient is taken; here they are there."""

    def query(
        self, scale: Sequence[tf.Tensor] | None = None, clip_norm: float | tf.Tensor | None = None
    ) -> Query:
        """A query with this optimizer's bound and style, in the geometry `scale`."""
        if scale is not None:  # clipping works in float32, whatever the variables are
            scale = [tf.cast(part, tf.float32) for part in scale]
        clip_norm = self.clip_norm if clip_norm is None else clip_norm
        return Query(scale, clip_norm, self.noise.norm, self.clipping, self.normalize)

    def queries(self) -> tuple[Query, ...]:
        """The tuple of `Query` of this step, known before the data is touched."""
        return (self.query(),)

    @property
    def _clip_norms(self):
        """All bounds that `queries` uses."""
        return (self.clip_norm,)

    def releases_for(self, noise_multiplier: float) -> tuple[Release, ...]:
        """The static tuple of `Release` of every step, at this overall noise multiplier."""
        return (Release(0, "mean", noise_multiplier, self.noise),)

    @property
    def releases(self) -> tuple[Release, ...]:
        """What every step publishes: draws the noise and yields the accountant's event.

        Raises:
            ValueError: the noise multiplier is not set, or the clip norm gives no bound.
        """
        if self.noise_multiplier is None:
            raise ValueError(
                "noise_multiplier is not set. Pass it, or find it with "
                "dp_keras_opt.accounting.calibrate(optimizer, sampling, steps, epsilon, delta)."
            )
        unbounded = any(math.isinf(bound) for bound in self._clip_norms)
        if unbounded and (self.noise_multiplier > 0 or self.normalize):
            raise ValueError(
                "An infinite clip_norm bounds nothing and allows only noise_multiplier=0 without "
                "normalize, which trains without privacy."
            )
        return self.releases_for(self.noise_multiplier)

    # What is done with the answers: post-processing.

    @property
    def second_moment_estimates(self) -> list[tf.Tensor]:
        """v̂ of each variable before any floor, from released values; empty for rules without v."""
        return []

    def update(self, released: Sequence[Released]) -> None:
        """Updates the variables from the privatized statistics.

        Args:
            released: the list of `noise.Released` that `noise.release` gave for `releases`.
        """
        self._apply(self._regularized(released[0].value), released[0].noise_std)

    def _apply(self, gradients, noise_std):
        """Project → filter → Keras's own `apply`: weight decay, `update_step`, EMA.

        Args:
            gradients: privatized gradients, in the geometry of 1.
            noise_std: std of the noise in their coordinates; a scalar, or a list of one tensor per
                variable.
        """
        if self.projection is not None:
            gradients = self.projection.project(self, gradients)
        # Tensors of the step that is being traced, behind Keras's tracking.
        object.__setattr__(self, "_unfiltered", gradients)
        super().apply(self._filtered(gradients, noise_std), self._trainable_variables)

    def _filtered(self, gradients, noise_std):
        if self.gradient_filter is None:
            return gradients
        stds = noise_std if isinstance(noise_std, list) else [noise_std] * len(gradients)
        power = tf.add_n(
            [
                tf.reduce_sum(tf.square(tf.cast(std, tf.float32)) + tf.zeros(g.shape))
                for std, g in zip(stds, gradients, strict=True)
            ]
        )
        return self.gradient_filter(self, gradients, power)

    def _descend(self, variable, step):
        """w ← w − step, the step lifted out of the subspace where the rule works in one."""
        if self.projection is not None:
            index = self._get_variable_index(variable)
            step = self.projection.lift(index, step, variable.shape)
        self.assign_sub(variable, step)

    def in_subspace(self, index: int, gradient: tf.Tensor) -> tf.Tensor:
        """A gradient of one variable where the rule works: projected, if it works in a subspace."""
        return gradient if self.projection is None else self.projection.reduce(index, gradient)

    def _steps(self, done):
        """How many of the `done` steps the moments hold: all, unless a projection resets them."""
        if self.projection is None or not self.projection.reset:
            return done
        gap = self.projection.update_gap
        return ops.where(done > 0, (done - 1) % gap + 1, 0)

    def forget(self, keep: Sequence[keras.Variable]) -> None:
        """Sets what was remembered since the build to where it started, except `keep`."""
        kept = {id(variable) for variable in keep}
        for variable, initializer in self._memory:
            if id(variable) not in kept:
                start = keras.initializers.get(initializer)
                self.assign(variable, start(variable.shape, dtype=variable.dtype))

    def _regularized(self, gradients, geometry=None):
        """Adds the gradients of the variables' regularisers, which do not depend on the data.

        Args:
            gradients: privatized gradients.
            geometry: None, or the geometry that `gradients` are in, one tensor per variable.
        """
        variables = [v for v in self._trainable_variables if v.regularizer is not None]
        if not variables:
            return gradients
        values = [tf.convert_to_tensor(v) for v in variables]
        with tf.GradientTape() as tape:
            tape.watch(values)
            pairs = zip(variables, values, strict=True)
            penalty = tf.add_n([tf.reduce_sum(v.regularizer(value)) for v, value in pairs])
        extra = tape.gradient(penalty, values)
        extra = {id(v): g for v, g in zip(variables, extra, strict=True) if g is not None}
        geometry = geometry or [1.0] * len(gradients)
        return [
            g + s * tf.convert_to_tensor(extra[id(v)]) if id(v) in extra else g
            for g, s, v in zip(gradients, geometry, self._trainable_variables, strict=True)
        ]

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Refused: these would be raw gradients.

        Raises:
            RuntimeError: always. Only `DPModel` clips and adds noise.
        """
        raise RuntimeError(
            f"{type(self).__name__} was given a raw batch gradient, which is neither clipped per "
            "example nor noised: the training would not be private. Train a "
            "dp_keras_opt.DPModel, or wrap the model: dp_keras_opt.make_private(model)."
        )

    # Saving and loading.

    def load_own_variables(self, store: Any) -> None:
        """Restores the optimizer's state; one that is not built yet starts afresh, with a warning.

        Raises:
            ValueError: it is built, and the state does not fit. (Keras would restart at step 0.)
        """
        if len(store.keys()) != len(self.variables):
            if not self.built:
                warnings.warn(
                    f"{type(self).__name__} is not built yet and starts afresh: the saved state of "
                    "the optimizer is not restored. To go on where it stopped, load the whole "
                    "model, or call optimizer.build(model.trainable_variables) before.",
                    stacklevel=2,
                )
                return
            raise ValueError(
                f"The saved state has {len(store.keys())} variables and {type(self).__name__} has "
                f"{len(self.variables)}: it belongs to another optimizer or another model. To "
                "start afresh, load with compile=False and compile with a new optimizer."
            )
        super().load_own_variables(store)

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        for name in _REFUSED:
            config.pop(name, None)
        return config | {name: self._serialized(name) for name in PRIVATE_ARGUMENTS}

    def _serialized(self, name):
        value = getattr(self, name)
        plain = value is None or isinstance(value, bool | int | float | str | dict)
        return value if plain else keras.saving.serialize_keras_object(value)


#: The arguments that every private optimizer has on top of its Keras counterpart.
PRIVATE_ARGUMENTS = tuple(
    name
    for name, parameter in inspect.signature(PrivateOptimizer.__init__).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
)
