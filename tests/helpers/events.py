"""Marks of tests that need an event which old releases of dp_accounting do not have."""

import dp_accounting
import pytest

HAS_MIXTURES = hasattr(dp_accounting.dp_event, "MixtureOfGaussiansDpEvent")
HAS_TRUNCATION = hasattr(dp_accounting, "TruncatedSubsampledGaussianDpEvent")
_REASON = "this version of dp_accounting has no event for it"

needs_mixtures = pytest.mark.skipif(not HAS_MIXTURES, reason=_REASON)
needs_truncation = pytest.mark.skipif(not HAS_TRUNCATION, reason=_REASON)
