"""Noisy counts of keys that the data themselves name, such as words; the rare stay hidden."""

from __future__ import annotations

from typing import Any

import attr
import dp_accounting
import keras
import numpy as np
from scipy import stats

from dp_keras_opt.checks import is_number
from dp_keras_opt.noise.gaussian import Gaussian


@attr.s(frozen=True, slots=True, auto_attribs=True)
class FailureDpEvent(dp_accounting.DpEvent):
    """Anything may be told, with a probability of at most `delta`; nothing else is: (0, δ)."""

    delta: float


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class ThresholdedGaussian(Gaussian):
    """Gaussian noise on the counts of those keys that are in the data, and a threshold.

    Which keys there are is a secret, too: a word that one person alone uses says who is there. So a
    key is released only where its noisy count reaches `threshold`.

    Formal guarantee: where a unit counts once for each of at most k keys, the release is as private
    as the Gaussian mechanism of sensitivity √k, and a failure with probability δ beside it. Keys
    that others have, too, are in the data with and without the unit, and their counts are answered
    by the Gaussian mechanism. A key that the unit alone has counts 1 and reaches the threshold with
    a probability of at most 1 − (1 − δ)^(1/k), so that with 1 − δ none of up to k such keys does,
    as it would be without the unit.

    Args:
        delta: δ in (0, 1), the probability that a key of one unit alone is released.

    Reference: Korolova, Kenthapadi, Mishra and Ntoulas, "Releasing search queries and clicks
    privately", WWW 2009, doi:10.1145/1526709.1526733 (the threshold); with Gaussian noise: Gopi,
    Gulhane, Kulkarni, Shen, Shokouhi and Yekhanin, "Differentially private set union", ICML 2020,
    arXiv:2002.09745.
    """

    def __init__(self, delta: float) -> None:
        if not (is_number(delta) and 0 < delta < 1):
            raise ValueError(f"delta must be a number in (0, 1); received {delta!r}.")
        self.delta = float(delta)

    def event(self, multiplier: float) -> dp_accounting.DpEvent:
        return dp_accounting.ComposedDpEvent(
            [dp_accounting.GaussianDpEvent(multiplier), FailureDpEvent(self.delta)]
        )

    def threshold(self, noise_std: float, most_keys: int) -> float:
        """The least noisy count that is released.

        Args:
            noise_std: of the noise on a count.
            most_keys: k, how many keys a unit has at most.
        """
        each = -np.expm1(np.log1p(-self.delta) / most_keys)
        return 1 + noise_std * float(stats.norm.isf(each))

    def get_config(self) -> dict[str, Any]:
        return {"delta": self.delta}
