"""Whether noise is normal, independent, and of the std that is claimed.

`assert_noise` fails for a correct library in fewer than 4 of 10⁹ calls.
"""

import numpy as np
import pytest
import scipy.stats

FALSE_ALARM = 1e-9


def assert_noise(draws, std):
    """That `draws`, in the order they were made, are independent N(0, std²): four tests of level
    1e-9 each, for the mean, the variance, the shape, and the autocorrelation at all lags.

    The last one finds noise that two variables, two steps or two runs have in common.
    """
    z = np.asarray(draws, np.float64).ravel() / std
    n, bound = len(z), scipy.stats.norm.isf(FALSE_ALARM / 2)
    assert n >= 800, "too few draws to tell 2/3 of the noise from all of it"
    assert abs(z.mean()) * np.sqrt(n) < bound, f"mean {z.mean()}"
    chi2 = scipy.stats.chi2(n)
    within = chi2.ppf(FALSE_ALARM / 2) < np.sum(z**2) < chi2.isf(FALSE_ALARM / 2)
    assert within, f"{np.sqrt(np.mean(z**2))} times the std"
    assert scipy.stats.kstest(z, "norm").pvalue > FALSE_ALARM
    lags = np.arange(1, n - 400)
    spectrum = np.abs(np.fft.rfft(z, 2 * n)) ** 2
    correlation = np.fft.irfft(spectrum)[lags] / np.sqrt(n - lags)
    worst = np.argmax(np.abs(correlation))
    bound = 1.1 * scipy.stats.norm.isf(FALSE_ALARM / 2 / len(lags))  # 1.1: not quite normal
    assert abs(correlation[worst]) < bound, f"repeats after {lags[worst]} draws"


def assert_exactly(draws, std):
    """The noise has this std, and the same test refuses two thirds and one and a half of it."""
    assert_noise(draws, std)
    for wrong in (2 / 3, 1.5):
        with pytest.raises(AssertionError, match="times the std"):
            assert_noise(draws, wrong * std)
