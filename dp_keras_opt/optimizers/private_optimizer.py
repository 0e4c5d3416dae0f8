"""What makes a Keras optimizer private: a mixin that all optimizers of this library share."""

import math
import numbers

import keras
import tensorflow as tf

from dp_keras_opt import noise
from dp_keras_opt.clipping.query import Query
from dp_keras_opt.noise.entropy import NoiseSource
from dp_keras_opt.noise.mechanism import Release

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


def refuse_arguments(owner, kwargs):
    """Takes out of `kwargs` what would mean something else here, and refuses it where it is set."""
    for name, reason in _REFUSED.items():
        if kwargs.pop(name, None) is not None:
            raise ValueError(f"{owner} does not take {name}: {reason}.")


class _FrozenAtBuild:
    """A parameter that the noise depends on: a traced graph would not notice a later change.

    Args:
        check: function of name and value that returns the value to keep, or raises.
        later: whether None stands for "not set yet", which may be made good after the build.
    """

    def __init__(self, check, later=False):
        self.check = check
        self.later = later

    def __set_name__(self, owner, name):
        self.name = name

    def __get__(self, instance, owner=None):
        if instance is None:
            return self
        try:
            return vars(instance)["_" + self.name]
        except KeyError:  # not None: Keras skips assigning what getattr already gives
            raise AttributeError(f"{self.name} is not set yet.") from None

    def __set__(self, instance, value):
        value = self.check(self.name, value)
        current = vars(instance).get("_" + self.name)
        unset = current is None and self.later
        if getattr(instance, "built", False) and not unset:
            raise ValueError(
                f"{self.name} is fixed once the optimizer is built, because the compiled training "
                "step and the privacy ledger depend on it. Make a new optimizer and compile again."
            )
        object.__setattr__(instance, "_" + self.name, value)


def _number(name, value):
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or math.isnan(value):
        raise ValueError(f"{name} must be a number, received {value!r}.")
    return float(value)


def _clip_norm(name, value):
    value = _number(name, value)
    if value <= 0:
        raise ValueError(f"{name} must be positive, received {value}.")
    return value


def _noise_multiplier(name, value):
    if value is None:
        return None
    value = _number(name, value)
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be at least 0 and finite, received {value}.")
    return value


def _batch_size(name, value):
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise ValueError(
            f"{name} must be a positive integer, the expected batch size; received {value!r}."
        )
    return int(value)


def _one_of(*allowed):
    def check(name, value):
        if value not in allowed:
            raise ValueError(f"{name} must be one of {list(allowed)}, received {value!r}.")
        return value

    return check


def _clipping_style(name, value):
    if isinstance(value, dict) and value:
        shares = {str(layer): _clip_norm(f"{name}[{layer!r}]", v) for layer, v in value.items()}
        if math.inf in shares.values():
            raise ValueError(f"{name} must give finite proportions, received {value!r}.")
        return shares
    return _one_of("flat", "per_layer")(name, value)


def _bool(name, value):
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, received {value!r}.")
    return value


class PrivateOptimizer:
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

    #: Whether the optimizer needs public rows in each batch (`data.with_public`).
    needs_public = False

    #: The `Sampling` that `accounting.calibrate` assumed; training on other data is refused.
    calibrated_for = None

    def __init__(
        self,
        *args,
        clip_norm,
        batch_size,
        noise_multiplier=None,
        noise="gaussian",
        noise_schedule=None,
        clipping="flat",
        normalize=False,
        seed=None,
        **kwargs,
    ):
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
        # A plain object behind Keras's tracking: the state of the noise is never saved.
        object.__setattr__(self, "noise_source", NoiseSource(seed))

    def serve(self, variables):
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

    def check_sampling(self, sampling):
        """Refuses a `Sampling` for which this optimizer's sensitivity would not hold; here none."""

    def prepare(self, variables):
        """Moves the variables to the point where the gradient is taken; here they are there."""

    def query(self, scale=None, clip_norm=None):
        """A query with this optimizer's bound and style, in the geometry `scale`."""
        clip_norm = self.clip_norm if clip_norm is None else clip_norm
        return Query(scale, clip_norm, self.noise.norm, self.clipping, self.normalize)

    def queries(self):
        """The tuple of `Query` of this step, known before the data is touched."""
        return (self.query(),)

    @property
    def _clip_norms(self):
        """All bounds that `queries` uses."""
        return (self.clip_norm,)

    def releases_for(self, noise_multiplier):
        """The static tuple of `Release` of every step, at this overall noise multiplier."""
        return (Release(0, "mean", noise_multiplier, self.noise),)

    @property
    def releases(self):
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
    def second_moment_estimates(self):
        """v̂ of each variable before any floor, from released values; empty for rules without v."""
        return []

    def update(self, released):
        """Updates the variables from the privatized statistics.

        Args:
            released: the list of `noise.Released` that `noise.release` gave for `releases`.
        """
        self._apply(self._regularized(released[0].value))

    def _apply(self, gradients):
        """Keras's own `apply`, on privatized gradients: weight decay, `update_step`, EMA."""
        super().apply(gradients, self._trainable_variables)

    def _regularized(self, gradients, geometry=None):
        """Adds the gradients of the variables' regularisers, which do not depend on the data.

        Args:
            gradients: privatized gradients.
            geometry: None, or the geometry that `gradients` are in, one tensor per variable.
        """
        variables = [v for v in self._trainable_variables if v.regularizer is not None]
        if not variables:
            return gradients
        with tf.GradientTape() as tape:
            penalty = tf.add_n([tf.reduce_sum(v.regularizer(v)) for v in variables])
        extra = tape.gradient(penalty, [v.value for v in variables])
        extra = {id(v): g for v, g in zip(variables, extra, strict=True) if g is not None}
        geometry = geometry or [1.0] * len(gradients)
        return [
            g + s * tf.convert_to_tensor(extra[id(v)]) if id(v) in extra else g
            for g, s, v in zip(gradients, geometry, self._trainable_variables, strict=True)
        ]

    def apply(self, grads, trainable_variables=None):
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

    def load_own_variables(self, store):
        """Restores the optimizer's state.

        Raises:
            ValueError: the state does not fit. (Keras would warn and restart at step 0.)
        """
        if len(store.keys()) != len(self.variables):
            raise ValueError(
                f"The saved state has {len(store.keys())} variables and {type(self).__name__} has "
                f"{len(self.variables)}: it belongs to another optimizer or another model. To "
                "start afresh, load with compile=False and compile with a new optimizer."
            )
        super().load_own_variables(store)

    def get_config(self):
        config = super().get_config()
        for name in _REFUSED:
            config.pop(name, None)
        return config | {
            "clip_norm": self.clip_norm,
            "batch_size": self.batch_size,
            "noise_multiplier": self.noise_multiplier,
            "noise": keras.saving.serialize_keras_object(self.noise),
            "noise_schedule": keras.saving.serialize_keras_object(self.noise_schedule),
            "clipping": self.clipping,
            "normalize": self.normalize,
            "seed": self.seed,
        }
