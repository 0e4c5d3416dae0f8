"""What it changes that a step sees m of n examples, drawn without replacement.

Reference: Kuru, Birbil, Gürbüzbalaban and Yıldırım, "Differentially private
accelerated optimization algorithms", SIAM Journal on Optimization 32(2), 2022,
doi:10.1137/20M1355847, arXiv:2008.01989; equations are numbered
as in the journal.
"""

import numpy as np

from dp_keras_opt.theory.arguments import check_batch, check_positive


def sampling_variance(sensitivity: float, batch_size: int, num_examples: int) -> float:
    """σ_s² = (S_1²/4)·(1/m)·(n − m)/(n − 1), bounds E‖batch gradient − full gradient‖² (3.13).

    Args:
        sensitivity: S_1, the largest L1 distance of the gradients of two examples.
        batch_size: m, drawn without replacement.
        num_examples: n.

    Raises:
        ValueError: unless 1 ≤ m ≤ n.
    """
    check_batch(batch_size, num_examples)
    if batch_size == num_examples:
        return 0.0
    left = (num_examples - batch_size) / (num_examples - 1)
    return sensitivity**2 / 4 / batch_size * left


def laplace_scale(
    epsilon_step: float | np.ndarray, sensitivity: float, batch_size: int, num_examples: int
) -> float | np.ndarray:
    """b of the Laplace noise on the mean over m examples: S_1/(m·ln(1 + (e^ε − 1)·n/m)) (3.4).

    Args:
        epsilon_step: ε of one step, a number or an array.
        sensitivity: S_1, the largest L1 distance of the gradients of two examples: 2C when they are
            clipped to the L1 norm C and one may be replaced.
        batch_size: m, drawn without replacement.
        num_examples: n.

    Raises:
        ValueError: an ε or S_1 is not positive, or not 1 ≤ m ≤ n.
    """
    check_batch(batch_size, num_examples)
    check_positive("epsilon_step", epsilon_step)
    check_positive("sensitivity", sensitivity)
    return sensitivity / (batch_size * amplified(epsilon_step, num_examples / batch_size))


def laplace_epsilon(
    scale: float | np.ndarray, sensitivity: float, batch_size: int, num_examples: int
) -> float | np.ndarray:
    """ε of one step with Laplace noise of scale b: ln(1 + (m/n)(e^{S_1/(bm)} − 1)) (3.3).

    The inverse of `laplace_scale`. Pure ε adds up over the steps.

    Args:
        scale: b, a number or an array.
        sensitivity, batch_size, num_examples: as for `laplace_scale`.

    Raises:
        ValueError: b or S_1 is not positive, or not 1 ≤ m ≤ n.
    """
    check_batch(batch_size, num_examples)
    check_positive("scale", scale)
    check_positive("sensitivity", sensitivity)
    within = sensitivity / (np.asarray(scale) * batch_size)
    return amplified(within, batch_size / num_examples)


def amplified(epsilon: float | np.ndarray, rate: float) -> float | np.ndarray:
    """ln(1 + q(e^ε − 1)), the pure ε of a release from a sample of the rate q; of 1/q, its inverse.

    Reference: Balle, Barthe and Gaboardi, "Privacy amplification by subsampling: tight analyses via
    couplings and divergences", NeurIPS 2018, arXiv:1807.01647, Theorems 8 and 9.
    """
    with np.errstate(over="ignore"):
        growth = rate * np.expm1(epsilon)
    # Beyond the range of floats, ln(1 + q(eᵉ − 1)) is ε + ln q.
    return np.where(np.isfinite(growth), np.log1p(growth), epsilon + np.log(rate))[()]
