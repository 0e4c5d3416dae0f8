"""What tests of statistics share."""

import numpy as np
import pytest

from dp_keras_opt.noise import numbers


@pytest.fixture
def barrier(monkeypatch):
    """What reaches the barrier: (total, mechanism, multiplier, sensitivity); no noise is added."""
    seen = []

    def record(total, *terms):
        seen.append((np.atleast_1d(total), *terms))
        return np.asarray(total)

    monkeypatch.setattr(numbers, "released", record)
    return seen
