"""Low-pass filters on privatized gradients.

Noise spreads over all frequencies, the gradient of a slowly moving model lies in the low ones. A
filter between privatization and update rule keeps these. It is post-processing: it costs no
privacy.

Reference: Zhang, Bu, Hong and Razaviyayn, "DOPPLER: differentially private optimizers with low-pass
filter for privacy noise reduction", NeurIPS 2024, arXiv:2408.13460v1.
"""

from __future__ import annotations

import abc
import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf
from keras import ops
from scipy import signal

from dp_keras_opt.checks import whole_number

if TYPE_CHECKING:
    from dp_keras_opt.clipping.query import Point
    from dp_keras_opt.optimizers.private_optimizer import PrivateOptimizer

#: The filters of Tables 2 and 4 of Zhang et al. (arXiv:2408.13460v1): b, and a without its
#: leading 1.
PRESETS = {
    "none": ([1.0], []),
    "momentum": ([0.1], [-0.9]),
    "first_order_v1": ([1 / 11, 1 / 11], [-9 / 11]),
    "first_order_v2": ([3 / 11, -1 / 11], [-9 / 11]),
    "second_order": ([1 / 58, 2 / 58, 1 / 58], [-92 / 58, 38 / 58]),
    "f1": ([0.075, 0.025], [-0.9]),
    "f2": ([0.025, 0.075], [-0.9]),
    "f3": ([0.1, 0.1], [-0.8]),
    "f4": ([0.2, 0.2], [-0.6]),
    "f5": ([0.025, 0.05, 0.025], [-0.9]),
    "f6": ([0.025, 0.025], [-1.8, 0.85]),
}


