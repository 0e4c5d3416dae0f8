"""A Kalman filter of the gradient, which weakens frequencies of the vector of all weights."""

from __future__ import annotations

import math
from typing import Any

import keras
import tensorflow as tf

from dp_keras_opt.checks import is_number
from dp_keras_opt.optimizers.kalman import DiSK


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class FFTKF(DiSK):
    """`DiSK`, behind a mask on the frequencies of the noisy gradient: F⁻¹(φ ∘ F(g̃_t)) for g̃_t.

    F is the real Fourier transform of the gradients of all d weights, one behind the other, with
    frequencies k = 0, …, K, K = ⌊d/2⌋. Those below the pivot k₀ = ⌊pivot·(K + 1)⌋ pass; from it on,

        φ_k = 1 − suppression·exp(−decay·(k − k₀)/(K − k₀)).

    Of the power of the noise, and of all that is spread as evenly, this takes the share
    (1 − pivot)·(2ρ(1 − e^{−a})/a − ρ²(1 − e^{−2a})/(2a)), ρ = suppression, a = decay (for a = 0,
    (1 − pivot)·(2ρ − ρ²)). What the gradient has at these frequencies is weakened as much: that
    gains something where it has less than its share there. The order of weights in the vector is
    arbitrary, so that its frequencies mean nothing by themselves, and nothing says that the
    gradient's spectrum falls. Where decay > 0, φ is least at k₀ and rises behind it.

    Costs what DiSK does, and two transforms of length d in each step, in float32.

    Args:
        kappa: κ in (0, 1], the weight of what is new. 1 leaves the mask alone.
        gamma: γ > 0, how far ahead of x_t the second gradient is taken; None for (1 − κ)/κ.
        pivot: λ in [0, 1), the share of the frequencies that pass as they are.
        suppression: ρ in [0, 1), what is taken off at the pivot. 0 is `DiSK`.
        decay: a ≥ 0, by how much the exponent of that falls from the pivot to the highest
            frequency. 0 takes off as much of all.

    Raises:
        ValueError: an argument is out of range.

    Guarantee: that of `DiSK`, since the mask is on what has been released. In the paper, as
    summarized, it is on the noise alone: then (of a real transform) a gradient at the frequency k₀
    is as large as before and has noise of (1 − ρ)σC, so that ε is that of the multiplier (1 − ρ)σ.

    Reference: Shin, Jung, Yun and Yun, "Spectral and temporal denoising for differentially private
    optimization", 2025, arXiv:2505.04468v1, of which abstract, introduction and a summary were
    read. There the mask is on d complex frequencies, of which it would leave a complex vector, and
    decay is for each frequency, so that about 1/decay of them are masked however many there are.
    Its formula of the prediction adds gradients that are not clipped; here that is DiSK's.
    """

    def __init__(
        self,
        kappa: float = 0.7,
        gamma: float | None = 0.5,
        pivot: float = 0.5,
        suppression: float = 0.5,
        decay: float = 1.0,
    ) -> None:
        super().__init__(kappa, gamma)
        if not (is_number(pivot) and 0 <= pivot < 1):
            raise ValueError(f"pivot must be in [0, 1), received {pivot!r}.")
        if not (is_number(suppression) and 0 <= suppression < 1):
            raise ValueError(f"suppression must be in [0, 1), received {suppression!r}.")
        if not (is_number(decay) and 0 <= decay < math.inf):
            raise ValueError(f"decay must be at least 0 and finite, received {decay!r}.")
        self.pivot = float(pivot)
        self.suppression = float(suppression)
        self.decay = float(decay)

    def mask(self, size: int) -> tf.Tensor:
        """φ_0, …, φ_K for so many weights, (size // 2 + 1,), in float32."""
        highest = size // 2
        first = min(int(self.pivot * (highest + 1)), highest)  # a pivot near 1 may round up
        above = tf.range(-first, highest - first + 1)  # whole numbers, exact also beyond 2²⁴
        share = tf.cast(above, tf.float32) / max(highest - first, 1)
        taken = self.suppression * tf.exp(-self.decay * tf.maximum(share, 0.0))
        return tf.where(above < 0, 1.0, 1 - taken)

    def __call__(
        self,
        optimizer: keras.optimizers.Optimizer,
        gradients: list[tf.Tensor],
        noise_power: float | tf.Tensor,
    ) -> list[tf.Tensor]:
        if self.suppression:
            gradients = self._masked(gradients)
        return super().__call__(optimizer, gradients, noise_power)

    def _masked(self, gradients):
        """Also of half precision, in float32; back in the types that they have."""
        flat = tf.concat([tf.reshape(tf.cast(g, tf.float32), [-1]) for g in gradients], 0)
        size = flat.shape[0]
        spectrum = tf.signal.rfft(flat) * tf.cast(self.mask(size), tf.complex64)
        masked = tf.signal.irfft(spectrum, [size])
        parts = tf.split(masked, [g.shape.num_elements() for g in gradients])
        return [
            tf.cast(tf.reshape(part, g.shape), g.dtype)
            for part, g in zip(parts, gradients, strict=True)
        ]

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "pivot": self.pivot,
            "suppression": self.suppression,
            "decay": self.decay,
        }

    def __repr__(self):
        arguments = ", ".join(f"{name}={value}" for name, value in self.get_config().items())
        return f"FFTKF({arguments})"
