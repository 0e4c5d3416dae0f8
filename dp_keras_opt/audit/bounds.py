"""What right and wrong guesses of a secret prove about ε."""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from scipy import optimize, special, stats


def one_run_p_value(
    canaries: int, guesses: int, correct: int, epsilon: float, delta: float
) -> float:
    """The largest probability of this many right guesses, if a training is (ε, δ)-private.

    Each guess of a coin is right with probability q = e^ε/(1 + e^ε) at most, whatever the others
    are, but for failures of the guarantee: the number of right guesses is dominated by W + F, with
    W ~ Binomial(r, q) and a number F of guesses that failures give away, E[F] ≤ 2mδ. The worst such
    F is 0 or one number i, which gives

        P[correct ≥ v] ≤ P[W ≥ v] + 2mδ · max_i P[v − i ≤ W < v]/i.

    Args:
        canaries: m, each in the data by a fair coin of its own.
        guesses: r ≤ m, for how many canaries a guess was made. How many is fixed in advance; which
            they are may depend on what the training released.
        correct: v ≤ r, how many guesses were right.
        epsilon, delta: the hypothesis.

    Reference: Steinke, Nasr and Jagielski, "Privacy auditing with one (1) training run", NeurIPS
    2023, arXiv:2305.08846, Theorem 5.2 of version 1.
    """
    if not 0 <= correct <= guesses <= canaries:
        raise ValueError(
            f"0 <= correct <= guesses <= canaries must hold; received {correct}, {guesses}, "
            f"{canaries}."
        )
    w = stats.binom(guesses, 1 / (1 + math.exp(-epsilon)))
    given_away = np.arange(1, correct + 1)
    reach = np.cumsum(w.pmf(correct - given_away))  # P[v − i ≤ W < v]
    gain = np.max(reach / given_away, initial=0.0)
    return float(min(1.0, w.sf(correct - 1) + 2 * canaries * delta * gain))


def one_run_bound(
    canaries: int, guesses: int, correct: int, delta: float, confidence: float = 0.95
) -> float:
    """The largest ε that this many right guesses refute at this confidence; 0 if they refute none.

    Args: see `one_run_p_value`.
    """

    def excess(epsilon):
        return one_run_p_value(canaries, guesses, correct, epsilon, delta) - (1 - confidence)

    if excess(0.0) >= 0:
        return 0.0
    high, tolerance = 1.0, 1e-6
    while excess(high) < 0:
        high *= 2
    return max(0.0, optimize.brentq(excess, 0.0, high, xtol=tolerance) - tolerance)


def many_run_bound(
    false_positives: int | np.ndarray,
    without: int,
    false_negatives: int | np.ndarray,
    with_: int,
    delta: float,
    confidence: float = 0.95,
) -> float | np.ndarray:
    """A lower bound on ε from the errors of a test that was fixed before these runs.

    An (ε, δ)-private training lets no test have 1 − FNR > e^ε·FPR + δ or 1 − FPR > e^ε·FNR + δ.
    Both error rates are bounded from above by Clopper and Pearson, each with half of what
    `confidence` leaves.

    Args:
        false_positives: how many of the `without` runs without the canary were taken for runs with
            it; a number, or an array of them.
        false_negatives: how many of the `with_` runs with it were taken for runs without.
        delta: δ.
        confidence: that the bound holds.

    Reference: Kairouz, Oh and Viswanath, "The composition theorem for differential privacy", ICML
    2015, arXiv:1311.0776.
    """
    fpr, fnr = _error_rates(false_positives, without, false_negatives, with_, confidence)
    advantage = np.maximum(
        np.maximum(1 - delta - fnr, 0) / fpr, np.maximum(1 - delta - fpr, 0) / fnr
    )
    return np.log(np.maximum(advantage, 1.0))


def many_run_mu_bound(
    false_positives: int | np.ndarray,
    without: int,
    false_negatives: int | np.ndarray,
    with_: int,
    confidence: float = 0.95,
) -> float | np.ndarray:
    """A lower bound on μ of Gaussian differential privacy from the errors of such a test.

    A μ-Gaussian private training lets no test have Φ⁻¹(1 − FPR) − Φ⁻¹(FNR) > μ. What that proves of
    ε, and of what, is said at `gaussian_mu_bound`.

    Args: see `many_run_bound`.

    Reference: Dong, Roth and Su, "Gaussian differential privacy", Journal of the Royal Statistical
    Society B 84(1), 2022, arXiv:1905.02383.
    """
    fpr, fnr = _error_rates(false_positives, without, false_negatives, with_, confidence)
    with np.errstate(invalid="ignore"):  # an error rate that may be 1 proves nothing
        return np.nan_to_num(np.maximum(-special.ndtri(fpr) - special.ndtri(fnr), 0.0))


def many_run_excess(
    false_positives: int,
    without: int,
    false_negatives: int,
    with_: int,
    true_positive_rate: Callable[[float], float],
    confidence: float = 0.95,
) -> float:
    """How far such a test lies above a bound on true-positive rates, at least: above 0 refutes it.

    Args:
        true_positive_rate: what bounds it at a false-positive rate, whichever of the two kinds of
            runs is called positive, such as that of a `Risk`.

    See `many_run_bound` for the others.
    """
    fpr, fnr = _error_rates(false_positives, without, false_negatives, with_, confidence)
    rates = ((float(fpr), float(fnr)), (float(fnr), float(fpr)))
    return max(1 - missed - true_positive_rate(false) for false, missed in rates)


def _error_rates(false_positives, without, false_negatives, with_, confidence):
    """Upper bounds on both error rates, which hold together at this confidence."""
    share = (1 - confidence) / 2
    return (
        _clopper_pearson(np.asarray(false_positives), without, share),
        _clopper_pearson(np.asarray(false_negatives), with_, share),
    )


def _clopper_pearson(errors, runs, share):
    """An upper bound on an error rate, wrong with probability `share` at most."""
    return np.where(errors < runs, stats.beta.ppf(1 - share, errors + 1, runs - errors), 1.0)


def membership_auc(members: npt.ArrayLike, others: npt.ArrayLike) -> float:
    """The chance that a member's score is above that of another, ties counting half."""
    members, others = np.ravel(members), np.ravel(others)
    if not len(members) or not len(others):
        return 0.5
    above = stats.mannwhitneyu(members, others).statistic
    return float(above / (len(members) * len(others)))
