"""What right and wrong guesses of a secret prove about a whole trade-off curve (f-DP)."""

import math
from collections.abc import Callable
from typing import TypeAlias

import dp_accounting
import numpy as np
import numpy.typing as npt
from scipy import optimize
from scipy.special import ndtr, ndtri

from dp_keras_opt.accounting.trade_off import of_pairs

#: From a false-positive rate to the least false-negative rate that any attack has there.
TradeOff: TypeAlias = Callable[[float], float]


def trade_off_p_value(canaries: int, guesses: int, correct: int, trade_off: TradeOff) -> float:
    """The largest probability of this many right guesses, if a training is f-private.

    Let w_i be the probability that i guesses are right. For each i, f-privacy bounds how often a
    guess is right while at least i are, by how often one is wrong while at least i − 1 are:

        Σ_{l ≥ i−1} (r − l)/m · w_l  ≥  f(1 − Σ_{l ≥ i} l/m · w_l).

    Among the w with P[correct ≥ v] = p, the one with all of p at v and with equality below v needs
    the least probability in total. The p-value is the p for which it needs 1.

    Guarantee: under the hypothesis, the p-value is below α with probability α at most, however the
    guesses were chosen from what was released. A small p-value refutes *this curve*, and with it
    each claim from which the curve follows; it refutes no (ε, δ) that allows other curves.

    Args:
        canaries: m, each in the data by a fair coin of its own.
        guesses: r ≤ m, for how many canaries a guess was made. How many is fixed in advance; which
            they are may depend on what the training released.
        correct: v ≤ r, how many guesses were right.
        trade_off: f, the hypothesis: in no direction, from present to absent or back, has a test
            with false-positive rate x a false-negative rate below f(x). Convex and not increasing,
            with 0 ≤ f(x) ≤ 1 − x; see `gaussian_trade_off` and `trade_off_of`.

    Raises:
        ValueError: the numbers contradict one another, or `trade_off` is no trade-off function.

    Reference: Mahloujifar, Melis and Chaudhuri, "Auditing f-differential privacy in one run", ICML
    2025, arXiv:2410.22235.
    """
    _check(canaries, guesses, correct)
    _check_trade_off(trade_off)

    def excess(probability):
        return _least_total(canaries, guesses, correct, trade_off, probability) - 1

    if not correct or excess(1.0) <= 0:
        return 1.0
    tolerance = 1e-12
    return float(min(1.0, optimize.brentq(excess, 0.0, 1.0, xtol=tolerance) + tolerance))


def gaussian_mu_bound(canaries: int, guesses: int, correct: int, confidence: float = 0.95) -> float:
    """The largest μ of Gaussian differential privacy that this many right guesses refute.

    Guarantee: with probability `confidence`, the training is μ-Gaussian DP for no smaller μ. A
    training whose trade-off curve is that of a Gaussian, such as DP-SGD on full batches, has then
    at least `gaussian_epsilon(μ, δ)`. Of other curves the bound proves no ε: they may lie below the
    Gaussian one where the guesses are made, and above it where δ is small.

    Args: see `trade_off_p_value`.

    Returns:
        μ; 0 if none is refuted.
    """
    _check(canaries, guesses, correct)

    def excess(mu):
        hypothesis = gaussian_trade_off(mu)
        return _least_total(canaries, guesses, correct, hypothesis, 1 - confidence) - 1

    if excess(0.0) <= 0:
        return 0.0
    high, tolerance = 1.0, 1e-6
    while excess(high) > 0:
        high *= 2
    return max(0.0, optimize.brentq(excess, 0.0, high, xtol=tolerance) - tolerance)


def gaussian_trade_off(mu: float) -> TradeOff:
    """Φ(Φ⁻¹(1 − x) − μ), the trade-off of μ-Gaussian DP: of N(0, 1) against N(μ, 1).

    Reference: Dong, Roth and Su, "Gaussian differential privacy", Journal of the Royal Statistical
    Society B 84(1), 2022, arXiv:1905.02383.
    """
    return lambda x: float(ndtr(ndtri(1 - x) - mu))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """ε at δ of a training whose trade-off curve is that of μ-Gaussian DP; infinite at δ = 0."""
    if mu == 0:
        return 0.0
    return float(dp_accounting.get_epsilon_gaussian(1 / mu, delta)) if delta else math.inf


def trade_off_of(epsilons: npt.ArrayLike, deltas: npt.ArrayLike) -> TradeOff:
    """The trade-off that follows from (ε, δ)-privacy at several δ, as of a ledger.

    The largest of the lines 1 − δ − e^ε·x and e^−ε·(1 − δ − x), and 0. More pairs make it higher;
    any number of true ones is a true bound.

    Args:
        epsilons, deltas: arrays of the same length: `[ledger.epsilon(d) for d in deltas]`. ε may be
            infinite, which says nothing.

    Reference: Dong, Roth and Su, "Gaussian differential privacy", Journal of the Royal Statistical
    Society B 84(1), 2022, arXiv:1905.02383.
    """
    epsilons, deltas = np.broadcast_arrays(*np.atleast_1d(epsilons, deltas))
    epsilons, deltas = np.asarray(epsilons, np.float64), np.asarray(deltas, np.float64)
    if not (np.all(epsilons >= 0) and np.all((deltas >= 0) & (deltas <= 1))):
        raise ValueError("Each ε must be at least 0, and each δ from 0 to 1.")
    highest = of_pairs(zip(epsilons, deltas, strict=True))
    return lambda x: 1 - float(highest(x))


def _least_total(m, r, v, trade_off, probability):
    """The least total probability of a number of right guesses that has this much at v or above."""
    right, wrong = probability * v / m, probability * (r - v) / m
    for i in range(v - 1, -1, -1):
        needed = trade_off(1 - right)
        if needed <= wrong or right + wrong > r / m:
            break  # nothing changes below, or it is too much already
        right, wrong = right + i / (r - i) * (needed - wrong), needed
        right = min(right, 1.0)
    return (right + wrong) * m / r


def _check(canaries, guesses, correct):
    if not 0 <= correct <= guesses <= canaries or not guesses:
        raise ValueError(
            f"0 <= correct <= guesses <= canaries and guesses > 0 must hold; received {correct}, "
            f"{guesses}, {canaries}."
        )


def _check_trade_off(trade_off):
    """That it is convex, on a grid: else averages over the canaries would not obey it."""
    x = np.linspace(0, 1, 257)
    values = np.array([trade_off(float(each)) for each in x])
    slack = 1e-9
    inside = np.all(values >= -slack) and np.all(values <= 1 - x + slack)
    if not (inside and np.all(np.diff(values) <= slack) and np.all(np.diff(values, 2) >= -slack)):
        raise ValueError(
            "A trade-off function is convex, does not increase, and lies between 0 and 1 − x. The "
            "smaller of two is not convex: take the larger δ of both directions at each ε instead "
            "(trade_off_of)."
        )
