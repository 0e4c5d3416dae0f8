"""The ADP-SGD paper's own accounting, to compare with: the library's accountants are far tighter.

`examples/papers/adp.py` sets it beside them.

Reference: Wu, Wang, Cristali, Gu and Willett, "Adaptive differentially private empirical risk
minimization", 2021, arXiv:2110.07435.
"""

import math
from collections.abc import Sequence

import numpy as np


def advanced_composition(
    epsilons: Sequence[float] | np.ndarray,
    deltas: float | Sequence[float] | np.ndarray,
    slack: float,
) -> tuple[float, float]:
    """The guarantee of mechanisms that are (ε_i, δ_i)-private each (Lemma 2.2).

    ε = √(2·ln(1/δ')·Σε_i²) + Σ ε_i(e^{ε_i} − 1)/(e^{ε_i} + 1),  δ = 1 − Π(1 − δ_i) + δ'.

    For comparison with papers that account this way.

    Args:
        epsilons: ε_i in (0, 1).
        deltas: δ_i in [0, 1), one each, or one number for all.
        slack: δ' in (0, 1).

    Returns:
        (ε, δ).

    Raises:
        ValueError: a number is out of its range.

    Reference: Kairouz, Oh and Viswanath, "The composition theorem for differential privacy",
    ICML 2015, arXiv:1311.0776, theorem 3.5, as restated in the ADP-SGD paper, lemma 2.2.
    """
    epsilons = np.asarray(epsilons, np.float64)
    deltas = np.broadcast_to(np.asarray(deltas, np.float64), epsilons.shape)
    if not np.all((epsilons > 0) & (epsilons < 1)):
        raise ValueError("epsilons must be in (0, 1): the lemma is for small ones.")
    if not np.all((deltas >= 0) & (deltas < 1)) or not 0 < slack < 1:
        raise ValueError("deltas must be in [0, 1), and slack in (0, 1).")
    epsilon = math.sqrt(2 * math.log(1 / slack) * np.sum(epsilons**2))
    epsilon += np.sum(epsilons * np.tanh(epsilons / 2))
    return float(epsilon), float(-np.expm1(np.sum(np.log1p(-deltas))) + slack)


def adp_noise_multiplier(
    epsilon: float,
    delta: float,
    num_examples: int,
    batch_size: int,
    alphas: Sequence[float] | np.ndarray,
) -> float:
    """The noise multiplier that Theorem 4.1 of the ADP-SGD paper asks for, α_t aside.

    σ = (16·m/(n·ε))·√(ln(16T/(nδ))·ln(1.25/δ)·Σ1/α_t²), the noise of the mean over m examples in
    units of C/m. For comparison: `calibrate` finds a far smaller one. The paper reports ε/16.

    Args:
        epsilon, delta: the budget.
        num_examples: n.
        batch_size: m.
        alphas: α_1, …, α_T.

    Raises:
        ValueError: an argument is not positive, or T/(nδ) is so small that the bound is void.
    """
    alphas = np.asarray(alphas, np.float64)
    inside = 16 * len(alphas) / (num_examples * delta)
    if min(epsilon, delta, num_examples, batch_size, *alphas) <= 0 or inside <= 1 or delta >= 1:
        raise ValueError("All arguments must be positive, delta < 1 and 16T/(n·delta) > 1.")
    constant = math.log(inside) * math.log(1.25 / delta)
    return float(
        16 * batch_size / (num_examples * epsilon) * math.sqrt(constant * np.sum(alphas**-2.0))
    )