class Filter(abc.ABC):
    """What an optimizer takes as `gradient_filter`: gradients of all steps so far → one.

    A filter has buffers, which belong to one optimizer: each optimizer takes a copy. They are
    optimizer variables, saved and loaded with it.
    """

    #: Whether it has gradients taken at other points than the weights.
    chooses_points = False

    @property
    def smooths(self) -> bool:
        """Whether what it gives out is an average over time, which lags behind the gradient."""
        return True

    @abc.abstractmethod
    def build(
        self, optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]
    ) -> None:
        """Creates the buffers, as variables of the optimizer."""

    @abc.abstractmethod
    def __call__(
        self,
        optimizer: keras.optimizers.Optimizer,
        gradients: list[tf.Tensor],
        noise_power: float | tf.Tensor,
    ) -> list[tf.Tensor]:
        """The filtered gradients of this step; advances the buffers.

        Args:
            optimizer: that the filter was built for.
            gradients: privatized gradients, one tensor per variable.
            noise_power: the expected squared norm of the noise in them, a scalar.
        """

    def points(self, optimizer: PrivateOptimizer) -> Sequence[Point] | None:
        """Where the gradients of this step are taken, known before the data is touched.

        None stands for the weights; others only where it `chooses_points`.
        """
        return None

    @abc.abstractmethod
    def get_config(self) -> dict[str, Any]:
        """Constructor arguments, as in Keras."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Filter:
        """The filter with these constructor arguments."""
        return cls(**config)


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class LowPass(Filter):
    """A linear filter with constant coefficients, without bias from its first step on.

    m_t = Σ_τ b_τ·g̃_{t−τ} − Σ_{τ≥1} a_τ·m_{t−τ}, and the output is m_t/c_t, where c_t is the same
    recursion run on ones: the weights of the gradients so far sum to 1 at every step. In terms of
    `scipy.signal`: `lfilter(b, [1, *a], g) / lfilter(b, [1, *a], ones)`.

    Costs max(len(a), len(b) − 1) buffers of the size of the model.

    Args:
        b: b_0, b_1, …, at least one number.
        a: a_1, a_2, …, without the leading 1. Defaults to none: a moving average.

    Raises:
        ValueError: a coefficient is not finite or there are none; a pole is on or outside the unit
            circle, so the filter does not forget; or it passes no constant signal, at all or at
            some step after its start.

    Reference: Zhang, Bu, Hong and Razaviyayn, "DOPPLER: differentially private optimizers with
    low-pass filter for privacy noise reduction", NeurIPS 2024, arXiv:2408.13460v1, Algorithm 2.
    """

    def __init__(
        self, b: Sequence[float] | np.ndarray, a: Sequence[float] | np.ndarray = ()
    ) -> None:
        self.b = _coefficients("b", b)
        self.a = _coefficients("a", a)
        if not self.b:
            raise ValueError("A filter needs at least one coefficient b that is not 0.")
        radius = max(np.abs(np.roots([1.0, *self.a])), default=0.0)
        if radius >= 1:
            raise ValueError(
                f"The filter with a={list(self.a)} has a pole of modulus {radius:.6g}; only inside "
                "of the unit circle does it forget its past. Signs are those of scipy.signal: "
                "momentum 0.9 is a=[-0.9]."
            )
        total = float(np.sum(np.abs(self.b)))
        if abs(np.sum(self.b)) <= 1e-9 * total:
            raise ValueError(
                f"The filter with b={list(self.b)} has a zero gain for constant signals (Σb = 0): "
                "it would remove the gradient and keep the noise."
            )
        self._check_start()

    def _check_start(self):
        """Refuses filters whose c_t vanishes at some step: m_t/c_t would be noise times ∞."""
        response = self._whole_response()
        sums, magnitudes = np.cumsum(response), np.cumsum(np.abs(response))
        (vanishing,) = np.nonzero(np.abs(sums) <= 1e-3 * magnitudes)
        if len(vanishing):
            raise ValueError(
                f"At step {vanishing[0] + 1} the weights of the filter b={list(self.b)}, "
                f"a={list(self.a)} sum to about 0, so that they cannot be made to sum to 1."
            )

    @classmethod
    def preset(cls, name: str) -> LowPass:
        """A filter by its name in `filters.PRESETS`.

        Raises:
            ValueError: there is none by that name.
        """
        if name not in PRESETS:
            raise ValueError(f"There is no filter {name!r}; use one of {sorted(PRESETS)}.")
        return cls(*PRESETS[name])

    @classmethod
    def butterworth(cls, order: int, cutoff: float) -> LowPass:
        """The Butterworth filter of this order, flat below the cut-off (scipy.signal.butter).

        Args:
            order: number of poles.
            cutoff: between 0 and 1, in units of half a cycle per step.
        """
        return cls._designed(signal.butter(order, cutoff))

    @classmethod
    def chebyshev(cls, order: int, cutoff: float, ripple: float = 1.0) -> LowPass:
        """The Chebyshev filter of type I: steeper, with ripples below the cut-off.

        Args:
            order: number of poles.
            cutoff: between 0 and 1, in units of half a cycle per step.
            ripple: its height, in decibels.
        """
        return cls._designed(signal.cheby1(order, ripple, cutoff))

    @classmethod
    def _designed(cls, coefficients):
        b, a = coefficients
        return cls(b / a[0], a[1:] / a[0])

    @property
    def order(self) -> int:
        """The number of buffers."""
        return max(len(self.a), len(self.b) - 1)

    def build(
        self, optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]
    ) -> None:
        states = range(1, self.order + 1)
        self._states = [
            [optimizer.add_variable_from_reference(v, f"filter_{i}") for i in states]
            for v in variables
        ]
        # The filter of ones, in float64, since an error in c_t would stay.
        self._unit = [
            optimizer.add_variable((), dtype="float64", name=f"filter_of_ones_{i}") for i in states
        ]

    def __call__(
        self,
        optimizer: keras.optimizers.Optimizer,
        gradients: list[tf.Tensor],
        noise_power: float | tf.Tensor,
    ) -> list[tf.Tensor]:
        weight = self._advance(optimizer, tf.ones((), tf.float64), self._unit)
        return [
            self._advance(optimizer, gradient, states) / tf.cast(weight, gradient.dtype)
            for gradient, states in zip(gradients, self._states, strict=True)
        ]

    def _advance(self, optimizer, x, buffers):
        """One step of the recursion, in the transposed direct form: one buffer an order.

        y = b_0·x + s_1;  s_i ← p·s_i + b_i·x − a_i·y + s_{i+1}, in powers of z − p. With p = 0 that
        is the textbook's form. Poles of a low-pass filter lie close to 1; there p = 1 (the delta
        form) adds small increments to the buffers, and so keeps float32's digits.
        """
        p = 1.0 if self.a else 0.0
        b, a = (
            np.poly1d([*c, *[0.0] * (1 + self.order - len(c))])(np.poly1d([1.0, p])).coeffs
            for c in (self.b, [1.0, *self.a])
        )
        states = [tf.cast(buffer, x.dtype) for buffer in buffers]
        y = _weighted_sum((b[0], x), *((1.0, s) for s in states[:1]))
        for i, (buffer, state) in enumerate(zip(buffers, states, strict=True), 1):
            following = ((1.0, s) for s in states[i : i + 1])
            new = _weighted_sum((p, state), (b[i], x), (-a[i], y), *following)
            optimizer.assign(buffer, new)
        return y

    # Analysis.

    def impulse_response(self, steps: int) -> np.ndarray:
        """κ_0, …, κ_{steps−1}: the weight of the gradient τ steps ago, once c_t has settled up to
        the factor of the DC gain."""
        impulse = np.zeros(steps)
        impulse[0] = 1.0
        return signal.lfilter(self.b, [1.0, *self.a], impulse)

    def frequency_response(
        self, frequencies: int | np.ndarray = 512
    ) -> tuple[np.ndarray, np.ndarray]:
        """The gain of oscillations (scipy.signal.freqz).

        Args:
            frequencies: how many, between 0 and half a cycle per step; or an array of them, in
                cycles per step.

        Returns:
            (frequencies in cycles per step, complex gains).
        """
        frequencies = np.linspace(0, 0.5, frequencies) if np.ndim(frequencies) == 0 else frequencies
        return signal.freqz(self.b, [1.0, *self.a], worN=np.asarray(frequencies), fs=1.0)

    def _whole_response(self):
        """The impulse response until the slowest pole has decayed to 1e-9 (or 10⁵ steps)."""
        slowest = max(np.abs(np.roots([1.0, *self.a])), default=0.0)
        steps = np.log(1e-9) / np.log(slowest) if slowest > 0 else 0
        return self.impulse_response(len(self.b) + int(min(steps, 1e5)) + 1)

    @property
    def noise_gain(self) -> float:
        """Σκ²/(Σκ)²: the variance of filtered white noise, over that of the noise."""
        response = self._whole_response()
        return float(np.sum(response**2) / np.sum(response) ** 2)

    def get_config(self) -> dict[str, Any]:
        return {"b": list(self.b), "a": list(self.a)}

    def __repr__(self):
        return f"LowPass(b={list(self.b)}, a={list(self.a)})"


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class OptimalFIR(Filter):
    """A moving average whose weights follow the signal-to-noise ratio during training.

    The auto-correlation c_τ of the gradients is estimated from the privatized ones,

        c_τ = E[⟨g̃_t, g̃_{t−τ}⟩ − ½·max(‖g̃_{t−τ}‖² − P, 0)] / E[max(‖g̃_t‖² − P, 10⁻³)],   c_0 = ½,

    P being the expected squared norm of the noise and E exponential means, kept within ±c_0; the
    weights are `optimal_weights(c)` over the gradients that there are. Costs taps − 1 buffers of
    the size of the model. Made for noise that is independent from step to step.

    Args:
        taps: N ≥ 2, how many gradients are averaged.
        weighting: "exact", the maximiser of the signal-to-noise ratio; "paper", proportional to c.
        decay: of the means E, between 0 and 1. Defaults to 0.99.

    Reference: Zhang, Bu, Hong and Razaviyayn, "DOPPLER: differentially private optimizers with
    low-pass filter for privacy noise reduction", NeurIPS 2024, arXiv:2408.13460v1, section 4.2. The
    exact weights are not in it.
    """

    def __init__(
        self, taps: int, weighting: Literal["exact", "paper"] = "exact", decay: float = 0.99
    ) -> None:
        taps = whole_number(taps, "taps", 2)
        if weighting not in ("exact", "paper"):
            raise ValueError(f"weighting must be 'exact' or 'paper', received {weighting!r}.")
        if not 0 <= decay < 1:
            raise ValueError(f"decay must be in [0, 1), received {decay!r}.")
        self.taps = int(taps)
        self.weighting = weighting
        self.decay = float(decay)

    def build(
        self, optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]
    ) -> None:
        names = [f"filter_{i}" for i in range(1, self.taps)]
        self._past = [
            [optimizer.add_variable_from_reference(v, name) for name in names] for v in variables
        ]

        def vector(name):
            return optimizer.add_variable((self.taps,), dtype="float32", name=name)

        # For each lag: the means of numerator and of their weights, of which the latter are 0 at
        # first and grow to 1; at lag 0, where c is known, the denominator.
        self._products, self._weights = vector("filter_products"), vector("filter_weights")

    def __call__(
        self,
        optimizer: keras.optimizers.Optimizer,
        gradients: list[tf.Tensor],
        noise_power: float | tf.Tensor,
    ) -> list[tf.Tensor]:
        past = [
            [tf.cast(v, g.dtype) for v in variables]
            for g, variables in zip(gradients, self._past, strict=True)
        ]
        history = [gradients, *zip(*past, strict=True)]  # history[τ]: the gradients of t − τ
        correlation, count = self._estimate(optimizer, history, noise_power)
        weights = tf.unstack(optimal_weights(correlation, self.weighting, count))
        for variables, (*kept, _) in zip(self._past, zip(*history, strict=True), strict=True):
            for variable, gradient in zip(variables, kept, strict=True):
                optimizer.assign(variable, gradient)
        return [
            tf.add_n([tf.cast(w, g.dtype) * g for w, g in zip(weights, lags, strict=True)])
            for lags in zip(*history, strict=True)
        ]

    def _estimate(self, optimizer, history, noise_power):
        """Takes in the newest gradients.

        Returns:
            (c (N,), how many gradients there are, at most N).
        """
        noise_power = tf.cast(noise_power, tf.float32)
        signal_power = [_inner(g, g) - noise_power for g in history]
        terms = [tf.maximum(signal_power[0], 1e-3)]
        for lagged, power in zip(history[1:], signal_power[1:], strict=True):
            terms.append(_inner(history[0], lagged) - 0.5 * tf.maximum(power, 0.0))
        weights = ops.convert_to_tensor(self._weights)
        steps_seen = tf.reduce_sum(tf.cast(weights > 0, tf.int32))  # before this one
        exists = tf.range(self.taps) <= steps_seen
        products = _average(ops.convert_to_tensor(self._products), tf.stack(terms), self.decay)
        products, weights = (
            tf.where(exists, new, 0.0)
            for new in (products, _average(weights, tf.ones_like(weights), self.decay))
        )
        optimizer.assign(self._products, products)
        optimizer.assign(self._weights, weights)
        means = tf.math.divide_no_nan(products, weights)
        correlation = tf.clip_by_value(means / means[0], -0.5, 0.5)
        correlation = tf.concat([[0.5], correlation[1:]], axis=0)
        return correlation, tf.minimum(steps_seen + 1, self.taps)

    def get_config(self) -> dict[str, Any]:
        return {"taps": self.taps, "weighting": self.weighting, "decay": self.decay}


def optimal_weights(
    correlation: npt.ArrayLike,
    weighting: Literal["exact", "paper"] = "exact",
    count: int | tf.Tensor | None = None,
) -> tf.Tensor:
    """The weights b (Σb = 1) of a moving average, for this auto-correlation.

    Args:
        correlation: c_0 = ½, c_1, …, (N,), NumPy or TensorFlow.
        weighting: "exact", b_τ = (c_τ + √(Σc²/N))/(Σc + √(N·Σc²)), which maximises `snr`; "paper",
            b_τ = max(c_τ, 0)/Σ max(c, 0).
        count: None for all, or how many of the N there are; the weights of the others are 0.
    """
    c = tf.convert_to_tensor(correlation)
    exists = tf.range(c.shape[0]) < (c.shape[0] if count is None else count)
    c = tf.where(exists, c, 0.0)
    if weighting == "paper":
        return tf.maximum(c, 0.0) / tf.reduce_sum(tf.maximum(c, 0.0))
    size = tf.reduce_sum(tf.cast(exists, c.dtype))
    weights = tf.where(exists, c + tf.sqrt(tf.reduce_sum(c**2) / size), 0.0)
    return weights / tf.reduce_sum(weights)


def get(identifier: Filter | str | Mapping[str, Any] | None) -> Filter | None:
    """Resolves a filter: None, an object, the name of a preset, or a serialised one; a copy.

    Raises:
        ValueError: nothing is known by that name.
    """
    if identifier is None:
        return None
    if isinstance(identifier, dict):
        identifier = keras.saving.deserialize_keras_object(identifier)
    if isinstance(identifier, str):
        identifier = LowPass.preset(identifier)
    if not isinstance(identifier, Filter):
        raise ValueError(
            "gradient_filter must be the name of a preset or an object of dp_keras_opt.filters, "
            f"received {identifier!r}."
        )
    return copy.copy(identifier)


class AtPoints(Filter):
    """Chooses where gradients are taken, and leaves what is made of them to another filter.

    A subclass says where (`points`), and what it keeps for the next step (`_prepare`, `_keep`).

    Args:
        then: None, or the filter that g̃_t then goes through, as `gradient_filter` is given.

    Raises:
        ValueError: `then` chooses points, too.
    """

    chooses_points = True

    def __init__(self, then: Filter | str | Mapping[str, Any] | None = None) -> None:
        self.then = get(then)
        if self.then is not None and self.then.chooses_points:
            raise ValueError(
                f"{type(self).__name__} chooses where the gradient is taken, and "
                f"{type(self.then).__name__} wants it elsewhere. Give one of the two as "
                "gradient_filter."
            )

    @abc.abstractmethod
    def _prepare(
        self, optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]
    ) -> None:
        """Creates its own buffers."""

    @abc.abstractmethod
    def _keep(self, optimizer: keras.optimizers.Optimizer, gradients: list[tf.Tensor]) -> None:
        """Advances its own buffers, when this step's gradients are released."""

    def build(
        self, optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]
    ) -> None:
        self._prepare(optimizer, variables)
        self.then = get(self.then)  # its buffers belong to this optimizer alone
        if self.then is not None:
            self.then.build(optimizer, variables)

    def __call__(
        self,
        optimizer: keras.optimizers.Optimizer,
        gradients: list[tf.Tensor],
        noise_power: float | tf.Tensor,
    ) -> list[tf.Tensor]:
        self._keep(optimizer, gradients)
        return gradients if self.then is None else self.then(optimizer, gradients, noise_power)

    def get_config(self) -> dict[str, Any]:
        return {"then": self.then and keras.saving.serialize_keras_object(self.then)}

    def __repr__(self):
        own = {name: value for name, value in self.get_config().items() if name != "then"}
        arguments = [f"{name}={value}" for name, value in own.items()]
        return f"{type(self).__name__}({', '.join([*arguments, f'then={self.then!r}'])})"


def _coefficients(name, values):
    values = np.asarray(values, np.float64)
    if values.ndim != 1 or not np.isfinite(values).all():
        raise ValueError(f"{name} must be a list of finite numbers, received {values.tolist()!r}.")
    return tuple(np.trim_zeros(values, "b").tolist())


def _weighted_sum(*terms):
    """Σ weight·tensor over the pairs, in few passes over the memory."""
    return tf.add_n([t if weight == 1 else float(weight) * t for weight, t in terms if weight])


def _inner(a, b):
    """⟨a, b⟩ of two lists of tensors, in float32."""
    pairs = zip(a, b, strict=True)
    return tf.add_n(
        [tf.reduce_sum(tf.cast(x, tf.float32) * tf.cast(y, tf.float32)) for x, y in pairs]
    )


def _average(mean, new, decay):
    return decay * mean + (1 - decay) * new
