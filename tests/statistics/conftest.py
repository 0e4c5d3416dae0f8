"""What tests of statistics share."""

import numpy as np
import pytest

from dp_keras_opt.noise import entropy, numbers


@pytest.fixture(autouse=True)
def seeded_noise(monkeypatch):
    """What is drawn is the same in each run of a test: many are of how often something happens."""
    bits = np.random.default_rng(0)
    monkeypatch.setattr(
        entropy, "words", lambda count: bits.integers(-(2**63), 2**63, count, np.int64)
    )
    monkeypatch.setattr(entropy, "numpy_generator", lambda seed=None: np.random.default_rng(bits))


@pytest.fixture
def barrier(monkeypatch):
    """What reaches the barrier: (total, mechanism, multiplier, sensitivity); no noise is added."""
    seen = []

    def record(total, *terms):
        seen.append((np.atleast_1d(total), *terms))
        return np.asarray(total)

    monkeypatch.setattr(numbers, "released", record)
    return seen
