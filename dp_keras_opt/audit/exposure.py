"""Exposure: how far training has moved an inserted secret up among all that it might have been."""

import numpy as np
import numpy.typing as npt


def exposure(inserted: npt.ArrayLike, candidates: npt.ArrayLike) -> np.ndarray:
    """log₂ of the number of possible secrets, less log₂ of the rank of the one that was inserted.

    The secret's rank is one more than the number of candidates that the model finds no less likely.
    An exposure of k bits is that of somebody who found it among the first 1/2^k of all guesses.

    Of a model that never saw the secret, drawn as the candidates were, the exposure is k or more
    with probability 2^−k at most. No exposure exceeds log₂(candidates + 1): if secrets reach that
    limit, draw more candidates. It is an attack result, and proves no ε.

    Args:
        inserted: (secrets,), the losses of the inserted sequences, as `sequence_losses` gives them.
        candidates: (candidates,), those of other sequences, drawn at random as the secrets were,
            of the same length, none of which was inserted.

    Returns:
        (secrets,), in bits, from 0.

    Raises:
        ValueError: a loss is NaN, there are none, or they are not one-dimensional.

    Reference: Carlini, Liu, Erlingsson, Kos and Song, "The secret sharer: evaluating and testing
    unintended memorization in neural networks", USENIX Security 2019, arXiv:1802.08232.
    """
    inserted, candidates = np.asarray(inserted, float), np.asarray(candidates, float)
    for name, losses in (("inserted", inserted), ("candidates", candidates)):
        if losses.ndim != 1 or not losses.size or np.isnan(losses).any():
            raise ValueError(
                f"{name} must be losses, one per sequence and none of them NaN; received shape "
                f"{losses.shape}."
            )
    ranks = 1 + np.searchsorted(np.sort(candidates), inserted, "right")
    return np.log2(len(candidates) + 1) - np.log2(ranks)
