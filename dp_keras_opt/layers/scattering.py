"""Scattering: features of pictures by fixed wavelets, which cost no privacy.

Of a picture x, with a low-pass filter φ and wavelets ψ_λ, λ = (scale j, orientation θ):

    S₀ = x ∗ φ,    S₁(λ) = |x ∗ ψ_λ| ∗ φ,    S₂(λ, λ') = ||x ∗ ψ_λ| ∗ ψ_λ'| ∗ φ    for j' > j,

each at every 2^J-th place, J the number of scales. Small deformations change them little, and they
keep what tells textures and shapes apart, so that a linear layer on them does what otherwise takes
the training of a network. Nothing of them is learned: whatever data they see, they release nothing.

References: Bruna and Mallat, "Invariant scattering convolution networks", IEEE TPAMI 35(8), 2013,
arXiv:1203.1513; in private training: Tramèr and Boneh, "Differentially private learning needs
better features (or much more data)", ICLR 2021, arXiv:2011.11660.
"""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dp_keras_opt.checks import whole_number

#: The width of the narrowest filters, in pixels, and how far a wavelet's frequency is from 0.
_WIDTH, _FREQUENCY = 0.8, 0.75 * math.pi
#: A filter wraps around: so many copies of it to either side are added up.
_COPIES = 2


