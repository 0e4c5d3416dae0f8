"""What filters do to recorded gradients, in NumPy, for plots and notebooks."""

import numpy as np
import numpy.typing as npt
from scipy import signal


def snr(correlation: npt.ArrayLike, kernel: npt.ArrayLike) -> float:
    """Σ_τ c_τκ_τ / Σ_τ κ_τ²: the signal that a filter keeps, over the noise that it lets through.

    Args:
        correlation: c_0 = ½, c_1, …: auto-correlation of the gradients over twice their power.
        kernel: κ_0, κ_1, …, the weights of the past gradients (`LowPass.impulse_response`).
    """
    correlation, kernel = np.asarray(correlation, float), np.asarray(kernel, float)
    length = min(len(correlation), len(kernel))
    return float(correlation[:length] @ kernel[:length] / np.sum(kernel**2))


def autocorrelation(gradients: npt.ArrayLike, lags: int) -> np.ndarray:
    """φ_τ = mean over t of ⟨g_t, g_{t−τ}⟩ for τ = 0, …, lags − 1.

    Args:
        gradients: (steps, weights), recorded gradients. What is computed from raw ones is as
            private as they are.
        lags: how many.
    """
    gradients = np.asarray(gradients, float)
    steps = len(gradients)
    return np.array(
        [np.mean(np.sum(gradients[lag:] * gradients[: steps - lag], axis=1)) for lag in range(lags)]
    )


def power_spectral_density(
    gradients: npt.ArrayLike, segment: int = 256
) -> tuple[np.ndarray, np.ndarray]:
    """How the power of recorded gradients spreads over the frequencies (scipy.signal.welch).

    Args:
        gradients: (steps, weights), as for `autocorrelation`.
        segment: length of the segments that are averaged, in steps.

    Returns:
        (frequencies in cycles per step, density summed over the weights).
    """
    gradients = np.asarray(gradients, float)
    frequencies, density = signal.welch(
        gradients, nperseg=min(segment, len(gradients)), detrend=False, axis=0
    )
    return frequencies, np.sum(density, axis=1)