@keras.saving.register_keras_serializable("dp_keras_opt")
class Scattering2D(keras.layers.Layer):
    """The scattering transform of pictures, channel by channel.

    Of 28 × 28 pixels and 2 scales, 8 orientations and both orders, a channel becomes 81 channels of
    7 × 7. It has no weights: there is nothing in it to train, to clip or to leak, and it is saved
    and served as part of the model.

    Output, for inputs (B, height, width, C): (B, ⌊height/2^J⌋, ⌊width/2^J⌋, C·K), K = 1 + J·L, and
    L²·J(J − 1)/2 more of the second order, the K of the first channel first: S₀; S₁ by scale, from
    fine to coarse, and orientation; S₂ by (j, θ, j', θ').

    It works in float32, whatever the policy is.

    Args:
        scales: J, from 1. Of 2^J pixels to either side of a place features know.
        orientations: L, from 1.
        order: 1 or 2, the highest order.

    Raises:
        ValueError: an argument is out of range; height or width are not known, or below 2^J.

    References: see `dp_keras_opt.layers.scattering`.
    """

    def __init__(
        self, scales: int = 2, orientations: int = 8, order: int = 2, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.scales = whole_number(scales, "scales", 1, "Give the number of scales J.")
        self.orientations = whole_number(orientations, "orientations", 1, "Give their number.")
        self.order = whole_number(order, "order", 1, "It is 1 or 2.", maximum=2)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        size = [each for each in input_shape[1:] if each is not None]
        if len(input_shape) != 4 or len(size) < 3:
            raise ValueError(
                f"'{self.name}' needs pictures (height, width, channels) of a known size; received "
                f"{tuple(input_shape[1:])}. Resize them first."
            )
        unit = 2**self.scales
        height, width, _ = size
        if min(height, width) < unit:
            raise ValueError(
                f"'{self.name}' puts {unit} × {unit} pixels together, and pictures have {height} × "
                f"{width}. Choose fewer scales."
            )
        padded = [((each + unit) // unit + 1) * unit for each in (height, width)]
        missing = (padded[0] - height, padded[1] - width)
        self._padding = [(each // 2, each - each // 2) for each in missing]
        self._size = [height // unit, width // unit]
        low_pass, wavelets = filters(padded[0], padded[1], self.scales, self.orientations)
        # Of each filter, as it is at 1/2^k of the resolution, for each k that it is applied at.
        self._low_pass = [folded(low_pass, level) for level in range(self.scales)]
        self._wavelets = [
            [folded(each, level) for level in range(max(scale, 1))]
            for scale, each in enumerate(wavelets)
        ]
        self.built = True

    def call(self, inputs: Any) -> Any:
        pictures = tf.transpose(tf.cast(inputs, tf.float32), (0, 3, 1, 2))
        padded = _reflected(pictures, self._padding)
        spectrum = tf.signal.fft2d(tf.cast(padded, tf.complex64))
        found = [self._smoothed(spectrum, 0)[:, :, None]]
        second = []
        for scale in range(self.scales):
            first = _modulus(spectrum[:, :, None], self._wavelets[scale][0], scale)
            found.append(self._smoothed(first, scale))
            if self.order == 2:
                second += self._second(first, scale)
        if second:
            found.append(tf.concat(second, axis=2) if len(second) > 1 else second[0])
        features = tf.concat(found, axis=2)  # (B, C, K, h, w)
        channels = features.shape[1] * features.shape[2]
        merged = tf.reshape(features, (tf.shape(features)[0], channels, *self._size))
        return tf.cast(tf.transpose(merged, (0, 2, 3, 1)), self.compute_dtype)

    def _second(self, first, scale):
        """S₂ of all orientations of one scale, one by one, with each coarser scale."""
        found = []
        for place in range(self.orientations):
            for coarser in range(scale + 1, self.scales):
                wavelets = self._wavelets[coarser][scale]
                again = _modulus(first[:, :, place, None], wavelets, coarser - scale)
                found.append(self._smoothed(again, coarser))
        return found

    def _smoothed(self, spectrum, level):
        """What a spectrum at 1/2^level of the resolution has at every 2^J-th place."""
        smooth = fold(spectrum * self._low_pass[level], self.scales - level)
        whole = tf.math.real(tf.signal.ifft2d(smooth))
        height, width = self._size
        return whole[..., 1 : 1 + height, 1 : 1 + width]

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        unit = 2**self.scales
        height, width, channels = input_shape[1:]
        return (
            input_shape[0],
            height and height // unit,
            width and width // unit,
            channels and channels * self.channels,
        )

    @property
    def channels(self) -> int:
        """K, how many channels one becomes."""
        pairs = self.scales * (self.scales - 1) // 2 if self.order == 2 else 0
        return 1 + self.scales * self.orientations + pairs * self.orientations**2

    def get_config(self) -> dict[str, Any]:
        own = {"scales": self.scales, "orientations": self.orientations, "order": self.order}
        return super().get_config() | own


def _reflected(pictures, padding):
    """Padded to either side by reflection; edges that are longer than a picture in several goes."""
    for axis, (before, after) in enumerate(padding, 2):
        size = pictures.shape[axis]
        places = np.pad(np.arange(size), (before, after), mode="reflect")
        pictures = tf.gather(pictures, places, axis=axis)
    return pictures


def _modulus(spectrum, wavelets, level):
    """The spectrum of |x ∗ ψ| of each wavelet, at every 2^level-th place."""
    moved = tf.signal.ifft2d(fold(spectrum * wavelets, level))
    return tf.signal.fft2d(tf.cast(tf.abs(moved), tf.complex64))


def fold(spectrum, level):
    """The spectrum of every 2^level-th place: the mean of its parts, which fall on one another."""
    step = 2**level
    if step == 1:
        return spectrum
    *others, height, width = spectrum.shape
    others[0] = tf.shape(spectrum)[0]
    parts = tf.reshape(spectrum, (*others, step, height // step, step, width // step))
    return tf.reduce_mean(parts, axis=(-4, -2))


# The filters, by NumPy.


def filters(height, width, scales, orientations):
    """(φ, [ψ_j of all orientations by scale]): spectra, (h, w) and (L, h, w), float32."""
    low_pass = _spectrum(gaussian(height, width, _WIDTH * 2 ** (scales - 1)))
    wavelets = []
    for scale in range(scales):
        sigma, frequency = _WIDTH * 2**scale, _FREQUENCY / 2**scale
        angles = (orientations // 2 - 1 - np.arange(orientations)) * math.pi
        waves = (
            morlet(height, width, sigma, angle / orientations, frequency, 4 / orientations)
            for angle in angles
        )
        wavelets.append(np.stack([_spectrum(wave) for wave in waves]))
    return low_pass, wavelets


def _spectrum(values):
    """Of what is symmetric about its centre, so that it is real."""
    return np.float32(np.fft.fft2(values).real)


def morlet(height, width, sigma, angle, frequency, slant):
    """A wave in a Gaussian envelope, less what makes its sum 0."""
    wave = gaussian(height, width, sigma, angle, frequency, slant)
    envelope = gaussian(height, width, sigma, angle, 0.0, slant)
    return wave - wave.sum() / envelope.sum() * envelope


def gaussian(height, width, sigma, angle=0.0, frequency=0.0, slant=1.0):
    """A Gaussian of mass 1 at the corner, which wraps around, times a wave.

    Args:
        height, width: of the picture.
        sigma: standard deviation along `angle`; across it, sigma/slant.
        angle: in which the wave goes.
        frequency: of the wave, in radians a pixel.
        slant: see sigma.
    """
    turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    curvature = turn @ np.diag([1, slant**2]) @ turn.T / (2 * sigma**2)
    found = np.zeros((height, width), np.complex128)
    for up in range(-_COPIES, _COPIES + 1):
        for left in range(-_COPIES, _COPIES + 1):
            y, x = np.mgrid[up * height : (up + 1) * height, left * width : (left + 1) * width]
            power = curvature[0, 0] * y**2 + 2 * curvature[0, 1] * y * x + curvature[1, 1] * x**2
            phase = frequency * (y * math.cos(angle) + x * math.sin(angle))
            found += np.exp(-power + 1j * phase)
    return found / (2 * math.pi * sigma**2 / slant)


def folded(spectrum, level):
    """A filter's spectrum at 1/2^level of the resolution: its low frequencies, complex64."""
    spectrum = np.array(spectrum, np.complex128)
    for axis in (-2, -1):
        size = spectrum.shape[axis]
        kept = size // 2**level
        spectrum = np.moveaxis(spectrum, axis, 0)
        spectrum[kept // 2 : kept // 2 + size - kept] = 0  # high frequencies
        spectrum = spectrum.reshape(2**level, kept, *spectrum.shape[1:]).sum(axis=0)
        spectrum = np.moveaxis(spectrum, 0, axis)
    return spectrum.astype(np.complex64)
